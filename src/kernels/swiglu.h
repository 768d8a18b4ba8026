// SwiGLU: out = silu(gate) * up, silu(x) = x * sigmoid(x). Source: Shazeer, arXiv 2002.05202.
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

struct Swiglu {
    DType dtype;
    std::int64_t rows = 0, width = 0, gate_stride = 0, up_stride = 0;
    const void* gate = nullptr;  // [rows, width]
    const void* up = nullptr;    // [rows, width]
    void* out = nullptr;         // dense
};
FENWICK_KERNEL(swiglu_forward, Swiglu)

struct SwigluBackward {
    DType dtype;
    std::int64_t rows = 0, width = 0, gate_stride = 0, up_stride = 0, dgate_stride = 0, dup_stride = 0;
    const void* gate = nullptr;
    const void* up = nullptr;
    const void* dout = nullptr;  // dense
    void* dgate = nullptr;
    void* dup = nullptr;
    bool accumulate_dgate = false, accumulate_dup = false;
};
FENWICK_KERNEL(swiglu_backward, SwigluBackward)

}  // namespace fenwick::kernels
