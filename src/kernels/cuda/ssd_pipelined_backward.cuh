// The pipelined kernels (ssd_pipelined.cuh) of the scan's backward, for V <= 64. Part of ssd.cu.
#pragma once

#include "kernels/cuda/ssd_pipelined.cuh"

namespace fenwick::kernels::cuda::ssd_scan {

// Registers a thread once the roles have parted, multiples of 8. A block shares what it started with: 168 a thread of three
// warpgroups, 128 of four.
constexpr int producer_registers = 72, consumer_registers = 216;
static_assert(producer_registers + consumers * consumer_registers <= 168 * (consumers + 1));

// ---- gradients of buckets --------------------------------------------------------------------------------------------

constexpr int bucket_teams = 3;  // a head each: they share q
constexpr int bucket_threads = (bucket_teams + 1) * threads;
constexpr int bucket_stages = 4;

// Of one tile and head: sums of g in it, level scales, and the float64 sums up to the tile and to the bucket's end.
struct BucketScalars {
    float gamma[edge], scale[edge];
    double start, end;
};

template <int KT>
std::size_t bucket_gradient_shared() {
    return bucket_stages * ((KT + bucket_teams) * area * sizeof(bf16) + bucket_teams * sizeof(BucketScalars)) +
           bucket_teams * KT * area * sizeof(bf16) + sizeof(TileRing<bucket_stages, copies_ahead>);
}

// What the outputs of a job's tiles give to its bucket: out'[v, k] = sum of (scale do)' q, transposed, so that the narrower
// operand is the one that is scaled. Grid: jobs, head slices of all groups, value tiles.
template <int KT>
__global__ void __launch_bounds__(bucket_threads, 1) bucket_gradients(Problem<bf16> p) {
    const HeadRange range = head_range(p);
    const int vt = blockIdx.z;
    const BucketJob job = p.bucket_jobs[blockIdx.x];
    bf16* const stages = reinterpret_cast<bf16*>(tile::shared_memory());  // KT tiles of q, one of do for each head
    constexpr int stage_size = (KT + bucket_teams) * area;
    bf16* const results = stages + bucket_stages * stage_size;  // KT tiles a team
    BucketScalars* const scalars = reinterpret_cast<BucketScalars*>(results + bucket_teams * KT * area);
    auto& ring = *reinterpret_cast<TileRing<bucket_stages, copies_ahead>*>(scalars + bucket_stages * bucket_teams);
    if (threadIdx.x == 0) ring.initialize(bucket_teams * threads / 32);
    if (!p.log_linear)
        for (int n = threadIdx.x; n < bucket_stages * bucket_teams * edge; n += bucket_threads)
            scalars[n / edge].scale[n % edge] = 1.0f;
    __syncthreads();

    const int self = warpgroup_index(), thread = tile::team_index();
    if (self == bucket_teams) {
        typename std::remove_reference_t<decltype(ring)>::Producer producer;
        const int level = min(chunk_levels + trailing_ones(p.slot_info[job.slot].index), p.levels - 1);
        const std::int64_t grad_stride = static_cast<std::int64_t>(p.heads) * p.value_width;
        const bf16* const queries = p.q + static_cast<std::int64_t>(range.group) * p.key_width;
        const TileCopy copy_queries(p.q_stride, p.key_width), copy_last_queries(p.q_stride, p.key_width - (KT - 1) * edge);
        const TileCopy copy_grad(grad_stride, p.value_width - vt * edge);
        const std::int64_t token = job.tiles > 0 ? p.tile_info[job.tile].token : 0;
        const int last_rows = job.tiles > 0 ? p.tile_info[job.tile + job.tiles - 1].rows : 0;
        for (int base = range.first; base < range.first + range.count; base += bucket_teams) {
            const int heads = min(bucket_teams, range.first + range.count - base);
            for (int t = 0; t < job.tiles; ++t) {
                const std::int64_t its_token = token + t * edge;
                const int rows = t == job.tiles - 1 ? last_rows : edge;
                ring.fill(producer, [&](int stage) {
                    bf16* const to = stages + stage * stage_size;
#pragma unroll
                    for (int kt = 0; kt < KT; ++kt)
                        (kt < KT - 1 ? copy_queries : copy_last_queries)(to + kt * area,
                                                                         queries + its_token * p.q_stride + kt * edge, rows);
                    for (int x = 0; x < heads; ++x) {
                        const int h = base + x;
                        copy_grad(to + (KT + x) * area, output_grad_at(p, its_token, h) + vt * edge, rows);
                        BucketScalars& its = scalars[stage * bucket_teams + x];
                        const std::int64_t at = p.at(job.tile + t, h);
                        if (thread < edge) {
                            if (p.log_linear)
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
                            tile::copy_async<8>(&its.end, p.chunk_end + p.at(job.slot, h), true);
                        }
                    }
                });
            }
        }
        ring.finish(producer);
    } else {
        Position<bucket_stages> at;
        const int column = thread % 4 * 2;
        for (int base = range.first; base < range.first + range.count; base += bucket_teams) {
            const int h = base + self;
            const bool active = h < range.first + range.count;
            Accumulator acc[KT];
#pragma unroll
            for (int kt = 0; kt < KT; ++kt) acc[kt].clear();
            for (int t = 0; t < job.tiles; ++t) {
                ring.wait(at);
                if (active) {
                    const bf16* const from = stages + at.stage * stage_size;
                    const BucketScalars& its = scalars[at.stage * bucket_teams + self];
                    const float between = fminf(static_cast<float>(its.start - its.end), 0.0f) * log2_e;
                    Fragment a[tile_steps];
#pragma unroll
                    for (int k = 0; k < tile_steps; ++k) {
                        a[k] = load_fragment<true>(from + (KT + self) * area, k * 16);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int s = k * 16 + half * 8 + column;
                            const float2 gamma = tile::load_pair(its.gamma + s), scale = tile::load_pair(its.scale + s);
                            weigh(a[k], half, scale.x * exp2_fast(between + gamma.x * log2_e),
                                  scale.y * exp2_fast(between + gamma.y * log2_e));
                        }
                    }
#pragma unroll
                    for (int kt = 0; kt < KT; ++kt) multiply_fragments<false, true>(acc[kt], a, from + kt * area);
                }
                ring.release(at);
            }
            if (!active) continue;
            if (job.part >= 0) {
                float* const to = p.bucket_parts + p.state_at(job.part, h) + vt * edge;
                const int v = warpgroup::first_row();
#pragma unroll
                for (int kt = 0; kt < KT; ++kt)
#pragma unroll
                    for (int block = 0; block < 8; ++block)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int k = kt * edge + block * 8 + column + e % 2, its_v = v + e / 2 * 8;
                            if (k < p.key_width && vt * edge + its_v < p.value_width)
                                to[k * p.value_width + its_v] = acc[kt].x[block][e];
                        }
                continue;
            }
            store_turned(p, acc, results + self * KT * area, self, p.dstates + p.state_at(job.slot, h) + vt * edge,
                         p.value_width - vt * edge);
        }
    }
}

