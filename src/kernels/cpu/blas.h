// OpenBLAS, called from our own threads: each call runs on the calling thread.
#pragma once

#include <cblas.h>

#include <cstdint>

namespace fenwick::kernels::cpu {

// C = alpha op(A) op(B) + beta C, row-major, on the calling thread.
inline void blas_gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                      const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float beta, float* c,
                      std::int64_t ldc) {
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans,
                static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), alpha, a, static_cast<int>(lda), b,
                static_cast<int>(ldb), beta, c, static_cast<int>(ldc));
}
inline void blas_gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, double alpha,
                      const double* a, std::int64_t lda, const double* b, std::int64_t ldb, double beta, double* c,
                      std::int64_t ldc) {
    cblas_dgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans,
                static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), alpha, a, static_cast<int>(lda), b,
                static_cast<int>(ldb), beta, c, static_cast<int>(ldc));
}

// Call first in main(). OpenBLAS chooses its code by the processor's model number when it is loaded; a version older than
// the processor (Debian 12's on many servers of today) falls back to its slowest, a quarter of the speed. If that
// happened and the processor has AVX2 or AVX-512, starts this program anew with OPENBLAS_CORETYPE set. Does nothing if
// the user set that variable. Also makes OpenBLAS single-threaded: parallelism is ours (base/parallel.h).
void use_fast_blas(char** argv);

}  // namespace fenwick::kernels::cpu
