#include "kernels/optimizer.h"

#include <cmath>

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {
namespace {

// All tensors are cut into chunks; a block takes one chunk. The table of up to table_size tensors travels as a kernel
// parameter (less than 4 KiB), so nothing is copied to the device and a whole model takes few launches.
constexpr int table_size = 48;
constexpr std::int64_t chunk = 16384;
constexpr int chunk_threads = 256;

template <class Entry>
struct Table {
    Entry entries[table_size];
    std::int64_t first_chunk[table_size + 1];  // of each tensor; then the number of chunks
    int count;

    // The tensor that holds chunk `index`.
    __device__ int find(std::int64_t index) const {
        int low = 0, high = count;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first_chunk[middle] <= index)
                low = middle;
            else
                high = middle;
        }
        return low;
    }
};

// Calls run(table) for every table_size tensors that are not empty. entry_of(i) makes the i-th tensor's entry, which has
// a field `count`.
template <class Entry, class EntryOf, class Run>
void for_each_table(std::int64_t tensor_count, EntryOf&& entry_of, Run&& run) {
    Table<Entry> table{};
    for (std::int64_t i = 0; i < tensor_count; ++i) {
        const Entry entry = entry_of(i);
        if (entry.count > 0) {
            table.entries[table.count] = entry;
            table.first_chunk[table.count + 1] = table.first_chunk[table.count] + ceil_div(entry.count, chunk);
            ++table.count;
        }
        if (table.count == table_size || (i + 1 == tensor_count && table.count > 0)) {
            run(table);
            table = Table<Entry>{};
        }
    }
}

struct AdamWConstants {
    float learning_rate, beta1, beta2, eps, gradient_scale;
    float one_minus_beta1, one_minus_beta2;
    float first_correction, second_correction;  // 1 / (1 - beta^step)
};

__device__ __forceinline__ void adamw_step(float& parameter, float gradient, float& first, float& second, float decay,
                                           const AdamWConstants& c) {
    const float g = c.gradient_scale * gradient;
    first = c.beta1 * first + c.one_minus_beta1 * g;
    second = c.beta2 * second + c.one_minus_beta2 * g * g;
    parameter =
        parameter * decay - c.learning_rate * (first * c.first_correction) / (sqrtf(second * c.second_correction) + c.eps);
}

__global__ void __launch_bounds__(chunk_threads)
    adamw_kernel(const __grid_constant__ Table<AdamWTensor> table, AdamWConstants constants) {
    const int index = table.find(blockIdx.x);
    const AdamWTensor& tensor = table.entries[index];
    const std::int64_t begin = (blockIdx.x - table.first_chunk[index]) * chunk;
    const std::int64_t end = begin + chunk < tensor.count ? begin + chunk : tensor.count;
    auto* parameter = static_cast<float*>(tensor.parameter);
    const auto* gradient = static_cast<const float*>(tensor.gradient);
    auto* first = static_cast<float*>(tensor.first_moment);
    auto* second = static_cast<float*>(tensor.second_moment);
    const auto decay = static_cast<float>(1.0 - static_cast<double>(constants.learning_rate) * tensor.weight_decay);
    constexpr int vector = 4;
    const bool aligned = ((reinterpret_cast<std::uintptr_t>(parameter) | reinterpret_cast<std::uintptr_t>(gradient) |
                           reinterpret_cast<std::uintptr_t>(first) | reinterpret_cast<std::uintptr_t>(second)) %
                          16) == 0;
    std::int64_t done = begin;
    if (aligned) {
        done = begin + (end - begin) / vector * vector;
#pragma unroll 2
        for (std::int64_t i = begin + threadIdx.x * vector; i < done; i += chunk_threads * vector) {
            float p[vector], g[vector], m[vector], v[vector];
            load(p, parameter + i);
            load(g, gradient + i);
            load(m, first + i);
            load(v, second + i);
#pragma unroll
            for (int j = 0; j < vector; ++j) adamw_step(p[j], g[j], m[j], v[j], decay, constants);
            store(parameter + i, p);
            store(first + i, m);
            store(second + i, v);
        }
    }
    for (std::int64_t i = done + threadIdx.x; i < end; i += chunk_threads)
        adamw_step(parameter[i], gradient[i], first[i], second[i], decay, constants);
}

