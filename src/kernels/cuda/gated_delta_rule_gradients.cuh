// What flows through the states of the gated delta rule on Hopper, in bfloat16 (names as in gated_delta_rule.cu):
//
//   dQb = sum_l diag(lambda_l) dO S_l',   -dKh = sum_l Z_l S_l',   dY = sum_l T_l dS_l',   and <dS_l, S_l>
//
// Every state and every state's gradient is read once, and that is what takes the time: producer warps copy them, 64 value
// columns of one state a step, into three stages of shared memory, and run ahead into the next chunk. A warpgroup a key tile
// keeps the three sums of a chunk in registers. Blocks stay and take (chunk, head) in turn.
#pragma once

#include <cstdint>

#include "kernels/cuda/gated_delta_rule_walk.cuh"

namespace fenwick::kernels::cuda::flow {

using asynchronous::Barrier;
using tile::area;
using tile::bf16;
using tile::edge;
using walk::ChunkInfo;
using walk::place_of;
using walk::slots_before;
using walk::Transition;
using walk::transition_after;

struct Flow {
    int heads, value_width, value_tiles, levels, slots, chunks;
    const ChunkInfo* chunk_info;
    const bf16* d_o;
    const float* level_scales;
    const bf16* query;                                // Qb: [chunks, H, K tiles]
    const float* decay;                               // e_last: [chunks, H]
    const bf16 *states, *d_states, *steps, *d_steps;  // as walk_states leaves them
    bf16 *d_query, *d_left;                           // dQb, dY: [chunks, H, K tiles]
    float* d_start;                                   // dKh: the same, as a warpgroup holds them
    float* scale_parts;                               // [K tiles, chunks, H, slots, 64]
    float* flow_parts;                                // [K tiles, chunks, H]: e_last sum_l <dS_l, S_l>
};

constexpr int stages = 3;
template <int KT>
struct Layout {
    static constexpr int tile_bytes = area * sizeof(bf16);
    static constexpr int state = 0, d_state = KT * tile_bytes, z = 2 * KT * tile_bytes, step = z + tile_bytes,
                         d_out = step + tile_bytes, stage_bytes = d_out + tile_bytes;
    static constexpr int bytes =
        stages * stage_bytes + KT * 4 * static_cast<int>(sizeof(float)) + static_cast<int>(sizeof(pipeline::Ring<stages>));
};

// A chunk's states in the order in which they are taken: those that enter, then, where its values meet none of them, what
// they make by themselves (slot -1: it has a step and a gradient only).
struct Chunk {
    ChunkInfo info;
    int used, used_count, next_count, next_used, destination, merged;

