#include <algorithm>

#include "autograd/check.h"
#include "autograd/ops.h"
#include "autograd/loss.h"
#include "kernels/cross_entropy.h"
#include "kernels/gemm.h"

namespace fenwick::ops {
namespace {

// Rows of logits that exist at a time. On the CPU: 32 MiB in float32. On a GPU as many as fill it, and since the gradient of
// the weight is read and written once a block: 256 MiB in bfloat16.
std::int64_t block_rows(Device device, std::int64_t vocab) {
    const std::int64_t elements = std::int64_t{1} << (device.is_cpu() ? 23 : 27), most = device.is_cpu() ? 512 : 8192;
    return std::clamp<std::int64_t>(elements / std::max<std::int64_t>(vocab, 1), 1, most);
}

}  // namespace

// Gradients are computed together with the loss, while a block's logits exist: a block of logits becomes the gradient of
// those logits, and two products turn it into dx and a share of dweight. Backward only scales them.
LinearCrossEntropy linear_cross_entropy(const Variable& x, const Variable& weight, const Tensor& targets, double normalizer) {
    FENWICK_CHECK(weight.defined() && weight.value().dim() == 2 && x.defined() && x.value().dim() >= 1 &&
                      x.size(-1) == weight.size(1),
                  "[linear_cross_entropy] x has shape {}, weight {}; the last dimensions must agree", to_string(x.shape()),
                  to_string(weight.shape()));
    FENWICK_CHECK(normalizer > 0, "[linear_cross_entropy] normalizer is {}; it must be positive", normalizer);
    const Tensor input = x.value(), matrix = weight.value().to(x.dtype());
    const std::int64_t rows = input.rows(), width = weight.size(1), vocab = weight.size(0);
    check_targets("linear_cross_entropy", targets, rows, input.device());
    if (targets.device().is_cpu())
        check_target_ids("linear_cross_entropy", {targets.as<std::int32_t>(), static_cast<std::size_t>(rows)}, vocab);
    const DType dtype = input.dtype();
    const kernels::Exec exec = exec_of(input);
    const bool recording = needs_grad({x, weight});
    Tensor dx, dweight;
    if (recording && x.requires_grad()) dx = Tensor::empty(x.shape(), dtype, input.device());
    if (recording && weight.requires_grad()) dweight = Tensor::empty(weight.shape(), weight.dtype(), input.device());

    const Shape leading = x.value().dim() > 1 ? Shape(x.shape().begin(), x.shape().end() - 1) : Shape{1};
    const Tensor token_nll = Tensor::empty(leading, gate_dtype(dtype), input.device());
    const std::int64_t size = block_rows(input.device(), vocab);
    {
        Tensor logits;  // [up to `size`, vocab]
        {
            MemoryKindScope scope(MemoryKind::workspace);
            logits = Tensor::empty({std::min(size, rows), vocab}, dtype, input.device());
        }
        for (std::int64_t first = 0; first < rows; first += size) {
            const std::int64_t count = std::min(size, rows - first);
            const auto at = [first](const Tensor& tensor) {  // row `first`
                return static_cast<char*>(tensor.data()) +
                       static_cast<std::size_t>(first * tensor.row_stride()) * size_of(tensor.dtype());
            };
            kernels::gemm(exec, {.dtype = dtype, .c_dtype = dtype, .transpose_b = true, .m = count, .n = vocab, .k = width,
                                 .a = at(input), .b = matrix.data(), .c = logits.data(),
                                 .lda = input.row_stride(), .ldb = width, .ldc = vocab});
            kernels::cross_entropy(exec, {.dtype = dtype,
                                          .rows = count,
                                          .vocab = vocab,
                                          .stride = vocab,
                                          .targets = targets.as<std::int32_t>() + first,
                                          .logits = logits.data(),
                                          .loss = static_cast<char*>(token_nll.data()) +
                                                  static_cast<std::size_t>(first) * size_of(token_nll.dtype()),
                                          .gradient = recording,
                                          .gradient_scale = 1.0 / normalizer});
            if (dx.defined())
                kernels::gemm(exec, {.dtype = dtype, .c_dtype = dtype, .m = count, .n = width, .k = vocab,
                                     .a = logits.data(), .b = matrix.data(), .c = at(dx),
                                     .lda = vocab, .ldb = width, .ldc = width});
            if (dweight.defined())
                kernels::gemm(exec, {.dtype = dtype, .c_dtype = dweight.dtype(), .transpose_a = true,
                                     .m = vocab, .n = width, .k = count, .beta = first == 0 ? 0.0 : 1.0,
                                     .a = logits.data(), .b = at(input), .c = dweight.data(),
                                     .lda = vocab, .ldb = input.row_stride(), .ldc = width});
        }
    }
    const Variable loss = record("linear_cross_entropy", scaled_sum(token_nll, 1.0 / normalizer), {x, weight},
                                 [dx, dweight, dinput = x.gradient(), dmatrix = weight.gradient()](const Tensor& dloss) {
                                     if (dx.defined()) {
                                         scale_in_place(dx, dloss);
                                         dinput->add(dx);
                                     }
                                     if (dweight.defined()) {
                                         scale_in_place(dweight, dloss);
                                         dmatrix->add(dweight);
                                     }
                                 });
    return {loss, token_nll};
}

}  // namespace fenwick::ops
