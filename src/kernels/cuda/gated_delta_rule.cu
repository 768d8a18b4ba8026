// The gated delta rule on CUDA, linear or log-linear, in chunks of 64 tokens. Names are those of cpu/gated_delta_rule.cpp:
//
//   D_ts = exp(Gamma_t - Gamma_s), e_t = exp(Gamma_t), E_t = exp(Gamma_last - Gamma_t), e_last = exp(Gamma_last)
//   A = strict_lower(beta_t (k_t.k_s) D_ts), X = (I + A)^-1, M = ((Q K') . D) X
//   Kh = beta e K,  Kb = E K,  Qb = e Q - M Kh,  Y = X' Kb
//
// prepare_chunks computes them, all chunks in parallel. A state S_l that enters a chunk is read by Qb S_l and leaves as
//   S_l <- e_last S_l + Y' T_l,   T_l = -Kh S_l  (the level that takes the chunk's new state: beta V - Kh sum of merged S)
// which advance_states does chunk after chunk, a block for 64 columns of a document's and head's states: columns never mix.
// States are carried in float32 in global memory (a block's own, so they stay in the L2 cache) and multiplied as T.
// On Hopper, in bfloat16, walk_states does the same with states in registers and levels side by side
// (gated_delta_rule_walk.cuh), and state_flow what state_gradients does (gated_delta_rule_gradients.cuh); advance_states,
// retreat_states and state_gradients are for all else.
//
// Backward, with dS_l the gradients of the states that leave:
//   Z_l = Y dS_l,   dS_l <- e_last dS_l - Kh' Z_l + diag(lambda_l Qb)' dO                       retreat_states
//   dQb = sum_l diag(lambda_l) dO S_l',   dKh = -sum_l Z_l S_l' - M' dQb,   dY = sum_l T_l dS_l'  state_gradients
//   d(beta V) = (M . Lambda)' dO + Z_new, and the rest within the chunk                          chunk_gradients
// The gradient of g is taken from every factor e, D, E it is part of, not from o.do - v.dv: in bfloat16 those would have to
// cancel. Work goes through the sequence in rounds of chunks, the last first: only one round's states are in memory, and
// those that enter each round. Many documents are taken slice after slice, so that the workspace does not grow with them.
//
// T = float and bfloat16 share the code (tile.cuh). No atomics; sums have a fixed order.
#include "kernels/gated_delta_rule.h"

#include <bit>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cuda/branch.cuh"
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/gated_delta_rule_gradients.cuh"
#include "kernels/cuda/gated_delta_rule_walk.cuh"
#include "kernels/cuda/tables.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/cuda/warpgroup.cuh"

namespace fenwick::kernels::cuda {
namespace {

using tile::Accumulator;
using tile::area;
using tile::edge;
using tile::store_clipped;
using tile::threads;
using tile::Unscaled;
using walk::ChunkInfo;
using walk::inside_levels;
using walk::place_of;
using walk::slots_before;
using walk::Transition;
using walk::transition_after;
using warpgroup::synchronize_tiles;
using warpgroup::wait_for_tiles;

constexpr int max_key_tiles = 8;
constexpr int matrix_stride = edge + 1;  // of float32 matrices in shared memory

// ---- geometry --------------------------------------------------------------------------------------------------------

// A document's chunks in one round.
struct StreamInfo {
    std::int32_t first, count;  // chunks
    std::int32_t document;
};

// Everything the kernels see. Tiles are 64 x 64; those in the workspace are laid out as in shared memory (tile::offset),
// and float32 ones as the threads hold an Accumulator.
template <class T>
struct Problem {
    int heads, key_width, value_width, key_tiles, value_tiles, levels, slots;
    bool wide_q, wide_k, wide_v, wide_o;  // 16-byte copies
    bool resident;                        // a chunk's operands fit in shared memory
    std::int64_t q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride;
    const ChunkInfo* chunks;
    const StreamInfo* streams;
    const T *q, *k, *v, *d_o;
    const float *g, *beta, *level_scales;
    T *o, *dq, *dk, *dv;
    float *dg, *dbeta, *dlevel_scales;
    // workspace; [chunks, H, tiles]
    T* weights;                       // forward: M . Lambda . beta_s
    T *inverse, *mix;                 // backward: X, M
    T *query, *key_start, *left_key;  // Qb, Kh, Y: key tiles
    float* decay;                     // e_last
    // of the present round
    T *states, *d_states;  // [entering / leaving states of the round's chunks, H, V tiles, K tiles]
    T *steps, *d_steps;    // T_l (walk_states: as Walk::steps), Z_l: [leaving states, H, V tiles]
    T *d_query, *d_left;   // dQb, dY: [round's chunks, H, K tiles]
    float* d_start;        // -sum_l Z_l S_l': the same
    float* scale_parts;    // [K tiles, round's chunks, H, slots, 64]
    float* flow_parts;     // [K tiles, round's chunks, H]: e_last sum_l <dS_l, S_l>

    __device__ std::int64_t at(int chunk, int h) const { return static_cast<std::int64_t>(chunk) * heads + h; }
    __device__ std::int64_t master_size() const { return static_cast<std::int64_t>(value_tiles) * key_tiles * area; }
    // Of float32 states [documents, H, slots, V tiles, K tiles]
    __device__ std::int64_t master_at(int document, int h, int vt) const {
        return (at(document, h) * slots * value_tiles + vt) * key_tiles * area;
    }
    // The state in place `place` of `count` that a chunk has.
    __device__ std::int64_t state_at(int before, int count, int h, int place) const {
        return static_cast<std::int64_t>(before) * heads + static_cast<std::int64_t>(count) * h + place;
    }
    __device__ float scale(std::int64_t token, int h, int level) const {
        if (level_scales == nullptr) return 1.0f;
        return level_scales[(token * heads + h) * levels + min(level, levels - 1)];
    }
};

// ---- pieces ----------------------------------------------------------------------------------------------------------

// Starts copying a tile of the workspace.
template <class T>
__device__ __forceinline__ void load_tile(T* to, const T* from) {
    constexpr int unit = 16 / sizeof(T);
    const int thread = tile::thread_index();
#pragma unroll
    for (int n = 0; n < area / unit / threads; ++n) {
        const int index = (n * threads + thread) * unit;
        tile::copy_async_16(to + index, from + index, true);
    }
}

// The n-th of the 8 quadruples that a thread holds of either accumulator.
__device__ __forceinline__ float (&quadruple(tile::Accumulator& acc, int n))[4] { return acc.x[n / 4][n % 4]; }
__device__ __forceinline__ float (&quadruple(warpgroup::Accumulator& acc, int n))[4] { return acc.x[n]; }

// float32 tiles as the threads hold them: acc = from, acc += factor * from, to = acc.
template <class A>
__device__ __forceinline__ void load_held(A& acc, const float* from) {
    const int thread = tile::thread_index();
#pragma unroll
    for (int n = 0; n < 8; ++n) load(quadruple(acc, n), from + (n * threads + thread) * 4);
}
template <class A>
__device__ __forceinline__ void store_held(float* to, A& acc) {
    const int thread = tile::thread_index();
#pragma unroll
    for (int n = 0; n < 8; ++n) store(to + (n * threads + thread) * 4, quadruple(acc, n));
}
// acc = factor * from + sign * acc
template <class A>
__device__ __forceinline__ void combine(A& acc, float factor, A& from, float sign) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) quadruple(acc, n)[e] = factor * quadruple(from, n)[e] + sign * quadruple(acc, n)[e];
}
template <class A>
__device__ __forceinline__ void add_held(A& acc, float factor, const float* from) {
    A other;
    load_held(other, from);
    combine(acc, factor, other, 1.0f);
}

// Copies a tile from shared memory to the workspace.
template <class T>
__device__ __forceinline__ void store_tile(T* to, const T* from) {
    struct alignas(16) Unit {
        T values[16 / sizeof(T)];
    };
    const int thread = tile::thread_index();
#pragma unroll
    for (int n = 0; n < area * static_cast<int>(sizeof(T)) / 16 / threads; ++n)
        reinterpret_cast<Unit*>(to)[n * threads + thread] = reinterpret_cast<const Unit*>(from)[n * threads + thread];
}
// The elements of a tile that a thread's Accumulator has, as they are.
template <class T>
struct HeldTile {
    std::conditional_t<std::is_same_v<T, float>, float2, std::uint32_t> pairs[16];

    __device__ __forceinline__ void load(const T* from) {
        Accumulator unused;
        unused.clear();
        int i = 0;
        unused.for_pairs([&](int row, int col, float&, float&, int) {
            memcpy(&pairs[i++], from + tile::offset<T>(row, col), sizeof(pairs[0]));
        });
    }
    // acc = factor(row) * tile - acc
    template <class F>
    __device__ __forceinline__ void subtract(Accumulator& acc, F&& factor) const {
        int i = 0;
        acc.for_pairs([&](int row, int, float& a, float& b, int) {
            float2 pair;
            if constexpr (std::is_same_v<T, float>) {
                pair = pairs[i++];
            } else {
                pair = tile::unpack(pairs[i++]);
            }
            a = factor(row) * pair.x - a;
            b = factor(row) * pair.y - b;
        });
    }
};

template <class T>
__device__ __forceinline__ void load_queries(const Problem<T>& p, T* to, const ChunkInfo& c, int h, int kt) {
    tile::load(to, p.q + c.token * p.q_stride + static_cast<std::int64_t>(h) * p.key_width + kt * edge, p.q_stride, c.rows,
               p.key_width - kt * edge, p.wide_q);
}
template <class T>
__device__ __forceinline__ void load_keys(const Problem<T>& p, T* to, const ChunkInfo& c, int h, int kt) {
    tile::load(to, p.k + c.token * p.k_stride + static_cast<std::int64_t>(h) * p.key_width + kt * edge, p.k_stride, c.rows,
               p.key_width - kt * edge, p.wide_k);
}
template <class T>
__device__ __forceinline__ void load_values(const Problem<T>& p, T* to, const ChunkInfo& c, int h, int vt) {
    tile::load(to, p.v + c.token * p.v_stride + static_cast<std::int64_t>(h) * p.value_width + vt * edge, p.v_stride, c.rows,
               p.value_width - vt * edge, p.wide_v);
}
template <class T>
__device__ __forceinline__ void load_output_grad(const Problem<T>& p, T* to, const ChunkInfo& c, int h, int vt) {
    const std::int64_t stride = static_cast<std::int64_t>(p.heads) * p.value_width;
    tile::load(to, p.d_o + c.token * stride + static_cast<std::int64_t>(h) * p.value_width + vt * edge, stride, c.rows,
               p.value_width - vt * edge, p.wide_o);
}

// Decays and steps of a chunk's tokens. Behind the document's end: no decay, beta 0.
struct Gates {
    double gamma[edge];
    float beta[edge], from_start[edge], to_end[edge];

