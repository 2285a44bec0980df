// Offers the baseline and the emulated variant, in the place of dispatch.cpp.
#include "kernels.h"

namespace poise {

const KernelTable* kernel_table(Isa isa) {
    if (isa == Isa::BASELINE) return &baseline::table();
    if (isa == Isa::AVX2) return nullptr;
    static const bool exact = avx512::table().choose_dot_bf16(DotBF16::EVERYWHERE) == DotBF16::EVERYWHERE;
    return exact ? &avx512::table() : nullptr;
}

DotBF16 choose_dot_bf16(Isa isa, DotBF16 most) { return isa == Isa::AVX512 ? avx512::table().choose_dot_bf16(most) : DotBF16::NOWHERE; }

// Named by the bindings, but never reached: the variant is not offered.
namespace avx2 {
void philox_words(uint64_t, uint32_t, uint32_t, uint32_t, uint32_t, int32_t*) { __builtin_trap(); }
}  // namespace avx2

}  // namespace poise
