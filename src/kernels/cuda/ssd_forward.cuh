// The forward scan's kernels for bfloat16 in whole 16-byte rows and K <= 128, on Hopper: blocks as in ssd_pipelined.cuh,
// with products that run while the next operand is computed. Part of ssd.cu.
#pragma once

#include "kernels/cuda/ssd_pipelined.cuh"

namespace fenwick::kernels::cuda::ssd_scan {

using pipeline::uniform;

// Queues c += a b for 16 Steps columns of a; b's rows run along its tile's rows (AlongRows; Steps > 4: tiles one below the
// other) or columns. a and b must stay until the product has been waited for.
template <bool AlongRows, int Steps>
__device__ __forceinline__ void queue_product(Accumulator& c, const Fragment (&a)[Steps], const bf16* b) {
    static_assert(AlongRows || Steps <= tile_steps);
#pragma unroll
    for (int k = 0; k < Steps; ++k) asynchronous::multiply<AlongRows>(c.x, a[k].x, b, (AlongRows ? 16 * edge : 16) * k);
}
// Behind the computation of fragments that the next product reads.
template <int Steps>
__device__ __forceinline__ void fence_fragments(Fragment (&a)[Steps]) {
#pragma unroll
    for (int k = 0; k < Steps; ++k)
#pragma unroll
        for (std::uint32_t& x : a[k].x) asynchronous::hold_fragment(x);
    asynchronous::fence_operands();
}

// ---- chunk states ----------------------------------------------------------------------------------------------------

constexpr int state_teams = 3;  // a head each: they share k
constexpr int state_threads = (state_teams + 1) * threads;
constexpr int state_stages = 4;

// Of one tile and head.
struct alignas(16) StateScalars {
    float to_end[edge];
    double start, end;  // sums of g up to the tile and to the chunk's end
    float total;        // of the tile
};

// v is read by ordinary loads, so that its copies report themselves; the keys, which wgmma reads, are reported by hand.
struct StateBarriers {
    Ring<state_stages> values;
    pipeline::Barrier keys;
};

template <int KT>
std::size_t chunk_state_shared() {
    return ((tiles_per_chunk + state_teams) * KT + state_stages * state_teams) * area * sizeof(bf16) +
           state_stages * state_teams * sizeof(StateScalars) + sizeof(StateBarriers);
}

// Columns [16 k, 16 k + 16) of v', times the decay from their token to the chunk's end; `between`: from the tile's end.
__device__ __forceinline__ Fragment decayed_values(const bf16* values, const float* to_end, float between, int k) {
    Fragment a = load_fragment<true>(values, k * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 decay = tile::load_pair(to_end + k * 16 + half * 8);
        weigh(a, half, decay.x * between, decay.y * between);
    }
    return a;
}

// The states of chunks, transposed, so that the narrower operand is the one that is scaled: state'[v, k] = sum of (decay v)'
// k. Grid: slots, head slices of all groups, value tiles.
template <int KT>
__global__ void __launch_bounds__(state_threads, 1) chunk_states(Problem<bf16> p) {
    const HeadRange range = head_range(p);
    const int vt = blockIdx.z, slot = blockIdx.x;
    const SlotInfo info = p.slot_info[slot];
    if (range.count == 0 || (p.skip_last && info.index == info.document_chunks - 1)) return;
    const int first = info.tile, tiles = uniform(info.tiles);
    bf16* const keys = reinterpret_cast<bf16*>(tile::shared_memory());  // KT tiles for each of the chunk's, copied once
    bf16* const stages = keys + tiles_per_chunk * KT * area;            // a tile of v for each head
    constexpr int stage_size = state_teams * area;
    bf16* const results = stages + state_stages * stage_size;  // KT tiles a team
    StateScalars* const scalars = reinterpret_cast<StateScalars*>(results + state_teams * KT * area);
    auto& barriers = *reinterpret_cast<StateBarriers*>(scalars + state_stages * state_teams);
    auto& ring = barriers.values;
    if (threadIdx.x == 0) {
        ring.initialize(state_teams * threads / 32);
        pipeline::initialize(&barriers.keys, threads);
    }
    __syncthreads();

    const int self = uniform(warpgroup_index()), thread = tile::team_index();
    if (self == state_teams) {
        asynchronous::release_registers<40>();
        const std::int64_t token = p.tile_info[first].token;
        const int last_rows = p.tile_info[first + tiles - 1].rows;
        {
            const bf16* const from = p.k + static_cast<std::int64_t>(range.group) * p.key_width;
            const TileCopy copy_keys(p.k_stride, p.key_width), copy_last_keys(p.k_stride, p.key_width - (KT - 1) * edge);
            for (int t = 0; t < tiles; ++t)
#pragma unroll
                for (int kt = 0; kt < KT; ++kt)
                    (kt < KT - 1 ? copy_keys : copy_last_keys)(keys + (t * KT + kt) * area,
                                                               from + (token + t * edge) * p.k_stride + kt * edge,
                                                               t == tiles - 1 ? last_rows : edge);
            tile::commit_async();
        }
        const TileCopy copy_value(p.v_stride, p.value_width - vt * edge);
        Position<state_stages> at;
        int before_keys = min(state_stages, tiles);  // stages to start before the keys are waited for
        for (int base = range.first; base < range.first + range.count; base += state_teams) {
            const int heads = min(state_teams, range.first + range.count - base);
            for (int t = 0; t < tiles; ++t) {
                const std::int64_t its_token = token + t * edge;
                const int rows = t == tiles - 1 ? last_rows : edge;
                ring.fill(at, [&](int stage) {
                    for (int x = 0; x < heads; ++x) {
                        const int h = base + x;
                        copy_value(stages + stage * stage_size + x * area, values_at(p, its_token, h, vt), rows);
                        StateScalars& its = scalars[stage * state_teams + x];
                        const std::int64_t place = p.at(first + t, h);
                        if (thread < edge / 4) {
                            tile::copy_async_16(its.to_end + thread * 4, p.to_tile_end + place * edge + thread * 4, true);
                        } else if (thread == 32) {
                            tile::copy_async<8>(&its.start, p.start + place, true);
                        } else if (thread == 64) {
                            tile::copy_async<8>(&its.end, p.chunk_end + p.at(slot, h), true);
                        } else if (thread == 96) {
                            tile::copy_async<4>(&its.total, p.gamma + place * edge + edge - 1, true);
                        }
                    }
                });
                if (--before_keys == 0) {
                    tile::wait_async<0>();
                    warpgroup::fence_tiles();
                    pipeline::arrive(&barriers.keys);
                }
            }
        }
        tile::commit_async();
        tile::wait_async<0>();
        return;
    }

    asynchronous::claim_registers<152>();
    pipeline::wait(&barriers.keys, 0);
    Position<state_stages> at, done;  // stages waited for, released
    const int column = thread % 4 * 2;
    for (int base = range.first; base < range.first + range.count; base += state_teams) {
        const int h = base + self;
        if (h >= range.first + range.count) {
            for (int t = 0; t < tiles; ++t) {
                ring.wait(at);
                at.advance();
                ring.release(done);
            }
            continue;
        }
        Accumulator acc[KT];
#pragma unroll
        for (int kt = 0; kt < KT; ++kt) {
            acc[kt].clear();
            asynchronous::hold(acc[kt].x);
        }
        // Adds tile t of the chunk while the fragments of the next one are computed.
        const auto add_tile = [&](int t, Fragment(&a)[tile_steps]) {
            ring.wait(at);
            const bf16* const from = stages + at.stage * stage_size;
            const StateScalars& its = scalars[at.stage * state_teams + self];
            // Sums of different precision: their difference may come out a little above 0.
            const float between = exp2_fast(fminf(static_cast<float>(its.end - its.start) - its.total, 0.0f) * log2_e);
#pragma unroll
            for (int k = 0; k < tile_steps; ++k) a[k] = decayed_values(from + self * area, its.to_end + column, between, k);
            fence_fragments(a);
#pragma unroll
            for (int kt = 0; kt < KT; ++kt) queue_product<true>(acc[kt], a, keys + (t * KT + kt) * area);
            asynchronous::commit();
            at.advance();
            if (t == 0) return;
            asynchronous::wait_products<1>();
            ring.release(done);
        };
        Fragment even[tile_steps], odd[tile_steps];
        for (int t = 0; t < tiles; t += 2) {
            add_tile(t, even);
            if (t + 1 < tiles) add_tile(t + 1, odd);
        }
        asynchronous::wait_products<0>();
#pragma unroll
        for (int kt = 0; kt < KT; ++kt) asynchronous::hold(acc[kt].x);
        ring.release(done);

        store_turned(p, acc, results + self * KT * area, self, p.states + p.state_at(slot, h) + vt * edge,
                     p.value_width - vt * edge);
    }
}

// ---- outputs ---------------------------------------------------------------------------------------------------------

constexpr int output_stages = 7;
constexpr int output_copies_ahead = 4;
constexpr int output_strip = 7;  // score tiles of the two warpgroups: 3 and 4 at most
using OutputRings = Rings<output_stages, output_copies_ahead>;
// The producer waits for the scalars of a head while the stages of the last output_copies_ahead are not reported yet: they
// must not belong to as many heads as there are stages of scalars. Blocks with one stage a head report it at once.
static_assert(output_copies_ahead <= 2 * (head_stages - 1));

// What the two tiles of a block need of one head. Scales of the linear operator are 1 and not kept.
template <bool LogLinear>
struct OutputScalars {
    unsigned char* base;
    int levels, stride;  // rows of level scales are `stride` floats apart, an odd number: no bank conflicts

