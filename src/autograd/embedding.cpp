#include "kernels/embedding.h"

#include "autograd/check.h"
#include "autograd/ops.h"

namespace fenwick::ops {

Variable embedding(const Tensor& ids, const Variable& table, DType dtype) {
    FENWICK_CHECK(table.defined() && table.value().dim() == 2, "[embedding] table has shape {}, expected [vocab, width]",
                  to_string(table.shape()));
    FENWICK_CHECK(ids.defined() && ids.dtype() == DType::int32, "[embedding] ids are {}, expected int32", name_of(ids.dtype()));
    FENWICK_CHECK(ids.device() == table.device(), "[embedding] ids and table are on different devices");
    const std::int64_t vocab = table.size(0), width = table.size(1), rows = ids.count();
    const Tensor tokens = ids.contiguous(), values = table.value().contiguous();
    if (tokens.device().is_cpu()) {
        const auto* id = tokens.as<std::int32_t>();
        for (std::int64_t i = 0; i < rows; ++i)
            FENWICK_CHECK(id[i] >= 0 && id[i] < vocab, "[embedding] token id {} at position {} is outside the vocabulary of {}",
                          id[i], i, vocab);
    }
    Shape shape = ids.shape();
    shape.push_back(width);
    Tensor y = Tensor::empty(shape, dtype, table.device());
    kernels::embedding_forward(exec_of(y), {.dtype = dtype,
                                            .table_dtype = table.dtype(),
                                            .rows = rows,
                                            .width = width,
                                            .ids = tokens.as<std::int32_t>(),
                                            .table = values.data(),
                                            .y = y.data()});
    return record("embedding", y, {table}, [=, dtable = table.gradient()](const Tensor& dy) {
        const auto target = dtable->target();
        kernels::embedding_backward(exec_of(dy), {.dtype = dtype,
                                                  .table_dtype = target.tensor.dtype(),
                                                  .rows = rows,
                                                  .width = width,
                                                  .vocab = vocab,
                                                  .ids = tokens.as<std::int32_t>(),
                                                  .dy = dy.data(),
                                                  .dtable = target.tensor.data(),
                                                  .accumulate_dtable = target.accumulate});
    });
}

}  // namespace fenwick::ops
