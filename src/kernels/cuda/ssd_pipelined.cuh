// The scan's kernels for bfloat16 in whole 16-byte rows and K <= 128 (pipeline.cuh): a block has one warpgroup that copies and
// two that compute, each on its own tile of 64 tokens, so that what both need is read once. Part of ssd.cu.
#pragma once

#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/ssd_problem.cuh"

namespace fenwick::kernels::cuda::ssd_scan {

using pipeline::Position;
using pipeline::Ring;
using tile::bf16;
using tile::exp2_fast;
using warpgroup::Fragment;
using warpgroup::fragment_of;
using warpgroup::load_fragment;
using warpgroup::multiply_fragments;

constexpr int consumers = 2;
constexpr int pipelined_threads = (consumers + 1) * threads;
constexpr int most_pipelined_levels = 32;
constexpr int tile_steps = edge / 16;  // fragments of a tile
constexpr float log2_e = 1.44269504f;

// Warpgroups 0 .. consumers - 1 compute, the last one copies.
__device__ __forceinline__ int warpgroup_index() { return tile::thread_index() / threads; }

// A thread's own fragments in shared memory: fragment n of a warpgroup's thread.
__device__ __forceinline__ Fragment& own_fragment(Fragment* base, int n) { return base[n * threads + tile::team_index()]; }

// The two tiles of a chunk that a block works on. Grid: 2 x slots.
struct Pair {
    SlotInfo slot;
    int slot_id, first, count;  // its first tile in the chunk, how many (0: nothing to do)
    std::int64_t token;         // first of the chunk
    int last_rows;              // of the chunk's last tile
    template <class T>
    __device__ __forceinline__ explicit Pair(const Problem<T>& p) {
        slot_id = static_cast<int>(blockIdx.x / consumers);
        slot = p.slot_info[slot_id];
        first = static_cast<int>(blockIdx.x % consumers) * consumers;
        count = max(min(consumers, slot.tiles - first), 0);
        token = p.tile_info[slot.tile].token;
        last_rows = p.tile_info[slot.tile + slot.tiles - 1].rows;
    }
    __device__ __forceinline__ int rows(int j) const { return j == slot.tiles - 1 ? last_rows : edge; }
    __device__ __forceinline__ std::int64_t token_of(int j) const { return token + j * edge; }
};

// What the tiles of a chunk need of one head: decays, and the level scales of `scale_tiles` tiles. Rows of level scales are
// `stride` floats apart, an odd number: no bank conflicts. The linear operator has one level, of scale 1.
struct HeadScalars {
    unsigned char* base;
    int levels, stride;

    template <class T>
    __device__ __forceinline__ HeadScalars(const Problem<T>& p, void* at)
        : base(static_cast<unsigned char*>(at)), levels(max(p.levels, 1)), stride(levels | 1) {}
    static __host__ __device__ int bytes(int levels, int scale_tiles) {
        const int scales = scale_tiles * edge * (max(levels, 1) | 1) * static_cast<int>(sizeof(float));
        return (tiles_per_chunk * edge * static_cast<int>(sizeof(float)) +
                (tiles_per_chunk + 32) * static_cast<int>(sizeof(double)) + scales + 15) / 16 * 16;
    }
    __device__ __forceinline__ float* gamma(int j) const { return reinterpret_cast<float*>(base) + j * edge; }
    // Before tile j of the chunk.
    __device__ __forceinline__ double* start() const {
        return reinterpret_cast<double*>(base + tiles_per_chunk * edge * sizeof(float));
    }
    // Up to the end of the n-th live bucket.
    __device__ __forceinline__ double* bucket_end() const { return start() + tiles_per_chunk; }
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(bucket_end() + 32); }

    __device__ __forceinline__ double end(int j) const { return start()[j] + static_cast<double>(gamma(j)[edge - 1]); }
    // Of what was written at `from` and is read at `to`, both sums of g.
    static __device__ __forceinline__ float decay(double from, double to) {
        return exp2_fast(fminf(static_cast<float>(to - from), 0.0f) * log2_e);
    }
    // Level scale of the row-th token of the tiles whose scales were loaded.
    __device__ __forceinline__ float scale(int row, int level) const { return scales()[row * stride + min(level, levels - 1)]; }

