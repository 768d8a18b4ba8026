#include "kernels/causal_conv1d.h"

#include "autograd/check.h"
#include "autograd/ops.h"

namespace fenwick::ops {

Variable causal_conv1d(const Variable& x, const Variable& weight, const Variable& bias, const SequenceLayout& layout) {
    FENWICK_CHECK(x.defined() && x.value().dim() >= 1, "[causal_conv1d] x is missing or has no dimension");
    const Tensor input = x.value();
    const std::int64_t channels = input.columns();
    FENWICK_CHECK(weight.defined() && weight.value().dim() == 2 && weight.size(0) == channels && weight.size(1) >= 1,
                  "[causal_conv1d] weight has shape {}, expected [{}, width]", to_string(weight.shape()), channels);
    check_dtype("causal_conv1d", "weight", weight, gate_dtype(x.dtype()));
    const bool has_bias = bias.defined();
    if (has_bias) {
        check_shape("causal_conv1d", "bias", bias, {channels});
        check_dtype("causal_conv1d", "bias", bias, gate_dtype(x.dtype()));
    }
    layout.check("causal_conv1d", input.rows());
    const Tensor taps = weight.value(), offset = has_bias ? bias.value() : Tensor();
    const std::int64_t width = weight.size(1);
    Tensor y = Tensor::empty(input.shape(), input.dtype(), input.device());
    kernels::causal_conv1d_forward(exec_of(y), {.dtype = input.dtype(),
                                                .sequences = layout.sequences(),
                                                .channels = channels,
                                                .width = width,
                                                .x_stride = input.row_stride(),
                                                .y_stride = channels,
                                                .x = input.data(),
                                                .weight = taps.data(),
                                                .bias = has_bias ? offset.data() : nullptr,
                                                .y = y.data()});
    return record("causal_conv1d", y, {x, weight, bias},
                  [=, dx = x.gradient(), dweight = weight.gradient(), dbias = bias.gradient()](const Tensor& dy) {
                      const auto dinput = target_or_scratch(dx, input);
                      const auto dtaps = target_or_scratch(dweight, taps);
                      const auto doffset = has_bias ? target_or_scratch(dbias, offset) : Gradient::Target{};
                      kernels::causal_conv1d_backward(exec_of(dy), {.dtype = input.dtype(),
                                                                    .sequences = layout.sequences(),
                                                                    .channels = channels,
                                                                    .width = width,
                                                                    .x_stride = input.row_stride(),
                                                                    .dy_stride = channels,
                                                                    .dx_stride = dinput.tensor.row_stride(),
                                                                    .x = input.data(),
                                                                    .weight = taps.data(),
                                                                    .bias = has_bias ? offset.data() : nullptr,
                                                                    .dy = dy.data(),
                                                                    .dx = dinput.tensor.data(),
                                                                    .dweight = dtaps.tensor.data(),
                                                                    .dbias = has_bias ? doffset.tensor.data() : nullptr,
                                                                    .accumulate_dx = dinput.accumulate,
                                                                    .accumulate_dweight = dtaps.accumulate,
                                                                    .accumulate_dbias = doffset.accumulate});
                  });
}

}  // namespace fenwick::ops
