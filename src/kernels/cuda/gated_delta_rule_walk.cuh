// The walks of the gated delta rule over chunks on Hopper, bfloat16 (names as in gated_delta_rule.cu).
//
// A warpgroup keeps the transpose of 64 value columns of one state in registers as wgmma accumulators, [64, K]. In bfloat16
// they are at once the A operand of what reads them, and the step that they take is that of the update: a step of the chain
//   T' = (beta V)' - S' Kh',   S' <- e_last S' + T' Y,   O' = S' Qb'
// touches shared memory only for the chunk's own Kh, Y, Qb, which producer warps copy there ahead of time.
//
// What parallelism there is in time comes from the levels. The bucket tree (kernels/levels.h) over chunks is built level by
// level: a node's left bucket is carried through the chunks of its right sibling, read there by every token, and the right
// bucket, built elsewhere, is added at the end. Nodes of a level do not depend on each other. Groups of 8 chunks are done by
// one block, depth first, so that their buckets need no memory; above, a launch a level. The last level, which takes in all
// levels that share the last level scale, is a chain along the document, and so is the linear rule.
//
// Outputs of a chunk's levels are added in float32, lowest level first: the first one also takes what is inside the chunk,
// the last one writes o.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cuda/asynchronous.cuh"
#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda::walk {

using asynchronous::Barrier;
using tile::area;
using tile::bf16;
using tile::edge;

// ---- chunks and slots ------------------------------------------------------------------------------------------------

constexpr int inside_levels = 7;  // levels 0..6 are inside a chunk of 2^6 tokens

struct ChunkInfo {
    std::int64_t token;  // its first
    std::int32_t rows;   // tokens in it, 1..64
    std::int32_t index;  // in its document
    std::int32_t has_next;
    std::int32_t entering, leaving;  // in its round: states that enter chunks before it, and that leave them
};
static_assert(sizeof(ChunkInfo) == 32);

// Which slots (levels from 7 on; the last one is all levels that share the last level scale) are in use before chunk c.
__host__ __device__ __forceinline__ int slots_before(int c, int slots) {
    const int top = 1 << (slots - 1);
    return (c & (top - 1)) | (c >= top ? top : 0);
}

// How the states entering chunk c become those entering chunk c + 1: `merged` ones and the new state go to slot
// `destination`, `kept` ones stay.
struct Transition {
    int destination, merged, kept;
};
__host__ __device__ __forceinline__ Transition transition_after(int c, int slots) {
    const int used = slots_before(c, slots);
    int destination = 0;
    while (destination < slots - 1 && (c >> destination & 1) != 0) ++destination;
    int merged = used & ((1 << destination) - 1);
    if (destination == slots - 1) merged |= used & (1 << (slots - 1));
    return {destination, merged, used & ~merged};
}
__device__ __forceinline__ int place_of(int used, int slot) { return __popc(used & ((1 << slot) - 1)); }

// Where the `index`-th of a chunk's `count` states of head h is; `before`: a head's states in the chunks before it.
__device__ __forceinline__ std::int64_t place(int heads, std::int64_t before, int count, int h, int index) {
    return before * heads + static_cast<std::int64_t>(count) * h + index;
}

// ---- schedule --------------------------------------------------------------------------------------------------------

constexpr int none = -1, parked = -2;  // buckets: an index, or none, or parked - n: the n-th of the block's own

// A state's way through chunks of a document.
struct Segment {
    std::int32_t first, count;
    std::int16_t slot;                    // it is read there in this slot, where that is in use
    std::int8_t input;                    // the chunks' own keys and values enter it
    std::int8_t kept;                     // it starts as the last segment's end; else as `source`
    std::int32_t source, addend, target;  // buckets: the start, what is added at the end, where to store the sum
};
// Segments that one block does in order.
struct Item {
    std::int32_t first, count;
};
// Items that do not depend on each other: a launch.
struct Pass {
    std::int32_t first, count;
};
struct Schedule {
    std::vector<Segment> segments;
    std::vector<Item> items;
    std::vector<std::vector<Pass>> rounds;
    int buckets = 0;
};

constexpr int group_levels = 3;  // of the tree inside a group of chunks

class ScheduleBuilder {
public:
    explicit ScheduleBuilder(int slots) : slots_(slots), tree_(slots - 1), group_(std::min(group_levels, slots - 1)) {}

