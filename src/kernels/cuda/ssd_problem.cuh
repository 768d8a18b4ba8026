// The Mamba-2 scan on CUDA: what its kernels share. ssd.cu says how the scan works.
#pragma once

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/cuda/warpgroup.cuh"

namespace fenwick::kernels::cuda::ssd_scan {

using tile::area;
using tile::edge;
using tile::store_clipped;
using tile::threads;
using tile::Unscaled;
using warpgroup::Accumulator;
using warpgroup::wait_for_tiles;

constexpr int tiles_per_chunk = 4;
constexpr int tile_bits = 6;  // a tile is 2^6 tokens: levels 0..6 are inside it
constexpr int diagonal_levels = tile_bits + 1;
constexpr int chunk_levels = 9;  // levels 0..8 are inside a chunk of 2^8 tokens
constexpr int max_key_tiles = 4;

// ---- geometry --------------------------------------------------------------------------------------------------------

struct TileInfo {
    std::int64_t token;  // its first
    std::int32_t rows;   // tokens in it, 1..64
    std::int32_t index;  // in its document
    std::int32_t slot;   // of its chunk
    std::int32_t document_tiles;
};
struct SlotInfo {
    std::int32_t tile, tiles;  // its first tile and how many
    std::int32_t index;        // chunk in its document
    std::int32_t document_chunks;
    std::int32_t part, parts;  // of the bucket's gradient in bucket_parts; parts == 0: it is in dstates
};
struct DocumentInfo {
    std::int32_t tile, tiles, slot, chunks;
};
// A part of one bucket's gradient: the outputs of `tiles` tiles. Buckets with many readers are split, so that no block is
// much longer than the others; their parts are written to `bucket_parts` and added in order.
struct BucketJob {
    std::int32_t slot, tile, tiles;
    std::int32_t part;  // where in bucket_parts, or -1: straight to dstates
};
constexpr int chunks_per_job = 8;

// Everything the kernels see.
template <class T>
struct Problem {
    int heads, groups, key_width, value_width, key_tiles, value_tiles, levels;
    int all_levels;  // levels that the longest document uses, at least 7
    int max_live;    // most buckets a chunk reads
    int slices;      // of a group's heads
    int tiles, slots, documents;
    bool log_linear;
    bool skip_last;                                   // nobody needs the states of documents' last chunks (outputs do not)
    bool wide_q, wide_k, wide_v, wide_o, wide_state;  // 16-byte copies
    bool paired_o, paired_dq, paired_dk, paired_dv;   // two neighbours may be accessed as one word
    std::int64_t q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride;
    const TileInfo* tile_info;
    const SlotInfo* slot_info;
    const DocumentInfo* document_info;
    const BucketJob* bucket_jobs;
    const T *q, *k, *v, *d_o;
    const float *g, *level_scales;
    T *o, *dq, *dk, *dv;
    float *dg, *dlevel_scales;
    // workspace
    float* gamma;         // [tiles, H, 64]: sum of g from the tile's start; behind the document's end the last value again
    float* to_tile_end;   // [tiles, H, 64]: decay from the token to the tile's end
    double* start;        // [tiles, H]: sum of g before the tile
    double* chunk_end;    // [slots, H]: sum of g up to the chunk's end
    T* states;            // [slots, H, K, V]
    T* dstates;           // [slots, H, K, V]
    float* bucket_parts;  // [parts, H, K, V]
    float* dscales;       // [tiles, H, all_levels, 64]: gradient of every level's scale (1 if linear), before clamping
    float* score_grad;    // [slices of all groups, tiles, 4, 64, 64]
    float* dq_parts;      // [slices of all groups, tiles, key_tiles, 64, 64]
    float* dk_parts;
    // Terms P(t, s) = scale(t, s) decay(t, s) (q_t . k_s) (v_s . do_t), s < t, of the decays' gradient, in sums:
    float* received;    // [tiles, H, 64]: over all s, for every t
    float* given_near;  // [tiles, H, 4, 64]: over the tile's t, for every s of the chunk's tiles up to this one
    float* given_far;   // [tiles, H, 64]: over all t of later chunks, for every s
    float* tile_flow;   // [tiles, H, 32]: over the tile's t and the s of one bucket, for each bit of the chunk's index
    float* level_flow;  // [slots, H, 32]: the same for a whole chunk
    float* crossing;    // [slots, H, flow_warps]: partial sums of <bucket, what its gradient owes to its parents>
    float* whole;       // [slots, H]: over t behind the chunk and s before it
    int flow_warps;

