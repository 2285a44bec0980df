// Draws one token from one row of logits and scores it: "Logits and sampling" of docs/NUMERICS.md, to the bit.
//
// A variant source. Knows no requests and no threads. Filters keep a prefix of the order (logit descending, id
// ascending), so two numbers describe what is left: see Prefix. Work is skipped only where it cannot change a bit.
#include "sampling.h"

#include "elementary.h"

namespace poise {
namespace POISE_NS {
namespace {

constexpr float INF = __builtin_inff();
constexpr float GREEDY_BELOW = 1e-5f;
constexpr int BLOCK = 64;  // tokens of one vector Philox evaluation
constexpr int NONE = -1;
enum Stream : uint32_t { TOKENS = 0, ACCEPTANCE = 1, RESIDUAL = 2 };

// Keeps a token iff its logit is above `z`, or equal and its id is at most `last_id`.
struct Prefix {
    float z;
    int32_t last_id;
};
constexpr Prefix EVERYTHING = {-INF, NONE};  // of what is not −Inf

inline F32 load_at(const float* p, int i, int n) {
    return n - i >= LANES ? load(p + i) : load_partial(p + i, n - i, -INF);
}
inline void store_at(float* p, F32 x, int i, int n) {
    if (n - i >= LANES) store(p + i, x);
    else store_partial(p + i, x, n - i);
}
inline uint32_t first_lanes(int count) {
    return count <= 0 ? 0 : count >= LANES ? 0xffffu : (1u << count) - 1;
}
inline uint32_t kept_lanes(F32 x, Prefix kept, int i) {
    const uint32_t above = mask_bits(greater(x, set1(kept.z)));
    const uint32_t ties = kept.last_id < i ? 0 : first_lanes(kept.last_id - i < LANES ? kept.last_id - i + 1 : LANES);
    return ties ? above | (mask_bits(equal(x, set1(kept.z))) & ties) : above;
}
inline int take_lowest(uint32_t& lanes) {
    const int lane = __builtin_ctz(lanes);
    lanes &= lanes - 1;
    return lane;
}
inline float log1(float x) { return lane0(log(set1(x))); }

// The largest logit; false where a NaN or +Inf is among them.
bool largest_finite(const float* z, int vocab, float& top) {
    F32 m = set1(-INF);
    I32 bad = set1_i(0);
    for (int i = 0; i < vocab; i += LANES) {
        const F32 x = load_at(z, i, vocab);
        bad = select_i(less(x, set1(INF)), bad, set1_i(1));
        m = maximum(x, m);
    }
    top = fold_max(m);
    return mask_bits(equal_i(bad, set1_i(0))) == 0xffffu;
}

float largest(const float* z, int vocab) {
    F32 m = set1(-INF);
    for (int i = 0; i < vocab; i += LANES) m = maximum(load_at(z, i, vocab), m);
    return fold_max(m);
}

int first_equal(const float* z, int vocab, float value) {
    for (int i = 0; i < vocab; i += LANES) {
        const uint32_t lanes = mask_bits(equal(load_at(z, i, vocab), set1(value)));
        if (lanes) return i + __builtin_ctz(lanes);
    }
    return NONE;
}

// ---- from raw logits to the logits that are drawn from

void copy_allowed(const float* logits, int vocab, const uint32_t* allowed, float* z) {
    for (int i = 0; i < vocab; i += LANES) {
        F32 x = load_at(logits, i, vocab);
        if (allowed) x = select(mask_from_bits((allowed[i / 32] >> (i % 32)) & 0xffffu), x, set1(-INF));
        store_at(z, x, i, vocab);
    }
}

inline bool inside(int32_t id, int vocab) { return (uint32_t)id < (uint32_t)vocab; }

// Each distinct token of the history is changed once; walking the lists again leaves `counts` all zero.
void apply_penalties(const SamplingRow& row, int vocab, float* z, int32_t* counts) {
    constexpr int32_t PROMPT_ONLY = -1;
    const int32_t* output = (const int32_t*)(uintptr_t)row.output_tokens;
    const int32_t* prompt = (const int32_t*)(uintptr_t)row.prompt_tokens;
    const float r = row.repetition_penalty;
    const int num_prompt = r != 1.0f ? row.num_prompt_tokens : 0;
    for (int i = 0; i < row.num_output_tokens; i++)
        if (inside(output[i], vocab)) counts[output[i]]++;
    for (int i = 0; i < num_prompt; i++)
        if (inside(prompt[i], vocab) && counts[prompt[i]] == 0) counts[prompt[i]] = PROMPT_ONLY;
    const int32_t* lists[2] = {output, prompt};
    const int lengths[2] = {row.num_output_tokens, num_prompt};
    for (int list = 0; list < 2; list++) {
        for (int i = 0; i < lengths[list]; i++) {
            const int32_t id = lists[list][i];
            if (!inside(id, vocab) || counts[id] == 0) continue;
            float x = z[id] > 0.0f ? z[id] / r : z[id] * r;
            if (counts[id] > 0) {
                x = lane0(fma(set1(-row.frequency_penalty), set1((float)counts[id]), set1(x)));
                x = x - row.presence_penalty;
            }
            z[id] = x;
            counts[id] = 0;
        }
    }
}

bool has_penalties(const SamplingRow& row) {
    return row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
}

// The logits after every step up to temperature: `logits` itself where nothing changes them, else in scratch.
const float* processed(const float* logits, int vocab, const SamplingRow& row, const SamplingScratch& s) {
    const bool divides = row.temperature >= GREEDY_BELOW && row.temperature != 1.0f;
    const bool edits = row.allowed_mask || row.num_banned || row.num_bias || has_penalties(row);
    if (!divides && !edits) return logits;
    if (edits) {
        copy_allowed(logits, vocab, (const uint32_t*)(uintptr_t)row.allowed_mask, s.z);
        const int32_t* banned = (const int32_t*)(uintptr_t)row.banned_ids;
        for (int i = 0; i < row.num_banned; i++)
            if (inside(banned[i], vocab)) s.z[banned[i]] = -INF;
        const int32_t* ids = (const int32_t*)(uintptr_t)row.bias_ids;
        const float* values = (const float*)(uintptr_t)row.bias_values;
        for (int i = 0; i < row.num_bias; i++)
            if (inside(ids[i], vocab)) s.z[ids[i]] = s.z[ids[i]] + values[i];
        if (has_penalties(row)) apply_penalties(row, vocab, s.z, s.counts);
        logits = s.z;
    }
    if (divides) {
        const F32 t = set1(row.temperature);
        for (int i = 0; i < vocab; i += LANES) store_at(s.z, load_at(logits, i, vocab) / t, i, vocab);
    }
    return s.z;
}

// ---- filters

// Stable, by key ascending; entries arrive by id ascending. The result is in s.entries.
void sort_entries(SamplingScratch& s, int n) {
    if (n <= 40) {
        for (int i = 1; i < n; i++) {
            const SortEntry e = s.entries[i];
            int j = i;
            for (; j && s.entries[j - 1].key > e.key; j--) s.entries[j] = s.entries[j - 1];
            s.entries[j] = e;
        }
        return;
    }
    constexpr int DIGIT = 11, VALUES = 1 << DIGIT;
    uint32_t counts[3][VALUES] = {};
    for (int i = 0; i < n; i++)
        for (int pass = 0; pass < 3; pass++) counts[pass][(s.entries[i].key >> (pass * DIGIT)) % VALUES]++;
    for (int pass = 0; pass < 3; pass++) {
        uint32_t* start = counts[pass];
        const int shift = pass * DIGIT;
        if (start[(s.entries[0].key >> shift) % VALUES] == (uint32_t)n) continue;  // one value: in order already
        uint32_t sum = 0;
        for (int d = 0; d < VALUES; d++) {
            const uint32_t count = start[d];
            start[d] = sum;
            sum += count;
        }
        for (int i = 0; i < n; i++) s.spare[start[(s.entries[i].key >> shift) % VALUES]++] = s.entries[i];
        SortEntry* swap = s.entries;
        s.entries = s.spare;
        s.spare = swap;
    }
}

inline uint32_t descending_key(float x) {
    x = x + 0.0f;  // −0 and denormals equal +0
    uint32_t u;
    memcpy(&u, &x, 4);
    return u & 0x80000000u ? u : ~u & 0x7fffffffu;
}

// Bins by distance below the top, NUM_BINS to a window; a token further away is in no bin.
struct Bins {
    float top, scale;
    F32 distance(F32 x) const { return (set1(top) - x) * set1(scale); }
};

// Counts the kept tokens of each bin; returns how many are in the window.
int count_bins(const float* z, int vocab, Prefix kept, Bins bins, uint32_t* histogram) {
    memset(histogram, 0, NUM_BINS * sizeof(uint32_t));
    int inside_window = 0;
    for (int i = 0; i < vocab; i += LANES) {
        const F32 x = load_at(z, i, vocab), d = bins.distance(x);
        uint32_t lanes = kept_lanes(x, kept, i) & mask_bits(less(d, set1((float)NUM_BINS)));
        if (!lanes) continue;
        int32_t bin[LANES];
        store_i(bin, to_int(rint(d - set1(0.5f))));
        inside_window += __builtin_popcount(lanes);
        while (lanes) {
            const int b = bin[take_lowest(lanes)];
            histogram[b < 0 ? 0 : b < NUM_BINS ? b : NUM_BINS - 1]++;
        }
    }
    return inside_window;
}

// Sorts the kept tokens of distance ≤ `cut` bins (all of them if cut is +Inf) into s.entries; returns their number.
int collect_sorted(const float* z, int vocab, Prefix kept, Bins bins, float cut, SamplingScratch& s) {
    int n = 0;
    for (int i = 0; i < vocab; i += LANES) {
        const F32 x = load_at(z, i, vocab);
        uint32_t lanes = kept_lanes(x, kept, i);
        if (cut < INF) lanes &= mask_bits(greater_equal(set1(cut), bins.distance(x)));
        while (lanes) {
            const int id = i + take_lowest(lanes);
            s.entries[n++] = {descending_key(z[id]), id};
        }
    }
    sort_entries(s, n);
    return n;
}

int count_kept(const float* z, int vocab, Prefix kept) {
    int n = 0;
    for (int i = 0; i < vocab; i += LANES) n += __builtin_popcount(kept_lanes(load_at(z, i, vocab), kept, i));
    return n;
}

// The k best of more than k kept tokens, sorted, in s.entries[0 … k−1].
void select_top_k(const float* z, int vocab, float top, Prefix kept, int k, SamplingScratch& s) {
    float cut = INF;
    Bins bins = {top, 0.0f};
    for (float window = 32.0f; top < INF && cut == INF && window < 1e6f; window *= 16.0f) {
        bins.scale = (float)NUM_BINS / window;
        if (count_bins(z, vocab, kept, bins, s.histogram) < k) continue;
        int seen = 0, b = 0;
        while ((seen += (int)s.histogram[b]) < k) b++;
        cut = (float)(b + 1);
    }
    collect_sorted(z, vocab, kept, bins, cut, s);
}

float kept_mass(const float* z, int vocab, float top, Prefix kept) {
    return row_sum(vocab, [=](int i, int, F32 lane) {
        const F32 x = load_at(z, i, vocab);
        const uint32_t lanes = kept_lanes(x, kept, i);
        return lanes ? lane + select(mask_from_bits(lanes), exp(x - set1(top)), zero()) : lane;
    });
}

// The walk of top-p over n sorted entries: how many are kept, or n + 1 if `enough` is not reached.
int walk_top_p(const float* z, float top, float enough, const SortEntry* entries, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n; i += LANES) {
        float e[LANES];
        for (int j = 0; j < LANES; j++) e[j] = i + j < n ? z[entries[i + j].id] : -INF;
        store(e, exp(load(e) - set1(top)));
        for (int j = 0; j < LANES && i + j < n; j++) {
            sum = sum + e[j];
            if (sum >= enough) return i + j + 1;
        }
    }
    return n + 1;
}

// The first bin by which the tokens above it weigh about `enough`: a guess that the walk then checks.
int guess_cut(const uint32_t* histogram, float scale, float enough) {
    float sum = 0.0f;
    for (int b = 0; b < NUM_BINS; b += LANES) {
        float weight[LANES];
        for (int j = 0; j < LANES; j++) weight[j] = -((float)(b + j) + 0.5f) / scale;
        store(weight, exp(load(weight)));
        for (int j = 0; j < LANES; j++) {
            sum = sum + weight[j] * (float)histogram[b + j];
            if (sum >= enough) return b + j;
        }
    }
    return NUM_BINS - 1;
}

Prefix prefix_ending(const float* z, const SortEntry& last) { return {z[last.id], last.id}; }

Prefix top_p_of_all(const float* z, int vocab, float top, Prefix kept, float enough, SamplingScratch& s) {
    constexpr float WINDOW = 24.0f;
    const Bins bins = {top, (float)NUM_BINS / WINDOW};
    count_bins(z, vocab, kept, bins, s.histogram);
    float cut = (float)guess_cut(s.histogram, bins.scale, enough) + 2.0f;
    for (;;) {
        const int n = collect_sorted(z, vocab, kept, bins, cut, s);
        const int num_kept = walk_top_p(z, top, enough, s.entries, n);
        if (num_kept <= n) return prefix_ending(z, s.entries[num_kept - 1]);
        if (cut == INF) return kept;
        cut = cut < NUM_BINS / 2 ? cut * 1.25f + 16.0f : INF;
    }
}

// min-p, top-k, top-p. A +Inf among the logits (an overflow) makes every top-p sum NaN, which stops no walk.
Prefix filtered(const float* z, int vocab, float top, const SamplingRow& row, SamplingScratch& s) {
    Prefix kept = EVERYTHING;
    if (row.min_p > 0.0f) kept = {top + log1(row.min_p), INT32_MAX};
    const bool uses_top_p = row.top_p < 1.0f && top < INF;
    if (row.top_k > 0 && row.top_k < vocab && count_kept(z, vocab, kept) > row.top_k) {
        select_top_k(z, vocab, top, kept, row.top_k, s);
        kept = prefix_ending(z, s.entries[row.top_k - 1]);
        if (!uses_top_p) return kept;
        const float enough = row.top_p * kept_mass(z, vocab, top, kept);
        const int num_kept = walk_top_p(z, top, enough, s.entries, row.top_k);
        return num_kept <= row.top_k ? prefix_ending(z, s.entries[num_kept - 1]) : kept;
    }
    if (!uses_top_p) return kept;
    return top_p_of_all(z, vocab, top, kept, row.top_p * kept_mass(z, vocab, top, kept), s);
}

// ---- the draw

// Philox4x32-10 (Salmon et al., SC 2011): lane j is counter (block + j, position, choice, stream).
void philox(uint64_t seed, uint32_t block, uint32_t position, uint32_t choice, uint32_t stream, I32 words[4]) {
    static const int32_t LANE[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const I32 m0 = set1_i((int32_t)0xD2511F53u), m1 = set1_i((int32_t)0xCD9E8D57u);
    I32 c0 = set1_i((int32_t)block) + load_i(LANE), c1 = set1_i((int32_t)position);
    I32 c2 = set1_i((int32_t)choice), c3 = set1_i((int32_t)stream);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const I32 high0 = multiply_high(m0, c0), low0 = m0 * c0;
        const I32 high1 = multiply_high(m1, c2), low1 = m1 * c2;
        c0 = high1 ^ c1 ^ set1_i((int32_t)k0);
        c1 = low1;
        c2 = high0 ^ c3 ^ set1_i((int32_t)k1);
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
    interleave4(words);
}

inline F32 uniform(I32 word) {
    const F32 u = (unsigned_to_float(word) + set1(0.5f)) * set1(2.3283064365386962890625e-10f);
    return minimum(u, set1(0.999999940395355224609375f));
}

inline F32 exponential(F32 u) {
    const F32 t = set1(1.0f) - u;
    return zero() - (log(t) + ((set1(1.0f) - t) - u) / t);
}

// At least e^y, for y in [−24, 1]: the straight line between powers of two (Schraudolph 1999), raised by 0.3 %.
inline F32 exp_bound(F32 y) {
    y = maximum(set1(-24.0f), minimum(y, set1(1.0f)));
    return from_bits(to_int(fma(y, set1(12102203.16f), set1(1065353216.0f + 25166.0f))));
}

// argmax of z − log(E), E from `stream`. E ≥ u and E ≥ 2⁻³³ (−log E < 22.9), so a token wins only if z − best > −23 and
// u < e^(z − best): most blocks and nearly all logarithms are skipped.
int draw(const float* z, int vocab, Prefix kept, const SamplingRow& row, Stream stream = TOKENS) {
    float best = -INF;
    int winner = NONE;
    for (int block = 0; block < vocab && best < INF; block += BLOCK) {
        F32 x[4];
        uint32_t lanes[4], any = 0;
        for (int j = 0; j < 4; j++) {
            const int i = block + j * LANES;
            lanes[j] = 0;
            if (i >= vocab) continue;
            x[j] = load_at(z, i, vocab);
            lanes[j] = kept_lanes(x[j], kept, i);
            if (winner != NONE) lanes[j] &= mask_bits(greater(x[j] - set1(best), set1(-23.0f)));
            any |= lanes[j];
        }
        if (!any) continue;
        I32 words[4];
        philox(row.seed, (uint32_t)(block / 4), row.position, row.choice, stream, words);
        for (int j = 0; j < 4; j++) {
            if (!lanes[j]) continue;
            const F32 u = uniform(words[j]);
            if (winner != NONE) lanes[j] &= mask_bits(less(u, exp_bound(x[j] - set1(best))));
            if (!lanes[j]) continue;
            float value[LANES];
            store(value, x[j] - log(exponential(u)));
            while (lanes[j]) {
                const int lane = take_lowest(lanes[j]);
                if (winner != NONE && !(value[lane] > best)) continue;
                best = value[lane];
                winner = block + j * LANES + lane;
            }
        }
    }
    return winner;
}

// ---- a draft: accepted, or another drawn (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2.3)

// The word of counter (0, position, choice, ACCEPTANCE), as a number between 0 and 1.
float acceptance_uniform(const SamplingRow& row) {
    I32 words[4];
    philox(row.seed, 0, row.position, row.choice, ACCEPTANCE, words);
    return lane0(uniform(words[0]));
}

// p / q of a token: e^(z − top) / mass of those kept against what the draft was drawn from.
bool accepts(const float* z, int vocab, float top, Prefix kept, float mass, const SamplingRow& row) {
    const int x = row.draft;
    if (!(z[x] > kept.z || (z[x] == kept.z && x <= kept.last_id))) return false;
    const float p = lane0(exp(set1(z[x] - top))) / mass;
    const float* q = (const float*)(uintptr_t)row.draft_probabilities;
    return acceptance_uniform(row) * (q ? q[x] : 1.0f) < p;
}

// From what p has more of than q; from p itself where rounding leaves it nothing.
int draw_residual(const float* z, int vocab, float top, Prefix kept, float mass, const SamplingRow& row, SamplingScratch& s) {
    const float* q = (const float*)(uintptr_t)row.draft_probabilities;
    if (!q) {
        if (z != s.z) copy_allowed(z, vocab, nullptr, s.z);
        s.z[row.draft] = -INF;
        return draw(s.z, vocab, kept, row, RESIDUAL);
    }
    float* surplus = (float*)s.spare;
    bool any = false;
    for (int i = 0; i < vocab; i += LANES) {
        const F32 x = load_at(z, i, vocab);
        const F32 p = select(mask_from_bits(kept_lanes(x, kept, i)), exp(x - set1(top)) / set1(mass), zero());
        const F32 r = p - load_at(q, i, vocab);
        const Mask more = greater(r, zero());
        store_at(surplus, select(more, log(r), set1(-INF)), i, vocab);
        any |= (mask_bits(more) & first_lanes(vocab - i)) != 0;
    }
    return any ? draw(surplus, vocab, EVERYTHING, row, RESIDUAL) : draw(z, vocab, kept, row, RESIDUAL);
}

int accept_or_redraw(const float* z, int vocab, float top, Prefix kept, const SamplingRow& row, SamplingScratch& s) {
    const float mass = kept_mass(z, vocab, top, kept);
    if (accepts(z, vocab, top, kept, mass, row)) return row.draft;
    return draw_residual(z, vocab, top, kept, mass, row, s);
}

// An overflow (`top` is +Inf) leaves no probabilities: its winner is certain, as with greedy.
int choose(const float* logits, int vocab, float top, const SamplingRow& row, SamplingScratch& s) {
    const float* z = processed(logits, vocab, row, s);
    if (z != logits) top = largest(z, vocab);
    if (top == -INF) return NONE;
    if (row.temperature < GREEDY_BELOW) return first_equal(z, vocab, top);
    const Prefix kept = filtered(z, vocab, top, row, s);
    if (inside(row.draft, vocab) && top < INF) return accept_or_redraw(z, vocab, top, kept, row, s);
    return draw(z, vocab, kept, row);
}

// ---- log-probabilities, from the raw logits

void report(const float* logits, int vocab, float top, int token, int num_top, SamplingResult& result) {
    const float lse = top + log1(row_sum(vocab, [=](int i, int, F32 lane) {
        return lane + exp(load_at(logits, i, vocab) - set1(top));
    }));
    const float own = logits[token];
    float best[MAX_TOP_LOGPROBS];
    int n = 0, larger = 0;
    float least = num_top ? -INF : INF;
    for (int i = 0; i < vocab; i += LANES) {
        const F32 x = load_at(logits, i, vocab);
        larger += __builtin_popcount(mask_bits(greater(x, set1(own))));
        uint32_t lanes = mask_bits(greater(x, set1(least)));
        while (lanes) {
            const int id = i + take_lowest(lanes);
            if (!(logits[id] > least)) continue;
            int j = n < num_top ? n++ : num_top - 1;
            for (; j && logits[id] > best[j - 1]; j--) {
                best[j] = best[j - 1];
                result.top_ids[j] = result.top_ids[j - 1];
            }
            best[j] = logits[id];
            result.top_ids[j] = id;
            if (n == num_top) least = best[n - 1];
        }
    }
    for (int j = 0; j < n; j++) result.top_logprobs[j] = best[j] - lse;
    result.logprob = own - lse;
    result.rank = 1 + larger;
    result.num_top = n;
}

}  // namespace

void philox_words(uint64_t seed, uint32_t block, uint32_t position, uint32_t choice, uint32_t stream, int32_t words[64]) {
    I32 w[4];
    philox(seed, block, position, choice, stream, w);
    for (int j = 0; j < 4; j++) store_i(words + j * LANES, w[j]);
}

void sample_row(const float* logits, int vocab, const SamplingRow& row, SamplingResult& result, void* scratch) {
    result = {};
    result.token_id = NONE;
    float top;
    if (!largest_finite(logits, vocab, top)) {
        result.status = SAMPLING_NOT_FINITE;
        return;
    }
    SamplingScratch s = sampling_scratch_at(scratch, vocab);
    int token = NONE;
    if (top > -INF && row.target < vocab) token = row.target >= 0 ? row.target : choose(logits, vocab, top, row, s);
    if (token == NONE) {
        result.status = SAMPLING_NO_CANDIDATE;
        return;
    }
    result.token_id = token;
    if (row.num_logprobs >= 0) report(logits, vocab, top, token, row.num_logprobs, result);
}

}  // namespace POISE_NS
}  // namespace poise
