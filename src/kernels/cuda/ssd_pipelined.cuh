// The scan's kernels for bfloat16 in whole 16-byte rows and K <= 128 (pipeline.cuh): a block has one warpgroup that copies
// and two that compute, each on its own tile of 64 tokens, so that what both need is read once. Part of ssd.cu.
#pragma once

#include "kernels/cuda/pipeline.cuh"
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
};

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

// The two tiles of a chunk that a block works on. Grid: 2 x slots, the last chunks first: they read most buckets, and shorter
// blocks even out the end of a launch.
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

// ---- chunk states, and the gradients that outputs give to buckets ----------------------------------------------------

constexpr int outer_teams = 3;  // a head each: they share q or k
constexpr int outer_threads = (outer_teams + 1) * threads;
constexpr int outer_stages = 4;

// Of one tile and head: sums of g in it, level scales, and the float64 sums up to the tile and to the state's end.
struct OuterScalars {
    float gamma[edge], scale[edge];
    double start, end;
};

template <int KT>
std::size_t pipelined_outer_shared() {
    return outer_stages * ((KT + outer_teams) * area * sizeof(bf16) + outer_teams * sizeof(OuterScalars)) +
           sizeof(TileRing<outer_stages, copies_ahead>);
}

// outer_products for value columns vt, transposed, so that the narrower operand is the one that is scaled: out'[v, k] = sum
// of (scale y)' x. Grid: slots or jobs, head slices of all groups, value tiles.
template <int KT, bool Reader>
__global__ void __launch_bounds__(outer_threads, 1) pipelined_outer_products(Problem<bf16> p) {
    const HeadRange range = head_range(p);
    const int vt = blockIdx.z;
    int slot = static_cast<int>(blockIdx.x), first, tiles, level = 0, part = -1;
    if constexpr (Reader) {
        const BucketJob job = p.bucket_jobs[slot];
        slot = job.slot;
        part = job.part;
        level = min(chunk_levels + trailing_ones(p.slot_info[slot].index), p.levels - 1);
        first = job.tile;
        tiles = job.tiles;
    } else {
        first = p.slot_info[slot].tile;
        tiles = p.slot_info[slot].tiles;
    }
    bf16* const stages = reinterpret_cast<bf16*>(tile::shared_memory());  // KT tiles of q or k, one of do or v for each head
    constexpr int stage_size = (KT + outer_teams) * area;
    OuterScalars* const scalars = reinterpret_cast<OuterScalars*>(stages + outer_stages * stage_size);
    auto& ring = *reinterpret_cast<TileRing<outer_stages, copies_ahead>*>(scalars + outer_stages * outer_teams);
    if (threadIdx.x == 0) ring.initialize(outer_teams * threads / 32);
    if (!p.log_linear)
        for (int n = threadIdx.x; n < outer_stages * outer_teams * edge; n += outer_threads)
            scalars[n / edge].scale[n % edge] = 1.0f;
    __syncthreads();

    const int self = warpgroup_index(), thread = tile::team_index();
    if (self == outer_teams) {
        typename std::remove_reference_t<decltype(ring)>::Producer producer;
        const std::int64_t key_stride = Reader ? p.q_stride : p.k_stride;
        const std::int64_t value_stride = Reader ? static_cast<std::int64_t>(p.heads) * p.value_width : p.v_stride;
        const bf16* const keys = (Reader ? p.q : p.k) + static_cast<std::int64_t>(range.group) * p.key_width;
        const bf16* const values = (Reader ? p.d_o : p.v) + vt * edge;
        const TileCopy copy_keys(key_stride, p.key_width), copy_last_keys(key_stride, p.key_width - (KT - 1) * edge);
        const TileCopy copy_value(value_stride, p.value_width - vt * edge);
        const std::int64_t token = tiles > 0 ? p.tile_info[first].token : 0;
        const int last_rows = tiles > 0 ? p.tile_info[first + tiles - 1].rows : 0;
        for (int base = range.first; base < range.first + range.count; base += outer_teams) {
            const int heads = min(outer_teams, range.first + range.count - base);
            for (int t = 0; t < tiles; ++t) {
                ring.acquire(producer);
                bf16* const to = stages + producer.at.stage * stage_size;
                const std::int64_t its_token = token + t * edge;
                const int rows = t == tiles - 1 ? last_rows : edge;
#pragma unroll
                for (int kt = 0; kt < KT; ++kt)
                    (kt < KT - 1 ? copy_keys : copy_last_keys)(to + kt * area, keys + its_token * key_stride + kt * edge,
                                                               rows);
                for (int x = 0; x < heads; ++x) {
                    const int h = base + x;
                    copy_value(to + (KT + x) * area,
                               values + its_token * value_stride + static_cast<std::int64_t>(h) * p.value_width, rows);
                    OuterScalars& its = scalars[producer.at.stage * outer_teams + x];
                    const std::int64_t at = p.at(first + t, h);
                    if (thread < edge) {
                        if (Reader && p.log_linear)
                            tile::copy_async<4>(
                                its.scale + thread,
                                p.level_scales + ((its_token + min(thread, rows - 1)) * p.heads + h) * p.levels + level,
                                thread < rows);
                    } else if (thread < edge + edge / 4) {
                        tile::copy_async_16(its.gamma + (thread - edge) * 4, p.gamma + at * edge + (thread - edge) * 4,
                                            true);
                    } else if (thread == 96) {
                        tile::copy_async<8>(&its.start, p.start + at, true);
                    } else if (thread == 97) {
                        tile::copy_async<8>(&its.end, p.chunk_end + p.at(slot, h), true);
                    }
                }
                ring.commit(producer);
            }
        }
        ring.finish(producer);
        return;
    }

    Position<outer_stages> at;
    const int column = thread % 4 * 2;
    for (int base = range.first; base < range.first + range.count; base += outer_teams) {
        const int h = base + self;
        const bool active = h < range.first + range.count;
        Accumulator acc[KT];
#pragma unroll
        for (int kt = 0; kt < KT; ++kt) acc[kt].clear();
        for (int t = 0; t < tiles; ++t) {
            ring.wait(at);
            if (active) {
                const bf16* const from = stages + at.stage * stage_size;
                const OuterScalars& its = scalars[at.stage * outer_teams + self];
                // Tokens are read at the state's end, or read from it.
                const float between =
                    fminf(static_cast<float>(Reader ? its.start - its.end : its.end - its.start), 0.0f) * log2_e;
                Fragment a[tile_steps];
#pragma unroll
                for (int k = 0; k < tile_steps; ++k) {
                    a[k] = load_fragment<true>(from + (KT + self) * area, k * 16);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int s = k * 16 + half * 8 + column;
                        const float2 gamma = tile::load_pair(its.gamma + s);
                        float weight_a, weight_b;
                        if constexpr (Reader) {
                            const float2 scale = tile::load_pair(its.scale + s);
                            weight_a = scale.x * exp2_fast(between + gamma.x * log2_e);
                            weight_b = scale.y * exp2_fast(between + gamma.y * log2_e);
                        } else {
                            // Sums of different precision: their difference may come out a little above 0.
                            weight_a = exp2_fast(fminf(static_cast<float>(its.end - its.start) - gamma.x, 0.0f) * log2_e);
                            weight_b = exp2_fast(fminf(static_cast<float>(its.end - its.start) - gamma.y, 0.0f) * log2_e);
                        }
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            std::uint32_t& pair = a[k].x[half * 2 + r];
                            const float2 x = tile::unpack(pair);
                            pair = tile::pack(x.x * weight_a, x.y * weight_b);
                        }
                    }
                }
#pragma unroll
                for (int kt = 0; kt < KT; ++kt) multiply_fragments<false, true>(acc[kt], a, from + kt * area);
            }
            ring.release(at);
        }
        if (!active) continue;
        const auto store = [&](auto* to) {
            using E = std::remove_pointer_t<decltype(to)>;
            const int v = warpgroup::first_row();
            to += vt * edge + v;
#pragma unroll
            for (int kt = 0; kt < KT; ++kt)
#pragma unroll
                for (int block = 0; block < 8; ++block)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int k = kt * edge + block * 8 + column + e % 2, below = e / 2 * 8;
                        if (k < p.key_width && vt * edge + v + below < p.value_width)
                            to[k * p.value_width + below] = tile::from_float<E>(acc[kt].x[block][e]);
                    }
        };
        if (part < 0) {
            store((Reader ? p.dstates : p.states) + p.state_at(slot, h));
        } else {
            store(p.bucket_parts + p.state_at(part, h));
        }
    }
}

