// The scan's kernels for bfloat16 in whole 16-byte rows and K <= 128 (pipeline.cuh): a block has one warpgroup that copies
// and two that compute, each on its own tile of 64 tokens, so that what both need is read once. Part of ssd.cu.
#pragma once

#include "kernels/cuda/asynchronous.cuh"
#include "kernels/cuda/ssd_problem.cuh"

namespace fenwick::kernels::cuda::ssd_scan {

using pipeline::Position;
using pipeline::Ring;
using pipeline::TileRing;
using tile::bf16;
using tile::exp2_fast;
using warpgroup::Fragment;
using warpgroup::fragment_of;
using warpgroup::load_fragment;
using warpgroup::multiply_fragments;

constexpr int consumers = 2;
constexpr int pipelined_threads = (consumers + 1) * threads;
constexpr int tile_steps = edge / 16;  // fragments of a tile
constexpr int copies_ahead = 2;        // stages on their way while the producer starts the next one
// Scalars of a head that are kept. A head may have one stage of tiles only, and then the producer has not reported those of
// the last `copies_ahead` heads yet: it must not wait for consumers to be through with them.
constexpr int head_stages = copies_ahead + 1;
constexpr float log2_e = 1.44269504f;

// The rings of a block: tiles, two a stage, and the scalars of heads.
template <int Stages, int Ahead = copies_ahead, int HeadStages = head_stages>
struct Rings {
    TileRing<Stages, Ahead> tiles;
    Ring<HeadStages> heads;

    // By all threads of the block, which it synchronizes; `teams` warpgroups read.
    __device__ __forceinline__ void initialize(int teams) {
        if (threadIdx.x == 0) {
            tiles.initialize(teams * threads / 32);
            heads.initialize(teams * threads / 32);
        }
        __syncthreads();
    }
};

// Warpgroups 0 .. consumers - 1 compute, the last one copies.
__device__ __forceinline__ int warpgroup_index() { return tile::thread_index() / threads; }

// A thread's own fragments in shared memory: fragment n of a warpgroup's thread.
__device__ __forceinline__ Fragment& own_fragment(Fragment* base, int n) { return base[n * threads + tile::team_index()]; }

// A thread's part of copying tiles [64, 64] of a matrix whose rows lie `stride` elements apart: its 8 columns of rows `row`,
// `row` + 16, ... What lies behind the last column or row becomes 0.
struct TileCopy {
    std::int64_t from, step;  // in elements: the thread's first ones, and 16 rows on
    int to, row;
    __device__ __forceinline__ TileCopy(std::int64_t stride, int columns) {
        const int thread = tile::team_index(), column = thread % 8 * 8;
        row = column < columns ? thread / 8 : edge;
        to = tile::offset<bf16>(thread / 8, column);
        from = thread / 8 * stride + column;
        step = 16 * stride;
    }
    __device__ __forceinline__ void operator()(bf16* tile, const bf16* matrix, int rows) const {
        const bf16* source = matrix + from;
#pragma unroll
        for (int n = 0; n < edge / 16; ++n, source += step)
            tile::copy_async_16(tile + to + n * 16 * edge, source, row + n * 16 < rows);
    }
    // Tiles one below the other, all of them whole.
    template <int Rows>
    __device__ __forceinline__ void whole(bf16* tiles, const bf16* matrix) const {
        const bf16* source = matrix + from;
#pragma unroll
        for (int n = 0; n < Rows / 16; ++n, source += step) tile::copy_async_16(tiles + to + n * 16 * edge, source, true);
    }
};

// Score tile of `queries` (KT x 4 fragments) with KT tiles of keys, as the thread's own fragments from the `first`-th on.
template <int KT>
__device__ __forceinline__ void score_fragments(Fragment* to, int first, const Fragment (&queries)[KT * tile_steps],
                                                const bf16* keys) {
    Accumulator acc;
    acc.clear();
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) {
        Fragment a[tile_steps];
#pragma unroll
        for (int k = 0; k < tile_steps; ++k) a[k] = queries[kt * tile_steps + k];
        multiply_fragments<true, true>(acc, a, keys + kt * area);
    }
#pragma unroll
    for (int k = 0; k < tile_steps; ++k) own_fragment(to, first + k) = fragment_of(acc, k);
}

// Half of a fragment, 8 columns, times the weights of the thread's two of them; and times the rows' factors.
__device__ __forceinline__ void weigh(Fragment& a, int half, float weight_a, float weight_b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        std::uint32_t& pair = a.x[half * 2 + r];
        const float2 x = tile::unpack(pair);
        pair = tile::pack(x.x * weight_a, x.y * weight_b);
    }
}
__device__ __forceinline__ void weigh(Fragment& a, const float (&factor)[2], int half, float weight_a, float weight_b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        std::uint32_t& pair = a.x[half * 2 + r];
        const float2 x = tile::unpack(pair);
        pair = tile::pack(x.x * (factor[r] * weight_a), x.y * (factor[r] * weight_b));
    }
}