    // One round: whole documents of so many chunks each, one after another.
    void add_documents(const std::vector<std::int64_t>& counts) {
        std::vector<Part> parts;
        for (std::int64_t first = 0; auto count : counts) {
            parts.push_back({static_cast<int>(first), static_cast<int>(count), schedule_.buckets, false});
            schedule_.buckets += buckets_of(parts.back().count);
            first += count;
        }
        schedule_.rounds.emplace_back();
        build_trees(parts, tree_);
        begin_pass();
        for (const auto& part : parts) add_chain(part, none, none);
    }
    // A document in rounds of 2^log_round chunks, at least a group; segments count chunks from the start of their round. A
    // round needs buckets of those before it; its gradients, of those behind it.
    void add_rounds(std::int64_t count, int log_round) {
        const int round = 1 << log_round, total = static_cast<int>(count);
        std::vector<std::int32_t> live(static_cast<std::size_t>(slots_), none);  // buckets that enter the round, by slot
        schedule_.buckets += buckets_of(std::min(round, total));
        for (int begin = 0; begin < total; begin += round) {
            const Part part{0, std::min(round, total - begin), 0, begin + round < total};
            const auto new_bucket = [&] { return part.more ? schedule_.buckets++ : none; };
            schedule_.rounds.emplace_back();
            build_trees({part}, std::min(tree_, log_round));
            begin_pass();
            if (log_round > tree_) {
                const std::int32_t entering = live.back();
                live.back() = new_bucket();
                add_chain(part, entering, live.back());
                continue;
            }
            // What enters at levels above the round's own tree goes through all of it.
            const int used = slots_before(begin, slots_);
            for (int slot = log_round; slot < slots_; ++slot) {
                if ((used >> slot & 1) == 0) continue;
                auto& bucket = live[static_cast<std::size_t>(slot)];
                Segment& segment = add(0, part.count, slot, false);
                segment.source = bucket;
                segment.target = bucket = new_bucket();
                end_item();
            }
            if (!part.more) continue;
            // What merges there becomes one bucket with what the round itself has become.
            begin_pass();
            const Transition transition = transition_after(begin + round - 1, slots_);
            add(0, 0, transition.destination, false).source = part.bucket;
            for (int slot = log_round; slot < slots_; ++slot) {
                if ((transition.merged >> slot & 1) == 0) continue;
                if (schedule_.segments.back().addend != none) add(0, 0, transition.destination, false).kept = 1;
                schedule_.segments.back().addend = live[static_cast<std::size_t>(slot)];
                live[static_cast<std::size_t>(slot)] = none;
            }
            live[static_cast<std::size_t>(transition.destination)] = schedule_.segments.back().target = new_bucket();
            end_item();
        }
    }
    Schedule take() {
        for (auto& round : schedule_.rounds) std::erase_if(round, [](const Pass& pass) { return pass.count == 0; });
        return std::move(schedule_);
    }

private:
    // What a round has of a document.
    struct Part {
        int first, count, bucket;
        bool more;  // of the document comes behind the round
    };
    int buckets_of(int count) const { return tree_ > 0 ? static_cast<int>(ceil_div(count, std::int64_t{1} << group_)) : 0; }
    // The buckets of 2^top chunks, or of what there is of them: in groups, then level by level.
    void build_trees(const std::vector<Part>& parts, int top) {
        if (tree_ == 0) return;
        begin_pass();
        for (const auto& part : parts)
            for (int begin = 0; begin < part.count; begin += 1 << group_) {
                build(part, begin, group_);
                store(part, begin, group_, part.bucket + (begin >> group_));
                end_item();
            }
        for (int level = group_; level < top; ++level) {
            begin_pass();
            for (const auto& part : parts)
                for (int begin = 0; begin + (1 << level) < part.count; begin += 2 << level) {
                    const int left = part.bucket + (begin >> group_);
                    carry(part, begin, level).source = left;
                    finish(part, begin, level, part.bucket + ((begin + (1 << level)) >> group_));
                    store(part, begin, level + 1, left);
                    end_item();
                }
        }
    }
    // The last slot through a part: a chain from tree to tree. Without an entering bucket it begins as the first tree's.
    void add_chain(const Part& part, std::int32_t entering, std::int32_t leaving) {
        if (tree_ == 0) {
            add(part.first, part.count, 0, true).source = entering;
        } else {
            std::int32_t source = entering != none ? entering : part.bucket;
            for (int begin = entering != none ? 0 : 1 << tree_; begin < part.count; begin += 1 << tree_) {
                Segment& segment = add(part.first + begin, std::min(1 << tree_, part.count - begin), tree_, false);
                segment.source = source;
                segment.kept = source == none;
                if (is_needed(part, begin, tree_)) segment.addend = part.bucket + (begin >> group_);
                source = none;
            }
        }
        if (static_cast<std::int32_t>(schedule_.segments.size()) > item_start_) schedule_.segments.back().target = leaving;
        end_item();
    }
    void begin_pass() { schedule_.rounds.back().push_back({static_cast<std::int32_t>(schedule_.items.size()), 0}); }
    void end_item() {
        const auto count = static_cast<std::int32_t>(schedule_.segments.size());
        if (count == item_start_) return;
        schedule_.items.push_back({item_start_, count - item_start_});
        ++schedule_.rounds.back().back().count;
        item_start_ = count;
    }
    Segment& add(int first, int count, int slot, bool input) {
        schedule_.segments.push_back(
            {first, count, static_cast<std::int16_t>(slot), static_cast<std::int8_t>(input), 0, none, none, none});
        return schedule_.segments.back();
    }
    // Whether the bucket of 2^level chunks from `begin` on is ever read: something comes behind it.
    static bool is_needed(const Part& part, int begin, int level) { return begin + (1 << level) < part.count || part.more; }
    // The left child of the node of 2^(level + 1) chunks from `begin` on, through its right sibling.
    Segment& carry(const Part& part, int begin, int level) {
        const int middle = begin + (1 << level);
        return add(part.first + middle, std::min(1 << level, part.count - middle), level, false);
    }
    void finish(const Part& part, int begin, int level, int right) {
        if (is_needed(part, begin + (1 << level), level)) schedule_.segments.back().addend = right;
    }
    void store(const Part& part, int begin, int level, int bucket) {
        if (is_needed(part, begin, level)) schedule_.segments.back().target = bucket;
    }
    // The tree of the 2^level chunks from `begin` on; its bucket is then at hand.
    void build(const Part& part, int begin, int level) {
        if (level == 1) {
            add(part.first + begin, std::min(2, part.count - begin), 0, true);
            return;
        }
        const int middle = begin + (1 << (level - 1));
        if (middle >= part.count) return build(part, begin, level - 1);
        build(part, middle, level - 1);
        store(part, middle, level - 1, parked - (level - 2));
        build(part, begin, level - 1);
        carry(part, begin, level - 1).kept = 1;
        finish(part, begin, level - 1, parked - (level - 2));
    }

