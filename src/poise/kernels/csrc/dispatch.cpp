// Which variants this build holds and this CPU runs.
#include "kernels.h"

namespace poise {

#if defined(POISE_BUILD_X86)
static DotBF16 choose(DotBF16 most) { return avx512::table().choose_dot_bf16(__builtin_cpu_supports("avx512bf16") ? most : DotBF16::NOWHERE); }
#endif

const KernelTable* kernel_table(Isa isa) {
#if defined(POISE_BUILD_X86)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == Isa::AVX512) {
        const bool ok = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
        if (!ok) return nullptr;
        static const DotBF16 chosen = choose(DotBF16::WHERE_FASTER);
        (void)chosen;
        return &avx512::table();
    }
    if (isa == Isa::AVX2) return has_avx2 ? &avx2::table() : nullptr;
#else
    if (isa != Isa::BASELINE) return nullptr;
#endif
    return &baseline::table();
}

DotBF16 choose_dot_bf16(Isa isa, DotBF16 most) {
#if defined(POISE_BUILD_X86)
    if (isa == Isa::AVX512) return choose(most);
#endif
    return DotBF16::NOWHERE;
}

}  // namespace poise