// Writes the tile's rows x columns elements; `aligned`: neighbours may be written as one word.
__device__ __forceinline__ void store_tile(Accumulator& acc, bf16* to, std::int64_t stride, int rows, int columns,
                                           bool aligned) {
    if (columns < edge || !aligned) {
        store_clipped(acc, to, stride, rows, columns, aligned);
        return;
    }
    const int t = warpgroup::first_row();
    to += t * stride + tile::team_index() % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (t + r * 8 >= rows) break;
#pragma unroll
        for (int n = 0; n < 8; ++n) tile::store_pair(to + r * 8 * stride + n * 8, acc.x[n][2 * r], acc.x[n][2 * r + 1]);
    }
}

// Writes 64 value columns of a state, of which a team holds the transpose, to `to`, the first of its `columns` that there
// are: through KT tiles of shared memory of its own, so that rows are written as a whole.
template <int KT>
__device__ __forceinline__ void store_turned(const Problem<bf16>& p, const Accumulator (&acc)[KT], bf16* turned, int team,
                                             bf16* to, int columns) {
    pipeline::synchronize_team(team + 1);  // the last one has been read
#pragma unroll
    for (int kt = 0; kt < KT; ++kt)
#pragma unroll
        for (int k = 0; k < tile_steps; ++k)
            asynchronous::store_transposed(turned + kt * area, fragment_of(acc[kt], k).x, k);
    pipeline::synchronize_team(team + 1);
    const int first = tile::team_index() / 8, v = tile::team_index() % 8 * 8;
    if (v >= columns) return;
#pragma unroll
    for (int n = 0; n < KT * edge / 16; ++n) {
        const int k = first + n * 16;
        if (k >= p.key_width) break;
        *reinterpret_cast<uint4*>(to + k * p.value_width + v) =
            *reinterpret_cast<const uint4*>(turned + k / edge * area + tile::offset<bf16>(k % edge, v));
    }
}

// The buckets that a chunk reads.
struct LiveBucket {
    int slot, level;
};
constexpr int most_live = 32;
template <class T>
__device__ __forceinline__ void list_live(const Problem<T>& p, int slot_id, int chunk, int live, LiveBucket* to) {
    const int n = tile::thread_index();
    if (n >= live) return;
    const Live bucket = live_bucket(p, chunk, n);
    to[n] = {slot_id - bucket.back, bucket.level};
}

__device__ __forceinline__ const bf16* values_at(const Problem<bf16>& p, std::int64_t token, int h, int vt) {
    return p.v + token * p.v_stride + static_cast<std::int64_t>(h) * p.value_width + vt * edge;
}
__device__ __forceinline__ const bf16* output_grad_at(const Problem<bf16>& p, std::int64_t token, int h) {
    return p.d_o + (token * p.heads + h) * p.value_width;
}
// The KT tiles of a state's value tile, one below the other.
template <int KT>
__device__ __forceinline__ void copy_state(const Problem<bf16>& p, const TileCopy& copy, bf16* to, const bf16* states,
                                           int slot, int h, int vt) {
    const bf16* const from = states + p.state_at(slot, h) + vt * edge;
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) copy(to + kt * area, from + kt * edge * p.value_width, p.key_width - kt * edge);
}

// The two tiles of a chunk that a block works on. Grid: 2 x slots, the last chunks first: they read most buckets, and
// shorter blocks even out the end of a launch.
struct Pair {
    SlotInfo slot;
    int slot_id, first, count;  // its first tile in the chunk, how many (0: nothing to do)
    std::int64_t token;         // first of the chunk
    int last_rows;              // of the chunk's last tile
    template <class T>
    __device__ __forceinline__ explicit Pair(const Problem<T>& p)
        : Pair(p, p.slots - 1 - static_cast<int>(blockIdx.x / consumers),
               static_cast<int>(blockIdx.x % consumers) * consumers) {}
    template <class T>
    __device__ __forceinline__ Pair(const Problem<T>& p, int its_slot, int its_first) {
        slot_id = its_slot;
        slot = p.slot_info[slot_id];
        first = its_first;
        count = max(min(consumers, slot.tiles - first), 0);
        token = p.tile_info[slot.tile].token;
        last_rows = p.tile_info[slot.tile + slot.tiles - 1].rows;
    }
    __device__ __forceinline__ int rows(int j) const { return j == slot.tiles - 1 ? last_rows : edge; }
    __device__ __forceinline__ std::int64_t token_of(int j) const { return token + j * edge; }
};