    __device__ __forceinline__ float between(int s, int t) const {  // D_ts, s <= t
        return __expf(fminf(static_cast<float>(gamma[t] - gamma[s]), 0.0f));
    }
};
// By warp 0; a barrier must follow.
template <class T>
__device__ __forceinline__ void load_gates(const Problem<T>& p, Gates& gates, const ChunkInfo& c, int h) {
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x, t = 2 * lane;
    const std::int64_t at = (c.token + t) * p.heads + h;
    const double first = t < c.rows ? p.g[at] : 0.0, second = t + 1 < c.rows ? p.g[at + p.heads] : 0.0;
    const double sum = first + second;
    double upto = sum;
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, upto, step);
        if (lane >= step) upto += other;
    }
    const double before = lane == 0 ? 0.0 : upto - sum;
    // The total, by a butterfly: every lane adds in the same order.
    double total = lane == 31 ? upto : 0.0;
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    const double gamma[2] = {before + first, upto};
    for (int i = 0; i < 2; ++i) {
        gates.gamma[t + i] = gamma[i];
        gates.beta[t + i] = t + i < c.rows ? p.beta[at + i * p.heads] : 0.0f;
        gates.from_start[t + i] = __expf(fminf(static_cast<float>(gamma[i]), 0.0f));
        gates.to_end[t + i] = __expf(fminf(static_cast<float>(total - gamma[i]), 0.0f));
    }
}

// Level scales 0..6 of the chunk's tokens, [7][64]; 0 behind the document's end.
template <class T>
__device__ __forceinline__ void load_inside_scales(const Problem<T>& p, float* scales, const ChunkInfo& c, int h) {
    for (int n = threadIdx.x; n < inside_levels * edge; n += threads) {
        const int t = n / inside_levels, l = n % inside_levels;
        scales[l * edge + t] = t < c.rows ? p.scale(c.token + t, h, l) : 0.0f;
    }
}
// Level scales of the slots in use, [slots][64].
template <class T>
__device__ __forceinline__ void load_slot_scales(const Problem<T>& p, float* scales, const ChunkInfo& c, int h, int used) {
    for (int n = threadIdx.x; n < p.slots * edge; n += threads) {
        const int slot = n / edge, t = n % edge;
        if (used >> slot & 1) scales[n] = t < c.rows ? p.scale(c.token + t, h, inside_levels + slot) : 0.0f;
    }
}

// Row sums over the columns, to[64]; a barrier must follow.
__device__ __forceinline__ void put_row_sums(float (&rows)[2], float* to) {
    warpgroup::sum_over_columns(rows);
    if (threadIdx.x % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) to[warpgroup::first_row() + r * 8] = rows[r];
    }
}

// x = (I + a)^-1, zero above the diagonal, for the strict lower part of a; float32, rows of matrix_stride. In blocks of 16:
// those on the diagonal by substitution, a thread a column, the others by -X_ii sum_k A_ik X_kj, diagonal by diagonal.
__device__ __forceinline__ void invert_unit_lower(const float* a, float* x) {
    constexpr int block = 16, blocks = edge / block;
    const int tid = threadIdx.x;
    if (tid < edge) {
        const int base = tid / block * block, j = tid % block;
        float column[block];
#pragma unroll
        for (int i = 0; i < block; ++i) {
            float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
            for (int s = 0; s < i; ++s) sum -= a[(base + i) * matrix_stride + base + s] * column[s];
            column[i] = sum;
            x[(base + i) * matrix_stride + base + j] = sum;
        }
    }
    __syncthreads();
    for (int distance = 1; distance < blocks; ++distance) {
        const int count = (blocks - distance) * block * block;
        // The sums, into the mirror image above the diagonal.
        for (int n = tid; n < count; n += threads) {
            const int i = n / (block * block) + distance, j = i - distance, row = n / block % block, col = n % block;
            float sum = 0;
            for (int s = j * block; s < i * block; ++s)
                sum += a[(i * block + row) * matrix_stride + s] * x[s * matrix_stride + j * block + col];
            x[(j * block + row) * matrix_stride + i * block + col] = sum;
        }
        __syncthreads();
        for (int n = tid; n < count; n += threads) {
            const int i = n / (block * block) + distance, j = i - distance, row = n / block % block, col = n % block;
            float sum = 0;
            for (int s = 0; s <= row; ++s)
                sum += x[(i * block + row) * matrix_stride + i * block + s] *
                       x[(j * block + s) * matrix_stride + i * block + col];
            x[(i * block + row) * matrix_stride + j * block + col] = -sum;
        }
        __syncthreads();
    }
    for (int n = tid; n < area; n += threads)
        if (n / edge < n % edge) x[n / edge * matrix_stride + n % edge] = 0.0f;
    __syncthreads();
}

// ---- a chunk by itself -------------------------------------------------------------------------------------------------

struct PrepareShared {
    Gates gates;
    float x[edge * matrix_stride];
    float scales[inside_levels * edge];
};

// Grid: chunks, heads.
template <class T>
__global__ void __launch_bounds__(threads, sizeof(T) == 2 ? 4 : 2) prepare_chunks(Problem<T> p) {
    const int h = blockIdx.y;
    const ChunkInfo c = p.chunks[blockIdx.x];
    const std::int64_t id = p.at(static_cast<int>(blockIdx.x), h);
    T* const keys = reinterpret_cast<T*>(tile::shared_memory());
    T* const queries = keys + area;
    T* const inverse = queries + area;
    T* const mix = inverse + area;
    PrepareShared& s = *reinterpret_cast<PrepareShared*>(mix + area);
    Gates& gates = s.gates;

    load_gates(p, gates, c, h);
    if (p.weights != nullptr) load_inside_scales(p, s.scales, c, h);
    warpgroup::Accumulator kk, qk;
    kk.clear();
    qk.clear();
    for (int kt = 0; kt < p.key_tiles; ++kt) {
        if (kt > 0) __syncthreads();
        load_keys(p, keys, c, h, kt);
        load_queries(p, queries, c, h, kt);
        tile::commit_async();
        wait_for_tiles();
        warpgroup::multiply<false, true>(kk, keys, keys, Unscaled{});
        warpgroup::multiply<false, true>(qk, queries, keys, Unscaled{});
    }
    float* const a_matrix = reinterpret_cast<float*>(keys);  // and the two tiles behind, until the inverse is there
    static_assert(3 * area * sizeof(T) >= edge * matrix_stride * sizeof(float));
    __syncthreads();
    kk.for_pairs([&](int t, int col, float& a, float& b, int) {
        a_matrix[t * matrix_stride + col] = col < t ? gates.beta[t] * a * gates.between(col, t) : 0.0f;
        a_matrix[t * matrix_stride + col + 1] = col + 1 < t ? gates.beta[t] * b * gates.between(col + 1, t) : 0.0f;
    });
    qk.for_pairs([&](int t, int col, float& a, float& b, int) {
        a = col <= t ? a * gates.between(col, t) : 0.0f;
        b = col + 1 <= t ? b * gates.between(col + 1, t) : 0.0f;
    });
    qk.template store<T>(mix);
    __syncthreads();
    invert_unit_lower(a_matrix, s.x);
    for (int n = static_cast<int>(threadIdx.x) * 2; n < area; n += threads * 2) {
        const int row = n / edge, col = n % edge;
        tile::store_pair(inverse + tile::offset<T>(row, col), s.x[row * matrix_stride + col],
                         s.x[row * matrix_stride + col + 1]);
    }
    synchronize_tiles();
    qk.clear();
    warpgroup::multiply<false, false>(qk, mix, inverse, Unscaled{});
    __syncthreads();
    qk.template store<T>(mix);
    if (p.mix != nullptr) {
        qk.template store<T>(p.mix + id * area);
        for (int n = static_cast<int>(threadIdx.x) * 2; n < area; n += threads * 2) {
            const float2 pair = tile::load_pair(inverse + n);
            tile::store_pair(p.inverse + id * area + n, pair.x, pair.y);
        }
    }
    if (p.weights != nullptr) {
        warpgroup::Accumulator weights = qk;
        weights.for_pairs([&](int t, int col, float& a, float& b, int) {
            a = col <= t ? a * s.scales[bits_of(t ^ col) * edge + t] * gates.beta[col] : 0.0f;
            b = col + 1 <= t ? b * s.scales[bits_of(t ^ (col + 1)) * edge + t] * gates.beta[col + 1] : 0.0f;
        });
        weights.template store<T>(p.weights + id * area);
    }
    if (threadIdx.x == 0) p.decay[id] = gates.from_start[edge - 1];

    for (int kt = 0; kt < p.key_tiles; ++kt) {
        const std::int64_t at = (id * p.key_tiles + kt) * area;
        __syncthreads();
        load_keys(p, keys, c, h, kt);
        load_queries(p, queries, c, h, kt);
        tile::commit_async();
        wait_for_tiles();
        for (int n = static_cast<int>(threadIdx.x) * 2; n < area; n += threads * 2) {
            const float2 pair = tile::load_pair(keys + n);
            const float factor = gates.beta[n / edge] * gates.from_start[n / edge];
            tile::store_pair(p.key_start + at + n, factor * pair.x, factor * pair.y);
        }
        warpgroup::Accumulator acc;
        acc.clear();
        warpgroup::multiply<false, false>(acc, mix, keys, [&](int, int k, float2 x) {
            return make_float2(x.x * gates.beta[k] * gates.from_start[k], x.y * gates.beta[k + 1] * gates.from_start[k + 1]);
        });
        acc.for_pairs([&](int t, int col, float& a, float& b, int) {
            const float2 query = tile::load_pair(queries + tile::offset<T>(t, col));
            a = gates.from_start[t] * query.x - a;
            b = gates.from_start[t] * query.y - b;
        });
        acc.template store<T>(p.query + at);
        if (c.has_next == 0) continue;
        acc.clear();
        warpgroup::multiply<true, false>(acc, inverse, keys, [&](int, int k, float2 x) {
            return make_float2(x.x * gates.to_end[k], x.y * gates.to_end[k + 1]);
        });
        acc.template store<T>(p.left_key + at);
    }
}

// ---- states from chunk to chunk ----------------------------------------------------------------------------------------

// The chunk's Kh, Y, Qb: in shared memory all at once, or one tile at a time.
template <class T>
struct Operands {
    T* shared;
    const T* sources[3];
    int key_tiles;
    bool resident;

    // Starts copying, if resident.
    __device__ __forceinline__ void load(int which) {
        if (!resident) return;
        for (int kt = 0; kt < key_tiles; ++kt)
            load_tile(shared + (which * key_tiles + kt) * area, sources[which] + kt * area);
    }
    __device__ __forceinline__ const T* get(int which, int kt) {
        if (resident) return shared + (which * key_tiles + kt) * area;
        __syncthreads();
        load_tile(shared, sources[which] + kt * area);
        tile::commit_async();
        wait_for_tiles();
        return shared;
    }
};

// Float32 states of a block on their way: KT tiles in registers, loaded before they are needed. KT = 0: any number of key
// tiles, loaded where they are used.
template <int KT>
struct Carried {
    Accumulator tiles[KT];

    __device__ __forceinline__ void fetch(const float* from) {
#pragma unroll
        for (int kt = 0; kt < KT; ++kt) load_held(tiles[kt], from + kt * area);
    }
};
template <>
struct Carried<0> {
    __device__ __forceinline__ void fetch(const float*) {}
};

