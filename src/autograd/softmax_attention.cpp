#include "autograd/check.h"
#include "autograd/gradient_output.h"
#include "autograd/ops.h"
#include "kernels/softmax_attention.h"

namespace fenwick::ops {
Variable softmax_attention(const Variable& q, const Variable& k, const Variable& v, std::int64_t heads, std::int64_t groups,
                           const SequenceLayout& layout) {
    constexpr std::string_view op = "softmax_attention";
    FENWICK_CHECK(q.defined() && q.value().dim() >= 1, "[{}] q is missing", op);
    FENWICK_CHECK(heads >= 1 && groups >= 1 && heads % groups == 0,
                  "[{}] {} heads cannot share {} key/value heads; their number must divide the heads", op, heads, groups);
    FENWICK_CHECK(q.value().columns() % heads == 0 && q.value().columns() > 0,
                  "[{}] q has shape {}; its last dimension must be {} heads of one width", op, to_string(q.shape()), heads);
    const std::int64_t width = q.value().columns() / heads, tokens = q.value().rows();
    check_shape(op, "k", k, with_columns(q.shape(), groups * width));
    check_shape(op, "v", v, with_columns(q.shape(), groups * width));
    check_dtype(op, "k", k, q.dtype());
    check_dtype(op, "v", v, q.dtype());
    layout.check(op, tokens);
    Tensor o = Tensor::empty(q.shape(), q.dtype(), q.device());
    Tensor lse = Tensor::empty(with_columns(q.shape(), heads), gate_dtype(q.dtype()), q.device());
    kernels::softmax_attention_forward(exec_of(o), {.dtype = o.dtype(),
                                                    .sequences = layout.sequences(),
                                                    .heads = heads,
                                                    .groups = groups,
                                                    .width = width,
                                                    .q_stride = q.value().row_stride(),
                                                    .k_stride = k.value().row_stride(),
                                                    .v_stride = v.value().row_stride(),
                                                    .q = q.value().data(),
                                                    .k = k.value().data(),
                                                    .v = v.value().data(),
                                                    .o = o.data(),
                                                    .lse = lse.data()});
    return record("softmax_attention", o, {q, k, v},
                  [=, qt = q.value(), kt = k.value(), vt = v.value(), gq = q.gradient(), gk = k.gradient(),
                   gv = v.gradient()](const Tensor& d_o) {
                      // A variable given twice finds its buffer taken by the first and gets its second part added.
                      using Rows = GradientOutput::Rows;
                      GradientOutput dq(gq, qt, Rows::strided), dk(gk, kt, Rows::strided), dv(gv, vt, Rows::strided);
                      kernels::softmax_attention_backward(exec_of(d_o), {.dtype = d_o.dtype(),
                                                                         .sequences = layout.sequences(),
                                                                         .heads = heads,
                                                                         .groups = groups,
                                                                         .width = width,
                                                                         .q_stride = qt.row_stride(),
                                                                         .k_stride = kt.row_stride(),
                                                                         .v_stride = vt.row_stride(),
                                                                         .dq_stride = dq.stride(),
                                                                         .dk_stride = dk.stride(),
                                                                         .dv_stride = dv.stride(),
                                                                         .q = qt.data(),
                                                                         .k = kt.data(),
                                                                         .v = vt.data(),
                                                                         .o = o.data(),
                                                                         .lse = lse.data(),
                                                                         .d_o = d_o.data(),
                                                                         .dq = dq.data(),
                                                                         .dk = dk.data(),
                                                                         .dv = dv.data()});
                      for (auto* output : {&dq, &dk, &dv}) output->finish();
                  });
}

}  // namespace fenwick::ops
