// The Mamba-2 scan on CUDA, linear or log-linear. Nothing walks a sequence token by token:
//
//   tiles of 64 tokens, chunks of 4 tiles. Inside a chunk everything is dense: the tile on the diagonal takes the full
//   level mask, a tile below it has one level and its mask is a row scale times a column scale.
//   Across chunks: every chunk's state (one product), a pass that turns them into bucket states in place, and then every
//   tile's output is independent: its live buckets are read as they are, level scale and decay scale the rows of Q S.
//
// Slots. Chunk c of a document owns one slot of state memory. Buckets: the right child of a merge is never read by an
// output, so its parent overwrites it: slot c ends up with the bucket of 2^ctz(c + 1) chunks that ends with chunk c (a
// Fenwick tree), merged from slots c - 1, c - 2, c - 4, ... Chunk c reads, for every set bit j of c, slot ((c >> j) << j) -
// 1 at level 9 + j. Slot c is part of the bucket in slot parent(c) = c + 2^ctz(c + 1), so the gradients run the other way:
// D_c = direct_c + decay D_parent(c), and D_c is also the gradient of chunk c's own state.
// The linear scan is the same with slot c = all chunks up to c, read by chunk c + 1 alone: parent(c) = c + 1.
//
// Decays: gamma is the running sum of g inside a tile; tiles' and chunks' positions are float64 sums from the document's
// start, so that every exponent is a difference <= 0 without cancellation of large float32 numbers.
//
// Sums over heads (dq, dk): a block loops over a slice of a group's heads and writes one float32 partial sum; the slices are
// added in order. No atomics: repeats agree bit for bit.
#include "kernels/ssd.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cuda/ssd_forward.cuh"
#include "kernels/cuda/ssd_pipelined_backward.cuh"
#include "kernels/cuda/ssd_problem.cuh"
#include "kernels/cuda/tables.cuh"

namespace fenwick::kernels::cuda {
namespace {

using namespace ssd_scan;

// ---- decays ----------------------------------------------------------------------------------------------------------

constexpr int decay_heads = 32;  // heads of a block at a time

// gamma and to_tile_end. Grid: tiles, heads / 32. A warp a head, a lane two tokens.
template <class T>
__global__ void __launch_bounds__(threads) tile_decays(Problem<T> p) {
    __shared__ float g[edge][decay_heads + 1];
    const int tile_id = blockIdx.x, first = static_cast<int>(blockIdx.y) * decay_heads;
    const int heads = min(decay_heads, p.heads - first);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const TileInfo info = p.tile_info[tile_id];
#pragma unroll 8
    for (int t = warp; t < edge; t += threads / 32)
        g[t][lane] = t < info.rows && lane < heads ? p.g[(info.token + t) * p.heads + first + lane] : 0.0f;
    __syncthreads();
    for (int h = warp; h < heads; h += threads / 32) {
        const double a = g[2 * lane][h], b = a + g[2 * lane + 1][h];
        double sum = b;
        for (int step = 1; step < 32; step *= 2) {
            const double other = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += other;
        }
        double before = __shfl_up_sync(0xffffffffu, sum, 1);
        if (lane == 0) before = 0;
        const std::int64_t at = p.at(tile_id, first + h) * edge + 2 * lane;
        tile::store_pair(p.gamma + at, static_cast<float>(before + a), static_cast<float>(sum));
        const double end = __shfl_sync(0xffffffffu, sum, 31);
        tile::store_pair(p.to_tile_end + at, __expf(static_cast<float>(end - (before + a))),
                         __expf(static_cast<float>(end - sum)));
    }
}

// start and chunk_end. Grid: documents x heads / 4, a warp each.
template <class T>
__global__ void __launch_bounds__(threads) decay_positions(Problem<T> p) {
    const std::int64_t id = static_cast<std::int64_t>(blockIdx.x) * (threads / 32) + threadIdx.x / 32;
    if (id >= static_cast<std::int64_t>(p.documents) * p.heads) return;
    const int lane = threadIdx.x % 32, h = static_cast<int>(id % p.heads);
    const DocumentInfo doc = p.document_info[id / p.heads];
    const int per_lane = (doc.tiles + 31) / 32;
    const int first = min(lane * per_lane, doc.tiles), last = min(first + per_lane, doc.tiles);
    const auto total = [&](int t) { return static_cast<double>(p.gamma[p.at(doc.tile + t, h) * edge + edge - 1]); };
    double sum = 0;
#pragma unroll 4
    for (int t = first; t < last; ++t) sum += total(t);
    double before = sum;
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    before -= sum;  // rounding of one float64 operation: far below what a float32 decay shows
    if (lane == 0) before = 0;
#pragma unroll 4
    for (int t = first; t < last; ++t) {
        p.start[p.at(doc.tile + t, h)] = before;
        before += total(t);
        if (t % tiles_per_chunk == tiles_per_chunk - 1 || t == doc.tiles - 1)
            p.chunk_end[p.at(doc.slot + t / tiles_per_chunk, h)] = before;
    }
}

// ---- chunk states, and the gradients that outputs give to buckets ----------------------------------------------------

// out[slot, h] = sum over tokens of scale * x y'. States: x = k, y = v, over the slot's chunk. Gradients (Reader): x = q,
// y = do, over the tiles of a job. Grid: slots (or jobs) x heads, value tiles.
template <class T, int KT, bool Reader>
__global__ void __launch_bounds__(threads) outer_products(Problem<T> p) {
    const int h = static_cast<int>(blockIdx.x % p.heads), vt = blockIdx.y, group = h / (p.heads / p.groups),
              tid = threadIdx.x;
    T* const stages = reinterpret_cast<T*>(tile::shared_memory());                  // 2 x (KT + 1) tiles
    float* const weights = reinterpret_cast<float*>(stages + 2 * (KT + 1) * area);  // 2 x 64

    int slot = static_cast<int>(blockIdx.x / p.heads), first, last, level = 0, part = -1;
    if constexpr (Reader) {
        const BucketJob job = p.bucket_jobs[slot];
        slot = job.slot;
        part = job.part;
        level = chunk_levels + trailing_ones(p.slot_info[slot].index);
        first = job.tile;
        last = first + job.tiles;
    } else {
        first = p.slot_info[slot].tile;
        last = first + p.slot_info[slot].tiles;
    }
    const double end = p.chunk_end[p.at(slot, h)];

    const auto fetch = [&](int t) {
        const TileInfo info = p.tile_info[t];
        T* const to = stages + (t & 1) * (KT + 1) * area;
        for (int kt = 0; kt < KT; ++kt) load_keys(p, to + kt * area, Reader, info.token, info.rows, group, kt);
        if constexpr (Reader) {
            load_output_grad(p, to + KT * area, info.token, info.rows, h, vt);
        } else {
            load_values(p, to + KT * area, info.token, info.rows, h, vt);
        }
        tile::commit_async();
    };
    // The weight of row tid: loads now, arithmetic later, so that the product runs in between.
    float gamma = 0, factor = 0, between = 0;
    const auto fetch_weight = [&](int t) {
        if (tid >= edge) return;
        gamma = p.gamma[p.at(t, h) * edge + tid];
        if constexpr (Reader) {
            const TileInfo info = p.tile_info[t];
            factor = tid < info.rows ? p.scale(info.token + tid, h, level) : 0.0f;
            between = static_cast<float>(p.start[p.at(t, h)] - end);
        } else {
            between = static_cast<float>(end - p.start[p.at(t, h)]);
        }
    };
    const auto finish_weight = [&](int t) {
        if (tid >= edge) return;
        float* const to = weights + (t & 1) * edge + tid;
        if constexpr (Reader) {
            *to = factor * __expf(fminf(between, 0.0f) + gamma);
        } else {
            *to = __expf(fminf(between - gamma, 0.0f));
        }
    };

    Accumulator acc[KT];
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) acc[kt].clear();
    if (first < last) {
        fetch(first);
        fetch_weight(first);
        finish_weight(first);
    }
    for (int t = first; t < last; ++t) {
        wait_for_tiles();
        if (t + 1 < last) {
            fetch(t + 1);
            fetch_weight(t + 1);
        }
        const T* const from = stages + (t & 1) * (KT + 1) * area;
        const float* const w = weights + (t & 1) * edge;
        const auto scale = [w](int, int s, float2 x) { return make_float2(x.x * w[s], x.y * w[s + 1]); };
#pragma unroll
        for (int kt = 0; kt < KT; ++kt) warpgroup::multiply<true, false>(acc[kt], from + kt * area, from + KT * area, scale);
        if (t + 1 < last) finish_weight(t + 1);
    }
    const bool aligned = p.value_width % 2 == 0;
    if (part < 0) {
        T* const out = (Reader ? p.dstates : p.states) + p.state_at(slot, h) + vt * edge;
#pragma unroll
        for (int kt = 0; kt < KT; ++kt)
            store_clipped(acc[kt], out + static_cast<std::int64_t>(kt) * edge * p.value_width, p.value_width,
                          p.key_width - kt * edge, p.value_width - vt * edge, aligned);
    } else {
        float* const out = p.bucket_parts + p.state_at(part, h) + vt * edge;
#pragma unroll
        for (int kt = 0; kt < KT; ++kt)
            store_clipped(acc[kt], out + static_cast<std::int64_t>(kt) * edge * p.value_width, p.value_width,
                          p.key_width - kt * edge, p.value_width - vt * edge, aligned);
    }
}

// ---- the tree --------------------------------------------------------------------------------------------------------

constexpr int flat_threads = 128;

// W elements as they lie in memory: one, or a multiple of 16 bytes.
template <class T, int W>
struct Words {
    static_assert(W * sizeof(T) % 16 == 0);
    struct alignas(16) Quad {
        std::uint32_t x[4];
    };
    Quad quads[W * sizeof(T) / 16];
    __device__ __forceinline__ void load(const T* from) {
#pragma unroll
        for (int n = 0; n < static_cast<int>(W * sizeof(T) / 16); ++n) quads[n] = reinterpret_cast<const Quad*>(from)[n];
    }
    __device__ __forceinline__ float operator[](int i) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(quads[i / 4].x[i % 4]);
        } else {
            const float2 pair = tile::unpack(quads[i / 8].x[i % 8 / 2]);
            return i % 2 == 0 ? pair.x : pair.y;
        }
    }
    static __device__ __forceinline__ void store(T* to, const float (&values)[W]) {
        std::uint32_t words[W * sizeof(T) / 4];
        if constexpr (sizeof(T) == 4) {
            memcpy(words, values, sizeof(words));
        } else {
#pragma unroll
            for (int i = 0; i < W; i += 2) words[i / 2] = tile::pack(values[i], values[i + 1]);
        }
#pragma unroll
        for (int n = 0; n < static_cast<int>(W * sizeof(T) / 16); ++n)
            tile::store_16(to + n * 16 / sizeof(T), words + n * 4);
    }
};
template <class T>
struct Words<T, 1> {
    T x;
    __device__ __forceinline__ void load(const T* from) { x = *from; }
    __device__ __forceinline__ float operator[](int) const { return tile::to_float(x); }
    static __device__ __forceinline__ void store(T* to, const float (&values)[1]) { *to = tile::from_float<T>(values[0]); }
};

