#include "autograd/check.h"
#include "autograd/ops.h"
#include "kernels/gemm.h"

namespace fenwick::ops {

Variable linear(const Variable& x, const Variable& weight) {
    FENWICK_CHECK(weight.defined() && weight.value().dim() == 2 && x.defined() && x.value().dim() >= 1 &&
                      x.size(-1) == weight.size(1),
                  "[linear] x has shape {}, weight {}; the last dimensions must agree", to_string(x.shape()),
                  to_string(weight.shape()));
    const std::int64_t rows = x.value().rows(), in = weight.size(1), out = weight.size(0);
    const Tensor input = x.value();
    const Tensor matrix = weight.value().to(x.dtype());
    Tensor y = Tensor::empty(with_columns(x.shape(), out), x.dtype(), x.device());
    kernels::gemm(exec_of(y), {.dtype = y.dtype(), .c_dtype = y.dtype(), .transpose_b = true, .m = rows, .n = out, .k = in,
                               .a = input.data(), .b = matrix.data(), .c = y.data(),
                               .lda = input.row_stride(), .ldb = in, .ldc = out});
    return record("linear", y, {x, weight}, [=, dx = x.gradient(), dweight = weight.gradient()](const Tensor& dy) {
        if (dx) {
            const auto target = dx->target();
            kernels::gemm(exec_of(dy), {.dtype = dy.dtype(), .c_dtype = dy.dtype(), .m = rows, .n = in, .k = out,
                                        .beta = target.accumulate ? 1.0 : 0.0,
                                        .a = dy.data(), .b = matrix.data(), .c = target.tensor.data(),
                                        .lda = out, .ldb = in, .ldc = target.tensor.row_stride()});
        }
        if (dweight) {
            const auto target = dweight->target();
            kernels::gemm(exec_of(dy), {.dtype = dy.dtype(), .c_dtype = target.tensor.dtype(), .transpose_a = true,
                                        .m = out, .n = in, .k = rows,
                                        .beta = target.accumulate ? 1.0 : 0.0,
                                        .a = dy.data(), .b = input.data(), .c = target.tensor.data(),
                                        .lda = out, .ldb = input.row_stride(), .ldc = in});
        }
    });
}

}  // namespace fenwick::ops
