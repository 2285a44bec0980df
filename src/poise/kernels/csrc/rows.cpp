// Row-wise operations: norm, preparation of activations, rope, rounding into KV pages.
#include "elementary.h"
#include "kernels.h"

namespace poise {
namespace POISE_NS {

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / (float)n + eps);
    const F32 v = set1(scale);
    int j = 0;
    for (; j + 16 <= n; j += 16) store(out + j, (load(x + j) * v) * load(weight + j));
    if (j < n) store_partial(out + j, (load_partial(x + j, n - j, 0.0f) * v) * load_partial(weight + j, n - j, 0.0f), n - j);
}

namespace {

// n values (a multiple of 16) as integers −127 … 127. Returns their scale: 0 where all are tiny, NaN where one is not finite.
POISE_INLINE inline float quantize(const float* x, int n, int8_t* q) {
    const I32 magnitude = set1_i(0x7fffffff);
    I32 peak = set1_i(0);  // as integers, magnitudes order like the floats, infinity and NaN behind them
    for (int k = 0; k < n; k += 16) peak = maximum_i(peak, bits(load(x + k)) & magnitude);
    const int32_t top = fold_max_i(peak);
    float m;
    memcpy(&m, &top, 4);
    const bool broken = top > 0x7f7fffff;
    if (broken || m < 0x1p-100f) {
        memset(q, 0, n);
        return broken ? __builtin_nanf("") : 0.0f;
    }
    const F32 r = set1(127.0f / m);
    for (int k = 0; k < n; k += 16) store_low_i8(q + k, to_int(load(x + k) * r));
    return m / 127.0f;
}

void quantize_group(const float* x, int8_t* q, float& d, int32_t& first, int32_t& second) {
    d = quantize(x, 32, q);
    first = sum_bytes(q);
    second = sum_bytes(q + 16);
}

// 32 activations in bf16; returns their sum.
float round_group(const float* x, uint16_t* out) {
    const I32 a = to_bf16(load(x)), b = to_bf16(load(x + 16));
    store_low_u16(out, a);
    store_low_u16(out + 16, b);
    return fold_sum((zero() + from_bits(shift_left<16>(a))) + from_bits(shift_left<16>(b)));
}

}  // namespace

void prepare_row(Form form, const float* x, int cols, uint8_t* tile, int height, int index) {
    if (form == INT8_FORM) {
        for (int g = 0; g < cols / 32; g++) {
            int8_t* q = (int8_t*)tile + index * 32;
            float* d = (float*)(tile + height * 32) + index;
            int32_t* s = (int32_t*)(d + 2 * height);
            int32_t first = 0, second = 0;
            float scale = 0.0f;
            if (x) quantize_group(x + g * 32, q, scale, first, second);
            else memset(q, 0, 32);
            d[0] = scale;
            d[height] = scale * (float)(first + second);
            s[0] = -8 * (first + second);
            s[height] = -8 * first;
            s[2 * height] = -8 * second;
            tile += height * INT8_GROUP_BYTES;
        }
    } else if (form == BF16_FORM) {
        uint16_t* out = (uint16_t*)tile + index * 2;
        for (int k = 0; k < cols; k += 16) {
            uint16_t t[16] = {};
            const int count = cols - k < 16 ? cols - k : 16;
            if (x) store_low_u16(t, to_bf16(load_partial(x + k, count, 0.0f)));
            for (int j = 0; j < count; j += 2, out += 2 * height) {
                out[0] = t[j];
                out[1] = j + 1 < count ? t[j + 1] : 0;
            }
        }
    } else if (form == BF16_GROUPS_FORM) {
        for (int g = 0; g < cols / 32; g++, tile += height * BF16_GROUP_BYTES) {
            uint16_t t[32] = {};
            const float sum = x ? round_group(x + g * 32, t) : 0.0f;
            for (int i = 0; i < 16; i++) memcpy(tile + (i * height + index) * 4, t + i * 2, 4);
            memcpy(tile + height * 64 + index * 4, &sum, 4);
        }
    } else {
        float* out = (float*)tile + index;
        for (int k = 0; k < cols; k++, out += height) *out = x ? x[k] : 0.0f;
    }
}

void silu_mul(const float* gate, const float* up, float* out) { store(out, silu(load(gate)) * load(up)); }
void gelu_mul(const float* gate, const float* up, float* out) { store(out, gelu(load(gate)) * load(up)); }

