// Lines of unsigned weights, their exact integer dots with signed activations, and the bf16 pair product.
#pragma once
#include "elementary.h"

namespace poise {
namespace POISE_NS {

// A column vector covers COLUMNS outputs of a panel: all 16 where the registers are wide (or the code portable), 8 with AVX2.
// `Quads` is one 4-k line of unsigned weights of these outputs; `dot_group` adds the exact integer products of the quads
// FIRST … LAST-1 of V column vectors with the activations of ROWS rows (32 bytes apart).

inline float bf16_value(uint16_t upper) {
    const uint32_t u = (uint32_t)upper << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// A pair of bf16 activations: as it is (uint32_t) for the instruction that multiplies pairs, or widened to f32.
struct FloatPair { float even, odd; };
inline FloatPair widen(uint32_t pair) { return {bf16_value((uint16_t)pair), bf16_value((uint16_t)(pair >> 16))}; }

#if defined(POISE_AVX512)

constexpr int COLUMNS = 16;
using ColF = F32;
using ColI = I32;
struct Quads { __m512i v; };
inline Quads load_quads(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Quads low_nibbles(Quads a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Quads high_nibbles(Quads a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// Bits FROM … FROM+WIDTH-1 of each byte moved to bit 4.
template <int FROM, int WIDTH> inline Quads plane_bits(Quads a) {
    const __m512i mask = _mm512_set1_epi8(WIDTH == 1 ? 0x10 : 0x30);
    if constexpr (FROM <= 4) return {_mm512_and_si512(_mm512_slli_epi16(a.v, 4 - FROM), mask)};
    else return {_mm512_and_si512(_mm512_srli_epi16(a.v, FROM - 4), mask)};
}
inline Quads operator|(Quads a, Quads b) { return {_mm512_or_si512(a.v, b.v)}; }
inline ColF load_f16_columns(const uint16_t* p) { return load_f16(p); }
inline ColI load_u8_columns(const uint8_t* p) { return load_u8(p); }
inline ColI load_i8_columns(const int8_t* p) { return load_i8(p); }
inline ColF set_columns(float x) { return set1(x); }
inline ColI set_columns_i(int32_t x) { return set1_i(x); }

// g++ 12 does not fold the broadcast into the instructions by itself, and the variant is compiled without BF16. A build that
// emulates AVX-512 defines these itself.
#ifndef POISE_VPDPBUSD
#define POISE_VPDPBUSD(acc, w, q) asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t*)(q)))
#define POISE_VDPBF16PS(acc, w, pair) asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(pair)))
#define POISE_VCVTNEPS2BF16(rounded, x) asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x))
#endif
inline I32 dot4(I32 acc, Quads w, const int8_t* q) {
    POISE_VPDPBUSD(acc.v, w.v, q);
    return acc;
}
template <int BITS, int FIRST, int LAST, int ROWS, int V>
POISE_INLINE inline void dot_group(const Quads (*w)[8], const int8_t* q, ColI (*acc)[V]) {
    unrolled<LAST - FIRST>([&](auto j) POISE_INLINE {
        unrolled<ROWS>([&](auto r) POISE_INLINE { acc[r][0] = dot4(acc[r][0], w[0][FIRST + j], q + r * 32 + 4 * (FIRST + j)); });
    });
}
// Byte K of quad j less ZERO, of all 16 outputs; `w` holds the quads of each column vector.
template <int K, int ZERO> inline F32 levels(const Quads (*w)[8], int j) {
    const I32 u = {_mm512_and_si512(_mm512_srli_epi32(w[0][j].v, 8 * K), _mm512_set1_epi32(255))};
    return to_float(u - set1_i(ZERO));
}
inline F32 join(const ColF* c) { return c[0]; }
constexpr bool SIGNED_BYTES = false;  // i8: u = w + 128 is used as it is
constexpr int DOT_ROWS = 4;           // rows whose dots are interleaved
inline void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline void prefetch_once(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_NTA); }
inline void prefetch_far(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

// acc += odd element, then even element, each one fma; `w` holds pairs of bf16 for 16 outputs.
struct Pairs { __m512i v; };
inline Pairs load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
inline F32 dot_pair(F32 acc, Pairs w, const uint32_t* pair) {
    POISE_VDPBF16PS(acc.v, w.v, pair);
    return acc;
}
inline F32 dot_pair(F32 acc, Pairs w, const FloatPair* pair) {
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32((int)0xffff0000)));
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16));
    return {_mm512_fmadd_ps(even, _mm512_set1_ps(pair->even), _mm512_fmadd_ps(odd, _mm512_set1_ps(pair->odd), acc.v))};
}

#elif defined(POISE_AVX2)

constexpr int COLUMNS = 8;
struct ColF { __m256 v; };
struct ColI { __m256i v; };
struct Quads { __m256i v; };
inline Quads load_quads(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
inline Quads low_nibbles(Quads a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
inline Quads high_nibbles(Quads a) { return {_mm256_and_si256(_mm256_srli_epi16(a.v, 4), _mm256_set1_epi8(15))}; }
template <int FROM, int WIDTH> inline Quads plane_bits(Quads a) {
    const __m256i mask = _mm256_set1_epi8(WIDTH == 1 ? 0x10 : 0x30);
    if constexpr (FROM <= 4) return {_mm256_and_si256(_mm256_slli_epi16(a.v, 4 - FROM), mask)};
    else return {_mm256_and_si256(_mm256_srli_epi16(a.v, FROM - 4), mask)};
}
inline Quads operator|(Quads a, Quads b) { return {_mm256_or_si256(a.v, b.v)}; }
inline ColF operator*(ColF a, ColF b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline ColF fma(ColF a, ColF b, ColF c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline ColF negate(ColF a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))}; }
inline ColF to_float(ColI a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline ColI operator+(ColI a, ColI b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline void store(float* p, ColF a) { _mm256_storeu_ps(p, a.v); }
inline ColF load_f16_columns(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
inline ColI load_u8_columns(const uint8_t* p) { return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))}; }
inline ColI load_i8_columns(const int8_t* p) { return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))}; }
inline ColF set_columns(float x) { return {_mm256_set1_ps(x)}; }
inline ColI set_columns_i(int32_t x) { return {_mm256_set1_epi32(x)}; }

