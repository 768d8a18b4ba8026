// A token of decoding as one launch (kernels/decode.h), for Hopper.
//
// Every block stays on its multiprocessor and has a share of each operator: consecutive units of a product's rows, or of the
// columns of states. One warp (the producer) streams what the shares need of matrices and states, in the order of the
// operators, through a ring in shared memory; it depends on nothing but free room. Eight warps compute; another one fetches
// the descriptions of the operators. What operators give to each other goes through words in global memory: float32 numbers
// whose two lowest bits are the token's tag. A reader polls until they are right; there is no barrier between blocks.
//
// Three things were measured to matter (docs/benchmarks/decoding.md): few bytes are under way at once, so that polls do not
// queue behind them (`window`); nobody polls early or often (poll); and a product's critical path is short: two warps take a
// unit from shared memory to its result, nobody waits for the block in between.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/asynchronous.cuh"
#include "kernels/cuda/decode_columns.cuh"
#include "kernels/cuda/dependent.cuh"
#include "kernels/decode.h"

namespace fenwick::kernels::cuda {
namespace {

using asynchronous::arrive;
using asynchronous::arrive_expecting;
using asynchronous::copy_bulk;
using asynchronous::copy_bulk_once;
using pipeline::Barrier;
using pipeline::initialize;
using pipeline::wait;

constexpr int warps = 8, pairs = warps / 2, workers = warps * 32;
constexpr int block_threads = (warps + 2) * 32;  // and the producer, and who fetches descriptions
constexpr int slots = 64;        // pieces in the ring; fewer lie between two points that all warps of a block pass
constexpr int most_share = 8;    // units of a product a block: a warp finishes one
constexpr int most_keys = 4096;  // of a product's input
constexpr int most_squares = 4 * workers, most_groups = 64;
constexpr int kept_steps = 3;
constexpr int state_columns = 4;  // of a unit of states
constexpr int most_live = 32;     // levels that a token reads
static_assert(most_live + 2 * most_share < slots);
constexpr int shared_limit = 232448;

enum class StepKind : int { embedding, product, ssd, gated_delta_rule };

struct alignas(16) Step {
    StepKind kind;
    int units, share, rows;     // units of all blocks, of a block; rows of a unit (product, embedding)
    int columns, first_column;  // of the product in all; of unit 0 (states: its number)
    // A product's input: words x [in] in `slices`, `fragments` of 16 keys for each warp of a pair; divided by the root mean
    // square of each of `groups` slices, whose sums of squares come as `squares` words (groups = 0: not divided).
    int in, slices, fragments, groups, squares;
    float eps;
    const std::uint32_t *x, *x_squares;
    // What is added to the stream (or begins it) goes on as words times the next norm's weight, with a unit's sum of
    // squares.
    int adds;
    int tagged;  // 0: plain numbers
    std::uint32_t *x_out, *squares_out;
    const float* norm;
    // States: x_out, squares_out and norm likewise, the norm's weight repeating for each head or not; and the gate.
    int gate_before, norm_repeats, heads_a_group;
    const std::uint32_t* gate;
    DecodeProjection projection;
    DecodeSsd ssd;
    DecodeGatedDeltaRule delta;
};
static_assert(std::is_trivially_copyable_v<Step>);

// What the producer needs of a step.
struct alignas(16) Stream {
    const unsigned char* from;  // of unit 0
    std::int64_t level_bytes;   // between the levels of states; 0: a product
    int units, share, unit_bytes, unused;
};

struct Shared {
    Barrier full[slots], free[slots], step_full[kept_steps], step_free[kept_steps], x_free;
    Barrier workers_met, pair_met[pairs];  // for racecheck
    int offset[slots], bytes[slots];
    alignas(16) float squares[2][warps];
    float partial[workers], scale[most_groups];
    float stream[most_share * 8];  // the residual stream's columns of this block
    alignas(16) float sums[pairs][2][32];
    Step steps[kept_steps];
};

__host__ __device__ inline const std::uint32_t* words_of(const float* x) {
    return reinterpret_cast<const std::uint32_t*>(x);
}

// Other architectures' compilers need not see what is not launched there.
#if defined(FENWICK_TILE_WGMMA) || !defined(__CUDA_ARCH__)
#define FENWICK_DECODE_TOKEN
constexpr int producer_warp = warps, describer_warp = warps + 1;
constexpr int window = 40960;  // bytes under way
constexpr std::uint32_t tag_mask = 3;

// ---- words -----------------------------------------------------------------------------------------------------------
struct Words {
    std::uint32_t word[4];
};
__device__ __forceinline__ std::uint32_t load_word(const std::uint32_t* from) {
    std::uint32_t x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ Words load_words(const std::uint32_t* from) {
    Words x;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "l"(from)
                 : "memory");
    return x;
}
__device__ __forceinline__ bool is_of(std::uint32_t word, std::uint32_t tag) { return (word & tag_mask) == tag; }
__device__ __forceinline__ float number(std::uint32_t word) { return __uint_as_float(word & ~tag_mask); }
__device__ __forceinline__ void store_word(void* to, float x, std::uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"((__float_as_uint(x) & ~tag_mask) | tag) : "memory");
}
// Whoever polls asks for all words before it looks at the first: an answer takes about half a microsecond.
template <int N, class From>
__device__ __forceinline__ void ask(std::uint32_t (&words)[N], From&& from) {
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = load_word(from(i));
}
template <int N>
__device__ __forceinline__ bool are_of(const std::uint32_t (&words)[N], std::uint32_t tag) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; ++i) all = all && is_of(words[i], tag);
    return all;
}

// Asks, and looks; at first after a while, since whoever asks too early or too often only keeps writers waiting
// (measured: docs/benchmarks/decoding.md).
constexpr unsigned before_first = 600, before_next = 300;  // nanoseconds
template <class Ask, class Have>
__device__ __forceinline__ void poll(Ask&& ask_all, Have&& have_all) {
    __nanosleep(before_first);
    ask_all();
    while (!have_all()) {
        __nanosleep(before_next);
        ask_all();
    }
}

