// Where an operator's backward kernel writes the gradient of one input.
#pragma once

#include <memory>
#include <utility>

#include "autograd/variable.h"

namespace fenwick::ops {

// In place if it is the first contribution and the kernel can write there, else in memory of its own that finish() adds to
// the gradient. Inputs without a gradient get memory, too, for kernels write every output.
class GradientOutput {
public:
    enum class Rows { strided, dense };  // what the kernel can write

    GradientOutput(std::shared_ptr<Gradient> gradient, const Tensor& input, Rows rows) : gradient_(std::move(gradient)) {
        in_place_ = gradient_ && !gradient_->defined() && rows == Rows::strided;
        tensor_ = in_place_ ? gradient_->target().tensor : Tensor::empty(input.shape(), input.dtype(), input.device());
    }
    void* data() const { return tensor_.data(); }
    std::int64_t stride() const { return tensor_.row_stride(); }
    // Once, after the kernel. Call it for all outputs in order: one variable may be several inputs.
    void finish() {
        if (gradient_ && !in_place_) gradient_->add(std::move(tensor_));
    }

private:
    std::shared_ptr<Gradient> gradient_;
    Tensor tensor_;
    bool in_place_ = false;
};

}  // namespace fenwick::ops