struct SquaresTensor {
    std::int64_t count = 0;
    const void* values = nullptr;
};

// partial[block] = sum of squares of the block's chunk
template <class T>
__global__ void __launch_bounds__(chunk_threads)
    squares_kernel(const __grid_constant__ Table<SquaresTensor> table, double* partial) {
    __shared__ double scratch[32];
    const int index = table.find(blockIdx.x);
    const SquaresTensor& tensor = table.entries[index];
    const std::int64_t begin = (blockIdx.x - table.first_chunk[index]) * chunk;
    const std::int64_t end = begin + chunk < tensor.count ? begin + chunk : tensor.count;
    const auto* values = static_cast<const T*>(tensor.values);
    std::int64_t done = begin;
    double sum = 0;
    if (reinterpret_cast<std::uintptr_t>(values) % 16 == 0) {
        done = begin + (end - begin) / wide * wide;
#pragma unroll 2
        for (std::int64_t i = begin + threadIdx.x * wide; i < done; i += chunk_threads * wide) {
            float x[wide];
            load(x, values + i);
#pragma unroll
            for (int j = 0; j < wide; ++j) sum += static_cast<double>(x[j]) * static_cast<double>(x[j]);
        }
    }
    for (std::int64_t i = done + threadIdx.x; i < end; i += chunk_threads) {
        const auto x = static_cast<double>(convert<float>(values[i]));
        sum += x * x;
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(1024) total_kernel(const double* partial, std::int64_t count, double* total) {
    __shared__ double scratch[32];
    double sum = 0;
    for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) *total = sum;
}

}  // namespace

void adamw(const Exec& exec, const AdamW& args) {
    const OperatorScope scope("adamw", exec);
    FENWICK_CHECK(args.dtype == DType::float32, "[adamw] dtype {} is not available on CUDA; use float32",
                  name_of(args.dtype));
    const auto step = static_cast<double>(args.step);
    const AdamWConstants constants{
        .learning_rate = static_cast<float>(args.learning_rate),
        .beta1 = static_cast<float>(args.beta1),
        .beta2 = static_cast<float>(args.beta2),
        .eps = static_cast<float>(args.eps),
        .gradient_scale = static_cast<float>(args.gradient_scale),
        .one_minus_beta1 = static_cast<float>(1.0 - args.beta1),
        .one_minus_beta2 = static_cast<float>(1.0 - args.beta2),
        .first_correction = static_cast<float>(1.0 / (1.0 - std::pow(args.beta1, step))),
        .second_correction = static_cast<float>(1.0 / (1.0 - std::pow(args.beta2, step))),
    };
    for_each_table<AdamWTensor>(
        args.tensor_count, [&](std::int64_t i) { return args.tensors[i]; },
        [&](const Table<AdamWTensor>& table) {
            launch("adamw", exec, adamw_kernel, dim3(static_cast<unsigned>(table.first_chunk[table.count])),
                   dim3(chunk_threads), 0, table, constants);
        });
}

void sum_squares(const Exec& exec, const SumSquares& args) {
    const OperatorScope scope("sum_squares", exec);
    std::int64_t chunks = 0;
    for (std::int64_t i = 0; i < args.tensor_count; ++i) chunks += ceil_div(args.counts[i], chunk);
    const Buffer partial = workspace(exec, chunks * static_cast<std::int64_t>(sizeof(double)));
    std::int64_t offset = 0;
    dispatch("sum_squares", args.dtype, [&]<class T>(TypeTag<T>) {
        for_each_table<SquaresTensor>(
            args.tensor_count,
            [&](std::int64_t i) { return SquaresTensor{.count = args.counts[i], .values = args.tensors[i]}; },
            [&](const Table<SquaresTensor>& table) {
                const std::int64_t blocks = table.first_chunk[table.count];
                launch("sum_squares", exec, squares_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(chunk_threads), 0,
                       table, partial.as<double>() + offset);
                offset += blocks;
            });
    });
    launch("sum_squares", exec, total_kernel, dim3(1), dim3(1024), 0, static_cast<const double*>(partial.as<double>()),
           chunks, args.total);
}

}  // namespace fenwick::kernels::cuda
