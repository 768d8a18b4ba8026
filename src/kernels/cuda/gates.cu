#include "kernels/gates.h"

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {
namespace {

constexpr int tile_columns = 32, tile_rows = 8;

// Grid of the backward kernels that also sum over tokens: block (32 columns, 8 tokens at a time) takes tokens
// block.x * tokens_per_block and following; partial sums [token blocks, columns].
struct SumGrid {
    std::int64_t tokens_per_block, blocks;
    dim3 grid;

    SumGrid(std::int64_t tokens, std::int64_t columns)
        : tokens_per_block(round_up(std::max<std::int64_t>(ceil_div(tokens, 1024), 1), tile_rows)),
          blocks(ceil_div(tokens, tokens_per_block)),
          grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ceil_div(columns, tile_columns))) {}
};

// The sum over the block's tile_rows values of one column, in order; valid where threadIdx.y == 0.
__device__ float sum_down(float value, float (*scratch)[tile_columns + 1]) {
    __syncthreads();
    scratch[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    float total = 0;
    for (int y = 0; y < tile_rows; ++y) total += scratch[y][threadIdx.x];
    return total;
}

// ---- decay_gate ------------------------------------------------------------------------------------------------------

template <class T>
__global__ void decay_gate_forward_kernel(DecayGate args) {
    const auto* raw = static_cast<const T*>(args.raw);
    const auto* step_bias = static_cast<const float*>(args.step_bias);
    const auto* a_log = static_cast<const float*>(args.a_log);
    for_each_cell<1>(args.tokens, args.heads, [&](std::int64_t token, std::int64_t head) {
        const float step = softplus_of(convert<float>(raw[token * args.raw_stride + head]) + step_bias[head]);
        const std::int64_t place = token * args.heads + head;
        if (args.step != nullptr) static_cast<float*>(args.step)[place] = step;
        static_cast<float*>(args.g)[place] = -expf(a_log[head]) * step;
    });
}

template <class T>
__global__ void decay_gate_backward_kernel(DecayGateBackward args, std::int64_t tokens_per_block, float* bias_partial,
                                           float* a_log_partial) {
    __shared__ float scratch[tile_rows][tile_columns + 1];
    const std::int64_t head = static_cast<std::int64_t>(blockIdx.y) * tile_columns + threadIdx.x;
    const std::int64_t begin = blockIdx.x * tokens_per_block;
    const std::int64_t end = begin + tokens_per_block < args.tokens ? begin + tokens_per_block : args.tokens;
    const auto* dstep = static_cast<const float*>(args.dstep);
    const auto* dg = static_cast<const float*>(args.dg);
    float bias_sum = 0, a_log_sum = 0;
    if (head < args.heads) {
        const float bias = static_cast<const float*>(args.step_bias)[head];
        const float rate = -expf(static_cast<const float*>(args.a_log)[head]);  // g = rate * step
        for (std::int64_t token = begin + threadIdx.y; token < end; token += tile_rows) {
            const float x = convert<float>(static_cast<const T*>(args.raw)[token * args.raw_stride + head]) + bias;
            const float decay_gradient = dg != nullptr ? dg[token * args.heads + head] : 0.0f;
            const float total = (dstep != nullptr ? dstep[token * args.heads + head] : 0.0f) + decay_gradient * rate;
            const float gradient[1] = {total * sigmoid_of(x)};
            store(static_cast<T*>(args.draw) + token * args.draw_stride + head, gradient, args.accumulate_draw);
            bias_sum += gradient[0];
            a_log_sum += decay_gradient * rate * softplus_of(x);
        }
    }
    bias_sum = sum_down(bias_sum, scratch);
    a_log_sum = sum_down(a_log_sum, scratch);
    if (threadIdx.y == 0 && head < args.heads) {
        bias_partial[blockIdx.x * args.heads + head] = bias_sum;
        a_log_partial[blockIdx.x * args.heads + head] = a_log_sum;
    }
}

// ---- level_scales ----------------------------------------------------------------------------------------------------

template <class T, int V>
__global__ void level_scales_forward_kernel(LevelScales args) {
    const std::int64_t columns = args.heads * args.levels;
    for_each_cell<V>(args.tokens, columns, [&](std::int64_t token, std::int64_t column) {
        float values[V], weights[V];
        load(values, static_cast<const T*>(args.raw) + token * args.raw_stride + column);
        load(weights, static_cast<const float*>(args.level_weight) + column);
#pragma unroll
        for (int i = 0; i < V; ++i) values[i] = softplus_of(values[i] * weights[i]);
        store(static_cast<float*>(args.level_scales) + token * columns + column, values);
    });
}

template <class T>
__global__ void level_scales_backward_kernel(LevelScalesBackward args, std::int64_t tokens_per_block, float* partial) {
    __shared__ float scratch[tile_rows][tile_columns + 1];
    const std::int64_t columns = args.heads * args.levels;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * tile_columns + threadIdx.x;
    const std::int64_t begin = blockIdx.x * tokens_per_block;
    const std::int64_t end = begin + tokens_per_block < args.tokens ? begin + tokens_per_block : args.tokens;
    float sum = 0;
    if (column < columns) {
        const float weight = static_cast<const float*>(args.level_weight)[column];
#pragma unroll 2
        for (std::int64_t token = begin + threadIdx.y; token < end; token += tile_rows) {
            const float raw = convert<float>(static_cast<const T*>(args.raw)[token * args.raw_stride + column]);
            const float slope =
                static_cast<const float*>(args.dlevel_scales)[token * columns + column] * sigmoid_of(raw * weight);
            const float gradient[1] = {slope * weight};
            store(static_cast<T*>(args.draw) + token * args.draw_stride + column, gradient, args.accumulate_draw);
            sum += slope * raw;
        }
    }
    sum = sum_down(sum, scratch);
    if (threadIdx.y == 0 && column < columns) partial[blockIdx.x * columns + column] = sum;
}

// ---- sigmoid ---------------------------------------------------------------------------------------------------------

template <class T>
__global__ void sigmoid_forward_kernel(Sigmoid args) {
    for_each_cell<1>(1, args.count, [&](std::int64_t, std::int64_t i) {
        static_cast<float*>(args.y)[i] = sigmoid_of(convert<float>(static_cast<const T*>(args.x)[i]));
    });
}

template <class T>
__global__ void sigmoid_backward_kernel(SigmoidBackward args) {
    for_each_cell<1>(1, args.count, [&](std::int64_t, std::int64_t i) {
        const float y = static_cast<const float*>(args.y)[i];
        const float gradient[1] = {static_cast<const float*>(args.dy)[i] * y * (1.0f - y)};
        store(static_cast<T*>(args.dx) + i, gradient, args.accumulate_dx);
    });
}

}  // namespace

