#include "kernels/causal_conv1d.h"

#include "kernels/cuda/sequences.cuh"

namespace fenwick::kernels::cuda {
namespace {

// Block (32, 8): 32 * V channels side by side; each of the 8 rows of threads walks its own strip of consecutive tokens
// with the last inputs of its channels in registers, so that every input is read once (and a strip's first W - 1 twice).
// W is the number of taps kept: the width, or more, with leading taps of weight zero.
constexpr int strips = 8;
constexpr int forward_strip = 32, backward_strip = 64;
// Tokens that a thread loads at once, before it needs the first: one load at a time would wait for memory each time.
constexpr int ahead = 4;

// weights[i] = weight[channel, i - (W - width)], zero for the leading taps that do not exist.
template <int W, int V>
__device__ __forceinline__ void load_weights(float (&weights)[W][V], const float* weight, std::int64_t channel,
                                             std::int64_t width) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
        const std::int64_t tap = i - (W - width);
#pragma unroll
        for (int j = 0; j < V; ++j) weights[i][j] = tap >= 0 ? weight[(channel + j) * width + tap] : 0.0f;
    }
}

template <int W, int V>
__device__ __forceinline__ void clear(float (&window)[W][V]) {
#pragma unroll
    for (int i = 0; i < W; ++i)
#pragma unroll
        for (int j = 0; j < V; ++j) window[i][j] = 0.0f;
}
// Forgets the oldest entry, makes room for a new last one.
template <int W, int V>
__device__ __forceinline__ void shift(float (&window)[W][V]) {
#pragma unroll
    for (int i = 0; i + 1 < W; ++i)
#pragma unroll
        for (int j = 0; j < V; ++j) window[i][j] = window[i + 1][j];
}

// Fills window[W - 1 - back], back = 1 .. width - 1, with the inputs before `token`: from x inside the document, from the
// state (null: zeros) before its start. window[0] is left for the first shift to drop: entry i here is one place early.
template <class T, int W, int V>
__device__ __forceinline__ void load_history(float (&window)[W][V], const CausalConv1d& args, const DocumentCursor& cursor,
                                             std::int64_t token, std::int64_t channel) {
    clear(window);
#pragma unroll
    for (int back = 1; back < W; ++back) {
        if (back >= args.width) continue;
        const std::int64_t source = token - back;
        if (source >= cursor.start) {
            load(window[W - back], static_cast<const T*>(args.x) + source * args.x_stride + channel);
        } else if (args.state != nullptr) {
            const std::int64_t place = args.width - 1 + source - cursor.start;
            if (place >= 0)
                load(window[W - back], static_cast<const T*>(args.state) +
                                           (cursor.document * (args.width - 1) + place) * args.channels + channel);
        }
    }
}

template <class T, int W, int V>
__global__ void __launch_bounds__(256) causal_conv1d_forward_kernel(CausalConv1d args, DeviceSequences sequences) {
    const std::int64_t channel = (static_cast<std::int64_t>(blockIdx.y) * 32 + threadIdx.x) * V;
    const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) * strips + threadIdx.y) * forward_strip;
    if (channel >= args.channels || begin >= sequences.tokens) return;
    const std::int64_t end = begin + forward_strip < sequences.tokens ? begin + forward_strip : sequences.tokens;
    const auto* bias = static_cast<const float*>(args.bias);
    float weights[W][V], window[W][V], biases[V];
    load_weights(weights, static_cast<const float*>(args.weight), channel, args.width);
#pragma unroll
    for (int j = 0; j < V; ++j) biases[j] = bias != nullptr ? bias[channel + j] : 0.0f;
    DocumentCursor cursor(sequences, begin);
    load_history<T>(window, args, cursor, begin, channel);
    for (std::int64_t base = begin; base < end; base += ahead) {
        Pack<T, V> vectors[ahead];
#pragma unroll
        for (int k = 0; k < ahead; ++k)
            if (base + k < end) vectors[k] = fetch<V>(static_cast<const T*>(args.x) + (base + k) * args.x_stride + channel);
#pragma unroll
        for (int k = 0; k < ahead; ++k) {
            const std::int64_t token = base + k;
            if (token >= end) break;
            cursor.advance(sequences, token);
            if (token == cursor.start && token != begin) load_history<T>(window, args, cursor, token, channel);
            shift(window);
            unpack(window[W - 1], vectors[k]);
            float y[V];
#pragma unroll
            for (int j = 0; j < V; ++j) {
                float sum = biases[j];
#pragma unroll
                for (int i = 0; i < W; ++i) sum += weights[i][j] * window[i][j];
                y[j] = silu_of(sum);
            }
            store(static_cast<T*>(args.y) + token * args.y_stride + channel, y);
        }
    }
}