// Chunk states -> bucket states (or running states), in place. A thread keeps W elements and walks its document's chunks,
// four at a time: the next four are on their way. Grid: documents x heads x ceil(K V / (W threads)).
template <class T, int W>
__global__ void __launch_bounds__(flat_threads) merge_states(Problem<T> p, int blocks) {
    const std::int64_t row = blockIdx.x / blocks;
    const int block = blockIdx.x % blocks, h = static_cast<int>(row % p.heads);
    const DocumentInfo doc = p.document_info[row / p.heads];
    const std::int64_t size = static_cast<std::int64_t>(p.key_width) * p.value_width;
    const std::int64_t e = (static_cast<std::int64_t>(block) * flat_threads + threadIdx.x) * W;
    if (e >= size) return;
    using Part = Words<T, W>;
    const auto at = [&](int c) { return p.states + p.state_at(doc.slot + c, h) + e; };
    const auto end = [&](int c) { return p.chunk_end[p.at(doc.slot + c, h)]; };
    // x = factor x + decay part
    const auto add = [](float(&x)[W], float factor, float decay, const Part& part) {
#pragma unroll
        for (int i = 0; i < W; ++i) x[i] = factor * x[i] + decay * part[i];
    };
    const int chunks = doc.chunks - (p.skip_last ? 1 : 0);
    constexpr int step = 4;
    Part next[step];
    double next_end[step];
    const auto fetch = [&](int first) {
#pragma unroll
        for (int n = 0; n < step; ++n) {
            if (first + n < chunks) {
                next[n].load(at(first + n));
                next_end[n] = end(first + n);
            }
        }
    };
    fetch(0);
    float x[W] = {};
    double before = 0;
    for (int base = 0; base < chunks; base += step) {
        Part now[step];
        double now_end[step];
#pragma unroll
        for (int n = 0; n < step; ++n) {
            now[n] = next[n];
            now_end[n] = next_end[n];
        }
        fetch(base + step);
        const auto decay = [&](double from, int to) { return __expf(static_cast<float>(now_end[to] - from)); };
        if (!p.log_linear) {
#pragma unroll
            for (int n = 0; n < step; ++n) {
                if (base + n >= chunks) break;
                const float factor = decay(before, n);
                before = now_end[n];
                add(x, factor, 1.0f, now[n]);
                if (base + n > 0) Part::store(at(base + n), x);
            }
            continue;
        }
        if (base + 1 >= chunks) break;
#pragma unroll
        for (int i = 0; i < W; ++i) x[i] = 0;
        add(x, 1.0f, 1.0f, now[1]);
        add(x, 1.0f, decay(now_end[0], 1), now[0]);
        Part::store(at(base + 1), x);
        if (base + 3 >= chunks) break;
        add(x, decay(now_end[1], 3), 1.0f, now[3]);
        add(x, 1.0f, decay(now_end[2], 3), now[2]);
        const int merges = trailing_ones(base + 3);
        for (int j = 2; j < merges; ++j) {
            const int other = base + 3 - (1 << j);
            Part left;
            left.load(at(other));
            add(x, 1.0f, decay(end(other), 3), left);
        }
        Part::store(at(base + 3), x);
    }
}

// Bucket gradients -> gradients of everything that is part of the bucket, in place (the head of this file), and the partial
// sums `crossing`: <bucket, gradient from its parents>.
template <class T, int W>
__global__ void __launch_bounds__(flat_threads) spread_gradients(Problem<T> p, int blocks) {
    const std::int64_t row = blockIdx.x / blocks;
    const int block = blockIdx.x % blocks, h = static_cast<int>(row % p.heads);
    const DocumentInfo doc = p.document_info[row / p.heads];
    const std::int64_t size = static_cast<std::int64_t>(p.key_width) * p.value_width;
    const std::int64_t e = (static_cast<std::int64_t>(block) * flat_threads + threadIdx.x) * W;
    const bool active = e < size;
    const int lane = threadIdx.x % 32, warp = block * (flat_threads / 32) + threadIdx.x / 32;
    const auto at = [&](T* base, int c) { return base + p.state_at(doc.slot + c, h) + e; };
    const auto parent_of = [&](int c) { return p.log_linear ? c + (1 << trailing_ones(c)) : c + 1; };
    float d[W];
    Words<T, W> next_state{}, next_grad{}, next_parent{};
    float next_parts[W];
#pragma unroll
    for (int i = 0; i < W; ++i) d[i] = next_parts[i] = 0;
    const auto end = [&](int c) { return p.chunk_end[p.at(doc.slot + c, h)]; };
    double next_end = 0, next_parent_end = 0;
    SlotInfo next_slot = p.slot_info[doc.slot + doc.chunks - 1];
    // What outputs gave to the bucket of chunk c, its state, and its parent's gradient if that is not the one just computed;
    // on their way while the chunk behind it is worked on.
    const auto fetch = [&](int c) {
        const SlotInfo slot = next_slot;
        if (c > 0) next_slot = p.slot_info[doc.slot + c - 1];
        const int parent = parent_of(c);
        if (parent < doc.chunks) next_state.load(at(p.states, c));  // nobody has written the state of a last chunk
        next_end = end(c);
        if (parent < doc.chunks) next_parent_end = end(parent);
        if (parent > c + 1 && parent < doc.chunks) next_parent.load(at(p.dstates, parent));
        if (slot.parts == 0) next_grad.load(at(p.dstates, c));
        if (slot.parts > 0) next_grad = {};
#pragma unroll
        for (int i = 0; i < W; ++i) next_parts[i] = 0;
        for (int part = 0; part < slot.parts; ++part) {
            float add[W];
            load(add, p.bucket_parts + p.state_at(slot.part + part, h) + e);
#pragma unroll
            for (int i = 0; i < W; ++i) next_parts[i] += add[i];
        }
    };
    if (active) fetch(doc.chunks - 1);
    for (int c = doc.chunks - 1; c >= 0; --c) {
        float sum = 0;
        if (active) {
            const int parent = parent_of(c);
            const float decay = parent < doc.chunks ? __expf(static_cast<float>(next_parent_end - next_end)) : 0.0f;
#pragma unroll
            for (int i = 0; i < W; ++i) {
                const float from_parent = decay * (parent == c + 1 ? d[i] : next_parent[i]);
                d[i] = next_grad[i] + next_parts[i] + from_parent;
                if (parent < doc.chunks) sum += next_state[i] * from_parent;
            }
            if (c > 0) fetch(c - 1);
            Words<T, W>::store(at(p.dstates, c), d);
        }
        sum = team_sum(sum);
        if (lane == 0) p.crossing[p.at(doc.slot + c, h) * p.flow_warps + warp] = sum;
    }
}

// ---- outputs ---------------------------------------------------------------------------------------------------------

// q k' of a tile against tile `other` of the same group, into shared memory; K transposed-last order, key_tiles steps.
// `left` is the tile whose rows come first, its key_tiles tiles lie in `resident`.
template <class T>
__device__ __forceinline__ void scores(const Problem<T>& p, T* out, const T* resident, T* stage, bool right_is_query,
                                       std::int64_t token, int rows, int group) {
    Accumulator acc;
    acc.clear();
    for (int kt = 0; kt < p.key_tiles; ++kt) {
        __syncthreads();
        load_keys(p, stage, right_is_query, token, rows, group, kt);
        tile::commit_async();
        wait_for_tiles();
        warpgroup::multiply<false, true>(acc, resident + kt * area, stage, Unscaled{});
    }
    acc.store(out);
}

inline std::size_t output_shared(int key_tiles, int max_live, std::size_t size) {
    return (key_tiles + tiles_per_chunk + 2) * area * size +
           (1 + diagonal_levels + 2 * (tiles_per_chunk - 1) + max_live) * edge * sizeof(float);
}