// A thread's part of copying tiles that have `columns` columns, as TileCopy, of matrices of any stride: the producer has few
// registers, and what it keeps in local memory it gets back behind the copies that are under way.
struct ValueCopy {
    int to, row, column;
    __device__ __forceinline__ explicit ValueCopy(int columns) {
        const int thread = tile::team_index();
        column = thread % 8 * 8;
        row = column < columns ? thread / 8 : edge;
        to = tile::offset<bf16>(thread / 8, column);
    }
    __device__ __forceinline__ void operator()(bf16* tile, const bf16* matrix, std::int64_t stride, int rows) const {
        const bf16* source = matrix + (row % edge) * stride + column;
#pragma unroll
        for (int n = 0; n < edge / 16; ++n, source += 16 * stride)
            tile::copy_async_16(tile + to + n * 16 * edge, source, row + n * 16 < rows);
    }
    // The KT tiles of a state, one below the other.
    template <int KT>
    __device__ __forceinline__ void state(const Problem<bf16>& p, bf16* to_tiles, const bf16* states, int slot,
                                          int h) const {
        const bf16* const from = states + p.state_at(slot, h);
#pragma unroll
        for (int kt = 0; kt < KT; ++kt)
            (*this)(to_tiles + kt * area, from + kt * edge * p.value_width, p.value_width, p.key_width - kt * edge);
    }
    // v, or do, of tiles [first, last] of the pair's chunk, at most two.
    __device__ __forceinline__ void values(const Problem<bf16>& p, bf16* to_tiles, const Pair& pair, int first, int last,
                                           int h) const {
        for (int j = first; j <= last; ++j)
            (*this)(to_tiles + (j - first) * area, values_at(p, pair.token_of(j), h, 0), p.v_stride, pair.rows(j));
    }
    __device__ __forceinline__ void grads(const Problem<bf16>& p, bf16* to_tiles, const Pair& pair, int first, int last,
                                          int h) const {
        const std::int64_t stride = static_cast<std::int64_t>(p.heads) * p.value_width;
        for (int j = first; j <= last; ++j)
            (*this)(to_tiles + (j - first) * area, output_grad_at(p, pair.token_of(j), h), stride, pair.rows(j));
    }
};

// Writes what the two halves of a product with 64-wide accumulators left: one float32 tile each.
template <int KT>
__device__ __forceinline__ void store_parts(Accumulator (&total)[KT], float* out) {
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) store_clipped(total[kt], out + kt * area, edge, edge, edge, true);
}

constexpr int query_gradient_stages = 8;