// ---- backward (V <= 64) ----------------------------------------------------------------------------------------------

// Writes what the two halves of a product with 64-wide accumulators left: one float32 tile each.
template <int KT>
__device__ __forceinline__ void store_parts(Accumulator (&total)[KT], float* out) {
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) store_clipped(total[kt], out + kt * area, edge, edge, edge, true);
}

constexpr int query_gradient_stages = 8;

template <int KT>
std::size_t pipelined_query_gradient_shared(int all_levels) {
    return (2 * query_gradient_stages + consumers * KT) * area * sizeof(bf16) +
           head_stages * HeadScalars::bytes(all_levels, consumers) + sizeof(TileRing<query_gradient_stages, copies_ahead>) +
           sizeof(Ring<head_stages>) + most_live * sizeof(LiveBucket);
}

// query_gradients of two tiles. Grid: 2 x slots, head slices of all groups.
// Order of the stages: q of the tiles; then for every head do of the tiles, in one stage, and the states of the live
// buckets.
template <int KT>
__global__ void __launch_bounds__(pipelined_threads, 1) pipelined_query_gradients(Problem<bf16> p) {
    const Pair pair(p);
    if (pair.count == 0) return;
    const HeadRange range = head_range(p);
    const int live = live_count(p, pair.slot.index), last = pair.first + pair.count - 1;
    const int heads = live > 0 ? range.count : 0;
    bf16* const stages = reinterpret_cast<bf16*>(tile::shared_memory());  // 2 tiles each
    Fragment* const all_queries = reinterpret_cast<Fragment*>(stages + 2 * query_gradient_stages * area);
    unsigned char* const scalars = reinterpret_cast<unsigned char*>(all_queries) + consumers * KT * area * sizeof(bf16);
    const int scalar_bytes = HeadScalars::bytes(p.all_levels, consumers);
    auto& ring = *reinterpret_cast<TileRing<query_gradient_stages, copies_ahead>*>(scalars + head_stages * scalar_bytes);
    auto& head_ring = *reinterpret_cast<Ring<head_stages>*>(&ring + 1);
    auto* const buckets = reinterpret_cast<LiveBucket*>(&head_ring + 1);
    list_live(p, pair.slot_id, pair.slot.index, live, buckets);
    const auto head_at = [&](int stage) { return HeadScalars(scalars + stage * scalar_bytes, p.all_levels); };
    for (int n = 0; n < head_stages; ++n) head_at(n).prepare(p, consumers);
    if (threadIdx.x == 0) {
        ring.initialize(pair.count * threads / 32);
        head_ring.initialize(pair.count * threads / 32);
    }
    __syncthreads();

    Position<head_stages> head_position;
    const int self = warpgroup_index();
    if (self == consumers) {
        typename std::remove_reference_t<decltype(ring)>::Producer producer;
        for (int j = pair.first; j <= last && heads > 0; ++j) {
            ring.acquire(producer);
            for (int kt = 0; kt < KT; ++kt)
                load_keys(p, stages + (2 * producer.at.stage + kt) * area, true, pair.token_of(j), pair.rows(j), range.group,
                          kt);
            ring.commit(producer);
        }
        const TileCopy copy_grad(static_cast<std::int64_t>(p.heads) * p.value_width, p.value_width);
        const TileCopy copy_of_state(p.value_width, p.value_width);
        for (int h = range.first; h < range.first + heads; ++h) {
            head_ring.acquire(head_position);
            head_at(head_position.stage).load(p, pair, h, pair.first, last, buckets, live, pair.first);
            head_ring.commit(head_position);
            ring.acquire(producer);
            for (int x = 0; x < pair.count; ++x)
                copy_grad(stages + (2 * producer.at.stage + x) * area, output_grad_at(p, pair.token_of(pair.first + x), h),
                          pair.rows(pair.first + x));
            ring.commit(producer);
            for (int n = 0; n < live; ++n) {
                ring.acquire(producer);
                copy_state<KT>(p, copy_of_state, stages + 2 * producer.at.stage * area, p.states, buckets[n].slot, h, 0);
                ring.commit(producer);
            }
        }
        ring.finish(producer);
        return;
    }
    if (self >= pair.count) return;
    Position<query_gradient_stages> at;

    const int i = pair.first + self, tile_id = pair.slot.tile + i, t = warpgroup::first_row(), row = self * edge + t;
    Fragment* const queries = all_queries + self * KT * tile_steps * threads;
    for (int x = 0; x < pair.count && heads > 0; ++x) {
        ring.wait(at);
        if (x == self) {
#pragma unroll
            for (int k = 0; k < KT * tile_steps; ++k)
                own_fragment(queries, k) =
                    load_fragment<false>(stages + (2 * at.stage + k / tile_steps) * area, k % tile_steps * 16);
        }
        ring.release(at);
    }
    Accumulator total[KT];
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) total[kt].clear();
    for (int h = range.first; h < range.first + heads; ++h) {
        head_ring.wait(head_position);
        const HeadScalars head = head_at(head_position.stage);
        const double start = head.start()[i];
        const float into[2] = {exp2_fast(head.gamma(i)[t] * log2_e), exp2_fast(head.gamma(i)[t + 8] * log2_e)};
        Fragment grad[tile_steps];
        ring.wait(at);
#pragma unroll
        for (int k = 0; k < tile_steps; ++k) grad[k] = load_fragment<false>(stages + (2 * at.stage + self) * area, k * 16);
        ring.release(at);
        for (int n = 0; n < live; ++n) {
            const int level = buckets[n].level;
            const float between = HeadScalars::decay(head.bucket_end()[n], start);
            const float decay[2] = {into[0] * between, into[1] * between};
            const float factor[2] = {head.scale(row, level) * decay[0], head.scale(row + 8, level) * decay[1]};
            float sums[2] = {0, 0};
            ring.wait(at);
#pragma unroll
            for (int kt = 0; kt < KT; ++kt) {
                Accumulator part;  // do S'
                multiply_fragments<true, false>(part, grad, stages + (2 * at.stage + kt) * area);
                if (kt == KT - 1) ring.release(at);
#pragma unroll
                for (int k = 0; k < tile_steps; ++k) {
                    const Fragment query = own_fragment(queries, kt * tile_steps + k);
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float2 q = tile::unpack(query.x[e]);
                        const int block = 2 * k + e / 2, r = e % 2;
                        const float a = part.x[block][2 * r], b = part.x[block][2 * r + 1];
                        sums[r] += a * q.x + b * q.y;
                        total[kt].x[block][2 * r] += factor[r] * a;
                        total[kt].x[block][2 * r + 1] += factor[r] * b;
                    }
                }
            }
            warpgroup::sum_over_columns(sums);
            if (tile::team_index() % 4 == 0) {
                float* const to = p.dscales_at(tile_id, h, level);
                to[t] = t < pair.rows(i) ? sums[0] * decay[0] : 0.0f;
                to[t + 8] = t + 8 < pair.rows(i) ? sums[1] * decay[1] : 0.0f;
            }
        }
        head_ring.release(head_position);
    }
    store_parts(total, p.dq_parts + (static_cast<std::int64_t>(blockIdx.y) * p.tiles + tile_id) * KT * area);
}

