// Variable: a tensor on the tape, and the place where its gradient gathers.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "autograd/tensor.h"

namespace fenwick {

// The gradient of one variable. Contributions arrive during backward in a fixed order; the first is kept as it is (no
// copy), later ones are added. Each contribution's shape and dtype are checked.
class Gradient {
public:
    Gradient(Shape shape, DType dtype, Device device) : shape_(std::move(shape)), dtype_(dtype), device_(device) {}

    bool defined() const { return tensor_.defined(); }
    const Tensor& tensor() const { return tensor_; }  // undefined if nothing reached the variable
    Tensor or_zeros() const;                          // a zero tensor in that case
    void add(Tensor contribution);
    void clear() { tensor_ = Tensor(); }
    void zero();  // keeps the memory, for parameters: defined, all zeros

    // Where an operator may write its contribution in place: it fills `tensor` completely, adding to what is there if
    // `accumulate`. `tensor` may have a row stride (a slice of a wider projection's gradient).
    struct Target {
        Tensor tensor;
        bool accumulate = false;
    };
    Target target();

    // Gradients of slices gather in slices of one buffer: `home` makes that slice when it is first needed.
    void set_home(std::function<Tensor()> home) { home_ = std::move(home); }
    // Kind under which a gradient buffer that target() or zero() makes is counted.
    void set_memory_kind(MemoryKind kind) { memory_kind_ = kind; }

private:
    Shape shape_;
    DType dtype_;
    Device device_;
    Tensor tensor_;
    std::function<Tensor()> home_;
    MemoryKind memory_kind_ = MemoryKind::activations;
};

class Variable {
public:
    Variable() = default;
    // A constant, or with requires_grad a leaf whose gradient backward fills.
    Variable(Tensor value, bool requires_grad = false);  // NOLINT: implicit, a tensor is a constant
    Variable(Tensor value, std::shared_ptr<Gradient> gradient)
        : value_(std::move(value)), gradient_(std::move(gradient)) {}

    bool defined() const { return value_.defined(); }
    const Tensor& value() const { return value_; }
    const Shape& shape() const { return value_.shape(); }
    std::int64_t size(std::int64_t i) const { return value_.size(i); }
    DType dtype() const { return value_.dtype(); }
    Device device() const { return value_.device(); }

    bool requires_grad() const { return gradient_ != nullptr; }
    const std::shared_ptr<Gradient>& gradient() const { return gradient_; }  // null for constants
    Tensor grad() const { return gradient_ ? gradient_->tensor() : Tensor(); }

private:
    Tensor value_;
    std::shared_ptr<Gradient> gradient_;
};

}  // namespace fenwick
