#include "kernels/embedding.h"

#include <vector>

#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {

void embedding_forward(const Exec&, const Embedding& args) {
    dispatch_cpu_float("embedding", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_cpu_float("embedding", args.table_dtype, [&]<class Table>(TypeTag<Table>) {
            parallel_for(0, args.rows, rows_per_block(args.width), [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t row = begin; row < end; ++row) {
                    const Table* from = static_cast<const Table*>(args.table) + args.ids[row] * args.width;
                    assign(static_cast<T*>(args.y) + row * args.width, args.width, false,
                           [=](std::int64_t c) { return static_cast<T>(from[c]); });
                }
            });
        });
    });
}

void embedding_backward(const Exec&, const EmbeddingBackward& args) {
    // Rows in the order of their ids, by counting: those with id i are order[starts[i]] .. order[starts[i + 1] - 1].
    std::vector<std::int64_t> starts(static_cast<std::size_t>(args.vocab + 1), 0), order(static_cast<std::size_t>(args.rows));
    for (std::int64_t row = 0; row < args.rows; ++row) ++starts[static_cast<std::size_t>(args.ids[row]) + 1];
    for (std::size_t id = 0; id < static_cast<std::size_t>(args.vocab); ++id) starts[id + 1] += starts[id];
    {
        std::vector<std::int64_t> next(starts.begin(), starts.end() - 1);
        for (std::int64_t row = 0; row < args.rows; ++row)
            order[static_cast<std::size_t>(next[static_cast<std::size_t>(args.ids[row])]++)] = row;
    }
    dispatch_cpu_float("embedding", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_cpu_float("embedding", args.table_dtype, [&]<class Table>(TypeTag<Table>) {
            parallel_for(0, args.vocab, rows_per_block(args.width), [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t id = begin; id < end; ++id) {
                    Table* to = static_cast<Table*>(args.dtable) + id * args.width;
                    bool add = args.accumulate_dtable;
                    for (auto i = starts[static_cast<std::size_t>(id)]; i < starts[static_cast<std::size_t>(id) + 1]; ++i) {
                        const T* from = static_cast<const T*>(args.dy) + order[static_cast<std::size_t>(i)] * args.width;
                        assign(to, args.width, add, [=](std::int64_t c) { return static_cast<Table>(from[c]); });
                        add = true;
                    }
                    if (!add) std::fill(to, to + args.width, Table{0});
                }
            });
        });
    });
}

}  // namespace fenwick::kernels::cpu
