#include "kernels/cross_entropy.h"

#include <limits>

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {
namespace {

constexpr int row_threads = 512;

// One block a row: maximum and sum of exponentials in one pass, the gradient in a second one over cached values.
template <class T, int V>
__global__ void __launch_bounds__(row_threads) cross_entropy_kernel(CrossEntropy args) {
    __shared__ float scratch[32];
    auto* loss = static_cast<float*>(args.loss);
    for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        T* logits = static_cast<T*>(args.logits) + row * args.stride;
        const std::int64_t target = args.targets[row];
        if (target == ignore_index) {
            if (threadIdx.x == 0) loss[row] = 0;
            if (args.gradient) {
                const float zeros[V] = {};
                for (std::int64_t i = threadIdx.x * V; i < args.vocab; i += row_threads * V) store(logits + i, zeros);
            }
            continue;
        }
        const float target_logit = convert<float>(logits[target]);
        float highest = -std::numeric_limits<float>::infinity(), sum = 0;  // of this thread: sum of exp(x - highest)
        for (std::int64_t i = threadIdx.x * V; i < args.vocab; i += row_threads * V) {
            float x[V];
            load(x, logits + i);
            float top = x[0];
#pragma unroll
            for (int j = 1; j < V; ++j) top = fmaxf(top, x[j]);
            if (top > highest) {
                sum *= expf(highest - top);
                highest = top;
            }
            if (highest == -std::numeric_limits<float>::infinity()) continue;  // -inf - -inf is no number
#pragma unroll
            for (int j = 0; j < V; ++j) sum += expf(x[j] - highest);
        }
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const float warp_highest = warp_max(highest);
        __syncthreads();  // the row before is done with scratch
        if (lane == 0) scratch[warp] = warp_highest;
        __syncthreads();
        const float row_highest =
            warp_max(lane < row_threads / 32 ? scratch[lane] : -std::numeric_limits<float>::infinity());
        // A thread that saw nothing has sum 0 and maximum -inf: it adds nothing.
        const float row_sum = block_sum(sum == 0.0f ? 0.0f : sum * expf(highest - row_highest), scratch);
        if (threadIdx.x == 0) loss[row] = logf(row_sum) + row_highest - target_logit;
        if (!args.gradient) continue;
        const float scale = static_cast<float>(args.gradient_scale), factor = scale / row_sum;
        // No logit is overwritten before every thread has read its own and the target's: block_sum waited for all.
        for (std::int64_t i = threadIdx.x * V; i < args.vocab; i += row_threads * V) {
            float x[V];
            load(x, logits + i);
#pragma unroll
            for (int j = 0; j < V; ++j) x[j] = factor * expf(x[j] - row_highest) - (i + j == target ? scale : 0.0f);
            store(logits + i, x);
        }
    }
}

constexpr std::int64_t sum_chunk = 16384;

__global__ void sum_chunks_kernel(const float* values, std::int64_t count, double* partial) {
    __shared__ double scratch[32];
    const std::int64_t begin = blockIdx.x * sum_chunk;
    const std::int64_t end = begin + sum_chunk < count ? begin + sum_chunk : count;
    double sum = 0;
    for (std::int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) sum += static_cast<double>(values[i]);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(1024)
    sum_partials_kernel(const double* partial, std::int64_t count, double* total, bool accumulate) {
    __shared__ double scratch[32];
    double sum = 0;
    for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) *total = sum + (accumulate ? *total : 0.0);
}

}  // namespace

void cross_entropy(const Exec& exec, const CrossEntropy& args) {
    const OperatorScope scope("cross_entropy", exec);
    dispatch("cross_entropy", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({args.vocab, args.stride}, {args.logits}), [&](auto v) {
            launch("cross_entropy", exec, cross_entropy_kernel<T, v()>,
                   dim3(static_cast<unsigned>(std::min<std::int64_t>(args.rows, 1 << 20))), dim3(row_threads), 0, args);
        });
    });
}

void sum(const Exec& exec, const Sum& args) {
    const OperatorScope scope("sum", exec);
    FENWICK_CHECK(args.dtype == DType::float32, "[sum] dtype {} is not available on CUDA; use float32", name_of(args.dtype));
    const std::int64_t chunks = ceil_div(args.count, sum_chunk);
    const Buffer partial = workspace(exec, chunks * static_cast<std::int64_t>(sizeof(double)));
    launch("sum", exec, sum_chunks_kernel, dim3(static_cast<unsigned>(chunks)), dim3(256), 0,
           static_cast<const float*>(args.values), args.count, partial.as<double>());
    launch("sum", exec, sum_partials_kernel, dim3(1), dim3(1024), 0, static_cast<const double*>(partial.as<double>()),
           chunks, args.total, args.accumulate_total);
}

}  // namespace fenwick::kernels::cuda