// ---- shared memory ---------------------------------------------------------------------------------------------------
__device__ __forceinline__ void load_shared(std::uint32_t (&x)[4], std::uint32_t from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}
__device__ __forceinline__ void load_shared(float (&x)[4], std::uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(from));
}
__device__ __forceinline__ void load_shared(std::uint32_t (&x)[2], std::uint32_t from) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(from));
}
__device__ __forceinline__ void store_shared(std::uint32_t to, std::uint32_t a, std::uint32_t b) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
// The levels that a token reads at position t: those that level `merged` takes in, one after another, then the others.
// Linear: level 0.
struct Levels {
    int merging_first, merged, merging, count;
    std::uint64_t rest;

    __device__ Levels(std::int64_t t, std::int64_t first_position, bool scaled) {
        const bool merges = scaled && t > 0;
        merged = merges ? __ffsll(t) : 0;
        merging_first = t != first_position ? 1 : 0;  // later, level 0 is no matrix
        merging = merges ? merged - merging_first : 0;
        rest = merges ? static_cast<std::uint64_t>(t) & static_cast<std::uint64_t>(t - 1) : 0;
        count = scaled ? merging + __popcll(rest) : 1;
    }
    // In order, from 0 on.
    __device__ int next(int e) {
        if (e < merging) return merging_first + e;
        if (rest == 0) return 0;  // linear
        const int level = __ffsll(static_cast<long long>(rest));
        rest &= rest - 1;
        return level;
    }
};
struct Share {
    int first, units;
};
__device__ __forceinline__ Share share_of(int units, int share) {
    const int first = min(units, share * static_cast<int>(blockIdx.x));
    return {first, min(units, first + share) - first};
}

// ---- the producer ----------------------------------------------------------------------------------------------------
__device__ void produce(Shared& s, const Stream* streams, int count, unsigned char* ring, int ring_bytes,
                        const Levels& all_levels) {
    int issued = 0, freed = 0, arrived = 0;  // pieces
    int head = 0, flying = 0;                // bytes: where the next piece may begin; under way
    const auto place = [&](int bytes) {
        const auto release = [&] {
            wait(&s.free[freed % slots], freed / slots & 1);
            ++freed;
        };
        if (head + bytes > ring_bytes) {  // what lies behind `head` is older than what lies at 0
            while (freed < issued && s.offset[freed % slots] >= head) release();
            head = 0;
        }
        while (freed < issued && (issued - freed >= slots || (s.offset[freed % slots] < head + bytes &&
                                                              s.offset[freed % slots] + s.bytes[freed % slots] > head)))
            release();
        while (arrived < issued && flying + bytes > window) {
            wait(&s.full[arrived % slots], arrived / slots & 1);
            flying -= s.bytes[arrived % slots];
            ++arrived;
        }
        const int slot = issued % slots;
        s.offset[slot] = head;
        s.bytes[slot] = bytes;
        arrive_expecting(&s.full[slot], bytes);
        head += bytes;
        flying += bytes;
        ++issued;
        return slot;
    };
    for (int i = 0; i < count; ++i) {
        const Stream stream = streams[i];
        const Share share = share_of(stream.units, stream.share);
        if (share.units == 0) continue;
        const unsigned char* from = stream.from + static_cast<std::int64_t>(share.first) * stream.unit_bytes;
        if (stream.level_bytes == 0) {
            const int half = stream.unit_bytes / 2;
            for (int piece = 0; piece < 2 * share.units; ++piece, from += half) {
                const int slot = place(half);
                copy_bulk_once(ring + s.offset[slot], from, half, &s.full[slot]);
            }
        } else {
            Levels levels = all_levels;
            const int bytes = share.units * stream.unit_bytes;
            for (int e = 0; e < levels.count; ++e) {
                const int slot = place(bytes);
                copy_bulk_once(ring + s.offset[slot], from + levels.next(e) * stream.level_bytes, bytes, &s.full[slot]);
            }
        }
    }
}

// ---- the workers -----------------------------------------------------------------------------------------------------
struct Worker {
    Shared& s;
    std::uint32_t ring, x_shared;  // addresses
    int lane, warp, piece = 0, turn = 0;
    std::uint32_t tag;
    std::int64_t t;
    Levels levels;
    int level;  // lane e's: the e-th of levels

    // Piece number `n`, once it is there.
    __device__ std::uint32_t await(int n) const {
        wait(&s.full[n % slots], n / slots & 1);
        return ring + static_cast<std::uint32_t>(*static_cast<volatile int*>(&s.offset[n % slots]));
    }
    // Named barriers, which racecheck was seen to take no notice of here: for it they are mbarriers at which all arrive.
#if defined(FENWICK_RACECHECK)
    __device__ void meet(Barrier* barrier, int& times) const {
        arrive(barrier, 1);
        wait(barrier, times++ & 1);
    }
    mutable int workers_met = 0, pair_met = 0;
    __device__ void synchronize_workers() const { meet(&s.workers_met, workers_met); }
    __device__ void synchronize_pair() const { meet(&s.pair_met[warp / 2], pair_met); }
#else
    __device__ void synchronize_workers() const { asm volatile("bar.sync 1, %0;" ::"n"(workers) : "memory"); }
    __device__ void synchronize_pair() const { asm volatile("bar.sync %0, 64;" ::"r"(warp / 2 + 2) : "memory"); }
#endif
    // Room for `readers` of the block's warps.
    __device__ void give_back(int n, int readers) const {
        __syncwarp();
        if (pipeline::arrivals_of_warp > 1 || lane == 0) arrive(&s.free[n % slots], readers);
    }
};

