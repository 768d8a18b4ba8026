// Argument checks and the like that the operators share.
#pragma once

#include <string_view>

#include "autograd/ops.h"
#include "kernels/levels.h"

namespace fenwick::ops {

// "[op] name has shape [..], expected [..]"
inline void check_shape(std::string_view op, std::string_view name, const Variable& x, const Shape& expected) {
    FENWICK_CHECK(x.defined(), "[{}] {} is missing", op, name);
    FENWICK_CHECK(x.shape() == expected, "[{}] {} has shape {}, expected {}", op, name, to_string(x.shape()), to_string(expected));
}
inline void check_dtype(std::string_view op, std::string_view name, const Variable& x, DType expected) {
    FENWICK_CHECK(x.dtype() == expected, "[{}] {} is {}, expected {}", op, name, name_of(x.dtype()), name_of(expected));
}
// x's leading dimensions with another last one.
inline Shape with_columns(const Shape& shape, std::int64_t columns) {
    Shape result = shape;
    result.back() = columns;
    return result;
}

// A document needs no more levels than there are, or the last one takes what is above.
inline void check_levels(std::string_view op, std::int64_t levels, LevelOverflow overflow, const SequenceLayout& layout) {
    const int needed = kernels::levels_needed(static_cast<std::uint64_t>(layout.max_length()));
    FENWICK_CHECK(overflow == LevelOverflow::clamp || levels >= needed,
                  "[{}] level_scales has {} levels, a document of {} tokens needs {}; raise num_levels or allow clamping", op,
                  levels, layout.max_length(), needed);
}

// Where a kernel that always writes all of an input's gradient writes it: a scratch tensor where the input is a constant.
inline Gradient::Target target_or_scratch(const std::shared_ptr<Gradient>& gradient, const Tensor& input) {
    return gradient ? gradient->target() : Gradient::Target{Tensor::empty(input.shape(), input.dtype(), input.device()), false};
}

}  // namespace fenwick::ops