template <int KT>
std::size_t pipelined_query_gradient_shared(int all_levels) {
    return (2 * query_gradient_stages + consumers * (KT + 1)) * area * sizeof(bf16) +
           head_stages * HeadScalars::bytes(all_levels, consumers) + sizeof(Rings<query_gradient_stages>) +
           most_live * sizeof(LiveBucket);
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
    Fragment* const all_grads = all_queries + consumers * KT * tile_steps * threads;
    unsigned char* const scalars = reinterpret_cast<unsigned char*>(all_grads) + consumers * area * sizeof(bf16);
    const int scalar_bytes = HeadScalars::bytes(p.all_levels, consumers);
    auto& rings = *reinterpret_cast<Rings<query_gradient_stages>*>(scalars + head_stages * scalar_bytes);
    auto& ring = rings.tiles;
    auto& head_ring = rings.heads;
    auto* const buckets = reinterpret_cast<LiveBucket*>(&rings + 1);
    list_live(p, pair.slot_id, pair.slot.index, live, buckets);
    const auto head_at = [&](int stage) { return HeadScalars(scalars + stage * scalar_bytes, p.all_levels); };
    const auto stage_at = [&](int stage) { return stages + 2 * stage * area; };
    for (int n = 0; n < head_stages; ++n) head_at(n).prepare(p, consumers);
    rings.initialize(pair.count);

    Position<head_stages> head_position;
    const int self = warpgroup_index();
    if (self == consumers) {
        asynchronous::release_registers<producer_registers>();
        typename decltype(rings.tiles)::Producer producer;
        for (int j = pair.first; j <= last && heads > 0; ++j)
            ring.fill(producer, [&](int stage) { load_key_tiles<KT>(p, stages, stage, true, pair, j, range.group); });
        const ValueCopy copy(p.value_width);
        for (int h = range.first; h < range.first + heads; ++h) {
            ring.prepare_wait(producer, head_ring, head_position);
            head_ring.fill(head_position,
                           [&](int stage) { head_at(stage).load(p, pair, h, pair.first, last, buckets, live, pair.first); });
            ring.fill(producer, [&](int stage) { copy.grads(p, stage_at(stage), pair, pair.first, last, h); });
            for (int n = 0; n < live; ++n)
                ring.fill(producer, [&](int stage) { copy.state<KT>(p, stage_at(stage), p.states, buckets[n].slot, h); });
        }
        ring.finish(producer);
    } else {
        asynchronous::claim_registers<consumer_registers>();
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
        // part: do S' of a bucket. While one half of it is added up, the other one is under way, in turns; the compiler does
        // so only if every wait is for all products.
        Accumulator total[KT], part[KT];
        Fragment grad[tile_steps];
        Fragment* const grads = all_grads + self * tile_steps * threads;
        // do of the next head, out of the ring: it may have fewer stages than a head has buckets.
        const auto take_grad = [&] {
            ring.wait(at);
#pragma unroll
            for (int k = 0; k < tile_steps; ++k)
                own_fragment(grads, k) = load_fragment<false>(stages + (2 * at.stage + self) * area, k * 16);
            ring.release(at);
        };
        const auto load_grad = [&] {
#pragma unroll
            for (int k = 0; k < tile_steps; ++k) grad[k] = own_fragment(grads, k);
        };
        const auto start = [&](int kt) {
            asynchronous::start_product<true>(part[kt].x, grad, stages + (2 * at.stage + kt) * area, false);
        };
        const auto finish = [&](int kt) {
            asynchronous::wait_products<0>();
            asynchronous::hold(part[kt].x);
        };
        float factor[2], sums[2];
        const auto add_up = [&](int kt) {
#pragma unroll
            for (int k = 0; k < tile_steps; ++k) {
                const Fragment query = own_fragment(queries, kt * tile_steps + k);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float2 q = tile::unpack(query.x[e]);
                    const int block = 2 * k + e / 2, r = e % 2;
                    const float a = part[kt].x[block][2 * r], b = part[kt].x[block][2 * r + 1];
                    sums[r] += a * q.x + b * q.y;
                    total[kt].x[block][2 * r] += factor[r] * a;
                    total[kt].x[block][2 * r + 1] += factor[r] * b;
                }
            }
        };
#pragma unroll
        for (int kt = 0; kt < KT; ++kt) total[kt].clear();
        if (heads > 0) {
            take_grad();
            ring.wait(at);
        }
        load_grad();
        start(0);
        int n = 0, h = range.first;
        for (int items = heads * live; items > 0; --items) {
            if (n == 0) head_ring.wait(head_position);
            const HeadScalars head = head_at(head_position.stage);
            const int level = buckets[n].level;
            const float between = HeadScalars::decay(head.bucket_end()[n], head.start()[i]);
            const float decay[2] = {exp2_fast(head.gamma(i)[t] * log2_e) * between,
                                    exp2_fast(head.gamma(i)[t + 8] * log2_e) * between};
            const bool head_ends = n + 1 == live;
            sums[0] = sums[1] = 0;
#pragma unroll
            for (int r = 0; r < 2; ++r) factor[r] = head.scale(row + r * 8, level) * decay[r];
            finish(0);
            if constexpr (KT == 2) {
                start(1);
                add_up(0);
                finish(1);
            }
            ring.release(at);
            if (items > 1) {
                if (head_ends) take_grad();
                ring.wait(at);
            }
            if constexpr (KT == 1) add_up(0);
            // Behind the last one of all, once more of whatever lies there, and nobody reads it.
            load_grad();
            start(0);
            if constexpr (KT == 2) add_up(1);
            warpgroup::sum_over_columns(sums);
            if (tile::team_index() % 4 == 0) {
                float* const to = p.dscales_at(tile_id, h, level);
                to[t] = t < pair.rows(i) ? sums[0] * decay[0] : 0.0f;
                to[t + 8] = t + 8 < pair.rows(i) ? sums[1] * decay[1] : 0.0f;
            }
            if (++n == live) {
                n = 0;
                ++h;
                head_ring.release(head_position);
            }
        }
        asynchronous::wait_products<0>();
        store_parts(total, p.dq_parts + (static_cast<std::int64_t>(blockIdx.y) * p.tiles + tile_id) * KT * area);
    }
}

