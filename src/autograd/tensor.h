// Tensor: a view of reference-counted memory. Values only; differentiation lives in variable.h and tape.h.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/memory.h"
#include "kernels/kernel.h"

namespace fenwick {

using Shape = std::vector<std::int64_t>;
std::string to_string(const Shape& shape);  // "[2, 128, 64]"
std::int64_t count_of(const Shape& shape);  // product of the sizes

// Copies are views of the same memory. Every tensor is dense in its last dimensions and has one distance between
// consecutive rows (a row: the last dimension), so that a slice of the columns of a wider matrix is a tensor too.
class Tensor {
public:
    Tensor() = default;  // undefined

    static Tensor empty(Shape shape, DType dtype, Device device = cpu_device);
    static Tensor zeros(Shape shape, DType dtype, Device device = cpu_device);
    static Tensor full(Shape shape, double value, DType dtype, Device device = cpu_device);
    // Copies host values; their count must fit the shape.
    template <class T>
    static Tensor from(std::span<const T> values, Shape shape, Device device = cpu_device);
    template <class T>
    static Tensor from(const std::vector<T>& values, Shape shape, Device device = cpu_device) {
        return from(std::span<const T>(values), std::move(shape), device);
    }

    bool defined() const { return storage_ != nullptr; }
    const Shape& shape() const { return shape_; }
    std::int64_t dim() const { return static_cast<std::int64_t>(shape_.size()); }
    std::int64_t size(std::int64_t i) const { return shape_.at(static_cast<std::size_t>(i < 0 ? i + dim() : i)); }
    std::int64_t count() const { return count_of(shape_); }
    std::int64_t columns() const { return shape_.empty() ? 1 : shape_.back(); }
    std::int64_t rows() const { return columns() == 0 ? 0 : count() / columns(); }
    std::int64_t row_stride() const { return row_stride_; }  // elements between consecutive rows
    bool is_contiguous() const { return row_stride_ == columns() || rows() <= 1; }
    DType dtype() const { return dtype_; }
    Device device() const { return device_; }
    std::size_t bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype_); }

    void* data() const;  // first element
    template <class T>
    T* as() const {
        FENWICK_CHECK(dtype_ == dtype_of<T>, "[Tensor] asked for {} of a {} tensor", name_of(dtype_of<T>), name_of(dtype_));
        return static_cast<T*>(data());
    }

    // Views. view() and flatten need a contiguous tensor; narrow_columns works on any.
    Tensor view(Shape shape) const;  // one size may be -1
    Tensor narrow_columns(std::int64_t offset, std::int64_t width) const;  // [..., offset : offset + width]
    Tensor narrow_rows(std::int64_t begin, std::int64_t end) const;        // of a 1-D or 2-D tensor, first dimension

    // Copies.
    Tensor clone() const;                  // contiguous, same device
    Tensor contiguous() const;             // itself, or a contiguous copy
    Tensor to(DType dtype) const;          // itself if the dtype fits; floating types only
    Tensor to(Device device) const;        // itself if the device fits
    void copy_from(const Tensor& source);  // same shape; converts floating dtypes and devices
    void fill(double value);

    // Host copy of all elements, in order, converted to T (float, double, int32_t, int64_t).
    template <class T>
    std::vector<T> to_vector() const;
    double item() const;  // of a tensor with one element

private:
    std::shared_ptr<Buffer> storage_;
    std::int64_t offset_ = 0;  // elements
    Shape shape_;
    std::int64_t row_stride_ = 0;
    DType dtype_ = DType::float32;
    Device device_{};
};

// Where kernels on this tensor run: its device and the current stream there.
kernels::Exec exec_of(const Tensor& tensor);
kernels::Exec exec_of(Device device);

}  // namespace fenwick