// x [in] into fragments: element k of slice c, in two bfloat16 numbers, is at [k / 16][c][which number][k % 16].
template <int N>
__device__ __forceinline__ void take_input(const Worker& w, const Step& step) {
    Shared& s = w.s;
    const int thread = w.warp * 32 + w.lane, groups_of_4 = step.in / 4, slice = groups_of_4 / step.slices;
    const bool has_squares = 4 * thread < step.squares;
    const Words none = {{w.tag, w.tag, w.tag, w.tag}};
    Words x[N], y;
    const auto ask_all = [&] {
#pragma unroll
        for (int i = 0; i < N; ++i)
            x[i] = thread + i * workers < groups_of_4 ? load_words(step.x + 4 * (thread + i * workers)) : none;
        y = has_squares ? load_words(step.x_squares + 4 * thread) : none;
    };
    const auto have_all = [&] {
        bool all = are_of(y.word, w.tag);
#pragma unroll
        for (int i = 0; i < N; ++i) all = are_of(x[i].word, w.tag) && all;
        return all;
    };
    poll(ask_all, have_all);
    float squares = has_squares ? (number(y.word[0]) + number(y.word[1])) + (number(y.word[2]) + number(y.word[3])) : 0.0f;
    if (step.groups > 1) {
        s.partial[thread] = squares;
        w.synchronize_workers();
        const int parts = step.squares / 4 / step.groups;
        for (int group = w.warp; group < step.groups; group += warps) {
            float sum = 0;
            for (int i = w.lane; i < parts; i += 32) sum += s.partial[group * parts + i];
            sum = team_sum(sum);
            if (w.lane == 0) s.scale[group] = rsqrtf(sum / static_cast<float>(step.in / step.groups) + step.eps);
        }
        w.synchronize_workers();
    } else {
        squares = team_sum(squares);
        if (w.lane == 0) s.squares[w.turn & 1][w.warp] = squares;
    }
    wait(&s.x_free, (w.turn & 1) ^ 1);  // the fragments before these have been read
    const int width = step.groups > 1 ? groups_of_4 / step.groups : 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int g = thread + i * workers;
        if (g >= groups_of_4) continue;
        const float scale = step.groups > 1 ? s.scale[g / width] : 1.0f;
        float u[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) u[j] = number(x[i].word[j]) * scale;
        const std::uint32_t high[2] = {tile::pack(u[0], u[1]), tile::pack(u[2], u[3])};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            u[2 * j] -= __uint_as_float(high[j] << 16);
            u[2 * j + 1] -= __uint_as_float(high[j] & 0xffff0000u);
        }
        int c = 0, k = g;
        while (k >= slice) k -= slice, ++c;
        const std::uint32_t to = w.x_shared + static_cast<std::uint32_t>((k / 4 * step.slices + c) * 64 + k % 4 * 8);
        store_shared(to, high[0], high[1]);
        store_shared(to + 32, tile::pack(u[0], u[1]), tile::pack(u[2], u[3]));
    }
    w.synchronize_workers();
}

// A pair of warps takes every pairs-th unit, each warp half of its keys; F fragments of 16 keys.
template <int F>
__device__ __forceinline__ void multiply(const Worker& w, const Step& step, Share share, const Operands& operands) {
    constexpr int P = F % 8 == 0 ? 8 : F % 6 == 0 ? 6 : F;  // fragments that are loaded at once
    Shared& s = w.s;
    const int lane = w.lane, pair = w.warp / 2, side = w.warp % 2, slices = step.slices, rows = step.rows;
    std::uint32_t x[F][2];
    const std::uint32_t from = w.x_shared + static_cast<std::uint32_t>(side * F * slices * 64 + lane * 8);
#pragma unroll
    for (int i = 0; i < F; ++i) {
        x[i][0] = x[i][1] = 0;
        if (lane / 8 < slices) load_shared(x[i], from + static_cast<std::uint32_t>(i * slices * 64));
    }
    pipeline::arrive_as_warp(&s.x_free);
    float scale = 1;
    if (step.groups == 1) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < warps; ++i) sum += s.squares[w.turn & 1][i];
        scale = rsqrtf(sum / static_cast<float>(step.in) + step.eps);
    }
    for (int u = pair, round = 0; u < share.units; u += pairs, round ^= 1) {
        const int piece = w.piece + 2 * u + side;
        const std::uint32_t at = w.await(piece) + static_cast<std::uint32_t>(lane * 16);
        float c[4][4] = {};
        std::uint32_t a[2][P][4];
#pragma unroll
        for (int i = 0; i < P; ++i) load_shared(a[0][i], at + static_cast<std::uint32_t>(i * 512));
#pragma unroll
        for (int b = 0; b < F / P; ++b) {
            if (b + 1 < F / P)
#pragma unroll
                for (int i = 0; i < P; ++i)
                    load_shared(a[(b + 1) % 2][i], at + static_cast<std::uint32_t>(((b + 1) * P + i) * 512));
#pragma unroll
            for (int i = 0; i < P; ++i) tile::mma_16x8x16(c[i % 4], a[b % 2][i], x[b * P + i][0], x[b * P + i][1]);
        }
        w.give_back(piece, warps);
        // Column 2c + n of the result is slice c of x, number n. Row r slices + c of the operand is slice c of row r.
        const float low = (c[0][0] + c[0][1]) + (c[1][0] + c[1][1]) + ((c[2][0] + c[2][1]) + (c[3][0] + c[3][1]));
        const float high = (c[0][2] + c[0][3]) + (c[1][2] + c[1][3]) + ((c[2][2] + c[2][3]) + (c[3][2] + c[3][3]));
        float* const sums = s.sums[pair][round];
        if (lane % 4 == (lane / 4 & (slices - 1))) {
            sums[lane / 4 * 2 + side] = low;
            sums[(lane / 4 + 8) * 2 + side] = high;
        }
        w.synchronize_pair();
        if (side != round) continue;
        float y = 0;
        if (lane < rows)
            for (int i = 0; i < slices; i += 2) {
                const float4 x4 = *reinterpret_cast<const float4*>(sums + lane * 2 * slices + 2 * i);
                y += (x4.x + x4.y) + (x4.z + x4.w);
            }
        y *= scale;
        const int row = u * rows + lane, column = step.first_column + share.first * rows + row;
        const bool mine = lane < rows && column < step.columns;
        if (step.adds != 0) {
            if (mine) {
                y += s.stream[row];
                s.stream[row] = y;
                store_word(step.x_out + column, y * operands.a[1], w.tag);
            }
            float squares = mine ? y * y : 0.0f;
            squares += __shfl_xor_sync(0xffffffffu, squares, 1);
            squares += __shfl_xor_sync(0xffffffffu, squares, 2);
            squares += __shfl_xor_sync(0xffffffffu, squares, 4);
            if (lane == 0) store_word(step.squares_out + share.first + u, squares, w.tag);
        } else if (step.projection.part[0].kind == DecodeOutput::swiglu) {
            const float up = __shfl_xor_sync(0xffffffffu, y, 1);
            if (mine && lane % 2 == 0) store_word(step.projection.part[0].out + column / 2, silu_of(y) * up, w.tag);
        } else if (mine) {
            finish(step.projection, column, 0, y, operands, [&](float* to, float value) {
                if (step.tagged != 0)
                    store_word(to, value, w.tag);
                else
                    *to = value;
            });
        }
    }
}