constexpr int key_gradient_stages = 5;
constexpr int key_gradient_strip = 7;  // score tiles of the two warpgroups: 4 and 3 at most

template <int KT>
std::size_t pipelined_key_gradient_shared() {
    return (2 * key_gradient_stages + key_gradient_strip + consumers * KT) * area * sizeof(bf16) +
           head_stages * HeadScalars::bytes(chunk_levels, tiles_per_chunk) +
           sizeof(TileRing<key_gradient_stages, copies_ahead>) + sizeof(Ring<head_stages>);
}

// One fragment times factor[row] scale(column) exp(gamma[column] - reference); `gamma` and `scales` from the thread's first
// column on.
__device__ __forceinline__ void scale_readers(Fragment& a, const float (&factor)[2], float reference, const float* gamma,
                                              const float* scales, int stride) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 at = tile::load_pair(gamma + half * 8);
        const float weight_a = scales[half * 8 * stride] * exp2_fast(at.x * log2_e - reference);
        const float weight_b = scales[(half * 8 + 1) * stride] * exp2_fast(at.y * log2_e - reference);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            std::uint32_t& pair = a.x[half * 2 + r];
            const float2 x = tile::unpack(pair);
            pair = tile::pack(x.x * (factor[r] * weight_a), x.y * (factor[r] * weight_b));
        }
    }
}