inline __m256i broadcast_quad(const int8_t* q) { return _mm256_castps_si256(_mm256_broadcast_ss((const float*)q)); }
// i8 takes |w| and moves the sign to the activation (2 · 128 · 127 < 2¹⁵): the sum of w·q itself, so no zero point is subtracted.
template <int BITS> inline __m256i multiply_pairs(__m256i w, __m256i b) {
    if constexpr (BITS == 8) {
        const __m256i signed_w = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
        return _mm256_maddubs_epi16(_mm256_abs_epi8(signed_w), _mm256_sign_epi8(b, signed_w));
    }
    return _mm256_maddubs_epi16(w, b);
}
// Sums of pairs stay below 2¹⁵ over 8 quads of i4 (8 · 2 · 15 · 127), 4 of i5 and 2 of i6; only then do they widen to 32 bits.
template <int BITS, int FIRST, int LAST, int ROWS, int V>
POISE_INLINE inline void dot_group(const Quads (*w)[8], const int8_t* q, ColI (*acc)[V]) {
    constexpr int RUN = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
    const __m256i ones = _mm256_set1_epi16(1);
    for (int begin = FIRST; begin < LAST; begin += RUN) {
        __m256i sum[ROWS][V];
        unrolled<RUN>([&](auto i) POISE_INLINE {
            const int j = begin + i;
            __m256i x[V];
            unrolled<V>([&](auto v) POISE_INLINE {
                x[v] = w[v][j].v;
                asm("" : "+x"(x[v]));  // else g++ reads it again from memory for each row
            });
            unrolled<ROWS>([&](auto r) POISE_INLINE {
                const __m256i b = broadcast_quad(q + r * 32 + 4 * j);
                unrolled<V>([&](auto v) POISE_INLINE {
                    const __m256i product = multiply_pairs<BITS>(x[v], b);
                    sum[r][v] = i == 0 ? product : _mm256_add_epi16(sum[r][v], product);
                    asm("" : "+x"(sum[r][v]));  // else g++ reorders the exact sums and spills every product
                });
            });
        });
        unrolled<ROWS * V>([&](auto i) POISE_INLINE {
            ColI& a = acc[i / V][i % V];
            a.v = _mm256_add_epi32(a.v, _mm256_madd_epi16(sum[i / V][i % V], ones));
        });
    }
}
// The same for one row and the whole panel: quad j of column vector v is asked for where it is used, both nibbles of a line in turn.
template <int BITS, int FIRST, int LAST, class Quad> POISE_INLINE inline void dot_row(Quad quad, const int8_t* q, ColI* acc) {
    constexpr int COUNT = LAST - FIRST, RUN = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[2];
    unrolled<COUNT>([&](auto i) POISE_INLINE {
        constexpr auto j = Index<(COUNT == 8 && BITS < 8) ? i / 2 + i % 2 * 4 : FIRST + i>{};
        const __m256i b = broadcast_quad(q + 4 * j);
        unrolled<2>([&](auto v) POISE_INLINE {
            const __m256i product = multiply_pairs<BITS>(quad(j, v).v, b);
            sum[v] = i % RUN == 0 ? product : _mm256_add_epi16(sum[v], product);
            if constexpr (i % RUN == RUN - 1) acc[v].v = _mm256_add_epi32(acc[v].v, _mm256_madd_epi16(sum[v], ones));
        });
    });
}
template <int K, int ZERO> inline __m256 levels_256(__m256i quad) {
    __m256i u = K == 0 ? quad : _mm256_srli_epi32(quad, 8 * K);
    if constexpr (K < 3) u = _mm256_and_si256(u, _mm256_set1_epi32(255));
    if constexpr (ZERO != 0) u = _mm256_sub_epi32(u, _mm256_set1_epi32(ZERO));
    return _mm256_cvtepi32_ps(u);
}
template <int K, int ZERO> inline F32 levels(const Quads (*w)[8], int j) {
    return {levels_256<K, ZERO>(w[0][j].v), levels_256<K, ZERO>(w[1][j].v)};
}
inline F32 join(const ColF* c) { return {c[0].v, c[1].v}; }
constexpr bool SIGNED_BYTES = true;
constexpr int DOT_ROWS = 4;
inline void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline void prefetch_once(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_NTA); }
inline void prefetch_far(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

struct Pairs { __m256i a, b; };
inline Pairs load_pairs(const uint16_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))}; }
inline __m256 dot_pair_256(__m256 acc, __m256i w, __m256 odd, __m256 even) {
    const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000)));
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), even, _mm256_fmadd_ps(high, odd, acc));
}
inline F32 dot_pair(F32 acc, Pairs w, const FloatPair* pair) {
    const __m256 odd = _mm256_broadcast_ss(&pair->odd), even = _mm256_broadcast_ss(&pair->even);
    return {dot_pair_256(acc.a, w.a, odd, even), dot_pair_256(acc.b, w.b, odd, even)};
}

