// AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101) and the global gradient norm,
// each over all parameters in one call.
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

struct AdamWTensor {
    std::int64_t count = 0;
    void* parameter = nullptr;      // master weights, dtype
    const void* gradient = nullptr; // dtype
    void* first_moment = nullptr;   // dtype
    void* second_moment = nullptr;  // dtype
    double weight_decay = 0.0;      // 0 for A_log, dt_bias, D, L, norms and biases
};

// For each tensor, with step counted from 1:
//   m = beta1 m + (1-beta1) s g;  v = beta2 v + (1-beta2) (s g)^2,  s = gradient_scale (clipping)
//   parameter = parameter (1 - lr wd) - lr (m / (1-beta1^step)) / (sqrt(v / (1-beta2^step)) + eps)
struct AdamW {
    DType dtype;  // float32 or float64
    std::int64_t tensor_count = 0;
    const AdamWTensor* tensors = nullptr;  // host array
    std::int64_t step = 1;
    double learning_rate = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    double gradient_scale = 1.0;
};
FENWICK_KERNEL(adamw, AdamW)

// total[0] = sum over all tensors of squared elements, float64, in a fixed order.
struct SumSquares {
    DType dtype;
    std::int64_t tensor_count = 0;
    const void* const* tensors = nullptr;  // host array of device pointers
    const std::int64_t* counts = nullptr;  // host array
    double* total = nullptr;               // on exec.device
};
FENWICK_KERNEL(sum_squares, SumSquares)

}  // namespace fenwick::kernels