// Carries the states through a round's chunks, from those in `from` to those in `to`; both float32,
// [documents, H, slots, V tiles, K tiles], and may be the same. Writes o if p.o is given, p.states and p.steps if they are.
// A chunk's states are visited in this order: those kept, then those merged. Grid: streams x heads, value tiles.
template <class T, int KT>
__global__ void __launch_bounds__(threads) advance_states(Problem<T> p, int first_stream, const float* from, float* to) {
    const StreamInfo stream = p.streams[first_stream + static_cast<int>(blockIdx.x) / p.heads];
    const int h = static_cast<int>(blockIdx.x) % p.heads, vt = blockIdx.y, key_tiles = KT > 0 ? KT : p.key_tiles;
    T* const state = reinterpret_cast<T*>(tile::shared_memory());  // K tiles
    T* const step = state + key_tiles * area;
    Operands<T> operands{step + area, {}, key_tiles, KT > 0 || p.resident};
    float* const scales =
        reinterpret_cast<float*>(operands.shared + (operands.resident ? (p.o != nullptr ? 3 : 2) * key_tiles : 1) * area);
    float* const betas = scales + p.slots * edge;
    const std::int64_t master = p.master_at(stream.document, h, vt);
    from += master;
    to += master;
    const auto state_of = [&](int slot, int kt) { return slot * p.master_size() + kt * area; };

    Carried<KT> carried;
    if (stream.count > 0) {
        const Transition first = transition_after(p.chunks[stream.first].index, p.slots);
        const int slots = first.kept != 0 ? first.kept : first.merged;
        if (slots != 0) carried.fetch(from + state_of(__ffs(slots) - 1, 0));
    }
    for (int n = 0; n < stream.count; ++n) {
        const ChunkInfo c = p.chunks[stream.first + n];
        const std::int64_t id = p.at(stream.first + n, h);
        const float* const read = n == 0 ? from : to;
        const int used = slots_before(c.index, p.slots), used_count = __popc(used);
        const Transition transition = transition_after(c.index, p.slots);
        const int next_used = transition.kept | 1 << transition.destination, next_count = __popc(next_used);
        const float decay = p.decay[id];
        operands.sources[0] = p.key_start + id * key_tiles * area;
        operands.sources[1] = p.left_key + id * key_tiles * area;
        operands.sources[2] = p.query + id * key_tiles * area;
        // The first state that the next chunk of this round visits, or -1.
        int upcoming = -1;
        if (n + 1 < stream.count) {
            const Transition next = transition_after(c.index + 1, p.slots);
            upcoming = __ffs(next.kept != 0 ? next.kept : next.merged) - 1;
        }

        __syncthreads();  // the last chunk is done with shared memory
        if (c.has_next != 0) {
            operands.load(0);
            operands.load(1);
        }
        if (p.o != nullptr) {
            operands.load(2);
            load_tile(state, p.weights + id * area);
            load_slot_scales(p, scales, c, h, used);
        }
        load_values(p, step, c, h, vt);
        if (threadIdx.x < edge)
            betas[threadIdx.x] =
                static_cast<int>(threadIdx.x) < c.rows ? p.beta[(c.token + threadIdx.x) * p.heads + h] : 0.0f;
        tile::commit_async();
        wait_for_tiles();
        Accumulator out;
        out.clear();
        if (p.o != nullptr) tile::multiply<false, false>(out, state, step, Unscaled{});
        HeldTile<T> values;
        values.load(step);
        __syncthreads();

        // What the tokens read of a state; reads += Kh S. `next`: the state to fetch then, or -1.
        const auto visit = [&](int slot, Accumulator& reads, int next) {
            if constexpr (KT > 0) {
#pragma unroll
                for (int kt = 0; kt < KT; ++kt) carried.tiles[kt].template store<T>(state + kt * area);
                if (next >= 0) carried.fetch(read + state_of(next, 0));
            } else {
                for (int kt = 0; kt < key_tiles; ++kt) {
                    Accumulator acc;
                    load_held(acc, read + state_of(slot, kt));
                    acc.template store<T>(state + kt * area);
                }
            }
            __syncthreads();
            if (p.states != nullptr)
                for (int kt = 0; kt < key_tiles; ++kt)
                    store_tile(
                        p.states +
                            ((p.state_at(c.entering, used_count, h, place_of(used, slot)) * p.value_tiles + vt) * key_tiles +
                             kt) *
                                area,
                        state + kt * area);
            if (p.o != nullptr) {
                Accumulator acc;
                acc.clear();
                for (int kt = 0; kt < key_tiles; ++kt)
                    tile::multiply<false, false>(acc, operands.get(2, kt), state + kt * area, Unscaled{});
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            out.x[m][j][e] += scales[slot * edge + tile::first_row() + m * 16 + e / 2 * 8] * acc.x[m][j][e];
            }
            if (c.has_next != 0)
                for (int kt = 0; kt < key_tiles; ++kt)
                    tile::multiply<false, false>(reads, operands.get(0, kt), state + kt * area, Unscaled{});
            __syncthreads();
        };
        // The states of `slots`, the last of which is carried, become one in slot `target`. `next`: the address of the state
        // to fetch then, or null.
        const auto leave = [&](int slots, int target, Accumulator& difference, const float* next) {
            difference.template store<T>(step);
            __syncthreads();
            if (p.steps != nullptr)
                store_tile(
                    p.steps +
                        (p.state_at(c.leaving, next_count, h, place_of(next_used, target)) * p.value_tiles + vt) * area,
                    step);
            if constexpr (KT > 0) {
                const int others = slots & ~(slots != 0 ? 1 << (31 - __clz(slots)) : 0);
#pragma unroll
                for (int kt = 0; kt < KT; ++kt) {
                    Accumulator acc;
                    acc.clear();
                    tile::multiply<true, false>(acc, operands.get(1, kt), step, Unscaled{});
                    if (slots != 0) combine(acc, decay, carried.tiles[kt], 1.0f);
                    for (int rest = others; rest != 0; rest &= rest - 1)
                        add_held(acc, decay, read + state_of(__ffs(rest) - 1, kt));
                    store_held(to + state_of(target, kt), acc);
                    if (next != nullptr) load_held(carried.tiles[kt], next + kt * area);
                }
            } else {
                for (int kt = 0; kt < key_tiles; ++kt) {
                    Accumulator acc;
                    acc.clear();
                    tile::multiply<true, false>(acc, operands.get(1, kt), step, Unscaled{});
                    for (int rest = slots; rest != 0; rest &= rest - 1)
                        add_held(acc, decay, read + state_of(__ffs(rest) - 1, kt));
                    store_held(to + state_of(target, kt), acc);
                }
            }
        };

        for (int rest = transition.kept; rest != 0; rest &= rest - 1) {
            const int slot = __ffs(rest) - 1, more = rest & (rest - 1);
            const int next = __ffs(more != 0 ? more : transition.merged) - 1;
            Accumulator reads;
            reads.clear();
            visit(slot, reads, c.has_next != 0 ? -1 : next);
            if (c.has_next == 0) continue;
            combine(reads, 0.0f, reads, -1.0f);
            leave(1 << slot, slot, reads, next >= 0 ? read + state_of(next, 0) : nullptr);
        }
        Accumulator reads;
        reads.clear();
        for (int rest = transition.merged; rest != 0; rest &= rest - 1)
            visit(__ffs(rest) - 1, reads, __ffs(rest & (rest - 1)) - 1);
        if (c.has_next != 0) {
            values.subtract(reads, [&](int row) { return betas[row]; });
            __syncthreads();
            leave(transition.merged, transition.destination, reads, upcoming >= 0 ? to + state_of(upcoming, 0) : nullptr);
        }
        if (p.o != nullptr)
            store_clipped(out, p.o + (c.token * p.heads + h) * p.value_width + vt * edge,
                          static_cast<std::int64_t>(p.heads) * p.value_width, c.rows, p.value_width - vt * edge,
                          p.value_width % 2 == 0);
    }
}

// Carries the gradients of the states back through a round's chunks, in place. Writes p.d_states and p.d_steps. What left a
// chunk is visited in this order: kept slots, then the destination. Grid: streams x heads, value tiles.
template <class T, int KT>
__global__ void __launch_bounds__(threads) retreat_states(Problem<T> p, int first_stream, float* gradients) {
    const StreamInfo stream = p.streams[first_stream + static_cast<int>(blockIdx.x) / p.heads];
    const int h = static_cast<int>(blockIdx.x) % p.heads, vt = blockIdx.y, key_tiles = KT > 0 ? KT : p.key_tiles;
    T* const gradient = reinterpret_cast<T*>(tile::shared_memory());  // K tiles; then Z in the first
    T* const d_out = gradient + key_tiles * area;
    Operands<T> operands{d_out + area, {}, key_tiles, KT > 0 || p.resident};
    float* const scales = reinterpret_cast<float*>(operands.shared + (operands.resident ? 3 * key_tiles : 1) * area);
    gradients += p.master_at(stream.document, h, vt);
    const auto gradient_of = [&](int slot, int kt) { return gradients + slot * p.master_size() + kt * area; };
    const auto first_source = [&](int index) {
        const Transition transition = transition_after(index, p.slots);
        return transition.kept != 0 ? __ffs(transition.kept) - 1 : transition.destination;
    };

    Carried<KT> carried;
    if (stream.count > 0) {
        const ChunkInfo last = p.chunks[stream.first + stream.count - 1];
        if (last.has_next != 0) carried.fetch(gradient_of(first_source(last.index), 0));
    }
    for (int n = stream.count - 1; n >= 0; --n) {
        const ChunkInfo c = p.chunks[stream.first + n];
        const std::int64_t id = p.at(stream.first + n, h);
        const int used = slots_before(c.index, p.slots);
        const Transition transition = transition_after(c.index, p.slots);
        const int next_used = transition.kept | 1 << transition.destination, next_count = __popc(next_used);
        const float decay = p.decay[id];
        operands.sources[0] = p.key_start + id * key_tiles * area;
        operands.sources[1] = p.left_key + id * key_tiles * area;
        operands.sources[2] = p.query + id * key_tiles * area;
        const float* const upcoming = n > 0 ? gradient_of(first_source(c.index - 1), 0) : nullptr;

        __syncthreads();  // the last chunk is done with shared memory
        if (c.has_next != 0) {
            operands.load(0);
            operands.load(1);
        }
        operands.load(2);
        load_slot_scales(p, scales, c, h, used);
        load_output_grad(p, d_out, c, h, vt);
        tile::commit_async();
        wait_for_tiles();
        const auto add_output = [&](Accumulator& acc, int slot, int kt) {
            const float* const scale = scales + slot * edge;
            tile::multiply<true, false>(acc, operands.get(2, kt), d_out, [&](int, int k, float2 x) {
                return make_float2(x.x * scale[k], x.y * scale[k + 1]);
            });
        };
        if (c.has_next == 0) {
            for (int rest = used; rest != 0; rest &= rest - 1) {
                const int slot = __ffs(rest) - 1;
                for (int kt = 0; kt < key_tiles; ++kt) {
                    Accumulator acc;
                    acc.clear();
                    add_output(acc, slot, kt);
                    store_held(gradient_of(slot, kt), acc);
                }
            }
            if (upcoming != nullptr) carried.fetch(upcoming);
            continue;
        }
        // What left from slot `source` came from `slots`. `next`: the gradient to fetch then, or null.
        const auto retreat = [&](int source, int slots, const float* next) {
            const std::int64_t leaving =
                p.state_at(c.leaving, next_count, h, place_of(next_used, source)) * p.value_tiles + vt;
            __syncthreads();
            if constexpr (KT > 0) {
#pragma unroll
                for (int kt = 0; kt < KT; ++kt) carried.tiles[kt].template store<T>(gradient + kt * area);
            } else {
                for (int kt = 0; kt < key_tiles; ++kt) {
                    Accumulator acc;
                    load_held(acc, gradient_of(source, kt));
                    acc.template store<T>(gradient + kt * area);
                }
            }
            __syncthreads();
            for (int kt = 0; kt < key_tiles; ++kt)
                store_tile(p.d_states + (leaving * key_tiles + kt) * area, gradient + kt * area);
            Accumulator z;
            z.clear();
            for (int kt = 0; kt < key_tiles; ++kt)
                tile::multiply<false, false>(z, operands.get(1, kt), gradient + kt * area, Unscaled{});
            __syncthreads();
            z.template store<T>(gradient);
            __syncthreads();
            store_tile(p.d_steps + leaving * area, gradient);
            if (slots == 0) {
                if (next != nullptr) carried.fetch(next);
                return;
            }
            const auto finish = [&](Accumulator& before, int kt) {
                for (int rest = slots; rest != 0; rest &= rest - 1) {
                    const int slot = __ffs(rest) - 1;
                    Accumulator acc = before;
                    add_output(acc, slot, kt);
                    store_held(gradient_of(slot, kt), acc);
                }
            };
            if constexpr (KT > 0) {
#pragma unroll
                for (int kt = 0; kt < KT; ++kt) {
                    Accumulator before;
                    before.clear();
                    tile::multiply<true, false>(before, operands.get(0, kt), gradient, Unscaled{});
                    combine(before, decay, carried.tiles[kt], -1.0f);
                    finish(before, kt);
                    if (next != nullptr) load_held(carried.tiles[kt], next + kt * area);
                }
            } else {
                for (int kt = 0; kt < key_tiles; ++kt) {
                    Accumulator before;
                    before.clear();
                    tile::multiply<true, false>(before, operands.get(0, kt), gradient, Unscaled{});
                    combine(before, 0.0f, before, -1.0f);
                    add_held(before, decay, gradient_of(source, kt));
                    finish(before, kt);
                }
            }
        };
        for (int rest = transition.kept; rest != 0; rest &= rest - 1) {
            const int more = rest & (rest - 1);
            retreat(__ffs(rest) - 1, rest & -rest, gradient_of(more != 0 ? __ffs(more) - 1 : transition.destination, 0));
        }
        retreat(transition.destination, transition.merged, upcoming);
    }
}