    // By all threads of the block, before it synchronizes for the first time.
    template <class T>
    __device__ __forceinline__ void prepare(const Problem<T>& p, int scale_tiles) const {
        if (p.log_linear) return;
        for (int n = threadIdx.x; n < scale_tiles * edge; n += pipelined_threads) scales()[n] = 1.0f;
    }
    // Copies of the producer: gamma and start of tiles [tile_first, tile_last] of the chunk, ends of `live` buckets, scales of
    // the tokens of tiles [scale_first, scale_last].
    template <class T>
    __device__ __forceinline__ void load(const Problem<T>& p, const Pair& pair, int h, int tile_first, int tile_last, int live,
                                         int scale_first, int scale_last) const {
        const int thread = tile::team_index();
        for (int x = tile_first * edge + thread * 4; x < (tile_last + 1) * edge; x += threads * 4)
            tile::copy_async_16(gamma(0) + x, p.gamma + p.at(pair.slot.tile + x / edge, h) * edge + x % edge, true);
        if (thread < tiles_per_chunk) {
            const int j = thread;
            if (j >= tile_first && j <= tile_last)
                tile::copy_async<8>(start() + j, p.start + p.at(pair.slot.tile + j, h), true);
        } else if (thread >= 32 && thread < 32 + live) {
            const int n = thread - 32;
            tile::copy_async<8>(bucket_end() + n,
                                p.chunk_end + p.at(pair.slot_id - live_bucket(p, pair.slot.index, n).back, h), true);
        }
        if (!p.log_linear) return;
        // 16 threads a token.
        const int rows = (scale_last - scale_first) * edge + pair.rows(scale_last), all = (scale_last - scale_first + 1) * edge;
        const std::int64_t step = static_cast<std::int64_t>(threads / 16) * p.heads * p.levels;
        int row = thread / 16;
        const float* from = p.level_scales + ((pair.token_of(scale_first) + row) * p.heads + h) * p.levels;
        float* to = scales() + row * stride;
        for (; row < all; row += threads / 16, from += step, to += threads / 16 * stride)
            for (int l = thread % 16; l < levels; l += 16)
                tile::copy_async<4>(to + l, row < rows ? from + l : p.level_scales, row < rows);
    }
};

// scores x (level mask and decay) of a tile with itself; rows from `row` on in the loaded level scales.
__device__ __forceinline__ void mask_diagonal(Fragment (&a)[tile_steps], const HeadScalars& head, const float* gamma, int row,
                                              Fragment* scores) {
    const int lane = tile::team_index() % 32, warp = tile::team_index() / 32;
    const int t = warp * 16 + lane / 4, column = lane % 4 * 2;
    const float end[2] = {gamma[t] * log2_e, gamma[t + 8] * log2_e};
#pragma unroll
    for (int k = 0; k < tile_steps; ++k) {
        if (k > warp) {
            a[k] = {{0, 0, 0, 0}};
            continue;
        }
        a[k] = own_fragment(scores, k);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 start = tile::load_pair(gamma + k * 16 + half * 8 + column);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                std::uint32_t& pair = a[k].x[half * 2 + r];
                const float2 x = tile::unpack(pair);
                const float decay_a = exp2_fast(end[r] - start.x * log2_e), decay_b = exp2_fast(end[r] - start.y * log2_e);
                if (k == warp && half > r) {
                    pair = 0;
                } else if (k == warp && half == r) {
                    // Tokens within the same 8.
                    const int distance_a = lane / 4 ^ column, distance_b = lane / 4 ^ (column + 1);
                    const float scale_a = head.scale(row + t + r * 8, bits_of(distance_a));
                    const float scale_b = head.scale(row + t + r * 8, bits_of(distance_b));
                    pair = tile::pack(column <= lane / 4 ? x.x * scale_a * decay_a : 0.0f,
                                      column + 1 <= lane / 4 ? x.y * scale_b * decay_b : 0.0f);
                } else {
                    const float scale = head.scale(row + t + r * 8, 3 + bits_of((2 * warp + r) ^ (2 * k + half)));
                    pair = tile::pack(x.x * scale * decay_a, x.y * scale * decay_b);
                }
            }
        }
    }
}

