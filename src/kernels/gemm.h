// Matrix product (OpenBLAS on the CPU, cuBLASLt on CUDA).
#pragma once

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

}  // namespace fenwick::kernels