// ---- gradients -----------------------------------------------------------------------------------------------------------

// What flows through the states: dQb, -sum Z S', dY, the level scales of the slots, and <dS, S>.
// Grid: round's chunks, heads, key tiles.
template <class T>
__global__ void __launch_bounds__(threads) state_gradients(Problem<T> p, int first_chunk) {
    const int h = blockIdx.y, kt = blockIdx.z, KT = p.key_tiles, VT = p.value_tiles;
    const ChunkInfo c = p.chunks[first_chunk + static_cast<int>(blockIdx.x)];
    const std::int64_t id = p.at(first_chunk + static_cast<int>(blockIdx.x), h),
                       local = p.at(static_cast<int>(blockIdx.x), h);
    T* const d_out = reinterpret_cast<T*>(tile::shared_memory());
    T* const state = d_out + area;
    T* const z = state + area;
    T* const d_state = z + area;
    T* const step = d_state + area;
    float* const scales = reinterpret_cast<float*>(step + area);  // [slots][64]
    float* const scratch = scales + p.slots * edge;               // [32]
    const int used = slots_before(c.index, p.slots), used_count = __popc(used);
    const Transition transition = transition_after(c.index, p.slots);
    const int next_used = transition.kept | 1 << transition.destination, next_count = __popc(next_used);
    const std::int64_t parts = static_cast<std::int64_t>(kt) * gridDim.x * p.heads + local;

    load_slot_scales(p, scales, c, h, used);
    warpgroup::Accumulator d_query, d_start, d_left;
    d_query.clear();
    d_start.clear();
    d_left.clear();
    float flow = 0;
    for (int rest = used; rest != 0; rest &= rest - 1) {
        const int slot = __ffs(rest) - 1, target = transition.merged >> slot & 1 ? transition.destination : slot;
        const std::int64_t entering = p.state_at(c.entering, used_count, h, place_of(used, slot)) * VT;
        const std::int64_t leaving = p.state_at(c.leaving, next_count, h, place_of(next_used, target)) * VT;
        // The states that merge share what leaves: the first of them takes its step.
        const bool with_step = (transition.kept >> slot & 1) != 0 || slot == __ffs(transition.merged) - 1;
        warpgroup::Accumulator read;  // dO S'
        read.clear();
        for (int vt = 0; vt < VT; ++vt) {
            __syncthreads();
            load_output_grad(p, d_out, c, h, vt);
            load_tile(state, p.states + ((entering + vt) * KT + kt) * area);
            if (c.has_next != 0) {
                load_tile(z, p.d_steps + (leaving + vt) * area);
                load_tile(d_state, p.d_states + ((leaving + vt) * KT + kt) * area);
                if (with_step) load_tile(step, p.steps + (leaving + vt) * area);
            }
            tile::commit_async();
            wait_for_tiles();
            warpgroup::multiply<false, true>(read, d_out, state, Unscaled{});
            if (c.has_next == 0) continue;
            warpgroup::multiply<false, true>(d_start, z, state, Unscaled{});
            if (with_step) warpgroup::multiply<false, true>(d_left, step, d_state, Unscaled{});
            for (int n = static_cast<int>(threadIdx.x) * 2; n < area; n += threads * 2) {
                const float2 a = tile::load_pair(state + n), b = tile::load_pair(d_state + n);
                flow += a.x * b.x + a.y * b.y;
            }
        }
        const T* const query = p.query + (id * KT + kt) * area;
        float rows[2] = {};
        read.for_pairs([&](int t, int col, float& a, float& b, int r) {
            const float2 x = tile::load_pair(query + tile::offset<T>(t, col));
            rows[r] += x.x * a + x.y * b;
            a *= scales[slot * edge + t];
            b *= scales[slot * edge + t];
        });
        combine(d_query, 1.0f, read, 1.0f);
        if (p.level_scales != nullptr) put_row_sums(rows, p.scale_parts + (parts * p.slots + slot) * edge);
    }
    const std::int64_t at = (local * KT + kt) * area;
    d_query.template store<T>(p.d_query + at);
    if (c.has_next == 0) return;
    d_start.for_pairs([](int, int, float& a, float& b, int) {
        a = -a;
        b = -b;
    });
    store_held(p.d_start + at, d_start);
    flow = block_sum(flow, scratch);
    if (threadIdx.x == 0) p.flow_parts[parts] = flow * p.decay[id];

    if (transition.merged == 0) {
        const std::int64_t leaving = p.state_at(c.leaving, next_count, h, place_of(next_used, transition.destination)) * VT;
        for (int vt = 0; vt < VT; ++vt) {
            __syncthreads();
            load_tile(step, p.steps + (leaving + vt) * area);
            load_tile(d_state, p.d_states + ((leaving + vt) * KT + kt) * area);
            tile::commit_async();
            wait_for_tiles();
            warpgroup::multiply<false, true>(d_left, step, d_state, Unscaled{});
        }
    }
    d_left.template store<T>(p.d_left + at);
}

struct GradientShared {
    Gates gates;
    float scales[inside_levels * edge];
    float level_sums[inside_levels * edge];
    float row_sums[3 * edge];
};