// Grid: tiles, head slices of all groups, value tiles.
template <class T>
__global__ void __launch_bounds__(threads, 3) outputs(Problem<T> p) {
    const int tile_id = blockIdx.x, vt = blockIdx.z, tid = threadIdx.x;
    const HeadRange range = head_range(p);
    const TileInfo info = p.tile_info[tile_id];
    const int i = info.index % tiles_per_chunk, c = info.index / tiles_per_chunk;
    const int live = live_count(p, c), key_tiles = p.key_tiles;
    T* const queries = reinterpret_cast<T*>(tile::shared_memory());  // key_tiles tiles
    T* const strip = queries + key_tiles * area;                     // scores against tiles 0..i of the chunk
    T* const stages = strip + tiles_per_chunk * area;                // 2 tiles
    float* const gamma = reinterpret_cast<float*>(stages + 2 * area);
    float* const scales = gamma + edge;                      // [7][64]
    float* const columns = scales + diagonal_levels * edge;  // [3][64]: decay of tokens of tile j to their tile's end
    float* const rows =
        columns + (tiles_per_chunk - 1) * edge;  // [i + live][64]: level scale and decay of this tile's tokens

    for (int kt = 0; kt < key_tiles; ++kt) load_keys(p, queries + kt * area, true, info.token, info.rows, range.group, kt);
    for (int j = 0; j <= i; ++j)
        scores(p, strip + j * area, queries, stages, false, info.token - (i - j) * edge, j == i ? info.rows : edge,
               range.group);
    __syncthreads();

    // The next item to fetch, in the order of the products: counters, since a division would delay every copy.
    struct {
        int head, tile, live, kt, stage;
    } next{0, 0, 0, 0, 0};
    const auto fetch = [&] {
        if (next.head == range.count) return;
        const int h = range.first + next.head;
        T* const to = stages + next.stage * area;
        next.stage ^= 1;
        if (next.tile <= i) {
            load_values(p, to, info.token - (i - next.tile) * edge, next.tile == i ? info.rows : edge, h, vt);
            ++next.tile;
        } else {
            load_state(p, to, p.states, info.slot - live_bucket(p, c, next.live).back, h, next.kt, vt);
            if (++next.kt == key_tiles) {
                next.kt = 0;
                ++next.live;
            }
        }
        tile::commit_async();
        if (next.tile > i && next.live == live) {
            next.tile = next.live = 0;
            ++next.head;
        }
    };
    fetch();
    int n = 0;
    for (int head = 0; head < range.count; ++head) {
        const int h = range.first + head;
        Accumulator acc, part;
        acc.clear();
        // The scales of this head: nobody reads the last head's any more behind this barrier.
        wait_for_tiles();
        load_diagonal(p, tile_id, info, h, gamma, scales);
        for (int x = tid; x < i * edge; x += threads) {
            const int j = x / edge, s = x % edge, other = tile_id - (i - j);
            columns[x] = decay_to_tile_end(p, other, h, s);
            rows[x] = s < info.rows ? p.scale(info.token + s, h, tile_bits + bits_of(i ^ j)) *
                                          decay_into_tile(p, tile_id, h, tile_end(p, other, h), s)
                                    : 0.0f;
        }
        for (int x = tid; x < live * edge; x += threads) {
            const int t = x % edge;
            const Live bucket = live_bucket(p, c, x / edge);
            const double from = p.chunk_end[p.at(info.slot - bucket.back, h)];
            rows[i * edge + x] =
                t < info.rows ? p.scale(info.token + t, h, bucket.level) * decay_into_tile(p, tile_id, h, from, t) : 0.0f;
        }
        const auto add_scaled = [&](const float* by) {
            const float factor[2] = {by[warpgroup::first_row()], by[warpgroup::first_row() + 8]};
            acc.for_pairs_with(part, [&](int, int, float& a, float& b, int local, float x, float y) {
                a += factor[local] * x;
                b += factor[local] * y;
            });
        };
        for (int j = 0; j <= i; ++j, ++n) {
            wait_for_tiles();
            fetch();
            const T* const stage = stages + (n & 1) * area;
            if (j < i) {
                part.clear();
                const float* const w = columns + j * edge;
                warpgroup::multiply<false, false>(part, strip + j * area, stage, [w](int, int s, float2 x) {
                    return make_float2(x.x * w[s], x.y * w[s + 1]);
                });
                add_scaled(rows + j * edge);
            } else {
                const DiagonalMask mask{gamma, scales};
                warpgroup::multiply<false, false>(
                    acc, strip + j * area, stage, [mask](int t, int s, float2 x) { return mask.sources(t, s, x); }, 0,
                    (tid / 32 + 1) * 16);
            }
        }
        for (int l = 0; l < live; ++l) {
            part.clear();
            for (int kt = 0; kt < key_tiles; ++kt, ++n) {
                wait_for_tiles();
                fetch();
                warpgroup::multiply<false, false>(part, queries + kt * area, stages + (n & 1) * area, Unscaled{});
            }
            add_scaled(rows + (i + l) * edge);
        }
        const std::int64_t stride = static_cast<std::int64_t>(p.heads) * p.value_width;
        store_clipped(acc, p.o + info.token * stride + static_cast<std::int64_t>(h) * p.value_width + vt * edge, stride,
                      info.rows, p.value_width - vt * edge, p.paired_o);
    }
}

// ---- backward --------------------------------------------------------------------------------------------------------

inline std::size_t score_gradient_shared(std::size_t size) {
    return 6 * area * size + (1 + diagonal_levels + 4 + 8) * edge * sizeof(float);
}

// Inside a chunk: gradients of the scores q k' summed over a slice's heads, of the level scales 0..8, and given_near.
// Diagonal: the tile with itself. Otherwise level 7 (one tile before it) or 8 (two).
// Grid: tiles x (Diagonal ? 1 : 2), head slices of all groups.
template <class T, bool Diagonal>
__global__ void __launch_bounds__(threads, 3) score_gradients(Problem<T> p) {
    const int tile_id = Diagonal ? blockIdx.x : blockIdx.x / 2, tid = threadIdx.x;
    const HeadRange range = head_range(p);
    const TileInfo info = p.tile_info[tile_id];
    const int i = info.index % tiles_per_chunk;
    const int bit = Diagonal ? 0 : blockIdx.x % 2;
    if (!Diagonal && (i >> bit & 1) == 0) return;
    const int others = Diagonal ? 1 : 1 << bit;                         // tiles of the bucket
    const int first = Diagonal ? i : ((i >> bit) << bit) - (1 << bit);  // its first, in the chunk
    const int level = diagonal_levels + bit;

    T* const strip = reinterpret_cast<T*>(tile::shared_memory());  // 2 tiles
    T* const stages = strip + 2 * area;                            // 2 x (do, v)
    float* const gamma = reinterpret_cast<float*>(stages + 4 * area);
    float* const scales = gamma + edge;
    float* const columns = scales + diagonal_levels * edge;  // [2][64]
    float* const rows = columns + 2 * edge;                  // [2][64]: decay without the level scale
    float* const sums = rows + 2 * edge;                     // [2][4][64]: by column, of each warp

    // Scores: q of this tile stays in stage 0, keys pass through stage 1.
    for (int x = 0; x < others; ++x) {
        Accumulator acc;
        acc.clear();
        for (int kt = 0; kt < p.key_tiles; ++kt) {
            __syncthreads();
            load_keys(p, stages, true, info.token, info.rows, range.group, kt);
            load_keys(p, stages + area, false, info.token - (i - first - x) * edge, Diagonal ? info.rows : edge, range.group,
                      kt);
            tile::commit_async();
            wait_for_tiles();
            warpgroup::multiply<false, true>(acc, stages, stages + area, Unscaled{});
        }
        acc.store(strip + x * area);
    }
    __syncthreads();

    struct {
        int head, x, vt, stage;
    } next{0, 0, 0, 0};
    const auto fetch = [&] {
        if (next.head == range.count) return;
        const int h = range.first + next.head;
        T* const to = stages + next.stage * 2 * area;
        next.stage ^= 1;
        load_output_grad(p, to, info.token, info.rows, h, next.vt);
        load_values(p, to + area, info.token - (i - first - next.x) * edge, Diagonal ? info.rows : edge, h, next.vt);
        tile::commit_async();
        if (++next.vt < p.value_tiles) return;
        next.vt = 0;
        if (++next.x < others) return;
        next.x = 0;
        ++next.head;
    };
    constexpr int most = Diagonal ? 1 : 2;
    Accumulator total[most];
#pragma unroll
    for (int x = 0; x < most; ++x) total[x].clear();
    fetch();
    int n = 0;
    // given_near of the product before, once a barrier has made its sums visible.
    float* pending = nullptr;
    const float* pending_sums = nullptr;
    const auto flush = [&] {
        if (pending != nullptr && tid < edge)
            pending[tid] =
                pending_sums[tid] + pending_sums[edge + tid] + pending_sums[2 * edge + tid] + pending_sums[3 * edge + tid];
        pending = nullptr;
    };
    for (int head = 0; head < range.count; ++head) {
        const int h = range.first + head;
        wait_for_tiles();
        flush();
        if constexpr (Diagonal) {
            load_diagonal(p, tile_id, info, h, gamma, scales);
        } else {
            for (int x = tid; x < others * edge; x += threads) {
                const int s = x % edge, other = tile_id - (i - first - x / edge);
                columns[x] = decay_to_tile_end(p, other, h, s);
                rows[x] = s < info.rows ? decay_into_tile(p, tile_id, h, tile_end(p, other, h), s) : 0.0f;
            }
            if (tid < edge) scales[tid] = tid < info.rows ? p.scale(info.token + tid, h, level) : 0.0f;
            prefetch_scales(p, info, h);
        }
        float row_sums[2] = {0, 0};
#pragma unroll
        for (int x = 0; x < most; ++x) {
            if (x >= others) continue;
            Accumulator grad;  // do v'
            grad.clear();
            for (int vt = 0; vt < p.value_tiles; ++vt, ++n) {
                wait_for_tiles();
                flush();
                fetch();
                const T* const stage = stages + (n & 1) * 2 * area;
                warpgroup::multiply<false, true>(grad, stage, stage + area, Unscaled{});
            }
            // The terms take the place of do v'.
            const T* const score = strip + x * area;
            if constexpr (Diagonal) {
                // Rows lie in the block of 8 columns `block`, the same for a warp: blocks before it have one level each.
                const int lane = tid % 32, column = lane % 4 * 2;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int block = tid / 32 * 2 + half, t = block * 8 + lane / 4;
                    float level_sums[diagonal_levels];
#pragma unroll
                    for (int l = 0; l < diagonal_levels; ++l) level_sums[l] = 0;
                    const float gamma_t = gamma[t];
#pragma unroll
                    for (int j = 0; j < edge / 8; ++j) {
                        float* const at = grad.x[j] + 2 * half;
                        float* const to = total[0].x[j] + 2 * half;
                        if (j > block) {
                            at[0] = at[1] = 0;
                            continue;
                        }
                        const int s = j * 8 + column;
                        const float2 q_k = tile::load_pair(score + tile::offset<T>(t, s));
                        if (j == block) {
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int distance = t ^ (s + e), l = bits_of(distance);
                                float d = 0, term = 0;
                                if (s + e <= t) {
                                    d = at[e] * __expf(gamma_t - gamma[s + e]);
                                    term = d * (e == 0 ? q_k.x : q_k.y);
                                    const float scale = scales[l * edge + t];
                                    to[e] += d * scale;
                                    at[e] = distance == 0 ? 0.0f : term * scale;
                                } else {
                                    at[e] = 0;
                                }
#pragma unroll
                                for (int x3 = 0; x3 < 4; ++x3) level_sums[x3] += l == x3 ? term : 0.0f;
                            }
                        } else {
                            const int l = 3 + bits_of(block ^ j);
                            const float scale = scales[l * edge + t];
                            const float da = at[0] * __expf(gamma_t - gamma[s]), db = at[1] * __expf(gamma_t - gamma[s + 1]);
                            const float a = da * q_k.x, b = db * q_k.y;
                            to[0] += da * scale;
                            to[1] += db * scale;
                            at[0] = a * scale;
                            at[1] = b * scale;
#pragma unroll
                            for (int x3 = 4; x3 < diagonal_levels; ++x3) level_sums[x3] += l == x3 ? a + b : 0.0f;
                        }
                    }
#pragma unroll
                    for (int l = 0; l < diagonal_levels; ++l) {
                        level_sums[l] += __shfl_xor_sync(0xffffffffu, level_sums[l], 1);
                        level_sums[l] += __shfl_xor_sync(0xffffffffu, level_sums[l], 2);
                        if (lane % 4 == l % 4) p.dscales_at(tile_id, h, l)[t] = level_sums[l];
                    }
                }
            } else {
                int pair = 0;
                grad.for_pairs([&](int t, int s, float& a, float& b, int local) {
                    const float2 q_k = tile::load_pair(score + tile::offset<T>(t, s));
                    float* const to = &total[x].x[pair % 8][pair / 8 * 2];
                    ++pair;
                    const float da = a * columns[x * edge + s] * rows[x * edge + t];
                    const float db = b * columns[x * edge + s + 1] * rows[x * edge + t];
                    const float scale = scales[t];
                    a = da * q_k.x;
                    b = db * q_k.y;
                    row_sums[local] += a + b;
                    to[0] += da * scale;
                    to[1] += db * scale;
                    a *= scale;
                    b *= scale;
                });
            }
            // Two sets of sums: others may still be reading those of the product before.
            grad.store_column_sums(sums + (x * 4 + tid / 32) * edge);
            pending_sums = sums + x * 4 * edge;
            pending = p.given_near + (p.at(tile_id, h) * tiles_per_chunk + first + x) * edge;
        }
        if constexpr (!Diagonal) {
            warpgroup::sum_over_columns(row_sums);
            if (tid % 4 == 0) {
                p.dscales_at(tile_id, h, level)[warpgroup::first_row()] = row_sums[0];
                p.dscales_at(tile_id, h, level)[warpgroup::first_row() + 8] = row_sums[1];
            }
        }
    }
    __syncthreads();
    flush();
    float* const out =
        p.score_grad + ((static_cast<std::int64_t>(blockIdx.y) * p.tiles + tile_id) * tiles_per_chunk + first) * area;
