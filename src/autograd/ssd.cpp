#include "kernels/ssd.h"

#include <bit>
#include <optional>

#include "autograd/check.h"
#include "autograd/gradient_output.h"
#include "autograd/ops.h"

namespace fenwick::ops {
Variable ssd(const Variable& q, const Variable& k, const Variable& v, const Variable& g, const Variable& level_scales,
             const SsdOptions& options, const SequenceLayout& layout) {
    const std::int64_t heads = options.heads, groups = options.groups, chunk_size = options.chunk_size;
    FENWICK_CHECK(heads >= 1 && groups >= 1 && heads % groups == 0,
                  "[ssd] {} heads cannot be shared among {} groups; heads must be a multiple of groups", heads, groups);
    FENWICK_CHECK(chunk_size >= 1 && std::has_single_bit(static_cast<std::uint64_t>(chunk_size)),
                  "[ssd] chunk_size is {}; it must be a power of two", chunk_size);
    FENWICK_CHECK(q.defined() && q.value().dim() >= 1 && q.size(-1) > 0 && q.size(-1) % groups == 0,
                  "[ssd] q has shape {}; its last dimension must be a multiple of {} groups",
                  q.defined() ? to_string(q.shape()) : "none", groups);
    FENWICK_CHECK(v.defined() && v.value().dim() >= 1 && v.size(-1) > 0 && v.size(-1) % heads == 0,
                  "[ssd] v has shape {}; its last dimension must be a multiple of {} heads",
                  v.defined() ? to_string(v.shape()) : "none", heads);
    const DType dtype = q.dtype();
    FENWICK_CHECK(is_floating(dtype), "[ssd] q is {}; a floating type is needed", name_of(dtype));
    check_shape("ssd", "k", k, q.shape());
    check_shape("ssd", "v", v, with_columns(q.shape(), v.size(-1)));
    check_shape("ssd", "g", g, with_columns(q.shape(), heads));
    check_dtype("ssd", "k", k, dtype);
    check_dtype("ssd", "v", v, dtype);
    check_dtype("ssd", "g", g, gate_dtype(dtype));
    const std::int64_t tokens = q.value().rows();
    layout.check("ssd", tokens);
    std::int64_t levels = 0;
    if (level_scales.defined()) {
        FENWICK_CHECK(level_scales.value().dim() >= 1 && level_scales.size(-1) > 0 && level_scales.size(-1) % heads == 0,
                      "[ssd] level_scales has shape {}; its last dimension must be {} heads times the number of levels",
                      to_string(level_scales.shape()), heads);
        levels = level_scales.size(-1) / heads;
        check_shape("ssd", "level_scales", level_scales, with_columns(q.shape(), heads * levels));
        check_dtype("ssd", "level_scales", level_scales, gate_dtype(dtype));
        check_levels("ssd", levels, options.level_overflow, layout);
    }

    const Tensor qt = q.value(), kt = k.value(), vt = v.value(), gt = g.value().contiguous();
    const Tensor scales = level_scales.defined() ? level_scales.value().contiguous() : Tensor();
    const std::int64_t key_width = q.size(-1) / groups, value_width = v.size(-1) / heads;
    Tensor o = Tensor::empty(v.shape(), dtype, v.device());
    const auto kept = Tape::current() != nullptr ? std::make_shared<Buffer>() : nullptr;
    kernels::ssd_forward(exec_of(o), {.dtype = dtype, .sequences = layout.sequences(),
                                      .heads = heads, .groups = groups, .key_width = key_width, .value_width = value_width,
                                      .levels = levels, .chunk_size = chunk_size,
                                      .q_stride = qt.row_stride(), .k_stride = kt.row_stride(), .v_stride = vt.row_stride(),
                                      .q = qt.data(), .k = kt.data(), .v = vt.data(), .g = gt.data(),
                                      .level_scales = scales.data(), .o = o.data(), .kept = kept.get()});
    return record("ssd", o, {q, k, v, g, level_scales},
                  [=, dq = q.gradient(), dk = k.gradient(), dv = v.gradient(), dg = g.gradient(),
                   dscales = level_scales.gradient()](const Tensor& d_o) {
        using Rows = GradientOutput::Rows;
        GradientOutput q_out(dq, qt, Rows::strided), k_out(dk, kt, Rows::strided), v_out(dv, vt, Rows::strided);
        GradientOutput g_out(dg, gt, Rows::dense);
        std::optional<GradientOutput> scales_out;
        if (scales.defined()) scales_out.emplace(dscales, scales, Rows::dense);
        kernels::ssd_backward(exec_of(d_o), {.dtype = dtype, .sequences = layout.sequences(),
                                             .heads = heads, .groups = groups, .key_width = key_width,
                                             .value_width = value_width, .levels = levels, .chunk_size = chunk_size,
                                             .q_stride = qt.row_stride(), .k_stride = kt.row_stride(),
                                             .v_stride = vt.row_stride(), .dq_stride = q_out.stride(),
                                             .dk_stride = k_out.stride(), .dv_stride = v_out.stride(),
                                             .q = qt.data(), .k = kt.data(), .v = vt.data(), .g = gt.data(),
                                             .level_scales = scales.data(), .d_o = d_o.data(), .kept = kept.get(),
                                             .dq = q_out.data(), .dk = k_out.data(), .dv = v_out.data(),
                                             .dg = g_out.data(),
                                             .dlevel_scales = scales_out ? scales_out->data() : nullptr});
        for (auto* output : {&q_out, &k_out, &v_out, &g_out}) output->finish();
        if (scales_out) scales_out->finish();
    });
}

}  // namespace fenwick::ops
