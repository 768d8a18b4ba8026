#include "kernels/cross_entropy.h"

#include <algorithm>

#include "autograd/check.h"
#include "autograd/ops.h"
#include "autograd/loss.h"

namespace fenwick::ops {

Variable cross_entropy(const Variable& logits, const Tensor& targets) {
    FENWICK_CHECK(logits.defined() && logits.value().dim() >= 1, "[cross_entropy] logits are missing or have no dimension");
    const Tensor input = logits.value();
    const std::int64_t rows = input.rows(), vocab = input.columns();
    check_targets("cross_entropy", targets, rows, input.device());
    const auto ids = targets.to_vector<std::int32_t>();
    check_target_ids("cross_entropy", ids, vocab);
    const auto valid = rows - std::ranges::count(ids, kernels::ignore_index);
    const double scale = valid > 0 ? 1.0 / static_cast<double>(valid) : 0.0;

    // The kernel turns logits into their gradient in place; the caller keeps its logits.
    const bool recording = needs_grad({logits});
    const Tensor work = recording ? input.clone() : input;
    const Tensor losses = Tensor::empty({rows}, gate_dtype(input.dtype()), input.device());
    kernels::cross_entropy(exec_of(input), {.dtype = input.dtype(),
                                            .rows = rows,
                                            .vocab = vocab,
                                            .stride = work.row_stride(),
                                            .targets = targets.as<std::int32_t>(),
                                            .logits = work.data(),
                                            .loss = losses.data(),
                                            .gradient = recording,
                                            .gradient_scale = scale});
    const Tensor loss = scaled_sum(losses, scale);
    return record("cross_entropy", loss, {logits}, [work, dlogits = logits.gradient()](const Tensor& dloss) {
        scale_in_place(work, dloss);
        dlogits->add(work);
    });
}

}  // namespace fenwick::ops