// k q' x (level mask and decay) of a tile with itself, t >= s; its rows of level scales are `row` on. As mask_diagonal, with
// columns that read and rows that are read.
__device__ __forceinline__ void mask_readers(Fragment (&a)[tile_steps], const HeadScalars& head, const float* gamma, int row,
                                             Fragment* scores) {
    const int lane = tile::team_index() % 32, warp = tile::team_index() / 32;
    const int s = warp * 16 + lane / 4, column = lane % 4 * 2;
    const float start[2] = {gamma[s] * log2_e, gamma[s + 8] * log2_e};
    const float behind = gamma[warp * 16 + 15] * log2_e;
    const float up_to[2] = {exp2_fast(behind - start[0]), exp2_fast(behind - start[1])};
#pragma unroll
    for (int k = 0; k < tile_steps; ++k) {
        if (k < warp) {
            a[k] = {{0, 0, 0, 0}};
            continue;
        }
        a[k] = own_fragment(scores, k);
        const int t = k * 16 + column;
        if (k > warp) {
            scale_readers(a[k], up_to, behind, gamma + t, head.scales_of(row + t, k == (warp ^ 1) ? 5 : 6), head.stride);
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 end = tile::load_pair(gamma + t + half * 8);
#pragma unroll
            for (int r = 0; r <= half; ++r) {
                std::uint32_t& pair = a[k].x[half * 2 + r];
                const float2 x = tile::unpack(pair);
                const float decay_a = exp2_fast(end.x * log2_e - start[r]), decay_b = exp2_fast(end.y * log2_e - start[r]);
                const int level_a = half == r ? bits_of(lane / 4 ^ column) : 4;
                const int level_b = half == r ? bits_of(lane / 4 ^ (column + 1)) : 4;
                const float scale_a = head.scale(row + t + half * 8, level_a);
                const float scale_b = head.scale(row + t + half * 8 + 1, level_b);
                pair = tile::pack(half > r || column >= lane / 4 ? x.x * scale_a * decay_a : 0.0f,
                                  half > r || column + 1 >= lane / 4 ? x.y * scale_b * decay_b : 0.0f);
            }
        }
        a[k].x[1] = 0;  // columns 0 .. 7 are before rows 8 .. 15
    }
}