    __device__ __forceinline__ OutputScalars(void* at, int level_count)
        : base(static_cast<unsigned char*>(at)), levels(level_count), stride(level_count | 1) {}
    static __host__ __device__ constexpr int bytes(int levels) {
        const int scales = LogLinear ? consumers * edge * (levels | 1) : 0;
        return (((consumers + tiles_per_chunk - 1) * edge + tiles_per_chunk + scales) * static_cast<int>(sizeof(float)) +
                (consumers + most_live) * static_cast<int>(sizeof(double)) + 15) /
               16 * 16;
    }
    // Sums of g from the start of the x-th tile of the block.
    __device__ __forceinline__ float* gamma(int x) const { return reinterpret_cast<float*>(base) + x * edge; }
    // Decay to the end of tile j of the chunk, from its tokens.
    __device__ __forceinline__ float* to_end(int j) const { return gamma(consumers + j); }
    // Sum of g of tile j.
    __device__ __forceinline__ float* total() const { return to_end(tiles_per_chunk - 1); }
    // Sums of g up to the x-th tile of the block, to the end of the n-th live bucket.
    __device__ __forceinline__ double* start() const { return reinterpret_cast<double*>(total() + tiles_per_chunk); }
    __device__ __forceinline__ double* bucket_end() const { return start() + consumers; }
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(bucket_end() + most_live); }
    // Level scales of the row-th token of the block; `eighth`: of the one 8 tokens on.
    struct Scales {
        const float* at;
        int to_eighth;
        __device__ __forceinline__ float operator()(int eighth, int level) const {
            if constexpr (!LogLinear) return 1.0f;
            return at[eighth * to_eighth + level];
        }
    };
    __device__ __forceinline__ Scales scales_of(int row) const { return {scales() + row * stride, 8 * stride}; }

