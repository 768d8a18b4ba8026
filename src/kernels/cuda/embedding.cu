#include "kernels/embedding.h"

#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {
namespace {

template <class T, class Table, int V>
__global__ void embedding_forward_kernel(Embedding args) {
    const auto* table = static_cast<const Table*>(args.table);
    auto* y = static_cast<T*>(args.y);
    for_each_cell<V>(args.rows, args.width, [&](std::int64_t row, std::int64_t column) {
        float values[V];
        load(values, table + static_cast<std::int64_t>(args.ids[row]) * args.width + column);
        store(y + row * args.width + column, values);
    });
}

__global__ void row_numbers_kernel(std::int32_t* rows, std::int64_t count) {
    for_each_cell<1>(1, count, [&](std::int64_t, std::int64_t i) { rows[i] = static_cast<std::int32_t>(i); });
}

// starts[id] = index of the first of sorted_ids that is >= id, for id in 0 .. vocab: id's rows are starts[id] ..
// starts[id+1].
__global__ void segment_starts_kernel(const std::int32_t* sorted_ids, std::int64_t count, std::int64_t vocab,
                                      std::int32_t* starts) {
    for_each_cell<1>(1, count + 1, [&](std::int64_t, std::int64_t i) {
        const std::int64_t first = i == 0 ? 0 : sorted_ids[i - 1] + 1;
        const std::int64_t last = i == count ? vocab : sorted_ids[i];
        for (std::int64_t id = first; id <= last; ++id) starts[id] = static_cast<std::int32_t>(i);
    });
}

constexpr int segment_warps = 8;

// Block (32, 8): table row block.x (and further ones), 32 * V columns; each warp sums an eighth of the id's rows in order,
// and the eighths are added in order.
template <class T, class Table, int V>
__global__ void embedding_backward_kernel(EmbeddingBackward args, const std::int32_t* starts,
                                          const std::int32_t* sorted_rows) {
    __shared__ __align__(16) float sums[segment_warps][32 * V];
    const auto* dy = static_cast<const T*>(args.dy);
    auto* dtable = static_cast<Table*>(args.dtable);
    const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * 32 + threadIdx.x) * V;
    for (std::int64_t id = blockIdx.x; id < args.vocab; id += gridDim.x) {
        const int begin = starts[id], count = starts[id + 1] - begin;
        if (count == 0 && args.accumulate_dtable) continue;  // the same for every thread of the block
        const int share = (count + segment_warps - 1) / segment_warps;
        const int first = begin + min(count, share * static_cast<int>(threadIdx.y));
        const int last = begin + min(count, share * (static_cast<int>(threadIdx.y) + 1));
        float sum[V] = {};
        if (column < args.width) {
#pragma unroll 4
            for (int i = first; i < last; ++i) {
                float values[V];
                load(values, dy + static_cast<std::int64_t>(sorted_rows[i]) * args.width + column);
#pragma unroll
                for (int j = 0; j < V; ++j) sum[j] += values[j];
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < V; ++j) sums[threadIdx.y][threadIdx.x * V + j] = sum[j];
        __syncthreads();
        if (threadIdx.y == 0 && column < args.width) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
                float total = 0;
                for (int warp = 0; warp < segment_warps; ++warp) total += sums[warp][threadIdx.x * V + j];
                sum[j] = total;
            }
            store(dtable + id * args.width + column, sum, args.accumulate_dtable);
        }
    }
}

}  // namespace

void embedding_forward(const Exec& exec, const Embedding& args) {
    const OperatorScope scope("embedding_forward", exec);
    dispatch("embedding", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch("embedding", args.table_dtype, [&]<class Table>(TypeTag<Table>) {
            dispatch_width(can_use_wide({args.width}, {args.table, args.y}), [&](auto v) {
                const auto [grid, block] = cell_grid(args.rows, args.width, v);
                launch("embedding_forward", exec, embedding_forward_kernel<T, Table, v()>, grid, block, 0, args);
            });
        });
    });
}

void embedding_backward(const Exec& exec, const EmbeddingBackward& args) {
    const OperatorScope scope("embedding_backward", exec);
    FENWICK_CHECK(args.rows < (std::int64_t{1} << 31) - 1 && args.vocab < (std::int64_t{1} << 31) - 1,
                  "[embedding] {} tokens and a vocabulary of {}; CUDA sorts at most 2^31 - 2 of each at once", args.rows,
                  args.vocab);
    // Rows in order of their ids. The sort is stable, so that equal ids keep the rows' order.
    const std::int64_t rows_bytes = std::max<std::int64_t>(args.rows, 1) * static_cast<std::int64_t>(sizeof(std::int32_t));
    const Buffer rows = workspace(exec, rows_bytes), sorted_rows = workspace(exec, rows_bytes);
    const Buffer sorted_ids = workspace(exec, rows_bytes);
    const Buffer starts = workspace(exec, (args.vocab + 1) * static_cast<std::int64_t>(sizeof(std::int32_t)));
    if (args.rows > 0) {
        const auto [grid, block] = cell_grid(1, args.rows, 1);
        launch("embedding_backward", exec, row_numbers_kernel, grid, block, 0, rows.as<std::int32_t>(), args.rows);
        int bits = 1;
        while ((std::int64_t{1} << bits) < args.vocab) ++bits;
        const auto sort = [&](void* scratch, std::size_t& bytes) {
            FENWICK_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(scratch, bytes, args.ids, sorted_ids.as<std::int32_t>(),
                                                               rows.as<std::int32_t>(), sorted_rows.as<std::int32_t>(),
                                                               static_cast<int>(args.rows), 0, bits, stream_of(exec)));
        };
        std::size_t scratch_bytes = 0;
        sort(nullptr, scratch_bytes);
        const Buffer scratch = workspace(exec, static_cast<std::int64_t>(std::max<std::size_t>(scratch_bytes, 1)));
        sort(scratch.data(), scratch_bytes);
    }
    {
        const auto [grid, block] = cell_grid(1, args.rows + 1, 1);
        launch("embedding_backward", exec, segment_starts_kernel, grid, block, 0,
               static_cast<const std::int32_t*>(sorted_ids.as<std::int32_t>()), args.rows, args.vocab,
               starts.as<std::int32_t>());
    }
    dispatch("embedding", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch("embedding", args.table_dtype, [&]<class Table>(TypeTag<Table>) {
            dispatch_width(can_use_wide({args.width}, {args.dy, args.dtable}), [&](auto v) {
                const std::int64_t tiles = ceil_div(args.width, 32 * v());
                FENWICK_CHECK(tiles <= 65535, "[embedding] width {} is more than a CUDA grid holds", args.width);
                launch(
                    "embedding_backward", exec, embedding_backward_kernel<T, Table, v()>,
                    dim3(static_cast<unsigned>(std::min<std::int64_t>(args.vocab, 1 << 20)), static_cast<unsigned>(tiles)),
                    dim3(32, segment_warps), 0, args, static_cast<const std::int32_t*>(starts.as<std::int32_t>()),
                    static_cast<const std::int32_t*>(sorted_rows.as<std::int32_t>()));
            });
        });
    });
}

}  // namespace fenwick::kernels::cuda