constexpr int key_gradient_stages = 7;
constexpr int key_gradient_head_stages = 2;  // a head has more stages of tiles than the producer leaves unreported
constexpr int key_gradient_strip = 7;        // score tiles of the two warpgroups: 4 and 3 at most
using KeyGradientRings = Rings<key_gradient_stages, copies_ahead, key_gradient_head_stages>;

template <int KT>
std::size_t pipelined_key_gradient_shared() {
    return (2 * key_gradient_stages + key_gradient_strip + consumers * KT) * area * sizeof(bf16) +
           key_gradient_head_stages * HeadScalars::bytes(chunk_levels, tiles_per_chunk) + sizeof(KeyGradientRings);
}

// One fragment times factor[row] scale(column) exp(gamma[column] - reference); `gamma` and `scales` from the thread's first
// column on.
__device__ __forceinline__ void scale_readers(Fragment& a, const float (&factor)[2], float reference, const float* gamma,
                                              const float* scales, int stride) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 at = tile::load_pair(gamma + half * 8);
        weigh(a, factor, half, scales[half * 8 * stride] * exp2_fast(at.x * log2_e - reference),
              scales[(half * 8 + 1) * stride] * exp2_fast(at.y * log2_e - reference));
    }
}

// One fragment times between scale(column) exp(gamma[column]); `gamma` and `scales` as above.
__device__ __forceinline__ void scale_columns(Fragment& a, float between, const float* gamma, const float* scales,
                                              int stride) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 at = tile::load_pair(gamma + half * 8);
        weigh(a, half, scales[half * 8 * stride] * (between * exp2_fast(at.x * log2_e)),
              scales[(half * 8 + 1) * stride] * (between * exp2_fast(at.y * log2_e)));
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
// of the chunk's state, do of the chunk's tiles behind them, do of the tiles.
template <int KT>
__global__ void __launch_bounds__(pipelined_threads, 1) pipelined_key_gradients(Problem<bf16> p) {
    const Pair pair(p);
    if (pair.count == 0) return;
    const HeadRange range = head_range(p);
    const int last = pair.slot.tiles - 1;
    bf16* const stages = reinterpret_cast<bf16*>(tile::shared_memory());  // 2 tiles each
    Fragment* const strip = reinterpret_cast<Fragment*>(stages + 2 * key_gradient_stages * area);
    bf16* const all_keys = reinterpret_cast<bf16*>(strip + key_gradient_strip * tile_steps * threads);
    unsigned char* const scalars = reinterpret_cast<unsigned char*>(all_keys + consumers * KT * area);
    const int scalar_bytes = HeadScalars::bytes(chunk_levels, tiles_per_chunk);
    auto& rings = *reinterpret_cast<KeyGradientRings*>(scalars + key_gradient_head_stages * scalar_bytes);
    auto& ring = rings.tiles;
    auto& head_ring = rings.heads;
    const auto head_at = [&](int stage) { return HeadScalars(scalars + stage * scalar_bytes, chunk_levels); };
    const auto stage_at = [&](int stage) { return stages + 2 * stage * area; };
    for (int n = 0; n < key_gradient_head_stages; ++n) head_at(n).prepare(p, tiles_per_chunk);
    rings.initialize(pair.count);

    Position<key_gradient_head_stages> head_position;
    const int self = warpgroup_index();
    if (self == consumers) {
        asynchronous::release_registers<producer_registers>();
        typename decltype(rings.tiles)::Producer producer;
        const auto fetch_keys = [&](int j, bool queries) {
            ring.fill(producer, [&](int stage) { load_key_tiles<KT>(p, stages, stage, queries, pair, j, range.group); });
        };
        for (int x = 0; x < pair.count; ++x) fetch_keys(pair.first + x, false);
        for (int m = pair.first; m <= last; ++m) fetch_keys(m, true);
        const ValueCopy copy(p.value_width);
        for (int h = range.first; h < range.first + range.count; ++h) {
            ring.prepare_wait(producer, head_ring, head_position);
            head_ring.fill(head_position,
                           [&](int stage) { head_at(stage).load(p, pair, h, pair.first, last, nullptr, 0, pair.first); });
            ring.fill(producer,
                      [&](int stage) { copy.values(p, stage_at(stage), pair, pair.first, pair.first + pair.count - 1, h); });
            ring.fill(producer, [&](int stage) { copy.state<KT>(p, stage_at(stage), p.dstates, pair.slot_id, h); });
            for (int m = last / consumers * consumers; m >= pair.first; m -= consumers)
                ring.fill(producer, [&](int stage) { copy.grads(p, stage_at(stage), pair, m, min(m + 1, last), h); });
        }
        ring.finish(producer);
    } else {
        asynchronous::claim_registers<consumer_registers>();
        if (self >= pair.count) return;
        Position<key_gradient_stages> at;

        const int j = pair.first + self, tile_id = pair.slot.tile + j, s = warpgroup::first_row();
        const int lane = tile::team_index() % 32, column = lane % 4 * 2;
        Fragment* const scores = strip + self * 4 * tile_steps * threads;
        bf16* const keys = all_keys + self * KT * area;
        for (int x = 0; x < pair.count; ++x) {
            ring.wait(at);
            if (x == self) {
                const auto* const from = reinterpret_cast<const uint4*>(stages + 2 * at.stage * area);
#pragma unroll
                for (int n = tile::team_index(); n < KT * area / 8; n += threads)
                    reinterpret_cast<uint4*>(keys)[n] = from[n];
            }
            ring.release(at);
        }
        warpgroup::fence_tiles();
        pipeline::synchronize_team(self + 1);
        for (int m = pair.first; m <= last; ++m) {
            ring.wait(at);
            if (m >= j) {
                Accumulator acc;
                acc.clear();
#pragma unroll
                for (int kt = 0; kt < KT; ++kt) {
                    Fragment a[tile_steps];
#pragma unroll
                    for (int k = 0; k < tile_steps; ++k) a[k] = load_fragment<false>(keys + kt * area, k * 16);
                    multiply_fragments<true, true>(acc, a, stages + (2 * at.stage + kt) * area);
                }
#pragma unroll
                for (int k = 0; k < tile_steps; ++k) own_fragment(scores, (m - j) * tile_steps + k) = fragment_of(acc, k);
            }
            ring.release(at);
        }

        const bool behind = pair.first + consumers <= last;        // the chunk has tiles behind the pair
        const bool before = self == 0 && pair.count == consumers;  // the pair's other tile reads this one
        // K dS' of the head, and the products with do; the compiler serialises them where an accumulator is written
        // otherwise.
        Accumulator total[KT], carried, acc;
        Fragment mask[2][tile_steps];
#pragma unroll
        for (int kt = 0; kt < KT; ++kt) total[kt].clear();
        for (int h = range.first; h < range.first + range.count; ++h) {
            head_ring.wait(head_position);
            const HeadScalars head = head_at(head_position.stage);
            const float* const gamma = head.gamma(j);
            const double end = head.end(j);
            const float tile_end = gamma[edge - 1];
            const float to_end[2] = {exp2_fast((tile_end - gamma[s]) * log2_e),
                                     exp2_fast((tile_end - gamma[s + 8]) * log2_e)};
            // Decay from the tile's end to the chunk's: the chunk's state is taken there.
            const float rest = HeadScalars::decay(end, head.chunk_end()[0]);
            // Scores with a later tile, times the decay from this tile's end on and the level's scale.
            const auto mask_later = [&](Fragment(&a)[tile_steps], int m) {
                const float between = HeadScalars::decay(end, head.start()[m]);
                const float* const scales = head.scales_of((m - pair.first) * edge + column, tile_bits + bits_of(j ^ m));
#pragma unroll
                for (int k = 0; k < tile_steps; ++k) {
                    a[k] = own_fragment(scores, (m - j) * tile_steps + k);
                    scale_columns(a[k], between, head.gamma(m) + k * 16 + column, scales + k * 16 * head.stride,
                                  head.stride);
                }
            };
            ring.wait(at);
            Position<key_gradient_stages> values = at;
            at.advance();
            const bf16* const value = stages + (2 * values.stage + self) * area;
            Fragment weighted[tile_steps];
#pragma unroll
            for (int k = 0; k < tile_steps; ++k) {
                weighted[k] = load_fragment<false>(value, k * 16);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float2 v = tile::unpack(weighted[k].x[e]);
                    const float weight = to_end[e % 2] * rest;
                    weighted[k].x[e] = tile::pack(v.x * weight, v.y * weight);
                }
            }
            // Products run while the operands of the next ones are computed.
            ring.wait(at);
            Position<key_gradient_stages> state = at;
            at.advance();
            asynchronous::start_product_of_tiles<KT>(carried.x, keys, stages + 2 * state.stage * area);
#pragma unroll
            for (int kt = 0; kt < KT; ++kt)
                asynchronous::start_product<true>(total[kt].x, weighted, stages + (2 * state.stage + kt) * area, true);
            if (behind) mask_later(mask[0], pair.first + consumers);
            asynchronous::wait_products<KT>();
            asynchronous::hold(carried.x);
            float sums[2] = {0, 0};
#pragma unroll
            for (int k = 0; k < tile_steps; ++k) {
                const Fragment its = load_fragment<false>(value, k * 16);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int block = 2 * k + e / 2, r = e % 2;
                    const float2 v = tile::unpack(its.x[e]);
                    sums[r] += v.x * carried.x[block][2 * r] + v.y * carried.x[block][2 * r + 1];
                }
            }
            ring.release(values);
            Position<key_gradient_stages> later = at;
            if (behind) {
                ring.wait(later);
                at.advance();
                asynchronous::start_product<false>(acc.x, mask[0], stages + 2 * later.stage * area, false);
                if (pair.first + consumers < last) {
                    mask_later(mask[1], last);
                    asynchronous::start_product<false>(acc.x, mask[1], stages + (2 * later.stage + 1) * area, true);
                } else {
                    asynchronous::commit();  // nothing, so that the groups can be counted
                }
            }
            warpgroup::sum_over_columns(sums);
            if (lane % 4 == 0) {
                p.given_far[p.at(tile_id, h) * edge + s] = sums[0] * rest * to_end[0];
                p.given_far[p.at(tile_id, h) * edge + s + 8] = sums[1] * rest * to_end[1];
            }
            ring.wait(at);
            // What still runs behind these waits does not read the mask that is computed next.
            if (before) {
                asynchronous::wait_products<1>();
                mask_later(mask[0], pair.first + 1);
                asynchronous::start_product<false>(acc.x, mask[0], stages + (2 * at.stage + 1) * area, behind);
                asynchronous::wait_products<1>();
            } else {
                asynchronous::wait_products<0>();
            }
            ring.release(state);
            if (behind) ring.release(later);
            mask_readers(mask[1], head, gamma, self * edge, scores);
            head_ring.release(head_position);
            asynchronous::wait_products<0>();
            asynchronous::hold(acc.x);
            if (!behind && !before) acc.clear();
#pragma unroll
            for (int block = 0; block < 8; ++block)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc.x[block][e] = to_end[e / 2] * (rest * carried.x[block][e] + acc.x[block][e]);
            asynchronous::start_product<false>(acc.x, mask[1], stages + (2 * at.stage + self) * area, true);
            asynchronous::wait_products<0>();
            asynchronous::hold(acc.x);
            ring.release(at);
            store_tile(acc, p.dv + pair.token_of(j) * p.dv_stride + static_cast<std::int64_t>(h) * p.value_width,
                       p.dv_stride, pair.rows(j), p.value_width, p.paired_dv);
        }
