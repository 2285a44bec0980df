// Products of one panel (16 outputs) with one tile of prepared rows. One template per container and tile height; every
// height sums in the same order, so a row's bits do not depend on its company.
#include "bytes.h"
#include "elementary.h"
#include "kernels.h"

namespace poise {
namespace POISE_NS {

bool use_dot_bf16 = false;

namespace {

constexpr int PREFETCH = 1536;  // bytes ahead in the weight stream

template <Format F> struct Group {
    static constexpr bool HAS_MINIMUM = F == Q4_1 || F == Q5_1 || F == Q4_K || F == Q5_K;
    static constexpr bool HALVES = F == Q6_K;  // scales per 16
    static constexpr bool WIDE = F == Q8_0;    // weights need all 8 bits
    static constexpr int BYTES = FORMATS[F].group_bytes;
    static constexpr int SUPER = FORMATS[F].super_bytes;
    // The zero point as a left shift of −8·S (−1: none).
    static constexpr int ZERO_SHIFT = F == Q4_0 ? 0 : F == Q5_0 ? 1 : F == Q6_K ? 2 : F == Q8_0 ? 4 : -1;
    static constexpr int SCALES = F == Q8_0 ? 512 : F == Q6_K ? 384 : (F == Q5_0 || F == Q5_1 || F == Q5_K) ? 320 : 256;

    static inline void unpack(const uint8_t* p, Line w[8]) {
        if constexpr (F == Q8_0) {
            for (int j = 0; j < 8; j++) w[j] = load_line(p + 64 * j);
            return;
        }
        for (int j = 0; j < 4; j++) {
            const Line packed = load_line(p + 64 * j);
            w[j] = low_nibbles(packed);
            w[j + 4] = high_nibbles(packed);
        }
        if constexpr (F == Q5_0 || F == Q5_1 || F == Q5_K) {
            const Line plane = load_line(p + 256);
            w[0] = w[0] | plane_bits<0, 1>(plane);
            w[1] = w[1] | plane_bits<1, 1>(plane);
            w[2] = w[2] | plane_bits<2, 1>(plane);
            w[3] = w[3] | plane_bits<3, 1>(plane);
            w[4] = w[4] | plane_bits<4, 1>(plane);
            w[5] = w[5] | plane_bits<5, 1>(plane);
            w[6] = w[6] | plane_bits<6, 1>(plane);
            w[7] = w[7] | plane_bits<7, 1>(plane);
        }
        if constexpr (F == Q6_K) {
            for (int t = 0; t < 2; t++) {
                const Line plane = load_line(p + 256 + 64 * t);
                w[4 * t] = w[4 * t] | plane_bits<0, 2>(plane);
                w[4 * t + 1] = w[4 * t + 1] | plane_bits<2, 2>(plane);
                w[4 * t + 2] = w[4 * t + 2] | plane_bits<4, 2>(plane);
                w[4 * t + 3] = w[4 * t + 3] | plane_bits<6, 2>(plane);
            }
        }
    }

    // Scale and minimum of each output; `second` is the scale of k 16…31 where scales go by 16.
    static inline void scales(const uint8_t* p, const uint8_t* super, F32& scale, F32& second, F32& minimum) {
        p += SCALES;
        if constexpr (SUPER == 0) {
            scale = load_f16((const uint16_t*)p);
            if constexpr (HAS_MINIMUM) minimum = load_f16((const uint16_t*)(p + 32));
        } else if constexpr (F == Q6_K) {
            const F32 d = load_f16((const uint16_t*)super);
            scale = d * to_float(load_i8((const int8_t*)p));
            second = d * to_float(load_i8((const int8_t*)p + 16));
        } else {
            scale = load_f16((const uint16_t*)super) * to_float(load_u8(p));
            minimum = negate(load_f16((const uint16_t*)(super + 32)) * to_float(load_u8(p + 16)));
        }
    }
};

template <Format F> inline I32 start(const int32_t* minus_eight_s) {
    if constexpr (Group<F>::ZERO_SHIFT < 0) return set1_i(0);
    else return shift_left<Group<F>::ZERO_SHIFT>(broadcast_i(minus_eight_s));
}

template <Format F, int MR> void integer_tile(const uint8_t* panel, int cols, const uint8_t* tile, float* out) {
    using G = Group<F>;
    constexpr int STEP = MR < 4 ? MR : 4;  // rows whose dots are interleaved
    F32 acc[MR];
    for (int m = 0; m < MR; m++) acc[m] = zero();
    const uint8_t* super = panel;
    for (int g = 0; g < cols / 32; g++) {
        if (G::SUPER && g % 8 == 0) {
            super = panel;
            panel += G::SUPER;
        }
        for (int line = 0; line < G::BYTES; line += 64) prefetch(panel + PREFETCH + line);
        Line w[8];
        G::unpack(panel, w);
        F32 scale, second, minimum;
        G::scales(panel, super, scale, second, minimum);
        const int8_t* q = (const int8_t*)tile;
        const float* d = (const float*)(tile + MR * 32);
        const float* ds = d + MR;
        const int32_t* s = (const int32_t*)(ds + MR);
        for (int m = 0; m < MR; m += STEP) {
            I32 t[STEP], u[STEP];
            for (int i = 0; i < STEP; i++) t[i] = start<F>(s + (G::HALVES ? MR : 0) + m + i);
            for (int i = 0; i < STEP; i++) u[i] = G::HALVES ? start<F>(s + 2 * MR + m + i) : set1_i(0);
            // Two integer chains: the sum is exact in any order.
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < STEP; i++) {
                    t[i] = dot4<G::WIDE>(t[i], w[j], q + (m + i) * 32 + 4 * j);
                    if constexpr (G::HALVES || MR == 1) u[i] = dot4<G::WIDE>(u[i], w[j + 4], q + (m + i) * 32 + 16 + 4 * j);
                }
            if constexpr (!(G::HALVES || MR == 1))
                for (int j = 4; j < 8; j++)
                    for (int i = 0; i < STEP; i++) t[i] = dot4<G::WIDE>(t[i], w[j], q + (m + i) * 32 + 4 * j);
            for (int i = 0; i < STEP; i++) {
                const F32 dm = set1(d[m + i]);
                if constexpr (G::HALVES) {
                    acc[m + i] = fma(to_float(t[i]), scale * dm, acc[m + i]);
                    acc[m + i] = fma(to_float(u[i]), second * dm, acc[m + i]);
                } else {
                    const I32 sum = MR == 1 ? t[i] + u[i] : t[i];
                    acc[m + i] = fma(to_float(sum), scale * dm, acc[m + i]);
                    if constexpr (G::HAS_MINIMUM) acc[m + i] = fma(minimum, set1(ds[m + i]), acc[m + i]);
                }
            }
        }
        panel += G::BYTES;
        tile += MR * INT8_GROUP_BYTES;
    }
    for (int m = 0; m < MR; m++) store(out + 16 * m, acc[m]);
}

template <int MR, bool HARDWARE> void bf16_tile(const uint8_t* panel, int cols, const uint8_t* tile, float* out) {
    F32 acc[MR];
    for (int m = 0; m < MR; m++) acc[m] = zero();
    const uint32_t* pair = (const uint32_t*)tile;
    for (int k = 0; k < cols; k += 2) {
        prefetch(panel + PREFETCH);
        const Pairs w = load_pairs((const uint16_t*)panel);
        for (int m = 0; m < MR; m++) acc[m] = dot_bf16<HARDWARE>(acc[m], w, pair + m);
        panel += 64;
        pair += MR;
    }
    for (int m = 0; m < MR; m++) store(out + 16 * m, acc[m]);
}

template <Format F, int MR> void float_tile(const uint8_t* panel, int cols, const uint8_t* tile, float* out) {
    F32 acc[MR];
    for (int m = 0; m < MR; m++) acc[m] = zero();
    const float* a = (const float*)tile;
    for (int k = 0; k < cols; k++) {
        prefetch(panel + PREFETCH);
        const F32 w = F == F16 ? load_f16((const uint16_t*)panel) : load((const float*)panel);
        for (int m = 0; m < MR; m++) acc[m] = fma(w, set1(a[m]), acc[m]);
        panel += F == F16 ? 32 : 64;
        a += MR;
    }
    for (int m = 0; m < MR; m++) store(out + 16 * m, acc[m]);
}

template <int MR> void tile_of(const Matrix& w, int p, const uint8_t* tile, float* out) {
    const uint8_t* panel = w.panel(p);
    switch (w.format) {
        case Q4_0: return integer_tile<Q4_0, MR>(panel, w.cols, tile, out);
        case Q4_1: return integer_tile<Q4_1, MR>(panel, w.cols, tile, out);
        case Q5_0: return integer_tile<Q5_0, MR>(panel, w.cols, tile, out);
        case Q5_1: return integer_tile<Q5_1, MR>(panel, w.cols, tile, out);
        case Q8_0: return integer_tile<Q8_0, MR>(panel, w.cols, tile, out);
        case Q4_K: return integer_tile<Q4_K, MR>(panel, w.cols, tile, out);
        case Q5_K: return integer_tile<Q5_K, MR>(panel, w.cols, tile, out);
        case Q6_K: return integer_tile<Q6_K, MR>(panel, w.cols, tile, out);
        case BF16:
            if (use_dot_bf16) return bf16_tile<MR, true>(panel, w.cols, tile, out);
            return bf16_tile<MR, false>(panel, w.cols, tile, out);
        case F16: return float_tile<F16, MR>(panel, w.cols, tile, out);
        default: return float_tile<F32_, MR>(panel, w.cols, tile, out);
    }
}

template <Format F> void dequantize(const Matrix& w, int row, float* out) {
    using G = Group<F>;
    constexpr float ZERO[] = {8, 16, 32, 64, 128};
    const float z = G::ZERO_SHIFT < 0 ? 0.0f : ZERO[G::ZERO_SHIFT < 0 ? 0 : G::ZERO_SHIFT];
    const uint8_t* panel = w.panel(row / 16);
    const uint8_t* super = panel;
    const int n = row % 16;
    for (int g = 0; g < w.cols / 32; g++) {
        if (G::SUPER && g % 8 == 0) {
            super = panel;
            panel += G::SUPER;
        }
        F32 scale, second, minimum = zero();
        G::scales(panel, super, scale, second, minimum);
        float s[16], t[16], m[16];
        store(s, scale);
        if constexpr (G::HALVES) store(t, second);
        store(m, minimum);
        for (int k = 0; k < 32; k++) {
            const int j = k / 4, byte = n * 4 + k % 4;
            int u;
            if (F == Q8_0) u = panel[j * 64 + byte];
            else {
                u = j < 4 ? panel[j * 64 + byte] & 15 : panel[(j - 4) * 64 + byte] >> 4;
                if (F == Q5_0 || F == Q5_1 || F == Q5_K) u |= ((panel[256 + byte] >> j) & 1) << 4;
                if (F == Q6_K) u |= ((panel[256 + (j / 4) * 64 + byte] >> (2 * (j % 4))) & 3) << 4;
            }
            const float product = ((float)u - z) * (G::HALVES && k >= 16 ? t[n] : s[n]);
            out[g * 32 + k] = G::HAS_MINIMUM ? product + m[n] : product;  // the product is exact where there is a minimum
        }
        panel += G::BYTES;
    }
}

}  // namespace

void gemm(const Matrix& w, int panel, const uint8_t* tile, int height, float* out) {
    switch (height) {
        case 1: return tile_of<1>(w, panel, tile, out);
        case 2: return tile_of<2>(w, panel, tile, out);
#if defined(POISE_AVX512)
        case 8: return tile_of<8>(w, panel, tile, out);
        case 16: return tile_of<16>(w, panel, tile, out);
#endif
        default: return tile_of<4>(w, panel, tile, out);
    }
}

void dequantize_row(const Matrix& w, int row, float* out) {
    const uint8_t* panel = w.panel(row / 16);
    const int n = row % 16;
    switch (w.format) {
        case Q4_0: return dequantize<Q4_0>(w, row, out);
        case Q4_1: return dequantize<Q4_1>(w, row, out);
        case Q5_0: return dequantize<Q5_0>(w, row, out);
        case Q5_1: return dequantize<Q5_1>(w, row, out);
        case Q8_0: return dequantize<Q8_0>(w, row, out);
        case Q4_K: return dequantize<Q4_K>(w, row, out);
        case Q5_K: return dequantize<Q5_K>(w, row, out);
        case Q6_K: return dequantize<Q6_K>(w, row, out);
        case BF16:
            for (int k = 0; k < w.cols; k++) {
                const uint32_t u = (uint32_t)((const uint16_t*)panel)[(k / 2) * 32 + n * 2 + k % 2] << 16;
                memcpy(out + k, &u, 4);
            }
            return;
        case F16:
            for (int k = 0; k < w.cols; k++) {
                float t[16];
                store(t, load_f16((const uint16_t*)panel + k * 16));
                out[k] = t[n];
            }
            return;
        default:
            for (int k = 0; k < w.cols; k++) out[k] = ((const float*)panel)[k * 16 + n];
    }
}

}  // namespace POISE_NS
}  // namespace poise