// The last width - 1 inputs of each document, the old state's included where the document is shorter. One thread a
// (document, channel) reads what it overwrites, oldest first: entry i takes the old entry i + length or an input.
template <class T>
__global__ void update_state_kernel(CausalConv1d args, DeviceSequences sequences) {
    for_each_cell<1>(sequences.count, args.channels, [&](std::int64_t document, std::int64_t channel) {
        const std::int64_t start = sequences.start_of(document), length = sequences.end_of(document) - start;
        T* state = static_cast<T*>(args.state) + document * (args.width - 1) * args.channels + channel;
        for (std::int64_t i = 0; i < args.width - 1; ++i) {
            const std::int64_t position = length - (args.width - 1) + i;
            state[i * args.channels] = position >= 0
                                           ? static_cast<const T*>(args.x)[(start + position) * args.x_stride + channel]
                                           : state[(length + i) * args.channels];
        }
    });
}

// The strip's dx needs the gradients of the W - 1 tokens after it too; their pre-activations are computed again.
// partial_weight [token blocks, channels, width], partial_bias [token blocks, channels].
template <class T, int W, int V>
__global__ void __launch_bounds__(256) causal_conv1d_backward_kernel(CausalConv1dBackward args, DeviceSequences sequences,
                                                                     float* partial_weight, float* partial_bias) {
    __shared__ float scratch[strips][32 * V];
    const std::int64_t channel = (static_cast<std::int64_t>(blockIdx.y) * 32 + threadIdx.x) * V;
    const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) * strips + threadIdx.y) * backward_strip;
    const std::int64_t end = begin + backward_strip < sequences.tokens ? begin + backward_strip : sequences.tokens;
    const auto* x = static_cast<const T*>(args.x);
    const auto* dy = static_cast<const T*>(args.dy);
    auto* dx = static_cast<T*>(args.dx);
    const auto* bias = static_cast<const float*>(args.bias);
    float dweight[W][V], dbias[1][V];
    clear(dweight);
    clear(dbias);
    if (channel < args.channels && begin < end) {
        float weights[W][V], inputs[W][V], slopes[W][V], biases[V];
        load_weights(weights, static_cast<const float*>(args.weight), channel, args.width);
#pragma unroll
        for (int j = 0; j < V; ++j) biases[j] = bias != nullptr ? bias[channel + j] : 0.0f;
        DocumentCursor reading(sequences, begin), writing(sequences, begin);  // documents of `token` and of `done`
        const CausalConv1d history{.dtype = args.dtype, .width = args.width, .x_stride = args.x_stride, .x = args.x};
        load_history<T>(inputs, history, reading, begin, channel);
        clear(slopes);  // gradients of the pre-activations of tokens done .. token
        for (std::int64_t base = begin; base < end + W - 1; base += ahead) {
            Pack<T, V> x_vectors[ahead], dy_vectors[ahead];
#pragma unroll
            for (int k = 0; k < ahead; ++k)
                if (base + k < end + W - 1 && base + k < sequences.tokens) {
                    x_vectors[k] = fetch<V>(x + (base + k) * args.x_stride + channel);
                    dy_vectors[k] = fetch<V>(dy + (base + k) * args.dy_stride + channel);
                }
#pragma unroll
            for (int k = 0; k < ahead; ++k) {
                const std::int64_t token = base + k;
                if (token >= end + W - 1) break;
                shift(slopes);
                if (token < sequences.tokens) {
                    reading.advance(sequences, token);
                    if (token == reading.start) clear(inputs);
                    shift(inputs);
                    unpack(inputs[W - 1], x_vectors[k]);
                    float gradient[V];
                    unpack(gradient, dy_vectors[k]);
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        float sum = biases[j];
#pragma unroll
                        for (int i = 0; i < W; ++i) sum += weights[i][j] * inputs[i][j];
                        slopes[W - 1][j] = gradient[j] * silu_slope(sum, sigmoid_of(sum));
                    }
                    if (token < end) {
#pragma unroll
                        for (int j = 0; j < V; ++j) {
                            dbias[0][j] += slopes[W - 1][j];
#pragma unroll
                            for (int i = 0; i < W; ++i) dweight[i][j] += slopes[W - 1][j] * inputs[i][j];
                        }
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < V; ++j) slopes[W - 1][j] = 0.0f;
                }
                const std::int64_t done = token - (W - 1);  // slopes[i] is the gradient at token done + i
                if (done < begin) continue;
                writing.advance(sequences, done);
                float sum[V] = {};
#pragma unroll
                for (int i = 0; i < W; ++i) {
                    if (done + i >= writing.end) continue;  // another document's
#pragma unroll
                    for (int j = 0; j < V; ++j) sum[j] += weights[W - 1 - i][j] * slopes[i][j];
                }
                store(dx + done * args.dx_stride + channel, sum, args.accumulate_dx);
            }
        }
    }
    // Sums over the block's strips, in order; the threads of strip 0 write them.
    const auto sum_strips = [&](float(&values)[V]) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < V; ++j) scratch[threadIdx.y][threadIdx.x * V + j] = values[j];
        __syncthreads();