#pragma unroll
    for (int x = 0; x < most; ++x)
        if (x < others) store_clipped(total[x], out + x * area, edge, edge, edge, true);
}

// `buffers` of do: 2, or 1 where two do not fit.
inline std::size_t query_gradient_shared(int key_tiles, int value_tiles, int buffers, int max_live, std::size_t size) {
    return (key_tiles + buffers * value_tiles + 2) * area * size + 2 * max_live * edge * sizeof(float);
}

// Across chunks: dq += (scale * do) S' summed over buckets and a slice's heads, and the gradients of the level scales.
// Grid: tiles, head slices of all groups.
template <class T, int KT>
__global__ void __launch_bounds__(threads) query_gradients(Problem<T> p, int buffers) {
    const int tile_id = blockIdx.x, tid = threadIdx.x;
    const HeadRange range = head_range(p);
    const TileInfo info = p.tile_info[tile_id];
    const int c = info.index / tiles_per_chunk, live = live_count(p, c), value_tiles = p.value_tiles;
    T* const queries = reinterpret_cast<T*>(tile::shared_memory());     // KT tiles
    T* const grads = queries + KT * area;                               // buffers x value_tiles tiles of do
    T* const stages = grads + buffers * value_tiles * area;             // 2 tiles
    float* const decays = reinterpret_cast<float*>(stages + 2 * area);  // [live][64]
    float* const rows = decays + p.max_live * edge;                     // [live][64]: times the level scale

    Accumulator total[KT];
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) total[kt].clear();
    const int heads = live > 0 ? range.count : 0;
    const auto fetch_grads = [&](int head) {
        for (int x = 0; x < value_tiles; ++x)
            load_output_grad(p, grads + (head & (buffers - 1)) * value_tiles * area + x * area, info.token, info.rows,
                             range.first + head, x);
    };
    struct {
        int head, live, kt, vt, stage;
    } next{0, 0, 0, 0, 0};
    const auto fetch = [&] {
        if (next.head == heads) return;
        if (next.live == 0 && next.kt == 0 && next.vt == 0 && buffers == 2) fetch_grads(next.head);
        load_state(p, stages + next.stage * area, p.states, info.slot - live_bucket(p, c, next.live).back,
                   range.first + next.head, next.kt, next.vt);
        next.stage ^= 1;
        tile::commit_async();
        if (++next.vt < value_tiles) return;
        next.vt = 0;
        if (++next.kt < KT) return;
        next.kt = 0;
        if (++next.live < live) return;
        next.live = 0;
        ++next.head;
    };
    if (heads > 0) {
        for (int kt = 0; kt < KT; ++kt) load_keys(p, queries + kt * area, true, info.token, info.rows, range.group, kt);
        fetch();
    }
    int n = 0;
    for (int head = 0; head < heads; ++head) {
        const int h = range.first + head;
        wait_for_tiles();
        if (buffers == 1) {
            fetch_grads(head);
            tile::commit_async();
        }
        for (int x = tid; x < live * edge; x += threads) {
            const int t = x % edge;
            const Live bucket = live_bucket(p, c, x / edge);
            const float decay =
                t < info.rows ? decay_into_tile(p, tile_id, h, p.chunk_end[p.at(info.slot - bucket.back, h)], t) : 0.0f;
            decays[x] = decay;
            rows[x] = t < info.rows ? decay * p.scale(info.token + t, h, bucket.level) : 0.0f;
        }
        prefetch_scales(p, info, h);
        for (int l = 0; l < live; ++l) {
            float row_sums[2] = {0, 0};
            float factor[2];
#pragma unroll
            for (int kt = 0; kt < KT; ++kt) {
                Accumulator part;  // do S'
                part.clear();
                for (int vt = 0; vt < value_tiles; ++vt, ++n) {
                    wait_for_tiles();
                    fetch();
                    warpgroup::multiply<false, true>(part, grads + ((head & (buffers - 1)) * value_tiles + vt) * area,
                                                     stages + (n & 1) * area, Unscaled{});
                }
                if (kt == 0) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) factor[r] = rows[l * edge + warpgroup::first_row() + r * 8];
                }
                int pair = 0;
                part.for_pairs([&](int t, int k, float& a, float& b, int local) {
                    const float2 q = tile::load_pair(queries + kt * area + tile::offset<T>(t, k));
                    row_sums[local] += a * q.x + b * q.y;
                    float* const to = &total[kt].x[pair % 8][pair / 8 * 2];
                    ++pair;
                    to[0] += factor[local] * a;
                    to[1] += factor[local] * b;
                });
            }
            warpgroup::sum_over_columns(row_sums);
            if (tid % 4 == 0) {
                float* const to = p.dscales_at(tile_id, h, live_bucket(p, c, l).level);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int t = warpgroup::first_row() + r * 8;
                    to[t] = row_sums[r] * decays[l * edge + t];
                }
            }
        }
    }
    float* const out = p.dq_parts + (static_cast<std::int64_t>(blockIdx.y) * p.tiles + tile_id) * KT * area;
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) store_clipped(total[kt], out + kt * area, edge, edge, edge, true);
}

inline std::size_t key_gradient_shared(int key_tiles, std::size_t size) {
    return (key_tiles + tiles_per_chunk + 1 + 2) * area * size +
           (1 + diagonal_levels + 1 + (tiles_per_chunk - 1)) * edge * sizeof(float);
}

// dv of every head, dk from the chunk states summed over a slice's heads, and given_far.
// Grid: tiles, head slices of all groups.
template <class T, int KT>
__global__ void __launch_bounds__(threads, sizeof(T) == 2 && KT <= 2 ? 3 : 1) key_gradients(Problem<T> p) {
    const int tile_id = blockIdx.x, tid = threadIdx.x;
    const HeadRange range = head_range(p);
    const TileInfo info = p.tile_info[tile_id];
    const int j = info.index % tiles_per_chunk, value_tiles = p.value_tiles;
    const int later = min(tiles_per_chunk - j, info.document_tiles - info.index);  // tiles of the chunk from this one on
    const int last_rows = p.tile_info[tile_id + later - 1].rows;
    T* const keys = reinterpret_cast<T*>(tile::shared_memory());  // KT tiles
    T* const strip = keys + KT * area;                            // k q' against tiles j .. j + later - 1
    T* const value = strip + tiles_per_chunk * area;              // 1 tile
    T* const stages = value + area;                               // 2 tiles
    float* const gamma = reinterpret_cast<float*>(stages + 2 * area);
    float* const scales = gamma + edge;                     // [7][64]
    float* const to_end = scales + diagonal_levels * edge;  // [64]: decay to the tile's end
    float* const later_rows = to_end + edge;                // [3][64]: level scale and decay of later tiles' tokens

    for (int kt = 0; kt < KT; ++kt) load_keys(p, keys + kt * area, false, info.token, info.rows, range.group, kt);
    for (int m = 0; m < later; ++m)
        scores(p, strip + m * area, keys, stages, true, info.token + m * edge, m == later - 1 ? last_rows : edge,
               range.group);
    __syncthreads();

    // A unit is a head and a value tile; its items: KT tiles of the state's gradient, then do of the tiles, last one first.
    // The next unit's values replace this one's while its last item is worked on: they are read before that.
    const int per_unit = KT + later;
    struct {
        int head, vt, item, stage;
    } next{0, 0, 0, 0};
    const auto fetch = [&] {
        if (next.head == range.count) return;
        const int h = range.first + next.head;
        T* const to = stages + next.stage * area;
        next.stage ^= 1;
        if (next.item == 0) load_values(p, value, info.token, info.rows, h, next.vt);
        if (next.item < KT) {
            load_state(p, to, p.dstates, info.slot, h, next.item, next.vt);
        } else {
            const int m = per_unit - 1 - next.item;
            load_output_grad(p, to, info.token + m * edge, m == later - 1 ? last_rows : edge, h, next.vt);
        }
        tile::commit_async();
        if (++next.item < per_unit) return;
        next.item = 0;
        if (++next.vt < value_tiles) return;
        next.vt = 0;
        ++next.head;
    };
    Accumulator total[KT];
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) total[kt].clear();
    float row_sums[2] = {0, 0};
    fetch();
    int n = 0;
    for (int head = 0, vt = 0; head < range.count; head += vt + 1 == value_tiles, vt = vt + 1 == value_tiles ? 0 : vt + 1) {
        const int h = range.first + head;
        wait_for_tiles();
        load_diagonal(p, tile_id, info, h, gamma, scales);
        if (tid < edge) to_end[tid] = decay_to_tile_end(p, tile_id, h, tid);
        const double end = tile_end(p, tile_id, h);
        for (int x = tid; x < (later - 1) * edge; x += threads) {
            const int m = x / edge + 1, t = x % edge;
            const bool inside = t < (m == later - 1 ? last_rows : edge);
            later_rows[x] = inside ? p.scale(info.token + m * edge + t, h, tile_bits + bits_of(j ^ (j + m))) *
                                         decay_into_tile(p, tile_id + m, h, end, t)
                                   : 0.0f;
        }
        // Decay from the tile's end to the chunk's: the chunk's state is taken there.
        const float rest = __expf(fminf(static_cast<float>(p.chunk_end[p.at(info.slot, h)] - end), 0.0f));
        Accumulator acc;
        acc.clear();
#pragma unroll
        for (int kt = 0; kt < KT; ++kt) {
            wait_for_tiles();
            fetch();
            const T* const stage = stages + (n & 1) * area;
            warpgroup::multiply<false, false>(acc, keys + kt * area, stage, Unscaled{});
            warpgroup::multiply<false, true>(total[kt], value, stage, [to_end, rest](int s, int, float2 x) {
                const float w = to_end[s] * rest;
                return make_float2(x.x * w, x.y * w);
            });
            ++n;
        }
        acc.for_pairs([&](int s, int col, float& a, float& b, int local) {
            const float2 v = tile::load_pair(value + tile::offset<T>(s, col));
            a *= rest;
            b *= rest;
            row_sums[local] += v.x * a + v.y * b;
        });
        for (int m = later - 1; m > 0; --m, ++n) {
            wait_for_tiles();
            fetch();
            const float* const w = later_rows + (m - 1) * edge;
            warpgroup::multiply<false, false>(acc, strip + m * area, stages + (n & 1) * area,
                                              [w](int, int t, float2 x) { return make_float2(x.x * w[t], x.y * w[t + 1]); });
        }
        acc.for_pairs([&](int s, int, float& a, float& b, int) {
            a *= to_end[s];
            b *= to_end[s];
        });
        wait_for_tiles();
        fetch();
        {
            const DiagonalMask mask{gamma, scales};
            warpgroup::multiply<false, false>(
                acc, strip, stages + (n & 1) * area, [mask](int s, int t, float2 x) { return mask.readers(t, s, x); },
                tid / 32 * 16);
        }
        ++n;
        store_clipped(acc, p.dv + info.token * p.dv_stride + static_cast<std::int64_t>(h) * p.value_width + vt * edge,
                      p.dv_stride, info.rows, p.value_width - vt * edge, p.paired_dv);
        if (vt == value_tiles - 1) {
            warpgroup::sum_over_columns(row_sums);
            if (tid % 4 == 0) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int s = warpgroup::first_row() + r * 8;
                    p.given_far[p.at(tile_id, h) * edge + s] = row_sums[r] * to_end[s];
                }
            }
            row_sums[0] = row_sums[1] = 0;
        }
    }
    float* const out = p.dk_parts + (static_cast<std::int64_t>(blockIdx.y) * p.tiles + tile_id) * KT * area;
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) store_clipped(total[kt], out + kt * area, edge, edge, edge, true);
}