#else

constexpr int COLUMNS = 16;
using ColF = F32;
using ColI = I32;
struct Quads { uint8_t v[64]; };
#define POISE_BYTES(expr) Quads r; for (int j = 0; j < 64; j++) r.v[j] = (uint8_t)(expr); return r
inline Quads load_quads(const uint8_t* p) { Quads r; memcpy(r.v, p, 64); return r; }
inline Quads low_nibbles(Quads a) { POISE_BYTES(a.v[j] & 15); }
inline Quads high_nibbles(Quads a) { POISE_BYTES(a.v[j] >> 4); }
template <int FROM, int WIDTH> inline Quads plane_bits(Quads a) { POISE_BYTES(((a.v[j] >> FROM) & (WIDTH == 1 ? 1 : 3)) << 4); }
inline Quads operator|(Quads a, Quads b) { POISE_BYTES(a.v[j] | b.v[j]); }
#undef POISE_BYTES
inline ColF load_f16_columns(const uint16_t* p) { return load_f16(p); }
inline ColI load_u8_columns(const uint8_t* p) { return load_u8(p); }
inline ColI load_i8_columns(const int8_t* p) { return load_i8(p); }
inline ColF set_columns(float x) { return set1(x); }
inline ColI set_columns_i(int32_t x) { return set1_i(x); }
template <int BITS, int FIRST, int LAST, int ROWS, int V>
POISE_INLINE inline void dot_group(const Quads (*w)[8], const int8_t* q, ColI (*acc)[V]) {
    for (int r = 0; r < ROWS; r++)
        for (int j = FIRST; j < LAST; j++)
            for (int n = 0; n < 16; n++)
                for (int i = 0; i < 4; i++) acc[r][0].v[n] += (int32_t)w[0][j].v[n * 4 + i] * q[r * 32 + 4 * j + i];
}
template <int K, int ZERO> inline F32 levels(const Quads (*w)[8], int j) {
    F32 r;
    for (int n = 0; n < 16; n++) r.v[n] = (float)(w[0][j].v[n * 4 + K] - ZERO);
    return r;
}
inline F32 join(const ColF* c) { return c[0]; }
constexpr bool SIGNED_BYTES = false;
constexpr int DOT_ROWS = 1;
inline void prefetch(const uint8_t*) {}
inline void prefetch_once(const uint8_t*) {}
inline void prefetch_far(const uint8_t*) {}
struct Pairs { uint16_t v[32]; };
inline Pairs load_pairs(const uint16_t* p) { Pairs r; memcpy(r.v, p, 64); return r; }
inline F32 dot_pair(F32 acc, Pairs w, const FloatPair* pair) {
    for (int n = 0; n < 16; n++) {
        acc.v[n] = fma1(bf16_value(w.v[n * 2 + 1]), pair->odd, acc.v[n]);
        acc.v[n] = fma1(bf16_value(w.v[n * 2]), pair->even, acc.v[n]);
    }
    return acc;
}

