// Gated delta rule, linear and log-linear, chunk by chunk.
//
// Within a chunk of n tokens let Gamma_t be the cumulative log decay from the chunk's start, and
//   D_ts = exp(Gamma_t - Gamma_s) for s <= t, else 0     e_t = exp(Gamma_t)     E_t = exp(Gamma_last - Gamma_t)
//   A = strict_lower(beta_t (k_t.k_s) D_ts)              X = (I + A)^-1                        [n, n]
//   M = ((Q K') . D) X                                   what q_t reads of beta_s v_s          [n, n]
//   Kh = beta e K        Kb = E K                        keys as the chunk's start / end sees them
//   Qb = e Q - M Kh                                      effective query, the same for every level
//   Y  = X' Kb           P = e_last I - Y' Kh            what a token leaves behind; transition of states [K, K]
// ("." is elementwise.) X here is the ungated inverse times D: D_ts D_sr = D_tr makes gating before or after the products
// the same, and gated first, no entry is larger than what the recurrence itself holds. Then
//   O = (M . Lambda)(beta V) + sum_l diag(lambda_l) Qb S_l,   S_l -> P S_l,   new state N = Y' (beta V).
// N and the levels that merge with it are summed before the next chunk. All P and N are known before the first state is, so
// the work is three phases over a segment of chunks: chunks in parallel, states from chunk to chunk (a product with P, in
// parallel over heads and blocks of columns), chunks in parallel.
//
// Slots: chunk c's entering states are level log2(chunk) + 1 + b for each set bit b of c. All levels from the last column
// of level_scales on share one scale, so they share one slot; the linear operator is the case of a single slot, scale 1.
//
// Backward, with dS_l the gradient of the states that leave for the next chunk (dN = dS of the slot that N went to):
//   dS_l <- diag(lambda_l Qb)' dO + P' dS_l              merged levels share the gradient of their sum
//   dP = sum_l dS_l S_l'                                 dQb = sum_l diag(lambda_l) dO S_l'
//   d(beta V) = (M . Lambda)' dO + Y dN                  dM = lower(dO (beta V)' . Lambda - dQb Kh')
//   dY = beta V dN' - Kh dP'                             dKh = -Y dP - M' dQb
//   dKb = X dY           dQK = dM X'                     dA = -strict_lower(Y dKb' + M' dQK)    (from dA = -X' dX X')
//   dQ = e dQb + (dQK . D) K
//   dK = (dQK . D)' Q + (B + B') K + beta e dKh + E dKb,   B = beta_t D_ts dA_ts
//   dbeta_t = v_t.d(beta V)_t + e_t k_t.dKh_t + sum_s dA_ts (k_t.k_s) D_ts
//   dlambda[t, l] = sum over s of level l of (dO (beta V)')_ts M_ts, or Qb_t.(dO S_l')_t
// Every term of o_t has the factor exp(Gamma_t - Gamma_s), so dg_r is the sum over t >= r > s of what s gives to o_t.do_t:
// terms of (dO (beta V)' . Lambda . M) inside the chunk, Qb_t.dQb_t (o's share of the states that entered) for t >= r, Y_s.dY_s
// (the share of the new state) for s < r, and P.dP of the states that pass. (In sums of o_t.do_t - v_t.dv_t the terms that do
// not span r would have to cancel, and their rounding would add up in the gradients of A_log and dt_bias.)
//
// States entering a segment are kept (about sqrt(chunks) of them); those inside are recomputed, one segment at a time.
#include "kernels/gated_delta_rule.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "base/parallel.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {
namespace {

using std::int64_t;
using Mask = std::uint64_t;

constexpr int64_t column_block = 64;      // columns of a state that one task carries along
constexpr int64_t min_segment = 16;       // chunks
constexpr int64_t chunks_in_flight = 64;  // short documents are processed together until they have so many chunks

// Sum of products, in double.
template <class T>
double dot(const T* a, const T* b, int64_t count) {
    return lane_sum<double>(count, [=](int64_t i) { return static_cast<double>(a[i]) * static_cast<double>(b[i]); });
}

// y = a x
template <class T>
void scaled_copy(T a, const T* x, T* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = a * x[i];
}
// y += a x
template <class T>
void add_scaled(T a, const T* x, T* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] += a * x[i];
}

template <class T>
void zero_above_diagonal(T* x, int64_t n, int64_t stride) {
    for (int64_t t = 0; t < n; ++t) std::fill(x + t * stride + t + 1, x + t * stride + n, T{0});
}

// x = (I + a)^-1 for the strict lower part of a, both [n, n] with row stride `stride`; x is zero above the diagonal.
// By halves: the lower left block is -x22 a21 x11. `scratch` holds n * n / 4 elements.
template <class T>
void invert_unit_lower(const T* a, T* x, int64_t n, int64_t stride, T* scratch) {
    if (n <= 16) {
        for (int64_t t = 0; t < n; ++t) {
            T* row = x + t * stride;
            std::fill(row, row + n, T{0});
            for (int64_t s = 0; s < t; ++s) add_scaled(-a[t * stride + s], x + s * stride, row, s + 1);
            row[t] = T{1};
        }
        return;
    }
    const int64_t top = n / 2, bottom = n - top;
    T* lower_right = x + top * stride + top;
    T* lower_left = x + top * stride;
    invert_unit_lower(a, x, top, stride, scratch);
    invert_unit_lower(a + top * stride + top, lower_right, bottom, stride, scratch);
    blas_gemm(false, false, bottom, top, top, T{1}, a + top * stride, stride, x, stride, T{0}, scratch, top);
    blas_gemm(false, false, bottom, top, bottom, T{-1}, lower_right, stride, scratch, top, T{0}, lower_left, stride);
    for (int64_t t = 0; t < top; ++t) std::fill(x + t * stride + top, x + t * stride + n, T{0});
}

