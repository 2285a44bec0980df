// Products of one panel (16 outputs) with one tile of prepared rows. One template per container and tile height; every
// height sums in the same order, so a row's bits do not depend on its company.
#include "bytes.h"
#include "elementary.h"
#include "kernels.h"

namespace poise {
namespace POISE_NS {

bool dot_bf16_in_products = false, dot_bf16_in_attention = false;

namespace {

constexpr int PREFETCH = 3072;  // bytes ahead in the weight stream

// Asks for a line of weights that a tile of so many rows will need. A single row uses it once: it need not drive from the
// caches what the rest of a step, the Python around it above all, will want again.
template <int ROWS> POISE_INLINE inline void ask_for(const uint8_t* line) {
    if constexpr (ROWS == 1) prefetch_once(line);
    else prefetch(line);
}

template <Format F> struct Group {
    static constexpr bool FIVE = F == Q5_0 || F == Q5_1 || F == Q5_K;
    static constexpr int BITS = F == Q8_0 ? 8 : F == Q6_K ? 6 : FIVE ? 5 : 4;
    static constexpr bool HAS_MINIMUM = F == Q4_1 || F == Q5_1 || F == Q4_K || F == Q5_K;
    static constexpr bool HALVES = F == Q6_K;  // scales per 16
    static constexpr int BYTES = FORMATS[F].group_bytes;
    static constexpr int SUPER = FORMATS[F].super_bytes;
    static constexpr int ZERO = F == Q4_0 ? 8 : F == Q5_0 ? 16 : F == Q6_K ? 32 : F == Q8_0 ? 128 : 0;
    static constexpr int SCALES = F == Q8_0 ? 512 : F == Q6_K ? 384 : FIVE ? 320 : 256;

    // Quad J of COLUMNS outputs, the first of which is `column`.
    template <int J> static inline Quads quad(const uint8_t* p, int column) {
        p += column * 4;
        if constexpr (F == Q8_0) return load_quads(p + 64 * J);
        const Quads packed = load_quads(p + 64 * (J % 4));
        Quads q;
        if constexpr (J < 4) q = low_nibbles(packed);
        else q = high_nibbles(packed);
        if constexpr (FIVE) q = q | plane_bits<J, 1>(load_quads(p + 256));
        if constexpr (F == Q6_K) q = q | plane_bits<J % 4 * 2, 2>(load_quads(p + 256 + 64 * (J / 4)));
        return q;
    }

    static inline void unpack(const uint8_t* p, int column, Quads w[8]) {
        unrolled<8>([&](auto j) POISE_INLINE { w[j] = quad<j>(p, column); });
    }

    // Scale and minimum of each output; `second` is the scale of k 16…31 where scales go by 16.
    static inline void scales(const uint8_t* p, const uint8_t* super, int column, ColF& scale, ColF& second, ColF& minimum) {
        p += SCALES;
        if constexpr (SUPER == 0) {
            scale = load_f16_columns((const uint16_t*)p + column);
            if constexpr (HAS_MINIMUM) minimum = load_f16_columns((const uint16_t*)p + 16 + column);
        } else if constexpr (F == Q6_K) {
            const ColF d = load_f16_columns((const uint16_t*)super + column);
            scale = d * to_float(load_i8_columns((const int8_t*)p + column));
            second = d * to_float(load_i8_columns((const int8_t*)p + 16 + column));
        } else {
            scale = load_f16_columns((const uint16_t*)super + column) * to_float(load_u8_columns(p + column));
            minimum = negate(load_f16_columns((const uint16_t*)super + 16 + column) * to_float(load_u8_columns(p + 16 + column)));
        }
    }
};

// −z·S, from the stored −8·S.
template <Format F> inline ColI start(int32_t minus_eight_s) {
    if constexpr (Group<F>::ZERO == 0 || (F == Q8_0 && SIGNED_BYTES)) return set_columns_i(0);
    else return set_columns_i(minus_eight_s * (Group<F>::ZERO / 8));
}

template <int V> struct Scales { ColF scale[V], second[V], minimum[V]; };

// ROWS rows of one group: exact integer products, then the f32 chain.
template <Format F, int MR, int ROWS, int V>
POISE_INLINE inline void rows_of_group(const Quads (*w)[8], const Scales<V>& scales, const uint8_t* tile, int m, ColF (*acc)[V]) {
    using G = Group<F>;
    const int8_t* q = (const int8_t*)tile + m * 32;
    const float* d = (const float*)(tile + MR * 32) + m;
    const int32_t* s = (const int32_t*)(d + 2 * MR);
    ColI t[ROWS][V], u[ROWS][V];
    unrolled<ROWS * V>([&](auto i) POISE_INLINE { t[i / V][i % V] = start<F>(s[(G::HALVES ? MR : 0) + i / V]); });
    if constexpr (G::HALVES) {
        unrolled<ROWS * V>([&](auto i) POISE_INLINE { u[i / V][i % V] = start<F>(s[2 * MR + i / V]); });
        dot_group<G::BITS, 0, 4, ROWS, V>(w, q, t);
        dot_group<G::BITS, 4, 8, ROWS, V>(w, q, u);
    } else if constexpr (MR == 1 && COLUMNS == 16) {  // two integer chains: the sum is exact in any order
        u[0][0] = set_columns_i(0);
        dot_group<G::BITS, 0, 4, ROWS, V>(w, q, t);
        dot_group<G::BITS, 4, 8, ROWS, V>(w, q, u);
        t[0][0] = t[0][0] + u[0][0];
    } else {
        dot_group<G::BITS, 0, 8, ROWS, V>(w, q, t);
    }
    unrolled<ROWS>([&](auto r) POISE_INLINE {
        const ColF dr = set_columns(d[r]), ds = set_columns(d[MR + r]);
        unrolled<V>([&](auto v) POISE_INLINE {
            ColF sum = fma(to_float(t[r][v]), scales.scale[v] * dr, acc[r][v]);
            if constexpr (G::HALVES) sum = fma(to_float(u[r][v]), scales.second[v] * dr, sum);
            if constexpr (G::HAS_MINIMUM) sum = fma(scales.minimum[v], ds, sum);
            acc[r][v] = sum;
        });
    });
}

#if defined(POISE_AVX2)
// The sums of one group for a single row.
template <Format F> POISE_INLINE inline void row_of_group(const uint8_t* p, const uint8_t* super, const uint8_t* tile, ColF* acc) {
    using G = Group<F>;
    const int8_t* q = (const int8_t*)tile;
    const float* d = (const float*)(tile + 32);
    const int32_t* s = (const int32_t*)(d + 2);
    const auto quad = [p](auto j, auto v) POISE_INLINE { return G::template quad<j>(p, v * COLUMNS); };
    ColI t[PARTS], u[PARTS];
    unrolled<PARTS>([&](auto v) POISE_INLINE { t[v] = start<F>(s[G::HALVES ? 1 : 0]); });
    if constexpr (G::HALVES) {
        unrolled<PARTS>([&](auto v) POISE_INLINE { u[v] = start<F>(s[2]); });
        dot_row<G::BITS, 0, 4>(quad, q, t);
        dot_row<G::BITS, 4, 8>(quad, q, u);
    } else {
        dot_row<G::BITS, 0, 8>(quad, q, t);
    }
    const ColF dr = set_columns(d[0]), ds = set_columns(d[1]);
    unrolled<PARTS>([&](auto v) POISE_INLINE {
        ColF scale, second, minimum;
        G::scales(p, super, v * COLUMNS, scale, second, minimum);
        ColF sum = fma(to_float(t[v]), scale * dr, acc[v]);
        if constexpr (G::HALVES) sum = fma(to_float(u[v]), second * dr, sum);
        if constexpr (G::HAS_MINIMUM) sum = fma(minimum, ds, sum);
        acc[v] = sum;
    });
}

// A single row: the panel is read once, and each weight is used where it is unpacked.
template <Format F> void integer_row(const uint8_t* panel, int cols, const uint8_t* tile, float* out) {
    using G = Group<F>;
    ColF acc[PARTS];
    for (int v = 0; v < PARTS; v++) acc[v] = set_columns(0.0f);
    const uint8_t* super = panel;
    for (int g = 0; g < cols / 32; g++) {
        if (G::SUPER && g % 8 == 0) {
            super = panel;
            panel += G::SUPER;
        }
        for (int line = 0; line < G::BYTES; line += 64) ask_for<1>(panel + PREFETCH + line);
        row_of_group<F>(panel, super, tile, acc);
        panel += G::BYTES;
        tile += INT8_GROUP_BYTES;
    }
    for (int v = 0; v < PARTS; v++) store(out + v * COLUMNS, acc[v]);
}
#endif

template <Format F, int MR> void integer_tile(const uint8_t* panel, int cols, const uint8_t* tile, float* out) {
#if defined(POISE_AVX2)
    if constexpr (MR == 1) return integer_row<F>(panel, cols, tile, out);
#endif
    using G = Group<F>;
    constexpr int ROWS = MR < DOT_ROWS ? MR : DOT_ROWS;
    ColF acc[MR][PARTS];
    for (int m = 0; m < MR; m++)
        for (int v = 0; v < PARTS; v++) acc[m][v] = set_columns(0.0f);
    const uint8_t* super = panel;
    for (int g = 0; g < cols / 32; g++) {
        if (G::SUPER && g % 8 == 0) {
            super = panel;
            panel += G::SUPER;
        }
        for (int line = 0; line < G::BYTES; line += 64) ask_for<MR>(panel + PREFETCH + line);
        Quads w[PARTS][8];
        Scales<PARTS> scales;
        for (int v = 0; v < PARTS; v++) {
            G::unpack(panel, v * COLUMNS, w[v]);
            G::scales(panel, super, v * COLUMNS, scales.scale[v], scales.second[v], scales.minimum[v]);
        }
        for (int m = 0; m < MR; m += ROWS) rows_of_group<F, MR, ROWS, PARTS>(w, scales, tile, m, acc + m);
        panel += G::BYTES;
        tile += MR * INT8_GROUP_BYTES;
    }
    for (int m = 0; m < MR; m++)
        for (int v = 0; v < PARTS; v++) store(out + 16 * m + v * COLUMNS, acc[m][v]);
}

// bf16 activations on integer weights: docs/NUMERICS.md, bf16 activations. `W` is how pairs of weights meet the dot.
struct GroupScales { F32 scale, second, minimum; };

template <Format F> POISE_INLINE inline GroupScales group_scales(const uint8_t* p, const uint8_t* super) {
    ColF scale[PARTS], second[PARTS], minimum[PARTS];
    for (int v = 0; v < PARTS; v++) {
        second[v] = minimum[v] = set_columns(0.0f);
        Group<F>::scales(p, super, v * COLUMNS, scale[v], second[v], minimum[v]);
    }
    return {join(scale), join(second), join(minimum)};
}

// One group of a single row: each pair of weights is used as it is unpacked.
template <Format F, class W> POISE_INLINE inline F32 row_of_pairs(const Quads (*q)[8], const GroupScales& scales, const uint8_t* tile, F32 acc) {
    using G = Group<F>;
    F32 partial = zero();
    unrolled<16>([&](auto i) POISE_INLINE {
        if constexpr (G::HALVES && i == 8) {
            acc = fma(partial, scales.scale, acc);
            partial = zero();
        }
        partial = dot_pair(partial, pair_of<i, G::ZERO>(q, (W*)nullptr), (const uint32_t*)tile + i);
    });
    acc = fma(partial, G::HALVES ? scales.second : scales.scale, acc);
    if constexpr (G::HAS_MINIMUM) acc = fma(scales.minimum, set1(*(const float*)(tile + 64)), acc);
    return acc;
}

// One group of ROWS rows from row m of a tile, whose sums are in `out`.
template <Format F, int ROWS, class W>
POISE_INLINE inline void rows_of_pairs(const W* w, const GroupScales& scales, const uint8_t* tile, int height, int m, float* out) {
    using G = Group<F>;
    constexpr int HALF = G::HALVES ? 8 : 16;
    const auto* pairs = (const uint32_t*)tile + m;
    const auto* sums = (const float*)(tile + 64 * height) + m;
    for (int half = 0; half < 16; half += HALF) {
        F32 partial[ROWS];
        unrolled<ROWS>([&](auto r) POISE_INLINE { partial[r] = zero(); });
        for (int i = half; i < half + HALF; i++) {
            const W x = w[i];
            unrolled<ROWS>([&](auto r) POISE_INLINE { partial[r] = dot_pair(partial[r], x, pairs + i * height + r); });
        }
        unrolled<ROWS>([&](auto r) POISE_INLINE {
            float* y = out + 16 * (m + r);
            F32 acc = fma(partial[r], half ? scales.second : scales.scale, load(y));
            if constexpr (G::HAS_MINIMUM) acc = fma(scales.minimum, set1(sums[r]), acc);
            store(y, acc);
        });
    }
}

template <Format F, class W, int ROWS> void pairs_tile(const uint8_t* panel, int cols, const uint8_t* tile, int height, float* out) {
    using G = Group<F>;
    F32 single = zero();
    for (int m = 0; m < height; m++) store(out + 16 * m, zero());
    const uint8_t* super = panel;
    for (int g = 0; g < cols / 32; g++, panel += G::BYTES, tile += height * BF16_GROUP_BYTES) {
        if (G::SUPER && g % 8 == 0) {
            super = panel;
            panel += G::SUPER;
        }
        for (int line = 0; line < G::BYTES; line += 64) ask_for<ROWS>(panel + PREFETCH + line);
        Quads q[PARTS][8];
        for (int v = 0; v < PARTS; v++) G::unpack(panel, v * COLUMNS, q[v]);
        const GroupScales scales = group_scales<F>(panel, super);
        if constexpr (ROWS == 1) {
            single = row_of_pairs<F, W>(q, scales, tile, single);
        } else {
            W w[16];
            unrolled<16>([&](auto i) POISE_INLINE { w[i] = pair_of<i, G::ZERO>(q, (W*)nullptr); });
            for (int m = 0; m < height; m += ROWS) rows_of_pairs<F, ROWS>(w, scales, tile, height, m, out);
        }
    }
    if constexpr (ROWS == 1) store(out, single);
}

template <Format F, class W> void pairs_tile_of(const uint8_t* panel, int cols, const uint8_t* tile, int height, float* out) {
    if (height == 1) return pairs_tile<F, W, 1>(panel, cols, tile, height, out);
    if (height == 2) return pairs_tile<F, W, 2>(panel, cols, tile, height, out);
    return pairs_tile<F, W, 4>(panel, cols, tile, height, out);
}

template <class W> void bf16_groups(const Matrix& w, int p, const uint8_t* tile, int height, float* out) {
    const uint8_t* panel = w.panel(p);
    switch (w.format) {
        case Q4_0: return pairs_tile_of<Q4_0, W>(panel, w.cols, tile, height, out);
        case Q4_1: return pairs_tile_of<Q4_1, W>(panel, w.cols, tile, height, out);
        case Q5_0: return pairs_tile_of<Q5_0, W>(panel, w.cols, tile, height, out);
        case Q5_1: return pairs_tile_of<Q5_1, W>(panel, w.cols, tile, height, out);
        case Q8_0: return pairs_tile_of<Q8_0, W>(panel, w.cols, tile, height, out);
        case Q4_K: return pairs_tile_of<Q4_K, W>(panel, w.cols, tile, height, out);
        case Q5_K: return pairs_tile_of<Q5_K, W>(panel, w.cols, tile, height, out);
        default: return pairs_tile_of<Q6_K, W>(panel, w.cols, tile, height, out);
    }
}

// `unrolled`, as a plain loop over the sums would keep them in memory and write each after each pair.
template <int MR, bool HARDWARE> void bf16_tile(const uint8_t* panel, int cols, const uint8_t* tile, float* out) {
    F32 acc[MR];
    unrolled<MR>([&](auto m) POISE_INLINE { acc[m] = zero(); });
    const uint32_t* pair = (const uint32_t*)tile;
    for (int k = 0; k < cols; k += 2) {
        ask_for<MR>(panel + PREFETCH);
        const Pairs w = load_pairs((const uint16_t*)panel);
        unrolled<MR>([&](auto m) POISE_INLINE {
            if constexpr (HARDWARE) {
                acc[m] = dot_pair(acc[m], w, pair + m);
            } else {
                const FloatPair wide = widen(pair[m]);
                acc[m] = dot_pair(acc[m], w, &wide);
            }
        });
        panel += 64;
        pair += MR;
    }
    unrolled<MR>([&](auto m) POISE_INLINE { store(out + 16 * m, acc[m]); });
}

template <Format F, int MR> void float_tile(const uint8_t* panel, int cols, const uint8_t* tile, float* out) {
    F32 acc[MR];
    unrolled<MR>([&](auto m) POISE_INLINE { acc[m] = zero(); });
    const float* a = (const float*)tile;
    for (int k = 0; k < cols; k++) {
        ask_for<MR>(panel + PREFETCH);
        const F32 w = F == F16 ? load_f16((const uint16_t*)panel) : load((const float*)panel);
        unrolled<MR>([&](auto m) POISE_INLINE { acc[m] = fma(w, set1(a[m]), acc[m]); });
        panel += F == F16 ? 32 : 64;
        a += MR;
    }
    unrolled<MR>([&](auto m) POISE_INLINE { store(out + 16 * m, acc[m]); });
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
            if (dot_bf16_in_products) return bf16_tile<MR, true>(panel, w.cols, tile, out);
            return bf16_tile<MR, false>(panel, w.cols, tile, out);
        case F16: return float_tile<F16, MR>(panel, w.cols, tile, out);
        default: return float_tile<F32_, MR>(panel, w.cols, tile, out);
    }
}

template <Format F> void dequantize(const Matrix& w, int row, float* out) {
    using G = Group<F>;
    const uint8_t* panel = w.panel(row / 16);
    const uint8_t* super = panel;
    const int n = row % 16, column = n / COLUMNS * COLUMNS;
    for (int g = 0; g < w.cols / 32; g++) {
        if (G::SUPER && g % 8 == 0) {
            super = panel;
            panel += G::SUPER;
        }
        ColF scale, second = set_columns(0.0f), minimum = set_columns(0.0f);
        G::scales(panel, super, column, scale, second, minimum);
        float s[16], t[16], m[16];
        store(s, scale);
        store(t, second);
        store(m, minimum);
        for (int k = 0; k < 32; k++) {
            const int j = k / 4, byte = n * 4 + k % 4;
            int u;
            if (F == Q8_0) u = panel[j * 64 + byte];
            else {
                u = j < 4 ? panel[j * 64 + byte] & 15 : panel[(j - 4) * 64 + byte] >> 4;
                if (G::FIVE) u |= ((panel[256 + byte] >> j) & 1) << 4;
                if (F == Q6_K) u |= ((panel[256 + (j / 4) * 64 + byte] >> (2 * (j % 4))) & 3) << 4;
            }
            const float product = (float)(u - G::ZERO) * (G::HALVES && k >= 16 ? t : s)[n - column];
            out[g * 32 + k] = G::HAS_MINIMUM ? product + m[n - column] : product;  // the product is exact where there is a minimum
        }
        panel += G::BYTES;
    }
}

}  // namespace

void gemm(const Matrix& w, int panel, const uint8_t* tile, int height, float* out) {
    if (w.form == BF16_GROUPS_FORM) {
#if defined(POISE_AVX512)
        if (dot_bf16_in_products) return bf16_groups<Pairs>(w, panel, tile, height, out);
#endif
        return bf16_groups<WidePairs>(w, panel, tile, height, out);
    }
    switch (height) {
        case 1: return tile_of<1>(w, panel, tile, out);
        case 2: return tile_of<2>(w, panel, tile, out);
#if defined(POISE_AVX512) || defined(POISE_AVX2)
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