// Adds the slices, and the part of dq (or dk) inside the chunk. Grid: tiles, groups.
template <class T, bool Queries>
__global__ void __launch_bounds__(threads) finish_gradients(Problem<T> p) {
    const int tile_id = blockIdx.x, group = blockIdx.y;
    const TileInfo info = p.tile_info[tile_id];
    const int i = info.index % tiles_per_chunk;
    T* const grads = reinterpret_cast<T*>(tile::shared_memory());  // gradients of the scores of up to 4 tiles
    T* const others = grads + tiles_per_chunk * area;              // their k or q
    const int first = Queries ? -i : 0;  // tiles of the chunk before this one (queries) or from it on (keys), and itself
    const int last = Queries ? 0 : min(tiles_per_chunk - i, info.document_tiles - info.index) - 1;
    const int first_slice = group * p.slices;
    for (int kt = 0; kt * edge < p.key_width; ++kt) {
        if (kt > 0) __syncthreads();  // the last ones have been read
        for (int m = first; m <= last; ++m) {
            const TileInfo its = p.tile_info[tile_id + m];
            load_keys(p, others + (m - first) * area, !Queries, its.token, its.rows, group, kt);
        }
        tile::commit_async();
        for (int m = first; kt == 0 && m <= last; ++m) {
            const int query_tile = Queries ? tile_id : tile_id + m, column = Queries ? i + m : i;
            constexpr int width = 4, passes = area / (width * threads);
            float sums[passes][width];
#pragma unroll
            for (int n = 0; n < passes; ++n)
#pragma unroll
                for (int e = 0; e < width; ++e) sums[n][e] = 0;
            const int start = static_cast<int>(threadIdx.x) * width;
            for (int s = 0; s < p.slices; ++s) {
                const float* const part =
                    p.score_grad +
                    ((static_cast<std::int64_t>(first_slice + s) * p.tiles + query_tile) * tiles_per_chunk + column) * area +
                    start;
#pragma unroll
                for (int n = 0; n < passes; ++n) {
                    float x[width];
                    load(x, part + n * width * threads);
#pragma unroll
                    for (int e = 0; e < width; ++e) sums[n][e] += x[e];
                }
            }
            T* const to = grads + (m - first) * area;
#pragma unroll
            for (int n = 0; n < passes; ++n) {
                const int x = start + n * width * threads, at = tile::offset<T>(x / edge, x % edge);
                tile::store_pair(to + at, sums[n][0], sums[n][1]);
                tile::store_pair(to + at + 2, sums[n][2], sums[n][3]);
            }
        }
        Accumulator acc;
        acc.clear();
        for (int s = 0; s < p.slices; ++s) {
            const float* const part =
                (Queries ? p.dq_parts : p.dk_parts) +
                ((static_cast<std::int64_t>(first_slice + s) * p.tiles + tile_id) * p.key_tiles + kt) * area;
            acc.for_pairs([&](int row, int col, float& a, float& b, int) {
                const float2 x = tile::load_pair(part + row * edge + col);
                a += x.x;
                b += x.y;
            });
        }
        wait_for_tiles();
        for (int n = 0; n <= last - first; ++n)
            warpgroup::multiply<!Queries, false>(acc, grads + n * area, others + n * area, Unscaled{});
        const std::int64_t stride = Queries ? p.dq_stride : p.dk_stride;
        store_clipped(
            acc, (Queries ? p.dq : p.dk) + info.token * stride + static_cast<std::int64_t>(group) * p.key_width + kt * edge,
            stride, info.rows, p.key_width - kt * edge, Queries ? p.paired_dq : p.paired_dk);
    }
}

constexpr int fold_heads = 4;  // of a block, a warp each: their level scales are neighbours in memory

inline std::size_t fold_shared(int levels) {
    return static_cast<std::size_t>(edge) * static_cast<std::size_t>(fold_heads * levels | 1) * sizeof(float);
}

// From the gradients of every level's scale: dlevel_scales (levels beyond the last column are added to it), received and
// tile_flow. Grid: tiles, heads / 4.
template <class T>
__global__ void __launch_bounds__(fold_heads * 32) fold_scale_gradients(Problem<T> p) {
    const int tile_id = blockIdx.x, first = static_cast<int>(blockIdx.y) * fold_heads, tid = threadIdx.x;
    const TileInfo info = p.tile_info[tile_id];
    const int heads = min(fold_heads, p.heads - first), columns = heads * p.levels, stride = columns | 1;
    float* const scales = reinterpret_cast<float*>(tile::shared_memory());  // [64][stride]; their gradients replace them
    const std::int64_t global_stride = static_cast<std::int64_t>(p.heads) * p.levels;
    const std::int64_t global_start = info.token * global_stride + static_cast<std::int64_t>(first) * p.levels;
    constexpr int rows_at_once = fold_heads * 32 / edge;
    for (int c = tid % edge; c < columns; c += edge)
        for (int t = tid / edge; t < info.rows; t += rows_at_once)
            tile::copy_async<4>(scales + t * stride + c, p.level_scales + global_start + t * global_stride + c, true);
    tile::commit_async();

    const int lane = tid % 32, warp = tid / 32, h = first + warp;  // a lane has the tokens lane and lane + 32
    constexpr int batch = 8;                                       // levels on their way at once
    float sums[2] = {0, 0}, last[2] = {0, 0};
    for (int base = 0; base < p.all_levels; base += batch) {
        float x[batch][2];
#pragma unroll
        for (int n = 0; n < batch; ++n) {
            const int l = base + n;
            const bool seen = warp < heads && l < p.all_levels && sees_level(p, info.index, l);
#pragma unroll
            for (int r = 0; r < 2; ++r) x[n][r] = seen ? p.dscales_at(tile_id, h, l)[lane + 32 * r] : 0.0f;
        }
        if (base == 0) {
            tile::wait_async<0>();
            __syncthreads();
        }
        if (warp >= heads) continue;
#pragma unroll
        for (int n = 0; n < batch; ++n) {
            const int l = base + n;
            if (l >= p.all_levels) continue;
            float terms = 0;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int t = lane + 32 * r;
                if (t >= info.rows) continue;
                float term = x[n][r];
                if (p.log_linear) {
                    float& scale = scales[t * stride + warp * p.levels + min(l, p.levels - 1)];
                    term *= scale;
                    last[r] += l >= p.levels - 1 ? x[n][r] : 0.0f;
                    if (l < p.levels - 1) scale = x[n][r];
                }
                if (l > 0) sums[r] += term;
                terms += term;
            }
            if (l < chunk_levels || !sees_level(p, info.index, l)) continue;
            terms = team_sum(terms);
            if (lane == 0) p.tile_flow[p.at(tile_id, h) * 32 + l - chunk_levels] = terms;
        }
    }
    if (warp < heads) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            p.received[p.at(tile_id, h) * edge + lane + 32 * r] = sums[r];
            if (!p.log_linear) continue;
            float* const row = scales + (lane + 32 * r) * stride + warp * p.levels;
            for (int l = p.all_levels; l < p.levels - 1; ++l) row[l] = 0.0f;
            row[p.levels - 1] = last[r];
        }
    }
    __syncthreads();
    for (int c = tid % edge; c < columns; c += edge)
#pragma unroll 8
        for (int t = tid / edge; t < info.rows; t += rows_at_once)
            p.dlevel_scales[global_start + t * global_stride + c] = scales[t * stride + c];
}