__device__ __forceinline__ void work_product(Worker& w, const Step& step) {
    const Share share = share_of(step.units, step.share);
    // The warp finishes one unit; lane r its row r.
    Operands operands;
    const int unit = w.warp / 2 + w.warp % 2 * pairs;
    const int column = step.first_column + (share.first + unit) * step.rows + w.lane;
    if (unit < share.units && w.lane < step.rows && column < step.columns) {
        if (step.adds != 0)
            operands.a[1] = step.norm[column];
        else
            operands = load_operands(step.projection, column, 0);
    }
    if (step.in <= 2 * 4 * workers)
        take_input<2>(w, step);
    else
        take_input<4>(w, step);
    switch (step.fragments) {
        case 4:
            multiply<4>(w, step, share, operands);
            break;
        case 6:
            multiply<6>(w, step, share, operands);
            break;
        case 8:
            multiply<8>(w, step, share, operands);
            break;
        case 12:
            multiply<12>(w, step, share, operands);
            break;
        case 16:
            multiply<16>(w, step, share, operands);
            break;
        case 18:
            multiply<18>(w, step, share, operands);
            break;
        case 24:
            multiply<24>(w, step, share, operands);
            break;
        default:
            multiply<32>(w, step, share, operands);
            break;
    }
    w.piece += 2 * share.units;
    ++w.turn;
}

// The stream begins.
__device__ __forceinline__ void work_embedding(const Worker& w, const Step& step, const float* row_of_table) {
    const Share share = share_of(step.units, step.share);
    const int thread = w.warp * 32 + w.lane, column = share.first * step.rows + thread;
    if (w.warp * 32 < share.units * step.rows) {
        const bool mine = thread < share.units * step.rows;
        float y = 0;
        if (mine) {
            y = row_of_table[column];
            w.s.stream[thread] = y;
            store_word(step.x_out + column, y * step.norm[column], w.tag);
        }
        float squares = y * y;
        for (int offset = 1; offset < step.rows; offset *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        if (mine && thread % step.rows == 0) store_word(step.squares_out + column / step.rows, squares, w.tag);
    }
    w.synchronize_workers();  // other warps go on with the stream
}

// A unit of states is state_columns columns of one head, all keys; a warp has it, lane l the keys l + 32 i.
// o [4] summed over lanes; each of the four lanes that get one column gives it on.
__device__ __forceinline__ int state_column(int lane) { return dependent::transposed_index<state_columns>(lane); }
__device__ __forceinline__ void give_on(const Worker& w, const Step& step, int unit, float o, float gate, float norm) {
    const int column = state_column(w.lane);
    const float gated = silu_of(gate), x = step.gate_before != 0 ? o * gated : o;
    float squares = x * x;
    squares += __shfl_xor_sync(0xffffffffu, squares, 8);
    squares += __shfl_xor_sync(0xffffffffu, squares, 16);
    if (w.lane % 8 == 0)
        store_word(step.x_out + unit * state_columns + column, x * norm * (step.gate_before != 0 ? 1.0f : gated), w.tag);
    if (w.lane == 0) store_word(step.squares_out + unit, squares, w.tag);
}
__device__ __forceinline__ float pick(const float (&x)[4], int i) {
    const float low = (i & 1) != 0 ? x[1] : x[0], high = (i & 1) != 0 ? x[3] : x[2];
    return (i & 2) != 0 ? high : low;
}

template <int C>
__device__ __forceinline__ void work_ssd(Worker& w, const Step& step) {
    const DecodeSsd& a = step.ssd;
    const Share share = share_of(step.units, step.share);
    const int lane = w.lane, keys = C * 32, across = static_cast<int>(a.value_width) / state_columns;
    const int heads = static_cast<int>(a.heads);
    const bool scaled = a.levels > 0;
    const int now = static_cast<int>(w.t & 1), next = now ^ 1;
    const int unit_bytes = keys * state_columns * 4;
    const Levels& levels = w.levels;
    const std::int64_t level_size = a.heads * a.key_width * a.value_width;
    w.synchronize_workers();  // no warp is so far ahead that it takes a slot's piece for the one before
    if (const int u = w.warp; u < share.units) {
        const int unit = step.first_column + share.first + u, h = unit / across, across_at = unit - h * across;
        const int group = h / step.heads_a_group, column = across_at * state_columns;
        const int own = column + state_column(lane), value_at = h * static_cast<int>(a.value_width) + column;
        const auto scale_from = [&](int of) {
            return words_of(scaled ? a.level_scales + h * a.levels + min(of, static_cast<int>(a.levels) - 1) : a.step + h);
        };
        std::uint32_t q[C], k[C], some[6];
        Words value;
        const auto ask_all = [&] {
            const std::uint32_t* const some_from[] = {
                words_of(a.log_decay) + h, words_of(a.step) + h,      step.gate + value_at + state_column(lane),
                scale_from(w.level),       scale_from(levels.merged), scale_from(0)};
            ask(q, [&](int i) { return words_of(a.q) + group * keys + lane + 32 * i; });
            ask(k, [&](int i) { return words_of(a.k) + group * keys + lane + 32 * i; });
            value = load_words(words_of(a.u) + value_at);
            ask(some, [&](int i) { return some_from[i]; });
        };
        // What the last token left, and constants
        float last_k[C] = {}, last_v[4] = {}, factor = 1;
        if (scaled) {
            factor = a.factors[(now * decode_most_levels + w.level) * heads + h];
            if (levels.merged > 0) {
#pragma unroll
                for (int i = 0; i < C; ++i) last_k[i] = a.last_k[(now * a.groups + group) * keys + lane + 32 * i];
                load(last_v, a.last_v + now * a.heads * a.value_width + value_at);
            }
        }
        const float skip = a.skip[h], norm = step.norm[step.norm_repeats != 0 ? own : value_at + state_column(lane)];
        poll(ask_all,
             [&] { return are_of(q, w.tag) && are_of(k, w.tag) && are_of(value.word, w.tag) && are_of(some, w.tag); });
        const float decay = expf(number(some[0])), token_step = number(some[1]);
        float v[4], sum[4] = {}, query_key = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = token_step * number(value.word[j]);
        const float weight = lane < levels.merging || !scaled ? factor : number(some[3]) * factor * decay;
        float x[C][4];
#pragma unroll
        for (int i = 0; i < C; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i][j] = last_k[i] * last_v[j];
        for (int e = 0; e < levels.count; ++e) {
            const std::uint32_t at = w.await(w.piece + e) + static_cast<std::uint32_t>(u * unit_bytes + lane * 16);
            const float f = __shfl_sync(0xffffffffu, weight, e);
            const bool merging = e < levels.merging || !scaled;
#pragma unroll
            for (int i = 0; i < C; ++i) {
                float state[4];
                load_shared(state, at + static_cast<std::uint32_t>(i * 512));
                const float query = number(q[i]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (merging)
                        x[i][j] += f * state[j];
                    else
                        sum[j] += query * f * state[j];
                }
            }
            w.give_back(w.piece + e, 1);
        }
        float* const state = a.state + levels.merged * level_size + (static_cast<std::int64_t>(unit) * keys + lane) * 4;
        const float merged_scale = scaled ? number(some[4]) : 1.0f;
#pragma unroll
        for (int i = 0; i < C; ++i) {
            const float query = number(q[i]), fresh = number(k[i]);
            query_key += query * fresh;
            if (scaled && levels.merged == 0) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[i][j] = x[i][j] * decay + (scaled ? 0.0f : fresh * v[j]);
                sum[j] += merged_scale * query * x[i][j];
            }
            store(state + i * 128, x[i]);
        }
        query_key = team_sum(query_key);
        const float total = dependent::transposed_sum(sum, lane);
        const float own_v = pick(v, state_column(lane));
        const float u_of[4] = {number(value.word[0]), number(value.word[1]), number(value.word[2]), number(value.word[3])};
        const float own_u = pick(u_of, state_column(lane));
        const float o = total + (scaled ? number(some[5]) * query_key * own_v : 0.0f) + skip * own_u;
        give_on(w, step, unit, o, number(some[2]), norm);
        if (scaled && lane % 8 == 0) a.last_v[next * a.heads * a.value_width + value_at + state_column(lane)] = own_v;
        if (scaled && across_at == 0) {
            for (int l = lane; l < static_cast<int>(a.level_capacity); l += 32)
                a.factors[(next * decode_most_levels + l) * heads + h] =
                    l < levels.merged                         ? 0.0f
                    : l == levels.merged && levels.merged > 0 ? 1.0f
                    : levels.merged > 0                       ? a.factors[(now * decode_most_levels + l) * heads + h] * decay
                                                              : 0.0f;
            if (h == group * step.heads_a_group)
#pragma unroll
                for (int i = 0; i < C; ++i) a.last_k[(next * a.groups + group) * keys + lane + 32 * i] = number(k[i]);
        }
    }
    if (share.units == 0) return;
    if (w.warp >= share.units)
        for (int e = 0; e < levels.count; ++e) w.give_back(w.piece + e, 1);
    w.piece += levels.count;
}

