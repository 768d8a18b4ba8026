// What the two cross-entropy operators share.
#pragma once

#include <span>
#include <string_view>

#include "autograd/tensor.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"

namespace fenwick::ops {

// Throws unless each target is an id below vocab or kernels::ignore_index.
inline void check_target_ids(std::string_view op, std::span<const std::int32_t> ids, std::int64_t vocab) {
    for (std::size_t i = 0; i < ids.size(); ++i)
        FENWICK_CHECK((ids[i] >= 0 && ids[i] < vocab) || ids[i] == kernels::ignore_index,
                      "[{}] target {} at position {} is neither below the vocabulary of {} nor {} (ignored)", op, ids[i], i,
                      vocab, kernels::ignore_index);
}

// Throws unless targets are int32, `count` of them, on `device`.
inline void check_targets(std::string_view op, const Tensor& targets, std::int64_t count, Device device) {
    FENWICK_CHECK(targets.defined() && targets.dtype() == DType::int32, "[{}] targets are {}, expected int32", op,
                  targets.defined() ? name_of(targets.dtype()) : "missing");
    FENWICK_CHECK(targets.count() == count && targets.is_contiguous(), "[{}] targets have shape {}, expected {} in one piece", op,
                  to_string(targets.shape()), count);
    FENWICK_CHECK(targets.device() == device, "[{}] targets and the other inputs are on different devices", op);
}

// factor * sum(values), one element of the same dtype; added up in float64.
inline Tensor scaled_sum(const Tensor& values, double factor) {
    const Tensor total = Tensor::empty({1}, DType::float64, values.device());
    Tensor result = Tensor::empty({1}, values.dtype(), values.device());
    kernels::sum(exec_of(values), {.dtype = values.dtype(), .count = values.count(), .values = values.data(),
                                   .total = total.as<double>()});
    kernels::axpby(exec_of(values), {.x_dtype = DType::float64, .y_dtype = result.dtype(), .rows = 1, .columns = 1,
                                     .x_stride = 1, .y_stride = 1, .a = factor, .x = total.data(), .y = result.data()});
    return result;
}

// x *= factor, x contiguous, factor one element of x's gate dtype on the same device.
inline void scale_in_place(const Tensor& x, const Tensor& factor) {
    kernels::scale_by(exec_of(x), {.dtype = x.dtype(), .count = x.count(), .factor = factor.data(), .values = x.data()});
}

}  // namespace fenwick::ops