// level_flow. A thread for each (slot, head, bit).
template <class T>
__global__ void __launch_bounds__(threads) sum_level_flow(Problem<T> p) {
    const std::int64_t id = static_cast<std::int64_t>(blockIdx.x) * (threads / 32) + threadIdx.x / 32;
    if (id >= static_cast<std::int64_t>(p.slots) * p.heads) return;
    const int bit = threadIdx.x % 32, h = static_cast<int>(id % p.heads);
    const SlotInfo slot = p.slot_info[id / p.heads];
    if ((slot.index >> bit & 1) == 0) return;
    float sum = 0;
    for (int m = 0; m < slot.tiles; ++m) sum += p.tile_flow[p.at(slot.tile + m, h) * 32 + bit];
    p.level_flow[id * 32 + bit] = sum;
}

// whole: the sum of all terms whose token is behind the chunk and whose source is before it: for each bucket of the Fenwick
// decomposition of the chunks before it, what its own readers behind the chunk take (level_flow) and what it gives through
// its parents (crossing). The linear operator has one bucket, of all chunks before, whose one reader is the chunk itself.
template <class T>
__global__ void __launch_bounds__(threads) sum_flow(Problem<T> p) {
    const std::int64_t id = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (id >= static_cast<std::int64_t>(p.slots) * p.heads) return;
    const SlotInfo slot = p.slot_info[id / p.heads];
    const auto crossing = [&](std::int64_t at) {
        float sum = 0;
        for (int w = 0; w < p.flow_warps; ++w) sum += p.crossing[at * p.flow_warps + w];
        return sum;
    };
    float sum = 0;
    const int c = slot.index;
    if (!p.log_linear) {
        if (c > 0) sum = crossing(id - p.heads);
    } else {
        for (int rest = c; rest != 0; rest &= rest - 1) {
            const int j = __ffs(rest) - 1, end = rest - 1;  // bucket of 2^j chunks that ends with chunk `end`
            sum += crossing(id - static_cast<std::int64_t>(c - end) * p.heads);
            const int readers_end = min(end + (1 << j), slot.document_chunks - 1);
            for (int reader = c + 1; reader <= readers_end; ++reader)
                sum += p.level_flow[(id + static_cast<std::int64_t>(reader - c) * p.heads) * 32 + j];
        }
    }
    p.whole[id] = sum;
}

// dg of a chunk. A term P(t, s) belongs to g of the tokens s + 1 .. t:
//   t and s in the chunk: suffix sums of what t receives minus what s gives: the same float32 terms, so that they cancel;
//   only t: suffix sums of what it receives; only s: prefix sums of what it gives; neither: `whole`.
// A warp for each (slot, head), lane = 8 tokens; heads that are neighbours in memory are written together. Grid: slots,
// heads / 8.
constexpr int gradient_heads = 8;
template <class T>
__global__ void __launch_bounds__(gradient_heads * 32) decay_gradients(Problem<T> p) {
    __shared__ float results[tiles_per_chunk * edge][gradient_heads + 1];
    const int first = static_cast<int>(blockIdx.y) * gradient_heads, heads = min(gradient_heads, p.heads - first);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = min(first + warp, p.heads - 1);
    const std::int64_t id = static_cast<std::int64_t>(blockIdx.x) * p.heads + h;
    const SlotInfo slot = p.slot_info[blockIdx.x];
    const int m = lane / 8, t0 = lane % 8 * 8;
    float x[8], given[8];
    int rows = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = given[i] = 0;
    if (m < slot.tiles) {
        rows = p.tile_info[slot.tile + m].rows;
        const std::int64_t at = p.at(slot.tile + m, h);
        load(x, p.received + at * edge + t0);
        load(given, p.given_far + at * edge + t0);
        for (int later = m; later < slot.tiles; ++later) {
            float near[8];
            load(near, p.given_near + (p.at(slot.tile + later, h) * tiles_per_chunk + m) * edge + t0);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] -= near[i];
        }
    }
    float sum = 0, total = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        if (t0 + i < rows) sum += x[i];
        x[i] = sum;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float its = t0 + i < rows ? given[i] : 0.0f;
        given[i] = total;
        total += its;
    }
    float behind = sum, before = total;
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_down_sync(0xffffffffu, behind, step);
        if (lane + step < 32) behind += other;
        const float earlier = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += earlier;
    }
    behind = __shfl_down_sync(0xffffffffu, behind, 1);
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 31) behind = 0;
    if (lane == 0) before = 0;
    behind += before + p.whole[id];
#pragma unroll
    for (int i = 0; i < 8; ++i) results[lane * 8 + i][warp] = x[i] + given[i] + behind;
    __syncthreads();
    const std::int64_t token = p.tile_info[slot.tile].token;
    const int tokens = (slot.tiles - 1) * edge + p.tile_info[slot.tile + slot.tiles - 1].rows;
    const int its = static_cast<int>(threadIdx.x) % gradient_heads;
    for (int t = static_cast<int>(threadIdx.x) / gradient_heads; t < tokens && its < heads; t += 32)
        p.dg[(token + t) * p.heads + first + its] = results[t][its];
}

// ---- host ------------------------------------------------------------------------------------------------------------

// The tables of a layout on one device. Every layer of a model asks for the same layout, so the last few are kept.
struct Layout {
    std::vector<std::int64_t> offsets;
    Device device;
    bool log_linear = false;
    int tiles = 0, slots = 0, documents = 0, jobs = 0, parts = 0;
    std::int64_t longest = 0;
    Buffer memory;
    const BucketJob* bucket_jobs = nullptr;
    const TileInfo* tile_info = nullptr;
    const SlotInfo* slot_info = nullptr;
    const DocumentInfo* document_info = nullptr;
};

std::shared_ptr<const Layout> make_layout(const Exec& exec, const Sequences& sequences, bool log_linear) {
    auto layout = std::make_shared<Layout>();
    layout->offsets.assign(sequences.offsets, sequences.offsets + sequences.count + 1);
    layout->device = exec.device;
    layout->log_linear = log_linear;
    std::vector<TileInfo> tiles;
    std::vector<SlotInfo> slots;
    std::vector<DocumentInfo> documents;
    std::vector<BucketJob> jobs;
    for (std::int64_t d = 0; d < sequences.count; ++d) {
        const std::int64_t length = sequences.length(d);
        layout->longest = std::max(layout->longest, length);
        const int count = static_cast<int>(ceil_div(length, edge)),
                  chunks = static_cast<int>(ceil_div(count, tiles_per_chunk));
        const int first_tile = static_cast<int>(tiles.size()), first_slot = static_cast<int>(slots.size());
        for (int t = 0; t < count; ++t)
            tiles.push_back({sequences.offsets[d] + t * edge,
                             static_cast<std::int32_t>(std::min<std::int64_t>(edge, length - t * edge)), t,
                             first_slot + t / tiles_per_chunk, count});
        for (int c = 0; c < chunks; ++c) {
            SlotInfo slot{
                first_tile + c * tiles_per_chunk, std::min(tiles_per_chunk, count - c * tiles_per_chunk), c, chunks, 0, 0};
            // The chunks that read the slot's bucket: as many as it holds, right behind it.
            const std::int64_t size = log_linear ? (static_cast<std::int64_t>(c) + 1) & ~static_cast<std::int64_t>(c) : 1;
            const int readers = static_cast<int>(std::min<std::int64_t>(size, chunks - 1 - c));
            const int parts = static_cast<int>(ceil_div(readers, chunks_per_job));
            if (parts > 1) {
                slot.part = layout->parts;
                slot.parts = parts;
                layout->parts += parts;
            }
            for (int part = 0; part < std::max(parts, 1); ++part) {
                const int first = (c + 1 + part * chunks_per_job) * tiles_per_chunk;
                const int last = std::min((c + 1 + std::min((part + 1) * chunks_per_job, readers)) * tiles_per_chunk, count);
                jobs.push_back(
                    {first_slot + c, first_tile + first, readers > 0 ? last - first : 0, parts > 1 ? slot.part + part : -1});
            }
            slots.push_back(slot);
        }
        documents.push_back({first_tile, count, first_slot, chunks});
    }
    layout->tiles = static_cast<int>(tiles.size());
    layout->slots = static_cast<int>(slots.size());
    layout->documents = static_cast<int>(documents.size());
    layout->jobs = static_cast<int>(jobs.size());
    // Long ones first: the short ones fill the gaps at the end.
    std::stable_sort(jobs.begin(), jobs.end(), [](const BucketJob& a, const BucketJob& b) { return a.tiles > b.tiles; });
    Arena tables;
    tables.add(&layout->tile_info, std::span<const TileInfo>(tiles));
    tables.add(&layout->slot_info, std::span<const SlotInfo>(slots));
    tables.add(&layout->document_info, std::span<const DocumentInfo>(documents));
    tables.add(&layout->bucket_jobs, std::span<const BucketJob>(jobs));
    tables.allocate(exec);
    layout->memory = tables.release();
    return layout;
}

std::shared_ptr<const Layout> layout_of(const Exec& exec, const Sequences& sequences, bool log_linear) {
    return recent<Layout>(
        8,
        [&](const Layout& layout) {
            return layout.device == exec.device && layout.log_linear == log_linear &&
                   std::ranges::equal(layout.offsets, offsets_of(sequences));
        },
        [&] { return make_layout(exec, sequences, log_linear); });
}

bool is_paired(std::size_t size, const void* pointer, std::initializer_list<std::int64_t> multiples) {
    for (auto value : multiples)
        if (value % 2 != 0) return false;
    return reinterpret_cast<std::uintptr_t>(pointer) % (2 * size) == 0;
}

// Slices of a group's heads: enough blocks to fill any card, from the shape alone, so that results do not depend on the
// card.
#if defined(FENWICK_CUDA_EMULATION)
// So that small problems have blocks with several heads, as large ones do.
constexpr std::int64_t enough_blocks = 8, enough_pipelined_blocks = 8, enough_state_blocks = 8;
#else
constexpr std::int64_t enough_blocks = 2048;
constexpr std::int64_t enough_pipelined_blocks = 1024;  // one an SM, and each starts with the scores of its heads
constexpr std::int64_t enough_state_blocks = 400;       // one an SM, and each starts with the keys of its chunk
#endif
template <class T>
int slices_of(const Problem<T>& p, int blocks, std::int64_t enough) {
    return static_cast<int>(
        std::clamp<std::int64_t>(ceil_div(enough, static_cast<std::int64_t>(blocks) * p.groups), 1, p.heads / p.groups));
}