// scores x row factor x decay from the token s to the end of its tile.
__device__ __forceinline__ void scale_below(Fragment (&a)[tile_steps], const float (&factor)[2], const float* gamma,
                                            Fragment* scores) {
    const int column = tile::team_index() % 4 * 2;
    const float end = gamma[edge - 1] * log2_e;
#pragma unroll
    for (int k = 0; k < tile_steps; ++k) {
        a[k] = own_fragment(scores, k);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 start = tile::load_pair(gamma + k * 16 + half * 8 + column);
            const float decay_a = exp2_fast(end - start.x * log2_e), decay_b = exp2_fast(end - start.y * log2_e);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                std::uint32_t& pair = a[k].x[half * 2 + r];
                const float2 x = tile::unpack(pair);
                pair = tile::pack(x.x * (factor[r] * decay_a), x.y * (factor[r] * decay_b));
            }
        }
    }
}

// ---- outputs ---------------------------------------------------------------------------------------------------------

constexpr int output_stages = 6;
constexpr int output_strip = 7;  // score tiles of the two warpgroups: 3 and 4 at most

template <int KT>
std::size_t pipelined_output_shared(int levels) {
    return (2 * output_stages + output_strip) * area * sizeof(bf16) + 2 * HeadScalars::bytes(levels, consumers) +
           sizeof(Ring<output_stages>) + sizeof(Ring<2>);
}

