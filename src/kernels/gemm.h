// Matrix product (OpenBLAS on the CPU, cuBLASLt on CUDA).
#pragma once

#include <atomic>

#include "kernels/kernel.h"

namespace fenwick::kernels {

// C[b] = alpha * op(A[b]) op(B[b]) + beta * C[b], b < batch; op(A) is [m, k], op(B) is [k, n], C is [m, n], row-major.
struct Gemm {
    DType dtype;                  // of A and B; sums in float32 (float64 for float64)
    DType c_dtype;                // of C; equals dtype, or float32 with bfloat16 operands (gradients of weights)
    bool transpose_a = false;     // A is stored [k, m]
    bool transpose_b = false;     // B is stored [n, k]
    std::int64_t m = 0, n = 0, k = 0;
    double alpha = 1.0, beta = 0.0;
    const void* a = nullptr;
    const void* b = nullptr;
    void* c = nullptr;
    std::int64_t lda = 0, ldb = 0, ldc = 0;  // elements between stored rows
    std::int64_t batch = 1;
    std::int64_t stride_a = 0, stride_b = 0, stride_c = 0;  // elements between batch entries
};
FENWICK_KERNEL(gemm, Gemm)

// Whether float32 products on CUDA may round their operands to tf32 (10 bits of mantissa, several times as fast). Off unless
// asked for; holds for the whole process, from the next product on.
inline std::atomic<bool> tf32_wanted{false};
inline void allow_tf32(bool allowed) { tf32_wanted = allowed; }
inline bool tf32_allowed() { return tf32_wanted; }

}  // namespace fenwick::kernels
