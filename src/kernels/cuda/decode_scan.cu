// The states of decoding: one launch for all heads and levels of a layer. A block has a few columns of one head's states, so
// that it needs nothing from other blocks; its threads share the keys. What a token reads of the states is known before
// its keys and values are, and is asked for in the L2 cache meanwhile.
#include "kernels/cuda/dependent.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/decode.h"

namespace fenwick::kernels::cuda {
namespace {

constexpr int most_levels = static_cast<int>(decode_most_levels);

// ---- ssd -------------------------------------------------------------------------------------------------------------

constexpr int ssd_threads = 256, ssd_across = 4, ssd_keys = ssd_threads / ssd_across;
constexpr int ssd_ahead = 4;  // levels whose states a thread loads before it needs the first

// A thread: V columns, and of them every ssd_keys-th key.
template <int V>
__global__ void __launch_bounds__(ssd_threads) decode_ssd_kernel(const DecodeSsd a) {
    __shared__ float level_factor[most_levels], weight[most_levels];
    __shared__ int merging[most_levels], kept[most_levels], counts[2];
    __shared__ float parts[ssd_threads / 32][ssd_across][V], key_parts[ssd_threads / 32];
    const int thread = tile::thread_index(), lane = thread % 32, warp = thread / 32;
    const int heads = static_cast<int>(a.heads), K = static_cast<int>(a.key_width);
    const std::int64_t row = blockIdx.x / heads, h = blockIdx.x % heads, group = h / (a.heads / a.groups);
    const int first_key = thread / ssd_across;
    const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * ssd_across + thread % ssd_across) * V;
    const bool active = column<a.value_width, scaled = a.levels> 0;
    const std::int64_t head = row * a.heads + h, level_heads = a.rows * a.heads;
    const std::int64_t level_size = level_heads * a.key_width * a.value_width;
    float* const state = a.state + head * a.key_width * a.value_width + column;

    const std::int64_t t = *a.position;
    const int now = static_cast<int>(t & 1), next = now ^ 1;
    const int merged = scaled && t > 0 ? __ffsll(t) : 0;  // levels below it empty into it
    const int capacity = static_cast<int>(a.level_capacity);
    if (scaled) {
        if (thread < capacity) level_factor[thread] = a.factors[(now * decode_most_levels + thread) * level_heads + head];
        __syncthreads();
        if (thread == 0) {
            int merging_count = 0, kept_count = 0;
            for (int l = 0; l < capacity; ++l) {
                if (level_factor[l] == 0.0f) continue;
                if (l < merged) merging[merging_count++] = l;
                if (l > merged) kept[kept_count++] = l;
            }
            counts[0] = merging_count;
            counts[1] = kept_count;
        }
        __syncthreads();
    }
    const int merging_count = scaled ? counts[0] : 0, kept_count = scaled ? counts[1] : 0;
    if (active && thread * V % 8 == 0)  // a sector of 32 bytes
        for (int key = first_key; key < K; key += ssd_keys) {
            const float* const at = state + key * a.value_width;
            if (!scaled) dependent::prefetch(at);
            for (int e = 0; e < merging_count; ++e) dependent::prefetch(at + merging[e] * level_size);
            for (int e = 0; e < kept_count; ++e) dependent::prefetch(at + kept[e] * level_size);
        }
    dependent::wait_for_predecessor();

    const float decay = expf(a.log_decay[head]), step = a.step[head];
    const float* const q = a.q + row * a.stride + group * a.key_width;
    const float* const k = a.k + row * a.stride + group * a.key_width;
    const auto scale = [&](int level) {
        return a.level_scales[head * a.levels + min(level, static_cast<int>(a.levels) - 1)];
    };
    if (thread < kept_count) weight[thread] = scale(kept[thread]) * level_factor[kept[thread]] * decay;
    float u[V] = {}, v[V], last_v[V] = {};
    if (active) load(u, a.u + row * a.stride + h * a.value_width + column);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = step * u[j];
    const std::int64_t group_keys = a.rows * a.groups * a.key_width, head_values = level_heads * a.value_width;
    const float* const last_k = a.last_k + now * group_keys + (row * a.groups + group) * a.key_width;
    if (merged > 0 && active) load(last_v, a.last_v + now * head_values + head * a.value_width + column);
    const float merged_scale = merged > 0 ? scale(merged) : 0.0f;
    __syncthreads();