template <int C>
__device__ __forceinline__ void work_gated_delta_rule(Worker& w, const Step& step) {
    const DecodeGatedDeltaRule& a = step.delta;
    const Share share = share_of(step.units, step.share);
    const int lane = w.lane, keys = C * 32, across = static_cast<int>(a.value_width) / state_columns;
    const int heads = static_cast<int>(a.heads);
    const bool scaled = a.levels > 0;
    const int now = static_cast<int>(w.t & 1), next = now ^ 1;
    const int unit_bytes = keys * state_columns * 4;
    const Levels& levels = w.levels;
    const std::int64_t level_size = a.heads * a.key_width * a.value_width;
    w.synchronize_workers();  // no warp is so far ahead that it takes a slot's piece for the one before
    if (const int u = w.warp; u < share.units) {
        const int unit = step.first_column + share.first + u, h = unit / across, across_at = unit - h * across;
        const int column = across_at * state_columns, own = column + state_column(lane);
        const int value_at = h * static_cast<int>(a.value_width) + column;
        const auto scale_from = [&](int of) {
            return words_of(scaled ? a.level_scales + h * a.levels + min(of, static_cast<int>(a.levels) - 1) : a.beta + h);
        };
        // Lane e's: the level of the e-th state that is written, which is the first of those merged, or one behind them.
        const int behind = __shfl_sync(0xffffffffu, w.level, min(levels.merging + lane - 1, 31) & 31);
        const int level = lane == 0 ? levels.merged : behind;
        std::uint32_t q_words[C], k_words[C], some[5];
        Words value;
        const auto ask_all = [&] {
            const std::uint32_t* const some_from[] = {words_of(a.log_decay) + h, words_of(a.beta) + h,
                                                      step.gate + value_at + state_column(lane), scale_from(level),
                                                      scale_from(0)};
            ask(q_words, [&](int i) { return words_of(a.q) + h * keys + lane + 32 * i; });
            ask(k_words, [&](int i) { return words_of(a.k) + h * keys + lane + 32 * i; });
            value = load_words(words_of(a.v) + value_at);
            ask(some, [&](int i) { return some_from[i]; });
        };
        float last_k[C] = {}, last_u[4] = {};
        if (levels.merged > 0) {
#pragma unroll
            for (int i = 0; i < C; ++i) last_k[i] = a.last_k[(now * heads + h) * keys + lane + 32 * i];
            load(last_u, a.last_u + now * a.heads * a.value_width + value_at);
        }
        const float norm = step.norm[step.norm_repeats != 0 ? own : value_at + state_column(lane)];
        poll(ask_all, [&] {
            return are_of(q_words, w.tag) && are_of(k_words, w.tag) && are_of(value.word, w.tag) && are_of(some, w.tag);
        });
        const float decay = expf(number(some[0])), beta = number(some[1]), weight = scaled ? number(some[3]) : 1.0f;
        float q[C], k[C], products[3] = {};
#pragma unroll
        for (int i = 0; i < C; ++i) {
            q[i] = number(q_words[i]);
            k[i] = number(k_words[i]);
            products[0] += k[i] * k[i];
            products[1] += q[i] * q[i];
            products[2] += q[i] * k[i];
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) products[i] = team_sum(products[i]);
        const float k_scale = rsqrtf(products[0] + static_cast<float>(a.eps));
        const float q_scale = rsqrtf(products[1] + static_cast<float>(a.eps)) * static_cast<float>(a.q_scale);
        const float query_key = products[2] * k_scale * q_scale;
#pragma unroll
        for (int i = 0; i < C; ++i) {
            q[i] *= q_scale;
            k[i] *= k_scale;
        }
        float o = 0, v[4];  // o of this lane's column
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = number(value.word[j]);
        float x[C][4];
#pragma unroll
        for (int i = 0; i < C; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i][j] = last_k[i] * last_u[j];
        // x holds state number `e` whole: reads it, and writes what becomes of it.
        const auto turn_over = [&](int e) {
            float read[8] = {};
#pragma unroll
            for (int i = 0; i < C; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    read[j] += k[i] * x[i][j];
                    read[4 + j] += q[i] * x[i][j];
                }
            // Lanes of bit 16 get sums of q's; the index' other bits are the column's.
            const float sum = dependent::transposed_sum(read, lane);
            float key_sum[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // a lane whose index is j
                const int source = ((j & 2) != 0 ? 8 : 0) | ((j & 1) != 0 ? 4 : 0);
                key_sum[j] = __shfl_sync(0xffffffffu, sum, source);
            }
            const int mine = state_column(lane);
            const int query_source = 16 | ((mine & 2) != 0 ? 8 : 0) | ((mine & 1) != 0 ? 4 : 0);
            const float query_sum = __shfl_sync(0xffffffffu, sum, query_source);
            const float f = __shfl_sync(0xffffffffu, weight, e);
            const int to = __shfl_sync(0xffffffffu, level, e);
            float next_u[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) next_u[j] = beta * ((scaled ? 0.0f : v[j]) - decay * key_sum[j]);
            o += f * (decay * query_sum + query_key * pick(next_u, mine));
            float* const state = a.state + to * level_size + (static_cast<std::int64_t>(unit) * keys + lane) * 4;
#pragma unroll
            for (int i = 0; i < C; ++i) {
                float y[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) y[j] = decay * x[i][j] + k[i] * next_u[j];
                store(state + i * 128, y);
            }
        };
        int written_so_far = 0;
        if (scaled && levels.merged > 0 && levels.merging == 0) turn_over(written_so_far++);
        for (int e = 0; e < levels.count; ++e) {
            const std::uint32_t at = w.await(w.piece + e) + static_cast<std::uint32_t>(u * unit_bytes + lane * 16);
            const bool merging = e < levels.merging;
#pragma unroll
            for (int i = 0; i < C; ++i) {
                float state[4];
                load_shared(state, at + static_cast<std::uint32_t>(i * 512));
#pragma unroll
                for (int j = 0; j < 4; ++j) x[i][j] = merging ? x[i][j] + state[j] : state[j];
            }
            if (e + 1 >= levels.merging) turn_over(written_so_far++);
            w.give_back(w.piece + e, 1);
        }
        const float own_u = beta * pick(v, state_column(lane));
        if (scaled) o += number(some[4]) * query_key * own_u;
        give_on(w, step, unit, o, number(some[2]), norm);
        if (scaled && lane % 8 == 0) a.last_u[next * a.heads * a.value_width + value_at + state_column(lane)] = own_u;
        if (scaled && across_at == 0)
#pragma unroll
            for (int i = 0; i < C; ++i) a.last_k[(next * heads + h) * keys + lane + 32 * i] = k[i];
    }
    if (share.units == 0) return;
    if (w.warp >= share.units)
        for (int e = 0; e < levels.count; ++e) w.give_back(w.piece + e, 1);
    w.piece += levels.count;
}

