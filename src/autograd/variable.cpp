#include "autograd/variable.h"

#include "kernels/elementwise.h"

namespace fenwick {
namespace {

// to (+)= from, both [rows, columns] with row strides
void axpby(double a, const Tensor& from, double b, const Tensor& to) {
    kernels::axpby(exec_of(to), {.x_dtype = from.dtype(),
                                 .y_dtype = to.dtype(),
                                 .rows = to.rows(),
                                 .columns = to.columns(),
                                 .x_stride = from.row_stride(),
                                 .y_stride = to.row_stride(),
                                 .a = a,
                                 .b = b,
                                 .x = from.data(),
                                 .y = to.data()});
}

}  // namespace

Tensor Gradient::or_zeros() const { return defined() ? tensor_ : Tensor::zeros(shape_, dtype_, device_); }

void Gradient::add(Tensor contribution) {
    FENWICK_CHECK(contribution.shape() == shape_, "[Gradient] contribution has shape {}, the variable has {}",
                  to_string(contribution.shape()), to_string(shape_));
    FENWICK_CHECK(contribution.dtype() == dtype_, "[Gradient] contribution is {}, the variable is {}",
                  name_of(contribution.dtype()), name_of(dtype_));
    if (defined()) {
        axpby(1.0, contribution, 1.0, tensor_);
    } else if (home_) {
        tensor_ = home_();
        axpby(1.0, contribution, 0.0, tensor_);
    } else {
        tensor_ = std::move(contribution);
    }
}

void Gradient::zero() {
    if (!defined()) {
        MemoryKindScope scope(memory_kind_);
        tensor_ = home_ ? home_() : Tensor::empty(shape_, dtype_, device_);
    }
    tensor_.fill(0.0);
}

Gradient::Target Gradient::target() {
    if (defined()) return {tensor_, true};
    MemoryKindScope scope(memory_kind_);
    tensor_ = home_ ? home_() : Tensor::empty(shape_, dtype_, device_);
    return {tensor_, false};
}

Variable::Variable(Tensor value, bool requires_grad) : value_(std::move(value)) {
    if (requires_grad) {
        FENWICK_CHECK(is_floating(value_.dtype()), "[Variable] a {} tensor cannot have a gradient", name_of(value_.dtype()));
        gradient_ = std::make_shared<Gradient>(value_.shape(), value_.dtype(), value_.device());
    }
}

}  // namespace fenwick
