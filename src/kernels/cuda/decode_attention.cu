// Attention of one new token to the cache: bound by reading the cache once. The keys are cut into parts, a block each; in a
// warp, a team of neighbouring lanes shares a key, 8 columns a lane, and a team has several keys under way.
#include "kernels/cuda/dependent.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/decode.h"

namespace fenwick::kernels::cuda {
namespace {

constexpr int threads = 128, warps = threads / 32;
constexpr int own_columns = 8;  // of a lane
constexpr int widest = 32 * own_columns;
constexpr int keys_ahead = 4;            // of a team
constexpr std::int64_t least_keys = 64;  // of a part

// How the keys 0 .. t are cut. By the position alone, so that results repeat.
struct Parts {
    std::int64_t keys, count;
};
__device__ __forceinline__ Parts parts_of(std::int64_t t) {
    std::int64_t keys = (t + decode_attention_parts) / decode_attention_parts;  // rounded up
    keys = (keys + least_keys - 1) / least_keys * least_keys;
    return {keys, (t + keys) / keys};
}

// Running softmax of one team: columns of o that belong to this lane.
struct Running {
    float highest = -INFINITY, sum = 0, o[own_columns] = {};
};
__device__ __forceinline__ void join(Running& a, float highest, float sum, const float (&o)[own_columns]) {
    const float largest = fmaxf(a.highest, highest);
    if (largest == -INFINITY) return;
    const float ours = expf(a.highest - largest), theirs = expf(highest - largest);
    a.highest = largest;
    a.sum = a.sum * ours + sum * theirs;
#pragma unroll
    for (int i = 0; i < own_columns; ++i) a.o[i] = a.o[i] * ours + o[i] * theirs;
}

__device__ __forceinline__ void rotate(const DecodeAttention& a, std::int64_t t, const float* from, float* to, float factor,
                                       int thread) {
    const int half = static_cast<int>(a.width / 2);
    for (int i = thread; i < half; i += threads) {
        const double turns = static_cast<double>(t) * a.turns[i];
        float sine, cosine;
        sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sine, &cosine);
        const float low = from[i], high = from[i + half];
        to[i] = factor * (low * cosine - high * sine);
        to[i + half] = factor * (high * cosine + low * sine);
    }
}

// Grid: rows x heads, parts. Wide: rows of the cache are whole vectors of 8.
template <class T, bool Wide>
__global__ void __launch_bounds__(threads, 5) decode_attention_kernel(const DecodeAttention a) {
    __shared__ float q_shared[widest], k_shared[widest], joined[warps][widest + 2];
    __shared__ int is_last;
    const int thread = tile::thread_index(), lane = thread % 32, warp = thread / 32, width = static_cast<int>(a.width);
    const std::int64_t head = blockIdx.x, row = head / a.heads, h = head % a.heads, per_group = a.heads / a.groups;
    const std::int64_t group = row * a.groups + h / per_group;
    const std::int64_t t = *a.position;
    const Parts parts = parts_of(t);
    if (blockIdx.y >= parts.count) {
        dependent::wait_for_predecessor();
        return;
    }
    const std::int64_t first = blockIdx.y * parts.keys, end = first + parts.keys < t ? first + parts.keys : t;
    const bool newest = blockIdx.y == parts.count - 1;  // has the new token
    const int team = next_power_of_two((width + own_columns - 1) / own_columns, 32), teams = 32 / team;
    const int column = lane % team * own_columns;
    const std::int64_t stride = a.groups * a.width, base = row * a.capacity * stride + h / per_group * a.width + column;
    const T* const keys = static_cast<const T*>(a.k_cache) + base;
    const T* const values = static_cast<const T*>(a.v_cache) + base;
    const bool active = column < width;
    using Columns = Pack<std::conditional_t<Wide, T, float>, own_columns>;  // as they come: converted where they are used
    const auto fetch = [&](Columns& x, const T* from) {
        if constexpr (Wide) {
            x = *reinterpret_cast<const Columns*>(from);
        } else {
#pragma unroll
            for (int i = 0; i < own_columns; ++i) x.values[i] = column + i < width ? convert<float>(from[i]) : 0.0f;
        }
    };
    const std::int64_t step = warps * teams;
    const std::int64_t mine = first + warp * teams + lane / team;  // this team's first key
    if (active)
        for (int i = 0; i < keys_ahead; ++i)
            if (mine + i * step < end) {
                dependent::prefetch(keys + (mine + i * step) * stride);
                dependent::prefetch(values + (mine + i * step) * stride);
            }
    dependent::wait_for_predecessor();

    rotate(a, t, a.q + head * a.width, q_shared, rsqrtf(static_cast<float>(width)), thread);
    if (newest) rotate(a, t, a.k + group * a.width, k_shared, 1.0f, thread);
    __syncthreads();
    if (newest && h % per_group == 0) {
        const std::int64_t at = row * a.capacity * stride + t * stride + h / per_group * a.width;
        for (int i = thread; i < width; i += threads) {
            static_cast<T*>(a.k_cache)[at + i] = convert<T>(k_shared[i]);
            static_cast<T*>(a.v_cache)[at + i] = convert<T>(a.v[group * a.width + i]);
        }
    }
    float q[own_columns];
#pragma unroll
    for (int i = 0; i < own_columns; ++i) q[i] = column + i < width ? q_shared[column + i] : 0.0f;
    Running state;
    for (std::int64_t block = first; block < end; block += step * keys_ahead) {
        Columns k[keys_ahead] = {}, v[keys_ahead] = {};
        float score[keys_ahead];
#pragma unroll
        for (int i = 0; i < keys_ahead; ++i) {
            const std::int64_t key = block + warp * teams + lane / team + i * step;
            if (!active || key >= end) continue;
            fetch(k[i], keys + key * stride);
            fetch(v[i], values + key * stride);
        }
        float largest = state.highest;
#pragma unroll
        for (int i = 0; i < keys_ahead; ++i) {
            score[i] = 0;
#pragma unroll
            for (int j = 0; j < own_columns; ++j) score[i] += q[j] * convert<float>(k[i].values[j]);
            score[i] = team_sum(score[i], team);
            if (block + warp * teams + lane / team + i * step >= end) score[i] = -INFINITY;
            largest = fmaxf(largest, score[i]);
        }
        if (largest == -INFINITY) continue;
        const float factor = expf(state.highest - largest);
        state.highest = largest;
        state.sum *= factor;
#pragma unroll
        for (int j = 0; j < own_columns; ++j) state.o[j] *= factor;
#pragma unroll
        for (int i = 0; i < keys_ahead; ++i) {
            const float weight = expf(score[i] - largest);
            state.sum += weight;
#pragma unroll
            for (int j = 0; j < own_columns; ++j) state.o[j] += weight * convert<float>(v[i].values[j]);
        }
    }
    // The teams of a warp, then the warps, then the parts, always in the same order.
    for (int offset = team; offset < 32; offset *= 2) {
        const float highest = __shfl_xor_sync(0xffffffffu, state.highest, offset),
                    sum = __shfl_xor_sync(0xffffffffu, state.sum, offset);
        float o[own_columns];
#pragma unroll
        for (int i = 0; i < own_columns; ++i) o[i] = __shfl_xor_sync(0xffffffffu, state.o[i], offset);
        join(state, highest, sum, o);
    }
    const auto put = [&](float* to) {  // [width + 2]; by the first team
        if (lane >= team || !active) return;
#pragma unroll
        for (int i = 0; i < own_columns; ++i)
            if (column + i < width) to[column + i] = state.o[i];
        if (lane == 0) {
            to[width] = state.highest;
            to[width + 1] = state.sum;
        }
    };
    const auto take = [&](const float* from) {
        float o[own_columns];
#pragma unroll
        for (int i = 0; i < own_columns; ++i) o[i] = column + i < width ? from[column + i] : 0.0f;
        join(state, from[width], from[width + 1], o);
    };
    put(joined[warp]);
    __syncthreads();
    float* const own = a.parts + head * decode_attention_parts * (a.width + 2);
    if (warp == 0 && lane < team && active) {
        for (int w = 1; w < warps; ++w) take(joined[w]);
        if (newest) {  // its value as the cache keeps it, as all others
            float v[own_columns];
            float score = 0;
            for (int i = 0; i < width; ++i) score += q_shared[i] * convert<float>(convert<T>(k_shared[i]));
#pragma unroll
            for (int i = 0; i < own_columns; ++i)
                v[i] = column + i < width ? convert<float>(convert<T>(a.v[group * a.width + column + i])) : 0.0f;
            join(state, score, 1.0f, v);
        }
        put(own + blockIdx.y * (a.width + 2));
        __threadfence();
    }
    __syncthreads();
    if (thread == 0) {
        is_last = atomicAdd(a.arrived + head, 1) == static_cast<int>(parts.count) - 1;
        if (is_last) a.arrived[head] = 0;
    }
    __syncthreads();
    if (is_last == 0 || warp != 0 || lane >= team || !active) return;
    __threadfence();
    state = Running();
    for (std::int64_t part = 0; part < parts.count; ++part) take(own + part * (a.width + 2));
#pragma unroll
    for (int i = 0; i < own_columns; ++i)
        if (column + i < width) a.o[head * a.width + column + i] = state.o[i] / state.sum;
}

}  // namespace

void decode_attention(const Exec& exec, const DecodeAttention& args) {
    constexpr const char* op = "decode_attention";
    const OperatorScope scope(op, exec);
    FENWICK_CHECK(args.width <= widest, "[{}] heads of {}; CUDA takes at most {}", op, args.width, widest);
    const dim3 grid(static_cast<unsigned>(args.rows * args.heads), static_cast<unsigned>(decode_attention_parts));
    dispatch(op, args.dtype, [&]<class T>(TypeTag<T>) {
        if (can_use_wide({args.width}, {args.k_cache, args.v_cache}))
            dependent::launch(op, exec, decode_attention_kernel<T, true>, grid, dim3(threads), 0, args);
        else
            dependent::launch(op, exec, decode_attention_kernel<T, false>, grid, dim3(threads), 0, args);
    });
}

}  // namespace fenwick::kernels::cuda