    // Copies of the producer. Whole: of two whole tiles.
    template <bool Whole>
    __device__ __forceinline__ void load(const Problem<bf16>& p, const Pair& pair, int h, const LiveBucket* buckets,
                                         int live) const {
        const int thread = tile::team_index(), last = pair.first + pair.count - 1;
        const auto copy_rows = [&](float* to, const float* from, int first, int count) {
            if (thread < count * edge / 4)
                tile::copy_async_16(
                    to + thread * 4,
                    from + p.at(pair.slot.tile + first + thread / (edge / 4), h) * edge + thread % (edge / 4) * 4, true);
        };
        copy_rows(gamma(0), p.gamma, pair.first, pair.count);
        copy_rows(to_end(0), p.to_tile_end, 0, last);
        if (thread < last) {
            tile::copy_async<4>(total() + thread, p.gamma + p.at(pair.slot.tile + thread, h) * edge + edge - 1, true);
        } else if (thread >= 32 && thread < 32 + pair.count) {
            tile::copy_async<8>(start() + thread - 32, p.start + p.at(pair.slot.tile + pair.first + thread - 32, h), true);
        } else if (thread >= 64 && thread < 64 + live) {
            tile::copy_async<8>(bucket_end() + thread - 64, p.chunk_end + p.at(buckets[thread - 64].slot, h), true);
        }
        if constexpr (!LogLinear) return;
        // 16 threads a token. Levels beyond the last column repeat it.
        const int row = thread / 16, rows = (pair.count - 1) * edge + pair.rows(last) - row;
        const std::int64_t step = static_cast<std::int64_t>(threads / 16) * p.heads * p.levels;
        for (int l = thread % 16; l < levels; l += 16) {
            const float* from =
                p.level_scales + ((pair.token_of(pair.first) + row) * p.heads + h) * p.levels + min(l, p.levels - 1);
            float* to = scales() + row * stride + l;
            constexpr int rounds = consumers * edge / (threads / 16);
            if constexpr (Whole) {
#pragma unroll
                for (int n = 0; n < rounds; ++n, from += step, to += threads / 16 * stride)
                    tile::copy_async<4>(to, from, true);
            } else {
#pragma unroll 4
                for (int n = 0; n < pair.count * edge; n += threads / 16, from += step, to += threads / 16 * stride)
                    tile::copy_async<4>(to, from, n < rows);
            }
        }
    }
};

