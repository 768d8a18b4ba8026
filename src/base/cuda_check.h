// Checks of CUDA runtime calls. Included by CUDA sources only.
#pragma once

#include <cuda_runtime_api.h>

#include "base/error.h"

namespace fenwick::detail {

[[noreturn]] inline void cuda_failed(const char* call, const char* file, int line, cudaError_t status) {
    (void)cudaGetLastError();  // an error that is not sticky must not surface again in the next check
    fail("[cuda] {} failed at {}:{}: {} ({})", call, file, line, cudaGetErrorString(status), cudaGetErrorName(status));
}

}  // namespace fenwick::detail

// Throws fenwick::Error naming the call and its place unless it returns cudaSuccess.
#define FENWICK_CUDA_CHECK(call)                                                       \
    do {                                                                               \
        const cudaError_t fenwick_status = (call);                                     \
        if (fenwick_status != cudaSuccess) [[unlikely]]                                \
            ::fenwick::detail::cuda_failed(#call, __FILE__, __LINE__, fenwick_status); \
    } while (false)
