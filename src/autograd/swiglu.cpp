#include "kernels/swiglu.h"

#include "autograd/check.h"
#include "autograd/ops.h"

namespace fenwick::ops {

Variable swiglu(const Variable& gate, const Variable& up) {
    FENWICK_CHECK(gate.defined() && gate.value().dim() >= 1, "[swiglu] gate is missing or has no dimension");
    check_shape("swiglu", "up", up, gate.shape());
    check_dtype("swiglu", "up", up, gate.dtype());
    const Tensor a = gate.value(), b = up.value();
    const std::int64_t rows = a.rows(), width = a.columns();
    Tensor out = Tensor::empty(a.shape(), a.dtype(), a.device());
    kernels::swiglu_forward(exec_of(out), {.dtype = a.dtype(),
                                           .rows = rows,
                                           .width = width,
                                           .gate_stride = a.row_stride(),
                                           .up_stride = b.row_stride(),
                                           .gate = a.data(),
                                           .up = b.data(),
                                           .out = out.data()});
    return record("swiglu", out, {gate, up}, [=, dgate = gate.gradient(), dup = up.gradient()](const Tensor& dout) {
        const auto da = target_or_scratch(dgate, a);
        const bool same = dgate == dup;  // one variable as both: the second contribution is added after the kernel
        const auto db = target_or_scratch(same ? nullptr : dup, b);
        kernels::swiglu_backward(exec_of(dout), {.dtype = a.dtype(),
                                                 .rows = rows,
                                                 .width = width,
                                                 .gate_stride = a.row_stride(),
                                                 .up_stride = b.row_stride(),
                                                 .dgate_stride = da.tensor.row_stride(),
                                                 .dup_stride = db.tensor.row_stride(),
                                                 .gate = a.data(),
                                                 .up = b.data(),
                                                 .dout = dout.data(),
                                                 .dgate = da.tensor.data(),
                                                 .dup = db.tensor.data(),
                                                 .accumulate_dgate = da.accumulate,
                                                 .accumulate_dup = db.accumulate});
        if (same) dup->add(db.tensor);
    });
}

}  // namespace fenwick::ops