template <int KT, bool LogLinear>
std::size_t tile_output_shared(int all_levels) {
    return (2 * output_stages + output_strip + consumers) * area * sizeof(bf16) +
           head_stages * OutputScalars<LogLinear>::bytes(all_levels) + sizeof(OutputRings) + most_live * sizeof(LiveBucket);
}

// scores x (level mask and decay) of a tile with itself. A warp has 16 rows: blocks of 16 columns before them are at level 5
// (next to them in the same 32) or 6. All warps compute all blocks, the same way: a branch a block would be a chain of
// latencies.
template <class Scales>
__device__ __forceinline__ void mask_own(Fragment (&a)[tile_steps], const Scales& scale, const float* gamma,
                                         const Fragment* scores) {
    const int thread = tile::team_index(), lane = thread % 32, warp = thread / 32;
    const int t = warp * 16 + lane / 4, column = lane % 4 * 2;
    scores += thread;
#pragma unroll
    for (int k = 0; k < tile_steps - 1; ++k) a[k] = scores[k * threads];
    Fragment own = scores[warp * threads];
    const float end[2] = {gamma[t] * log2_e, gamma[t + 8] * log2_e};
    const float before = warp > 0 ? gamma[warp * 16 - 1] * log2_e : 0.0f;
    float near[2], far[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float into = exp2_fast(end[r] - before);
        near[r] = scale(r, 5) * into;
        far[r] = scale(r, 6) * into;
    }
    // A block behind the rows gets the decay 0.
    const auto weigh_block = [&](int k, const float(&factor)[2]) {
        const float reference = k < warp ? before : -INFINITY;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 start = tile::load_pair(gamma + k * 16 + half * 8 + column);
            weigh(a[k], factor, half, exp2_fast(reference - start.x * log2_e), exp2_fast(reference - start.y * log2_e));
        }
    };
    const float first_factor[2] = {warp == 1 ? near[0] : far[0], warp == 1 ? near[1] : far[1]};
    weigh_block(0, first_factor);
    weigh_block(1, far);
    weigh_block(2, near);
    // The warp's rows with themselves: two blocks of 8 x 8 on the diagonal, one below.
    const float2 first = tile::load_pair(gamma + warp * 16 + column),
                 second = tile::load_pair(gamma + warp * 16 + 8 + column);
    const int level_a = bits_of(lane / 4 ^ column), level_b = bits_of(lane / 4 ^ (column + 1));
    const bool sees_a = column <= lane / 4, sees_b = column + 1 <= lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float2 start = r == 0 ? first : second;
        std::uint32_t& pair = own.x[r * 3];
        const float2 x = tile::unpack(pair);
        pair = tile::pack(sees_a ? x.x * (scale(r, level_a) * exp2_fast(end[r] - start.x * log2_e)) : 0.0f,
                          sees_b ? x.y * (scale(r, level_b) * exp2_fast(end[r] - start.y * log2_e)) : 0.0f);
    }
    {
        const float factor = scale(1, 4);
        const float2 x = tile::unpack(own.x[1]);
        own.x[1] = tile::pack(x.x * (factor * exp2_fast(end[1] - first.x * log2_e)),
                              x.y * (factor * exp2_fast(end[1] - first.y * log2_e)));
        own.x[2] = 0;  // columns 8 .. 15 are behind rows 0 .. 7
    }