template <class Work>
__device__ __forceinline__ void with_keys(std::int64_t key_width, Work&& work) {
    switch (key_width / 32) {
        case 2:
            work(std::integral_constant<int, 2>{});
            break;
        case 4:
            work(std::integral_constant<int, 4>{});
            break;
        case 6:
            work(std::integral_constant<int, 6>{});
            break;
        default:
            work(std::integral_constant<int, 8>{});
            break;
    }
}

#endif

__global__ void __launch_bounds__(block_threads, 1)
    decode_token_kernel(const DecodeToken a, const Stream* streams, const Step* steps, int ring_bytes) {
#if defined(FENWICK_DECODE_TOKEN)
    unsigned char* const base = tile::shared_memory();
    Shared& s = *reinterpret_cast<Shared*>(base);
    auto* const streams_shared = reinterpret_cast<Stream*>(base + round_up(sizeof(Shared), 128));
    unsigned char* const x_shared = base + round_up(sizeof(Shared), 128) + round_up(a.count * sizeof(Stream), 128);
    unsigned char* const ring = x_shared + round_up(a.most_keys * 4, 128);
    const int thread = tile::thread_index(), lane = thread % 32, warp = thread / 32;
    if (thread == 0) {
        for (int i = 0; i < slots; ++i) {
            initialize(&s.full[i], 1);
            initialize(&s.free[i], warps * pipeline::arrivals_of_warp);
        }
        for (int i = 0; i < kept_steps; ++i) {
            initialize(&s.step_full[i], 1);
            initialize(&s.step_free[i], warps * pipeline::arrivals_of_warp);
        }
        initialize(&s.x_free, warps * pipeline::arrivals_of_warp);
        initialize(&s.workers_met, workers);
        for (int i = 0; i < pairs; ++i) initialize(&s.pair_met[i], 64);
        asynchronous::fence_barriers();
    }
    for (int i = thread; i < a.count * static_cast<int>(sizeof(Stream) / 16); i += block_threads)
        reinterpret_cast<uint4*>(streams_shared)[i] = reinterpret_cast<const uint4*>(streams)[i];
    __syncthreads();
    const std::int64_t t = *a.position;

    if (warp == producer_warp) {
        if (lane == 0) produce(s, streams_shared, a.count, ring, ring_bytes, Levels(t, a.first_position, a.scaled != 0));
        return;
    }
    if (warp == describer_warp) {
        if (lane != 0) return;
        for (int i = 0; i < a.count; ++i) {
            const int slot = i % kept_steps;
            wait(&s.step_free[slot], (i / kept_steps & 1) ^ 1);
            arrive_expecting(&s.step_full[slot], sizeof(Step));
            copy_bulk(&s.steps[slot], steps + i, sizeof(Step), &s.step_full[slot]);
        }
        return;
    }
    const Levels levels(t, a.first_position, a.scaled != 0);
    int level = 0;
    Levels list = levels;
    for (int e = 0; e < list.count; ++e) {
        const int l = list.next(e);
        if (e == lane) level = l;
    }
    Worker w{s,
             asynchronous::shared_address(ring),
             asynchronous::shared_address(x_shared),
             lane,
             warp,
             0,
             0,
             static_cast<std::uint32_t>(t % 3 + 1),
             t,
             levels,
             level};
    for (int i = 0; i < a.count; ++i) {
        const int slot = i % kept_steps;
        wait(&s.step_full[slot], i / kept_steps & 1);
        const Step& step = s.steps[slot];
        switch (step.kind) {
            case StepKind::embedding:
                work_embedding(w, step, a.embedding + *a.ids * a.hidden);
                break;
            case StepKind::product:
                work_product(w, step);
                break;
            case StepKind::ssd:
                with_keys(step.ssd.key_width, [&]<int C>(std::integral_constant<int, C>) { work_ssd<C>(w, step); });
                break;
            case StepKind::gated_delta_rule:
                with_keys(step.delta.key_width,
                          [&]<int C>(std::integral_constant<int, C>) { work_gated_delta_rule<C>(w, step); });
                break;
        }
        pipeline::arrive_as_warp(&s.step_free[slot]);
    }
#endif
}