    const int slots_, tree_, group_;  // levels of the tree, of a group
    Schedule schedule_;
    std::int32_t item_start_ = 0;
};

// ---- kernel ----------------------------------------------------------------------------------------------------------

struct Walk {
    int heads, value_width, value_tiles, levels, slots;
    int value_blocks;  // of as many value tiles as there are consumers
    std::int64_t v_stride;
    int units;  // of work: items x heads x value blocks
    const ChunkInfo* chunks;
    const Segment* segments;
    const Item* items;
    const bf16* v;
    const float *beta, *level_scales;
    const bf16 *key_start, *left_key, *query, *weights;  // [chunks, H, K tiles]; weights: one tile
    const float* decay;                                  // [chunks, H]
    float* buckets;  // [buckets, H, V tiles, K tiles], as the threads hold them; so are the next two
    float* parked;   // [blocks, consumers, group levels - 1, K tiles]
    float* sums;     // [chunks, H, V tiles]: outputs so far
    bf16* o;
    // Backward; v is then the outputs' gradient where gradients walk. Places: place().
    bf16* states;  // entering states, or gradients of leaving ones: [places, H, V tiles, K tiles]
    bf16* steps;   // T, by the slot that enters, one more a chunk where the chunk's values meet none; or Z of leaving states
};

constexpr int consumers_limit = 2;
constexpr int stages = 2;

// What a stage holds, by the barrier that counts it.
enum Part { keys, readers, updates, parts };

// What is done at a chunk, in one word: producers have few registers.
class Step {
public:
    Step() = default;
    __device__ __forceinline__ Step(const Walk& p, const Segment& segment, int n, const ChunkInfo& c) {
        const int used = slots_before(c.index, p.slots);
        const bool exists = n > 0 || segment.kept != 0 || segment.source != none;
        const bool reads = exists && (used >> segment.slot & 1) != 0, first = (used & ((1 << segment.slot) - 1)) == 0;
        const Transition transition = transition_after(c.index, p.slots);
        const int next = transition.kept | 1 << transition.destination;
        const bool merges = (transition.kept >> segment.slot & 1) == 0;
        const int flags[] = {c.has_next != 0,
                             exists,
                             segment.input != 0 && c.has_next != 0,
                             reads,
                             first && (reads || used == 0),
                             first,
                             used >> segment.slot <= 1,
                             merges};
        bits_ = 0;
        for (int i = 0; i < 8; ++i) bits_ |= static_cast<std::uint32_t>(flags[i]) << i;
        const int numbers[] = {__popc(used), reads ? place_of(used, segment.slot) : __popc(used), __popc(next),
                               place_of(next, merges ? transition.destination : segment.slot)};
        for (int i = 0; i < 4; ++i) bits_ |= static_cast<std::uint32_t>(numbers[i]) << (8 + 6 * i);
    }
    __device__ __forceinline__ bool moves() const { return flag(0); }   // the state goes on
    __device__ __forceinline__ bool exists() const { return flag(1); }  // the state is not zero
    __device__ __forceinline__ bool enters() const { return flag(2); }  // the chunk's values enter it
    __device__ __forceinline__ bool reads() const { return flag(3); }   // the chunk's queries read it
    __device__ __forceinline__ bool inside() const { return flag(4); }  // the output takes what is inside the chunk
    __device__ __forceinline__ bool first() const { return flag(5); }   // of the chunk's outputs
    __device__ __forceinline__ bool last() const { return flag(6); }
    __device__ __forceinline__ bool merges() const { return flag(7); }  // what leaves is in another slot
    // The chunk's states, and which of them this one is.
    __device__ __forceinline__ int entering() const { return number(0); }
    __device__ __forceinline__ int entering_place() const { return number(1); }
    __device__ __forceinline__ int leaving() const { return number(2); }
    __device__ __forceinline__ int leaving_place() const { return number(3); }

private:
    __device__ __forceinline__ bool flag(int i) const { return (bits_ >> i & 1) != 0; }
    __device__ __forceinline__ int number(int i) const { return static_cast<int>(bits_ >> (8 + 6 * i) & 63); }