// Grid: round's chunks, heads.
template <class T>
__global__ void __launch_bounds__(threads, sizeof(T) == 2 ? 4 : 2) chunk_gradients(Problem<T> p, int first_chunk) {
    const int h = blockIdx.y, KT = p.key_tiles, VT = p.value_tiles, tid = threadIdx.x;
    const ChunkInfo c = p.chunks[first_chunk + static_cast<int>(blockIdx.x)];
    const std::int64_t id = p.at(first_chunk + static_cast<int>(blockIdx.x), h),
                       local = p.at(static_cast<int>(blockIdx.x), h);
    T* const inverse = reinterpret_cast<T*>(tile::shared_memory());  // X
    T* const mix = inverse + area;                                   // M
    T* const weights = mix + area;                                   // M . Lambda, then dM, dQK
    T* const d_a = weights + area;
    T* const left = d_a + area;  // operands
    T* const right = left + area;
    GradientShared& s = *reinterpret_cast<GradientShared*>(right + area);
    Gates& gates = s.gates;
    const bool has_next = c.has_next != 0;
    const int used = slots_before(c.index, p.slots);

    load_tile(inverse, p.inverse + id * area);
    load_tile(mix, p.mix + id * area);
    tile::commit_async();
    load_gates(p, gates, c, h);
    load_inside_scales(p, s.scales, c, h);
    wait_for_tiles();
    for (int n = tid * 2; n < area; n += threads * 2) {
        const int t = n / edge, col = n % edge;
        const float2 x = tile::load_pair(mix + tile::offset<T>(t, col));
        tile::store_pair(weights + tile::offset<T>(t, col), col <= t ? x.x * s.scales[bits_of(t ^ col) * edge + t] : 0.0f,
                         col + 1 <= t ? x.y * s.scales[bits_of(t ^ (col + 1)) * edge + t] : 0.0f);
    }

    // d(beta V), and dO (beta V)'.
    float d_betas[2] = {}, d_gammas[2] = {}, d_lasts[2] = {};
    warpgroup::Accumulator d_mix;
    d_mix.clear();
    const Transition transition = transition_after(c.index, p.slots);
    const int next_used = transition.kept | 1 << transition.destination;
    const std::int64_t fresh =
        has_next ? p.state_at(c.leaving, __popc(next_used), h, place_of(next_used, transition.destination)) * VT : 0;
    for (int vt = 0; vt < VT; ++vt) {
        synchronize_tiles();
        load_output_grad(p, left, c, h, vt);
        load_values(p, right, c, h, vt);
        tile::commit_async();
        wait_for_tiles();
        warpgroup::multiply<false, true>(d_mix, left, right, Unscaled{});
        warpgroup::Accumulator acc;
        acc.clear();
        warpgroup::multiply<true, false>(acc, weights, left, Unscaled{});
        const T* const z = p.d_steps + (fresh + vt) * area;
        acc.for_pairs([&](int row, int col, float& a, float& b, int r) {
            if (has_next) {
                const float2 more = tile::load_pair(z + tile::offset<T>(row, col));
                a += more.x;
                b += more.y;
            }
            const float2 value = tile::load_pair(right + tile::offset<T>(row, col));
            d_betas[r] += value.x * a + value.y * b;
            a *= gates.beta[row];
            b *= gates.beta[row];
        });
        store_clipped(acc, p.dv + c.token * p.dv_stride + static_cast<std::int64_t>(h) * p.value_width + vt * edge,
                      p.dv_stride, c.rows, p.value_width - vt * edge, p.value_width % 2 == 0 && p.dv_stride % 2 == 0);
    }

    // Level scales within the chunk.
    float* const matrix = reinterpret_cast<float*>(d_a);  // and the tiles behind it
    static_assert(3 * area * sizeof(T) >= edge * matrix_stride * sizeof(float));
    __syncthreads();
    d_mix.for_pairs([&](int t, int col, float& a, float& b, int) {
        const float2 x = tile::load_pair(mix + tile::offset<T>(t, col));
        a *= gates.beta[col];
        b *= gates.beta[col + 1];
        matrix[t * matrix_stride + col] = a * x.x;
        matrix[t * matrix_stride + col + 1] = b * x.y;
        a = col <= t ? a * s.scales[bits_of(t ^ col) * edge + t] : 0.0f;
        b = col + 1 <= t ? b * s.scales[bits_of(t ^ (col + 1)) * edge + t] : 0.0f;
    });
    __syncthreads();
    if (p.level_scales != nullptr) {
        for (int n = tid; n < inside_levels * edge; n += threads) {
            const int level = n / edge, t = n % edge, half = level == 0 ? 1 : 1 << (level - 1);
            const int begin = level == 0 ? t : t & ~(2 * half - 1);
            float sum = 0;
            if (level == 0 || (t & half) != 0)
                for (int i = begin; i < begin + half; ++i) sum += matrix[t * matrix_stride + i];
            s.level_sums[n] = sum;
        }
        __syncthreads();
        const std::int64_t part_stride = static_cast<std::int64_t>(gridDim.x) * p.heads * p.slots * edge;
        for (int n = tid; n < c.rows * p.levels; n += threads) {
            const int t = n / p.levels, column = n % p.levels;
            float sum = 0;
            for (int level = 0; level < inside_levels; ++level)
                if (min(level, p.levels - 1) == column) sum += s.level_sums[level * edge + t];
            for (int rest = used; rest != 0; rest &= rest - 1) {
                const int slot = __ffs(rest) - 1;
                if (min(inside_levels + slot, p.levels - 1) != column) continue;
                const float* const part = p.scale_parts + (local * p.slots + slot) * edge + t;
                for (int kt = 0; kt < KT; ++kt) sum += part[kt * part_stride];
            }
            p.dlevel_scales[((c.token + t) * p.heads + h) * p.levels + column] = sum;
        }
    }

    // dM, then the gradient of (Q K') . D.
    {
        warpgroup::Accumulator acc;
        acc.clear();
        for (int kt = 0; used != 0 && kt < KT; ++kt) {
            __syncthreads();
            load_keys(p, right, c, h, kt);
            load_tile(left, p.d_query + (local * KT + kt) * area);
            tile::commit_async();
            wait_for_tiles();
            warpgroup::multiply<false, true>(acc, left, right, Unscaled{});
        }
        d_mix.for_pairs_with(acc, [&](int t, int col, float& a, float& b, int, float x, float y) {
            a = col <= t ? a - gates.beta[col] * gates.from_start[col] * x : 0.0f;
            b = col + 1 <= t ? b - gates.beta[col + 1] * gates.from_start[col + 1] * y : 0.0f;
        });
    }
    __syncthreads();
    d_mix.template store<T>(weights);
    synchronize_tiles();
    warpgroup::Accumulator d_qk;
    d_qk.clear();
    warpgroup::multiply<false, true>(d_qk, weights, inverse, Unscaled{});
    __syncthreads();
    d_qk.template store<T>(weights);

    // dA
    {
        warpgroup::Accumulator acc;
        acc.clear();
        for (int kt = 0; has_next && kt < KT; ++kt) {
            __syncthreads();
            load_tile(left, p.left_key + (id * KT + kt) * area);
            load_tile(right, p.d_left + (local * KT + kt) * area);
            tile::commit_async();
            wait_for_tiles();
            warpgroup::multiply<false, true>(acc, left, right, Unscaled{});
        }
        if (has_next) {  // Y (X dY)'
            __syncthreads();
            acc.template store<T>(left);
            synchronize_tiles();
            acc.clear();
            warpgroup::multiply<false, true>(acc, left, inverse, Unscaled{});
        }
        synchronize_tiles();
        warpgroup::multiply<true, false>(acc, mix, weights, Unscaled{});
        acc.for_pairs([&](int t, int col, float& a, float& b, int) {
            a = col < t ? -a * gates.between(col, t) : 0.0f;
            b = col + 1 < t ? -b * gates.between(col + 1, t) : 0.0f;
        });
        acc.template store<T>(d_a);  // dA . D
    }
    d_qk.for_pairs([&](int t, int col, float& a, float& b, int) {
        a = col <= t ? a * gates.between(col, t) : 0.0f;
        b = col + 1 <= t ? b * gates.between(col + 1, t) : 0.0f;
    });
    __syncthreads();
    d_qk.template store<T>(weights);  // dQK . D

    for (int kt = 0; kt < KT; ++kt) {
        const std::int64_t at = (local * KT + kt) * area, column = static_cast<std::int64_t>(h) * p.key_width + kt * edge;
        const int cols = p.key_width - kt * edge;
        __syncthreads();
        load_keys(p, left, c, h, kt);
        load_queries(p, right, c, h, kt);
        tile::commit_async();
        wait_for_tiles();
        warpgroup::Accumulator acc, other;
        acc.clear();
        if (used != 0)
            acc.for_pairs([&](int t, int col, float& a, float& b, int) {
                const float2 d_query = tile::load_pair(p.d_query + at + tile::offset<T>(t, col));
                a = gates.from_start[t] * d_query.x;
                b = gates.from_start[t] * d_query.y;
            });
        warpgroup::multiply<false, false>(acc, weights, left, Unscaled{});
        acc.for_pairs([&](int t, int col, float& a, float& b, int r) {
            const float2 query = tile::load_pair(right + tile::offset<T>(t, col));
            d_gammas[r] += query.x * a + query.y * b;
        });
        store_clipped(acc, p.dq + c.token * p.dq_stride + column, p.dq_stride, c.rows, cols,
                      p.key_width % 2 == 0 && p.dq_stride % 2 == 0);

        acc.clear();
        warpgroup::multiply<true, false>(acc, weights, right, Unscaled{});
        warpgroup::multiply<true, false>(
            acc, d_a, left, [&](int, int k, float2 x) { return make_float2(x.x * gates.beta[k], x.y * gates.beta[k + 1]); });
        other.clear();
        warpgroup::multiply<false, false>(other, d_a, left, Unscaled{});
        acc.for_pairs([&](int t, int col, float& a, float& b, int r) {
            const float2 key = tile::load_pair(left + tile::offset<T>(t, col));
            d_gammas[r] -= key.x * a + key.y * b;
        });
        other.for_pairs([&](int t, int col, float& a, float& b, int r) {
            const float2 key = tile::load_pair(left + tile::offset<T>(t, col));
            const float product = key.x * a + key.y * b;  // summed over the columns: sum_s dA_ts (k_t.k_s) D_ts
            d_betas[r] += product;
            d_gammas[r] += gates.beta[t] * product;
            a *= gates.beta[t];
            b *= gates.beta[t];
        });
        combine(acc, 1.0f, other, 1.0f);
        if (used != 0) {
            __syncthreads();
            load_tile(right, p.d_query + at);
            tile::commit_async();
            wait_for_tiles();
            other.clear();
            warpgroup::multiply<true, false>(other, mix, right, Unscaled{});
            other.for_pairs([](int, int, float& a, float& b, int) {
                a = -a;
                b = -b;
            });
            if (has_next) add_held(other, 1.0f, p.d_start + at);
            other.for_pairs([&](int t, int col, float& a, float& b, int r) {  // dKh
                const float2 key = tile::load_pair(left + tile::offset<T>(t, col));
                a *= gates.from_start[t];
                b *= gates.from_start[t];
                const float product = key.x * a + key.y * b;
                d_betas[r] += product;
                d_gammas[r] += gates.beta[t] * product;
                a *= gates.beta[t];
                b *= gates.beta[t];
            });
            combine(acc, 1.0f, other, 1.0f);
        }
        if (has_next) {
            __syncthreads();
            load_tile(right, p.d_left + at);
            tile::commit_async();
            wait_for_tiles();
            other.clear();
            warpgroup::multiply<false, false>(other, inverse, right, Unscaled{});  // dKb
            other.for_pairs([&](int t, int col, float& a, float& b, int r) {
                const float2 key = tile::load_pair(left + tile::offset<T>(t, col));
                a *= gates.to_end[t];
                b *= gates.to_end[t];
                const float product = key.x * a + key.y * b;
                d_gammas[r] -= product;
                d_lasts[r] += product;
            });
            combine(acc, 1.0f, other, 1.0f);
        }
        store_clipped(acc, p.dk + c.token * p.dk_stride + column, p.dk_stride, c.rows, cols,
                      p.key_width % 2 == 0 && p.dk_stride % 2 == 0);
    }

    put_row_sums(d_betas, s.row_sums);
    put_row_sums(d_gammas, s.row_sums + edge);
    put_row_sums(d_lasts, s.row_sums + 2 * edge);
    __syncthreads();
    if (tid >= 32) return;
    const int t = 2 * tid;
    float gamma[2], last = 0;
    for (int i = 0; i < 2; ++i) {
        const float* const x = s.row_sums + t + i;
        if (t + i < c.rows) p.dbeta[(c.token + t + i) * p.heads + h] = x[0];
        gamma[i] = x[edge];
        last += x[2 * edge];
    }
    last = team_sum(last);
    if (has_next && used != 0)
        for (int kt = 0; kt < KT; ++kt) last += p.flow_parts[static_cast<std::int64_t>(kt) * gridDim.x * p.heads + local];
    float behind = gamma[0] + gamma[1];  // of this lane and those behind it
    for (int step = 1; step < 32; step *= 2) {
        const float more = __shfl_down_sync(0xffffffffu, behind, step);
        if (tid + step < 32) behind += more;
    }
    float after = __shfl_down_sync(0xffffffffu, behind, 1);
    if (tid == 31) after = 0;
    after += last;
    const float dg[2] = {after + gamma[1] + gamma[0], after + gamma[1]};
    for (int i = 0; i < 2; ++i)  // a document's first decay meets no state
        if (t + i < c.rows) p.dg[(c.token + t + i) * p.heads + h] = c.index == 0 && t + i == 0 ? 0.0f : dg[i];
}

// ---- host ------------------------------------------------------------------------------------------------------------

#if defined(FENWICK_CUDA_EMULATION)
// So that short sequences have rounds, and several documents are several slices.
constexpr std::int64_t round_bytes = 64 << 10, slice_bytes = 1 << 20;
#else
// advance_states and retreat_states: a round's states take about this many bytes; their gradients the same, and steps a part
// of it.
constexpr std::int64_t round_bytes = std::int64_t{640} << 20;
// The workspace of a call, about: more documents, and on Hopper longer ones, are worked on one after another.
constexpr std::int64_t slice_bytes = std::int64_t{16} << 30;
#endif
constexpr std::int64_t whole = std::int64_t{1} << 40;  // chunks of a round: all there are

// The tables of a layout on one device. Every layer of a model asks for the same layout, so the last few are kept.
struct Layout {
    std::vector<std::int64_t> offsets;
    Device device;
    int slots = 0;
    std::int64_t round_chunks = 0;
    struct Round {
        int first_chunk, chunks, first_stream, streams;
        std::int64_t entering, leaving;  // states of a head
    };
    std::vector<Round> rounds;
    int chunks = 0;
    std::int64_t longest_round = 0, most_entering = 0, most_leaving = 0;
    walk::Schedule schedule;
    Buffer memory;
    const ChunkInfo* chunk_info = nullptr;
    const StreamInfo* stream_info = nullptr;
    const walk::Segment* segments = nullptr;
    const walk::Item* items = nullptr;
};