// ---- packing ---------------------------------------------------------------------------------------------------------
// Eight bytes a thread: four neighbouring keys of a row.
__global__ void pack_kernel(const DecodeTokenMatrix a, std::int64_t packed_columns) {
    const std::int64_t quads = a.in / 4, total = packed_columns * quads;
    const int rows = 16 / a.slices;
    const std::int64_t slice = a.in / a.slices;
    for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
         i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
        const std::int64_t column = i / quads, key = i % quads * 4, unit = column / rows;
        const int c = static_cast<int>(key / slice), k = static_cast<int>(key % slice);
        const int row = static_cast<int>(column % rows) * a.slices + c;
        uint2 x{};
        if (column < a.columns) x = static_cast<const uint2*>(a.weight)[i];
        // A lane's four words of a fragment: two keys of row r, of row r + 8, and the next two keys of each.
        const std::int64_t at = unit * 16 * slice * 2 + k / 16 * 512 + (row % 8 * 4 + k % 16 / 4) * 16;
        auto* const to = reinterpret_cast<std::uint32_t*>(static_cast<unsigned char*>(a.packed) + at);
        to[row / 8] = x.x;
        to[2 + row / 8] = x.y;
    }
}
__global__ void block_kernel(const DecodeTokenStates a) {
    const std::int64_t across = a.value_width / 4, total = a.count * a.key_width * across;
    for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
         i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
        const std::int64_t column = i % across, key = i / across % a.key_width, matrix = i / across / a.key_width;
        reinterpret_cast<float4*>(a.blocked)[(matrix * across + column) * a.key_width + key] =
            reinterpret_cast<const float4*>(a.states)[i];
    }
}

int fragments_of(std::int64_t in, int slices) {
    if (in % (32 * slices) != 0) return 0;
    const std::int64_t fragments = in / (32 * slices);
    for (const int known : {4, 6, 8, 12, 16, 18, 24, 32})
        if (fragments == known) return known;
    return 0;
}
bool keys_are_known(std::int64_t key_width) {
    return key_width == 64 || key_width == 128 || key_width == 192 || key_width == 256;
}

}  // namespace

DecodeTokenLayout decode_token_layout(const Exec& exec, const DecodeTokenShape& shape) {
    const int major = dependent::attribute_of(exec, cudaDevAttrComputeCapabilityMajor);
    DecodeTokenLayout layout{.slices = 2, .added_slices = 4};
    const auto fits = [&](std::int64_t in, int slices) { return in <= most_keys && fragments_of(in, slices) > 0; };
    if (!fits(shape.mixed, 4) || !fits(shape.mlp, 4)) layout.added_slices = 2;
    const int blocks = dependent::multiprocessors(exec), rows = 16 / layout.added_slices;
    const std::int64_t state_units = shape.heads * shape.value_width / state_columns;
    layout.possible =
        major == 9 && fits(shape.hidden, layout.slices) && fits(shape.mixed, layout.added_slices) &&
        fits(shape.mlp, layout.added_slices) && shape.hidden % rows == 0 &&
        ceil_div(shape.hidden / rows, static_cast<std::int64_t>(blocks)) <= most_share && shape.hidden / rows % 4 == 0 &&
        shape.hidden / rows <= most_squares && keys_are_known(shape.key_width) && shape.value_width % state_columns == 0 &&
        shape.mixed == shape.heads * shape.value_width && state_units % (4 * shape.norm_groups) == 0 &&
        state_units <= most_squares && shape.norm_groups <= most_groups && shape.mixed % (4 * shape.norm_groups) == 0;
    return layout;
}

void decode_token_pack(const Exec& exec, const DecodeTokenMatrix& args) {
    launch("decode_token_pack", exec, pack_kernel, dim3(1024), dim3(256), 0, args, args.packed_columns());
}
void decode_token_block(const Exec& exec, const DecodeTokenStates& args) {
    launch("decode_token_block", exec, block_kernel, dim3(1024), dim3(256), 0, args);
}

