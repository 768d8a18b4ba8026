#include "autograd/tensor.h"

#include <algorithm>

#include "base/memory_cuda.h"
#include "kernels/elementwise.h"

namespace fenwick {

std::string to_string(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::int64_t count_of(const Shape& shape) {
    std::int64_t count = 1;
    for (auto size : shape) count *= size;
    return count;
}

kernels::Exec exec_of(Device device) { return {.device = device, .stream = device.is_cuda() ? detail::cuda_stream(device.index) : nullptr}; }
kernels::Exec exec_of(const Tensor& tensor) { return exec_of(tensor.device()); }

Tensor Tensor::empty(Shape shape, DType dtype, Device device) {
    Tensor tensor;
    for (auto size : shape) FENWICK_CHECK(size >= 0, "[Tensor] shape {} has a negative size", to_string(shape));
    tensor.storage_ =
        std::make_shared<Buffer>(device, static_cast<std::size_t>(count_of(shape)) * size_of(dtype));
    tensor.row_stride_ = shape.empty() ? 1 : shape.back();
    tensor.shape_ = std::move(shape);
    tensor.dtype_ = dtype;
    tensor.device_ = device;
    return tensor;
}

Tensor Tensor::zeros(Shape shape, DType dtype, Device device) {
    Tensor tensor = empty(std::move(shape), dtype, device);
    fill_bytes(device, tensor.data(), 0, tensor.bytes());
    return tensor;
}

Tensor Tensor::full(Shape shape, double value, DType dtype, Device device) {
    Tensor tensor = empty(std::move(shape), dtype, device);
    tensor.fill(value);
    return tensor;
}

template <class T>
Tensor Tensor::from(std::span<const T> values, Shape shape, Device device) {
    FENWICK_CHECK(static_cast<std::int64_t>(values.size()) == count_of(shape), "[Tensor] {} values do not fill shape {}",
                  values.size(), to_string(shape));
    Tensor tensor = empty(std::move(shape), dtype_of<T>, device);
    copy_bytes(device, tensor.data(), cpu_device, values.data(), tensor.bytes());
    return tensor;
}
template Tensor Tensor::from(std::span<const float>, Shape, Device);
template Tensor Tensor::from(std::span<const double>, Shape, Device);
template Tensor Tensor::from(std::span<const std::int32_t>, Shape, Device);
template Tensor Tensor::from(std::span<const std::int64_t>, Shape, Device);
template Tensor Tensor::from(std::span<const std::uint8_t>, Shape, Device);

void* Tensor::data() const {
    return storage_ ? storage_->as<char>() + static_cast<std::size_t>(offset_) * size_of(dtype_) : nullptr;
}

Tensor Tensor::view(Shape shape) const {
    FENWICK_CHECK(is_contiguous(), "[view] a strided tensor {} cannot be viewed as {}; call contiguous() first",
                  to_string(shape_), to_string(shape));
    std::int64_t known = 1;
    std::int64_t* free_size = nullptr;
    for (auto& size : shape) {
        if (size == -1) {
            FENWICK_CHECK(free_size == nullptr, "[view] shape {} has more than one -1", to_string(shape));
            free_size = &size;
        } else {
            known *= size;
        }
    }
    if (free_size != nullptr && known > 0) *free_size = count() / known;
    FENWICK_CHECK(count_of(shape) == count(), "[view] shape {} does not hold the {} elements of {}", to_string(shape), count(),
                  to_string(shape_));
    Tensor tensor = *this;
    tensor.row_stride_ = shape.empty() ? 1 : shape.back();
    tensor.shape_ = std::move(shape);
    return tensor;
}

Tensor Tensor::narrow_columns(std::int64_t offset, std::int64_t width) const {
    FENWICK_CHECK(dim() >= 1 && offset >= 0 && width >= 0 && offset + width <= columns(),
                  "[narrow_columns] columns {} to {} are not inside {}", offset, offset + width, to_string(shape_));
    Tensor tensor = *this;
    tensor.offset_ += offset;
    tensor.shape_.back() = width;
    return tensor;
}

Tensor Tensor::narrow_rows(std::int64_t begin, std::int64_t end) const {
    FENWICK_CHECK((dim() == 1 || dim() == 2) && begin >= 0 && begin <= end && end <= size(0),
                  "[narrow_rows] rows {} to {} are not inside {}", begin, end, to_string(shape_));
    Tensor tensor = *this;
    tensor.offset_ += begin * (dim() == 1 ? 1 : row_stride_);
    tensor.shape_.front() = end - begin;
    if (dim() == 1) tensor.row_stride_ = end - begin;
    return tensor;
}

Tensor Tensor::clone() const {
    Tensor copy = empty(shape_, dtype_, device_);
    copy.copy_from(*this);
    return copy;
}

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : clone(); }

Tensor Tensor::to(DType dtype) const {
    if (dtype == dtype_) return *this;
    Tensor copy = empty(shape_, dtype, device_);
    copy.copy_from(*this);
    return copy;
}

Tensor Tensor::to(Device device) const {
    if (device == device_) return *this;
    Tensor copy = empty(shape_, dtype_, device);
    copy.copy_from(*this);
    return copy;
}

void Tensor::copy_from(const Tensor& source) {
    FENWICK_CHECK(source.shape_ == shape_, "[copy_from] source has shape {}, destination {}", to_string(source.shape_),
                  to_string(shape_));
    if (count() == 0) return;
    if (source.device_ != device_) {
        const Tensor dense = source.to(dtype_).contiguous();
        if (is_contiguous()) {
            copy_bytes(device_, data(), dense.device_, dense.data(), bytes());
        } else {
            Tensor staged = empty(shape_, dtype_, device_);
            copy_bytes(device_, staged.data(), dense.device_, dense.data(), bytes());
            copy_from(staged);
        }
        return;
    }
    if (source.dtype_ == dtype_ && is_contiguous() && source.is_contiguous()) {
        copy_bytes(device_, data(), source.device_, source.data(), bytes());
        return;
    }
    kernels::axpby(exec_of(*this), {.x_dtype = source.dtype_,
                                    .y_dtype = dtype_,
                                    .rows = rows(),
                                    .columns = columns(),
                                    .x_stride = source.row_stride_,
                                    .y_stride = row_stride_,
                                    .x = source.data(),
                                    .y = data()});
}

void Tensor::fill(double value) {
    if (count() == 0) return;
    if (is_contiguous()) {
        kernels::fill(exec_of(*this), {.dtype = dtype_, .count = count(), .value = value, .values = data()});
    } else {
        copy_from(full(shape_, value, dtype_, device_));
    }
}

template <class T>
std::vector<T> Tensor::to_vector() const {
    const Tensor host = to(cpu_device).contiguous();
    const auto convert = [&](auto tag) {
        using Source = typename decltype(tag)::type;
        const Source* source = host.as<Source>();
        return std::vector<T>(source, source + host.count());
    };
    switch (dtype_) {
        case DType::float32: return convert(TypeTag<float>{});
        case DType::float64: return convert(TypeTag<double>{});
        case DType::int32: return convert(TypeTag<std::int32_t>{});
        case DType::int64: return convert(TypeTag<std::int64_t>{});
        case DType::uint8: return convert(TypeTag<std::uint8_t>{});
        case DType::bfloat16: return to(DType::float32).to_vector<T>();
    }
    return {};
}
template std::vector<float> Tensor::to_vector() const;
template std::vector<double> Tensor::to_vector() const;
template std::vector<std::int32_t> Tensor::to_vector() const;
template std::vector<std::int64_t> Tensor::to_vector() const;

double Tensor::item() const {
    FENWICK_CHECK(count() == 1, "[item] a tensor of shape {} is not one number", to_string(shape_));
    return to_vector<double>().front();
}

}  // namespace fenwick