// One head of one document.
struct Stream {
    int64_t first_token = 0, length = 0, head = 0;
    int64_t chunks = 0;
    int64_t segment = 0;   // chunks a segment, the last may have fewer
    int64_t segments = 0;
};

// How the states entering chunk c become those entering chunk c + 1.
struct Transition {
    int destination;  // slot that takes the chunk's new state
    Mask merged;      // slots added to it after the transition
    Mask kept;        // slots that stay what they are
};

// Memory that is used anew for every segment and grows when it must.
template <class T>
class Arena {
public:
    T* reserve(int64_t count) {
        const auto bytes = static_cast<std::size_t>(count) * sizeof(T);
        if (bytes > buffer_.bytes()) {
            buffer_ = Buffer();
            buffer_ = Buffer(cpu_device, bytes, MemoryKind::workspace);
        }
        return buffer_.template as<T>();
    }

private:
    Buffer buffer_;
};

// A chunk being worked on. States are [slots in use, key_width, value_width].
template <class T>
struct Chunk {
    const Stream* stream = nullptr;
    int64_t index = 0, tokens = 0, first_token = 0;
    bool has_next = false;
    T *state = nullptr, *next_state = nullptr;      // entering this chunk and the next
    T *d_state = nullptr, *d_next_state = nullptr;  // their gradients
    // What the comment at the top names, rows of `rows` (n x n matrices) or key_width elements.
    T *decay = nullptr, *kk = nullptr, *qk = nullptr, *inverse = nullptr, *mix = nullptr;       // D, K K', Q K' . D, X, M
    T *query = nullptr, *key_start = nullptr, *key_end = nullptr, *left_key = nullptr;          // Qb, Kh, Kb, Y
    T *transition = nullptr;                                                                    // P
    T *from_start = nullptr;                                                                    // e
    const T* to_end() const { return decay + (tokens - 1) * rows; }                             // E
    int64_t rows = 0;
};

template <class T>
class Scan {
public:
    template <class Args>
    explicit Scan(const Args& args)
        : heads(args.heads), key_width(args.key_width), value_width(args.value_width), levels(args.levels),
          chunk_size(args.chunk_size), q_stride(args.q_stride), k_stride(args.k_stride), v_stride(args.v_stride),
          q(static_cast<const T*>(args.q)), k(static_cast<const T*>(args.k)), v(static_cast<const T*>(args.v)),
          g(static_cast<const T*>(args.g)), beta(static_cast<const T*>(args.beta)),
          level_scales(static_cast<const T*>(args.level_scales)) {
        const int64_t chunk_bits = bit_width64(static_cast<Mask>(chunk_size)) - 1;
        first_level = chunk_bits + 1;
        int64_t most_chunks = 1;
        for (int64_t i = 0; i < args.sequences.count; ++i) {
            const int64_t length = args.sequences.length(i), chunks = (length + chunk_size - 1) / chunk_size;
            rows = std::max(rows, std::min(length, chunk_size));
            most_chunks = std::max(most_chunks, chunks);
            int64_t segment = chunks;
            if (chunks > min_segment) {
                segment = min_segment;
                while (segment * segment < chunks) segment *= 2;
            }
            for (int64_t h = 0; h < heads; ++h)
                streams.push_back({.first_token = args.sequences.offsets[i], .length = length, .head = h, .chunks = chunks,
                                   .segment = segment, .segments = (chunks + segment - 1) / segment});
        }
        const int64_t bits = bit_width64(static_cast<Mask>(most_chunks - 1));
        slots = static_cast<int>(std::max<int64_t>(1, std::min(bits, levels - first_level)));
    }

    void forward(T* o) {
        for_each_group([&](int64_t segments) {
            for (int64_t s = 0; s < segments; ++s) {
                open_segment(s, false);
                for_each_chunk([&](Chunk<T>& c) {
                    prepare(c, true);
                    local_output(c, o);
                });
                advance_states();
                for_each_chunk([&](Chunk<T>& c) { state_output(c, o); });
            }
        });
    }