// Whether the kernels of ssd_pipelined.cuh do. They are made for Hopper.
constexpr std::size_t largest_shared = 227 * 1024;
template <class T>
bool fits_pipelined(const Exec& exec, const Problem<T>& p) {
    return p.key_tiles <= 2 && p.wide_q && p.wide_k && p.wide_v && p.wide_state && is_hopper(exec);
}

template <class T, class Args>
Problem<T> make_problem(const char* op, const Args& args, const Layout& layout) {
    Problem<T> p{};
    FENWICK_CHECK(args.key_width <= max_key_tiles * edge, "[{}] key_width {} is not available on CUDA; at most {}", op,
                  args.key_width, max_key_tiles * edge);
    FENWICK_CHECK(args.value_width <= 4 * edge, "[{}] value_width {} is not available on CUDA; at most {}", op,
                  args.value_width, 4 * edge);
    p.heads = static_cast<int>(args.heads);
    p.groups = static_cast<int>(args.groups);
    p.key_width = static_cast<int>(args.key_width);
    p.value_width = static_cast<int>(args.value_width);
    p.key_tiles = static_cast<int>(ceil_div(args.key_width, edge));
    if (p.key_tiles == 3) p.key_tiles = 4;
    p.value_tiles = static_cast<int>(ceil_div(args.value_width, edge));
    p.levels = static_cast<int>(args.levels);
    p.log_linear = args.level_scales != nullptr;
    p.all_levels = p.log_linear ? std::max(levels_needed(static_cast<std::uint64_t>(layout.longest)), diagonal_levels)
                                : chunk_levels + 1;
    p.max_live = std::max(p.all_levels - chunk_levels, 0);
    p.tiles = layout.tiles;
    p.slots = layout.slots;
    p.documents = layout.documents;
    p.slices = slices_of(p, p.tiles, enough_blocks);
    p.q_stride = args.q_stride;
    p.k_stride = args.k_stride;
    p.v_stride = args.v_stride;
    p.wide_q = is_wide(sizeof(T), args.q, {args.q_stride, args.key_width});
    p.wide_k = is_wide(sizeof(T), args.k, {args.k_stride, args.key_width});
    p.wide_v = is_wide(sizeof(T), args.v, {args.v_stride, args.value_width});
    p.wide_state = is_wide(sizeof(T), nullptr, {args.value_width});
    p.tile_info = layout.tile_info;
    p.slot_info = layout.slot_info;
    p.document_info = layout.document_info;
    p.bucket_jobs = layout.bucket_jobs;
    p.q = static_cast<const T*>(args.q);
    p.k = static_cast<const T*>(args.k);
    p.v = static_cast<const T*>(args.v);
    p.g = static_cast<const float*>(args.g);
    p.level_scales = static_cast<const float*>(args.level_scales);
    return p;
}

template <class T>
void add_state_workspace(Arena& arena, Problem<T>& p) {
    const std::int64_t tiles = p.tiles, slots = p.slots, heads = p.heads;
    arena.add(&p.gamma, tiles * heads * edge);
    arena.add(&p.to_tile_end, tiles * heads * edge);
    arena.add(&p.start, tiles * heads);
    arena.add(&p.chunk_end, slots * heads);
    arena.add(&p.states, slots * heads * p.key_width * p.value_width);
}

// Calls fn(integral_constant<int, KT>) for KT = 1, 2, 4.
template <class F>
void dispatch_key_tiles(int key_tiles, F&& fn) {
    switch (key_tiles) {
        case 1:
            return fn(std::integral_constant<int, 1>{});
        case 2:
            return fn(std::integral_constant<int, 2>{});
        default:
            return fn(std::integral_constant<int, 4>{});
    }
}

// The same for the kernels of ssd_pipelined.cuh.
template <class F>
void dispatch_pipelined(int key_tiles, F&& fn) {
    if (key_tiles == 1) return fn(std::integral_constant<int, 1>{});
    fn(std::integral_constant<int, 2>{});
}

unsigned blocks_for(std::int64_t items, std::int64_t per_block) { return static_cast<unsigned>(ceil_div(items, per_block)); }

struct FlatGrid {
    int width, blocks;
};
template <class T>
FlatGrid flat_grid(const Problem<T>& p) {
    const std::int64_t size = static_cast<std::int64_t>(p.key_width) * p.value_width;
    const int width = size % wide == 0 ? wide : 1;
    return {width, static_cast<int>(ceil_div(size, width * flat_threads))};
}

// Chunk states, or the gradients of buckets, `jobs` of them.
template <bool Reader, class T>
void launch_outer_products(const char* op, const Exec& exec, const Problem<T>& p, int jobs) {
    const auto value_tiles = static_cast<unsigned>(p.value_tiles);
    if constexpr (std::is_same_v<T, tile::bf16>) {
        if (fits_pipelined(exec, p) && (!Reader || p.wide_o)) {
            Problem<T> sliced = p;
            const int per_group = p.heads / p.groups, teams = static_cast<int>(ceil_div(per_group, state_teams));
            // Whole teams of heads a slice.
            const int slices = std::min(slices_of(p, jobs, Reader ? enough_pipelined_blocks : enough_state_blocks), teams);
            sliced.slices = static_cast<int>(ceil_div(per_group, ceil_div(teams, slices) * state_teams));
            return dispatch_pipelined(p.key_tiles, [&](auto kt) {
                constexpr int KT = kt();
                const dim3 grid(static_cast<unsigned>(jobs), static_cast<unsigned>(p.groups * sliced.slices), value_tiles);
                if constexpr (Reader) {
                    static_assert(bucket_teams == state_teams);
                    launch(op, exec, bucket_gradients<KT>, grid, bucket_threads, bucket_gradient_shared<KT>(), sliced);
                } else {
                    launch(op, exec, chunk_states<KT>, grid, state_threads, chunk_state_shared<KT>(), sliced);
                }
            });
        }
    }
    dispatch_key_tiles(p.key_tiles, [&](auto kt) {
        constexpr int KT = kt();
        launch(op, exec, outer_products<T, KT, Reader>,
               dim3(static_cast<unsigned>(jobs) * static_cast<unsigned>(p.heads), value_tiles), threads,
               2 * (KT + 1) * area * sizeof(T) + 2 * edge * sizeof(float), p);
    });
}

// Decays, chunk states, bucket states.
template <class T>
void build_states(const char* op, const Exec& exec, const Problem<T>& p) {
    const auto tiles = static_cast<unsigned>(p.tiles);
    const auto heads = static_cast<unsigned>(p.heads);
    launch(op, exec, tile_decays<T>, dim3(tiles, blocks_for(p.heads, decay_heads)), threads, 0, p);
    launch(op, exec, decay_positions<T>, dim3(blocks_for(static_cast<std::int64_t>(p.documents) * p.heads, threads / 32)),
           threads, 0, p);
    if (p.slots == p.documents) return;  // one chunk a document: nobody reads a state
    launch_outer_products<false>(op, exec, p, p.slots);
    const FlatGrid flat = flat_grid(p);
    dispatch_width(flat.width == wide, [&](auto w) {
        launch(op, exec, merge_states<T, w()>,
               dim3(static_cast<unsigned>(p.documents) * heads * static_cast<unsigned>(flat.blocks)), dim3(flat_threads), 0,
               p, flat.blocks);
    });
}

}  // namespace

void ssd_forward(const Exec& exec, const Ssd& args) {
    constexpr const char* op = "ssd_forward";
    const OperatorScope scope(op, exec);
    dispatch(op, args.dtype, [&]<class T>(TypeTag<T>) {
        const auto layout = layout_of(exec, args.sequences, args.level_scales != nullptr);
        Problem<T> p = make_problem<T>(op, args, *layout);
        p.o = static_cast<T*>(args.o);
        p.paired_o = is_paired(sizeof(T), args.o, {args.value_width});
        p.wide_o = is_wide(sizeof(T), args.o, {args.value_width});
        p.skip_last = true;
        Arena arena;
        add_state_workspace(arena, p);
        const bool keep = args.kept != nullptr && p.slots > p.documents;  // without states it is not worth its memory
        arena.allocate(exec, keep ? MemoryKind::activations : MemoryKind::workspace);
        build_states(op, exec, p);
        if (keep) *args.kept = arena.release();
        if constexpr (std::is_same_v<T, tile::bf16>) {
            if (fits_pipelined(exec, p) && p.wide_o) {
                Problem<T> sliced = p;
                sliced.slices = slices_of(p, consumers * p.slots, enough_pipelined_blocks);
                const dim3 grid(static_cast<unsigned>(consumers * p.slots), static_cast<unsigned>(p.groups * sliced.slices),
                                static_cast<unsigned>(p.value_tiles));
                const auto launch_outputs = [&](auto kernel, std::size_t shared_bytes) {
                    if (shared_bytes > largest_shared)
                        return false;  // scales of more levels than any memory holds tokens for
                    launch(op, exec, kernel, grid, pipelined_threads, shared_bytes, sliced);
                    return true;
                };
                bool done = false;
                dispatch_pipelined(p.key_tiles, [&](auto kt) {
                    constexpr int KT = kt();
                    done = p.log_linear
                               ? launch_outputs(tile_outputs<KT, true>, tile_output_shared<KT, true>(p.all_levels))
                               : launch_outputs(tile_outputs<KT, false>, tile_output_shared<KT, false>(p.all_levels));
                });
                if (done) return;
            }
        }
        launch(op, exec, outputs<T>,
               dim3(static_cast<unsigned>(p.tiles), static_cast<unsigned>(p.groups * p.slices),
                    static_cast<unsigned>(p.value_tiles)),
               threads, output_shared(p.key_tiles, p.max_live, sizeof(T)), p);
    });
}