// Grid: 2 x slots, head slices of all groups, value tiles.
// Order of the stages: q of the block's tiles, k of the chunk's tiles up to them; then for every head v of those tiles, two a
// stage, and the states of the live buckets.
template <int KT>
__global__ void __launch_bounds__(pipelined_threads, 1) pipelined_outputs(Problem<bf16> p) {
    const Pair pair(p);
    if (pair.count == 0) return;
    const HeadRange range = head_range(p);
    const int vt = blockIdx.z, live = live_count(p, pair.slot.index), last = pair.first + pair.count - 1;
    bf16* const stages = reinterpret_cast<bf16*>(tile::shared_memory());  // 2 tiles each
    Fragment* const strip = reinterpret_cast<Fragment*>(stages + 2 * output_stages * area);
    unsigned char* const scalars = reinterpret_cast<unsigned char*>(strip) + output_strip * area * sizeof(bf16);
    const int scalar_bytes = HeadScalars::bytes(p.levels, consumers);
    auto& ring = *reinterpret_cast<Ring<output_stages>*>(scalars + 2 * scalar_bytes);
    auto& head_ring = *reinterpret_cast<Ring<2>*>(&ring + 1);
    const auto head_at = [&](int stage) { return HeadScalars(p, scalars + stage * scalar_bytes); };
    for (int n = 0; n < 2; ++n) head_at(n).prepare(p, consumers);
    if (threadIdx.x == 0) {
        ring.initialize(pair.count * threads / 32);
        head_ring.initialize(pair.count * threads / 32);
    }
    __syncthreads();

    Position<output_stages> at;
    Position<2> head_position;
    const int self = warpgroup_index();
    if (self == consumers) {
        const auto fetch_keys = [&](int j, bool queries) {
            ring.acquire(at);
            for (int kt = 0; kt < KT; ++kt)
                load_keys(p, stages + (2 * at.stage + kt) * area, queries, pair.token_of(j), pair.rows(j), range.group, kt);
            ring.commit(at);
        };
        for (int j = pair.first; j <= last; ++j) fetch_keys(j, true);
        for (int j = 0; j <= last; ++j) fetch_keys(j, false);
        for (int h = range.first; h < range.first + range.count; ++h) {
            head_ring.acquire(head_position);
            head_at(head_position.stage).load(p, pair, h, 0, last, live, pair.first, last);
            head_ring.commit(head_position);
            for (int j = 0; j <= last; j += 2) {
                ring.acquire(at);
                for (int x = j; x <= min(j + 1, last); ++x)
                    load_values(p, stages + (2 * at.stage + x - j) * area, pair.token_of(x), pair.rows(x), h, vt);
                ring.commit(at);
            }
            for (int n = 0; n < live; ++n) {
                ring.acquire(at);
                const int bucket = pair.slot_id - live_bucket(p, pair.slot.index, n).back;
                for (int kt = 0; kt < KT; ++kt)
                    load_state(p, stages + (2 * at.stage + kt) * area, p.states, bucket, h, kt, vt);
                ring.commit(at);
            }
        }
        return;
    }
    if (self >= pair.count) return;

    const int i = pair.first + self, t = warpgroup::first_row();
    Fragment* const scores = strip + self * 3 * tile_steps * threads;
    Fragment queries[KT * tile_steps];
    for (int x = 0; x < pair.count; ++x) {
        ring.wait(at);
        if (x == self) {
#pragma unroll
            for (int k = 0; k < KT * tile_steps; ++k)
                queries[k] = load_fragment<false>(stages + (2 * at.stage + k / tile_steps) * area, k % tile_steps * 16);
        }
        ring.release(at);
    }
    for (int j = 0; j <= last; ++j) {
        ring.wait(at);
        if (j <= i) {
            Accumulator acc;
            acc.clear();
#pragma unroll
            for (int kt = 0; kt < KT; ++kt) {
                Fragment a[tile_steps];
#pragma unroll
                for (int k = 0; k < tile_steps; ++k) a[k] = queries[kt * tile_steps + k];
                multiply_fragments<true, true>(acc, a, stages + (2 * at.stage + kt) * area);
            }
#pragma unroll
            for (int k = 0; k < tile_steps; ++k) own_fragment(scores, j * tile_steps + k) = fragment_of(acc, k);
        }
        ring.release(at);
    }

    for (int h = range.first; h < range.first + range.count; ++h) {
        head_ring.wait(head_position);
        const HeadScalars head = head_at(head_position.stage);
        const float* const gamma = head.gamma(i);
        const double start = head.start()[i];
        const float into[2] = {exp2_fast(gamma[t] * log2_e), exp2_fast(gamma[t + 8] * log2_e)};
        const int row = self * edge + t;
        Accumulator acc;
        acc.clear();
        for (int j = 0; j <= last; ++j) {
            if (j % 2 == 0) ring.wait(at);
            if (j <= i) {
                Fragment a[tile_steps];
                Fragment* const its = scores + j * tile_steps * threads;
                if (j < i) {
                    const int level = tile_bits + bits_of(i ^ j);
                    const float between = HeadScalars::decay(head.end(j), start);
                    const float factor[2] = {head.scale(row, level) * into[0] * between,
                                             head.scale(row + 8, level) * into[1] * between};
                    scale_below(a, factor, head.gamma(j), its);
                } else {
                    mask_diagonal(a, head, gamma, self * edge, its);
                }
                multiply_fragments<false, true>(acc, a, stages + (2 * at.stage + j % 2) * area);
            }
            if (j % 2 == 1 || j == last) ring.release(at);
        }
        for (int n = 0; n < live; ++n) {
            ring.wait(at);
            Accumulator part;
            multiply_fragments<false, false>(part, queries, stages + 2 * at.stage * area);
            ring.release(at);
            const int level = live_bucket(p, pair.slot.index, n).level;
            const float between = HeadScalars::decay(head.bucket_end()[n], start);
            const float factor[2] = {head.scale(row, level) * into[0] * between,
                                     head.scale(row + 8, level) * into[1] * between};
            acc.for_pairs_with(part, [&](int, int, float& a, float& b, int local, float x, float y) {
                a += factor[local] * x;
                b += factor[local] * y;
            });
        }
        head_ring.release(head_position);
        const std::int64_t stride = static_cast<std::int64_t>(p.heads) * p.value_width;
        store_clipped(acc, p.o + pair.token_of(i) * stride + static_cast<std::int64_t>(h) * p.value_width + vt * edge, stride,
                      pair.rows(i), p.value_width - vt * edge, p.paired_o);
    }
}

}  // namespace fenwick::kernels::cuda::ssd_scan
