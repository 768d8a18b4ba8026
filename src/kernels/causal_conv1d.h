// Depthwise causal convolution along time, then SiLU:
// y[t, c] = silu(bias[c] + sum_i weight[c, i] * x[t - (width-1) + i, c]); tokens before the document's start are zero.
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

struct CausalConv1d {
    DType dtype;
    Sequences sequences;
    std::int64_t channels = 0, width = 0;
    std::int64_t x_stride = 0, y_stride = 0;
    const void* x = nullptr;       // [tokens, channels]
    const void* weight = nullptr;  // [channels, width], gate dtype
    const void* bias = nullptr;    // [channels], gate dtype, or null
    void* y = nullptr;             // [tokens, channels]
    // Decoding: the last width-1 inputs of each document, oldest first, carried between calls; [count, width-1, channels]
    // in the activation dtype. Null: every document starts from zeros and nothing is kept. Read, then overwritten.
    void* state = nullptr;
};
FENWICK_KERNEL(causal_conv1d_forward, CausalConv1d)

struct CausalConv1dBackward {
    DType dtype;
    Sequences sequences;
    std::int64_t channels = 0, width = 0;
    std::int64_t x_stride = 0, dy_stride = 0, dx_stride = 0;
    const void* x = nullptr;
    const void* weight = nullptr;
    const void* bias = nullptr;
    const void* dy = nullptr;
    void* dx = nullptr;
    void* dweight = nullptr;  // [channels, width], gate dtype
    void* dbias = nullptr;    // [channels], gate dtype; null exactly when bias is
    bool accumulate_dx = false, accumulate_dweight = false, accumulate_dbias = false;
};
FENWICK_KERNEL(causal_conv1d_backward, CausalConv1dBackward)

}  // namespace fenwick::kernels