#pragma unroll
    for (int k = 0; k < tile_steps; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[k].x[e] = k == warp ? own.x[e] : k < tile_steps - 1 ? a[k].x[e] : 0;
}

// Grid: 2 x slots, head slices of all groups, value tiles.
// Order of the stages: q of the block's tiles, k of the chunk's tiles up to them; then for every head the state of the first
// live bucket, v of those tiles, two a stage, and the states of the other live buckets.
template <int KT, bool LogLinear>
__global__ void __launch_bounds__(pipelined_threads, 1) tile_outputs(Problem<bf16> p) {
    const Pair pair(p);
    if (pair.count == 0) return;
    const HeadRange range = head_range(p);
    const int vt = blockIdx.z, chunk = uniform(pair.slot.index), live = live_count(p, chunk);
    const int last = uniform(pair.first + pair.count - 1);
    bf16* const stages = reinterpret_cast<bf16*>(tile::shared_memory());  // 2 tiles each
    Fragment* const strip = reinterpret_cast<Fragment*>(stages + 2 * output_stages * area);
    bf16* const results = reinterpret_cast<bf16*>(strip) + output_strip * area;  // a tile for each warpgroup
    unsigned char* const scalars = reinterpret_cast<unsigned char*>(results + consumers * area);
    const int scalar_bytes = OutputScalars<LogLinear>::bytes(p.all_levels);
    auto& rings = *reinterpret_cast<OutputRings*>(scalars + head_stages * scalar_bytes);
    auto& ring = rings.tiles;
    auto& head_ring = rings.heads;
    auto* const buckets = reinterpret_cast<LiveBucket*>(&rings + 1);
    list_live(p, pair.slot_id, chunk, live, buckets);
    const auto head_at = [&](int stage) { return OutputScalars<LogLinear>(scalars + stage * scalar_bytes, p.all_levels); };
    const auto stage_at = [&](int stage) { return stages + 2 * stage * area; };
    rings.initialize(pair.count);

    Position<head_stages> head_position;
    const int self = uniform(warpgroup_index());
    if (self == consumers) {
        asynchronous::release_registers<56>();
        typename decltype(rings.tiles)::Producer producer;
        const auto fetch_keys = [&](int j, bool queries) {
            ring.fill(producer, [&](int stage) { load_key_tiles<KT>(p, stages, stage, queries, pair, j, range.group); });
        };
        for (int j = pair.first; j <= last; ++j) fetch_keys(j, true);
        for (int j = 0; j <= last; ++j) fetch_keys(j, false);
        const TileCopy copy_value(p.v_stride, p.value_width - vt * edge);
        const TileCopy copy_of_state(p.value_width, p.value_width - vt * edge);
        const auto fetch_heads = [&](auto all_whole) {
            constexpr bool whole = decltype(all_whole)::value;
            for (int h = range.first; h < range.first + range.count; ++h) {
                head_ring.fill(head_position,
                               [&](int stage) { head_at(stage).template load<whole>(p, pair, h, buckets, live); });
                const auto fetch_state = [&](int n) {
                    ring.fill(producer, [&](int stage) {
                        if constexpr (whole) {
                            copy_of_state.template whole<KT * edge>(stage_at(stage),
                                                                    p.states + p.state_at(buckets[n].slot, h) + vt * edge);
                        } else {
                            copy_state<KT>(p, copy_of_state, stage_at(stage), p.states, buckets[n].slot, h, vt);
                        }
                    });
                };
                if (live > 0) fetch_state(0);
                for (int j = 0; j <= last; j += 2) {
                    ring.fill(producer, [&](int stage) {
                        if constexpr (whole) {
                            copy_value.template whole<2 * edge>(stage_at(stage), values_at(p, pair.token_of(j), h, vt));
                        } else {
                            for (int x = j; x <= min(j + 1, last); ++x)
                                copy_value(stage_at(stage) + (x - j) * area, values_at(p, pair.token_of(x), h, vt),
                                           pair.rows(x));
                        }
                    });
                }
                for (int n = 1; n < live; ++n) fetch_state(n);
                if (live == 0 && last < 2) ring.finish(producer);
            }
        };
        // Asked once: to compare for each copy of 16 bytes is most of what a copy costs.
        if (p.key_width == KT * edge && p.value_width - vt * edge >= edge && pair.count == consumers &&
            pair.rows(last) == edge) {
            fetch_heads(std::true_type{});
        } else {
            fetch_heads(std::false_type{});
        }
        ring.finish(producer);
        return;
    }
    asynchronous::claim_registers<224>();
    if (self >= pair.count) return;
    Position<output_stages> at, done;  // stages waited for, released

    const int i = uniform(pair.first) + self, t = warpgroup::first_row(), row = self * edge + t;
    Fragment* const scores = strip + self * 3 * tile_steps * threads;
    Fragment queries[KT * tile_steps];
    for (int x = 0; x < pair.count; ++x) {
        ring.wait(at);
        if (x == self) {
#pragma unroll
            for (int k = 0; k < KT * tile_steps; ++k)
                queries[k] = load_fragment<false>(stage_at(at.stage) + k / tile_steps * area, k % tile_steps * 16);
        }
        at.advance();
        ring.release(done);
    }
    for (int j = 0; j <= last; ++j) {
        ring.wait(at);
        if (j <= i) score_fragments<KT>(scores, j * tile_steps, queries, stage_at(at.stage));
        at.advance();
        ring.release(done);
    }

    const int thread = tile::team_index(), lane = thread % 32, column = lane % 4 * 2;
    // Outputs leave through shared memory, a warp's 16 rows at a time, so that whole rows are written: what a thread puts
    // there, the four pieces of rows it takes, and where they go.
    bf16* const result = results + self * area;
    int put[tile_steps];
#pragma unroll
    for (int k = 0; k < tile_steps; ++k)
        put[k] = tile::offset<bf16>(thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8, k * 16 + lane / 16 * 8);
    const int row_taken = thread / 32 * 16 + lane / 8, v = lane % 8 * 8;
    const int take[2] = {tile::offset<bf16>(row_taken, v), tile::offset<bf16>(row_taken + 4, v)};
    const int rows_taken = vt * edge + v < p.value_width ? pair.rows(i) - row_taken : 0;
    const std::int64_t row_stride = static_cast<std::int64_t>(p.heads) * p.value_width;
    bf16* out = p.o + (pair.token_of(i) + row_taken) * row_stride + static_cast<std::int64_t>(range.first) * p.value_width +
                vt * edge + v;
    // Decay to this thread's rows from the tile's start, and to the tile's start from the end of a bucket, one a lane.
    float into[2], reach = 0;
    const auto prepare = [&] {
        head_ring.wait(head_position);
        const OutputScalars<LogLinear> head = head_at(head_position.stage);
        into[0] = exp2_fast(head.gamma(self)[t] * log2_e);
        into[1] = exp2_fast(head.gamma(self)[t + 8] * log2_e);
        if (lane < live)
            reach = exp2_fast(fminf(static_cast<float>(head.start()[self] - head.bucket_end()[lane]), 0.0f) * log2_e);
    };
    if (range.count > 0) prepare();
    for (int h = range.first; h < range.first + range.count; ++h) {
        const OutputScalars<LogLinear> head = head_at(head_position.stage);
        const float* const gamma = head.gamma(self);
        const auto scale = head.scales_of(row);
        // Row factors of the buckets, one after the other.
        int bucket = 0, levels_left = chunk;
        float factor[2] = {0, 0};
        const auto next_factor = [&] {
            const float its = __shfl_sync(0xffffffffu, reach, bucket++);
            const int level = chunk_levels - 1 + __ffs(levels_left);
            levels_left &= levels_left - 1;
#pragma unroll
            for (int r = 0; r < 2; ++r) factor[r] = scale(r, level) * into[r] * its;
        };

        // The first bucket's product runs while the tile's own mask is computed.
        Accumulator acc;
        acc.clear();
        if (live > 0) {
            ring.wait(at);
            asynchronous::fence_products(acc.x);
            queue_product<true>(acc, queries, stage_at(at.stage));
            asynchronous::commit();
            at.advance();
        }
        Fragment even[tile_steps], odd[tile_steps];
        mask_own(even, scale, gamma, scores + i * tile_steps * threads);
        if (live > 0) next_factor();
        asynchronous::wait_products<0>();
        asynchronous::hold(acc.x);
        if (live > 0) ring.release(done);
        acc.for_pairs([&](int, int, float& a, float& b, int local) {
            a *= factor[local];
            b *= factor[local];
        });
        // Then the tile's product with its own values, and those before it, the nearest first: the next mask is computed
        // while a product runs.
        const Position<output_stages> value_stage = at;
        for (int j = 0; j <= last; j += 2) {
            ring.wait(at);
            at.advance();
        }
        const auto values = [&](int j) {
            int stage = value_stage.stage + j / 2;
            if (stage >= output_stages) stage -= output_stages;
            return stages + (2 * stage + j % 2) * area;
        };
        fence_fragments(even);
        asynchronous::fence_products(acc.x);
        queue_product<true>(acc, even, values(i));
        asynchronous::commit();
        float gap = 0;  // sum of g between the two tiles
        const auto add_tile_below = [&](int j, Fragment(&a)[tile_steps]) {
            const int level = tile_bits + bits_of(i ^ j);
            const float between = exp2_fast(gap * log2_e);
            gap += head.total()[j];
            const float factor[2] = {scale(0, level) * into[0] * between, scale(1, level) * into[1] * between};
            const float* const to_end = head.to_end(j) + column;
#pragma unroll
            for (int k = 0; k < tile_steps; ++k) {
                a[k] = own_fragment(scores, j * tile_steps + k);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 decay = tile::load_pair(to_end + k * 16 + half * 8);
                    weigh(a[k], factor, half, decay.x, decay.y);
                }
            }
            fence_fragments(a);
            queue_product<true>(acc, a, values(j));
            asynchronous::commit();
            asynchronous::wait_products<1>();
        };
        for (int j = i - 1; j >= 0; j -= 2) {
            add_tile_below(j, odd);
            if (j > 0) add_tile_below(j - 1, even);
        }
        // The other buckets: a product runs while the last one's result is added. (As ptxas follows it: with a group left
        // running across a wait it would let every product finish first.)
        const auto start_bucket = [&](Accumulator& to) {
            ring.wait(at);
            to.clear();
            asynchronous::fence_products(to.x);
            queue_product<true>(to, queries, stage_at(at.stage));
            asynchronous::commit();
            at.advance();
        };
        const auto finish_bucket = [&](Accumulator& its) {
            next_factor();
            asynchronous::wait_products<0>();
            asynchronous::hold(its.x);
            ring.release(done);
        };
        const auto add_bucket = [&](Accumulator& from) {
            acc.for_pairs_with(from, [&](int, int, float& a, float& b, int local, float x, float y) {
                a += factor[local] * x;
                b += factor[local] * y;
            });
        };
        const auto finish_tiles = [&] {
            asynchronous::wait_products<0>();
            asynchronous::hold(acc.x);
            for (int j = 0; j <= last; j += 2) ring.release(done);
        };
        if (live > 1) {
            Accumulator part, next;
            start_bucket(part);
            finish_tiles();
            finish_bucket(part);
            for (int n = 1; n < live; n += 2) {
                if (n + 1 < live) {
                    start_bucket(next);
                    add_bucket(part);
                    finish_bucket(next);
                    if (n + 2 < live) {
                        start_bucket(part);
                        add_bucket(next);
                        finish_bucket(part);
                    } else {
                        add_bucket(next);
                    }
                } else {
                    add_bucket(part);
                }
            }
        } else {
            finish_tiles();
        }
        head_ring.release(head_position);
        if (h + 1 < range.first + range.count) prepare();

        __syncwarp();  // the last head's rows have been taken
#pragma unroll
        for (int k = 0; k < tile_steps; ++k) asynchronous::store_matrices<false>(result + put[k], fragment_of(acc, k).x);
        __syncwarp();
        Fragment parts[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) parts[n] = *reinterpret_cast<const Fragment*>(result + take[n % 2] + n / 2 * 8 * edge);
        bf16* to = out;
#pragma unroll
        for (int n = 0; n < 4; ++n, to += 4 * row_stride)
            if (n * 4 < rows_taken) tile::store_16(to, parts[n].x);
        out += p.value_width;
    }
}

}  // namespace fenwick::kernels::cuda::ssd_scan