std::int64_t chunks_of(const Sequences& sequences, std::int64_t d) { return ceil_div(sequences.length(d), edge); }
int count_bits(int x) { return std::popcount(static_cast<unsigned>(x)); }
// States that enter the chunks [first, last) of a document.
std::int64_t entering_states(std::int64_t first, std::int64_t last, int slots) {
    std::int64_t total = 0;
    for (std::int64_t c = first; c < last; ++c) total += count_bits(slots_before(static_cast<int>(c), slots));
    return total;
}

// Consecutive documents that are worked on together, so that the workspace does not grow with their number.
struct DocumentSlice {
    std::int64_t first_token;
    std::vector<std::int64_t> offsets;  // from the first token: slices of equal documents have one layout

    Sequences sequences() const { return {static_cast<std::int64_t>(offsets.size()) - 1, offsets.data()}; }
};
// Slices of about equal size and no more than slice_bytes, if single documents are not. `bytes(d)`: the workspace that
// document d needs.
template <class F>
std::vector<DocumentSlice> slices_of(const Sequences& sequences, F&& bytes) {
    std::int64_t total = 0;
    for (std::int64_t d = 0; d < sequences.count; ++d) total += bytes(d);
    const std::int64_t limit = ceil_div(total, std::max<std::int64_t>(1, ceil_div(total, slice_bytes)));
    std::vector<DocumentSlice> slices;
    std::int64_t taken = 0;
    for (std::int64_t d = 0; d < sequences.count; ++d) {
        const std::int64_t more = bytes(d);
        if (d == 0 || taken + more > limit) {
            slices.push_back({sequences.offsets[d], {0}});
            taken = 0;
        }
        taken += more;
        slices.back().offsets.push_back(sequences.offsets[d + 1] - slices.back().first_token);
    }
    return slices;
}

// A round has `round_chunks` chunks of each document: a power of two where one document is walked in several rounds.
std::shared_ptr<const Layout> make_layout(const Exec& exec, const Sequences& sequences, int slots,
                                          std::int64_t round_chunks) {
    auto layout = std::make_shared<Layout>();
    layout->offsets.assign(sequences.offsets, sequences.offsets + sequences.count + 1);
    layout->device = exec.device;
    layout->slots = slots;
    layout->round_chunks = round_chunks;
    std::int64_t most_chunks = 1;
    for (std::int64_t d = 0; d < sequences.count; ++d) most_chunks = std::max(most_chunks, chunks_of(sequences, d));
    const std::int64_t per_round = std::min(most_chunks, round_chunks);
    std::vector<ChunkInfo> chunks;
    std::vector<StreamInfo> streams;
    for (std::int64_t begin = 0; begin < most_chunks; begin += per_round) {
        Layout::Round round{static_cast<int>(chunks.size()), 0, static_cast<int>(streams.size()), 0, 0, 0};
        for (std::int64_t d = 0; d < sequences.count; ++d) {
            const std::int64_t count = chunks_of(sequences, d), end = std::min(begin + per_round, count);
            if (begin >= end) continue;
            streams.push_back({static_cast<std::int32_t>(chunks.size()), static_cast<std::int32_t>(end - begin),
                               static_cast<std::int32_t>(d)});
            for (std::int64_t c = begin; c < end; ++c) {
                const int index = static_cast<int>(c);
                const bool has_next = c + 1 < count;
                chunks.push_back({sequences.offsets[d] + c * edge,
                                  static_cast<std::int32_t>(std::min<std::int64_t>(edge, sequences.length(d) - c * edge)),
                                  index, has_next, static_cast<std::int32_t>(round.entering),
                                  static_cast<std::int32_t>(round.leaving)});
                round.entering += count_bits(slots_before(index, slots));
                if (has_next) round.leaving += count_bits(slots_before(index + 1, slots));
            }
        }
        round.chunks = static_cast<int>(chunks.size()) - round.first_chunk;
        round.streams = static_cast<int>(streams.size()) - round.first_stream;
        layout->longest_round = std::max<std::int64_t>(layout->longest_round, round.chunks);
        layout->most_entering = std::max(layout->most_entering, round.entering);
        layout->most_leaving = std::max(layout->most_leaving, round.leaving);
        layout->rounds.push_back(round);
    }
    layout->chunks = static_cast<int>(chunks.size());
    walk::ScheduleBuilder builder(slots);
    if (layout->rounds.size() == 1) {
        std::vector<std::int64_t> counts;
        for (std::int64_t d = 0; d < sequences.count; ++d) counts.push_back(chunks_of(sequences, d));
        builder.add_documents(counts);
    } else if (sequences.count == 1 && std::has_single_bit(static_cast<std::uint64_t>(per_round)) &&
               per_round >= 1 << walk::group_levels) {
        builder.add_rounds(most_chunks, std::countr_zero(static_cast<std::uint64_t>(per_round)));
    }
    layout->schedule = builder.take();

    Arena tables;
    tables.add(&layout->chunk_info, std::span<const ChunkInfo>(chunks));
    tables.add(&layout->stream_info, std::span<const StreamInfo>(streams));
    tables.add(&layout->segments, std::span<const walk::Segment>(layout->schedule.segments));
    tables.add(&layout->items, std::span<const walk::Item>(layout->schedule.items));
    tables.allocate(exec);
    layout->memory = tables.release();
    return layout;
}

std::shared_ptr<const Layout> layout_of(const Exec& exec, const Sequences& sequences, int slots, std::int64_t round_chunks) {
    return recent<Layout>(
        32,
        [&](const Layout& layout) {
            return layout.device == exec.device && layout.slots == slots && layout.round_chunks == round_chunks &&
                   std::ranges::equal(layout.offsets, offsets_of(sequences));
        },
        [&] { return make_layout(exec, sequences, slots, round_chunks); });
}

constexpr std::size_t shared_limit = 220 * 1024;  // of a block

template <class T>
std::size_t walk_shared(const Problem<T>& p, int operands) {
    const int tiles = p.key_tiles + 1 + (p.resident ? operands * p.key_tiles : 1);
    return static_cast<std::size_t>(tiles) * area * sizeof(T) + static_cast<std::size_t>(p.slots + 1) * edge * sizeof(float);
}

// Calls fn(integral_constant<int, KT>): 2 or 3 key tiles in bfloat16, or 0 for what is not made for a number of them.
template <class T, class F>
void dispatch_key_tiles(const Problem<T>& p, F&& fn) {
    if constexpr (std::is_same_v<T, Bfloat16>) {
        if (p.key_tiles == 2) return fn(std::integral_constant<int, 2>{});
        if (p.key_tiles == 3) return fn(std::integral_constant<int, 3>{});
    }
    fn(std::integral_constant<int, 0>{});
}

template <class Args>
int slots_of(const Args& args) {
    std::int64_t longest = 1;
    for (std::int64_t d = 0; d < args.sequences.count; ++d) longest = std::max(longest, args.sequences.length(d));
    const int bits = bit_width64(static_cast<std::uint64_t>(ceil_div(longest, edge) - 1));
    return std::max(1, static_cast<int>(std::min<std::int64_t>(bits, args.levels - inside_levels)));
}

template <class T, class Args>
Problem<T> make_problem(const char* op, const Args& args) {
    FENWICK_CHECK(args.key_width <= max_key_tiles * edge, "[{}] key_width {} is not available on CUDA; at most {}", op,
                  args.key_width, max_key_tiles * edge);
    Problem<T> p{};
    p.heads = static_cast<int>(args.heads);
    p.key_width = static_cast<int>(args.key_width);
    p.value_width = static_cast<int>(args.value_width);
    p.key_tiles = static_cast<int>(ceil_div(args.key_width, edge));
    p.value_tiles = static_cast<int>(ceil_div(args.value_width, edge));
    p.levels = static_cast<int>(args.levels);
    p.slots = slots_of(args);
    p.resident = true;
    p.resident = walk_shared(p, 3) <= shared_limit;
    p.q_stride = args.q_stride;
    p.k_stride = args.k_stride;
    p.v_stride = args.v_stride;
    p.wide_q = is_wide(sizeof(T), args.q, {args.q_stride, args.key_width});
    p.wide_k = is_wide(sizeof(T), args.k, {args.k_stride, args.key_width});
    p.wide_v = is_wide(sizeof(T), args.v, {args.v_stride, args.value_width});
    p.q = static_cast<const T*>(args.q);
    p.k = static_cast<const T*>(args.k);
    p.v = static_cast<const T*>(args.v);
    p.g = static_cast<const float*>(args.g);
    p.beta = static_cast<const float*>(args.beta);
    p.level_scales = args.levels > 0 ? static_cast<const float*>(args.level_scales) : nullptr;
    return p;
}

// The problem of the tokens from `token` on.
template <class T>
Problem<T> from_token(Problem<T> p, std::int64_t token) {
    const auto shift = [token](auto*& pointer, std::int64_t width) {
        if (pointer != nullptr) pointer += token * width;
    };
    const std::int64_t heads = p.heads, outputs = heads * p.value_width;
    shift(p.q, p.q_stride);
    shift(p.k, p.k_stride);
    shift(p.v, p.v_stride);
    shift(p.g, heads);
    shift(p.beta, heads);
    shift(p.level_scales, heads * p.levels);
    shift(p.o, outputs);
    shift(p.d_o, outputs);
    shift(p.dq, p.dq_stride);
    shift(p.dk, p.dk_stride);
    shift(p.dv, p.dv_stride);
    shift(p.dg, heads);
    shift(p.dbeta, heads);
    shift(p.dlevel_scales, heads * p.levels);
    return p;
}

template <class T>
void add_chunk_workspace(Arena& arena, Problem<T>& p, std::int64_t chunks) {
    const std::int64_t count = chunks * p.heads, keys = count * p.key_tiles * area;
    arena.add(&p.query, keys);
    arena.add(&p.key_start, keys);
    arena.add(&p.left_key, keys);
    arena.add(&p.decay, count);
}

// ---- walks on Hopper -------------------------------------------------------------------------------------------------

// Whether walk_states runs here: bfloat16 in aligned rows, keys of at most 3 tiles, a GPU with wgmma.
template <class T>
bool has_walks(const Exec& exec, const Problem<T>& p, const void* output) {
    return std::is_same_v<T, Bfloat16> && p.key_tiles <= 3 && p.wide_v && is_wide(sizeof(T), output, {p.value_width}) &&
           is_hopper(exec);
}
int multiprocessors(const Exec& exec) {
    int count = 0;
    FENWICK_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, exec.device.index));
    return count;
}

