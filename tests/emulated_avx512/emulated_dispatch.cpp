// Offers the baseline and the emulated variant, in the place of dispatch.cpp.
#include "kernels.h"

namespace poise {

const KernelTable* kernel_table(Isa isa) {
    if (isa == Isa::BASELINE) return &baseline::table();
    if (isa == Isa::AVX2) return nullptr;
    static const bool exact = avx512::table().dot_bf16_is_exact();
    return exact ? &avx512::table() : nullptr;
}

// Named by the bindings, but never reached: the variant is not offered.
namespace avx2 {
void philox_words(uint64_t, uint32_t, uint32_t, uint32_t, uint32_t, int32_t*) { __builtin_trap(); }
}  // namespace avx2

}  // namespace poise