// [steps], then [streams].
DecodeTokenSteps decode_token_steps(const Exec& exec, const DecodeTokenLayout& layout,
                                    const std::vector<DecodeOperator>& operators, float* scratch) {
    const int blocks = dependent::multiprocessors(exec);
    DecodeTokenSteps result;
    std::vector<Step> steps;
    std::vector<Stream> streams;
    const auto take = [&](std::int64_t floats) {
        auto* const from = reinterpret_cast<std::uint32_t*>(scratch == nullptr ? nullptr : scratch + result.scratch);
        result.scratch += round_up(floats, 4);
        return from;
    };
    const auto share_of_units = [&](std::int64_t units) { return static_cast<int>(ceil_div(units, blocks)); };
    // The stream on its way to the next norm
    std::uint32_t *stream = nullptr, *stream_squares = nullptr;
    const std::uint32_t* mixed_squares = nullptr;
    int mixed_square_count = 0;
    const int added_rows = 16 / layout.added_slices;
    const auto& first = std::get<DecodeProjection>(operators.front());
    const std::int64_t hidden = first.in;
    const int stream_units = static_cast<int>(hidden / added_rows);
    const auto next_norm = [&](std::size_t from) {
        for (std::size_t i = from; i < operators.size(); ++i)
            if (const auto* product = std::get_if<DecodeProjection>(&operators[i]);
                product != nullptr && product->input_kind == DecodeInput::norm)
                return product->norm_weight;
        fail("[decode_token] the last product has no norm before it");
    };
    const auto begin_stream = [&](Step& step, std::size_t next) {
        step.adds = 1;
        step.tagged = 1;
        step.x_out = stream = take(hidden);
        step.squares_out = stream_squares = take(stream_units);
        step.norm = next_norm(next);
    };
    {
        Step step{};
        step.kind = StepKind::embedding;
        step.units = stream_units;
        step.share = share_of_units(stream_units);
        step.rows = added_rows;
        begin_stream(step, 0);
        steps.push_back(step);
        streams.push_back({});
    }
    for (std::size_t i = 0; i < operators.size(); ++i) {
        if (const auto* product = std::get_if<DecodeProjection>(&operators[i])) {
            const bool adds = product->part[0].kind == DecodeOutput::add, last = i + 1 == operators.size();
            const int slices = adds ? layout.added_slices : layout.slices, rows = 16 / slices;
            result.most_keys = std::max(result.most_keys, product->in);
            Step step{};
            step.kind = StepKind::product;
            step.rows = rows;
            step.in = static_cast<int>(product->in);
            step.slices = slices;
            step.fragments = fragments_of(product->in, slices);
            step.eps = static_cast<float>(product->eps);
            step.tagged = last ? 0 : 1;
            step.projection = *product;
            step.columns = static_cast<int>(product->columns());
            step.x = words_of(product->input);
            if (product->input_kind == DecodeInput::norm) {
                step.x = stream;
                step.x_squares = stream_squares;
                step.squares = stream_units;
                step.groups = 1;
            } else if (product->input_kind != DecodeInput::plain) {
                step.x_squares = mixed_squares;
                step.squares = mixed_square_count;
                step.groups = static_cast<int>(product->groups);
            }
            if (adds) begin_stream(step, i + 1);
            const int units = static_cast<int>(ceil_div(product->columns(), rows)), unit_bytes = rows * step.in * 2;
            // A warp finishes one unit, or more of those that need nothing besides.
            const bool plain = product->parts == 1 && product->part[0].kind == DecodeOutput::store;
            const int at_once = adds ? units : (plain ? slots / 2 - 1 : most_share) * blocks;
            for (int begin = 0; begin < units; begin += at_once) {
                Step part = step;
                part.units = std::min(at_once, units - begin);
                part.share = share_of_units(part.units);
                part.first_column = begin * rows;
                steps.push_back(part);
                streams.push_back(
                    {static_cast<const unsigned char*>(product->weight) + static_cast<std::int64_t>(begin) * unit_bytes, 0,
                     part.units, part.share, unit_bytes, 0});
            }
            continue;
        }
        // States; their gate and norm are the next product's.
        const auto& next = std::get<DecodeProjection>(operators.at(i + 1));
        Step step{};
        std::int64_t heads = 0, keys = 0, values = 0;
        const float* state = nullptr;
        float* o = nullptr;
        if (const auto* ssd = std::get_if<DecodeSsd>(&operators[i])) {
            step.kind = StepKind::ssd;
            step.ssd = *ssd;
            step.heads_a_group = static_cast<int>(ssd->heads / ssd->groups);
            heads = ssd->heads, keys = ssd->key_width, values = ssd->value_width;
            state = ssd->state, o = ssd->o;
        } else {
            const auto& delta = std::get<DecodeGatedDeltaRule>(operators[i]);
            step.kind = StepKind::gated_delta_rule;
            step.delta = delta;
            heads = delta.heads, keys = delta.key_width, values = delta.value_width;
            state = delta.state, o = delta.o;
        }
        const int units = static_cast<int>(heads * values / state_columns);
        const int unit_bytes = static_cast<int>(keys) * state_columns * 4;
        step.tagged = 1;
        step.x_out = reinterpret_cast<std::uint32_t*>(o);
        step.squares_out = take(units);
        step.norm = next.norm_weight;
        step.norm_repeats = next.norm_width < heads * values ? 1 : 0;
        step.gate = words_of(next.gate);
        step.gate_before = next.input_kind == DecodeInput::gate_before ? 1 : 0;
        mixed_squares = step.squares_out;
        mixed_square_count = units;
        for (int begin = 0; begin < units; begin += warps * blocks) {
            Step part = step;
            part.first_column = begin;
            part.units = std::min(warps * blocks, units - begin);
            part.share = share_of_units(part.units);
            steps.push_back(part);
            streams.push_back({reinterpret_cast<const unsigned char*>(state) + static_cast<std::int64_t>(begin) * unit_bytes,
                               heads * keys * values * 4, part.units, part.share, unit_bytes, 0});
        }
    }
    result.count = static_cast<int>(steps.size());
    const std::size_t step_bytes = steps.size() * sizeof(Step), stream_bytes = streams.size() * sizeof(Stream);
    result.steps.resize(step_bytes + stream_bytes);
    std::memcpy(result.steps.data(), steps.data(), step_bytes);
    std::memcpy(result.steps.data() + step_bytes, streams.data(), stream_bytes);
    return result;
}

void decode_token(const Exec& exec, const DecodeToken& args) {
    constexpr const char* op = "decode_token";
    const OperatorScope scope(op, exec);
    const auto* const steps = static_cast<const Step*>(args.steps);
    const auto* const streams = reinterpret_cast<const Stream*>(steps + args.count);
    const std::int64_t fixed = round_up(static_cast<std::int64_t>(sizeof(Shared)), 128) +
                               round_up(args.count * static_cast<std::int64_t>(sizeof(Stream)), 128) +
                               round_up(args.most_keys * 4, 128);
    const std::int64_t ring = (shared_limit - fixed) / 128 * 128;
    FENWICK_CHECK(ring >= 128 * 1024, "[{}] {} operators are more than fit", op, args.count);
    dependent::launch_together(op, exec, decode_token_kernel, dim3(static_cast<unsigned>(dependent::multiprocessors(exec))),
                               dim3(block_threads), static_cast<std::size_t>(fixed + ring), args, streams, steps,
                               static_cast<int>(ring));
}

}  // namespace fenwick::kernels::cuda