    __device__ __forceinline__ explicit Chunk(const ChunkInfo& c, int slots) : info(c) {
        used = slots_before(c.index, slots);
        used_count = __popc(used);
        const Transition transition = transition_after(c.index, slots);
        destination = transition.destination;
        merged = transition.merged;
        next_used = transition.kept | 1 << destination;
        next_count = __popc(next_used);
    }
    __device__ __forceinline__ bool moves() const { return info.has_next != 0; }
    __device__ __forceinline__ bool has_fresh() const { return moves() && merged == 0; }
    // The place among the leaving states of what enters in `slot`.
    __device__ __forceinline__ int leaving_place(int slot) const {
        return place_of(next_used, slot < 0 || (merged >> slot & 1) != 0 ? destination : slot);
    }
};

// Calls chunk(unit, h, chunk), then step(slot) for each of its states, then end() for every unit of this block.
template <class Begin, class Step, class End>
__device__ __forceinline__ void for_each_state(const Flow& p, Begin&& begin, Step&& step, End&& end) {
    for (int unit = static_cast<int>(blockIdx.x); unit < p.chunks * p.heads; unit += static_cast<int>(gridDim.x)) {
        const int id = unit / p.heads;
        const Chunk chunk(p.chunk_info[id], p.slots);
        begin(unit, id, unit % p.heads, chunk);
        for (int rest = chunk.used; rest != 0; rest &= rest - 1) step(chunk, __ffs(rest) - 1);
        if (chunk.has_fresh()) step(chunk, -1);
        end(unit, chunk);
    }
}

// A warpgroup a key tile, then one whose first two warps are producers.
template <int KT>
__global__ void __launch_bounds__((KT + 1) * 128, 1) state_flow(const Flow p) {
#if defined(FENWICK_TILE_WGMMA) || defined(FENWICK_CUDA_EMULATION)
    using namespace asynchronous;
    using L = Layout<KT>;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    unsigned char* const memory = tile::shared_memory();
    float* const warp_sums = reinterpret_cast<float*>(memory + stages * L::stage_bytes);  // [K tiles, 4]
    auto& ring = *reinterpret_cast<pipeline::Ring<stages>*>(warp_sums + KT * 4);
    // Finite from the start: what is not copied is multiplied by zeros, or not used.
    for (int i = static_cast<int>(threadIdx.x); i < stages * L::stage_bytes / 16; i += (KT + 1) * 128)
        reinterpret_cast<Pack<float, 4>*>(memory)[i] = {};
    warpgroup::fence_tiles();
    if (threadIdx.x == 0) {
        ring.initialize(KT * 4, 1 + pipeline::arrivals_of_warp);
        fence_barriers();
    }
    __syncthreads();
    pipeline::Position<stages> at;
    const auto acquire = [&] { pipeline::wait_as_warp(ring.free + at.stage, at.turn ^ 1); };

    if (warp >= KT * 4) {
        release_registers<40>();
        const int lane = static_cast<int>(threadIdx.x) % 32, VT = p.value_tiles, role = warp - KT * 4;
        const std::int64_t stride = static_cast<std::int64_t>(p.heads) * p.value_width;
        int h = 0, id = 0;
        const auto begin = [&](int, int chunk_id, int head, const Chunk&) { id = chunk_id, h = head; };
        const auto end = [](int, const Chunk&) {};
        if (role == 0) {  // states and steps
            for_each_state(
                p, begin,
                [&](const Chunk& chunk, int slot) {
                    const ChunkInfo& c = chunk.info;
                    const bool enters = slot >= 0, moves = chunk.moves();
                    const bool shares =
                        enters && (chunk.merged >> slot & 1) != 0 && (chunk.merged & (chunk.merged - 1)) != 0;
                    const int place = enters ? place_of(chunk.used, slot) : chunk.used_count;
                    const std::int64_t entering = walk::place(p.heads, c.entering, chunk.used_count, h, place),
                                       own = walk::place(p.heads, c.entering + id, chunk.used_count + 1, h, place),
                                       leaving =
                                           walk::place(p.heads, c.leaving, chunk.next_count, h, chunk.leaving_place(slot));
                    for (int vt = 0; vt < VT; ++vt) {
                        constexpr int operand = KT * L::tile_bytes;
                        unsigned char* const stage = memory + at.stage * L::stage_bytes;
                        Barrier* const full = ring.filled + at.stage;
                        acquire();
                        if (lane == 0) {
                            arrive_expecting(full, (enters ? operand : 0) + (moves ? operand + L::tile_bytes : 0) +
                                                       (enters && moves ? L::tile_bytes : 0));
                            // States that merge share what leaves: it is read again soon.
                            const auto copy = [&](int to, const bf16* from, int bytes) {
                                if (shares) {
                                    copy_bulk(stage + to, from, bytes, full);
                                } else {
                                    copy_bulk_once(stage + to, from, bytes, full);
                                }
                            };
                            if (enters)
                                copy_bulk_once(stage + L::state, p.states + (entering * VT + vt) * KT * area, operand, full);
                            if (moves) {
                                copy(L::d_state, p.d_states + (leaving * VT + vt) * KT * area, operand);
                                copy_bulk_once(stage + L::step, p.steps + (own * VT + vt) * area, L::tile_bytes, full);
                            }
                            if (enters && moves) copy(L::z, p.d_steps + (leaving * VT + vt) * area, L::tile_bytes);
                        }
                        at.advance();
                    }
                },
                end);
        } else if (role == 1) {  // what must be fenced for wgmma
            for_each_state(
                p, begin,
                [&](const Chunk& chunk, int slot) {
                    for (int vt = 0; vt < VT; ++vt) {
                        unsigned char* const stage = memory + at.stage * L::stage_bytes;
                        acquire();
                        if (slot >= 0) {
                            walk::load_rows(reinterpret_cast<bf16*>(stage + L::d_out),
                                            p.d_o + chunk.info.token * stride + static_cast<std::int64_t>(h) * p.value_width,
                                            stride, chunk.info.rows, vt * edge, p.value_width);
                            tile::commit_async();
                            tile::wait_async<0>();
                        } else {
                            for (int i = lane; i < L::tile_bytes / 16; i += 32)
                                reinterpret_cast<Pack<float, 4>*>(stage + L::z)[i] = {};
                        }
                        warpgroup::fence_tiles();
                        pipeline::arrive_as_warp(ring.filled + at.stage);
                        at.advance();
                    }
                },
                end);
        }
        return;
    }

    claim_registers<152>();
    const int kt = warp / 4, thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
    float d_query[8][4], d_start[8][4], d_left[8][4], flow = 0;
    int h = 0;
    const bf16* query = nullptr;
    std::int64_t part = 0;  // of scale_parts and flow_parts
    for_each_state(
        p,
        [&](int unit, int, int head, const Chunk&) {
            h = head;
            query = p.query + (static_cast<std::int64_t>(unit) * KT + kt) * area;
            part = static_cast<std::int64_t>(kt) * p.chunks * p.heads + unit;
            clear(d_query);
            clear(d_start);
            clear(d_left);
            flow = 0;
        },
        [&](const Chunk& chunk, int slot) {
            const bool enters = slot >= 0;
            float read[8][4];  // dO S'
            clear(read);
            for (int vt = 0; vt < p.value_tiles; ++vt) {
                const unsigned char* const stage = memory + at.stage * L::stage_bytes;
                const auto tile_at = [&](int offset) { return reinterpret_cast<const bf16*>(stage + offset); };
                const bf16 *const state = tile_at(L::state) + kt * area, *const d_state = tile_at(L::d_state) + kt * area;
                ring.wait(at);
                fence_products(read);
                fence_products(d_start);
                fence_products(d_left);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    multiply<false>(read, tile_at(L::d_out) + k * 16, state + k * 16);
                    multiply<false>(d_start, tile_at(L::z) + k * 16, state + k * 16);
                    multiply<false>(d_left, tile_at(L::step) + k * 16, d_state + k * 16);
                }
                commit();
                if (enters && chunk.moves()) {
                // Both tiles are laid out alike.
#pragma unroll
                    for (int i = 0; i < area / 8; i += 128) {
                        float a[8], b[8];
                        load(a, state + (i + thread) * 8);
                        load(b, d_state + (i + thread) * 8);
#pragma unroll
                        for (int e = 0; e < 8; ++e) flow += a[e] * b[e];
                    }
                }
                wait_products<0>();
                hold(read);
                hold(d_start);
                hold(d_left);
                ring.release(at);
            }
            if (!enters) return;
            float sums[2] = {}, scales[2] = {1.0f, 1.0f};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int t = row + r * 8;
                if (p.level_scales != nullptr)
                    scales[r] = t < chunk.info.rows ? p.level_scales[((chunk.info.token + t) * p.heads + h) * p.levels +
                                                                     min(walk::inside_levels + slot, p.levels - 1)]
                                                    : 0.0f;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    float *const x = read[j] + 2 * r, *const sum = d_query[j] + 2 * r;
                    const float2 q = tile::load_pair(query + tile::offset<bf16>(t, 8 * j + column));
                    sums[r] += q.x * x[0] + q.y * x[1];
                    sum[0] += scales[r] * x[0];
                    sum[1] += scales[r] * x[1];
                }
            }
            if (p.level_scales == nullptr) return;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float sum = team_sum(sums[r], 4);
                if (lane % 4 == 0) p.scale_parts[(part * p.slots + slot) * edge + row + r * 8] = sum;
            }
        },
        [&](int unit, const Chunk& chunk) {
            const std::int64_t to = (static_cast<std::int64_t>(unit) * KT + kt) * area;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) d_start[j][e] = -d_start[j][e];
                store(p.d_start + to + thread * 4 + j * 512, d_start[j]);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const std::int64_t pair = to + tile::offset<bf16>(row + 8 * r, 8 * j + column);
                    tile::store_pair(p.d_query + pair, d_query[j][2 * r], d_query[j][2 * r + 1]);
                    tile::store_pair(p.d_left + pair, d_left[j][2 * r], d_left[j][2 * r + 1]);
                }
            }
            flow = team_sum(flow);
            if (lane == 0) warp_sums[warp] = flow;
            pipeline::synchronize_team(1 + kt);
            if (thread == 0 && chunk.moves())
                p.flow_parts[part] =
                    (warp_sums[warp] + warp_sums[warp + 1] + warp_sums[warp + 2] + warp_sums[warp + 3]) * p.decay[unit];
            pipeline::synchronize_team(1 + kt);
        });
#endif
}

}  // namespace fenwick::kernels::cuda::flow