    std::uint32_t bits_;
};

// What a walk is for: outputs, the states that enter the chunks (backward), or the states' gradients.
enum class Purpose { outputs, states, gradients };

template <int KT, Purpose purpose>
struct Layout {
    static constexpr int tile_bytes = area * sizeof(bf16), operand_bytes = KT * tile_bytes;
    static constexpr int key_start = 0, left_key = operand_bytes, query = 2 * operand_bytes,
                         operands = (purpose == Purpose::states ? 2 : 3) * operand_bytes;
    // Values of all consumers, with outputs the chunk's weights before them; or the outputs so far: only slots that a
    // chunk's values do not enter add to them.
    static constexpr int weights = operands, values = operands + (purpose == Purpose::outputs ? tile_bytes : 0),
                         sums = operands, sum_bytes = area * sizeof(float);
    // Behind them: beta[64], level scale[64], e_last; the chunk, the step
    static constexpr int numbers_bytes = 1024, chunk = 768, step = 832;
    __host__ __device__ static constexpr int numbers(int consumers) {
        return operands + consumers * (purpose == Purpose::outputs ? sum_bytes : tile_bytes);
    }
    // Where a consumer turns what it writes: an output, or a state.
    static constexpr int turned = purpose == Purpose::outputs ? tile_bytes : operand_bytes;
    __host__ __device__ static constexpr int stage_bytes(int consumers) { return numbers(consumers) + numbers_bytes; }
    __host__ __device__ static constexpr int bytes(int consumers) {
        return stages * stage_bytes(consumers) + consumers * turned + 2 * stages * parts * static_cast<int>(sizeof(Barrier));
    }
    static_assert(tile_bytes * 2 == sum_bytes);
};

// Does the work in order, or each unit's in reverse: begin(head, first value tile, segment, whether the segment behind it
// keeps its end), step(head, first value tile, segment, chunk's place in it, chunk), end(head, first value tile, segment).
template <bool Reverse, class Begin, class Step, class End>
__device__ __forceinline__ void for_each_step(const Walk& p, int consumers, Begin&& begin, Step&& step, End&& end) {
#pragma unroll 1
    for (int unit = static_cast<int>(blockIdx.x); unit < p.units; unit += static_cast<int>(gridDim.x)) {
        const int value_tile = unit % p.value_blocks * consumers, h = unit / p.value_blocks % p.heads;
        const Item item = p.items[unit / p.value_blocks / p.heads];
        bool kept_on = false;
#pragma unroll 1
        for (int i = 0; i < item.count; ++i) {
            const Segment segment = p.segments[item.first + (Reverse ? item.count - 1 - i : i)];
            begin(h, value_tile, segment, kept_on);
#pragma unroll 1
            for (int n = 0; n < segment.count; ++n) {
                const int place = Reverse ? segment.count - 1 - n : n;
                step(h, value_tile, segment, place, segment.first + place);
            }
            end(h, value_tile, segment);
            kept_on = segment.kept != 0;
        }
    }
}

// Starts copying a tile from rows of `width` elements, from column `first` on, by a warp; `width` and `stride` are multiples
// of 8. What is behind `rows` or `width` becomes 0.
__device__ __forceinline__ void load_rows(bf16* to, const bf16* from, std::int64_t stride, int rows, int first, int width) {
    // A lane has one column of 16 bytes, and every fourth row.
    const int lane = tile::thread_index() % 32, first_row = lane / 8, column = lane % 8 * 8;
    bf16* const even = to + tile::offset<bf16>(first_row, column);
    bf16* const odd = to + tile::offset<bf16>(first_row + 4, column);
    if (first + column >= width) rows = 0;
    const bf16* at = from + first_row * stride + first + column;
#pragma unroll
    for (int n = 0; n < edge / 4; ++n) {
        const bool valid = first_row + 4 * n < rows;
        tile::copy_async_16((n % 2 == 0 ? even : odd) + n / 2 * 8 * edge, valid ? at : from, valid);
        at += 4 * stride;
    }
}

