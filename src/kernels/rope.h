// Rotary position embedding, rotating pairs (i, i + width/2) of each head by angle position * theta^(-2i/width).
// Positions count from the document's start plus `position`. Source: Su et al., arXiv 2104.09864.
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

struct Rope {
    DType dtype;
    Sequences sequences;
    std::int64_t heads = 0, width = 0;  // width even
    double theta = 10000.0;
    std::int64_t position = 0;  // of every document's first token here (decoding); 0 in training
    bool inverse = false;       // rotate back: the gradient of the rotation
    std::int64_t x_stride = 0, y_stride = 0;
    const void* x = nullptr;  // [tokens, heads, width]
    void* y = nullptr;        // [tokens, heads, width]; may be x
};
FENWICK_KERNEL(rope, Rope)

}  // namespace fenwick::kernels