#pragma unroll
        for (int kt = 0; kt < KT; ++kt) asynchronous::hold(total[kt].x);
        store_parts(total, p.dk_parts + (static_cast<std::int64_t>(blockIdx.y) * p.tiles + tile_id) * KT * area);
    }
}

// ---- gradients of the scores -----------------------------------------------------------------------------------------

// The fragment of rows 16 block .. 16 block + 15 at columns k .. k + 15.
__device__ __forceinline__ Fragment load_rows(const bf16* a, int block, int k) {
    const int lane = tile::team_index() % 32, matrix = lane / 8, line = lane % 8;
    Fragment f;
    tile::load_matrices<false>(f.x, a + tile::offset<bf16>(block * 16 + matrix % 2 * 8 + line, k + matrix / 2 * 8));
    return f;
}

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

// Adds over the four threads that share two rows: value[level][row] of all of them becomes the sum that thread (level, row)
// = (lane / 2 % 2, lane % 2) of the four returns.
__device__ __forceinline__ float sum_transposed(const float (&value)[2][2]) {
    const int lane = tile::team_index() % 32;
    const bool second_row = (lane & 1) != 0, second_level = (lane & 2) != 0;
    float sum[2];
#pragma unroll
    for (int l = 0; l < 2; ++l)
        sum[l] = (second_row ? value[l][1] : value[l][0]) +
                 __shfl_xor_sync(0xffffffffu, second_row ? value[l][0] : value[l][1], 1);
    return (second_level ? sum[1] : sum[0]) + __shfl_xor_sync(0xffffffffu, second_level ? sum[0] : sum[1], 2);
}

