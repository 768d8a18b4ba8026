#include "kernels/rope.h"

#include <cmath>
#include <numbers>

#include "kernels/cuda/sequences.cuh"

namespace fenwick::kernels::cuda {
namespace {

constexpr int tokens_per_block = 8;

// Block: tokens_per_block tokens. Angles are counted in turns in float64: at position 2^17 a float32 angle would be off by
// 1e-2. shared: cosines and sines [tokens_per_block, width / 2] each.
template <class T, int V>
__global__ void rope_kernel(Rope args, DeviceSequences sequences, double log2_theta) {
    extern __shared__ float shared[];
    const int half = static_cast<int>(args.width / 2);
    float* cosines = shared;
    float* sines = shared + tokens_per_block * half;
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * tokens_per_block;
    const int tokens =
        static_cast<int>(begin + tokens_per_block < sequences.tokens ? tokens_per_block : sequences.tokens - begin);

    __shared__ std::int64_t positions[tokens_per_block];
    if (threadIdx.x < tokens) {
        const std::int64_t token = begin + threadIdx.x;
        positions[threadIdx.x] = args.position + token - sequences.start_of(sequences.document_of(token));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        // theta^(-2i/width) in turns per token
        const double turns_per_token =
            exp2(-2.0 * i / static_cast<double>(args.width) * log2_theta) * (0.5 * std::numbers::inv_pi);
        for (int t = 0; t < tokens; ++t) {
            const double turns = static_cast<double>(positions[t]) * turns_per_token;
            float sine, cosine;
            sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sine, &cosine);
            cosines[t * half + i] = cosine;
            sines[t * half + i] = args.inverse ? -sine : sine;
        }
    }
    __syncthreads();
    const int vectors = half / V;
    const int items = tokens * static_cast<int>(args.heads) * vectors;
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
        const int pair = item / vectors, i = (item - pair * vectors) * V;
        const int t = pair / static_cast<int>(args.heads), head = pair - t * static_cast<int>(args.heads);
        const T* x = static_cast<const T*>(args.x) + (begin + t) * args.x_stride + head * args.width + i;
        T* y = static_cast<T*>(args.y) + (begin + t) * args.y_stride + head * args.width + i;
        float low[V], high[V];
        load(low, x);
        load(high, x + half);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float cosine = cosines[t * half + i + j], sine = sines[t * half + i + j];
            const float a = low[j], b = high[j];
            low[j] = a * cosine - b * sine;
            high[j] = b * cosine + a * sine;
        }
        store(y, low);
        store(y + half, high);
    }
}

}  // namespace

void rope(const Exec& exec, const Rope& args) {
    const OperatorScope scope("rope", exec);
    const SequencesOnDevice sequences(exec, args.sequences);
    const std::int64_t half = args.width / 2;
    const std::int64_t shared_bytes = 2 * tokens_per_block * half * static_cast<std::int64_t>(sizeof(float));
    FENWICK_CHECK(shared_bytes <= 40 * 1024 && args.heads * half <= (std::int64_t{1} << 26),
                  "[rope] {} heads of {} are more than the CUDA kernel takes (heads of at most 1280)", args.heads,
                  args.width);
    dispatch("rope", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({half, args.x_stride, args.y_stride}, {args.x, args.y}), [&](auto v) {
            launch("rope", exec, rope_kernel<T, v()>,
                   dim3(static_cast<unsigned>(ceil_div(sequences.view().tokens, tokens_per_block))), dim3(256),
                   static_cast<std::size_t>(shared_bytes), args, sequences.view(), std::log2(args.theta));
        });
    });
}

}  // namespace fenwick::kernels::cuda
