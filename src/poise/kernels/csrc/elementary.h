// exp, log, silu, gelu, bf16 rounding and the fixed-order row reductions of docs/NUMERICS.md, over the vectors of simd.h.
#pragma once
#include "simd.h"

namespace poise {
namespace POISE_NS {

// e^x where x ≤ 88 (or NaN).
inline F32 exp_below_88(F32 x) {
    const Mask tiny = less(x, set1(-87.0f));
    const F32 n = rint(x * set1(1.44269504088896341f));
    F32 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F32 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    const F32 y = fma(p, r * r, r) + set1(1.0f);
    return select(tiny, zero(), scale_by_power(y, n));
}

inline F32 exp(F32 x) { return exp_below_88(minimum(set1(88.0f), x)); }

inline F32 log(F32 x) {
    const Mask is_zero = equal(x, zero());
    const I32 u = bits(x);
    I32 e = (shift_right<23>(u) & set1_i(0xff)) - set1_i(126);
    F32 m = from_bits((u & set1_i(0x007fffff)) | set1_i(0x3f000000));
    const Mask small = less(m, set1(0.707106781186547524f));
    e = e - select_i(small, set1_i(1), set1_i(0));
    m = select(small, m + m, m);
    const F32 f = m - set1(1.0f), z = f * f, ef = to_float(e);
    F32 p = set1(7.0376836292e-2f);
    p = fma(p, f, set1(-1.1514610310e-1f));
    p = fma(p, f, set1(1.1676998740e-1f));
    p = fma(p, f, set1(-1.2420140846e-1f));
    p = fma(p, f, set1(1.4249322787e-1f));
    p = fma(p, f, set1(-1.6668057665e-1f));
    p = fma(p, f, set1(2.0000714765e-1f));
    p = fma(p, f, set1(-2.4999993993e-1f));
    p = fma(p, f, set1(3.3333331174e-1f));
    F32 y = (p * f) * z;
    y = fma(ef, set1(-2.12194440e-4f), y);
    y = fma(set1(-0.5f), z, y);
    y = f + y;
    return select(is_zero, set1(-__builtin_inff()), fma(ef, set1(0.693359375f), y));
}

inline F32 negate(F32 x) { return from_bits(bits(x) ^ set1_i(INT32_MIN)); }

inline F32 silu(F32 x) { return x / (set1(1.0f) + exp(negate(x))); }

// The tanh form: x/2 · (1 + tanh y) = x / (1 + exp(-2y)).
inline F32 gelu(F32 x) {
    const F32 z = (x * set1(1.5957691216057308f)) * fma(set1(0.044715f), x * x, set1(1.0f));
    return x / (set1(1.0f) + exp(negate(z)));
}

// The upper half of each lane's bits, rounded to bf16: denormals to zero, NaN quiet, else nearest even. Result in bits 0…15.
inline I32 to_bf16(F32 x) {
    const I32 u = bits(x), magnitude = u & set1_i(0x7fffffff), upper = shift_right<16>(u);
    const I32 rounded = shift_right<16>(u + set1_i(0x7fff) + (upper & set1_i(1)));
    I32 r = select_i(less_i(magnitude, set1_i(0x00800000)), upper & set1_i(0x8000), rounded);
    return select_i(less_i(set1_i(0x7f800000), magnitude), upper | set1_i(0x40), r);
}

constexpr int CUT = 4096;  // rows longer than this are summed in parts

// Sum over n elements in the contract's order; term(j, count) gives lanes j … j+count-1 (unused lanes +0) added to `lane`.
template <class Add> inline float row_sum(int n, Add add) {
    float total = 0.0f;
    for (int start = 0; start < n; start += CUT) {
        const int end = start + CUT < n ? start + CUT : n;
        F32 lane = zero();
        for (int j = start; j < end; j += 16) lane = add(j, end - j < 16 ? end - j : 16, lane);
        const float part = fold_sum(lane);
        total = start ? total + part : part;
    }
    return total;
}

inline float sum_of_squares(const float* x, int n) {
    return row_sum(n, [x](int j, int count, F32 lane) {
        const F32 v = load_partial(x + j, count, 0.0f);
        return fma(v, v, lane);
    });
}

}  // namespace POISE_NS
}  // namespace poise