void decay_gate_forward(const Exec& exec, const DecayGate& args) {
    const OperatorScope scope("decay_gate_forward", exec);
    dispatch("decay_gate", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto [grid, block] = cell_grid(args.tokens, args.heads, 1);
        launch("decay_gate_forward", exec, decay_gate_forward_kernel<T>, grid, block, 0, args);
    });
}

void decay_gate_backward(const Exec& exec, const DecayGateBackward& args) {
    const OperatorScope scope("decay_gate_backward", exec);
    const SumGrid sums(args.tokens, args.heads);
    const std::int64_t partial_bytes = sums.blocks * args.heads * static_cast<std::int64_t>(sizeof(float));
    const Buffer bias_partial = workspace(exec, partial_bytes), a_log_partial = workspace(exec, partial_bytes);
    dispatch("decay_gate", args.dtype, [&]<class T>(TypeTag<T>) {
        launch("decay_gate_backward", exec, decay_gate_backward_kernel<T>, sums.grid, dim3(tile_columns, tile_rows), 0, args,
               sums.tokens_per_block, bias_partial.as<float>(), a_log_partial.as<float>());
    });
    column_sums(exec, bias_partial.as<float>(), sums.blocks, args.heads, static_cast<float*>(args.dstep_bias),
                args.accumulate_dstep_bias);
    column_sums(exec, a_log_partial.as<float>(), sums.blocks, args.heads, static_cast<float*>(args.da_log),
                args.accumulate_da_log);
}

void level_scales_forward(const Exec& exec, const LevelScales& args) {
    const OperatorScope scope("level_scales_forward", exec);
    const std::int64_t columns = args.heads * args.levels;
    dispatch("level_scales", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({columns, args.raw_stride}, {args.raw, args.level_weight, args.level_scales}),
                       [&](auto v) {
                           const auto [grid, block] = cell_grid(args.tokens, columns, v);
                           launch("level_scales_forward", exec, level_scales_forward_kernel<T, v()>, grid, block, 0, args);
                       });
    });
}

void level_scales_backward(const Exec& exec, const LevelScalesBackward& args) {
    const OperatorScope scope("level_scales_backward", exec);
    const std::int64_t columns = args.heads * args.levels;
    const SumGrid sums(args.tokens, columns);
    const Buffer partial = workspace(exec, sums.blocks * columns * static_cast<std::int64_t>(sizeof(float)));
    dispatch("level_scales", args.dtype, [&]<class T>(TypeTag<T>) {
        launch("level_scales_backward", exec, level_scales_backward_kernel<T>, sums.grid, dim3(tile_columns, tile_rows), 0,
               args, sums.tokens_per_block, partial.as<float>());
    });
    column_sums(exec, partial.as<float>(), sums.blocks, columns, static_cast<float*>(args.dlevel_weight),
                args.accumulate_dlevel_weight);
}

void sigmoid_forward(const Exec& exec, const Sigmoid& args) {
    const OperatorScope scope("sigmoid_forward", exec);
    dispatch("sigmoid", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto [grid, block] = cell_grid(1, args.count, 1);
        launch("sigmoid_forward", exec, sigmoid_forward_kernel<T>, grid, block, 0, args);
    });
}

void sigmoid_backward(const Exec& exec, const SigmoidBackward& args) {
    const OperatorScope scope("sigmoid_backward", exec);
    dispatch("sigmoid", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto [grid, block] = cell_grid(1, args.count, 1);
        launch("sigmoid_backward", exec, sigmoid_backward_kernel<T>, grid, block, 0, args);
    });
}

}  // namespace fenwick::kernels::cuda
