#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {
namespace {

constexpr int tile = 32;

// Block (32, 32): 32 columns, rows block.x * rows_per_block and following dealt to the 32 values of threadIdx.y.
__global__ void __launch_bounds__(tile* tile)
    column_sums_kernel(const float* values, std::int64_t rows, std::int64_t columns, std::int64_t rows_per_block, float* out,
                       bool accumulate) {
    __shared__ double sums[tile][tile + 1];
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * tile + threadIdx.x;
    const std::int64_t begin = blockIdx.x * rows_per_block;
    const std::int64_t end = begin + rows_per_block < rows ? begin + rows_per_block : rows;
    double sum = 0;
    if (column < columns) {
#pragma unroll 4
        for (std::int64_t row = begin + threadIdx.y; row < end; row += tile) sum += values[row * columns + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        double total = accumulate ? static_cast<double>(out[column]) : 0.0;
        for (int y = 0; y < tile; ++y) total += sums[y][threadIdx.x];
        out[static_cast<std::int64_t>(blockIdx.x) * columns + column] = static_cast<float>(total);
    }
}

}  // namespace

void column_sums(const Exec& exec, const float* values, std::int64_t rows, std::int64_t columns, float* out,
                 bool accumulate) {
    if (columns == 0) return;
    const auto across = static_cast<unsigned>(ceil_div(columns, tile));
    FENWICK_CHECK(ceil_div(columns, tile) <= 65535, "[column_sums] {} columns are more than a grid holds", columns);
    // A second stage where one block a column tile would walk too far. The cut depends on the shape alone.
    constexpr std::int64_t long_walk = 2048;
    if (rows <= long_walk) {
        launch("column_sums", exec, column_sums_kernel, dim3(1, across), dim3(tile, tile), 0, values, rows, columns,
               std::max<std::int64_t>(rows, 1), out, accumulate);
        return;
    }
    const std::int64_t rows_per_block = std::max<std::int64_t>(ceil_div(rows, 512), 256);
    const std::int64_t blocks = ceil_div(rows, rows_per_block);
    const Buffer partial = workspace(exec, blocks * columns * static_cast<std::int64_t>(sizeof(float)));
    launch("column_sums", exec, column_sums_kernel, dim3(static_cast<unsigned>(blocks), across), dim3(tile, tile), 0, values,
           rows, columns, rows_per_block, partial.as<float>(), false);
    launch("column_sums", exec, column_sums_kernel, dim3(1, across), dim3(tile, tile), 0,
           static_cast<const float*>(partial.as<float>()), blocks, columns, blocks, out, accumulate);
}

}  // namespace fenwick::kernels::cuda
