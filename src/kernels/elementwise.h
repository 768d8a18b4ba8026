// Small element-wise kernels that the tape and the models share.
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

// y[r, c] = a * x[r, c] + b * y[r, c] over [rows, columns] with row strides; y is not read where b == 0.
// x and y may differ in dtype (float32, float64, bfloat16): this is also the cast and the strided copy.
struct Axpby {
    DType x_dtype, y_dtype;
    std::int64_t rows = 0, columns = 0, x_stride = 0, y_stride = 0;
    double a = 1.0, b = 0.0;
    const void* x = nullptr;
    void* y = nullptr;
};
FENWICK_KERNEL(axpby, Axpby)

// out[r, c] = x[r, c] + y[r, c], all dense, one dtype.
struct Add {
    DType dtype;
    std::int64_t count = 0;
    const void* x = nullptr;
    const void* y = nullptr;
    void* out = nullptr;
};
FENWICK_KERNEL(add, Add)

// values[i] = value
struct Fill {
    DType dtype;
    std::int64_t count = 0;
    double value = 0.0;
    void* values = nullptr;
};
FENWICK_KERNEL(fill, Fill)

// values[i] *= factor[0], a number that the device holds, so that the host need not wait for it. Nothing is touched for a
// factor of 1, the usual gradient of a loss.
struct ScaleBy {
    DType dtype;
    std::int64_t count = 0;
    const void* factor = nullptr;  // gate dtype
    void* values = nullptr;
};
FENWICK_KERNEL(scale_by, ScaleBy)

// y = x * scale[head] broadcast over the head's columns: x, y [tokens, heads, width]; scale [tokens, heads] (gate dtype).
// Mamba-2's v = x * dt.
struct ScaleHeads {
    DType dtype;
    std::int64_t tokens = 0, heads = 0, width = 0;
    std::int64_t x_stride = 0;  // elements between tokens of x; y is dense
    const void* x = nullptr;
    const void* scale = nullptr;
    void* y = nullptr;
};
FENWICK_KERNEL(scale_heads_forward, ScaleHeads)

struct ScaleHeadsBackward {
    DType dtype;
    std::int64_t tokens = 0, heads = 0, width = 0;
    std::int64_t x_stride = 0, dx_stride = 0;
    const void* x = nullptr;
    const void* scale = nullptr;
    const void* dy = nullptr;
    void* dx = nullptr;
    void* dscale = nullptr;  // gate dtype
    bool accumulate_dx = false;
};
FENWICK_KERNEL(scale_heads_backward, ScaleHeadsBackward)

// y = o + skip[head] * x: Mamba-2's D term. o, y [tokens, heads, width] dense, x strided; skip [heads] (gate dtype).
struct HeadSkip {
    DType dtype;
    std::int64_t tokens = 0, heads = 0, width = 0;
    std::int64_t x_stride = 0;
    const void* o = nullptr;
    const void* x = nullptr;
    const void* skip = nullptr;
    void* y = nullptr;
};
FENWICK_KERNEL(head_skip_forward, HeadSkip)

struct HeadSkipBackward {  // do = dy needs no work
    DType dtype;
    std::int64_t tokens = 0, heads = 0, width = 0;
    std::int64_t x_stride = 0, dx_stride = 0;
    const void* x = nullptr;
    const void* skip = nullptr;
    const void* dy = nullptr;
    void* dx = nullptr;
    void* dskip = nullptr;  // [heads], gate dtype
    bool accumulate_dx = false, accumulate_dskip = false;
};
FENWICK_KERNEL(head_skip_backward, HeadSkipBackward)

}  // namespace fenwick::kernels
