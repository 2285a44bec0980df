// Which variants this build holds and this CPU runs.
#include "kernels.h"

namespace poise {

const KernelTable* kernel_table(Isa isa) {
#if defined(POISE_BUILD_X86)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == Isa::AVX512) {
        const bool ok = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
        if (!ok) return nullptr;
        static const bool bf16 = __builtin_cpu_supports("avx512bf16") && avx512::table().dot_bf16_is_exact();
        (void)bf16;
        return &avx512::table();
    }
    if (isa == Isa::AVX2) return has_avx2 ? &avx2::table() : nullptr;
#else
    if (isa != Isa::BASELINE) return nullptr;
#endif
    return &baseline::table();
}

}  // namespace poise
