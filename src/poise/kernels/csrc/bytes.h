// 64-byte lines of unsigned weights and the exact integer dot of four of them with four signed activations.
#pragma once
#include "simd.h"

namespace poise {
namespace POISE_NS {

#if defined(POISE_AVX512)

struct Line { __m512i v; };
inline Line load_line(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Line low_nibbles(Line a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Line high_nibbles(Line a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// Bit FROM of each byte moved to bit 4; WIDTH bits.
template <int FROM, int WIDTH> inline Line plane_bits(Line a) {
    const __m512i mask = _mm512_set1_epi8(WIDTH == 1 ? 0x10 : 0x30);
    if constexpr (FROM <= 4) return {_mm512_and_si512(_mm512_slli_epi16(a.v, 4 - FROM), mask)};
    else return {_mm512_and_si512(_mm512_srli_epi16(a.v, FROM - 4), mask)};
}
inline Line operator|(Line a, Line b) { return {_mm512_or_si512(a.v, b.v)}; }
// acc[n] += Σ w[n][i] · q[i], exact. g++ 12 does not fold the broadcast into the instruction by itself.
template <bool WIDE> inline I32 dot4(I32 acc, Line w, const int8_t* q) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*(const int32_t*)q));
    return acc;
}
inline void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline I32 broadcast_i(const int32_t* p) { return {_mm512_set1_epi32(*p)}; }

// acc += odd element, then even element, each one fma; `w` holds pairs of bf16 for 16 outputs.
inline F32 dot_bf16_fma(F32 acc, __m512i w, uint32_t pair) {
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000)));
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    const __m512 a1 = _mm512_castsi512_ps(_mm512_set1_epi32((int)(pair & 0xffff0000)));
    const __m512 a0 = _mm512_castsi512_ps(_mm512_set1_epi32((int)(pair << 16)));
    return {_mm512_fmadd_ps(even, a0, _mm512_fmadd_ps(odd, a1, acc.v))};
}
struct Pairs { __m512i v; };
inline Pairs load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
template <bool HARDWARE> inline F32 dot_bf16(F32 acc, Pairs w, const uint32_t* pair) {
    if constexpr (HARDWARE) {
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*pair));
        return acc;
    } else {
        return dot_bf16_fma(acc, w.v, *pair);
    }
}

#elif defined(POISE_AVX2)

struct Line { __m256i a, b; };
inline Line load_line(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
inline Line low_nibbles(Line x) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline Line high_nibbles(Line x) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
template <int FROM, int WIDTH> inline Line plane_bits(Line x) {
    const __m256i m = _mm256_set1_epi8(WIDTH == 1 ? 0x10 : 0x30);
    if constexpr (FROM <= 4) return {_mm256_and_si256(_mm256_slli_epi16(x.a, 4 - FROM), m), _mm256_and_si256(_mm256_slli_epi16(x.b, 4 - FROM), m)};
    else return {_mm256_and_si256(_mm256_srli_epi16(x.a, FROM - 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, FROM - 4), m)};
}
inline Line operator|(Line x, Line y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
// Pairs of products fit in 16 bits while w ≤ 127 (2 · 127 · 127 < 2¹⁵); wider weights are split at bit 7 (2 · 128 · 127 < 2¹⁵).
inline __m256i dot4_256(__m256i acc, __m256i w, __m256i q) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, q), _mm256_set1_epi16(1)));
}
template <bool WIDE> inline I32 dot4(I32 acc, Line w, const int8_t* q) {
    int32_t dword;
    memcpy(&dword, q, 4);
    const __m256i b = _mm256_set1_epi32(dword);
    if constexpr (WIDE) {
        const __m256i low = _mm256_set1_epi8(0x7f), top = _mm256_set1_epi8((char)0x80);
        acc.a = dot4_256(dot4_256(acc.a, _mm256_and_si256(w.a, low), b), _mm256_and_si256(w.a, top), b);
        acc.b = dot4_256(dot4_256(acc.b, _mm256_and_si256(w.b, low), b), _mm256_and_si256(w.b, top), b);
        return acc;
    }
    return {dot4_256(acc.a, w.a, b), dot4_256(acc.b, w.b, b)};
}
inline void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline I32 broadcast_i(const int32_t* p) { return set1_i(*p); }
struct Pairs { __m256i a, b; };
inline Pairs load_pairs(const uint16_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))}; }
inline __m256 dot_bf16_256(__m256 acc, __m256i w, __m256 a1, __m256 a0) {
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000)));
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), a0, _mm256_fmadd_ps(odd, a1, acc));
}
template <bool HARDWARE> inline F32 dot_bf16(F32 acc, Pairs w, const uint32_t* pair) {
    const __m256 a1 = _mm256_castsi256_ps(_mm256_set1_epi32((int)(*pair & 0xffff0000)));
    const __m256 a0 = _mm256_castsi256_ps(_mm256_set1_epi32((int)(*pair << 16)));
    return {dot_bf16_256(acc.a, w.a, a1, a0), dot_bf16_256(acc.b, w.b, a1, a0)};
}

#else

struct Line { uint8_t v[64]; };
#define POISE_BYTES(expr) Line r; for (int j = 0; j < 64; j++) r.v[j] = (uint8_t)(expr); return r
inline Line load_line(const uint8_t* p) { Line r; memcpy(r.v, p, 64); return r; }
inline Line low_nibbles(Line a) { POISE_BYTES(a.v[j] & 15); }
inline Line high_nibbles(Line a) { POISE_BYTES(a.v[j] >> 4); }
template <int FROM, int WIDTH> inline Line plane_bits(Line a) { POISE_BYTES(((a.v[j] >> FROM) & (WIDTH == 1 ? 1 : 3)) << 4); }
inline Line operator|(Line a, Line b) { POISE_BYTES(a.v[j] | b.v[j]); }
#undef POISE_BYTES
template <bool WIDE> inline I32 dot4(I32 acc, Line w, const int8_t* q) {
    for (int n = 0; n < 16; n++)
        for (int i = 0; i < 4; i++) acc.v[n] += (int32_t)w.v[n * 4 + i] * q[i];
    return acc;
}
inline void prefetch(const uint8_t*) {}
inline I32 broadcast_i(const int32_t* p) { return set1_i(*p); }
struct Pairs { uint16_t v[32]; };
inline Pairs load_pairs(const uint16_t* p) { Pairs r; memcpy(r.v, p, 64); return r; }
inline float bf16_value(uint32_t upper) {
    float f;
    memcpy(&f, &upper, 4);
    return f;
}
template <bool HARDWARE> inline F32 dot_bf16(F32 acc, Pairs w, const uint32_t* pair) {
    const float a1 = bf16_value(*pair & 0xffff0000), a0 = bf16_value(*pair << 16);
    for (int n = 0; n < 16; n++) {
        acc.v[n] = fma1(bf16_value((uint32_t)w.v[n * 2 + 1] << 16), a1, acc.v[n]);
        acc.v[n] = fma1(bf16_value((uint32_t)w.v[n * 2] << 16), a0, acc.v[n]);
    }
    return acc;
}

#endif

// Whether vdpbf16ps may be used: set once at load after the CPU was asked and the instruction checked.
extern bool use_dot_bf16;

}  // namespace POISE_NS
}  // namespace poise