// The same for a tile with itself, in a warp that has rows 16 block .. 16 block + 15; `row`: of the tile's level scales.
// Writes the gradients of levels 0 .. 6: `to` [level][64].
__device__ __forceinline__ void diagonal_terms(Accumulator& grad, Accumulator& total, Fragment* scores,
                                               const HeadScalars& head, const float* gamma, int row, int block, float* to) {
    const int lane = tile::team_index() % 32, line = lane / 4, column = lane % 4 * 2, t = block * 16 + line;
    const float end[2] = {gamma[t] * log2_e, gamma[t + 8] * log2_e};
    const float before = block > 0 ? gamma[block * 16 - 1] * log2_e : 0.0f;
    const float into[2] = {exp2_fast(end[0] - before), exp2_fast(end[1] - before)};
    float outer[2][2] = {};  // levels 5 and 6
#pragma unroll
    for (int k = 0; k < tile_steps; ++k) {
        if (k > block) {
#pragma unroll
            for (int e = 0; e < 4; ++e) grad.x[2 * k][e] = grad.x[2 * k + 1][e] = 0;
            continue;
        }
        const Fragment score = own_fragment(scores, k);
        const float* const its_gamma = gamma + k * 16 + column;
        if (k < block) {
            const bool near = k == (block ^ 1);
            const int level = near ? 5 : 6;
            const float factor[2] = {head.scale(row + t, level) * into[0], head.scale(row + t + 8, level) * into[1]};
            float its_sums[2] = {0, 0};
            separable_terms(grad, total, k, score, factor, before, its_gamma, its_sums);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                outer[0][r] += near ? its_sums[r] * into[r] : 0.0f;
                outer[1][r] += near ? 0.0f : its_sums[r] * into[r];
            }
            continue;
        }
        // Rows 8 r .. 8 r + 7 with columns 8 half .. 8 half + 7 of these 16.
        float level_4 = 0;
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
                float terms[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool seen = half < r || column + e <= line;
                    const int distance = line ^ (column + e), level = half < r ? 4 : bits_of(distance);
                    const float scale = head.scale(row + t + r * 8, level);
                    const float decay = exp2_fast(end[r] - (e == 0 ? start.x : start.y) * log2_e);
                    const float a = seen ? d[e] * decay : 0.0f;
                    terms[e] = a * (e == 0 ? x.x : x.y);
                    sum[e] += a * scale;
                    // A token's own term has no decay: its gradient ends with the level scale's.
                    d[e] = half == r && distance == 0 ? 0.0f : terms[e] * scale;
                }
                const float both = terms[0] + terms[1];
                if (half < r) {
                    level_4 = both;
                    continue;
                }
                // Columns of the four threads that share a row: its own and its neighbour's (levels 0 and 1), the other
                // two of the same four (level 2), the other four (level 3).
                const int apart = line / 2 ^ lane % 4;
                const float level_3 = both + __shfl_xor_sync(0xffffffffu, both, 1);
                float* const its = to + t + r * 8;
                if (apart == 0) its[edge] = line % 2 == 0 ? terms[1] : terms[0];
                if (apart < 3)
                    its[(apart == 0 ? 0 : apart + 1) * edge] = apart == 0   ? (line % 2 == 0 ? terms[0] : terms[1])
                                                               : apart == 1 ? both
                                                                            : level_3;
            }
        }
        level_4 += __shfl_xor_sync(0xffffffffu, level_4, 1);
        level_4 += __shfl_xor_sync(0xffffffffu, level_4, 2);
        if (lane % 4 < 2) to[4 * edge + t + lane % 2 * 8] = lane % 2 == 0 ? 0.0f : level_4;
    }
    to[(5 + lane / 2 % 2) * edge + t + lane % 2 * 8] = sum_transposed(outer);
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
constexpr int score_producer_registers = Near ? 56 : producer_registers;
template <bool Near>
constexpr int score_consumer_registers = Near ? 152 : consumer_registers;
static_assert(score_producer_registers<true> + 3 * score_consumer_registers<true> <= 128 * 4);

