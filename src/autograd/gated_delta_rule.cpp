#include "kernels/gated_delta_rule.h"

#include <bit>
#include <optional>

#include "autograd/check.h"
#include "autograd/gradient_output.h"
#include "autograd/ops.h"

namespace fenwick::ops {
namespace {

constexpr std::string_view op = "gated_delta_rule";

// Width of one head of x's last dimension; x has the leading dimensions of q.
std::int64_t width_of_head(std::string_view name, const Variable& x, const Variable& q, std::int64_t heads) {
    FENWICK_CHECK(x.defined(), "[{}] {} is missing", op, name);
    FENWICK_CHECK(x.value().dim() >= 1 && x.size(-1) > 0 && x.size(-1) % heads == 0,
                  "[{}] {} has shape {}, its last dimension must be a multiple of {} heads", op, name, to_string(x.shape()),
                  heads);
    check_shape(op, name, x, with_columns(q.shape(), x.size(-1)));
    return x.size(-1) / heads;
}

}  // namespace

Variable gated_delta_rule(const Variable& q, const Variable& k, const Variable& v, const Variable& g, const Variable& beta,
                          const Variable& level_scales, const GatedDeltaRuleOptions& options, const SequenceLayout& layout) {
    const std::int64_t heads = options.heads, chunk_size = options.chunk_size;
    FENWICK_CHECK(heads >= 1, "[{}] heads is {}, expected at least 1", op, heads);
    FENWICK_CHECK(chunk_size >= 1 && std::has_single_bit(static_cast<std::uint64_t>(chunk_size)),
                  "[{}] chunk_size is {}, expected a power of two", op, chunk_size);
    FENWICK_CHECK(q.defined(), "[{}] q is missing", op);
    const std::int64_t key_width = width_of_head("q", q, q, heads);
    check_shape(op, "k", k, q.shape());
    const std::int64_t value_width = width_of_head("v", v, q, heads);
    check_shape(op, "g", g, with_columns(q.shape(), heads));
    check_shape(op, "beta", beta, with_columns(q.shape(), heads));
    FENWICK_CHECK(is_floating(q.dtype()), "[{}] q is {}, expected a floating type", op, name_of(q.dtype()));
    check_dtype(op, "k", k, q.dtype());
    check_dtype(op, "v", v, q.dtype());
    check_dtype(op, "g", g, gate_dtype(q.dtype()));
    check_dtype(op, "beta", beta, gate_dtype(q.dtype()));
    layout.check(op, q.value().rows());
    std::int64_t levels = 0;
    if (level_scales.defined()) {
        levels = width_of_head("level_scales", level_scales, q, heads);
        check_dtype(op, "level_scales", level_scales, gate_dtype(q.dtype()));
        check_levels(op, levels, options.level_overflow, layout);
    }

    // Gates are dense in the kernel; q, k and v may be slices of a wider projection.
    const Tensor queries = q.value(), keys = k.value(), values = v.value();
    const Tensor decays = g.value().contiguous(), betas = beta.value().contiguous();
    const Tensor scales = levels > 0 ? level_scales.value().contiguous() : Tensor();
    Tensor o = Tensor::empty(v.shape(), q.dtype(), q.device());
    kernels::gated_delta_rule_forward(
        exec_of(o), {.dtype = o.dtype(), .sequences = layout.sequences(),
                     .heads = heads, .key_width = key_width, .value_width = value_width,
                     .levels = levels, .chunk_size = chunk_size,
                     .q_stride = queries.row_stride(), .k_stride = keys.row_stride(), .v_stride = values.row_stride(),
                     .q = queries.data(), .k = keys.data(), .v = values.data(),
                     .g = decays.data(), .beta = betas.data(),
                     .level_scales = levels > 0 ? scales.data() : nullptr, .o = o.data()});
    if (!needs_grad({q, k, v, g, beta, level_scales})) return Variable(o);
    return record(op, o, {q, k, v, g, beta, level_scales},
                  [=, grad_q = q.gradient(), grad_k = k.gradient(), grad_v = v.gradient(), grad_g = g.gradient(),
                   grad_beta = beta.gradient(), grad_scales = level_scales.gradient()](const Tensor& d_o) {
        using Rows = GradientOutput::Rows;
        GradientOutput dq(grad_q, queries, Rows::strided), dk(grad_k, keys, Rows::strided);
        GradientOutput dv(grad_v, values, Rows::strided);
        GradientOutput dg(grad_g, decays, Rows::dense), dbeta(grad_beta, betas, Rows::dense);
        std::optional<GradientOutput> dscales;
        if (levels > 0) dscales.emplace(grad_scales, scales, Rows::dense);
        kernels::gated_delta_rule_backward(
            exec_of(d_o), {.dtype = d_o.dtype(), .sequences = layout.sequences(),
                           .heads = heads, .key_width = key_width, .value_width = value_width,
                           .levels = levels, .chunk_size = chunk_size,
                           .q_stride = queries.row_stride(), .k_stride = keys.row_stride(), .v_stride = values.row_stride(),
                           .dq_stride = dq.stride(), .dk_stride = dk.stride(),
                           .dv_stride = dv.stride(),
                           .q = queries.data(), .k = keys.data(), .v = values.data(),
                           .g = decays.data(), .beta = betas.data(),
                           .level_scales = levels > 0 ? scales.data() : nullptr,
                           .d_o = d_o.data(),
                           .dq = dq.data(), .dk = dk.data(), .dv = dv.data(),
                           .dg = dg.data(), .dbeta = dbeta.data(),
                           .dlevel_scales = dscales ? dscales->data() : nullptr});
        for (auto* output : {&dq, &dk, &dv, &dg, &dbeta}) output->finish();
        if (dscales) dscales->finish();
    });
}

}  // namespace fenwick::ops