#endif

#if !defined(POISE_AVX512)
inline F32 dot_pair(F32 acc, Pairs w, const uint32_t* pair) {
    const FloatPair wide = widen(*pair);
    return dot_pair(acc, w, &wide);
}
#endif

// Pairs widened to f32: for one row of bf16 activations after the other, the odd element first, then the even one.
struct WidePairs { F32 even, odd; };
inline F32 dot_pair(F32 acc, WidePairs w, const uint32_t* pair) {
    const I32 both = set1_i((int32_t)*pair);
    return fma(w.even, from_bits(shift_left<16>(both)), fma(w.odd, from_bits(both & set1_i((int32_t)0xffff0000)), acc));
}

inline F32 dot_pair(F32 acc, WidePairs w, const FloatPair* pair) {
    return fma(w.even, set1(pair->even), fma(w.odd, set1(pair->odd), acc));
}

// 16 values rounded to bf16 as operands of a dot, from place `at` (even) on; pairs as they are only where the CPU has the instructions.
inline void store_rounded(FloatPair* p, int at, F32 x) { store((float*)p + at, from_bits(shift_left<16>(to_bf16(x)))); }
inline void store_rounded(uint32_t* p, int at, F32 x) {
#if defined(POISE_AVX512)
    __m256i rounded;
    POISE_VCVTNEPS2BF16(rounded, x.v);
    _mm256_storeu_si256((__m256i*)((uint16_t*)p + at), rounded);
#else
    store_low_u16((uint16_t*)p + at, to_bf16(x));
#endif
}
// The pairs as bf16, for values that are exact in it.
inline I32 joined(WidePairs w) { return shift_right<16>(bits(w.even)) | (bits(w.odd) & set1_i((int32_t)0xffff0000)); }
inline void store_pairs(uint16_t* p, WidePairs w) { store_i((int32_t*)p, joined(w)); }

// Pairs of int8 from two rows of 16, in the form that is cheapest to multiply by a kind of pair.
inline WidePairs int8_pairs(const int8_t* even, const int8_t* odd) { return {to_float(load_i8(even)), to_float(load_i8(odd))}; }
inline WidePairs int8_pairs(const int8_t* even, const int8_t* odd, const FloatPair*) { return int8_pairs(even, odd); }
#if defined(POISE_AVX512)
inline Pairs int8_pairs(const int8_t* even, const int8_t* odd, const uint32_t*) { return {joined(int8_pairs(even, odd)).v}; }
#else
inline WidePairs int8_pairs(const int8_t* even, const int8_t* odd, const uint32_t*) { return int8_pairs(even, odd); }
#endif

constexpr int PARTS = 16 / COLUMNS;  // column vectors in a panel

// Pair I (k = 2I, 2I + 1) of a group of 32 weights less their zero point: small integers, exact in bf16.
template <int I, int ZERO> inline WidePairs pair_of(const Quads (*w)[8], WidePairs*) {
    return {levels<I % 2 * 2, ZERO>(w, I / 2), levels<I % 2 * 2 + 1, ZERO>(w, I / 2)};
}
#if defined(POISE_AVX512)
template <int I, int ZERO> inline Pairs pair_of(const Quads (*w)[8], Pairs*) {
    return {joined(pair_of<I, ZERO>(w, (WidePairs*)nullptr)).v};
}
#endif

// Where vdpbf16ps is used (choose_dot_bf16): in products with weights, and in attention, which can do without it at little cost.
extern bool dot_bf16_in_products, dot_bf16_in_attention;

}  // namespace POISE_NS
}  // namespace poise