    float sum[V] = {}, query_key = 0;
    for (int key = first_key; key < K; key += ssd_keys) {
        const float query = q[key], fresh = k[key];
        query_key += query * fresh;
        if (!active) continue;
        float* const at = state + key * a.value_width;
        float y[V] = {};
        if (!scaled) {
            load(y, at);
#pragma unroll
            for (int j = 0; j < V; ++j) y[j] = y[j] * decay + fresh * v[j];
            store(at, y);
        } else {
            if (merged > 0) {
                const float last = last_k[key];
                float x[V];
#pragma unroll
                for (int j = 0; j < V; ++j) x[j] = last * last_v[j];
                for (int e = 0; e < merging_count; ++e) {
                    float s[V];
                    load(s, at + merging[e] * level_size);
#pragma unroll
                    for (int j = 0; j < V; ++j) x[j] += level_factor[merging[e]] * s[j];
                }
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    x[j] *= decay;
                    y[j] = merged_scale * x[j];
                }
                store(at + merged * level_size, x);
            }
            for (int e = 0; e < kept_count; e += ssd_ahead) {
                float s[ssd_ahead][V];
#pragma unroll
                for (int i = 0; i < ssd_ahead; ++i)
                    if (e + i < kept_count) load(s[i], at + kept[e + i] * level_size);
#pragma unroll
                for (int i = 0; i < ssd_ahead; ++i)
                    if (e + i < kept_count) {
#pragma unroll
                        for (int j = 0; j < V; ++j) y[j] += weight[e + i] * s[i][j];
                    }
            }
        }
#pragma unroll
        for (int j = 0; j < V; ++j) sum[j] += query * y[j];
    }
    for (int offset = 16; offset >= ssd_across; offset >>= 1) {
#pragma unroll
        for (int j = 0; j < V; ++j) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
        query_key += __shfl_xor_sync(0xffffffffu, query_key, offset);
    }
    if (lane < ssd_across) {
#pragma unroll
        for (int j = 0; j < V; ++j) parts[warp][lane][j] = sum[j];
        if (lane == 0) key_parts[warp] = query_key;
    }
    __syncthreads();
    if (thread < ssd_across && active) {
        float o[V] = {};
        query_key = 0;
        for (int w = 0; w < ssd_threads / 32; ++w) {
#pragma unroll
            for (int j = 0; j < V; ++j) o[j] += parts[w][thread][j];
            query_key += key_parts[w];
        }
        const float own = scaled ? scale(0) * query_key : 0.0f, skip = a.skip[h];
#pragma unroll
        for (int j = 0; j < V; ++j) o[j] += own * v[j] + skip * u[j];
        store(a.o + head * a.value_width + column, o);
        if (scaled) store(a.last_v + next * head_values + head * a.value_width + column, v);
    }
    if (!scaled || blockIdx.y != 0) return;
    if (thread < capacity)
        a.factors[(next * decode_most_levels + thread) * level_heads + head] =
            thread < merged                  ? 0.0f
            : thread == merged && merged > 0 ? 1.0f
                                             : level_factor[thread] * (merged > 0 ? decay : 0.0f);
    if (h % (a.heads / a.groups) == 0)
        for (int key = thread; key < K; key += ssd_threads)
            a.last_k[next * group_keys + (row * a.groups + group) * a.key_width + key] = k[key];
}

// ---- the gated delta rule ----------------------------------------------------------------------------------------------

constexpr int delta_threads = 128, delta_across = 2, delta_keys = delta_threads / delta_across;
constexpr int delta_warps = delta_threads / 32;
constexpr int delta_levels = 4;  // that a thread holds at once
constexpr int delta_widest = 2048;

