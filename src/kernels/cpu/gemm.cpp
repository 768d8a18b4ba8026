#include "kernels/gemm.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/log.h"
#include "base/parallel.h"
#include "kernels/cpu/blas.h"

extern "C" {
void openblas_set_num_threads(int count);
char* openblas_get_corename(void);
}

namespace fenwick::kernels::cpu {
namespace {

const bool blas_is_single_threaded = [] {
    openblas_set_num_threads(1);
    return true;
}();

}  // namespace

void use_fast_blas(char** argv) {
#if defined(__x86_64__)
    if (std::getenv("OPENBLAS_CORETYPE") != nullptr || std::strcmp(openblas_get_corename(), "Prescott") != 0) return;
    const char* core = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? "SkylakeX"
                       : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")       ? "Haswell"
                                                                                               : nullptr;
    if (core == nullptr) return;
    setenv("OPENBLAS_CORETYPE", core, 1);
    execv("/proc/self/exe", argv);
    spdlog::debug("could not start anew with OPENBLAS_CORETYPE={}: {}", core, std::strerror(errno));
#else
    (void)argv;
#endif
}

void gemm(const Exec&, const Gemm& args) {
    dispatch_cpu_float("gemm", args.dtype, [&]<class T>(TypeTag<T>) {
        FENWICK_CHECK(args.c_dtype == args.dtype, "[gemm] c is {}, operands are {}; on the CPU they must agree",
                      name_of(args.c_dtype), name_of(args.dtype));
        const auto* a = static_cast<const T*>(args.a);
        const auto* b = static_cast<const T*>(args.b);
        auto* c = static_cast<T*>(args.c);
        // Cut the longer side of C into blocks whose size does not depend on the number of threads.
        const bool by_rows = args.m >= args.n;
        const std::int64_t side = by_rows ? args.m : args.n;
        const std::int64_t other = std::max<std::int64_t>(by_rows ? args.n : args.m, 1);
        // Each block packs the other operand anew, so blocks are wide; at most 16 of them.
        const std::int64_t least = std::max<std::int64_t>(2'000'000 / std::max<std::int64_t>(other * args.k, 1), 256);
        const std::int64_t block = std::max<std::int64_t>((std::max((side + 15) / 16, least) + 15) / 16 * 16, 16);
        const std::int64_t blocks = (side + block - 1) / block;
        parallel_for(0, args.batch * blocks, 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                const std::int64_t batch = i / blocks, first = i % blocks * block, size = std::min(block, side - first);
                const T* ab = a + batch * args.stride_a;
                const T* bb = b + batch * args.stride_b;
                T* cb = c + batch * args.stride_c;
                if (by_rows)
                    blas_gemm(args.transpose_a, args.transpose_b, size, args.n, args.k, static_cast<T>(args.alpha),
                              ab + (args.transpose_a ? first : first * args.lda), args.lda, bb, args.ldb,
                              static_cast<T>(args.beta), cb + first * args.ldc, args.ldc);
                else
                    blas_gemm(args.transpose_a, args.transpose_b, args.m, size, args.k, static_cast<T>(args.alpha), ab,
                              args.lda, bb + (args.transpose_b ? first * args.ldb : first), args.ldb,
                              static_cast<T>(args.beta), cb + first, args.ldc);
            }
        });
    });
}

}  // namespace fenwick::kernels::cpu