// key_gradients of two tiles. Grid: 2 x slots, head slices of all groups.
// Order of the stages: k of the tiles, q of the chunk's tiles from them on; then for every head v of the tiles, the gradient
// of the chunk's state, and do of the chunk's tiles from them on, two a stage.
template <int KT>
__global__ void __launch_bounds__(pipelined_threads, 1) pipelined_key_gradients(Problem<bf16> p) {
    const Pair pair(p);
    if (pair.count == 0) return;
    const HeadRange range = head_range(p);
    const int last = pair.slot.tiles - 1;
    bf16* const stages = reinterpret_cast<bf16*>(tile::shared_memory());  // 2 tiles each
    Fragment* const strip = reinterpret_cast<Fragment*>(stages + 2 * key_gradient_stages * area);
    Fragment* const all_keys = strip + key_gradient_strip * tile_steps * threads;
    unsigned char* const scalars = reinterpret_cast<unsigned char*>(all_keys) + consumers * KT * area * sizeof(bf16);
    const int scalar_bytes = HeadScalars::bytes(chunk_levels, tiles_per_chunk);
    auto& ring = *reinterpret_cast<TileRing<key_gradient_stages, copies_ahead>*>(scalars + head_stages * scalar_bytes);
    auto& head_ring = *reinterpret_cast<Ring<head_stages>*>(&ring + 1);
    const auto head_at = [&](int stage) { return HeadScalars(scalars + stage * scalar_bytes, chunk_levels); };
    for (int n = 0; n < head_stages; ++n) head_at(n).prepare(p, tiles_per_chunk);
    if (threadIdx.x == 0) {
        ring.initialize(pair.count * threads / 32);
        head_ring.initialize(pair.count * threads / 32);
    }
    __syncthreads();

    Position<head_stages> head_position;
    const int self = warpgroup_index();
    if (self == consumers) {
        typename std::remove_reference_t<decltype(ring)>::Producer producer;
        const auto fetch_keys = [&](int j, bool queries) {
            ring.acquire(producer);
            for (int kt = 0; kt < KT; ++kt)
                load_keys(p, stages + (2 * producer.at.stage + kt) * area, queries, pair.token_of(j), pair.rows(j),
                          range.group, kt);
            ring.commit(producer);
        };
        for (int x = 0; x < pair.count; ++x) fetch_keys(pair.first + x, false);
        for (int m = pair.first; m <= last; ++m) fetch_keys(m, true);
        const TileCopy copy_value(p.v_stride, p.value_width);
        const TileCopy copy_grad(static_cast<std::int64_t>(p.heads) * p.value_width, p.value_width);
        const TileCopy copy_of_state(p.value_width, p.value_width);
        for (int h = range.first; h < range.first + range.count; ++h) {
            head_ring.acquire(head_position);
            head_at(head_position.stage).load(p, pair, h, pair.first, last, nullptr, 0, pair.first);
            head_ring.commit(head_position);
            ring.acquire(producer);
            for (int x = 0; x < pair.count; ++x)
                copy_value(stages + (2 * producer.at.stage + x) * area, values_at(p, pair.token_of(pair.first + x), h, 0),
                           pair.rows(pair.first + x));
            ring.commit(producer);
            ring.acquire(producer);
            copy_state<KT>(p, copy_of_state, stages + 2 * producer.at.stage * area, p.dstates, pair.slot_id, h, 0);
            ring.commit(producer);
            for (int m = pair.first; m <= last; m += 2) {
                ring.acquire(producer);
                for (int x = m; x <= min(m + 1, last); ++x)
                    copy_grad(stages + (2 * producer.at.stage + x - m) * area, output_grad_at(p, pair.token_of(x), h),
                              pair.rows(x));
                ring.commit(producer);
            }
        }
        ring.finish(producer);
        return;
    }
    if (self >= pair.count) return;
    Position<key_gradient_stages> at;

    const int j = pair.first + self, tile_id = pair.slot.tile + j, s = warpgroup::first_row();
    const int lane = tile::team_index() % 32, column = lane % 4 * 2;
    Fragment* const scores = strip + self * 4 * tile_steps * threads;
    Fragment* const keys = all_keys + self * KT * tile_steps * threads;
    for (int x = 0; x < pair.count; ++x) {
        ring.wait(at);
        if (x == self) {
#pragma unroll
            for (int k = 0; k < KT * tile_steps; ++k)
                own_fragment(keys, k) =
                    load_fragment<false>(stages + (2 * at.stage + k / tile_steps) * area, k % tile_steps * 16);
        }
        ring.release(at);
    }
    for (int m = pair.first; m <= last; ++m) {
        ring.wait(at);
        if (m >= j) {
            Accumulator acc;
            acc.clear();
#pragma unroll
            for (int kt = 0; kt < KT; ++kt) {
                Fragment a[tile_steps];
#pragma unroll
                for (int k = 0; k < tile_steps; ++k) a[k] = own_fragment(keys, kt * tile_steps + k);
                multiply_fragments<true, true>(acc, a, stages + (2 * at.stage + kt) * area);
            }
#pragma unroll
            for (int k = 0; k < tile_steps; ++k) own_fragment(scores, (m - j) * tile_steps + k) = fragment_of(acc, k);
        }
        ring.release(at);
    }

    Accumulator total[KT];
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) total[kt].clear();
    for (int h = range.first; h < range.first + range.count; ++h) {
        head_ring.wait(head_position);
        const HeadScalars head = head_at(head_position.stage);
        const float* const gamma = head.gamma(j);
        const double end = head.end(j);
        const float tile_end = gamma[edge - 1];
        const float to_end[2] = {exp2_fast((tile_end - gamma[s]) * log2_e), exp2_fast((tile_end - gamma[s + 8]) * log2_e)};
        // Decay from the tile's end to the chunk's: the chunk's state is taken there.
        const float rest = HeadScalars::decay(end, head.chunk_end()[0]);
        Fragment value[tile_steps];
        ring.wait(at);
#pragma unroll
        for (int k = 0; k < tile_steps; ++k) value[k] = load_fragment<false>(stages + (2 * at.stage + self) * area, k * 16);
        ring.release(at);

        Accumulator acc;
        ring.wait(at);
        {
            Fragment a[KT * tile_steps];
#pragma unroll
            for (int k = 0; k < KT * tile_steps; ++k) a[k] = own_fragment(keys, k);
            multiply_fragments<false, false>(acc, a, stages + 2 * at.stage * area);
        }
        float sums[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < tile_steps; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int block = 2 * k + e / 2, r = e % 2;
                const float2 v = tile::unpack(value[k].x[e]);
                float& a = acc.x[block][2 * r];
                float& b = acc.x[block][2 * r + 1];
                a *= rest;
                b *= rest;
                sums[r] += v.x * a + v.y * b;
                const float weight = to_end[r] * rest;
                value[k].x[e] = tile::pack(v.x * weight, v.y * weight);
            }
#pragma unroll
        for (int kt = 0; kt < KT; ++kt)
            multiply_fragments<true, true>(total[kt], value, stages + (2 * at.stage + kt) * area);
        ring.release(at);
        warpgroup::sum_over_columns(sums);
        if (lane % 4 == 0) {
            p.given_far[p.at(tile_id, h) * edge + s] = sums[0] * to_end[0];
            p.given_far[p.at(tile_id, h) * edge + s + 8] = sums[1] * to_end[1];
        }

#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int block = 0; block < 8; ++block) {
                acc.x[block][2 * r] *= to_end[r];
                acc.x[block][2 * r + 1] *= to_end[r];
            }
        for (int m = pair.first; m <= last; ++m) {
            if ((m - pair.first) % 2 == 0) ring.wait(at);
            if (m >= j) {
                Fragment a[tile_steps];
                Fragment* const its = scores + (m - j) * tile_steps * threads;
                if (m == j) {
                    mask_readers(a, head, gamma, self * edge, its);
                } else {
                    const int level = tile_bits + bits_of(j ^ m);
                    const float between = HeadScalars::decay(end, head.start()[m]);
                    const float factor[2] = {to_end[0] * between, to_end[1] * between};
                    const int row = (m - pair.first) * edge + column;
#pragma unroll
                    for (int k = 0; k < tile_steps; ++k) {
                        a[k] = own_fragment(its, k);
                        scale_readers(a[k], factor, 0.0f, head.gamma(m) + k * 16 + column,
                                      head.scales_of(row + k * 16, level), head.stride);
                    }
                }
                multiply_fragments<false, true>(acc, a, stages + (2 * at.stage + (m - pair.first) % 2) * area);
            }
            if ((m - pair.first) % 2 == 1 || m == last) ring.release(at);
        }
        head_ring.release(head_position);
        store_tile(acc, p.dv + pair.token_of(j) * p.dv_stride + static_cast<std::int64_t>(h) * p.value_width, p.dv_stride,
                   pair.rows(j), p.value_width, p.paired_dv);
    }
    store_parts(total, p.dk_parts + (static_cast<std::int64_t>(blockIdx.y) * p.tiles + tile_id) * KT * area);
}