walk::Walk make_walk(const Problem<Bfloat16>& p, const Layout& layout) {
    walk::Walk w{};
    w.heads = p.heads;
    w.value_width = p.value_width;
    w.value_tiles = p.value_tiles;
    w.levels = p.levels;
    w.slots = p.slots;
    w.v_stride = p.v_stride;
    w.chunks = p.chunks;
    w.segments = layout.segments;
    w.v = p.v;
    w.beta = p.beta;
    w.level_scales = p.level_scales;
    w.key_start = p.key_start;
    w.left_key = p.left_key;
    w.query = p.query;
    w.weights = p.weights;
    w.decay = p.decay;
    w.o = p.o;
    return w;
}
// What a walk needs besides: w.buckets, w.parked.
void add_walk_workspace(Arena& arena, const Exec& exec, walk::Walk& w, const Layout& layout, int key_tiles) {
    const std::int64_t state = std::int64_t{key_tiles} * area;
    arena.add(&w.buckets, std::int64_t{layout.schedule.buckets} * w.heads * w.value_tiles * state);
    arena.add(&w.parked, std::int64_t{multiprocessors(exec)} * walk::consumers_limit * (walk::group_levels - 1) * state);
}
template <class F>
void dispatch_walk(int key_tiles, F&& fn) {
    if (key_tiles == 1) return fn(std::integral_constant<int, 1>{});
    if (key_tiles == 2) return fn(std::integral_constant<int, 2>{});
    fn(std::integral_constant<int, 3>{});
}
// How a pass is shared out: two value tiles share a chunk's operands, unless the GPU has room for them apart.
struct WalkShape {
    int consumers, value_blocks, units, blocks;

    WalkShape(const walk::Walk& w, const walk::Pass& pass, int processors) {
        const std::int64_t apart = std::int64_t{pass.count} * w.heads * w.value_tiles;
        consumers = apart <= processors ? 1 : walk::consumers_limit;
        value_blocks = static_cast<int>(ceil_div(w.value_tiles, consumers));
        units = pass.count * w.heads * value_blocks;
        blocks = std::min(units, processors);
    }
};
template <walk::Purpose purpose>
void run_walk(const char* op, const Exec& exec, walk::Walk w, const Layout& layout, std::size_t round, int key_tiles) {
    const int processors = multiprocessors(exec);
    const auto& passes = layout.schedule.rounds[round];
    dispatch_walk(key_tiles, [&](auto kt) {
        for (std::size_t i = 0; i < passes.size(); ++i) {
            const auto& pass = passes[purpose == walk::Purpose::gradients ? passes.size() - 1 - i : i];
            const WalkShape shape(w, pass, processors);
            w.items = layout.items + pass.first;
            w.value_blocks = shape.value_blocks;
            w.units = shape.units;
            launch(op, exec, walk::walk_states<kt(), purpose>, dim3(static_cast<unsigned>(shape.blocks)),
                   dim3(static_cast<unsigned>((shape.consumers + 1) * 128)),
                   static_cast<std::size_t>(walk::Layout<kt(), purpose>::bytes(shape.consumers)), w);
        }
    });
}

// Outputs from prepare_chunks' results.
void walk_forward(const char* op, const Exec& exec, const Problem<Bfloat16>& p, const Layout& layout) {
    walk::Walk w = make_walk(p, layout);
    Arena arena;
    add_walk_workspace(arena, exec, w, layout, p.key_tiles);
    arena.add(&w.sums, p.slots > 1 ? std::int64_t{layout.chunks} * p.heads * p.value_tiles * area : 0);
    arena.allocate(exec);
    run_walk<walk::Purpose::outputs>(op, exec, w, layout, 0, p.key_tiles);
}
// States, steps and their gradients, of a round, and what flows through them. The two walks do not need each other: `forth`
// and `back` have their own buckets, and where one has few long units, the other fills the GPU. (Two single passes that do
// not fit together would wait for one another.)
void walk_backward(const char* op, const Exec& exec, const Problem<Bfloat16>& p, walk::Walk forth, walk::Walk back,
                   const Layout& layout, std::size_t round) {
    const auto& passes = layout.schedule.rounds[round];
    const int processors = multiprocessors(exec);
    const bool beside = passes.size() > 1 || 2 * WalkShape(back, passes.front(), processors).blocks <= processors;
    std::optional<Branch> branch;
    if (beside) branch.emplace(exec);
    back.chunks = p.chunks;
    back.v = p.d_o;
    back.v_stride = static_cast<std::int64_t>(p.heads) * p.value_width;
    back.states = p.d_states;
    back.steps = p.d_steps;
    run_walk<walk::Purpose::gradients>(op, beside ? branch->exec() : exec, back, layout, round, p.key_tiles);
    forth.chunks = p.chunks;
    forth.states = p.states;
    forth.steps = p.steps;
    run_walk<walk::Purpose::states>(op, exec, forth, layout, round, p.key_tiles);
    if (beside) branch->join();

    flow::Flow f{};
    f.heads = p.heads;
    f.value_width = p.value_width;
    f.value_tiles = p.value_tiles;
    f.levels = p.levels;
    f.slots = p.slots;
    f.chunks = layout.rounds[round].chunks;
    f.chunk_info = p.chunks;
    f.d_o = p.d_o;
    f.level_scales = p.level_scales;
    f.query = p.query;
    f.decay = p.decay;
    f.states = p.states;
    f.d_states = p.d_states;
    f.steps = p.steps;
    f.d_steps = p.d_steps;
    f.d_query = p.d_query;
    f.d_start = p.d_start;
    f.d_left = p.d_left;
    f.scale_parts = p.scale_parts;
    f.flow_parts = p.flow_parts;
    dispatch_walk(p.key_tiles, [&](auto kt) {
        const std::int64_t units = std::int64_t{f.chunks} * p.heads;
        launch(op, exec, flow::state_flow<kt()>,
               dim3(static_cast<unsigned>(std::min<std::int64_t>(units, multiprocessors(exec)))), (kt() + 1) * 128,
               static_cast<std::size_t>(flow::Layout<kt()>::bytes), f);
    });
}

template <class T>
void launch_prepare(const char* op, const Exec& exec, const Problem<T>& p, int chunks) {
    launch(op, exec, prepare_chunks<T>, dim3(static_cast<unsigned>(chunks), static_cast<unsigned>(p.heads)), threads,
           4 * area * sizeof(T) + sizeof(PrepareShared), p);
}
// A kernel that walks the documents of a round, with so many of a chunk's `operands` in shared memory.
template <class T, class Kernel, class... Arguments>
void launch_streams(const char* op, const Exec& exec, Kernel kernel, int operands, const Problem<T>& p,
                    const Layout::Round& round, Arguments... arguments) {
    launch(op, exec, kernel,
           dim3(static_cast<unsigned>(round.streams) * static_cast<unsigned>(p.heads), static_cast<unsigned>(p.value_tiles)),
           threads, walk_shared(p, operands), p, round.first_stream, arguments...);
}
template <class T>
void launch_advance(const char* op, const Exec& exec, const Problem<T>& p, const Layout::Round& round, const float* from,
                    float* to) {
    dispatch_key_tiles(
        p, [&](auto kt) { launch_streams(op, exec, advance_states<T, kt()>, p.o != nullptr ? 3 : 2, p, round, from, to); });
}
template <class T>
void forward_slice(const char* op, const Exec& exec, Problem<T> p, const Sequences& sequences, bool walks) {
    const auto layout = layout_of(exec, sequences, p.slots, whole);
    p.chunks = layout->chunk_info;
    p.streams = layout->stream_info;
    const std::int64_t chunks = layout->chunks, heads = p.heads;
    Arena arena;
    add_chunk_workspace(arena, p, chunks);
    arena.add(&p.weights, chunks * heads * area);
    float* master = nullptr;
    if (!walks) arena.add(&master, sequences.count * heads * p.slots * p.value_tiles * p.key_tiles * area);
    arena.allocate(exec);
    launch_prepare(op, exec, p, layout->chunks);
    if constexpr (std::is_same_v<T, Bfloat16>)
        if (walks) return walk_forward(op, exec, p, *layout);
    launch_advance(op, exec, p, layout->rounds.front(), master, master);
}

template <class T>
void launch_chunk_gradients(const char* op, const Exec& exec, const Problem<T>& p, const Layout::Round& round,
                            int first_chunk) {
    launch(op, exec, chunk_gradients<T>, dim3(static_cast<unsigned>(round.chunks), static_cast<unsigned>(p.heads)), threads,
           6 * area * sizeof(T) + sizeof(GradientShared), p, first_chunk);
}
// What chunk_gradients needs of `chunks` chunks, and the states of the layout's largest round; `steps`: of a head.
template <class T>
void add_backward_workspace(Arena& arena, Problem<T>& p, const Layout& layout, std::int64_t chunks, std::int64_t steps) {
    const std::int64_t heads = p.heads, states = heads * p.value_tiles * p.key_tiles * area;
    const std::int64_t round = layout.longest_round * heads;
    add_chunk_workspace(arena, p, chunks);
    arena.add(&p.inverse, chunks * heads * area);
    arena.add(&p.mix, chunks * heads * area);
    arena.add(&p.states, layout.most_entering * states);
    arena.add(&p.d_states, layout.most_leaving * states);
    arena.add(&p.steps, steps * heads * p.value_tiles * area);
    arena.add(&p.d_steps, layout.most_leaving * heads * p.value_tiles * area);
    arena.add(&p.d_query, round * p.key_tiles * area);
    arena.add(&p.d_start, round * p.key_tiles * area);
    arena.add(&p.d_left, round * p.key_tiles * area);
    arena.add(&p.scale_parts, round * p.key_tiles * p.slots * edge);
    arena.add(&p.flow_parts, round * p.key_tiles);
}

// Backward by walks. A document in several rounds: first the states that enter each of them, then the rounds, the last one
// first. Nothing but those states grows with its length.
void backward_walks(const char* op, const Exec& exec, Problem<Bfloat16> p, const Layout& layout) {
    const std::size_t rounds = layout.rounds.size();
    walk::Walk walks[2] = {make_walk(p, layout), make_walk(p, layout)};  // of states, of gradients
    Arena arena;
    add_backward_workspace(arena, p, layout, layout.longest_round, layout.most_entering + layout.longest_round);
    for (auto& w : walks) add_walk_workspace(arena, exec, w, layout, p.key_tiles);
    arena.allocate(exec);
    for (auto& w : walks) {
        w.key_start = p.key_start;
        w.left_key = p.left_key;
        w.query = p.query;
        w.decay = p.decay;
    }
    const auto enter = [&](std::size_t round) {
        p.chunks = layout.chunk_info + layout.rounds[round].first_chunk;
        launch_prepare(op, exec, p, layout.rounds[round].chunks);
    };
    for (std::size_t round = 0; round + 1 < rounds; ++round) {
        enter(round);
        walks[0].chunks = p.chunks;
        run_walk<walk::Purpose::states>(op, exec, walks[0], layout, round, p.key_tiles);
    }
    for (std::size_t round = rounds; round-- > 0;) {
        enter(round);
        walk_backward(op, exec, p, walks[0], walks[1], layout, round);
        launch_chunk_gradients(op, exec, p, layout.rounds[round], 0);
    }
}