void ssd_backward(const Exec& exec, const SsdBackward& args) {
    constexpr const char* op = "ssd_backward";
    const OperatorScope scope(op, exec);
    dispatch(op, args.dtype, [&]<class T>(TypeTag<T>) {
        const auto layout = layout_of(exec, args.sequences, args.level_scales != nullptr);
        Problem<T> p = make_problem<T>(op, args, *layout);
        p.d_o = static_cast<const T*>(args.d_o);
        p.dq = static_cast<T*>(args.dq);
        p.dk = static_cast<T*>(args.dk);
        p.dv = static_cast<T*>(args.dv);
        p.dg = static_cast<float*>(args.dg);
        p.dlevel_scales = static_cast<float*>(args.dlevel_scales);
        p.dq_stride = args.dq_stride;
        p.dk_stride = args.dk_stride;
        p.dv_stride = args.dv_stride;
        p.wide_o = is_wide(sizeof(T), args.d_o, {args.value_width});
        p.paired_dq = is_paired(sizeof(T), args.dq, {args.dq_stride, args.key_width});
        p.paired_dk = is_paired(sizeof(T), args.dk, {args.dk_stride, args.key_width});
        p.paired_dv = is_paired(sizeof(T), args.dv, {args.dv_stride, args.value_width});
        bool pipelined = false;
        if constexpr (std::is_same_v<T, tile::bf16>) pipelined = fits_pipelined(exec, p) && p.value_tiles == 1 && p.wide_o;
        if (pipelined) p.slices = slices_of(p, p.tiles, enough_pipelined_blocks);
        const FlatGrid flat = flat_grid(p);
        p.flow_warps = flat.blocks * (flat_threads / 32);
        const std::int64_t tiles = p.tiles, slots = p.slots, heads = p.heads,
                           slices = static_cast<std::int64_t>(p.groups) * p.slices;
        Arena states, arena;
        add_state_workspace(states, p);
        arena.add(&p.dstates, slots * heads * p.key_width * p.value_width);
        arena.add(&p.bucket_parts, static_cast<std::int64_t>(layout->parts) * heads * p.key_width * p.value_width);
        arena.add(&p.dscales, tiles * heads * p.all_levels * edge);
        arena.add(&p.score_grad, slices * tiles * tiles_per_chunk * area);
        arena.add(&p.dq_parts, slices * tiles * p.key_tiles * area);
        arena.add(&p.dk_parts, slices * tiles * p.key_tiles * area);
        arena.add(&p.received, tiles * heads * edge);
        arena.add(&p.given_near, tiles * heads * tiles_per_chunk * edge);
        arena.add(&p.given_far, tiles * heads * edge);
        arena.add(&p.tile_flow, tiles * heads * 32);
        arena.add(&p.level_flow, slots * heads * 32);
        arena.add(&p.crossing, slots * heads * p.flow_warps);
        arena.add(&p.whole, slots * heads);
        arena.allocate(exec);

        const auto tile_blocks = static_cast<unsigned>(tiles), slice_blocks = static_cast<unsigned>(slices);
        const auto head_blocks = static_cast<unsigned>(heads), group_blocks = static_cast<unsigned>(p.groups);
        if (args.kept != nullptr && args.kept->bytes() > 0) {
            states.place(*args.kept);
        } else {
            states.allocate(exec);
            build_states(op, exec, p);
        }
        if (p.slots == p.documents) {
            // Only chunks of their own document: no state, no gradient of one, nothing crosses a chunk's end.
            const auto bytes =
                static_cast<std::size_t>(slots * heads) * static_cast<std::size_t>(p.key_width * p.value_width) * sizeof(T);
            FENWICK_CUDA_CHECK(cudaMemsetAsync(p.dstates, 0, bytes, stream_of(exec)));
            FENWICK_CUDA_CHECK(
                cudaMemsetAsync(p.whole, 0, static_cast<std::size_t>(slots * heads) * sizeof(float), stream_of(exec)));
        } else {
            launch_outer_products<true>(op, exec, p, layout->jobs);
            dispatch_width(flat.width == wide, [&](auto w) {
                launch(op, exec, spread_gradients<T, w()>,
                       dim3(static_cast<unsigned>(p.documents) * head_blocks * static_cast<unsigned>(flat.blocks)),
                       dim3(flat_threads), 0, p, flat.blocks);
            });
        }
        const auto general = [&] {
            launch(op, exec, score_gradients<T, true>, dim3(tile_blocks, slice_blocks), threads,
                   score_gradient_shared(sizeof(T)), p);
            launch(op, exec, score_gradients<T, false>, dim3(2 * tile_blocks, slice_blocks), threads,
                   score_gradient_shared(sizeof(T)), p);
            dispatch_key_tiles(p.key_tiles, [&](auto kt) {
                constexpr int KT = kt();
                const int buffers = query_gradient_shared(KT, p.value_tiles, 2, p.max_live, sizeof(T)) > 200 * 1024 ? 1 : 2;
                launch(op, exec, query_gradients<T, KT>, dim3(tile_blocks, slice_blocks), threads,
                       query_gradient_shared(KT, p.value_tiles, buffers, p.max_live, sizeof(T)), p, buffers);
                launch(op, exec, key_gradients<T, KT>, dim3(tile_blocks, slice_blocks), threads,
                       key_gradient_shared(KT, sizeof(T)), p);
            });
        };
        if constexpr (std::is_same_v<T, tile::bf16>) {
            if (pipelined) {
                const dim3 pairs(static_cast<unsigned>(consumers * p.slots), slice_blocks);
                dispatch_pipelined(p.key_tiles, [&](auto kt) {
                    constexpr int KT = kt();
                    launch(op, exec, pipelined_score_gradients<KT, true>, pairs, score_threads<true>,
                           pipelined_score_gradient_shared<true>(), p);
                    launch(op, exec, pipelined_score_gradients<KT, false>,
                           dim3(static_cast<unsigned>(p.slots), slice_blocks), score_threads<false>,
                           pipelined_score_gradient_shared<false>(), p);
                    launch(op, exec, pipelined_query_gradients<KT>, pairs, pipelined_threads,
                           pipelined_query_gradient_shared<KT>(p.all_levels), p);
                    launch(op, exec, pipelined_key_gradients<KT>, pairs, pipelined_threads,
                           pipelined_key_gradient_shared<KT>(), p);
                });
            } else {
                general();
            }
        } else {
            general();
        }
        const dim3 finish(tile_blocks, group_blocks);
        launch(op, exec, finish_gradients<T, true>, finish, threads, 2 * tiles_per_chunk * area * sizeof(T), p);
        launch(op, exec, finish_gradients<T, false>, finish, threads, 2 * tiles_per_chunk * area * sizeof(T), p);
        launch(op, exec, fold_scale_gradients<T>, dim3(tile_blocks, blocks_for(heads, fold_heads)), threads,
               fold_shared(p.levels), p);
        if (p.slots != p.documents) {
            if (p.log_linear)  // the linear scan's one bucket has no readers but the next chunk
                launch(op, exec, sum_level_flow<T>, dim3(blocks_for(slots * heads, threads / 32)), threads, 0, p);
            launch(op, exec, sum_flow<T>, dim3(blocks_for(slots * heads, threads)), threads, 0, p);
        }
        launch(op, exec, decay_gradients<T>, dim3(static_cast<unsigned>(slots), blocks_for(heads, gradient_heads)),
               gradient_heads * 32, 0, p);
    });
}

// ---- recurrent form --------------------------------------------------------------------------------------------------

namespace {

constexpr int recurrent_threads = 256;
constexpr int recurrent_columns = 32;  // value columns of a block, a lane each; warps share the keys

// Grid: batch x heads, value_width / 32.
template <class T>
__global__ void __launch_bounds__(recurrent_threads) recurrent(SsdRecurrent a) {
    constexpr int warps = recurrent_threads / 32;
    __shared__ float parts[warps][recurrent_columns];
    const std::int64_t row = blockIdx.x / a.heads, h = blockIdx.x % a.heads, group = h / (a.heads / a.groups);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * recurrent_columns + lane;
    const bool active = column < a.value_width;
    const auto* level_scales = static_cast<const float*>(a.level_scales);
    float* const state = static_cast<float*>(a.state) + (row * a.heads + h) * a.key_width * a.value_width + column;
    const std::int64_t level_size = a.batch * a.heads * a.key_width * a.value_width;
    for (std::int64_t n = 0; n < a.length; ++n) {
        const std::int64_t t = a.position + n, token = row * a.length + n;
        const T* const q = static_cast<const T*>(a.q) + token * a.q_stride + group * a.key_width;
        const T* const k = static_cast<const T*>(a.k) + token * a.k_stride + group * a.key_width;
        const float v =
            active ? tile::to_float(static_cast<const T*>(a.v)[token * a.v_stride + h * a.value_width + column]) : 0.0f;
        const float decay = expf(static_cast<const float*>(a.g)[token * a.heads + h]);
        const auto scale = [&](int level) {
            return level_scales[(token * a.heads + h) * a.levels + min(level, static_cast<int>(a.levels) - 1)];
        };
        // Levels 1 .. merged - 1 become empty, level `merged` receives them and level 0.
        const int merged = t > 0 ? __ffsll(t) : 0;
        float sum = 0;
        if (active) {
            for (std::int64_t i = warp; i < a.key_width; i += warps) {
                float* const at = state + i * a.value_width;
                const float query = tile::to_float(q[i]), fresh = tile::to_float(k[i]) * v;
                if (level_scales == nullptr) {
                    const float x = at[0] * decay + fresh;
                    at[0] = x;
                    sum += query * x;
                    continue;
                }
                float out = scale(0) * fresh;
                if (merged > 0) {
                    float x = at[0];
                    for (int l = 1; l < merged; ++l) {
                        x += at[l * level_size];
                        at[l * level_size] = 0.0f;
                    }
                    x *= decay;
                    at[merged * level_size] = x;
                    out += scale(merged) * x;
                    // Above it, level l is occupied where bit l - 1 of t is set.
                    for (std::int64_t rest = t & (t - 1); rest != 0; rest &= rest - 1) {
                        const int l = __ffsll(rest);
                        const float y = at[l * level_size] * decay;
                        at[l * level_size] = y;
                        out += scale(l) * y;
                    }
                }
                at[0] = fresh;
                sum += query * out;
            }
        }
        __syncthreads();  // the last token's sums have been read
        parts[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && active) {
            float total = 0;
            for (int w = 0; w < warps; ++w) total += parts[w][lane];
            static_cast<T*>(a.o)[(token * a.heads + h) * a.value_width + column] = tile::from_float<T>(total);
        }
    }
}

}  // namespace

void ssd_recurrent(const Exec& exec, const SsdRecurrent& args) {
    constexpr const char* op = "ssd_recurrent";
    const OperatorScope scope(op, exec);
    dispatch(op, args.dtype, [&]<class T>(TypeTag<T>) {
        launch(op, exec, recurrent<T>,
               dim3(static_cast<unsigned>(args.batch * args.heads), blocks_for(args.value_width, recurrent_columns)),
               dim3(recurrent_threads), 0, args);
    });
}

}  // namespace fenwick::kernels::cuda