    void backward(const GatedDeltaRuleBackward& args) {
        for_each_group([&](int64_t segments) {
            for (int64_t s = 0; s + 1 < segments; ++s) {
                open_segment(s, false, true);
                for_each_chunk([&](Chunk<T>& c) { prepare(c, false); });
                advance_states();
            }
            for (int64_t s = segments; s-- > 0;) {
                open_segment(s, true);
                for_each_chunk([&](Chunk<T>& c) {
                    prepare(c, true);
                    seed_state_gradients(c, static_cast<const T*>(args.d_o));
                });
                advance_states();
                retreat_state_gradients();
                for_each_chunk([&](Chunk<T>& c) { chunk_gradients(c, args); });
            }
        });
    }

private:
    // ---- levels ------------------------------------------------------------------------------------------------------
    Mask top_slot() const { return Mask{1} << (slots - 1); }
    // Slots in use when chunk c begins.
    Mask slots_before(int64_t c) const {
        const auto index = static_cast<Mask>(c);
        return (index & (top_slot() - 1)) | (index >= top_slot() ? top_slot() : 0);
    }
    Transition transition_after(int64_t c) const {
        const Mask used = slots_before(c);
        const int destination = std::min(std::countr_zero(static_cast<Mask>(c + 1)), slots - 1);
        Mask merged = used & ((Mask{1} << destination) - 1);
        if (destination == slots - 1) merged |= used & top_slot();
        return {destination, merged, used & ~merged};
    }
    static int place_of(Mask used, int slot) { return std::popcount(used & ((Mask{1} << slot) - 1)); }
    T* state_of(T* states, Mask used, int slot) const { return states + place_of(used, slot) * state_size(); }
    int64_t state_size() const { return key_width * value_width; }
    int64_t states_size(int64_t c) const { return std::popcount(slots_before(c)) * state_size(); }
    int64_t column_of(int64_t level) const { return std::min(level, levels - 1); }
    // The scale that token i of the chunk gives to a slot.
    T scale_of(const Chunk<T>& c, int64_t i, int slot) const {
        if (levels == 0) return T{1};
        return scales(c, i)[column_of(first_level + slot)];
    }
    const T* scales(const Chunk<T>& c, int64_t i) const {
        return level_scales + ((c.first_token + i) * heads + c.stream->head) * levels;
    }
    template <class F>
    static void for_each_slot(Mask used, F&& fn) {
        for (; used != 0; used &= used - 1) fn(std::countr_zero(used));
    }
    // Calls fn(level scale or 1, column of level_scales, first s, last s + 1) for the buckets of the chunk's token i.
    template <class F>
    void for_each_bucket(const Chunk<T>& c, int64_t i, F&& fn) const {
        if (levels == 0) return fn(T{1}, int64_t{0}, int64_t{0}, i + 1);
        const T* row = scales(c, i);
        fn(row[0], int64_t{0}, i, i + 1);
        for (int64_t level = 1; (int64_t{1} << (level - 1)) <= i; ++level) {
            const int64_t half = int64_t{1} << (level - 1);
            if ((i & half) == 0) continue;
            const int64_t begin = i & ~(2 * half - 1), column = column_of(level);
            fn(row[column], column, begin, begin + half);
        }
    }

    // ---- which chunks ------------------------------------------------------------------------------------------------
    // Calls fn(number of segments) for groups of consecutive streams; their segments 0, 1, .. are worked on together.
    template <class F>
    void for_each_group(F&& fn) {
        for (std::size_t begin = 0; begin < streams.size();) {
            int64_t chunks = 0, segments = 0;
            std::size_t end = begin;
            for (; end < streams.size() && chunks < chunks_in_flight; ++end) {
                chunks += streams[end].segment;
                segments = std::max(segments, streams[end].segments);
            }
            group_begin = begin, group_end = end;
            // Kept states: those entering segments 1, 2, .. of each stream, and the gradients at two neighbouring ones.
            int64_t kept = 0, gradients = 0;
            kept_offset.clear();
            gradient_offset.clear();
            for (std::size_t i = begin; i < end; ++i) {
                kept_offset.emplace_back();
                for (int64_t s = 0; s < streams[i].segments; ++s) {
                    kept_offset.back().push_back(kept);
                    kept += states_size(s * streams[i].segment);
                }
                gradient_offset.push_back(gradients);
                if (streams[i].segments > 1) gradients += 2 * slots * state_size();
            }
            kept_states = kept_arena.reserve(kept);
            kept_gradients_size = gradients;
            fn(segments);
            begin = end;
        }
    }

    // Lists the chunks of segment s of each stream in the group (or of those with a later segment), and gives them memory.
    void open_segment(int64_t s, bool with_gradients, bool continued_only = false) {
        chunks.clear();
        stream_begin.clear();
        int64_t states = 0, gradients = 0;
        for (std::size_t i = group_begin; i < group_end; ++i) {
            const Stream& stream = streams[i];
            stream_begin.push_back(chunks.size());
            const int64_t begin = s * stream.segment, end = std::min(begin + stream.segment, stream.chunks);
            if (continued_only && s + 1 >= stream.segments) continue;
            for (int64_t c = begin; c < end; ++c) {
                Chunk<T> chunk;
                chunk.stream = &stream;
                chunk.index = c;
                chunk.tokens = std::min(chunk_size, stream.length - c * chunk_size);
                chunk.first_token = stream.first_token + c * chunk_size;
                chunk.has_next = c + 1 < stream.chunks;
                chunk.rows = rows;
                chunks.push_back(chunk);
                if (c > begin) states += states_size(c);
                gradients += states_size(c);
            }
        }
        stream_begin.push_back(chunks.size());

        const int64_t square = rows * rows, keys = rows * key_width;
        const int64_t chunk_elements = 5 * square + 4 * keys + key_width * key_width + rows;
        T* memory = chunk_arena.reserve(chunk_elements * static_cast<int64_t>(chunks.size()));
        const auto take = [&memory](int64_t count) { return std::exchange(memory, memory + count); };
        T* state_memory = state_arena.reserve(states);
        T* gradient_memory = with_gradients ? gradient_arena.reserve(gradients) : nullptr;
        T* ring = with_gradients ? ring_arena.reserve(kept_gradients_size) : nullptr;
        for (std::size_t i = group_begin; i < group_end; ++i) {
            const std::size_t local = i - group_begin;
            const Stream& stream = streams[i];
            T* ring_of_stream = ring + gradient_offset[local];
            for (std::size_t j = stream_begin[local]; j < stream_begin[local + 1]; ++j) {
                Chunk<T>& c = chunks[j];
                c.decay = take(square), c.kk = take(square), c.qk = take(square);
                c.inverse = take(square), c.mix = take(square);
                c.query = take(keys), c.key_start = take(keys), c.key_end = take(keys), c.left_key = take(keys);
                c.transition = take(key_width * key_width);
                c.from_start = take(rows);
                const bool first = j == stream_begin[local], last = j + 1 == stream_begin[local + 1];
                if (first) {
                    c.state = kept_states + kept_offset[local][static_cast<std::size_t>(s)];
                    if (with_gradients && stream.segments > 1)
                        c.d_state = ring_of_stream + s % 2 * slots * state_size();
                    else if (with_gradients)
                        c.d_state = std::exchange(gradient_memory, gradient_memory + states_size(c.index));
                } else {
                    c.state = chunks[j - 1].next_state;
                    c.d_state = chunks[j - 1].d_next_state;
                }
                if (!c.has_next) continue;
                if (last) {
                    c.next_state = kept_states + kept_offset[local][static_cast<std::size_t>(s + 1)];
                    if (with_gradients) c.d_next_state = ring_of_stream + (s + 1) % 2 * slots * state_size();
                } else {
                    c.next_state = std::exchange(state_memory, state_memory + states_size(c.index + 1));
                    if (with_gradients)
                        c.d_next_state = std::exchange(gradient_memory, gradient_memory + states_size(c.index + 1));
                }
            }
        }
    }

