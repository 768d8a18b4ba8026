// Softmax cross entropy of a block of rows of logits; the loss over a whole vocabulary is computed block by block
// (autograd/linear_cross_entropy.cpp), so that logits are never stored whole.
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

inline constexpr std::int32_t ignore_index = -100;

// loss[r] = logsumexp(logits[r]) - logits[r, target[r]], 0 where target[r] == ignore_index.
// With gradient = true, logits are overwritten by gradient_scale * (softmax(logits) - onehot(target)), 0 in ignored rows.
struct CrossEntropy {
    DType dtype;                            // of logits
    std::int64_t rows = 0, vocab = 0, stride = 0;
    const std::int32_t* targets = nullptr;  // [rows]
    void* logits = nullptr;                 // [rows, vocab]
    void* loss = nullptr;                   // [rows], gate dtype
    bool gradient = false;
    double gradient_scale = 1.0;
};
FENWICK_KERNEL(cross_entropy, CrossEntropy)

// total[0] (+)= sum(values), float64, in a fixed order; values [count] in gate dtype.
struct Sum {
    DType dtype;
    std::int64_t count = 0;
    const void* values = nullptr;
    double* total = nullptr;  // on exec.device
    bool accumulate_total = false;
};
FENWICK_KERNEL(sum, Sum)

}  // namespace fenwick::kernels
