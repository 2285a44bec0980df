// AVX-512 for the variant sources on a CPU that lacks it: SIMDe's emulation, what SIMDe 0.7.4 lacks or rounds twice, and the
// instructions that bytes.h writes as inline assembly. Force-included; slow; for tests alone.
#pragma once
#define POISE_EMULATED
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>
#include <stdint.h>
#include <string.h>

namespace emulated {

union Vector {
    __m512 floats;
    __m512i integers;
    __m256 f[2];
    __m256i i[2];
    float f32[16];
    int32_t i32[16];
    uint32_t u32[16];
    uint8_t u8[64];
};

inline Vector of(__m512 x) { Vector v; v.floats = x; return v; }
inline Vector of(__m512i x) { Vector v; v.integers = x; return v; }
inline __m512i pair_i(__m256i low, __m256i high) { Vector v; v.i[0] = low; v.i[1] = high; return v.integers; }
inline __m512 pair_f(__m256 low, __m256 high) { Vector v; v.f[0] = low; v.f[1] = high; return v.floats; }
inline __m128i upper(__m256i x) { return _mm256_extracti128_si256(x, 1); }

inline __mmask16 cmplt_epi32_mask(__m512i a, __m512i b) {
    const Vector x = of(a), y = of(b);
    uint32_t m = 0;
    for (int j = 0; j < 16; j++) m |= (uint32_t)(x.i32[j] < y.i32[j]) << j;
    return (__mmask16)m;
}
inline __m256i cvtepi32_epi16(__m512i a) {
    const Vector x = of(a);
    uint16_t t[16];
    for (int j = 0; j < 16; j++) t[j] = (uint16_t)x.u32[j];
    __m256i r;
    memcpy(&r, t, 32);
    return r;
}
inline __m128i cvtepi32_epi8(__m512i a) {
    const Vector x = of(a);
    uint8_t t[16];
    for (int j = 0; j < 16; j++) t[j] = (uint8_t)x.u32[j];
    __m128i r;
    memcpy(&r, t, 16);
    return r;
}
inline __m512 cvtepi32_ps(__m512i a) { const Vector x = of(a); return pair_f(_mm256_cvtepi32_ps(x.i[0]), _mm256_cvtepi32_ps(x.i[1])); }
inline __m512i cvtps_epi32(__m512 a) { const Vector x = of(a); return pair_i(_mm256_cvtps_epi32(x.f[0]), _mm256_cvtps_epi32(x.f[1])); }
inline __m512 cvtepu32_ps(__m512i a) {
    Vector x = of(a);
    for (int j = 0; j < 16; j++) x.f32[j] = (float)x.u32[j];
    return x.floats;
}
inline __m512i cvtepi8_epi32(__m128i a) { return pair_i(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))); }
inline __m512i cvtepu8_epi32(__m128i a) { return pair_i(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))); }
inline __m512i cvtepu16_epi32(__m256i a) { return pair_i(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(upper(a))); }
inline __m512 cvtph_ps(__m256i a) { return pair_f(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(upper(a))); }

// acc[n] += Σ w[n][i] · q[i], modulo 2³², i < 4.
inline __m512i vpdpbusd(__m512i acc, __m512i w, const void* q) {
    Vector a = of(acc);
    const Vector u = of(w);
    int8_t s[4];
    memcpy(s, q, 4);
    for (int n = 0; n < 16; n++) {
        int32_t sum = 0;
        for (int i = 0; i < 4; i++) sum += (int32_t)u.u8[n * 4 + i] * s[i];
        a.u32[n] += (uint32_t)sum;
    }
    return a.integers;
}
// Odd element first, then the even one, each one fma: what the instruction does under FTZ and DAZ.
inline __m512 vdpbf16ps(__m512 acc, __m512i w, const void* pair) {
    Vector a = of(acc);
    const Vector u = of(w);
    uint32_t bits;
    memcpy(&bits, pair, 4);
    const __m256 odd = _mm256_castsi256_ps(_mm256_set1_epi32((int)(bits & 0xffff0000))), even = _mm256_castsi256_ps(_mm256_set1_epi32((int)(bits << 16)));
    for (int h = 0; h < 2; h++) {
        const __m256 w1 = _mm256_castsi256_ps(_mm256_and_si256(u.i[h], _mm256_set1_epi32((int)0xffff0000)));
        const __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(u.i[h], 16));
        a.f[h] = _mm256_fmadd_ps(w0, even, _mm256_fmadd_ps(w1, odd, a.f[h]));
    }
    return a.floats;
}

// Nearest even, denormals to zero, NaN quiet.
inline __m256i vcvtneps2bf16(__m512 x) {
    const Vector u = of(x);
    uint16_t t[16];
    for (int j = 0; j < 16; j++) {
        const uint32_t bits = u.u32[j], magnitude = bits & 0x7fffffff;
        if (magnitude > 0x7f800000) t[j] = (uint16_t)((bits >> 16) | 0x40);
        else if (magnitude < 0x00800000) t[j] = (uint16_t)((bits >> 16) & 0x8000);
        else t[j] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
    __m256i r;
    memcpy(&r, t, 32);
    return r;
}

}  // namespace emulated

#undef _mm512_cmplt_epi32_mask
#undef _mm512_cvtepu32_ps
#define _mm512_cmplt_epi32_mask emulated::cmplt_epi32_mask
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtepu32_ps emulated::cvtepu32_ps
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps

#define POISE_VPDPBUSD(acc, w, q) acc = emulated::vpdpbusd(acc, w, q)
#define POISE_VDPBF16PS(acc, w, pair) acc = emulated::vdpbf16ps(acc, w, pair)
#define POISE_VCVTNEPS2BF16(rounded, x) rounded = emulated::vcvtneps2bf16(x)
