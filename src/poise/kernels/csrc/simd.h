// A thin layer of 16-lane vectors: one zmm, two ymm, or an array, behind the same functions and the same bits.
//
// Included only by variant sources, which are compiled once per instruction set with POISE_NS naming the namespace.
// Every operation is IEEE binary32 with one rounding; nothing here contracts, reorders or reduces across lanes.
// Variant sources use no std:: templates: an inline function compiled for AVX-512 must never serve another variant.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef POISE_NS
#error "POISE_NS names the variant's namespace"
#endif

#if defined(POISE_AVX512)
#include <immintrin.h>
#define POISE_X86 1
#elif defined(POISE_AVX2)
#include <immintrin.h>
#define POISE_X86 1
#endif

namespace poise {
namespace POISE_NS {

constexpr int LANES = 16;

// Calls f with the constants 0 … N-1. Loops over arrays of vectors written so stay in registers, whatever the unroller thinks.
template <int I> struct Index {
    constexpr operator int() const { return I; }
};
#if defined(POISE_SANITIZE)
#define POISE_INLINE  // the checks in every inlined copy take the compiler many minutes
#else
#define POISE_INLINE __attribute__((always_inline))
#endif
template <int N, class F> POISE_INLINE inline void unrolled(const F& f) {
    if constexpr (N > 0) {
        unrolled<N - 1>(f);
        f(Index<N - 1>{});
    }
}

#if defined(POISE_X86)
// Lanes fold 8 → 4 → 2 → 1 as lane i with lane i + half: the contract's order (docs/NUMERICS.md).
inline float fold_sum_256(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float fold_max_256(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline float fma1(float a, float b, float c) { return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c))); }
inline int32_t fold_max_i_256(__m256i x) {
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
inline int32_t sum_bytes(const int8_t* p) {  // of 16: as unsigned bytes, 128 too large each
    const __m128i u = _mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8((char)0x80));
    const __m128i sums = _mm_sad_epu8(u, _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 16 * 128;
}

#endif

#if defined(POISE_AVX512)

struct F32 { __m512 v; };
struct I32 { __m512i v; };
struct Mask { __mmask16 m; };

inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline F32 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// maximum and minimum return the second operand if either is NaN.
inline F32 maximum(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 minimum(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 rint(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline I32 to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline float lane0(F32 a) { return _mm_cvtss_f32(_mm512_castps512_ps128(a.v)); }
inline I32 bits(F32 a) { return {_mm512_castps_si512(a.v)}; }
inline F32 from_bits(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
inline I32 load_i(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_i(int32_t* p, I32 a) { _mm512_storeu_si512(p, a.v); }
inline I32 set1_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I32 operator*(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I32 operator|(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I32 operator^(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N> inline I32 shift_left(I32 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> inline I32 shift_right(I32 a) { return {_mm512_srli_epi32(a.v, N)}; }
// High 32 bits of the unsigned product of each lane.
inline I32 multiply_high(I32 a, I32 b) {
    __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(a.v, b.v), 32);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), _mm512_srli_epi64(b.v, 32));
    return {_mm512_mask_mov_epi32(even, 0xAAAA, odd)};
}
inline F32 unsigned_to_float(I32 a) { return {_mm512_cvtepu32_ps(a.v)}; }
inline Mask less(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask greater_equal(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask greater(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask equal(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask equal_i(I32 a, I32 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
inline Mask less_i(I32 a, I32 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
inline F32 select(Mask m, F32 yes, F32 no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
inline I32 select_i(Mask m, I32 yes, I32 no) { return {_mm512_mask_blend_epi32(m.m, no.v, yes.v)}; }
inline uint32_t mask_bits(Mask m) { return m.m; }
inline Mask mask_from_bits(uint32_t b) { return {(__mmask16)b}; }
inline F32 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline F32 load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline I32 load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline I32 load_i8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
// w[r] lane c → w[c / 4] lane 4 (c mod 4) + r: the 16 columns of four rows, one after the other.
inline void interleave4(I32 w[4]) {
    const __m512i a = _mm512_unpacklo_epi32(w[0].v, w[1].v), b = _mm512_unpacklo_epi32(w[2].v, w[3].v);
    const __m512i c = _mm512_unpackhi_epi32(w[0].v, w[1].v), d = _mm512_unpackhi_epi32(w[2].v, w[3].v);
    // t_j holds columns j, j + 4, j + 8, j + 12.
    const __m512i t0 = _mm512_unpacklo_epi64(a, b), t1 = _mm512_unpackhi_epi64(a, b);
    const __m512i t2 = _mm512_unpacklo_epi64(c, d), t3 = _mm512_unpackhi_epi64(c, d);
    const __m512i low01 = _mm512_shuffle_i32x4(t0, t1, 0x44), high01 = _mm512_shuffle_i32x4(t0, t1, 0xEE);
    const __m512i low23 = _mm512_shuffle_i32x4(t2, t3, 0x44), high23 = _mm512_shuffle_i32x4(t2, t3, 0xEE);
    w[0].v = _mm512_shuffle_i32x4(low01, low23, 0x88);
    w[1].v = _mm512_shuffle_i32x4(low01, low23, 0xDD);
    w[2].v = _mm512_shuffle_i32x4(high01, high23, 0x88);
    w[3].v = _mm512_shuffle_i32x4(high01, high23, 0xDD);
}
inline void store_low_u16(uint16_t* p, I32 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
inline void store_low_i8(int8_t* p, I32 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
inline __m256 low_half(F32 x) { return _mm512_castps512_ps256(x.v); }
inline __m256 high_half(F32 x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)); }
inline float fold_sum(F32 x) { return fold_sum_256(_mm256_add_ps(low_half(x), high_half(x))); }
inline float fold_max(F32 x) { return fold_max_256(_mm256_max_ps(low_half(x), high_half(x))); }
inline I32 maximum_i(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline int32_t fold_max_i(I32 x) {
    return fold_max_i_256(_mm256_max_epi32(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1)));
}

#elif defined(POISE_AVX2)

struct F32 { __m256 a, b; };
struct I32 { __m256i a, b; };
struct Mask { __m256i a, b; };

inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 operator+(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32 operator-(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32 operator*(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32 operator/(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F32 maximum(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32 minimum(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F32 rint(F32 x) {
    constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
inline I32 to_int(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I32 bits(F32 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F32 from_bits(I32 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I32 load_i(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))}; }
inline void store_i(int32_t* p, I32 x) { _mm256_storeu_si256((__m256i*)p, x.a); _mm256_storeu_si256((__m256i*)(p + 8), x.b); }
inline I32 set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32 operator+(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I32 operator-(I32 x, I32 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I32 operator*(I32 x, I32 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline I32 operator&(I32 x, I32 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I32 operator|(I32 x, I32 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline I32 operator^(I32 x, I32 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N> inline I32 shift_left(I32 x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> inline I32 shift_right(I32 x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
inline __m256i multiply_high_256(__m256i x, __m256i y) {
    __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(x, y), 32);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32));
    return _mm256_blend_epi32(even, odd, 0xAA);
}
inline I32 multiply_high(I32 x, I32 y) { return {multiply_high_256(x.a, y.a), multiply_high_256(x.b, y.b)}; }
// hi·65536 and lo are exact in f32, and so the one rounding of the fma is that of the conversion.
inline __m256 unsigned_to_float_256(__m256i x) {
    __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
    __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
}
inline F32 unsigned_to_float(I32 x) { return {unsigned_to_float_256(x.a), unsigned_to_float_256(x.b)}; }
inline Mask as_mask(__m256 x, __m256 y) { return {_mm256_castps_si256(x), _mm256_castps_si256(y)}; }
inline Mask less(F32 x, F32 y) { return as_mask(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)); }
inline Mask greater_equal(F32 x, F32 y) { return as_mask(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)); }
inline Mask greater(F32 x, F32 y) { return as_mask(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)); }
inline Mask equal(F32 x, F32 y) { return as_mask(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)); }
inline Mask equal_i(I32 x, I32 y) { return {_mm256_cmpeq_epi32(x.a, y.a), _mm256_cmpeq_epi32(x.b, y.b)}; }
inline Mask less_i(I32 x, I32 y) { return {_mm256_cmpgt_epi32(y.a, x.a), _mm256_cmpgt_epi32(y.b, x.b)}; }
inline F32 select(Mask m, F32 yes, F32 no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(m.a)), _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(m.b))};
}
inline I32 select_i(Mask m, I32 yes, I32 no) { return {_mm256_blendv_epi8(no.a, yes.a, m.a), _mm256_blendv_epi8(no.b, yes.b, m.b)}; }
inline uint32_t mask_bits(Mask m) {
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(m.a)) | ((uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(m.b)) << 8);
}
inline __m256i mask_from_byte(uint32_t b) {
    __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)b), bit), bit);
}
inline Mask mask_from_bits(uint32_t b) { return {mask_from_byte(b & 0xff), mask_from_byte((b >> 8) & 0xff)}; }
inline F32 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256 bf16_to_f32(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline F32 load_bf16(const uint16_t* p) {
    return {bf16_to_f32(_mm_loadu_si128((const __m128i*)p)), bf16_to_f32(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline I32 load_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
inline I32 load_i8(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
inline void interleave4_256(__m256i w0, __m256i w1, __m256i w2, __m256i w3, I32* first, I32* second) {
    const __m256i a = _mm256_unpacklo_epi32(w0, w1), b = _mm256_unpacklo_epi32(w2, w3);
    const __m256i c = _mm256_unpackhi_epi32(w0, w1), d = _mm256_unpackhi_epi32(w2, w3);
    // t_j holds columns j and j + 4.
    const __m256i t0 = _mm256_unpacklo_epi64(a, b), t1 = _mm256_unpackhi_epi64(a, b);
    const __m256i t2 = _mm256_unpacklo_epi64(c, d), t3 = _mm256_unpackhi_epi64(c, d);
    *first = {_mm256_permute2x128_si256(t0, t1, 0x20), _mm256_permute2x128_si256(t2, t3, 0x20)};
    *second = {_mm256_permute2x128_si256(t0, t1, 0x31), _mm256_permute2x128_si256(t2, t3, 0x31)};
}
// w[r] lane c → w[c / 4] lane 4 (c mod 4) + r: the 16 columns of four rows, one after the other.
inline void interleave4(I32 w[4]) {
    I32 r[4];
    interleave4_256(w[0].a, w[1].a, w[2].a, w[3].a, r, r + 1);
    interleave4_256(w[0].b, w[1].b, w[2].b, w[3].b, r + 2, r + 3);
    for (int j = 0; j < 4; j++) w[j] = r[j];
}
// Lanes hold values that fit (0 … 65535, −128 … 127): the saturation of the packs never acts.
inline void store_low_u16(uint16_t* p, I32 x) {
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8));
}
inline void store_low_i8(int8_t* p, I32 x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline float fold_sum(F32 x) { return fold_sum_256(_mm256_add_ps(x.a, x.b)); }
inline float fold_max(F32 x) { return fold_max_256(_mm256_max_ps(x.a, x.b)); }
inline float lane0(F32 x) { return _mm256_cvtss_f32(x.a); }
inline I32 maximum_i(I32 x, I32 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline int32_t fold_max_i(I32 x) { return fold_max_i_256(_mm256_max_epi32(x.a, x.b)); }

#else  // baseline: portable, slow, an oracle and last resort

struct F32 { float v[16]; };
struct I32 { int32_t v[16]; };
struct Mask { bool v[16]; };
#define POISE_LANES(T, expr) T r; for (int j = 0; j < 16; j++) r.v[j] = (expr); return r

// a·b + c with one rounding. Where the machine has no fma: the product is exact in double, TwoSum gives the error of the sum,
// and setting the last bit when it is inexact (round to odd) makes the final conversion round correctly.
inline float fma1(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    double p = (double)a * (double)b, d = (double)c;
    double s = p + d;
    double t = s - p;
    double e = (p - (s - t)) + (d - t);
    if (e != 0.0 && s - s == 0.0) {
        uint64_t u;
        memcpy(&u, &s, 8);
        if (!(u & 1)) {
            // Towards e: away from zero if it has the sign of s, else towards zero.
            u += ((e > 0.0) == (s > 0.0)) ? 1 : -1;
            memcpy(&s, &u, 8);
        }
    }
    return (float)s;
#endif
}
inline float rint1(float x) {
    if (!(x < 8388608.0f && x > -8388608.0f)) return x;
    const float big = x < 0 ? -12582912.0f : 12582912.0f;
    volatile float t = x + big;
    return t - big;
}
inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff, u;
    if (exponent == 31) u = sign | 0x7f800000 | (fraction << 13) | (fraction ? 0x400000 : 0);
    else if (exponent) u = sign | ((exponent + 112) << 23) | (fraction << 13);
    else {
        float f = (float)fraction * 5.9604644775390625e-8f;
        memcpy(&u, &f, 4);
        u |= sign;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline F32 load(const float* p) { POISE_LANES(F32, p[j]); }
inline void store(float* p, F32 a) { memcpy(p, a.v, 64); }
inline F32 set1(float x) { POISE_LANES(F32, x); }
inline F32 zero() { return set1(0.0f); }
inline F32 operator+(F32 a, F32 b) { POISE_LANES(F32, a.v[j] + b.v[j]); }
inline F32 operator-(F32 a, F32 b) { POISE_LANES(F32, a.v[j] - b.v[j]); }
inline F32 operator*(F32 a, F32 b) { POISE_LANES(F32, a.v[j] * b.v[j]); }
inline F32 operator/(F32 a, F32 b) { POISE_LANES(F32, a.v[j] / b.v[j]); }
inline F32 fma(F32 a, F32 b, F32 c) { POISE_LANES(F32, fma1(a.v[j], b.v[j], c.v[j])); }
inline F32 maximum(F32 a, F32 b) { POISE_LANES(F32, a.v[j] > b.v[j] ? a.v[j] : b.v[j]); }
inline F32 minimum(F32 a, F32 b) { POISE_LANES(F32, a.v[j] < b.v[j] ? a.v[j] : b.v[j]); }
inline F32 rint(F32 a) { POISE_LANES(F32, rint1(a.v[j])); }
inline int32_t to_int1(float x) { return x >= -2147483648.0f && x < 2147483648.0f ? (int32_t)rint1(x) : INT32_MIN; }
inline I32 to_int(F32 a) { POISE_LANES(I32, to_int1(a.v[j])); }
inline F32 to_float(I32 a) { POISE_LANES(F32, (float)a.v[j]); }
inline I32 bits(F32 a) { I32 r; memcpy(r.v, a.v, 64); return r; }
inline F32 from_bits(I32 a) { F32 r; memcpy(r.v, a.v, 64); return r; }
inline I32 load_i(const int32_t* p) { I32 r; memcpy(r.v, p, 64); return r; }
inline void store_i(int32_t* p, I32 a) { memcpy(p, a.v, 64); }
inline I32 set1_i(int32_t x) { POISE_LANES(I32, x); }
inline I32 operator+(I32 a, I32 b) { POISE_LANES(I32, (int32_t)((uint32_t)a.v[j] + (uint32_t)b.v[j])); }
inline I32 operator-(I32 a, I32 b) { POISE_LANES(I32, (int32_t)((uint32_t)a.v[j] - (uint32_t)b.v[j])); }
inline I32 operator*(I32 a, I32 b) { POISE_LANES(I32, (int32_t)((uint32_t)a.v[j] * (uint32_t)b.v[j])); }
inline I32 operator&(I32 a, I32 b) { POISE_LANES(I32, a.v[j] & b.v[j]); }
inline I32 operator|(I32 a, I32 b) { POISE_LANES(I32, a.v[j] | b.v[j]); }
inline I32 operator^(I32 a, I32 b) { POISE_LANES(I32, a.v[j] ^ b.v[j]); }
template <int N> inline I32 shift_left(I32 a) { POISE_LANES(I32, (int32_t)((uint32_t)a.v[j] << N)); }
template <int N> inline I32 shift_right(I32 a) { POISE_LANES(I32, (int32_t)((uint32_t)a.v[j] >> N)); }
inline I32 multiply_high(I32 a, I32 b) { POISE_LANES(I32, (int32_t)(((uint64_t)(uint32_t)a.v[j] * (uint32_t)b.v[j]) >> 32)); }
inline F32 unsigned_to_float(I32 a) { POISE_LANES(F32, (float)(uint32_t)a.v[j]); }
inline Mask less(F32 a, F32 b) { POISE_LANES(Mask, a.v[j] < b.v[j]); }
inline Mask greater_equal(F32 a, F32 b) { POISE_LANES(Mask, a.v[j] >= b.v[j]); }
inline Mask greater(F32 a, F32 b) { POISE_LANES(Mask, a.v[j] > b.v[j]); }
inline Mask equal(F32 a, F32 b) { POISE_LANES(Mask, a.v[j] == b.v[j]); }
inline Mask equal_i(I32 a, I32 b) { POISE_LANES(Mask, a.v[j] == b.v[j]); }
inline Mask less_i(I32 a, I32 b) { POISE_LANES(Mask, a.v[j] < b.v[j]); }
inline F32 select(Mask m, F32 yes, F32 no) { POISE_LANES(F32, m.v[j] ? yes.v[j] : no.v[j]); }
inline I32 select_i(Mask m, I32 yes, I32 no) { POISE_LANES(I32, m.v[j] ? yes.v[j] : no.v[j]); }
inline uint32_t mask_bits(Mask m) { uint32_t b = 0; for (int j = 0; j < 16; j++) b |= (uint32_t)m.v[j] << j; return b; }
inline Mask mask_from_bits(uint32_t b) { POISE_LANES(Mask, (b >> j) & 1); }
inline F32 load_f16(const uint16_t* p) { POISE_LANES(F32, half_to_float(p[j])); }
inline F32 load_bf16(const uint16_t* p) {
    I32 r;
    for (int j = 0; j < 16; j++) r.v[j] = (int32_t)((uint32_t)p[j] << 16);
    return from_bits(r);
}
inline I32 load_u8(const uint8_t* p) { POISE_LANES(I32, p[j]); }
inline I32 load_i8(const int8_t* p) { POISE_LANES(I32, p[j]); }
// w[r] lane c → w[c / 4] lane 4 (c mod 4) + r: the 16 columns of four rows, one after the other.
inline void interleave4(I32 w[4]) {
    I32 t[4];
    for (int c = 0; c < 16; c++)
        for (int r = 0; r < 4; r++) t[c / 4].v[4 * (c % 4) + r] = w[r].v[c];
    memcpy(w, t, sizeof t);
}
inline void store_low_u16(uint16_t* p, I32 a) { for (int j = 0; j < 16; j++) p[j] = (uint16_t)a.v[j]; }
inline void store_low_i8(int8_t* p, I32 a) { for (int j = 0; j < 16; j++) p[j] = (int8_t)a.v[j]; }
inline float lane0(F32 a) { return a.v[0]; }
inline I32 maximum_i(I32 a, I32 b) { POISE_LANES(I32, a.v[j] > b.v[j] ? a.v[j] : b.v[j]); }
#undef POISE_LANES
inline int32_t fold_max_i(I32 x) {
    int32_t m = x.v[0];
    for (int j = 1; j < 16; j++) m = x.v[j] > m ? x.v[j] : m;
    return m;
}
inline int32_t sum_bytes(const int8_t* p) {
    int32_t s = 0;
    for (int j = 0; j < 16; j++) s += p[j];
    return s;
}
inline float fold_sum(F32 x) {
    for (int half = 8; half; half >>= 1)
        for (int j = 0; j < half; j++) x.v[j] = x.v[j] + x.v[j + half];
    return x.v[0];
}
inline float fold_max(F32 x) {
    float m = x.v[0];
    for (int j = 1; j < 16; j++) m = x.v[j] > m ? x.v[j] : m;
    return m;
}

#endif

// a · 2ⁿ where n is a whole number and a and the result are normal; a NaN stays.
inline F32 scale_by_power(F32 a, F32 n) { return from_bits(bits(a) + shift_left<23>(to_int(n))); }

inline F32 load_partial(const float* p, int count, float fill) {
    if (count == 16) return load(p);
    float t[16];
    for (int j = 0; j < 16; j++) t[j] = j < count ? p[j] : fill;
    return load(t);
}
inline void store_partial(float* p, F32 a, int count) {
    if (count == 16) return store(p, a);
    float t[16];
    store(t, a);
    for (int j = 0; j < count; j++) p[j] = t[j];
}

}  // namespace POISE_NS
}  // namespace poise