// The producers' part at a chunk, a warp each: this one's bulk copies bring what is laid out as tiles.
template <int KT, Purpose purpose>
__device__ __forceinline__ void fill_tiles(const Walk& p, unsigned char* stage, Barrier* full, Barrier* free, int turn,
                                           int consumers, int h, int value_tile, const Segment& segment, int n, int chunk) {
    using namespace asynchronous;
    using L = Layout<KT, purpose>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const ChunkInfo c = p.chunks[chunk];
    const Step step(p, segment, n, c);
    const std::int64_t id = static_cast<std::int64_t>(chunk) * p.heads + h;
    const auto copy = [&](int to, const bf16* from, Part part) {
        copy_bulk(stage + to, from + id * KT * area, L::operand_bytes, full + part);
    };

    pipeline::wait_as_warp(free + keys, turn);
    if (lane == 0) {
        const bool used = step.moves() && (step.exists() || purpose == Purpose::gradients);
        arrive_expecting(full + keys, used ? L::operand_bytes : 0);
        if (used && purpose == Purpose::gradients) copy(L::left_key, p.left_key, keys);
        if (used && purpose != Purpose::gradients) copy(L::key_start, p.key_start, keys);
    }

    pipeline::wait_as_warp(free + readers, turn);
    if (lane == 0) {
        unsigned char* const numbers = stage + L::numbers(consumers);
        *reinterpret_cast<Step*>(numbers + L::step) = step;
        int bytes = 0;
        const int sums = step.reads() && !step.first() ? min(consumers, p.value_tiles - value_tile) : 0;
        if constexpr (purpose == Purpose::outputs)
            bytes = (step.reads() ? L::operand_bytes : 0) + (step.inside() ? L::tile_bytes : 0) + sums * L::sum_bytes;
        arrive_expecting(full + readers, bytes);
        if constexpr (purpose == Purpose::outputs) {
            if (step.reads()) copy(L::query, p.query, readers);
            if (step.inside()) copy_bulk(stage + L::weights, p.weights + id * area, L::tile_bytes, full + readers);
            // A group's own block may have written them, at least three steps ago.
            if (sums > 0) fence_written();
#pragma unroll 1
            for (int i = 0; i < sums; ++i)
                copy_bulk(stage + L::sums + i * L::sum_bytes, p.sums + (id * p.value_tiles + value_tile + i) * area,
                          L::sum_bytes, full + readers);
        }
    }

    pipeline::wait_as_warp(free + updates, turn);
    if (lane == 0) {
        if constexpr (purpose == Purpose::gradients) {
            arrive_expecting(full + updates, 2 * L::operand_bytes);
            copy(L::key_start, p.key_start, updates);
            copy(L::query, p.query, updates);
        } else {
            arrive_expecting(full + updates, step.moves() ? L::operand_bytes : 0);
            if (step.moves()) copy(L::left_key, p.left_key, updates);
        }
    }
}
// This one's copies bring rows of values and numbers.
template <int KT, Purpose purpose>
__device__ __forceinline__ void fill_rows(const Walk& p, unsigned char* stage, Barrier* full, Barrier* free, int turn,
                                          int consumers, int h, int value_tile, const Segment& segment, int n, int chunk) {
    using L = Layout<KT, purpose>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const ChunkInfo c = p.chunks[chunk];
    const Step step(p, segment, n, c);
    const bool loads =
        purpose == Purpose::gradients ? step.reads() : step.enters() || (purpose == Purpose::outputs && step.inside());
    float* const numbers = reinterpret_cast<float*>(stage + L::numbers(consumers));

    pipeline::wait_as_warp(free + readers, turn);
    if (loads) {
#pragma unroll 1
        for (int i = 0; i < consumers; ++i)
            load_rows(reinterpret_cast<bf16*>(stage + L::values + i * L::tile_bytes),
                      p.v + c.token * p.v_stride + static_cast<std::int64_t>(h) * p.value_width, p.v_stride, c.rows,
                      (value_tile + i) * edge, p.value_width);
    }
#pragma unroll 1
    for (int t = lane; t < edge; t += 32) {
        const bool valid = t < c.rows;
        const std::int64_t token = (c.token + (valid ? t : 0)) * p.heads + h;
        if constexpr (purpose != Purpose::gradients) tile::copy_async<4>(numbers + t, p.beta + token, valid);
        if (purpose != Purpose::states && p.level_scales != nullptr)
            tile::copy_async<4>(numbers + edge + t,
                                p.level_scales + token * p.levels + min(inside_levels + segment.slot, p.levels - 1), valid);
    }
    if (lane == 0) tile::copy_async<4>(numbers + 2 * edge, p.decay + static_cast<std::int64_t>(chunk) * p.heads + h, true);
    if (lane < 2)
        tile::copy_async_16(numbers + L::chunk / 4 + 4 * lane, reinterpret_cast<const float*>(p.chunks + chunk) + 4 * lane,
                            true);
    pipeline::arrive_after_copies(full + readers);
}

// x[64 values, 64 tokens] += V' weights', both tiles in shared memory.
__device__ __forceinline__ void add_inside(float (&x)[8][4], const bf16* values, const bf16* weights) {
    const int lane = tile::thread_index() % 32, matrix = lane / 8, line = lane % 8;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        std::uint32_t value[4];
        asynchronous::load_transposed(value, values, k);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            std::uint32_t weight[4];
            tile::load_matrices<false>(
                weight, weights + tile::offset<bf16>(n * 16 + matrix / 2 * 8 + line, k * 16 + matrix % 2 * 8));
            tile::mma_16x8x16(x[2 * n], value, weight[0], weight[1]);
            tile::mma_16x8x16(x[2 * n + 1], value, weight[2], weight[3]);
        }
    }
}