#pragma unroll
        for (int j = 0; j < V; ++j) {
            values[j] = 0;
            for (int strip = 0; strip < strips; ++strip) values[j] += scratch[strip][threadIdx.x * V + j];
        }
    };
    const bool writes = threadIdx.y == 0 && channel < args.channels;
#pragma unroll
    for (int i = 0; i < W; ++i) {
        const std::int64_t tap = i - (W - args.width);
        if (tap < 0) continue;  // the same for every thread
        sum_strips(dweight[i]);
        if (writes)
            for (int j = 0; j < V; ++j)
                partial_weight[(blockIdx.x * args.channels + channel + j) * args.width + tap] = dweight[i][j];
    }
    if (partial_bias != nullptr) {
        sum_strips(dbias[0]);
        if (writes)
            for (int j = 0; j < V; ++j) partial_bias[blockIdx.x * args.channels + channel + j] = dbias[0][j];
    }
}

// Calls fn(std::integral_constant<int, W>) with the number of taps that the kernels keep.
template <class F>
void dispatch_taps(std::int64_t width, F&& fn) {
    FENWICK_CHECK(width >= 1 && width <= 8, "[causal_conv1d] width {} is not available on CUDA; use 1 to 8", width);
    if (width <= 4)
        fn(std::integral_constant<int, 4>{});
    else
        fn(std::integral_constant<int, 8>{});
}

// Half vectors: windows, slopes and sums of whole ones would take all registers.
constexpr int half_of(int vector) { return vector > 1 ? vector / 2 : 1; }

dim3 conv_grid(std::int64_t tokens, std::int64_t channels, int strip, int vector) {
    const std::int64_t across = ceil_div(channels, 32 * vector);
    FENWICK_CHECK(across <= 65535, "[causal_conv1d] {} channels are more than a CUDA grid holds", channels);
    return dim3(static_cast<unsigned>(ceil_div(tokens, strips * strip)), static_cast<unsigned>(across));
}

}  // namespace

void causal_conv1d_forward(const Exec& exec, const CausalConv1d& args) {
    const OperatorScope scope("causal_conv1d_forward", exec);
    const SequencesOnDevice on_device(exec, args.sequences);
    const DeviceSequences& sequences = on_device.view();
    dispatch("causal_conv1d", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_taps(args.width, [&](auto w) {
            const bool use_wide = can_use_wide({args.channels, args.x_stride, args.y_stride}, {args.x, args.y, args.state});
            dispatch_width(use_wide, [&](auto v) {
                constexpr int vector = half_of(v());
                launch("causal_conv1d_forward", exec, causal_conv1d_forward_kernel<T, w(), vector>,
                       conv_grid(sequences.tokens, args.channels, forward_strip, vector), dim3(32, strips), 0, args, sequences);
            });
        });
        if (args.state != nullptr && args.width > 1) {
            const auto [grid, block] = cell_grid(sequences.count, args.channels, 1);
            launch("causal_conv1d_forward", exec, update_state_kernel<T>, grid, block, 0, args, sequences);
        }
    });
}

void causal_conv1d_backward(const Exec& exec, const CausalConv1dBackward& args) {
    const OperatorScope scope("causal_conv1d_backward", exec);
    const SequencesOnDevice on_device(exec, args.sequences);
    const DeviceSequences& sequences = on_device.view();
    const std::int64_t blocks = ceil_div(sequences.tokens, strips * backward_strip);
    const std::int64_t bias_bytes = blocks * args.channels * static_cast<std::int64_t>(sizeof(float));
    const Buffer partial_weight = workspace(exec, bias_bytes * args.width);
    const Buffer partial_bias = workspace(exec, args.dbias != nullptr ? bias_bytes : 0);
    dispatch("causal_conv1d", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_taps(args.width, [&](auto w) {
            const bool use_wide =
                can_use_wide({args.channels, args.x_stride, args.dy_stride, args.dx_stride}, {args.x, args.dy, args.dx});
            dispatch_width(use_wide, [&](auto v) {
                constexpr int vector = half_of(v());
                launch("causal_conv1d_backward", exec, causal_conv1d_backward_kernel<T, w(), vector>,
                       conv_grid(sequences.tokens, args.channels, backward_strip, vector), dim3(32, strips), 0, args, sequences,
                       partial_weight.as<float>(), partial_bias.as<float>());
            });
        });
    });
    column_sums(exec, partial_weight.as<float>(), blocks, args.channels * args.width, static_cast<float*>(args.dweight),
                args.accumulate_dweight);
    if (args.dbias != nullptr)
        column_sums(exec, partial_bias.as<float>(), blocks, args.channels, static_cast<float*>(args.dbias),
                    args.accumulate_dbias);
}

}  // namespace fenwick::kernels::cuda