// A thread: V columns, and of them every delta_keys-th key: N of them are kept in registers, or, N = 0, read twice.
template <int V, int N>
__global__ void __launch_bounds__(delta_threads) decode_gated_delta_rule_kernel(const DecodeGatedDeltaRule a) {
    __shared__ float sums[2][delta_levels][delta_warps][delta_across][2 * V];
    __shared__ float lengths[delta_warps][3];
    __shared__ int live[most_levels];
    __shared__ int live_count_shared;
    float* const k_shared = reinterpret_cast<float*>(tile::shared_memory());  // [K]
    const int K = static_cast<int>(a.key_width);
    float* const q_shared = k_shared + K;
    const int thread = tile::thread_index(), lane = thread % 32, warp = thread / 32, side = thread % delta_across;
    const int heads = static_cast<int>(a.heads);
    const std::int64_t row = blockIdx.x / heads, h = blockIdx.x % heads;
    const int first_key = thread / delta_across;
    const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * delta_across + side) * V;
    const bool active = column<a.value_width, scaled = a.levels> 0;
    const std::int64_t head = row * a.heads + h, level_heads = a.rows * a.heads;
    const std::int64_t level_size = level_heads * a.key_width * a.value_width;
    float* const state = a.state + head * a.key_width * a.value_width + column;

    const std::int64_t t = *a.position;
    const int now = static_cast<int>(t & 1), next = now ^ 1;
    const int merged = scaled && t > 0 ? __ffsll(t) : 0;
    // The levels to go through: `merged`, which takes in those below it, and above it the set bits of t. Linear: level 0.
    if (thread == 0) {
        int count = 0;
        if (!scaled) live[count++] = 0;
        if (merged > 0) live[count++] = merged;
        if (scaled && t > 0)
            for (std::int64_t rest = t & (t - 1); rest != 0; rest &= rest - 1) live[count++] = __ffsll(rest);
        live_count_shared = count;
    }
    __syncthreads();
    const int live_count = live_count_shared, merging_first = merged > 0 && t != a.first_position ? 1 : 0;
    if (active && thread * V % 8 == 0)
        for (int key = first_key; key < K; key += delta_keys) {
            const float* const at = state + key * a.value_width;
            for (int l = merging_first; l < merged; ++l) dependent::prefetch(at + l * level_size);
            for (int e = merged > 0 ? 1 : 0; e < live_count; ++e) dependent::prefetch(at + live[e] * level_size);
        }
    dependent::wait_for_predecessor();

    const float decay = expf(a.log_decay[head]), beta = a.beta[head];
    float products[3] = {};  // k.k, q.q, q.k
    for (int key = thread; key < K; key += delta_threads) {
        const float k = a.k[head * a.key_width + key], q = a.q[head * a.key_width + key];
        k_shared[key] = k;
        q_shared[key] = q;
        products[0] += k * k;
        products[1] += q * q;
        products[2] += q * k;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        products[i] = team_sum(products[i]);
        if (lane == 0) lengths[warp][i] = products[i];
    }
    float v[V] = {}, last_u[V] = {};
    const std::int64_t values = level_heads * a.value_width, keys = level_heads * a.key_width;
    if (active) load(v, a.v + head * a.value_width + column);
    if (merged > 0 && active) load(last_u, a.last_u + now * values + head * a.value_width + column);
    const float* const last_k = a.last_k + now * keys + head * a.key_width;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        products[i] = 0;
        for (int w = 0; w < delta_warps; ++w) products[i] += lengths[w][i];
    }
    const float k_scale = rsqrtf(products[0] + static_cast<float>(a.eps));
    const float q_scale = rsqrtf(products[1] + static_cast<float>(a.eps)) * static_cast<float>(a.q_scale);
    const float query_key = products[2] * k_scale * q_scale;
    const auto scale = [&](int level) {
        return a.level_scales[head * a.levels + min(level, static_cast<int>(a.levels) - 1)];
    };

    // State of level live[e], levels below `merged` and the last token's outer product included.
    const auto fetch = [&](float(&s)[V], int e, int key) {
        const float* const at = state + key * a.value_width;
        if (e > 0 || merged == 0) {
            load(s, at + live[e] * level_size);
            return;
        }
        const float last = last_k[key];
#pragma unroll
        for (int j = 0; j < V; ++j) s[j] = last * last_u[j];
        for (int l = merging_first; l < merged; ++l) {
            float other[V];
            load(other, at + l * level_size);
#pragma unroll
            for (int j = 0; j < V; ++j) s[j] += other[j];
        }
    };
    float o[V] = {};
    int turn = 0;
    for (int first = 0; first < live_count; first += delta_levels, turn ^= 1) {
        float s[delta_levels][N > 0 ? N : 1][V];
        float read[delta_levels][2 * V] = {};  // S'k, S'q
        const auto add = [&](int i, const float(&x)[V], int key) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
                read[i][j] += k_shared[key] * x[j];
                read[i][V + j] += q_shared[key] * x[j];
            }
        };
        if (active) {
            if constexpr (N > 0) {
#pragma unroll
                for (int i = 0; i < delta_levels; ++i)
#pragma unroll
                    for (int n = 0; n < N; ++n)
                        if (first + i < live_count && first_key + n * delta_keys < K)
                            fetch(s[i][n], first + i, first_key + n * delta_keys);
#pragma unroll
                for (int i = 0; i < delta_levels; ++i)
#pragma unroll
                    for (int n = 0; n < N; ++n)
                        if (first + i < live_count && first_key + n * delta_keys < K)
                            add(i, s[i][n], first_key + n * delta_keys);
            } else {
#pragma unroll
                for (int i = 0; i < delta_levels; ++i)
                    if (first + i < live_count)
                        for (int key = first_key; key < K; key += delta_keys) {
                            fetch(s[i][0], first + i, key);
                            add(i, s[i][0], key);
                        }
            }
        }
#pragma unroll
        for (int i = 0; i < delta_levels; ++i) {
            if (first + i >= live_count) break;
            const float sum = dependent::transposed_sum(read[i], lane, delta_across);
            sums[turn][i][warp][side][dependent::transposed_index<2 * V>(lane)] = sum;  // the same from several lanes
        }
        __syncthreads();
        if (!active) continue;