// Fills a stage of two tiles with the KT ones of the queries, or keys, of tile j of a chunk.
template <int KT>
__device__ __forceinline__ void load_key_tiles(const Problem<bf16>& p, bf16* stages, int stage, bool queries,
                                               const Pair& pair, int j, int group) {
    for (int kt = 0; kt < KT; ++kt)
        load_keys(p, stages + (2 * stage + kt) * area, queries, pair.token_of(j), pair.rows(j), group, kt);
}

// What the tiles of a chunk need of one head: decays, and the scales of the first `levels` levels of `scale_tiles` tiles
// (levels beyond the last column repeat it; the linear operator's scales are 1). Rows of level scales are `stride` floats
// apart, an odd number: no bank conflicts.
struct HeadScalars {
    unsigned char* base;
    int levels, stride;

    __device__ __forceinline__ HeadScalars(void* at, int level_count)
        : base(static_cast<unsigned char*>(at)), levels(level_count), stride(level_count | 1) {}
    static __host__ __device__ constexpr int bytes(int levels, int scale_tiles) {
        const int scales = scale_tiles * edge * (levels | 1) * static_cast<int>(sizeof(float));
        return (tiles_per_chunk * edge * static_cast<int>(sizeof(float)) +
                (tiles_per_chunk + 1 + most_live) * static_cast<int>(sizeof(double)) + scales + 15) /
               16 * 16;
    }
    __device__ __forceinline__ float* gamma(int j) const { return reinterpret_cast<float*>(base) + j * edge; }
    // Before tile j of the chunk.
    __device__ __forceinline__ double* start() const {
        return reinterpret_cast<double*>(base + tiles_per_chunk * edge * sizeof(float));
    }
    __device__ __forceinline__ double* chunk_end() const { return start() + tiles_per_chunk; }
    // Up to the end of the n-th live bucket.
    __device__ __forceinline__ double* bucket_end() const { return chunk_end() + 1; }
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(bucket_end() + most_live); }

    __device__ __forceinline__ double end(int j) const { return start()[j] + static_cast<double>(gamma(j)[edge - 1]); }
    // Of what was written at `from` and is read at `to`, both sums of g.
    static __device__ __forceinline__ float decay(double from, double to) {
        return exp2_fast(fminf(static_cast<float>(to - from), 0.0f) * log2_e);
    }
    // Level scale of the row-th token of the tiles whose scales were loaded; those of the next ones are `stride` apart.
    __device__ __forceinline__ const float* scales_of(int row, int level) const { return scales() + row * stride + level; }
    __device__ __forceinline__ float scale(int row, int level) const { return *scales_of(row, level); }

    // By all threads of the block, before it synchronizes for the first time.
    template <class T>
    __device__ __forceinline__ void prepare(const Problem<T>& p, int scale_tiles) const {
        if (p.log_linear) return;
        for (int n = threadIdx.x; n < scale_tiles * edge * stride; n += blockDim.x) scales()[n] = 1.0f;
    }
    // Copies of the producer: gamma and start of tiles [first, last] of the chunk, its end, ends of `live` buckets, scales
    // of the tokens of tiles [scale_first, last].
    template <class T>
    __device__ __forceinline__ void load(const Problem<T>& p, const Pair& pair, int h, int first, int last,
                                         const LiveBucket* buckets, int live, int scale_first) const {
        const int thread = tile::team_index();
        for (int x = first * edge + thread * 4; x < (last + 1) * edge; x += threads * 4)
            tile::copy_async_16(gamma(0) + x, p.gamma + p.at(pair.slot.tile + x / edge, h) * edge + x % edge, true);
        if (thread < tiles_per_chunk) {
            if (thread >= first && thread <= last)
                tile::copy_async<8>(start() + thread, p.start + p.at(pair.slot.tile + thread, h), true);
        } else if (thread == tiles_per_chunk) {
            tile::copy_async<8>(chunk_end(), p.chunk_end + p.at(pair.slot_id, h), true);
        } else if (thread >= 32 && thread < 32 + live) {
            const int n = thread - 32;
            tile::copy_async<8>(bucket_end() + n, p.chunk_end + p.at(buckets[n].slot, h), true);
        }
        if (!p.log_linear) return;
        // 16 threads a token.
        const int row = thread / 16, rows = (last - scale_first) * edge + pair.rows(last) - row;
        const std::int64_t step = static_cast<std::int64_t>(threads / 16) * p.heads * p.levels;
        for (int l = thread % 16; l < levels; l += 16) {
            const float* from =
                p.level_scales + ((pair.token_of(scale_first) + row) * p.heads + h) * p.levels + min(l, p.levels - 1);
            float* to = scales() + row * stride + l;
#pragma unroll 4
            for (int n = 0; n < (last - scale_first + 1) * edge;
                 n += threads / 16, from += step, to += threads / 16 * stride)
                tile::copy_async<4>(to, from, n < rows);
        }
    }
};

}  // namespace fenwick::kernels::cuda::ssd_scan