namespace {

struct SinCos { float sin, cos; };

// f64 with separate multiplications and additions: the contract's own sine and cosine.
SinCos sin_cos(float angle) {
    const double a = angle;
    const double magic = 6755399441055744.0;  // 1.5 · 2⁵²: adding and subtracting rounds to nearest even
    volatile double shifted = a * 0.63661977236758134308 + magic;
    const double n = shifted - magic;
    double r = a - n * 1.57079632673412561417e+00;
    r = r - n * 6.07710050650619224932e-11;
    const double z = r * r;
    double p = -2.50507602534068634195e-08 + z * 1.58969099521155010221e-10;
    p = 2.75573137070700676789e-06 + z * p;
    p = -1.98412698298579493134e-04 + z * p;
    p = 8.33333333332248946124e-03 + z * p;
    p = -1.66666666666666324348e-01 + z * p;
    const double s = r + (r * z) * p;
    double c = 2.08757232129817482790e-09 + z * -1.13596475577881948265e-11;
    c = -2.75573143513906633035e-07 + z * c;
    c = 2.48015872894767294178e-05 + z * c;
    c = -1.38888888888741095749e-03 + z * c;
    c = 4.16666666666666019037e-02 + z * c;
    const double k = (1.0 - 0.5 * z) + (z * z) * c;
    switch ((long long)n & 3) {
        case 0: return {(float)s, (float)k};
        case 1: return {(float)k, (float)-s};
        case 2: return {(float)-s, (float)-k};
        default: return {(float)-k, (float)s};
    }
}

}  // namespace

void rope_angles(int32_t position, const float* inverse_frequencies, int num_pairs, float* out) {
    for (int i = 0; i < num_pairs; i++) {
        const SinCos v = sin_cos((float)position * inverse_frequencies[i]);
        out[i] = v.cos;
        out[num_pairs + i] = v.sin;
    }
}

namespace {

void write_value(const float* x, int d, void* out, float* scale, int slot) {
    if (scale) {
        *scale = quantize(x, d, (int8_t*)out + (size_t)slot * d);
        return;
    }
    uint16_t t[16];
    uint16_t* base = (uint16_t*)out + (size_t)(slot / 2) * d * 2 + slot % 2;
    for (int k = 0; k < d; k += 16) {
        store_low_u16(t, to_bf16(load(x + k)));
        for (int j = 0; j < 16; j++) base[(k + j) * 2] = t[j];
    }
}

void write_key(const float* x, int d, void* out, float* scale, int slot) {
    const size_t tile = (size_t)(slot / 16) * 16 * d;
    if (scale) {
        int8_t q[1024];
        *scale = quantize(x, d, q);
        int8_t* base = (int8_t*)out + tile + slot % 16;
        for (int k = 0; k < d; k++) base[k * 16] = q[k];
        return;
    }
    uint16_t t[16];
    uint16_t* base = (uint16_t*)out + tile + (slot % 16) * 2;
    for (int k = 0; k < d; k += 16) {
        store_low_u16(t, to_bf16(load(x + k)));
        for (int j = 0; j < 16; j += 2) memcpy(base + (size_t)((k + j) / 2) * 32, t + j, 4);
    }
}

}  // namespace

void rope_head(const RopeParams& rope, int kind, const float* x, int row, void* out, float* scale, int slot) {
    if (kind == 2) return write_value(x, rope.head_dim, out, scale, slot);
    const int d = rope.head_dim, half = rope.num_pairs;
    float y[1024];
    const float* norm = kind == 0 ? rope.q_norm : rope.k_norm;
    if (norm) {
        rms_norm(x, norm, rope.eps, d, y);
        x = y;
    }
    alignas(64) float rotated[1024];
    memcpy(rotated, x, sizeof(float) * d);
    const float* cos = rope.angles + (size_t)row * 2 * half;
    const float* sin = cos + half;
    for (int i = 0; i < half; i += 16) {
        const int n = half - i < 16 ? half - i : 16;
        const F32 a = load_partial(x + i, n, 0.0f), b = load_partial(x + half + i, n, 0.0f);
        const F32 c = load_partial(cos + i, n, 0.0f), s = load_partial(sin + i, n, 0.0f);
        store_partial(rotated + i, fma(a, c, negate(b * s)), n);
        store_partial(rotated + half + i, fma(b, c, a * s), n);
    }
    if (kind == 1) return write_key(rotated, d, out, scale, slot);
    const F32 query_scale = set1(rope.q_scale);
    for (int k = 0; k < d; k += 16) store_low_u16((uint16_t*)out + k, to_bf16(load(rotated + k) * query_scale));
}

}  // namespace POISE_NS
}  // namespace poise