#pragma unroll
        for (int i = 0; i < delta_levels; ++i) {
            if (first + i >= live_count) break;
            const int level = live[first + i];
            const float weight = scaled ? scale(level) : 1.0f;
            // S <- decay S + k u',  u = beta (v - decay S'k), v only in level 0
            float u[V];
#pragma unroll
            for (int j = 0; j < V; ++j) {
                float key_sum = 0, query_sum = 0;
#pragma unroll
                for (int w = 0; w < delta_warps; ++w) {
                    key_sum += sums[turn][i][w][side][j];
                    query_sum += sums[turn][i][w][side][V + j];
                }
                u[j] = beta * ((scaled ? 0.0f : v[j]) - decay * k_scale * key_sum);
                o[j] += weight * (decay * q_scale * query_sum + query_key * u[j]);
            }
            const auto update = [&](float(&x)[V], int key) {
#pragma unroll
                for (int j = 0; j < V; ++j) x[j] = decay * x[j] + k_scale * k_shared[key] * u[j];
                store(state + key * a.value_width + level * level_size, x);
            };
            if constexpr (N > 0) {
#pragma unroll
                for (int n = 0; n < N; ++n)
                    if (first_key + n * delta_keys < K) update(s[i][n], first_key + n * delta_keys);
            } else {
                for (int key = first_key; key < K; key += delta_keys) {
                    fetch(s[i][0], first + i, key);
                    update(s[i][0], key);
                }
            }
        }
    }
    if (thread < delta_across && active) {
        const float own = scaled ? scale(0) * query_key : 0.0f;
        float u[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
            u[j] = beta * v[j];
            o[j] += own * u[j];
        }
        store(a.o + head * a.value_width + column, o);
        if (scaled) store(a.last_u + next * values + head * a.value_width + column, u);
    }
    if (scaled && blockIdx.y == 0)
        for (int key = thread; key < K; key += delta_threads)
            a.last_k[next * keys + head * a.key_width + key] = k_scale * k_shared[key];
}

unsigned blocks_across(std::int64_t width, int columns) { return static_cast<unsigned>(ceil_div(width, columns)); }

}  // namespace

void decode_ssd(const Exec& exec, const DecodeSsd& args) {
    constexpr const char* op = "decode_ssd";
    const OperatorScope scope(op, exec);
    FENWICK_CHECK(args.level_capacity <= most_levels, "[{}] {} levels; at most {} fit", op, args.level_capacity,
                  most_levels);
    const auto heads = static_cast<unsigned>(args.rows * args.heads);
    if (can_use_wide({2 * args.value_width, 2 * args.stride}, {args.u, args.state}))
        dependent::launch(op, exec, decode_ssd_kernel<4>, dim3(heads, blocks_across(args.value_width, 4 * ssd_across)),
                          dim3(ssd_threads), 0, args);
    else
        dependent::launch(op, exec, decode_ssd_kernel<1>, dim3(heads, blocks_across(args.value_width, ssd_across)),
                          dim3(ssd_threads), 0, args);
}

void decode_gated_delta_rule(const Exec& exec, const DecodeGatedDeltaRule& args) {
    constexpr const char* op = "decode_gated_delta_rule";
    const OperatorScope scope(op, exec);
    FENWICK_CHECK(args.level_capacity <= most_levels, "[{}] {} levels; at most {} fit", op, args.level_capacity,
                  most_levels);
    FENWICK_CHECK(args.key_width <= delta_widest, "[{}] keys of {}; CUDA takes at most {}", op, args.key_width,
                  delta_widest);
    const auto heads = static_cast<unsigned>(args.rows * args.heads);
    const std::size_t shared = 2 * static_cast<std::size_t>(args.key_width) * sizeof(float);
    const bool vectors = can_use_wide({2 * args.value_width}, {args.v, args.state});
    const std::int64_t keys = ceil_div(args.key_width, delta_keys);
    const auto run = [&](auto kernel, int columns) {
        dependent::launch(op, exec, kernel, dim3(heads, blocks_across(args.value_width, columns * delta_across)),
                          dim3(delta_threads), shared, args);
    };
    if (!vectors)
        run(decode_gated_delta_rule_kernel<1, 0>, 1);
    else if (keys <= 2)
        run(decode_gated_delta_rule_kernel<4, 2>, 4);
    else if (keys == 3)
        run(decode_gated_delta_rule_kernel<4, 3>, 4);
    else
        run(decode_gated_delta_rule_kernel<4, 0>, 4);
}

}  // namespace fenwick::kernels::cuda