// Four fragments, transposed, as a tile.
__device__ __forceinline__ void store_tile_transposed(bf16* to, const std::uint32_t (&x)[4][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) asynchronous::store_transposed(to, x[k], k);
}
// Copies tiles from shared to global memory, as they are; by a warpgroup.
template <int Tiles>
__device__ __forceinline__ void copy_tiles(bf16* to, const bf16* from) {
    const int thread = tile::team_index();
#pragma unroll
    for (int i = 0; i < Tiles * area / 8; i += 128)
        reinterpret_cast<Pack<bf16, 8>*>(to)[i + thread] = reinterpret_cast<const Pack<bf16, 8>*>(from)[i + thread];
}

// Consumers (1 or 2 warpgroups, a value tile each), then a warpgroup whose first two warps are producers. Blocks take units
// in turn.
template <int KT, Purpose purpose>
__global__ void __launch_bounds__((consumers_limit + 1) * 128, 1) walk_states(const Walk p) {
#if defined(FENWICK_TILE_WGMMA) || defined(FENWICK_CUDA_EMULATION)
    using namespace asynchronous;
    using L = Layout<KT, purpose>;
    constexpr bool reverse = purpose == Purpose::gradients;
    const int consumers = static_cast<int>(blockDim.x) / 128 - 1, warp = static_cast<int>(threadIdx.x) / 32;
    unsigned char* const memory = tile::shared_memory();
    const int stage_bytes = L::stage_bytes(consumers);
    unsigned char* const turned_tiles = memory + stages * stage_bytes;
    Barrier* const filled = reinterpret_cast<Barrier*>(turned_tiles + consumers * L::turned);  // [stages][parts]
    Barrier* const empty = filled + stages * parts;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages * parts; ++i) {
            pipeline::initialize(filled + i, i % parts == readers ? 33 : 1);
            pipeline::initialize(empty + i, consumers * 4 * pipeline::arrivals_of_warp);
        }
        fence_barriers();
    }
    __syncthreads();
    pipeline::Position<stages> at;

    if (warp >= consumers * 4) {
        release_registers<purpose == Purpose::outputs ? 56 : 72>();
        const bool rows = warp == consumers * 4 + 1;
        if (warp > consumers * 4 + 1) return;
        for_each_step<reverse>(
            p, consumers, [](int, int, const Segment&, bool) {},
            [&](int h, int value_tile, const Segment& segment, int n, int chunk) {
                unsigned char* const stage = memory + at.stage * stage_bytes;
                Barrier *const full = filled + at.stage * parts, *const free = empty + at.stage * parts;
                if (rows) {
                    fill_rows<KT, purpose>(p, stage, full, free, at.turn ^ 1, consumers, h, value_tile, segment, n, chunk);
                } else {
                    fill_tiles<KT, purpose>(p, stage, full, free, at.turn ^ 1, consumers, h, value_tile, segment, n, chunk);
                }
                at.advance();
            },
            [](int, int, const Segment&) {});
        if (rows) tile::wait_async<0>();
    } else {
        claim_registers<purpose == Purpose::outputs ? 224 : 216>();
        const int consumer = warp / 4, thread = static_cast<int>(threadIdx.x) % 128, column = thread % 4 * 2;
        bf16* const turned = reinterpret_cast<bf16*>(turned_tiles + consumer * L::turned);
        float state[KT][8][4];
        std::uint32_t operand[KT * 4][4];  // the state in bfloat16
        const auto round_state = [&] {
#pragma unroll
            for (int k = 0; k < KT * 4; ++k) to_fragment(operand[k], state[k / 4], k % 4);
        };
        const auto release = [&](Part part) { pipeline::arrive_as_warp(empty + at.stage * parts + part); };
        const auto synchronize = [&] { pipeline::synchronize_team(1 + consumer); };
        const auto bucket_at = [&](int bucket, int h, int value_tile) {
            constexpr std::int64_t size = KT * area;
            if (bucket <= parked)
                return p.parked + thread * 4 +
                       ((static_cast<std::int64_t>(blockIdx.x) * consumers + consumer) * (group_levels - 1) +
                        (parked - bucket)) *
                           size;
            return p.buckets + thread * 4 +
                   ((static_cast<std::int64_t>(bucket) * p.heads + h) * p.value_tiles + value_tile) * size;
        };
        const auto load_state = [&](const float* from) {
#pragma unroll
            for (int i = 0; i < KT * 8; ++i) load(state[i / 8][i % 8], from + i * 512);
        };
        const auto store_state = [&](float* to) {
#pragma unroll
            for (int i = 0; i < KT * 8; ++i) store(to + i * 512, state[i / 8][i % 8]);
        };
        const auto clear_state = [&] {
#pragma unroll
            for (int kt = 0; kt < KT; ++kt) clear(state[kt]);
        };

        for_each_step<reverse>(
            p, consumers,
            [&](int h, int first_tile, const Segment& segment, [[maybe_unused]] bool kept_on) {
                const int value_tile = first_tile + consumer;
                const bool valid = value_tile < p.value_tiles;
                if constexpr (reverse) {
                    // The gradient of what the segment ends as, which is also that of what is added there.
                    if (segment.target != none && valid) {
                        load_state(bucket_at(segment.target, h, value_tile));
                    } else if (!kept_on) {
                        clear_state();
                    }
                    if (segment.addend != none && valid) store_state(bucket_at(segment.addend, h, value_tile));
                } else {
                    if (segment.kept != 0) return;
                    if (segment.source != none && valid) {
                        load_state(bucket_at(segment.source, h, value_tile));
                    } else {
                        clear_state();
                    }
                }
                round_state();
            },
            [&](int h, int first_tile, const Segment& segment, int, int chunk) {
                const int value_tile = first_tile + consumer;
                const bool valid = value_tile < p.value_tiles;
                unsigned char* const stage = memory + at.stage * stage_bytes;
                Barrier* const full = filled + at.stage * parts;
                const auto tile_at = [&](int offset) { return reinterpret_cast<bf16*>(stage + offset); };
                bf16* const values = tile_at(L::values + consumer * L::tile_bytes);
                const float* const numbers = reinterpret_cast<const float*>(stage + L::numbers(consumers));
                const bool scaled = p.level_scales != nullptr;
                const auto scales = [&](int token) {
                    const float2 pair = tile::load_pair(numbers + edge + token);
                    return scaled ? pair : make_float2(1.0f, 1.0f);
                };
                float x[8][4];

                // Products are queued in any case: behind a branch they would wait for one another. What comes of stale
                // operands is not used. And nothing may wait in a loop while products are under way.
                clear(x);
                pipeline::wait(full + keys, at.turn);
                pipeline::wait(full + readers, at.turn);
                const ChunkInfo& c =
                    *reinterpret_cast<const ChunkInfo*>(reinterpret_cast<const unsigned char*>(numbers) + L::chunk);
                const Step step = *reinterpret_cast<const Step*>(reinterpret_cast<const unsigned char*>(numbers) + L::step);
                const float decay = numbers[2 * edge];
                fence_products(x);
#pragma unroll
                for (int k = 0; k < KT * 4; ++k)
                    multiply<false>(x, operand[k],
                                    tile_at(reverse ? L::left_key : L::key_start) + k / 4 * area + k % 4 * 16);
                commit();
#pragma unroll
                for (int kt = 0; kt < KT; ++kt)
#pragma unroll
                    for (int i = 0; i < 32; ++i) state[kt][i / 4][i % 4] *= decay;
                wait_products<0>();
                hold(x);
                release(keys);

                std::uint32_t taken[4][4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if constexpr (reverse) {
                        to_fragment(taken[k], x, k);
#pragma unroll
                        for (int e = 0; e < 4; ++e) taken[k][e] &= step.moves() ? ~0u : 0u;
                    } else {
                        std::uint32_t value[4] = {};
                        if (step.enters()) load_transposed(value, values, k);
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const float* const read = x[2 * k + e / 2] + e % 2 * 2;
                            const float2 beta = tile::load_pair(numbers + 16 * k + e / 2 * 8 + column),
                                         pair = tile::unpack(value[e]);
                            taken[k][e] = tile::pack(beta.x * pair.x - (step.exists() ? read[0] : 0.0f),
                                                     beta.y * pair.y - (step.exists() ? read[1] : 0.0f));
                        }
                    }
                }

                pipeline::wait(full + updates, at.turn);
                if constexpr (purpose == Purpose::outputs) {
                    clear(x);
                    fence_products(x);
#pragma unroll
                    for (int k = 0; k < KT * 4; ++k)
                        multiply<false>(x, operand[k], tile_at(L::query) + k / 4 * area + k % 4 * 16);
                    commit();
                }
                [[maybe_unused]] std::uint32_t given[4][4];
                bool writes_state = false, writes_step = false;
                if constexpr (reverse) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        std::uint32_t value[4];
                        load_transposed(value, values, k);
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const float2 pair = tile::unpack(value[e]), scale = scales(16 * k + e / 2 * 8 + column);
                            given[k][e] = tile::pack(scale.x * pair.x, scale.y * pair.y) & (step.reads() ? ~0u : 0u);
                        }
                    }
                    // What leaves a chunk in one slot from several has one gradient: the walk with inputs writes it.
                    writes_state = writes_step = step.moves() && (segment.input != 0 || !step.merges()) && valid;
                }
                if constexpr (purpose == Purpose::states) {
                    writes_state = step.reads() && valid && p.states != nullptr;
                    writes_step = step.moves() && valid && p.states != nullptr;
                }
                if constexpr (purpose != Purpose::outputs) {
                    if (writes_state || writes_step) {
                        synchronize();  // the tiles before were copied, the values are read
                        store_tile_transposed(values, taken);
#pragma unroll
                        for (int k = 0; k < KT * 4; ++k) store_transposed(turned + k / 4 * area, operand[k], k % 4);
                        synchronize();
                    }
                }
                if constexpr (reverse) {
#pragma unroll
                    for (int k = 0; k < 4; ++k)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            taken[k][e] ^= 0x80008000u;  // -Z
                            hold_fragment(taken[k][e]);
                            hold_fragment(given[k][e]);
                        }
                }
