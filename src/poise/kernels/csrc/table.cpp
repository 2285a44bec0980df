// The variant's table of functions.
#include "kernels.h"

#ifndef POISE_NS
#error "POISE_NS names the variant's namespace"
#endif

namespace poise {
namespace POISE_NS {

void gemm(const Matrix&, int, const uint8_t*, int, float*);
void prepare_row(Form, const float*, int, uint8_t*, int, int);
void rms_norm(const float*, const float*, float, int, float*);
void dequantize_row(const Matrix&, int, float*);
void silu_mul(const float*, const float*, float*);
void gelu_mul(const float*, const float*, float*);
void rope_angles(int32_t, const float*, int, float*);
void rope_head(const RopeParams&, int, const float*, int, void*, float*, int);
void attend(const AttentionParams&, const AttentionItem&, const AttentionItem&, float*);
void fold_partials(const AttentionParams&, const AttentionFold&);
DotBF16 choose_dot_bf16(DotBF16);
uint32_t probe_read(const uint8_t*, size_t, size_t);
uint32_t probe_products(ProductKind, int64_t, const uint8_t*, int64_t*);

#define POISE_TEXT(x) POISE_TEXT_(x)
#define POISE_TEXT_(x) #x

const KernelTable& table() {
#if defined(POISE_AVX512) || defined(POISE_AVX2)
    constexpr int tile = 16;
#else
    constexpr int tile = 4;
#endif
    static constexpr KernelTable t = {
        POISE_TEXT(POISE_NS), tile,      gemm,   prepare_row,   rms_norm,   dequantize_row,    silu_mul,   gelu_mul,
        rope_angles,          rope_head, attend, fold_partials, sample_row, choose_dot_bf16,   probe_read, probe_products,
        MAX_UNITS,
    };
    return t;
}

}  // namespace POISE_NS
}  // namespace poise