// ---- gradients of the scores -----------------------------------------------------------------------------------------

// Terms of columns 16 k .. 16 k + 15 of one level, whose mask is factor[row] exp(reference - gamma[column]). `grad` is do v'
// and becomes the terms scale x decay x (q . k) x (do . v); total += gradient of q . k; sums += terms without factor[row].
__device__ __forceinline__ void separable_terms(Accumulator& grad, Accumulator& total, int k, const Fragment& score,
                                                const float (&factor)[2], float reference, const float* gamma,
                                                float (&sums)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 at = tile::load_pair(gamma + half * 8);
        const float decay_a = exp2_fast(reference - at.x * log2_e), decay_b = exp2_fast(reference - at.y * log2_e);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float2 x = tile::unpack(score.x[half * 2 + r]);
            float* const d = grad.x[2 * k + half] + 2 * r;
            float* const to = total.x[2 * k + half] + 2 * r;
            const float a = d[0] * decay_a, b = d[1] * decay_b;
            to[0] += a * factor[r];
            to[1] += b * factor[r];
            const float term_a = a * x.x, term_b = b * x.y;
            sums[r] += term_a + term_b;
            d[0] = term_a * factor[r];
            d[1] = term_b * factor[r];
        }
    }
}

// The same for a tile with itself; `row`: of its level scales. Writes the gradients of levels 0 .. 6: `to` [level][64].
__device__ __forceinline__ void diagonal_terms(Accumulator& grad, Accumulator& total, Fragment* scores,
                                               const HeadScalars& head, const float* gamma, int row, float* to) {
    const int lane = tile::team_index() % 32, warp = tile::team_index() / 32;
    const int t = warp * 16 + lane / 4, column = lane % 4 * 2;
    const float end[2] = {gamma[t] * log2_e, gamma[t + 8] * log2_e};
    const float before = warp > 0 ? gamma[warp * 16 - 1] * log2_e : 0.0f;
    const float into[2] = {exp2_fast(end[0] - before), exp2_fast(end[1] - before)};
    float sums[diagonal_levels][2];
#pragma unroll
    for (int l = 0; l < diagonal_levels; ++l) sums[l][0] = sums[l][1] = 0;
#pragma unroll
    for (int k = 0; k < tile_steps; ++k) {
        if (k > warp) {
#pragma unroll
            for (int e = 0; e < 4; ++e) grad.x[2 * k][e] = grad.x[2 * k + 1][e] = 0;
            continue;
        }
        const Fragment score = own_fragment(scores, k);
        const float* const its_gamma = gamma + k * 16 + column;
        if (k < warp) {
            const bool near = k == (warp ^ 1);
            const int level = near ? 5 : 6;
            const float factor[2] = {head.scale(row + t, level) * into[0], head.scale(row + t + 8, level) * into[1]};
            float its_sums[2] = {0, 0};
            separable_terms(grad, total, k, score, factor, before, its_gamma, its_sums);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                sums[5][r] += near ? its_sums[r] * into[r] : 0.0f;
                sums[6][r] += near ? 0.0f : its_sums[r] * into[r];
            }
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 start = tile::load_pair(its_gamma + half * 8);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float* const d = grad.x[2 * k + half] + 2 * r;
                float* const sum = total.x[2 * k + half] + 2 * r;
                if (half > r) {
                    d[0] = d[1] = 0;
                    continue;
                }
                const float2 x = tile::unpack(score.x[half * 2 + r]);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool seen = half < r || column + e <= lane / 4;
                    const int distance = lane / 4 ^ (column + e), level = half < r ? 4 : bits_of(distance);
                    const float scale = head.scale(row + t + r * 8, level);
                    const float decay = exp2_fast(end[r] - (e == 0 ? start.x : start.y) * log2_e);
                    const float a = seen ? d[e] * decay : 0.0f, term = a * (e == 0 ? x.x : x.y);
                    sum[e] += a * scale;
                    // A token's own term has no decay: its gradient ends with the level scale's.
                    d[e] = half == r && distance == 0 ? 0.0f : term * scale;
                    if (half < r) {
                        sums[4][r] += term;
                    } else {
#pragma unroll
                        for (int l = 0; l < 4; ++l) sums[l][r] += level == l ? term : 0.0f;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int l = 0; l < diagonal_levels; ++l) {
        warpgroup::sum_over_columns(sums[l]);
        if (lane % 4 == l % 4) {
            to[l * edge + t] = sums[l][0];
            to[l * edge + t + 8] = sums[l][1];
        }
    }
}

// given_near of a product: sums by column over the four warps of the team. Destroys the values. `sums`: [2][4][64], the half
// `turn` is free since the last but one call.
__device__ __forceinline__ void sum_given(Accumulator& terms, float* sums, int turn, int team, float* to) {
    const int thread = tile::team_index();
    float* const half = sums + turn * 4 * edge;
    terms.store_column_sums(half + thread / 32 * edge);
    pipeline::synchronize_team(team);
    if (thread < edge) to[thread] = half[thread] + half[edge + thread] + half[2 * edge + thread] + half[3 * edge + thread];
}

// Score tile of `queries` (KT x 4 fragments) with the KT tiles of keys in a stage, as the thread's own fragments.
template <int KT>
__device__ __forceinline__ void score_fragments(Fragment* to, const Fragment (&queries)[KT * tile_steps], const bf16* keys) {
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
    for (int k = 0; k < tile_steps; ++k) own_fragment(to, k) = fragment_of(acc, k);
}

constexpr int score_stages = 6;
// Near: a pair's two tiles with themselves, a warpgroup each, and the second with the first (level 7).
// Far: the chunk's tiles 2 and 3, a warpgroup each, with its tiles 0 and 1 (level 8).
template <bool Near>
constexpr int score_teams = Near ? 3 : 2;
template <bool Near>
constexpr int score_threads = (score_teams<Near> + 1) * threads;
template <bool Near>
constexpr int score_units = Near ? 1 : 2;  // tiles of a warpgroup

template <bool Near>
std::size_t pipelined_score_gradient_shared() {
    return (2 * score_stages + score_teams<Near> * score_units<Near>)*area * sizeof(bf16) +
           score_teams<Near> * 8 * edge * sizeof(float) + head_stages * HeadScalars::bytes(chunk_levels, 2) +
           sizeof(TileRing<score_stages, copies_ahead>) + sizeof(Ring<head_stages>);
}

// score_gradients. Grid: Near: 2 x slots, else slots; head slices of all groups.
// Order of the stages: q of the tiles that read, k of those that are read; then for every head do of the former, v of the
// latter.
template <int KT, bool Near>
__global__ void __launch_bounds__(score_threads<Near>, 1) pipelined_score_gradients(Problem<bf16> p) {
    constexpr int teams = score_teams<Near>, units = score_units<Near>;
    const Pair pair = Near ? Pair(p) : Pair(p, static_cast<int>(blockIdx.x), 2);
    if (pair.count == 0) return;
    const HeadRange range = head_range(p);
    const int given_first = Near ? pair.first : 0, given_count = Near ? pair.count : 2;  // tiles that are read
    const int active = Near ? (pair.count == 2 ? 3 : 1) : pair.count, last = pair.first + pair.count - 1;
    bf16* const stages = reinterpret_cast<bf16*>(tile::shared_memory());  // 2 tiles each
    Fragment* const strip = reinterpret_cast<Fragment*>(stages + 2 * score_stages * area);
    float* const all_sums = reinterpret_cast<float*>(strip + teams * units * tile_steps * threads);
    unsigned char* const scalars = reinterpret_cast<unsigned char*>(all_sums + teams * 8 * edge);
    constexpr int scalar_bytes = HeadScalars::bytes(chunk_levels, 2);
    auto& ring = *reinterpret_cast<TileRing<score_stages, copies_ahead>*>(scalars + head_stages * scalar_bytes);
    auto& head_ring = *reinterpret_cast<Ring<head_stages>*>(&ring + 1);
    const auto head_at = [&](int stage) { return HeadScalars(scalars + stage * scalar_bytes, chunk_levels); };
    for (int n = 0; n < head_stages; ++n) head_at(n).prepare(p, 2);
    if (threadIdx.x == 0) {
        ring.initialize(active * threads / 32);
        head_ring.initialize(active * threads / 32);
    }
    __syncthreads();

    Position<head_stages> head_position;
    const int self = warpgroup_index();
    if (self == teams) {
        typename std::remove_reference_t<decltype(ring)>::Producer producer;
        const auto fetch_keys = [&](int j, bool queries) {
            ring.acquire(producer);
            for (int kt = 0; kt < KT; ++kt)
                load_keys(p, stages + (2 * producer.at.stage + kt) * area, queries, pair.token_of(j), pair.rows(j),
                          range.group, kt);
            ring.commit(producer);
        };
        for (int x = 0; x < pair.count; ++x) fetch_keys(pair.first + x, true);
        for (int x = 0; x < given_count; ++x) fetch_keys(given_first + x, false);
        const TileCopy copy_value(p.v_stride, p.value_width);
        const TileCopy copy_grad(static_cast<std::int64_t>(p.heads) * p.value_width, p.value_width);
        for (int h = range.first; h < range.first + range.count; ++h) {
            head_ring.acquire(head_position);
            head_at(head_position.stage).load(p, pair, h, given_first, last, nullptr, 0, pair.first);
            head_ring.commit(head_position);
            ring.acquire(producer);
            for (int x = 0; x < pair.count; ++x)
                copy_grad(stages + (2 * producer.at.stage + x) * area, output_grad_at(p, pair.token_of(pair.first + x), h),
                          pair.rows(pair.first + x));
            ring.commit(producer);
            ring.acquire(producer);
            for (int x = 0; x < given_count; ++x)
                copy_value(stages + (2 * producer.at.stage + x) * area, values_at(p, pair.token_of(given_first + x), h, 0),
                           pair.rows(given_first + x));
            ring.commit(producer);
        }
        ring.finish(producer);
        return;
    }
    if (self >= active) return;

    // Which tile of the block reads, which is read first.
    const int reader = Near ? min(self, 1) : self, given = Near ? self % 2 : 0;
    const int i = pair.first + reader, tile_id = pair.slot.tile + i, t = warpgroup::first_row(), row = reader * edge + t;
    Fragment* const scores = strip + self * units * tile_steps * threads;
    float* const sums = all_sums + self * 8 * edge;
    Position<score_stages> at;
    {
        Fragment queries[KT * tile_steps];
        for (int x = 0; x < pair.count; ++x) {
            ring.wait(at);
            if (x == reader) {
#pragma unroll
                for (int k = 0; k < KT * tile_steps; ++k)
                    queries[k] = load_fragment<false>(stages + (2 * at.stage + k / tile_steps) * area, k % tile_steps * 16);
            }
            ring.release(at);
        }
        for (int x = 0; x < given_count; ++x) {
            ring.wait(at);
            if (x >= given && x < given + units)
                score_fragments<KT>(scores + (x - given) * tile_steps * threads, queries, stages + 2 * at.stage * area);
            ring.release(at);
        }
    }
    Accumulator total[units];
#pragma unroll
    for (int x = 0; x < units; ++x) total[x].clear();
    int turn = 0;
    for (int h = range.first; h < range.first + range.count; ++h) {
        head_ring.wait(head_position);
        const HeadScalars head = head_at(head_position.stage);
        const float* const gamma = head.gamma(i);
        Fragment grads[tile_steps];
        ring.wait(at);
#pragma unroll
        for (int k = 0; k < tile_steps; ++k)
            grads[k] = load_fragment<false>(stages + (2 * at.stage + reader) * area, k * 16);
        ring.release(at);
        ring.wait(at);
        float level_sums[2] = {0, 0};
#pragma unroll
        for (int x = 0; x < units; ++x) {
            const int j = given_first + given + x;
            Accumulator grad;  // do v'
            multiply_fragments<true, false>(grad, grads, stages + (2 * at.stage + given + x) * area);
            if (x == units - 1) ring.release(at);
            Fragment* const its = scores + x * tile_steps * threads;
            if (Near && self < 2) {
                diagonal_terms(grad, total[x], its, head, gamma, reader * edge, p.dscales_at(tile_id, h, 0));
            } else {
                const int level = tile_bits + bits_of(i ^ j), column = tile::team_index() % 4 * 2;
                const float between = HeadScalars::decay(head.end(j), head.start()[i]);
                const float decay[2] = {exp2_fast(gamma[t] * log2_e) * between, exp2_fast(gamma[t + 8] * log2_e) * between};
                const float factor[2] = {head.scale(row, level) * decay[0], head.scale(row + 8, level) * decay[1]};
                const float end = head.gamma(j)[edge - 1] * log2_e;
                float its_sums[2] = {0, 0};
#pragma unroll
                for (int k = 0; k < tile_steps; ++k)
                    separable_terms(grad, total[x], k, own_fragment(its, k), factor, end, head.gamma(j) + k * 16 + column,
                                    its_sums);
                level_sums[0] += its_sums[0] * decay[0];
                level_sums[1] += its_sums[1] * decay[1];
            }
            sum_given(grad, sums, turn, self + 1, p.given_near + (p.at(tile_id, h) * tiles_per_chunk + j) * edge);
            turn ^= 1;
        }
        if (!Near || self == 2) {
            warpgroup::sum_over_columns(level_sums);
            if (tile::team_index() % 4 == 0) {
                float* const to = p.dscales_at(tile_id, h, Near ? diagonal_levels : diagonal_levels + 1);
                to[t] = level_sums[0];
                to[t + 8] = level_sums[1];
            }
        }
        head_ring.release(head_position);
    }
    float* const out =
        p.score_grad +
        ((static_cast<std::int64_t>(blockIdx.y) * p.tiles + tile_id) * tiles_per_chunk + given_first + given) * area;
    store_parts(total, out);
}

}  // namespace fenwick::kernels::cuda::ssd_scan
