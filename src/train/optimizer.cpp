#include "train/optimizer.h"

#include <cmath>

#include "kernels/optimizer.h"

namespace fenwick::train {
namespace {

constexpr std::int64_t alignment = 64;  // elements: slices start at cache lines, and vector loads are aligned

Tensor sum_squares(const Tensor& tensor) {
    Tensor total = Tensor::empty({1}, DType::float64, tensor.device());
    const void* const data = tensor.data();
    const std::int64_t count = tensor.count();
    kernels::sum_squares(exec_of(tensor), {.dtype = tensor.dtype(), .tensor_count = 1, .tensors = &data, .counts = &count,
                                           .total = total.as<double>()});
    return total;
}

}  // namespace

Optimizer::Optimizer(std::vector<model::Parameter> parameters, const OptimizerConfig& config)
    : parameters_(std::move(parameters)), config_(config) {
    FENWICK_CHECK(!parameters_.empty(), "[Optimizer] the model has no parameters");
    const DType dtype = parameters_.front().variable.dtype();
    const Device device = parameters_.front().variable.device();
    std::int64_t total = 0;
    for (const auto& parameter : parameters_) {
        FENWICK_CHECK(parameter.variable.dtype() == dtype, "[Optimizer] {} is {}, {} is {}; one dtype is needed",
                      parameter.name, name_of(parameter.variable.dtype()), parameters_.front().name, name_of(dtype));
        offsets_.push_back(total);
        total += (parameter.variable.value().count() + alignment - 1) / alignment * alignment;
    }
    {
        MemoryKindScope scope(MemoryKind::gradients);
        gradients_ = Tensor::zeros({total}, dtype, device);
    }
    {
        MemoryKindScope scope(MemoryKind::optimizer);
        first_moments_ = Tensor::zeros({total}, dtype, device);
        second_moments_ = Tensor::zeros({total}, dtype, device);
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        const auto& gradient = parameters_[i].variable.gradient();
        gradient->clear();
        gradient->set_home([home = slice(gradients_, i)] { return home; });
    }
    zero_gradients();
}

Tensor Optimizer::slice(const Tensor& flat, std::size_t parameter) const {
    const Tensor& value = parameters_[parameter].variable.value();
    const std::int64_t offset = offsets_[parameter];
    return flat.narrow_rows(offset, offset + value.count()).view(value.shape());
}

void Optimizer::zero_gradients() {
    gradients_.fill(0.0);
    // Defined from now on, so that backward adds into the buffer.
    for (const auto& parameter : parameters_)
        if (!parameter.variable.gradient()->defined()) parameter.variable.gradient()->zero();
}

Tensor Optimizer::gradient_squares() const { return sum_squares(gradients_); }
double Optimizer::gradient_norm() const { return std::sqrt(gradient_squares().item()); }

void Optimizer::update(std::int64_t step, double learning_rate, double gradient_norm) {
    std::vector<kernels::AdamWTensor> tensors;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        const Tensor& value = parameters_[i].variable.value();
        tensors.push_back({.count = value.count(),
                           .parameter = value.data(),
                           .gradient = slice(gradients_, i).data(),
                           .first_moment = first_moment(i).data(),
                           .second_moment = second_moment(i).data(),
                           .weight_decay = parameters_[i].weight_decay ? config_.weight_decay : 0.0});
    }
    const bool clip = config_.clip_norm > 0 && gradient_norm > config_.clip_norm;
    kernels::adamw(exec_of(gradients_), {.dtype = gradients_.dtype(),
                                         .tensor_count = static_cast<std::int64_t>(tensors.size()),
                                         .tensors = tensors.data(),
                                         .step = step,
                                         .learning_rate = learning_rate,
                                         .beta1 = config_.beta1,
                                         .beta2 = config_.beta2,
                                         .eps = config_.eps,
                                         .gradient_scale = clip ? config_.clip_norm / gradient_norm : 1.0});
}

std::string Optimizer::first_not_finite() const {
    for (const auto& parameter : parameters_)
        if (!std::isfinite(sum_squares(parameter.variable.value()).item())) return "weights of " + parameter.name;
    for (std::size_t i = parameters_.size(); i-- > 0;)
        if (!std::isfinite(sum_squares(slice(gradients_, i)).item())) return "gradient of " + parameters_[i].name;
    return "";
}

}  // namespace fenwick::train