    template <class F>
    void for_each_chunk(F&& fn) {
        parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
            const FlushDenormals scope;
            for (int64_t i = begin; i < end; ++i) fn(chunks[static_cast<std::size_t>(i)]);
        });
    }

    // Calls fn(chunks of one stream, first column, columns) for all streams of the group and blocks of columns.
    template <class F>
    void for_each_column_block(F&& fn) {
        const int64_t blocks = (value_width + column_block - 1) / column_block;
        const int64_t width = (value_width + blocks - 1) / blocks;
        const auto count = static_cast<int64_t>(stream_begin.size()) - 1;
        parallel_for(0, count * blocks, 1, [&](int64_t begin, int64_t end) {
            const FlushDenormals scope;
            for (int64_t i = begin; i < end; ++i) {
                const auto stream = static_cast<std::size_t>(i / blocks);
                const int64_t column = i % blocks * width;
                const std::size_t first = stream_begin[stream], last = stream_begin[stream + 1];
                if (last > first && column < value_width)
                    fn(chunks.data() + first, chunks.data() + last, column, std::min(width, value_width - column));
            }
        });
    }

    // ---- a chunk by itself -------------------------------------------------------------------------------------------
    const T* q_of(const Chunk<T>& c) const { return q + c.first_token * q_stride + c.stream->head * key_width; }
    const T* k_of(const Chunk<T>& c) const { return k + c.first_token * k_stride + c.stream->head * key_width; }
    const T* v_of(const Chunk<T>& c) const { return v + c.first_token * v_stride + c.stream->head * value_width; }
    template <class U>
    U* dense_of(const Chunk<T>& c, U* x) const {  // [tokens, heads, value_width]
        return x + (c.first_token * heads + c.stream->head) * value_width;
    }
    T beta_of(const Chunk<T>& c, int64_t i) const { return beta[(c.first_token + i) * heads + c.stream->head]; }

    // Fills the chunk's matrices and writes its new state, without those that merge with it, to the next states. Without
    // `with_queries`, only what the states need.
    void prepare(Chunk<T>& c, bool with_queries) const {
        const int64_t n = c.tokens, K = key_width, V = value_width;
        // Decays by repeated products in double: one exponential a token, and never above 1. What underflows is zero.
        std::vector<double> row(static_cast<std::size_t>(n), 0.0);
        constexpr double smallest = std::numeric_limits<T>::min();
        double from_start = 1.0;
        for (int64_t t = 0; t < n; ++t) {
            const double alpha = std::exp(static_cast<double>(g[(c.first_token + t) * heads + c.stream->head]));
            T* out = c.decay + t * rows;
            for (int64_t s = 0; s < t; ++s) {
                const double product = row[static_cast<std::size_t>(s)] * alpha;
                row[static_cast<std::size_t>(s)] = product < smallest ? 0.0 : product;
            }
            row[static_cast<std::size_t>(t)] = 1.0;
            for (int64_t s = 0; s < n; ++s) out[s] = static_cast<T>(row[static_cast<std::size_t>(s)]);  // 0 where s > t
            from_start *= alpha;
            if (from_start < smallest) from_start = 0.0;
            c.from_start[t] = static_cast<T>(from_start);
        }

        const T* keys = k_of(c);
        blas_gemm(false, true, n, n, K, T{1}, keys, k_stride, keys, k_stride, T{0}, c.kk, rows);
        // `mix` holds A and scratch until M is made; `qk` the inverse's scratch.
        for (int64_t t = 0; t < n; ++t) {
            const T beta_t = beta_of(c, t);
            for (int64_t s = 0; s < t; ++s) c.mix[t * rows + s] = beta_t * c.kk[t * rows + s] * c.decay[t * rows + s];
        }
        invert_unit_lower(c.mix, c.inverse, n, rows, c.qk);
        for (int64_t t = 0; t < n; ++t) {
            scaled_copy(beta_of(c, t) * c.from_start[t], keys + t * k_stride, c.key_start + t * K, K);
            scaled_copy(c.to_end()[t], keys + t * k_stride, c.key_end + t * K, K);
        }

        if (with_queries) {
            const T* queries = q_of(c);
            blas_gemm(false, true, n, n, K, T{1}, queries, q_stride, keys, k_stride, T{0}, c.qk, rows);
            for (int64_t t = 0; t < n; ++t) {
                for (int64_t s = 0; s < n; ++s) c.qk[t * rows + s] *= c.decay[t * rows + s];
                scaled_copy(c.from_start[t], queries + t * q_stride, c.query + t * K, K);
            }
            blas_gemm(false, false, n, n, n, T{1}, c.qk, rows, c.inverse, rows, T{0}, c.mix, rows);
            blas_gemm(false, false, n, K, n, T{-1}, c.mix, rows, c.key_start, K, T{1}, c.query, K);
        }

        if (!c.has_next) return;
        blas_gemm(true, false, n, K, n, T{1}, c.inverse, rows, c.key_end, K, T{0}, c.left_key, K);
        blas_gemm(true, false, K, K, n, T{-1}, c.left_key, K, c.key_start, K, T{0}, c.transition, K);
        for (int64_t i = 0; i < K; ++i) c.transition[i * K + i] += c.from_start[n - 1];
        std::vector<T> weighted(static_cast<std::size_t>(n * K));
        for (int64_t t = 0; t < n; ++t) scaled_copy(beta_of(c, t), c.left_key + t * K, weighted.data() + t * K, K);
        T* fresh = state_of(c.next_state, slots_before(c.index + 1), transition_after(c.index).destination);
        blas_gemm(true, false, K, V, n, T{1}, weighted.data(), K, v_of(c), v_stride, T{0}, fresh, V);
    }

    // o = (M . Lambda)(beta V)
    void local_output(const Chunk<T>& c, T* o) const {
        const int64_t n = c.tokens;
        std::vector<T> weights(static_cast<std::size_t>(n * n), T{0}), betas(static_cast<std::size_t>(n));
        for (int64_t t = 0; t < n; ++t) betas[static_cast<std::size_t>(t)] = beta_of(c, t);
        for (int64_t t = 0; t < n; ++t) {
            T* row = weights.data() + t * n;
            for_each_bucket(c, t, [&](T scale, int64_t, int64_t begin, int64_t end) {
                for (int64_t s = begin; s < end; ++s)
                    row[s] = scale * c.mix[t * rows + s] * betas[static_cast<std::size_t>(s)];
            });
        }
        blas_gemm(false, false, n, value_width, n, T{1}, weights.data(), n, v_of(c), v_stride, T{0}, dense_of(c, o),
                  heads * value_width);
    }

    // diag(lambda of the slot) Qb
    void scaled_query(const Chunk<T>& c, int slot, T* out) const {
        for (int64_t t = 0; t < c.tokens; ++t)
            scaled_copy(scale_of(c, t, slot), c.query + t * key_width, out + t * key_width, key_width);
    }

    // o += sum_l diag(lambda_l) Qb S_l
    void state_output(const Chunk<T>& c, T* o) const {
        const Mask used = slots_before(c.index);
        if (used == 0) return;
        std::vector<T> query(static_cast<std::size_t>(c.tokens * key_width));
        for_each_slot(used, [&](int slot) {
            scaled_query(c, slot, query.data());
            blas_gemm(false, false, c.tokens, value_width, key_width, T{1}, query.data(), key_width,
                      state_of(c.state, used, slot), value_width, T{1}, dense_of(c, o), heads * value_width);
        });
    }

    // ---- states from chunk to chunk ----------------------------------------------------------------------------------
    // out = sum of the merged slots' columns [key_width, width], dense
    void sum_of_slots(const T* states, Mask used, Mask merged, int64_t column, int64_t width, T* out) const {
        bool first = true;
        for_each_slot(merged, [&](int slot) {
            const T* state = states + place_of(used, slot) * state_size() + column;
            for (int64_t i = 0; i < key_width; ++i)
                for (int64_t j = 0; j < width; ++j)
                    out[i * width + j] = (first ? T{0} : out[i * width + j]) + state[i * value_width + j];
            first = false;
        });
    }

    void advance_states() {
        for_each_column_block([&](const Chunk<T>* begin, const Chunk<T>* end, int64_t column, int64_t width) {
            const int64_t K = key_width, V = value_width;
            std::vector<T> sum(static_cast<std::size_t>(K * width));
            for (const Chunk<T>* c = begin; c != end; ++c) {
                if (!c->has_next) continue;
                const Mask used = slots_before(c->index), next_used = slots_before(c->index + 1);
                const Transition transition = transition_after(c->index);
                const auto advance = [&](const T* from, int64_t stride, T to_scale, int to_slot) {
                    blas_gemm(false, false, K, width, K, T{1}, c->transition, K, from, stride, to_scale,
                              state_of(c->next_state, next_used, to_slot) + column, V);
                };
                if (std::popcount(transition.merged) == 1) {
                    const int slot = std::countr_zero(transition.merged);
                    advance(state_of(c->state, used, slot) + column, V, T{1}, transition.destination);
                } else if (transition.merged != 0) {
                    sum_of_slots(c->state, used, transition.merged, column, width, sum.data());
                    advance(sum.data(), width, T{1}, transition.destination);
                }
                for_each_slot(transition.kept,
                              [&](int slot) { advance(state_of(c->state, used, slot) + column, V, T{0}, slot); });
            }
        });
    }

    // What the chunk's own outputs give to the gradient of the states that enter it.
    void seed_state_gradients(const Chunk<T>& c, const T* d_o) const {
        const Mask used = slots_before(c.index);
        if (used == 0) return;
        std::vector<T> query(static_cast<std::size_t>(c.tokens * key_width));
        for_each_slot(used, [&](int slot) {
            scaled_query(c, slot, query.data());
            blas_gemm(true, false, key_width, value_width, c.tokens, T{1}, query.data(), key_width, dense_of(c, d_o),
                      heads * value_width, T{0}, state_of(c.d_state, used, slot), value_width);
        });
    }

    void retreat_state_gradients() {
        for_each_column_block([&](const Chunk<T>* begin, const Chunk<T>* end, int64_t column, int64_t width) {
            const int64_t K = key_width, V = value_width;
            std::vector<T> shared(static_cast<std::size_t>(K * width));
            for (const Chunk<T>* c = end; c-- != begin;) {
                if (!c->has_next) continue;
                const Mask used = slots_before(c->index), next_used = slots_before(c->index + 1);
                const Transition transition = transition_after(c->index);
                const auto retreat = [&](int from_slot, T to_scale, T* to, int64_t stride) {
                    blas_gemm(true, false, K, width, K, T{1}, c->transition, K,
                              state_of(c->d_next_state, next_used, from_slot) + column, V, to_scale, to, stride);
                };
                if (std::popcount(transition.merged) == 1) {
                    const int slot = std::countr_zero(transition.merged);
                    retreat(transition.destination, T{1}, state_of(c->d_state, used, slot) + column, V);
                } else if (transition.merged != 0) {
                    retreat(transition.destination, T{0}, shared.data(), width);
                    for_each_slot(transition.merged, [&](int slot) {
                        T* to = state_of(c->d_state, used, slot) + column;
                        for (int64_t i = 0; i < K; ++i) add_scaled(T{1}, shared.data() + i * width, to + i * V, width);
                    });
                }
                for_each_slot(transition.kept,
                              [&](int slot) { retreat(slot, T{1}, state_of(c->d_state, used, slot) + column, V); });
            }
        });
    }

    // ---- gradients of a chunk's tokens -------------------------------------------------------------------------------
    void chunk_gradients(const Chunk<T>& c, const GatedDeltaRuleBackward& args) const {
        const int64_t n = c.tokens, K = key_width, V = value_width, HV = heads * V;
        const T *queries = q_of(c), *keys = k_of(c), *values = v_of(c);
        const T* d_o = dense_of(c, static_cast<const T*>(args.d_o));
        T* dq = static_cast<T*>(args.dq) + c.first_token * args.dq_stride + c.stream->head * K;
        T* dk = static_cast<T*>(args.dk) + c.first_token * args.dk_stride + c.stream->head * K;
        T* dv = static_cast<T*>(args.dv) + c.first_token * args.dv_stride + c.stream->head * V;
        T* dg = static_cast<T*>(args.dg) + c.first_token * heads + c.stream->head;        // stride heads
        T* dbeta = static_cast<T*>(args.dbeta) + c.first_token * heads + c.stream->head;  // stride heads
        T* dscales = levels == 0 ? nullptr
                                 : static_cast<T*>(args.dlevel_scales) + (c.first_token * heads + c.stream->head) * levels;

        Buffer buffer(cpu_device, static_cast<std::size_t>(3 * n * n + 4 * n * K + n * V + K * K + K * V + n) * sizeof(T),
                      MemoryKind::workspace);
        T* memory = buffer.as<T>();
        const auto take = [&memory](int64_t count) { return std::exchange(memory, memory + count); };
        T *d_mix = take(n * n), *weights = take(n * n), *d_qk = take(n * n);
        T *d_query = take(n * K), *d_start = take(n * K), *d_end = take(n * K), *d_left = take(n * K);
        T *d_value = take(n * V), *d_transition = take(K * K), *sum = take(K * V), *betas = take(n);
        std::vector<double> d_beta(static_cast<std::size_t>(n), 0.0), d_gamma(static_cast<std::size_t>(n), 0.0);
        std::vector<double> d_scales(static_cast<std::size_t>(n * levels), 0.0);
        const auto at = [](auto& values_of, int64_t i) -> auto& { return values_of[static_cast<std::size_t>(i)]; };
        for (int64_t t = 0; t < n; ++t) betas[t] = beta_of(c, t);

        // Within the chunk: dO (beta V)' gives the level scales' and M's gradients.
        blas_gemm(false, true, n, n, V, T{1}, d_o, HV, values, v_stride, T{0}, d_mix, n);
        std::fill(weights, weights + n * n, T{0});  // M . Lambda
        for (int64_t t = 0; t < n; ++t) {
            T* d_row = d_mix + t * n;
            const T* mix = c.mix + t * rows;
            for (int64_t s = 0; s <= t; ++s) d_row[s] *= betas[s];
            for_each_bucket(c, t, [&](T scale, int64_t column, int64_t begin, int64_t end) {
                if (levels > 0) at(d_scales, t * levels + column) += dot(d_row + begin, mix + begin, end - begin);
                for (int64_t s = begin; s < end; ++s) {
                    weights[t * n + s] = scale * mix[s];
                    d_row[s] *= scale;
                }
            });
            at(d_gamma, t) += dot(d_row, mix, t + 1);
            for (int64_t s = 0; s <= t; ++s) at(d_gamma, s) -= static_cast<double>(d_row[s]) * static_cast<double>(mix[s]);
        }

        // What entered.
        const Mask used = slots_before(c.index);
        std::fill(d_query, d_query + n * K, T{0});
        for_each_slot(used, [&](int slot) {
            T* read = d_end;  // dO S_l', scratch until dKb is made
            blas_gemm(false, true, n, K, V, T{1}, d_o, HV, state_of(c.state, used, slot), V, T{0}, read, K);
            for (int64_t t = 0; t < n; ++t) {
                if (levels > 0)
                    at(d_scales, t * levels + column_of(first_level + slot)) += dot(read + t * K, c.query + t * K, K);
                add_scaled(scale_of(c, t, slot), read + t * K, d_query + t * K, K);
            }
        });
        if (used != 0) {
            for (int64_t t = 0; t < n; ++t) at(d_gamma, t) += dot(d_query + t * K, c.query + t * K, K);
            blas_gemm(false, true, n, n, K, T{-1}, d_query, K, c.key_start, K, T{1}, d_mix, n);
        }
        zero_above_diagonal(d_mix, n, n);
        blas_gemm(true, false, n, K, n, T{-1}, c.mix, rows, d_query, K, T{0}, d_start, K);
        blas_gemm(true, false, n, V, n, T{1}, weights, n, d_o, HV, T{0}, d_value, V);

        // What leaves.
        double across = 0;  // what this chunk and earlier ones give to later ones
        if (c.has_next) {
            const Mask next_used = slots_before(c.index + 1);
            const Transition transition = transition_after(c.index);
            const T* d_fresh = state_of(c.d_next_state, next_used, transition.destination);
            T scale = 0;
            const auto add_transition = [&](const T* d_next, const T* state) {
                blas_gemm(false, true, K, K, V, T{1}, d_next, V, state, V, scale, d_transition, K);
                scale = 1;
            };
            if (std::popcount(transition.merged) == 1) {
                add_transition(d_fresh, state_of(c.state, used, std::countr_zero(transition.merged)));
            } else if (transition.merged != 0) {
                sum_of_slots(c.state, used, transition.merged, 0, V, sum);
                add_transition(d_fresh, sum);
            }
            for_each_slot(transition.kept, [&](int slot) {
                add_transition(state_of(c.d_next_state, next_used, slot), state_of(c.state, used, slot));
            });
            blas_gemm(false, false, n, V, K, T{1}, c.left_key, K, d_fresh, V, T{1}, d_value, V);
            blas_gemm(false, true, n, K, V, T{1}, values, v_stride, d_fresh, V, T{0}, d_left, K);
            for (int64_t t = 0; t < n; ++t) {
                scaled_copy(betas[t], d_left + t * K, d_left + t * K, K);
                const double given = dot(d_left + t * K, c.left_key + t * K, K);
                at(d_gamma, t) -= given;
                across += given;
            }
            if (used != 0) {
                across += dot(c.transition, d_transition, K * K);
                blas_gemm(false, true, n, K, K, T{-1}, c.key_start, K, d_transition, K, T{1}, d_left, K);
                blas_gemm(false, false, n, K, K, T{-1}, c.left_key, K, d_transition, K, T{1}, d_start, K);
            }
            blas_gemm(false, false, n, K, n, T{1}, c.inverse, rows, d_left, K, T{0}, d_end, K);
        }

        // Through M = (Q K' . D) X to the inverse and the products of keys and queries. `weights` is dA from here on.
        blas_gemm(false, true, n, n, n, T{1}, d_mix, n, c.inverse, rows, T{0}, d_qk, n);
        blas_gemm(true, false, n, n, n, T{-1}, c.mix, rows, d_qk, n, T{0}, weights, n);
        if (c.has_next) blas_gemm(false, true, n, n, K, T{-1}, c.left_key, K, d_end, K, T{1}, weights, n);
        for (int64_t t = 0; t < n; ++t) {
            T* d_a = weights + t * n;
            const T *decay = c.decay + t * rows, *kk = c.kk + t * rows;
            for (int64_t s = 0; s < t; ++s) d_a[s] *= decay[s];
            at(d_beta, t) += dot(d_a, kk, t);
            for (int64_t s = 0; s < t; ++s) d_a[s] *= betas[t];
            std::fill(d_a + t, d_a + n, T{0});
            for (int64_t s = 0; s < n; ++s) d_qk[t * n + s] *= decay[s];
        }

        for (int64_t t = 0; t < n; ++t) {
            const T* key = keys + t * k_stride;
            T* dk_row = dk + t * args.dk_stride;
            scaled_copy(c.from_start[t], d_query + t * K, dq + t * args.dq_stride, K);
            scaled_copy(betas[t] * c.from_start[t], d_start + t * K, dk_row, K);
            if (c.has_next) add_scaled(c.to_end()[t], d_end + t * K, dk_row, K);
            const double value_dot = dot(values + t * v_stride, d_value + t * V, V);
            at(d_beta, t) += value_dot + static_cast<double>(c.from_start[t]) * dot(key, d_start + t * K, K);
            scaled_copy(betas[t], d_value + t * V, dv + t * args.dv_stride, V);
        }
        blas_gemm(false, false, n, K, n, T{1}, d_qk, n, keys, k_stride, T{1}, dq, args.dq_stride);
        blas_gemm(true, false, n, K, n, T{1}, d_qk, n, queries, q_stride, T{1}, dk, args.dk_stride);
        blas_gemm(false, false, n, K, n, T{1}, weights, n, keys, k_stride, T{1}, dk, args.dk_stride);
        blas_gemm(true, false, n, K, n, T{1}, weights, n, keys, k_stride, T{1}, dk, args.dk_stride);

        for (int64_t t = n; t-- > 0;) {
            across += at(d_gamma, t);
            // A document's first decay meets no state: its gradient is 0, not the rounding of terms that cancel.
            dg[t * heads] = c.index == 0 && t == 0 ? T{0} : static_cast<T>(across);
            dbeta[t * heads] = static_cast<T>(at(d_beta, t));
            for (int64_t l = 0; l < levels; ++l)
                dscales[t * heads * levels + l] = static_cast<T>(at(d_scales, t * levels + l));
        }
    }

    int64_t heads, key_width, value_width, levels, chunk_size;
    int64_t q_stride, k_stride, v_stride;
    const T *q, *k, *v, *g, *beta, *level_scales;
    int64_t first_level = 0;  // level of slot 0
    int slots = 1;
    int64_t rows = 0;  // of the longest chunk
    std::vector<Stream> streams;

    // The group of streams being worked on, and the chunks of its present segment, stream after stream.
    std::size_t group_begin = 0, group_end = 0;
    std::vector<Chunk<T>> chunks;
    std::vector<std::size_t> stream_begin;
    std::vector<std::vector<int64_t>> kept_offset;
    std::vector<int64_t> gradient_offset;
    int64_t kept_gradients_size = 0;
    T* kept_states = nullptr;
    Arena<T> kept_arena, chunk_arena, state_arena, gradient_arena, ring_arena;
};

}  // namespace