#pragma unroll
                for (int kt = 0; kt < KT; ++kt) fence_products(state[kt]);
#pragma unroll
                for (int kt = 0; kt < KT; ++kt)
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        multiply<true>(state[kt], taken[k],
                                       tile_at(reverse ? L::key_start : L::left_key) + kt * area + k * 16 * edge);
                        if constexpr (reverse)
                            multiply<true>(state[kt], given[k], tile_at(L::query) + kt * area + k * 16 * edge);
                    }
                commit();

                if constexpr (purpose == Purpose::outputs) {
                    wait_products<1>();
                    hold(x);
                    if (step.reads() || step.inside()) {
#pragma unroll
                        for (int j = 0; j < 8; ++j) {
                            const float2 scale = scales(8 * j + column);
#pragma unroll
                            for (int e = 0; e < 4; ++e)
                                x[j][e] = step.reads() ? x[j][e] * (e % 2 == 0 ? scale.x : scale.y) : 0.0f;
                        }
                        if (step.inside()) add_inside(x, values, tile_at(L::weights));
                        if (!step.first()) {
                            const float* const so_far =
                                reinterpret_cast<const float*>(stage + L::sums + consumer * L::sum_bytes) + thread * 4;
#pragma unroll
                            for (int j = 0; j < 8; ++j) {
                                float before[4];
                                load(before, so_far + j * 512);
#pragma unroll
                                for (int e = 0; e < 4; ++e) x[j][e] += before[e];
                            }
                        }
                    }
                    const std::int64_t first_token = c.token;
                    const int rows = c.rows;
                    release(readers);
                    if (step.reads() || step.inside()) {
                        if (!step.last()) {
                            float* const sum =
                                p.sums +
                                ((static_cast<std::int64_t>(chunk) * p.heads + h) * p.value_tiles + value_tile) * area +
                                thread * 4;
                            if (valid) {
#pragma unroll
                                for (int j = 0; j < 8; ++j) store(sum + j * 512, x[j]);
                            }
                        } else {
                            std::uint32_t pairs[4][4];
#pragma unroll
                            for (int k = 0; k < 4; ++k) to_fragment(pairs[k], x, k);
                            synchronize();  // the output before was copied
                            store_tile_transposed(turned, pairs);
                            synchronize();
                            bf16* const to = p.o + (first_token * p.heads + h) * p.value_width + value_tile * edge;
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const int row = i * 16 + thread / 8, first = thread % 8 * 8;
                                if (row < rows && value_tile * edge + first < p.value_width)
                                    *reinterpret_cast<Pack<bf16, 8>*>(
                                        to + static_cast<std::int64_t>(row) * p.heads * p.value_width + first) =
                                        *reinterpret_cast<const Pack<bf16, 8>*>(turned + tile::offset<bf16>(row, first));
                            }
                        }
                    }
                } else {
                    const std::int64_t state_at =
                        ((reverse ? place(p.heads, c.leaving, step.leaving(), h, step.leaving_place())
                                  : place(p.heads, c.entering, step.entering(), h, step.entering_place())) *
                             p.value_tiles +
                         value_tile) *
                        KT * area;
                    const std::int64_t step_at =
                        ((reverse ? place(p.heads, c.leaving, step.leaving(), h, step.leaving_place())
                                  : place(p.heads, c.entering + chunk, step.entering() + 1, h, step.entering_place())) *
                             p.value_tiles +
                         value_tile) *
                        area;
                    if (writes_state) copy_tiles<KT>(p.states + state_at, turned);
                    if (writes_step) copy_tiles<1>(p.steps + step_at, values);
                }
                wait_products<0>();
#pragma unroll
                for (int kt = 0; kt < KT; ++kt) hold(state[kt]);
                if constexpr (purpose != Purpose::outputs) release(readers);
                release(updates);
                round_state();
                at.advance();
            },
            [&](int h, int first_tile, const Segment& segment) {
                const int value_tile = first_tile + consumer;
                if (value_tile >= p.value_tiles) return;
                if constexpr (reverse) {
                    if (segment.source != none) store_state(bucket_at(segment.source, h, value_tile));
                } else {
                    if (segment.addend != none) {
                        const float* const from = bucket_at(segment.addend, h, value_tile);
#pragma unroll
                        for (int i = 0; i < KT * 8; ++i) {
                            float more[4];
                            load(more, from + i * 512);
#pragma unroll
                            for (int e = 0; e < 4; ++e) state[i / 8][i % 8][e] += more[e];
                        }
                        round_state();
                    }
                    if (segment.target != none) store_state(bucket_at(segment.target, h, value_tile));
                }
            });
    }
#endif
}

}  // namespace fenwick::kernels::cuda::walk
