// decay_gate, level_scales, sigmoid, scale_heads, head_skip.
#include "kernels/gates.h"

#include "autograd/check.h"
#include "autograd/ops.h"
#include "kernels/elementwise.h"

namespace fenwick::ops {

DecayGate decay_gate(const Variable& raw, const Variable& step_bias, const Variable& a_log) {
    FENWICK_CHECK(raw.defined() && raw.value().dim() >= 1, "[decay_gate] raw is missing or has no dimension");
    const Tensor input = raw.value();
    const std::int64_t tokens = input.rows(), heads = input.columns();
    const DType dtype = gate_dtype(input.dtype());
    check_shape("decay_gate", "step_bias", step_bias, {heads});
    check_shape("decay_gate", "a_log", a_log, {heads});
    check_dtype("decay_gate", "step_bias", step_bias, dtype);
    check_dtype("decay_gate", "a_log", a_log, dtype);
    const Tensor bias = step_bias.value(), log_rate = a_log.value();
    const Tensor step = Tensor::empty(input.shape(), dtype, input.device());
    const Tensor g = Tensor::empty(input.shape(), dtype, input.device());
    kernels::decay_gate_forward(exec_of(g), {.dtype = input.dtype(),
                                             .tokens = tokens,
                                             .heads = heads,
                                             .raw_stride = input.row_stride(),
                                             .raw = input.data(),
                                             .step_bias = bias.data(),
                                             .a_log = log_rate.data(),
                                             .step = step.data(),
                                             .g = g.data()});
    auto outputs = record(
        "decay_gate", std::vector<Tensor>{step, g}, {raw, step_bias, a_log},
        [=, draw = raw.gradient(), dbias = step_bias.gradient(), dlog_rate = a_log.gradient()](const std::vector<Tensor>& grads) {
            const auto dinput = target_or_scratch(draw, input);
            const auto doffset = target_or_scratch(dbias, bias);
            const auto drate = target_or_scratch(dlog_rate, log_rate);
            kernels::decay_gate_backward(exec_of(input), {.dtype = input.dtype(),
                                                          .tokens = tokens,
                                                          .heads = heads,
                                                          .raw_stride = input.row_stride(),
                                                          .draw_stride = dinput.tensor.row_stride(),
                                                          .raw = input.data(),
                                                          .step_bias = bias.data(),
                                                          .a_log = log_rate.data(),
                                                          .dstep = grads[0].defined() ? grads[0].data() : nullptr,
                                                          .dg = grads[1].defined() ? grads[1].data() : nullptr,
                                                          .draw = dinput.tensor.data(),
                                                          .dstep_bias = doffset.tensor.data(),
                                                          .da_log = drate.tensor.data(),
                                                          .accumulate_draw = dinput.accumulate,
                                                          .accumulate_dstep_bias = doffset.accumulate,
                                                          .accumulate_da_log = drate.accumulate});
        });
    return {std::move(outputs[0]), std::move(outputs[1])};
}

Variable level_scales(const Variable& raw, const Variable& level_weight) {
    FENWICK_CHECK(raw.defined() && raw.value().dim() >= 1 && level_weight.defined() && level_weight.value().dim() == 2 &&
                      level_weight.value().count() == raw.size(-1),
                  "[level_scales] raw has shape {}, level_weight {}; expected [..., heads * levels] and [heads, levels]",
                  to_string(raw.shape()), to_string(level_weight.shape()));
    check_dtype("level_scales", "level_weight", level_weight, gate_dtype(raw.dtype()));
    const Tensor input = raw.value(), weight = level_weight.value();
    const std::int64_t tokens = input.rows(), heads = weight.size(0), levels = weight.size(1);
    Tensor scales = Tensor::empty(input.shape(), gate_dtype(input.dtype()), input.device());
    kernels::level_scales_forward(exec_of(scales), {.dtype = input.dtype(),
                                                    .tokens = tokens,
                                                    .heads = heads,
                                                    .levels = levels,
                                                    .raw_stride = input.row_stride(),
                                                    .raw = input.data(),
                                                    .level_weight = weight.data(),
                                                    .level_scales = scales.data()});
    return record("level_scales", scales, {raw, level_weight},
                  [=, draw = raw.gradient(), dweight = level_weight.gradient()](const Tensor& dscales) {
                      const auto dinput = target_or_scratch(draw, input);
                      const auto dw = target_or_scratch(dweight, weight);
                      kernels::level_scales_backward(exec_of(dscales), {.dtype = input.dtype(),
                                                                        .tokens = tokens,
                                                                        .heads = heads,
                                                                        .levels = levels,
                                                                        .raw_stride = input.row_stride(),
                                                                        .draw_stride = dinput.tensor.row_stride(),
                                                                        .raw = input.data(),
                                                                        .level_weight = weight.data(),
                                                                        .dlevel_scales = dscales.data(),
                                                                        .draw = dinput.tensor.data(),
                                                                        .dlevel_weight = dw.tensor.data(),
                                                                        .accumulate_draw = dinput.accumulate,
                                                                        .accumulate_dlevel_weight = dw.accumulate});
                  });
}

Variable sigmoid(const Variable& x) {
    FENWICK_CHECK(x.defined(), "[sigmoid] x is missing");
    const Tensor input = x.value().contiguous();
    Tensor y = Tensor::empty(input.shape(), gate_dtype(input.dtype()), input.device());
    kernels::sigmoid_forward(exec_of(y), {.dtype = input.dtype(), .count = input.count(), .x = input.data(), .y = y.data()});
    return record("sigmoid", y, {x}, [y, dtype = input.dtype(), dx = x.gradient()](const Tensor& dy) {
        Tensor contribution = Tensor::empty(y.shape(), dtype, y.device());
        kernels::sigmoid_backward(exec_of(dy), {.dtype = dtype,
                                                .count = y.count(),
                                                .y = y.data(),
                                                .dy = dy.data(),
                                                .dx = contribution.data()});
        dx->add(std::move(contribution));
    });
}

Variable scale_heads(const Variable& x, const Variable& scale) {
    FENWICK_CHECK(x.defined() && scale.defined() && x.value().dim() >= 1 && scale.value().dim() == x.value().dim() &&
                      scale.shape() == with_columns(x.shape(), scale.size(-1)) && scale.size(-1) >= 1 &&
                      x.size(-1) % scale.size(-1) == 0,
                  "[scale_heads] x has shape {}, scale {}; expected [..., heads * width] and [..., heads]",
                  to_string(x.shape()), to_string(scale.shape()));
    check_dtype("scale_heads", "scale", scale, gate_dtype(x.dtype()));
    const Tensor input = x.value(), factors = scale.value().contiguous();
    const std::int64_t tokens = input.rows(), heads = factors.columns(), width = input.columns() / heads;
    Tensor y = Tensor::empty(input.shape(), input.dtype(), input.device());
    kernels::scale_heads_forward(exec_of(y), {.dtype = input.dtype(),
                                              .tokens = tokens,
                                              .heads = heads,
                                              .width = width,
                                              .x_stride = input.row_stride(),
                                              .x = input.data(),
                                              .scale = factors.data(),
                                              .y = y.data()});
    return record("scale_heads", y, {x, scale}, [=, dx = x.gradient(), dscale = scale.gradient()](const Tensor& dy) {
        const auto dinput = target_or_scratch(dx, input);
        Tensor dfactors = Tensor::empty(factors.shape(), factors.dtype(), factors.device());
        kernels::scale_heads_backward(exec_of(dy), {.dtype = input.dtype(),
                                                    .tokens = tokens,
                                                    .heads = heads,
                                                    .width = width,
                                                    .x_stride = input.row_stride(),
                                                    .dx_stride = dinput.tensor.row_stride(),
                                                    .x = input.data(),
                                                    .scale = factors.data(),
                                                    .dy = dy.data(),
                                                    .dx = dinput.tensor.data(),
                                                    .dscale = dfactors.data(),
                                                    .accumulate_dx = dinput.accumulate});
        if (dscale) dscale->add(std::move(dfactors));
    });
}

Variable head_skip(const Variable& o, const Variable& x, const Variable& skip) {
    FENWICK_CHECK(x.defined() && x.value().dim() >= 1 && skip.defined() && skip.value().dim() == 1 && skip.size(0) >= 1 &&
                      x.size(-1) % skip.size(0) == 0,
                  "[head_skip] x has shape {}, skip {}; expected [..., heads * width] and [heads]", to_string(x.shape()),
                  to_string(skip.shape()));
    check_shape("head_skip", "o", o, x.shape());
    check_dtype("head_skip", "o", o, x.dtype());
    check_dtype("head_skip", "skip", skip, gate_dtype(x.dtype()));
    const Tensor input = x.value(), output = o.value().contiguous(), weight = skip.value();
    const std::int64_t tokens = input.rows(), heads = weight.size(0), width = input.columns() / heads;
    Tensor y = Tensor::empty(input.shape(), input.dtype(), input.device());
    kernels::head_skip_forward(exec_of(y), {.dtype = input.dtype(),
                                            .tokens = tokens,
                                            .heads = heads,
                                            .width = width,
                                            .x_stride = input.row_stride(),
                                            .o = output.data(),
                                            .x = input.data(),
                                            .skip = weight.data(),
                                            .y = y.data()});
    return record("head_skip", y, {o, x, skip},
                  [=, do_ = o.gradient(), dx = x.gradient(), dskip = skip.gradient()](const Tensor& dy) {
                      const auto dinput = target_or_scratch(dx, input);
                      const auto dweight = target_or_scratch(dskip, weight);
                      kernels::head_skip_backward(exec_of(dy), {.dtype = input.dtype(),
                                                                .tokens = tokens,
                                                                .heads = heads,
                                                                .width = width,
                                                                .x_stride = input.row_stride(),
                                                                .dx_stride = dinput.tensor.row_stride(),
                                                                .x = input.data(),
                                                                .skip = weight.data(),
                                                                .dy = dy.data(),
                                                                .dx = dinput.tensor.data(),
                                                                .dskip = dweight.tensor.data(),
                                                                .accumulate_dx = dinput.accumulate,
                                                                .accumulate_dskip = dweight.accumulate});
                      if (do_) do_->add(dy);
                  });
}

}  // namespace fenwick::ops
