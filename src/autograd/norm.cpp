// rms_norm, rms_norm_gated, gated_rms_norm, stream_rms_norm, add_rms_norm, l2norm.
#include "kernels/norm.h"

#include "autograd/check.h"
#include "autograd/ops.h"

namespace fenwick::ops {
namespace {

void check_norm(std::string_view op, const Variable& x, const Variable& weight, std::int64_t groups) {
    FENWICK_CHECK(x.defined() && x.value().dim() >= 1, "[{}] x is missing or has no dimension", op);
    const std::int64_t width = x.size(-1);
    FENWICK_CHECK(groups >= 1 && width % groups == 0, "[{}] a row of {} cannot be cut into {} equal groups", op, width, groups);
    check_shape(op, "weight", weight, {width});
    check_dtype(op, "weight", weight, gate_dtype(x.dtype()));
}

Variable norm(std::string_view op, kernels::NormGate gate, const Variable& x, const Variable& z, const Variable& weight,
              double eps, std::int64_t groups) {
    check_norm(op, x, weight, groups);
    const bool gated = gate != kernels::NormGate::none;
    if (gated) {
        check_shape(op, "z", z, x.shape());
        check_dtype(op, "z", z, x.dtype());
    }
    const Tensor u = x.value(), gate_input = gated ? z.value() : Tensor(), scale = weight.value();
    const std::int64_t rows = u.rows(), width = u.columns();
    Tensor y = Tensor::empty(u.shape(), u.dtype(), u.device());
    const Tensor rstd = Tensor::empty({rows, groups}, gate_dtype(u.dtype()), u.device());
    kernels::rms_norm_forward(exec_of(y), {.dtype = u.dtype(),
                                           .gate = gate,
                                           .rows = rows,
                                           .groups = groups,
                                           .width = width,
                                           .eps = eps,
                                           .x_stride = u.row_stride(),
                                           .z_stride = gated ? gate_input.row_stride() : 0,
                                           .x = u.data(),
                                           .z = gated ? gate_input.data() : nullptr,
                                           .weight = scale.data(),
                                           .y = y.data(),
                                           .rstd = rstd.data()});
    return record(op, y, {x, z, weight},
                  [=, dx = x.gradient(), dz = z.gradient(), dweight = weight.gradient()](const Tensor& dy) {
                      const auto du = target_or_scratch(dx, u);
                      // One variable as x and z: the second contribution is added after the kernel.
                      const bool same = gated && dx && dx == dz;
                      const auto dgate = gated ? target_or_scratch(same ? nullptr : dz, gate_input) : Gradient::Target{};
                      const auto dscale = target_or_scratch(dweight, scale);
                      kernels::rms_norm_backward(exec_of(dy), {.dtype = u.dtype(),
                                                               .gate = gate,
                                                               .rows = rows,
                                                               .groups = groups,
                                                               .width = width,
                                                               .u_stride = u.row_stride(),
                                                               .z_stride = gated ? gate_input.row_stride() : 0,
                                                               .du_stride = du.tensor.row_stride(),
                                                               .dz_stride = gated ? dgate.tensor.row_stride() : 0,
                                                               .u = u.data(),
                                                               .z = gated ? gate_input.data() : nullptr,
                                                               .weight = scale.data(),
                                                               .rstd = rstd.data(),
                                                               .dy = dy.data(),
                                                               .du = du.tensor.data(),
                                                               .dz = gated ? dgate.tensor.data() : nullptr,
                                                               .dweight = dscale.tensor.data(),
                                                               .accumulate_du = du.accumulate,
                                                               .accumulate_dz = dgate.accumulate,
                                                               .accumulate_dweight = dscale.accumulate});
                      if (same) dz->add(dgate.tensor);
                  });
}

// The norm of x + residual, or of residual alone where x is undefined. Outputs: the norm in `dtype`, and with x the sum.
std::vector<Variable> norm_of_stream(std::string_view op, const Variable& x, const Variable& residual,
                                            const Variable& weight, double eps, DType dtype) {
    FENWICK_CHECK(residual.defined() && residual.value().dim() >= 1, "[{}] residual is missing or has no dimension", op);
    check_dtype(op, "residual", residual, gate_dtype(dtype));
    check_shape(op, "weight", weight, {residual.size(-1)});
    check_dtype(op, "weight", weight, gate_dtype(dtype));
    const bool adds = x.defined();
    if (adds) check_shape(op, "x", x, residual.shape());
    const Tensor input = x.value(), before = residual.value().contiguous(), scale = weight.value();
    const std::int64_t rows = before.rows(), width = before.columns();
    const Tensor y = Tensor::empty(before.shape(), dtype, before.device());
    const Tensor stream = adds ? Tensor::empty(before.shape(), before.dtype(), before.device()) : before;
    const Tensor rstd = Tensor::empty({rows, 1}, gate_dtype(dtype), before.device());
    kernels::rms_norm_forward(exec_of(y), {.dtype = dtype,
                                           .rows = rows,
                                           .width = width,
                                           .eps = eps,
                                           .x_stride = adds ? input.row_stride() : 0,
                                           .x = adds ? input.data() : nullptr,
                                           .residual = before.data(),
                                           .weight = scale.data(),
                                           .sum = adds ? stream.data() : nullptr,
                                           .y = y.data(),
                                           .rstd = rstd.data()});
    return record(op, adds ? std::vector{y, stream} : std::vector{y}, {x, residual, weight},
                  [=, dx = x.gradient(), dresidual = residual.gradient(),
                   dweight = weight.gradient()](const std::vector<Tensor>& grad_outputs) {
                      const Tensor &dy = grad_outputs[0], dsum = adds ? grad_outputs[1] : Tensor();
                      // x and residual receive the same gradient: that of their sum. One variable as both: the second
                      // contribution is added after the kernel.
                      const bool same = dx && dx == dresidual;
                      if (!dy.defined()) {  // only the sum was used
                          if (dx) dx->add(dtype == dsum.dtype() ? dsum.clone() : dsum.to(dtype));
                          if (dresidual) dresidual->add(dsum);
                          return;
                      }
                      const auto branch = dx ? dx->target() : Gradient::Target{};
                      const auto through = same        ? target_or_scratch(nullptr, stream)
                                           : dresidual ? dresidual->target()
                                                       : Gradient::Target{};
                      const auto dscale = target_or_scratch(dweight, scale);
                      kernels::rms_norm_backward(exec_of(dy), {.dtype = dtype,
                                                               .stream = true,
                                                               .rows = rows,
                                                               .width = width,
                                                               .u_stride = width,
                                                               .du_stride = branch.tensor.row_stride(),
                                                               .dresidual_stride = through.tensor.row_stride(),
                                                               .u = stream.data(),
                                                               .weight = scale.data(),
                                                               .rstd = rstd.data(),
                                                               .dy = dy.data(),
                                                               .dsum = dsum.defined() ? dsum.data() : nullptr,
                                                               .du = branch.tensor.data(),
                                                               .dresidual = through.tensor.data(),
                                                               .dweight = dscale.tensor.data(),
                                                               .accumulate_du = branch.accumulate,
                                                               .accumulate_dresidual = through.accumulate,
                                                               .accumulate_dweight = dscale.accumulate});
                      if (same) dresidual->add(through.tensor);
                  });
}

}  // namespace

Variable rms_norm(const Variable& x, const Variable& weight, double eps, std::int64_t groups) {
    return norm("rms_norm", kernels::NormGate::none, x, {}, weight, eps, groups);
}

Variable rms_norm_gated(const Variable& x, const Variable& z, const Variable& weight, double eps, std::int64_t groups) {
    return norm("rms_norm_gated", kernels::NormGate::after, x, z, weight, eps, groups);
}

Variable gated_rms_norm(const Variable& x, const Variable& z, const Variable& weight, double eps, std::int64_t groups) {
    return norm("gated_rms_norm", kernels::NormGate::before, x, z, weight, eps, groups);
}

Variable stream_rms_norm(const Variable& residual, const Variable& weight, double eps, DType dtype) {
    return norm_of_stream("stream_rms_norm", {}, residual, weight, eps, dtype)[0];
}

std::pair<Variable, Variable> add_rms_norm(const Variable& x, const Variable& residual, const Variable& weight, double eps) {
    FENWICK_CHECK(x.defined(), "[add_rms_norm] x is missing");
    auto outputs = norm_of_stream("add_rms_norm", x, residual, weight, eps, x.dtype());
    return {std::move(outputs[0]), std::move(outputs[1])};
}

Variable l2norm(const Variable& x, std::int64_t heads, double eps) {
    FENWICK_CHECK(x.defined() && x.value().dim() >= 1 && heads >= 1 && x.size(-1) % heads == 0,
                  "[l2norm] x has shape {}; its last dimension must be a multiple of {} heads", to_string(x.shape()), heads);
    const Tensor input = x.value();
    const std::int64_t tokens = input.rows(), width = input.columns() / heads;
    Tensor y = Tensor::empty(input.shape(), input.dtype(), input.device());
    const Tensor rstd = Tensor::empty({tokens, heads}, gate_dtype(input.dtype()), input.device());
    kernels::l2norm_forward(exec_of(y), {.dtype = input.dtype(),
                                         .tokens = tokens,
                                         .heads = heads,
                                         .width = width,
                                         .eps = eps,
                                         .x_stride = input.row_stride(),
                                         .x = input.data(),
                                         .y = y.data(),
                                         .rstd = rstd.data()});
    return record("l2norm", y, {x}, [=, dx = x.gradient()](const Tensor& dy) {
        const auto target = dx->target();
        kernels::l2norm_backward(exec_of(dy), {.dtype = input.dtype(),
                                               .tokens = tokens,
                                               .heads = heads,
                                               .width = width,
                                               .x_stride = input.row_stride(),
                                               .dx_stride = target.tensor.row_stride(),
                                               .x = input.data(),
                                               .rstd = rstd.data(),
                                               .dy = dy.data(),
                                               .dx = target.tensor.data(),
                                               .accumulate_dx = target.accumulate});
    });
}

}  // namespace fenwick::ops