void gated_delta_rule_forward(const Exec&, const GatedDeltaRule& args) {
    dispatch_cpu_float("gated_delta_rule", args.dtype,
                       [&]<class T>(TypeTag<T>) { Scan<T>(args).forward(static_cast<T*>(args.o)); });
}

void gated_delta_rule_backward(const Exec&, const GatedDeltaRuleBackward& args) {
    dispatch_cpu_float("gated_delta_rule", args.dtype, [&]<class T>(TypeTag<T>) { Scan<T>(args).backward(args); });
}

void gated_delta_rule_recurrent(const Exec&, const GatedDeltaRuleRecurrent& args) {
    dispatch_cpu_float("gated_delta_rule", args.dtype, [&]<class T>(TypeTag<T>) {
        const int64_t K = args.key_width, V = args.value_width, H = args.heads, L = args.levels;
        const int64_t level_stride = args.batch * H * K * V;
        const int64_t blocks = (V + column_block - 1) / column_block;
        const auto* q = static_cast<const T*>(args.q);
        const auto* k = static_cast<const T*>(args.k);
        const auto* v = static_cast<const T*>(args.v);
        const auto* g = static_cast<const T*>(args.g);
        const auto* beta = static_cast<const T*>(args.beta);
        const auto* level_scales = static_cast<const T*>(args.level_scales);
        auto* o = static_cast<T*>(args.o);
        auto* states = static_cast<T*>(args.state);
        parallel_for(0, args.batch * H * blocks, 1, [&](int64_t begin, int64_t end) {
            const FlushDenormals scope;
            T read[column_block];
            for (int64_t i = begin; i < end; ++i) {
                const int64_t column = i % blocks * column_block, width = std::min(column_block, V - column);
                const int64_t h = i / blocks % H, b = i / blocks / H;
                T* state = states + (b * H + h) * K * V + column;  // of level 0, rows of V
                for (int64_t step = 0; step < args.length; ++step) {
                    const auto t = static_cast<Mask>(args.position + step);
                    const int64_t token = b * args.length + step;
                    const T *qt = q + token * args.q_stride + h * K, *kt = k + token * args.k_stride + h * K;
                    const T* vt = v + token * args.v_stride + h * V + column;
                    const T* scales = L == 0 ? nullptr : level_scales + (token * H + h) * L;
                    const T alpha = std::exp(g[token * H + h]), beta_t = beta[token * H + h];
                    T* ot = o + (token * H + h) * V + column;

                    if (L > 0 && t > 0) {  // levels 0..ctz(t) move into level ctz(t) + 1
                        const int target = std::countr_zero(t) + 1;
                        T* into = state + target * level_stride;
                        for (int64_t row = 0; row < K; ++row)
                            for (int level = 0; level < target; ++level) {
                                T* from = state + level * level_stride + row * V;
                                for (int64_t j = 0; j < width; ++j)
                                    into[row * V + j] = (level == 0 ? T{0} : into[row * V + j]) + from[j];
                                std::fill(from, from + width, T{0});
                            }
                    }

                    std::fill(ot, ot + width, T{0});
                    // Live levels: 0 (empty but for what this token adds; everything when linear) and the set bits of t.
                    const Mask live = L > 0 ? (t << 1) | 1 : Mask{1};
                    for (Mask rest = live; rest != 0; rest &= rest - 1) {
                        const int level = std::countr_zero(rest);
                        const bool fresh = level == 0;
                        T* s = state + level * level_stride;
                        std::fill(read, read + width, T{0});
                        if (!fresh || L == 0)
                            for (int64_t row = 0; row < K; ++row) add_scaled(kt[row], s + row * V, read, width);
                        // S <- alpha S + k u',  u = beta (v - alpha S'k), v only in level 0
                        for (int64_t j = 0; j < width; ++j) read[j] = beta_t * ((fresh ? vt[j] : T{0}) - alpha * read[j]);
                        const T scale = L > 0 ? scales[std::min<int64_t>(level, L - 1)] : T{1};
                        for (int64_t row = 0; row < K; ++row) {
                            T* sr = s + row * V;
                            const T key = kt[row], query = scale * qt[row];
                            for (int64_t j = 0; j < width; ++j) {
                                sr[j] = alpha * sr[j] + key * read[j];
                                ot[j] += query * sr[j];
                            }
                        }
                    }
                }
            }
        });
    });
}

}  // namespace fenwick::kernels::cpu