template <bool Near>
std::size_t pipelined_score_gradient_shared() {
    return (2 * score_stages + score_teams<Near> * score_units<Near>)*area * sizeof(bf16) +
           score_teams<Near> * 8 * edge * sizeof(float) + head_stages * HeadScalars::bytes(chunk_levels, 2) +
           sizeof(Rings<score_stages>);
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
    auto& rings = *reinterpret_cast<Rings<score_stages>*>(scalars + head_stages * scalar_bytes);
    auto& ring = rings.tiles;
    auto& head_ring = rings.heads;
    const auto head_at = [&](int stage) { return HeadScalars(scalars + stage * scalar_bytes, chunk_levels); };
    const auto stage_at = [&](int stage) { return stages + 2 * stage * area; };
    for (int n = 0; n < head_stages; ++n) head_at(n).prepare(p, 2);
    rings.initialize(active);

    Position<head_stages> head_position;
    const int self = warpgroup_index();
    if (self == teams) {
        asynchronous::release_registers<score_producer_registers<Near>>();
        typename decltype(rings.tiles)::Producer producer;
        const auto fetch_keys = [&](int j, bool queries) {
            ring.fill(producer, [&](int stage) { load_key_tiles<KT>(p, stages, stage, queries, pair, j, range.group); });
        };
        for (int x = 0; x < pair.count; ++x) fetch_keys(pair.first + x, true);
        for (int x = 0; x < given_count; ++x) fetch_keys(given_first + x, false);
        const ValueCopy copy(p.value_width);
        for (int h = range.first; h < range.first + range.count; ++h) {
            ring.prepare_wait(producer, head_ring, head_position);
            head_ring.fill(head_position,
                           [&](int stage) { head_at(stage).load(p, pair, h, given_first, last, nullptr, 0, pair.first); });
            ring.fill(producer, [&](int stage) { copy.grads(p, stage_at(stage), pair, pair.first, last, h); });
            ring.fill(producer, [&](int stage) {
                copy.values(p, stage_at(stage), pair, given_first, given_first + given_count - 1, h);
            });
        }
        ring.finish(producer);
    } else {
        asynchronous::claim_registers<score_consumer_registers<Near>>();
        if (self >= active) return;

        // Which tile of the block reads, which is read first. A warp has 16 rows, and those of a tile with itself that come
        // last have most to do; warps of one number share a scheduler, so the second tile's rows are dealt out in reverse.
        const int reader = Near ? min(self, 1) : self, given = Near ? self % 2 : 0;
        const int warp = tile::team_index() / 32, lane = tile::team_index() % 32, column = lane % 4 * 2;
        const int block = Near && self == 1 ? 3 - warp : warp;
        const int i = pair.first + reader, tile_id = pair.slot.tile + i, t = block * 16 + lane / 4, row = reader * edge + t;
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
                        queries[k] = load_rows(stages + (2 * at.stage + k / tile_steps) * area, block, k % tile_steps * 16);
                }
                ring.release(at);
            }
            for (int x = 0; x < given_count; ++x) {
                ring.wait(at);
                if (x >= given && x < given + units)
                    score_fragments<KT>(scores, (x - given) * tile_steps, queries, stages + 2 * at.stage * area);
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
                grads[k] = load_rows(stages + (2 * at.stage + reader) * area, block, k * 16);
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
                    diagonal_terms(grad, total[x], its, head, gamma, reader * edge, block, p.dscales_at(tile_id, h, 0));
                } else {
                    const int level = tile_bits + bits_of(i ^ j);
                    const float between = HeadScalars::decay(head.end(j), head.start()[i]);
                    const float decay[2] = {exp2_fast(gamma[t] * log2_e) * between,
                                            exp2_fast(gamma[t + 8] * log2_e) * between};
                    const float factor[2] = {head.scale(row, level) * decay[0], head.scale(row + 8, level) * decay[1]};
                    const float end = head.gamma(j)[edge - 1] * log2_e;
                    float its_sums[2] = {0, 0};
#pragma unroll
                    for (int k = 0; k < tile_steps; ++k)
                        separable_terms(grad, total[x], k, own_fragment(its, k), factor, end,
                                        head.gamma(j) + k * 16 + column, its_sums);
                    level_sums[0] += its_sums[0] * decay[0];
                    level_sums[1] += its_sums[1] * decay[1];
                }
                sum_given(grad, sums, turn, self + 1, p.given_near + (p.at(tile_id, h) * tiles_per_chunk + j) * edge);
                turn ^= 1;
            }
            if (!Near || self == 2) {
                warpgroup::sum_over_columns(level_sums);
                if (lane % 4 == 0) {
                    float* const to = p.dscales_at(tile_id, h, Near ? diagonal_levels : diagonal_levels + 1);
                    to[t] = level_sums[0];
                    to[t + 8] = level_sums[1];
                }
            }
            head_ring.release(head_position);
        }
        const std::int64_t first_tile =
            (static_cast<std::int64_t>(blockIdx.y) * p.tiles + tile_id) * tiles_per_chunk + given_first + given;
#pragma unroll
        for (int x = 0; x < units; ++x) {
            float* const out = p.score_grad + (first_tile + x) * area + t * edge + column;
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    tile::store_pair(out + r * 8 * edge + n * 8, total[x].x[n][2 * r], total[x].x[n][2 * r + 1]);
        }
    }
}

}  // namespace fenwick::kernels::cuda::ssd_scan
