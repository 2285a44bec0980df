// What the machine can do at most, for rooflines: reads of memory, and products on operands that stay in registers.
#include "bytes.h"
#include "kernels.h"

namespace poise {
namespace POISE_NS {

// Reads all of [p, p + bytes), a multiple of 256, at full width; `ahead` bytes are prefetched (0: the hardware decides alone).
uint32_t probe_read(const uint8_t* p, size_t bytes, size_t ahead) {
    I32 sum[4] = {set1_i(0), set1_i(0), set1_i(0), set1_i(0)};
    for (size_t at = 0; at < bytes; at += 256) {
        if (ahead)
            for (int line = 0; line < 256; line += 64) prefetch(p + at + ahead + line);
        unrolled<4>([&](auto i) POISE_INLINE { sum[i] = sum[i] + bits(load((const float*)(p + at + 64 * i))); });
    }
    return mask_bits(less_i((sum[0] + sum[1]) + (sum[2] + sum[3]), set1_i(0)));
}

namespace {

// Independent sums, so that latency does not bind; as many vectors as registers hold beside the operands.
constexpr int CHAINS = 12;
#if defined(POISE_AVX512)
constexpr int FLOAT_CHAINS = 12;
#else
constexpr int FLOAT_CHAINS = 6;  // two registers each
#endif

// One step of a chain: a vector of weights times a vector of activations, summed as far as the widest instruction sums. That of AVX2
// sums pairs only and the rest is left out, as it may be done by other units; the chain takes the last products as factors.
#if defined(POISE_AVX2)
constexpr int INT8_PER_STEP = 2 * 32;
using Int8Sum = __m256i;
inline Int8Sum int8_step(Int8Sum sum, Quads w, const int8_t*) { return _mm256_maddubs_epi16(sum, w.v); }
#else
constexpr int INT8_PER_STEP = 2 * 64;
using Int8Sum = I32;
inline Int8Sum int8_step(Int8Sum sum, Quads w, const int8_t* q) {
#if defined(POISE_AVX512)
    return dot4(sum, w, q);
#else
    for (int n = 0; n < 64; n++) sum.v[n / 4] += (int32_t)w.v[n] * q[n % 4];
    return sum;
#endif
}
#endif

template <class T> uint32_t folded(const T& value) {  // so that the compiler keeps what was computed
    uint32_t words[sizeof(T) / 4], sum = 0;
    memcpy(words, &value, sizeof(T));
    for (uint32_t word : words) sum += word;
    return sum;
}

uint32_t int8_rounds(int64_t rounds, const uint8_t* operands) {
    Int8Sum sum[CHAINS];
    unrolled<CHAINS>([&](auto i) POISE_INLINE { memcpy(&sum[i], operands + 4 * i, sizeof sum[i]); });  // each begins differently
    const Quads w = low_nibbles(load_quads(operands));
    for (int64_t round = 0; round < rounds; round++) {
        unrolled<CHAINS>([&](auto i) POISE_INLINE { sum[i] = int8_step(sum[i], w, (const int8_t*)operands + 4 * i); });
        asm volatile("" ::: "memory");  // else products that are the same in every round are taken out of the loop
    }
    return folded(sum);
}

template <class Pair> uint32_t bf16_rounds(int64_t rounds, const uint8_t* operands, const Pair* pair) {
    F32 acc[FLOAT_CHAINS];
    unrolled<FLOAT_CHAINS>([&](auto i) POISE_INLINE { acc[i] = set1((float)i); });  // chains that began alike could be computed once
    const Pairs w = load_pairs((const uint16_t*)operands);
    for (int64_t round = 0; round < rounds; round++) unrolled<FLOAT_CHAINS>([&](auto i) POISE_INLINE { acc[i] = dot_pair(acc[i], w, pair); });
    return folded(acc);
}

}  // namespace

// `rounds` rounds of products of a kind; returns what keeps them alive. `operations` gets the multiplications and additions done.
uint32_t probe_products(ProductKind kind, int64_t rounds, const uint8_t* operands, int64_t* operations) {
    if (kind == INT8_PRODUCTS) {
        *operations = rounds * CHAINS * INT8_PER_STEP;
        return int8_rounds(rounds, operands);
    }
    if (kind == BF16_PRODUCTS) {
        const FloatPair wide = widen(*(const uint32_t*)operands);
        *operations = rounds * FLOAT_CHAINS * 64;
        return dot_bf16_in_products ? bf16_rounds(rounds, operands, (const uint32_t*)operands) : bf16_rounds(rounds, operands, &wide);
    }
    F32 acc[FLOAT_CHAINS];
    unrolled<FLOAT_CHAINS>([&](auto i) POISE_INLINE { acc[i] = set1((float)i); });
    const F32 w = load((const float*)operands);
    for (int64_t round = 0; round < rounds; round++)
        unrolled<FLOAT_CHAINS>([&](auto i) POISE_INLINE { acc[i] = fma(w, w, acc[i]); });
    *operations = rounds * FLOAT_CHAINS * 32;
    return folded(acc);
}

}  // namespace POISE_NS
}  // namespace poise
