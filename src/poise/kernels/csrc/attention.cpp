// Causal attention over pages: blocks of 64 keys and splits of 256 positions, both at absolute positions, so that a row's bits
// depend neither on the chunk it came in nor on who computes which split. A unit is one query row × one head of the KV head's
// group; all units of an item share each load of K and V.
#include "bytes.h"
#include "elementary.h"
#include "kernels.h"
#include "kv_tiles.h"

namespace poise {
namespace POISE_NS {

namespace {

constexpr int BLOCK = 64, SPLIT = 256;
#if defined(POISE_AVX512)
constexpr int MICRO = 6, TILES = 4;  // units and 16-column tiles whose sums are held in registers: 6 × 4 of 32
#else
constexpr int MICRO = 4, TILES = 1;  // 4 × 1 pair of 16 registers
#endif

// What a unit sees of a block: all but the first `hidden` keys (before its window), up to `visible`. `first`: of its split.
struct View {
    int hidden, visible;
    bool first;
    bool is_partial() const { return visible < BLOCK || hidden > 0; }
    Mask mask(int t) const {  // of the 16 keys of tile t
        const auto low = [](int n) -> uint32_t { return n >= 16 ? 0xffff : n > 0 ? (1u << n) - 1 : 0; };
        return mask_from_bits(low(visible - t * 16) & ~low(hidden - t * 16));
    }
};

// s[u][0…63] = q_u · K over head_dim/2 pairs, ascending.
template <int U, class Pair, class Tiles> __attribute__((noinline)) void scores(const Pair* const* q, const Tiles& tiles, int pairs, float* s) {
    for (int first = 0; first < 4; first += TILES) {
        F32 acc[U][TILES];
        unrolled<U * TILES>([&](auto i) POISE_INLINE { acc[i / TILES][i % TILES] = zero(); });
        for (int k = 0; k < pairs; k++) {
            decltype(tiles.template key_pairs<Pair>(0, 0)) w[TILES];
            unrolled<TILES>([&](auto t) POISE_INLINE {
                w[t] = tiles.template key_pairs<Pair>(first + t, k);
                tiles.ask_for_keys(first + t, (size_t)k * 32 * Tiles::VALUE_BYTES);
            });
            unrolled<U * TILES>([&](auto i) POISE_INLINE {
                acc[i / TILES][i % TILES] = dot_pair(acc[i / TILES][i % TILES], w[i % TILES], q[i / TILES] + k);
            });
        }
        unrolled<U * TILES>([&](auto i) POISE_INLINE {
            store(s + i / TILES * BLOCK + (first + i % TILES) * 16, tiles.score(first + i % TILES, acc[i / TILES][i % TILES]));
        });
    }
}

// acc_u = acc_u · c_u (or +0 at the first block), then += p_u · V over 32 token pairs, for WIDTH × 16 columns.
template <int U, int WIDTH, class Pair, class Tiles>
void values(const Pair* const* p, const Tiles& tiles, int head_dim, int column, const float* c, const View* views,
            float* const* acc_rows) {
    F32 acc[U][WIDTH];
    unrolled<U * WIDTH>([&](auto i) POISE_INLINE {
        constexpr int u = i / WIDTH, t = i % WIDTH;
        acc[u][t] = views[u].first ? zero() : load(acc_rows[u] + column + t * 16) * set1(c[u]);
    });
    for (int tile = 0; tile < 4; tile++)
        for (int k = 0; k < 8; k++) {
            decltype(tiles.template value_pairs<Pair>(0, 0, 0, 0)) w[WIDTH];
            unrolled<WIDTH>([&](auto t) POISE_INLINE {
                w[t] = tiles.template value_pairs<Pair>(tile, k, head_dim, column + t * 16);
                tiles.ask_for_values(tile, ((size_t)k * head_dim + column + t * 16) * 2 * Tiles::VALUE_BYTES);
            });
            unrolled<U * WIDTH>([&](auto i) POISE_INLINE {
                constexpr int u = i / WIDTH, t = i % WIDTH;
                acc[u][t] = dot_pair(acc[u][t], w[t], p[u] + tile * 8 + k);
            });
        }
    unrolled<U * WIDTH>([&](auto i) POISE_INLINE { store(acc_rows[i / WIDTH] + column + i % WIDTH * 16, acc[i / WIDTH][i % WIDTH]); });
}

template <int U, class Pair, class Tiles>
void values_all(const Pair* const* p, const Tiles& tiles, int head_dim, const float* c, const View* views, float* const* acc) {
    int column = 0;
    for (; column + 16 * TILES <= head_dim; column += 16 * TILES) values<U, TILES>(p, tiles, head_dim, column, c, views, acc);
    for (; column < head_dim; column += 16) values<U, 1>(p, tiles, head_dim, column, c, views, acc);
}

template <class Pair, class Tiles> void scores_of(int count, const Pair* const* q, const Tiles& tiles, int pairs, float* s) {
    switch (count) {
        case 1: return scores<1>(q, tiles, pairs, s);
        case 2: return scores<2>(q, tiles, pairs, s);
        case 3: return scores<3>(q, tiles, pairs, s);
        case 4: return scores<4>(q, tiles, pairs, s);
#if defined(POISE_AVX512)
        case 5: return scores<5>(q, tiles, pairs, s);
        default: return scores<6>(q, tiles, pairs, s);
#endif
    }
}

template <class Pair, class Tiles>
void values_of(int count, const Pair* const* p, const Tiles& tiles, int head_dim, const float* c, const View* views, float* const* acc) {
    switch (count) {
        case 1: return values_all<1>(p, tiles, head_dim, c, views, acc);
        case 2: return values_all<2>(p, tiles, head_dim, c, views, acc);
        case 3: return values_all<3>(p, tiles, head_dim, c, views, acc);
        case 4: return values_all<4>(p, tiles, head_dim, c, views, acc);
#if defined(POISE_AVX512)
        case 5: return values_all<5>(p, tiles, head_dim, c, views, acc);
        default: return values_all<6>(p, tiles, head_dim, c, views, acc);
#endif
    }
}

// From scores [unit][64] to probabilities in bf16 [unit][64]; updates each unit's m and l and says by what its sums so far shrink.
template <class Pair, class Tiles>
__attribute__((noinline)) void soften(int count, const View* views, const Tiles& tiles, float* scores, float* m, float* l, float* correction, Pair* probabilities) {
    const F32 hidden = set1(-__builtin_inff());
    for (int u = 0; u < count; u++) {
        const View view = views[u];
        float* s = scores + u * BLOCK;
        if (view.is_partial())
            unrolled<4>([&](auto t) POISE_INLINE { store(s + t * 16, select(view.mask(t), load(s + t * 16), hidden)); });
        const float top = fold_max(maximum(maximum(load(s), load(s + 16)), maximum(load(s + 32), load(s + 48))));
        const float before = m[u];
        m[u] = view.first ? top : top > before ? top : before;
        correction[u] = view.first ? 0.0f : before - m[u];
    }
    store(correction, exp_below_88(load(correction)));
    for (int u = 0; u < count; u++) {
        const View view = views[u];
        const float* s = scores + u * BLOCK;
        const F32 top = set1(m[u]);
        F32 lane = zero();
        unrolled<4>([&](auto t) POISE_INLINE {
            F32 e = exp_below_88(load(s + t * 16) - top);
            F32 weight = tiles.weight(t, e);
            if (view.is_partial()) {
                e = select(view.mask(t), e, zero());
                weight = select(view.mask(t), weight, zero());
            }
            lane = lane + e;
            store_rounded(probabilities + u * BLOCK / 2, t * 16, weight);
        });
        const float sum = fold_sum(lane);
        l[u] = view.first ? sum : fma1(l[u], correction[u], sum);
    }
}

// State of the units of an item: m and l [unit], acc [unit][head_dim].
struct State {
    float *m, *l, *acc;
};

State carve(float* memory, int head_dim) { return {memory, memory + MAX_UNITS, memory + 2 * MAX_UNITS}; }

// (M, L, A) folded with (m, l, a), given em = e^(m − top) and eM = e^(M − top): docs/NUMERICS.md, Attention.
inline void fold(float& L, float* A, float l, const float* a, float em, float eM, int head_dim) {
    const F32 new_weight = set1(em), old_weight = set1(eM);
    for (int k = 0; k < head_dim; k += 16) store(A + k, fma(load(a + k), new_weight, load(A + k) * old_weight));
    L = fma1(l, em, L * eM);
}

void finish(const float* acc, float l, int head_dim, float* out) {
    const F32 divisor = set1(l);
    // Adding +0 makes the sign of a zero independent of how many masked keys were skipped.
    for (int k = 0; k < head_dim; k += 16) store(out + k, load(acc + k) / divisor + zero());
}

// How rows of bf16 become operands: as they are, or widened into scratch.
inline const uint32_t* operands(const uint16_t* row, int count, uint32_t*) {
    (void)count;
    return (const uint32_t*)row;
}
inline const FloatPair* operands(const uint16_t* row, int count, FloatPair* scratch) {
    for (int k = 0; k < count; k += 16) store((float*)scratch + k, load_bf16(row + k));
    return scratch;
}

inline int row_of(const AttentionParams& params, const AttentionItem& item, int i) {
    return item.shared ? params.shared_rows[item.row + i].row : item.row + i;
}

// Where the first block starts of which an item's first row sees something.
inline int first_block(const AttentionParams& params, const AttentionItem& item) {
    const int split = item.first_split * SPLIT, visible = item.shared ? 0 : first_visible(item.position, params.window) / BLOCK * BLOCK;
    return visible > split ? visible : split;
}

// Where the states of an item's row go.
inline float* partial_of(const AttentionParams& params, const AttentionItem& item, int i) {
    return params.partials + (item.shared ? params.shared_rows[item.row + i].partial : item.partial + i * item.row_floats);
}

template <class Pair, class Tiles>
void run_item(const AttentionParams& params, const AttentionItem& item, const AttentionItem& next, float* scratch) {
    const KVLayout& kv = *params.kv;
    const int d = kv.head_dim, group = params.num_heads / kv.num_kv_heads, units = item.num_rows * group;
    const size_t state_floats = 2 * MAX_UNITS + (size_t)MAX_UNITS * d;
    State total = carve(scratch, d), split = carve(scratch + state_floats, d);
    float* s = scratch + 2 * state_floats;                       // [MICRO][64]
    float* wide = s + MICRO * BLOCK;                             // [MAX_UNITS][d] q, where they are widened
    Pair* probabilities = (Pair*)(wide + (size_t)MAX_UNITS * d);  // [MICRO][32]
    const Scratch tile_scratch = carve_tiles((uint16_t*)(probabilities + MICRO * BLOCK / 2), d);
    const Pair* queries[MAX_UNITS];
    for (int u = 0; u < units; u++) {
        const int row = row_of(params, item, u / group), head = item.kv_head * group + u % group;
        queries[u] = operands(params.q + ((size_t)row * params.num_heads + head) * d, d, (Pair*)(wide + (size_t)u * d));
    }
    const int tiles_per_page = kv.block_size / TILE;
    const int last = item.position + item.num_rows - 1, window = item.shared ? 0 : params.window;
    const int first_key = first_visible(item.position, window);  // keys before it may have lost their pages
    const bool leaves_states = item.shared || item.fold != NO_FOLD;

    for (int i = 0; i < item.num_splits; i++) {
        const int split_start = (item.first_split + i) * SPLIT;
        for (int start = split_start; start < split_start + SPLIT && start <= last; start += BLOCK) {
            if (start + BLOCK <= first_key) continue;
            Tiles tiles;
            for (int t = 0; t < 4; t++) {
                const int token = start + t * TILE;
                if (token >= item.kv_length || token + TILE <= first_key) {
                    tiles.hide(t, tile_scratch);
                    continue;
                }
                const int tile = token / TILE, block = item.block_table[params.first_column + tile / tiles_per_page];
                tiles.place(t, kv, block, params.layer, item.kv_head, tile % tiles_per_page, item.kv_length - token, tile_scratch);
            }
            if (start + BLOCK <= last) {
                tiles.place_next(kv, item.block_table + params.first_column, params.layer, item.kv_head, start + BLOCK, item.kv_length);
            } else {
                const int next_start = first_block(params, next);
                tiles.place_next(kv, next.block_table + params.first_column, params.layer, next.kv_head, next_start, next.kv_length);
            }
            // Units whose row sees this block: rows are in position order, so these are neighbours.
            const int first_row = start > item.position ? start - item.position : 0;
            const int end = window ? (start + BLOCK + window - 1 - item.position) * group : units, end_unit = end < units ? end : units;
            for (int u0 = first_row * group; u0 < end_unit; u0 += MICRO) {
                const int count = end_unit - u0 < MICRO ? end_unit - u0 : MICRO;
                const Pair* p[MICRO];
                float *acc[MICRO], correction[16] = {};
                View views[MICRO];
                for (int i2 = 0; i2 < count; i2++) {
                    const int position = item.position + (u0 + i2) / group, visible_from = first_visible(position, window);
                    views[i2] = {visible_from - start, position - start + 1, start == split_start || start <= visible_from};
                    acc[i2] = split.acc + (size_t)(u0 + i2) * d;
                    p[i2] = probabilities + i2 * BLOCK / 2;
                }
                scores_of(count, queries + u0, tiles, d / 2, s);
                soften(count, views, tiles, s, split.m + u0, split.l + u0, correction, probabilities);
                values_of(count, p, tiles, d, correction, views, acc);
            }
        }
        if (leaves_states) {
            for (int u = 0; u < units; u++) {
                float* out = partial_of(params, item, u / group) + ((size_t)i * group + u % group) * (d + 2);
                out[0] = split.m[u];
                out[1] = split.l[u];
                memcpy(out + 2, split.acc + (size_t)u * d, sizeof(float) * d);
            }
            continue;
        }
        float em[MAX_UNITS], eM[MAX_UNITS];  // of all units, also of those that fold nothing
        for (int u = 0; u < units; u += 16) {
            const F32 m = load(split.m + u), M = load(total.m + u), top = maximum(m, M);
            store(em + u, exp_below_88(m - top));
            store(eM + u, exp_below_88(M - top));
        }
        for (int u = 0; u < units; u++) {
            const int position = item.position + u / group, first = first_visible(position, window);
            if (position < split_start || first >= split_start + SPLIT) continue;  // this row sees nothing of the split
            float *A = total.acc + (size_t)u * d, *a = split.acc + (size_t)u * d;
            if (first >= split_start) {
                total.m[u] = split.m[u];
                total.l[u] = split.l[u];
                memcpy(A, a, sizeof(float) * d);
            } else {
                fold(total.l[u], A, split.l[u], a, em[u], eM[u], d);
                total.m[u] = split.m[u] > total.m[u] ? split.m[u] : total.m[u];
            }
        }
    }
    if (leaves_states) return;
    for (int u = 0; u < units; u++) {
        const int row = item.row + u / group, head = item.kv_head * group + u % group;
        finish(total.acc + (size_t)u * d, total.l[u], d, params.out + ((size_t)row * params.num_heads + head) * d);
    }
}

template <class Pair>
void run_item_of(const AttentionParams& params, const AttentionItem& item, const AttentionItem& next, float* scratch) {
    const int units = item.num_rows * (params.num_heads / params.kv->num_kv_heads);
    const bool is_int8 = params.kv->type == KV_INT8, reading_binds = units <= MICRO;
    if (is_int8 && reading_binds) run_item<Pair, Int8Tiles>(params, item, next, scratch);
    else if (is_int8) run_item<Pair, WidenedTiles>(params, item, next, scratch);
    else if (reading_binds) run_item<Pair, Bf16Tiles<NextTiles>>(params, item, next, scratch);
    else run_item<Pair, Bf16Tiles<NoNextTiles>>(params, item, next, scratch);
}

}  // namespace

void attend(const AttentionParams& params, const AttentionItem& item, const AttentionItem& next, float* scratch) {
    if (dot_bf16_in_attention) run_item_of<uint32_t>(params, item, next, scratch);
    else run_item_of<FloatPair>(params, item, next, scratch);
}

// Folds the splits that several items left behind, ascending.
void fold_partials(const AttentionParams& params, const AttentionFold& fold_of) {
    const int d = params.kv->head_dim, group = params.num_heads / params.kv->num_kv_heads;
    for (int u = 0; u < fold_of.num_rows * group; u++) {
        const int position = fold_of.position + u / group, first = first_visible(position, params.window);
        float* states = params.partials + fold_of.partial + u / group * fold_of.row_floats + (size_t)(u % group) * (d + 2);
        float *total = nullptr, M = 0, L = 0;
        for (int i = 0; i < fold_of.num_splits; i++) {
            const int split_start = (fold_of.first_split + i) * SPLIT;
            if (position < split_start || first >= split_start + SPLIT) continue;
            float* part = states + (size_t)i * group * (d + 2);
            if (!total) {
                total = part + 2;
                M = part[0];
                L = part[1];
            } else {
                const float top = part[0] > M ? part[0] : M;
                float e[16] = {part[0] - top, M - top};
                store(e, exp_below_88(load(e)));
                fold(L, total, part[1], part + 2, e[0], e[1], d);
                M = top;
            }
        }
        const int row = fold_of.row + u / group, head = fold_of.kv_head * group + u % group;
        finish(total, L, d, params.out + ((size_t)row * params.num_heads + head) * d);
    }
}

namespace {

#if defined(POISE_AVX512)
// Compares vdpbf16ps with the two-fma form, and vcvtneps2bf16 with to_bf16, on pseudo-random lanes; bits must agree for the
// instructions to be used.
bool bf16_is_exact() {
    uint64_t state = 0x9e3779b97f4a7c15ull;
    const auto next = [&]() -> uint32_t {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const uint32_t r = (uint32_t)(state >> 32);
        // Exponents near each other, so that sums really round.
        return (r & 0x807f807fu) | (((120 + ((r >> 8) & 15)) << 7) | ((120 + ((r >> 24) & 15)) << 23));
    };
    alignas(64) uint32_t w[16], a[1];
    for (int round = 0; round < 2000; round++) {
        for (int j = 0; j < 16; j++) w[j] = next();
        a[0] = next();
        alignas(64) float acc[16], x[16], y[16];
        for (int j = 0; j < 16; j++) {
            const uint32_t u = next();
            memcpy(acc + j, &u, 4);
        }
        const FloatPair wide = widen(a[0]);
        store(x, dot_pair(load(acc), load_pairs((const uint16_t*)w), a));
        store(y, dot_pair(load(acc), load_pairs((const uint16_t*)w), &wide));
        if (memcmp(x, y, 64)) return false;
        uint32_t any[16], rounded[8];  // any bits: also NaN, infinities and denormals
        uint16_t expected[16];
        for (int j = 0; j < 16; j++) any[j] = next() ^ (uint32_t)(state >> (j % 32));
        store_rounded(rounded, 0, from_bits(load_i((const int32_t*)any)));
        store_low_u16(expected, to_bf16(from_bits(load_i((const int32_t*)any))));
        if (memcmp(rounded, expected, 32)) return false;
    }
    return true;
}

#if defined(POISE_EMULATED)
template <class Pair> uint64_t ticks_of(const Pair*) { return 0; }
#else
// Clock ticks of products of one kind of pair, the least of some tries.
template <class Pair> uint64_t ticks_of(const Pair* pair) {
    constexpr int CHAINS = 12;
    alignas(64) const uint16_t weights[32] = {};
    Pairs w = load_pairs(weights);
    asm volatile("" : "+v"(w.v));  // else products with zeros are folded
    uint64_t least = ~0ull;
    for (int attempt = 0; attempt < 8; attempt++) {
        F32 acc[CHAINS];
        unrolled<CHAINS>([&](auto i) POISE_INLINE { acc[i] = zero(); });
        const uint64_t begin = __rdtsc();
        for (int round = 0; round < 500; round++) unrolled<CHAINS>([&](auto i) POISE_INLINE { acc[i] = dot_pair(acc[i], w, pair); });
        unrolled<CHAINS>([&](auto i) POISE_INLINE { asm volatile("" : : "v"(acc[i].v)); });
        const uint64_t ticks = __rdtsc() - begin;
        if (ticks < least) least = ticks;
    }
    return least;
}
#endif
#endif

}  // namespace

// Uses vdpbf16ps at most as far as asked, nowhere if its bits are not those of two fma. Some CPUs do it at half their fma's rate: there
// attention, whose queries are widened once for many keys, is faster without. Bits are the same either way.
DotBF16 choose_dot_bf16(DotBF16 most) {
    dot_bf16_in_products = dot_bf16_in_attention = false;
#if defined(POISE_AVX512)
    if (most == DotBF16::NOWHERE || !bf16_is_exact()) return DotBF16::NOWHERE;
    const uint32_t pair = 0;
    const FloatPair wide = {0, 0};
    dot_bf16_in_products = true;
    dot_bf16_in_attention = most == DotBF16::EVERYWHERE || (most == DotBF16::WHERE_FASTER && ticks_of(&pair) <= ticks_of(&wide));
#else
    (void)most;
#endif
    return dot_bf16_in_attention ? DotBF16::EVERYWHERE : dot_bf16_in_products ? DotBF16::IN_PRODUCTS : DotBF16::NOWHERE;
}

}  // namespace POISE_NS
}  // namespace poise
