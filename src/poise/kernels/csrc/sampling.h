// The record of one row to sample, its result and the memory it works in. Plain C++, shared by all variants.
// Pointers travel as integers so that a numpy structured array can hold rows; the layout is published to Python.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace poise {

constexpr int MAX_TOP_LOGPROBS = 20;

struct SamplingRow {
    uint64_t prompt_tokens;  // int32 ids, read only by the repetition penalty
    uint64_t output_tokens;  // int32 ids
    uint64_t bias_ids;       // int32 ids, each at most once
    uint64_t bias_values;    // float32
    uint64_t allowed_mask;   // bit v % 32 of uint32 word v / 32 allows token v; 0: all are allowed
    uint64_t banned_ids;     // int32 ids
    uint64_t draft_probabilities;  // float32 [vocab] that `draft` was drawn from; 0: the draft was certain
    uint64_t seed;
    int32_t num_prompt_tokens, num_output_tokens, num_bias, num_banned;
    float temperature, top_p, min_p;  // below 1e-5 is greedy; top_p ≥ 1 and min_p 0 are off
    float repetition_penalty, frequency_penalty, presence_penalty;
    int32_t top_k;         // < 1: off
    int32_t num_logprobs;  // −1: none; 0: the token's own; k ≤ 20: also the k best
    int32_t target;        // −1: sample; else report this token instead
    uint32_t position;     // absolute position of the token drawn
    uint32_t choice;
    int32_t draft;  // −1: none; else this token is accepted or another drawn, by the rule of `rejection`
};
static_assert(sizeof(SamplingRow) == 8 * 8 + 16 * 4 && sizeof(SamplingRow) % 8 == 0);

enum SamplingStatus : int32_t {
    SAMPLING_OK = 0,
    SAMPLING_NOT_FINITE = 1,    // the logits hold a NaN or +Inf
    SAMPLING_NO_CANDIDATE = 2,  // every token is −Inf, banned or not allowed
};

struct SamplingResult {
    int32_t status;
    int32_t token_id;  // −1 unless the status is 0
    float logprob;
    int32_t rank;     // 0: no log-probabilities were asked for
    int32_t num_top;  // tokens at −Inf are never listed
    int32_t top_ids[MAX_TOP_LOGPROBS];
    float top_logprobs[MAX_TOP_LOGPROBS];
};

struct SortEntry {
    uint32_t key;  // ascending keys are descending logits
    int32_t id;
};

constexpr int NUM_BINS = 2048;

// The arrays inside a block of sampling_scratch_bytes, which belongs to one thread and one vocabulary size.
// `counts` is all zero between rows: the owner clears the block once.
struct SamplingScratch {
    SortEntry* entries;
    SortEntry* spare;
    float* z;
    int32_t* counts;
    uint32_t* histogram;
};

static inline size_t sampling_scratch_bytes(int vocab) {
    return (size_t)vocab * (2 * sizeof(SortEntry) + 2 * 4) + NUM_BINS * 4;
}

static inline SamplingScratch sampling_scratch_at(void* memory, int vocab) {
    SamplingScratch s;
    s.entries = (SortEntry*)memory;
    s.spare = s.entries + vocab;
    s.z = (float*)(s.spare + vocab);
    s.counts = (int32_t*)(s.z + vocab);
    s.histogram = (uint32_t*)(s.counts + vocab);
    return s;
}

using SampleRowFn = void (*)(const float* logits, int vocab, const SamplingRow& row, SamplingResult& result, void* scratch);

// Per variant. sample_row allocates nothing and expects FTZ and DAZ to be on.
// philox_words: the words of the 16 counters from `block`, 4 of each in order: the random words of 64 tokens.
#define POISE_DECLARE_SAMPLING(ns)                                                                                           \
    namespace ns {                                                                                                           \
    void sample_row(const float* logits, int vocab, const SamplingRow& row, SamplingResult& result, void* scratch);         \
    void philox_words(uint64_t seed, uint32_t block, uint32_t position, uint32_t choice, uint32_t stream, int32_t words[64]); \
    }
POISE_DECLARE_SAMPLING(baseline)
POISE_DECLARE_SAMPLING(avx2)
POISE_DECLARE_SAMPLING(avx512)
#undef POISE_DECLARE_SAMPLING

}  // namespace poise