// Backward on other GPUs, in float32, or with more keys. Workspaces of chunks grow with the documents' length.
template <class T>
void backward_rounds(const char* op, const Exec& exec, Problem<T> p, const Sequences& sequences, const Layout& layout) {
    const std::int64_t heads = p.heads, rounds = static_cast<std::int64_t>(layout.rounds.size());
    const std::int64_t master_size =
        sequences.count * heads * p.slots * static_cast<std::int64_t>(p.value_tiles) * p.key_tiles * area;
    float *masters = nullptr, *gradients = nullptr;  // masters[r]: states entering round r; [rounds]: scratch
    T *states = nullptr, *steps = nullptr;
    Arena arena;
    add_backward_workspace(arena, p, layout, layout.chunks, layout.most_leaving);
    arena.add(&masters, (rounds + 1) * master_size);
    arena.add(&gradients, master_size);
    arena.allocate(exec);
    std::swap(p.states, states);  // for the rounds only
    std::swap(p.steps, steps);

    launch_prepare(op, exec, p, layout.chunks);
    const auto advance = [&](std::int64_t r, float* to) {
        launch_advance(op, exec, p, layout.rounds[static_cast<std::size_t>(r)], masters + r * master_size, to);
    };
    for (std::int64_t r = 0; r + 1 < rounds; ++r) advance(r, masters + (r + 1) * master_size);
    std::swap(p.states, states);
    std::swap(p.steps, steps);
    for (std::int64_t r = rounds; r-- > 0;) {
        const auto& round = layout.rounds[static_cast<std::size_t>(r)];
        if (round.leaving > 0 || round.entering > 0) {
            advance(r, masters + rounds * master_size);
            dispatch_key_tiles(p,
                               [&](auto kt) { launch_streams(op, exec, retreat_states<T, kt()>, 3, p, round, gradients); });
            launch(
                op, exec, state_gradients<T>,
                dim3(static_cast<unsigned>(round.chunks), static_cast<unsigned>(heads), static_cast<unsigned>(p.key_tiles)),
                threads, 5 * area * sizeof(T) + static_cast<std::size_t>(p.slots * edge + 32) * sizeof(float), p,
                round.first_chunk);
        }
        launch_chunk_gradients(op, exec, p, round, round.first_chunk);
    }
}

// Bytes of workspace in backward: of a chunk, and of a state and its gradient.
template <class T>
struct BackwardBytes {
    std::int64_t chunk, state;

    explicit BackwardBytes(const Problem<T>& p) {
        const std::int64_t size = sizeof(T), tile = p.heads * std::int64_t{area};
        chunk = tile * (size * (5 * p.key_tiles + 2 + p.value_tiles) + 4 * p.key_tiles);
        chunk += 2 * 4 * tile * p.key_tiles * p.value_tiles >> walk::group_levels;  // buckets of walks
        state = tile * p.value_tiles * 2 * size * (p.key_tiles + 1);
    }
};

template <class T>
void backward_slice(const char* op, const Exec& exec, Problem<T> p, const Sequences& sequences, bool walks) {
    std::int64_t chunks = 1, states = 0;  // of the longest document; of all
    for (std::int64_t d = 0; d < sequences.count; ++d) {
        chunks = std::max(chunks, chunks_of(sequences, d));
        states += entering_states(0, chunks_of(sequences, d), p.slots);
    }
    const BackwardBytes<T> bytes(p);
    std::int64_t round = whole;
    if (!walks) {
        const std::int64_t state_bytes = p.heads * std::int64_t{area} * p.value_tiles * p.key_tiles * sizeof(T);
        round = ceil_div(chunks, std::min(chunks, std::max<std::int64_t>(1, ceil_div(states * state_bytes, round_bytes))));
    } else if (sequences.count == 1 && chunks * bytes.chunk + states * bytes.state > slice_bytes) {
        const auto fits = [&](std::int64_t count) {
            std::int64_t most = 0;
            for (std::int64_t first = 0; first < chunks; first += count)
                most = std::max(most, entering_states(first, std::min(first + count, chunks), p.slots));
            return count * bytes.chunk + most * bytes.state <= slice_bytes;
        };
        constexpr std::int64_t group = 1 << walk::group_levels;
        round = std::max(group, static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(chunks))));
        while (round > group && !fits(round)) round /= 2;
    }
    const auto layout = layout_of(exec, sequences, p.slots, round);
    p.chunks = layout->chunk_info;
    p.streams = layout->stream_info;
    if constexpr (std::is_same_v<T, Bfloat16>)
        if (walks) return backward_walks(op, exec, p, *layout);
    backward_rounds(op, exec, p, sequences, *layout);
}

}  // namespace

void gated_delta_rule_forward(const Exec& exec, const GatedDeltaRule& args) {
    constexpr const char* op = "gated_delta_rule_forward";
    const OperatorScope scope(op, exec);
    dispatch(op, args.dtype, [&]<class T>(TypeTag<T>) {
        Problem<T> p = make_problem<T>(op, args);
        p.o = static_cast<T*>(args.o);
        const bool walks = has_walks(exec, p, args.o);
        const std::int64_t size = sizeof(T), tile = p.heads * std::int64_t{area};
        const std::int64_t chunk_bytes = tile * (size * (3 * p.key_tiles + 1) + (walks ? 4 * p.value_tiles : 0));
        const std::int64_t state_bytes = 4 * tile * p.key_tiles * p.value_tiles;
        const auto bytes = [&](std::int64_t d) {
            const std::int64_t chunks = chunks_of(args.sequences, d);
            return chunks * chunk_bytes + state_bytes * (walks ? chunks >> walk::group_levels : p.slots);
        };
        for (const auto& slice : slices_of(args.sequences, bytes))
            forward_slice(op, exec, from_token(p, slice.first_token), slice.sequences(), walks);
    });
}

void gated_delta_rule_backward(const Exec& exec, const GatedDeltaRuleBackward& args) {
    constexpr const char* op = "gated_delta_rule_backward";
    const OperatorScope scope(op, exec);
    dispatch(op, args.dtype, [&]<class T>(TypeTag<T>) {
        Problem<T> p = make_problem<T>(op, args);
        p.wide_o = is_wide(sizeof(T), args.d_o, {args.value_width});
        p.d_o = static_cast<const T*>(args.d_o);
        p.dq = static_cast<T*>(args.dq);
        p.dk = static_cast<T*>(args.dk);
        p.dv = static_cast<T*>(args.dv);
        p.dg = static_cast<float*>(args.dg);
        p.dbeta = static_cast<float*>(args.dbeta);
        p.dlevel_scales = static_cast<float*>(args.dlevel_scales);
        p.dq_stride = args.dq_stride;
        p.dk_stride = args.dk_stride;
        p.dv_stride = args.dv_stride;
        const bool walks = p.wide_o && has_walks(exec, p, args.d_o);
        const BackwardBytes<T> of(p);
        // Without walks: states in float32, where each of some rounds starts.
        const std::int64_t master_bytes = 16 * 4 * p.heads * std::int64_t{area} * p.value_tiles * p.key_tiles * p.slots;
        const auto bytes = [&](std::int64_t d) {
            const std::int64_t chunks = chunks_of(args.sequences, d);
            return chunks * of.chunk + (walks ? entering_states(0, chunks, p.slots) * of.state : master_bytes);
        };
        for (const auto& slice : slices_of(args.sequences, bytes))
            backward_slice(op, exec, from_token(p, slice.first_token), slice.sequences(), walks);
    });
}

// ---- recurrent form --------------------------------------------------------------------------------------------------

namespace {

constexpr int recurrent_threads = 256;
constexpr int recurrent_columns = 32;  // value columns of a block, a lane each; warps share the keys

// Grid: batch x heads, value_width / 32.
template <class T>
__global__ void __launch_bounds__(recurrent_threads) recurrent(GatedDeltaRuleRecurrent a) {
    constexpr int warps = recurrent_threads / 32;
    float(*const parts)[warps][recurrent_columns] =  // [2]
        reinterpret_cast<float(*)[warps][recurrent_columns]>(tile::shared_memory());
    const std::int64_t row = blockIdx.x / a.heads, h = blockIdx.x % a.heads;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * recurrent_columns + lane;
    const bool active = column < a.value_width;
    const auto* level_scales = static_cast<const float*>(a.level_scales);
    const int levels = static_cast<int>(a.levels);
    float* const state = static_cast<float*>(a.state) + (row * a.heads + h) * a.key_width * a.value_width + column;
    const std::int64_t level_size = a.batch * a.heads * a.key_width * a.value_width;
    int turn = 0;  // of the two buffers: one barrier is enough between two sums
    const auto sum_of_warps = [&](float x) {
        turn ^= 1;
        parts[turn][warp][lane] = x;
        __syncthreads();
        float sum = 0;
        for (int w = 0; w < warps; ++w) sum += parts[turn][w][lane];
        return sum;
    };
    for (std::int64_t n = 0; n < a.length; ++n) {
        const std::int64_t t = a.position + n, token = row * a.length + n;
        const T* const q = static_cast<const T*>(a.q) + token * a.q_stride + h * a.key_width;
        const T* const k = static_cast<const T*>(a.k) + token * a.k_stride + h * a.key_width;
        const float v =
            active ? tile::to_float(static_cast<const T*>(a.v)[token * a.v_stride + h * a.value_width + column]) : 0.0f;
        const float alpha = expf(static_cast<const float*>(a.g)[token * a.heads + h]);
        const float beta = static_cast<const float*>(a.beta)[token * a.heads + h];
        const auto scale = [&](int level) { return level_scales[(token * a.heads + h) * levels + min(level, levels - 1)]; };

        if (level_scales != nullptr && t > 0 && active) {  // levels 0..ctz(t) move into level ctz(t) + 1
            const int merged = __ffsll(t);
            for (std::int64_t i = warp; i < a.key_width; i += warps) {
                float* const at = state + i * a.value_width;
                float sum = 0;
                for (int l = 0; l < merged; ++l) {
                    sum += at[l * level_size];
                    at[l * level_size] = 0.0f;
                }
                at[merged * level_size] = sum;
            }
        }
        // Live levels: 0 (empty but for what this token adds; everything when linear) and the set bits of t.
        float out = 0;
        for (std::int64_t rest = level_scales != nullptr ? t << 1 | 1 : 1; rest != 0; rest &= rest - 1) {
            const int level = __ffsll(rest) - 1;
            float* const s = state + level * level_size;
            float read = 0;
            if (active && (level > 0 || level_scales == nullptr))
                for (std::int64_t i = warp; i < a.key_width; i += warps) read += tile::to_float(k[i]) * s[i * a.value_width];
            // S <- alpha S + k u',  u = beta (v - alpha S'k), v only in level 0
            const float u = beta * ((level == 0 ? v : 0.0f) - alpha * sum_of_warps(read));
            if (!active) continue;
            float sum = 0;
            for (std::int64_t i = warp; i < a.key_width; i += warps) {
                const float x = alpha * s[i * a.value_width] + tile::to_float(k[i]) * u;
                s[i * a.value_width] = x;
                sum += tile::to_float(q[i]) * x;
            }
            out += level_scales != nullptr ? scale(level) * sum : sum;
        }
        out = sum_of_warps(out);
        if (warp == 0 && active)
            static_cast<T*>(a.o)[(token * a.heads + h) * a.value_width + column] = tile::from_float<T>(out);
    }
}

}  // namespace

void gated_delta_rule_recurrent(const Exec& exec, const GatedDeltaRuleRecurrent& args) {
    constexpr const char* op = "gated_delta_rule_recurrent";
    const OperatorScope scope(op, exec);
    dispatch(op, args.dtype, [&]<class T>(TypeTag<T>) {
        launch(op, exec, recurrent<T>,
               dim3(static_cast<unsigned>(args.batch * args.heads),
                    static_cast<unsigned>(ceil_div(args.value_width, recurrent_columns))),
               dim3(recurrent_threads), 2 * (recurrent_threads / 32) * recurrent_columns * sizeof(float), args);
    });
}

}  // namespace fenwick::kernels::cuda