    __device__ std::int64_t at(int tile_id, int h) const { return static_cast<std::int64_t>(tile_id) * heads + h; }
    __device__ std::int64_t state_at(int slot, int h) const { return at(slot, h) * key_width * value_width; }
    __device__ float scale(std::int64_t token, int h, int level) const {
        if (level_scales == nullptr) return 1.0f;
        return level_scales[(token * heads + h) * levels + min(level, levels - 1)];
    }
    __device__ float* dscales_at(int tile_id, int h, int level) const {
        return dscales + (at(tile_id, h) * all_levels + level) * edge;
    }
};

__device__ __forceinline__ int trailing_ones(int x) { return __ffs(~x) - 1; }

// Heads of one block: blockIdx.y counts the slices of all groups.
struct HeadRange {
    int group, first, count;
};
template <class T>
__device__ __forceinline__ HeadRange head_range(const Problem<T>& p) {
    const int per_group = p.heads / p.groups, per_slice = (per_group + p.slices - 1) / p.slices;
    const int group = static_cast<int>(blockIdx.y) / p.slices, part = static_cast<int>(blockIdx.y) % p.slices;
    const int first = min(part * per_slice, per_group), last = min(first + per_slice, per_group);
    return {group, group * per_group + first, last - first};
}

// The buckets that chunk c reads.
template <class T>
__device__ __forceinline__ int live_count(const Problem<T>& p, int c) {
    return p.log_linear ? __popc(c) : (c > 0 ? 1 : 0);
}
// The n-th of them: how many chunks before the reader's its last chunk is, and its level.
struct Live {
    int back, level;
};
template <class T>
__device__ __forceinline__ Live live_bucket(const Problem<T>& p, int c, int n) {
    if (!p.log_linear) return {1, chunk_levels};
    int rest = c;
    for (int i = 0; i < n; ++i) rest &= rest - 1;
    const int j = __ffs(rest) - 1;
    return {c - (((c >> j) << j) - 1), chunk_levels + j};
}

// Whether a tile sees a level. (The linear operator's one bucket takes the level behind those inside a chunk.)
template <class T>
__device__ __forceinline__ bool sees_level(const Problem<T>& p, int tile_index, int level) {
    if (level < diagonal_levels) return true;
    if (!p.log_linear && level == chunk_levels) return tile_index >= tiles_per_chunk;
    return (tile_index >> (level - diagonal_levels) & 1) != 0;
}

// The level mask of a tile on the diagonal, times its decay.
struct DiagonalMask {
    const float *gamma, *scales;  // [64]; [7][64]
    __device__ __forceinline__ float operator()(int t, int s) const {
        return s <= t ? scales[bits_of(t ^ s) * edge + t] * __expf(gamma[t] - gamma[s]) : 0.0f;
    }
    // Two neighbours, s and s + 1 (even s), or t and t + 1. Off the diagonal blocks of 8 x 8 a block has one level; which
    // case it is, is the same for a warp.
    __device__ __forceinline__ float2 sources(int t, int s, float2 x) const {
        const int block_t = t >> 3, block_s = s >> 3;
        if (block_s > block_t) return make_float2(0.0f, 0.0f);
        if (block_s == block_t) return make_float2(x.x * (*this)(t, s), x.y * (*this)(t, s + 1));
        const float scale = scales[(3 + bits_of(block_t ^ block_s)) * edge + t], end = gamma[t];
        const float2 start = tile::load_pair(gamma + s);
        return make_float2(x.x * scale * __expf(end - start.x), x.y * scale * __expf(end - start.y));
    }
    __device__ __forceinline__ float2 readers(int t, int s, float2 x) const {
        const int block_t = t >> 3, block_s = s >> 3;
        if (block_s > block_t) return make_float2(0.0f, 0.0f);
        if (block_s == block_t) return make_float2(x.x * (*this)(t, s), x.y * (*this)(t + 1, s));
        const float2 scale = tile::load_pair(scales + (3 + bits_of(block_t ^ block_s)) * edge + t);
        const float2 end = tile::load_pair(gamma + t);
        const float start = gamma[s];
        return make_float2(x.x * scale.x * __expf(end.x - start), x.y * scale.y * __expf(end.y - start));
    }
};

// Brings the next head's level scales of a tile into the L2 cache.
template <class T>
__device__ __forceinline__ void prefetch_scales(const Problem<T>& p, const TileInfo& info, int h) {
    const int tid = threadIdx.x;
    if (p.level_scales == nullptr || tid >= info.rows || h + 1 >= p.heads) return;
    const float* const row = p.level_scales + ((info.token + tid) * p.heads + h + 1) * p.levels;
    tile::prefetch(row);
    tile::prefetch(row + p.levels - 1);
}

// Level scales 0..6 of a tile's tokens, transposed, and gamma; 0 behind the document's end.
template <class T>
__device__ __forceinline__ void load_diagonal(const Problem<T>& p, int tile_id, const TileInfo& info, int h, float* gamma,
                                              float* scales) {
    const int tid = threadIdx.x;
    if (tid < edge) gamma[tid] = p.gamma[p.at(tile_id, h) * edge + tid];
    for (int n = tid; n < diagonal_levels * edge; n += threads) {
        const int t = n / diagonal_levels, l = n % diagonal_levels;
        scales[l * edge + t] = t < info.rows ? p.scale(info.token + t, h, l) : 0.0f;
    }
    prefetch_scales(p, info, h);
}

// Decay from s to the end of its tile.
template <class T>
__device__ __forceinline__ float decay_to_tile_end(const Problem<T>& p, int tile_id, int h, int s) {
    const float* gamma = p.gamma + p.at(tile_id, h) * edge;
    return __expf(gamma[edge - 1] - gamma[s]);
}
template <class T>
__device__ __forceinline__ double tile_end(const Problem<T>& p, int tile_id, int h) {
    return p.start[p.at(tile_id, h)] + static_cast<double>(p.gamma[p.at(tile_id, h) * edge + edge - 1]);
}
// Decay from the position `from` (<= the tile's start) to token t of the tile.
template <class T>
__device__ __forceinline__ float decay_into_tile(const Problem<T>& p, int tile_id, int h, double from, int t) {
    const std::int64_t at = p.at(tile_id, h);
    return __expf(fminf(static_cast<float>(p.start[at] - from), 0.0f) + p.gamma[at * edge + t]);
}

// tile::load, with a short way for whole tiles: its address arithmetic is most of what a copy costs.
template <class T>
__device__ __forceinline__ void load_tile(T* to, const T* from, std::int64_t stride, int rows, int cols, bool vector) {
    if (!vector || rows < edge || cols < edge) {
        tile::load(to, from, stride, rows, cols, vector);
        return;
    }
    constexpr int unit = 16 / sizeof(T), units = edge / unit, step = threads / units;  // rows of a round, a multiple of 8
    const int thread = tile::team_index(), row = thread / units, col = thread % units * unit;
    from += row * stride + col;
    to += tile::offset<T>(row, col);
#pragma unroll
    for (int n = 0; n < edge / step; ++n, from += step * stride) tile::copy_async_16(to + n * step * edge, from, true);
}

// The tile of q or k.
template <class T>
__device__ __forceinline__ void load_keys(const Problem<T>& p, T* to, bool queries, std::int64_t token, int rows, int group,
                                          int kt) {
    const std::int64_t stride = queries ? p.q_stride : p.k_stride;
    const T* from = (queries ? p.q : p.k) + token * stride + static_cast<std::int64_t>(group) * p.key_width + kt * edge;
    load_tile(to, from, stride, rows, p.key_width - kt * edge, queries ? p.wide_q : p.wide_k);
}
template <class T>
__device__ __forceinline__ void load_values(const Problem<T>& p, T* to, std::int64_t token, int rows, int h, int vt) {
    load_tile(to, p.v + token * p.v_stride + static_cast<std::int64_t>(h) * p.value_width + vt * edge, p.v_stride, rows,
              p.value_width - vt * edge, p.wide_v);
}
template <class T>
__device__ __forceinline__ void load_output_grad(const Problem<T>& p, T* to, std::int64_t token, int rows, int h, int vt) {
    const std::int64_t stride = static_cast<std::int64_t>(p.heads) * p.value_width;
    load_tile(to, p.d_o + token * stride + static_cast<std::int64_t>(h) * p.value_width + vt * edge, stride, rows,
              p.value_width - vt * edge, p.wide_o);
}
template <class T>
__device__ __forceinline__ void load_state(const Problem<T>& p, T* to, const T* states, int slot, int h, int kt, int vt) {
    load_tile(to, states + p.state_at(slot, h) + static_cast<std::int64_t>(kt) * edge * p.value_width + vt * edge,
              p.value_width, p.key_width - kt * edge, p.value_width - vt * edge, p.wide_state);
}

}  // namespace fenwick::kernels::cuda::ssd_scan
