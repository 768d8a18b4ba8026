// The chunkwise form on the CPU.
//
// Buckets of chunks form a Fenwick tree (a binary indexed tree): slot i holds the state of the bucket that ends with chunk
// i and spans lowbit(i + 1) chunks, taken at its own end. A right child's slot becomes its parent's, since only left
// children are read; so a document of N chunks has N - 1 slots, each read by the chunks of its right sibling. The linear
// operator keeps the running state in the same slots, and slot i is read by chunk i + 1 alone.
//
// Every decay factor is a product of exp(g) <= 1 over a range of tokens, built by running products in double: no quotient,
// no difference of large sums, and one exp a token. Inside a chunk the mask of a level is of rank one on each of its
// blocks (decay since the boundary times decay up to the boundary), so the mask costs no exp either.
#include "kernels/ssd.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/memory.h"
#include "base/parallel.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {
namespace {

using Index = std::int64_t;

struct Chunk {
    Index first;     // token
    Index size;      // <= chunk_size, shorter only at a document's end
    Index document;
    Index index;     // within the document
};

// What forward and backward share: the sizes, the chunks of all documents, and where their states stand.
struct Plan {
    Index heads, groups, key_width, value_width, levels, chunk_size;
    Index heads_per_group;
    Index tokens;
    int chunk_levels;                // log2(chunk_size): the levels within a chunk
    bool tree;                       // level scales given
    std::vector<Chunk> chunks;
    std::vector<Index> first_chunk;  // of every document, and the end
    Index longest = 0;               // chunks in the longest document

    template <class Args>
    explicit Plan(const Args& args)
        : heads(args.heads), groups(args.groups), key_width(args.key_width), value_width(args.value_width),
          levels(args.levels), chunk_size(args.chunk_size), heads_per_group(args.heads / args.groups),
          tokens(args.sequences.num_tokens()),
          chunk_levels(std::countr_zero(static_cast<std::uint64_t>(args.chunk_size))), tree(args.level_scales != nullptr) {
        for (Index d = 0; d < args.sequences.count; ++d) {
            first_chunk.push_back(static_cast<Index>(chunks.size()));
            const Index begin = args.sequences.offsets[d], end = args.sequences.offsets[d + 1];
            for (Index first = begin; first < end; first += chunk_size)
                chunks.push_back({first, std::min(chunk_size, end - first), d, (first - begin) / chunk_size});
            longest = std::max(longest, static_cast<Index>(chunks.size()) - first_chunk.back());
        }
        first_chunk.push_back(static_cast<Index>(chunks.size()));
    }

    Index num_chunks() const { return static_cast<Index>(chunks.size()); }
    Index documents() const { return static_cast<Index>(first_chunk.size()) - 1; }
    Index chunks_in(Index document) const {
        return first_chunk[static_cast<std::size_t>(document + 1)] - first_chunk[static_cast<std::size_t>(document)];
    }
    // A document of N chunks has N - 1 slots.
    Index first_slot(Index document) const { return first_chunk[static_cast<std::size_t>(document)] - document; }
    Index num_slots() const { return num_chunks() - documents(); }
    bool has_slot(const Chunk& chunk) const { return chunk.index + 1 < chunks_in(chunk.document); }
    Index state_size() const { return key_width * value_width; }  // of one head
    // Levels across chunks in the longest document.
    Index chunk_tree_levels() const { return tree ? bit_width64(static_cast<std::uint64_t>(longest - 1)) : 1; }
    // The column of level_scales for a level.
    Index column(Index level) const { return std::min(level, levels - 1); }

    // Calls body(j, slot) for every bucket that chunk `index` of a document reads: slot, of level chunk_levels + j.
    template <class Body>
    void for_each_source(Index index, Body&& body) const {
        if (!tree) {
            if (index > 0) body(Index{1}, index - 1);
            return;
        }
        for (Index j = 1; (index >> (j - 1)) != 0; ++j)
            if ((index >> (j - 1)) & 1) body(j, ((index >> j) << j) + (Index{1} << (j - 1)) - 1);
    }
    // Calls body(left, right) for the merges that make slot `index`: slot[right] += decay * slot[left], in this order.
    template <class Body>
    void for_each_merge(Index index, Body&& body) const {
        if (!tree) {
            if (index > 0) body(index - 1, index);
            return;
        }
        for (Index span = 1; ((index + 1) & (2 * span - 1)) == 0; span *= 2) body(index - span, index);
    }
    // The last chunk that reads slot `index`; the first is index + 1.
    Index last_reader(Index document, Index index) const {
        if (!tree) return index + 1;
        return std::min(index + ((index + 1) & -(index + 1)), chunks_in(document) - 1);
    }
};

// About 64 blocks of consecutive chunks: a block's scratch memory is made once, and blocks suffice for many threads.
Index block_grain(Index count) { return std::max<Index>(1, count / 64); }

template <class T>
Buffer workspace(Index count) {
    return Buffer(cpu_device, static_cast<std::size_t>(std::max<Index>(count, 1)) * sizeof(T), MemoryKind::workspace);
}

// ---- decays -----------------------------------------------------------------------------------------------------------

struct Decays {
    Buffer step;                // double [chunk][head][token of the chunk]: exp(g)
    std::vector<double> total;  // [head][chunk]: sum of g from the document's start to the chunk's end

    // exp(g) of a chunk's tokens in one head.
    const double* of(const Plan& plan, const Chunk& chunk, Index head) const {
        return step.as<double>() + chunk.first * plan.heads + head * chunk.size;
    }
    // Decay over chunks from+1 .. to of a document; 0 where T has no normal number for it.
    template <class T>
    T between(const Plan& plan, Index document, Index head, Index from, Index to) const {
        const double* sums = total.data() + head * plan.num_chunks() + plan.first_chunk[static_cast<std::size_t>(document)];
        const double factor = std::exp(sums[to] - sums[from]);
        return factor < static_cast<double>(std::numeric_limits<T>::min()) ? T{0} : static_cast<T>(factor);
    }
};

template <class T>
Decays make_decays(const Plan& plan, const T* g) {
    const Index heads = plan.heads, num_chunks = plan.num_chunks();
    Decays decays{workspace<double>(plan.tokens * heads), std::vector<double>(static_cast<std::size_t>(heads * num_chunks))};
    parallel_for(0, num_chunks, block_grain(num_chunks), [&](Index begin, Index end) {
        const FlushDenormals scope;
        for (Index c = begin; c < end; ++c) {
            const Chunk& chunk = plan.chunks[static_cast<std::size_t>(c)];
            for (Index h = 0; h < heads; ++h) {
                double* step = decays.step.as<double>() + chunk.first * heads + h * chunk.size;
                double sum = 0;
                for (Index i = 0; i < chunk.size; ++i) {
                    const auto value = static_cast<double>(g[(chunk.first + i) * heads + h]);
                    sum += value;
                    step[i] = std::exp(value);
                }
                decays.total[static_cast<std::size_t>(h * num_chunks + c)] = sum;
            }
        }
    });
    for (Index h = 0; h < heads; ++h)
        for (Index c = 0; c < num_chunks; ++c)
            if (plan.chunks[static_cast<std::size_t>(c)].index > 0)
                decays.total[static_cast<std::size_t>(h * num_chunks + c)] +=
                    decays.total[static_cast<std::size_t>(h * num_chunks + c - 1)];
    return decays;
}

// out[i] = decay of the chunk's tokens 0 .. i.
template <class T>
void decay_since_start(const double* step, Index size, T* out) {
    double product = 1;
    for (Index i = 0; i < size; ++i) out[i] = static_cast<T>(product *= step[i]);
}

// out[i] = decay of the chunk's tokens i+1 .. size-1.
template <class T>
void decay_to_end(const double* step, Index size, T* out) {
    double product = 1;
    for (Index i = size - 1; i >= 0; --i) {
        out[i] = static_cast<T>(product);
        product *= step[i];
    }
}

// factors[level - 1][i] for the levels within a chunk: every token stands in one block of a level. In the right half,
// decay of the tokens since the half's start, i included; in the left half, decay of the tokens after i to its end.
template <class T>
void level_decays(const Plan& plan, const double* step, Index size, T* factors) {
    for (Index half = 1; half < size; half *= 2, factors += plan.chunk_size)
        for (Index middle = half; middle < size; middle += 2 * half) {
            decay_to_end(step + middle - half, half, factors + middle - half);
            decay_since_start(step + middle, std::min(half, size - middle), factors + middle);
        }
}

// ---- small loops ------------------------------------------------------------------------------------------------------

template <class T>
void copy_rows(Index rows, Index width, const T* from, Index from_stride, T* to, Index to_stride) {
    for (Index i = 0; i < rows; ++i) std::copy_n(from + i * from_stride, width, to + i * to_stride);
}

// to[i] = factor[i] * from[i], both dense
template <class T>
void scale_rows(Index rows, Index width, const T* from, const T* factor, T* to) {
    for (Index i = 0; i < rows; ++i)
        for (Index c = 0; c < width; ++c) to[i * width + c] = factor[i] * from[i * width + c];
}

template <class T>
T dot(const T* x, const T* y, Index count) {
    return lane_sum<T>(count, [=](Index i) { return x[i] * y[i]; });
}

// ---- states across chunks -----------------------------------------------------------------------------------------------

// The states of all slots, [slot][head][K][V], or [slot][head][V][K] if `transposed`.
template <class T>
Buffer make_states(const Plan& plan, const Decays& decays, const T* k, Index k_stride, const T* v, Index v_stride,
                   bool transposed) {
    const Index K = plan.key_width, V = plan.value_width, C = plan.chunk_size, heads = plan.heads;
    const Index state_size = plan.state_size();
    Buffer states = workspace<T>(plan.num_slots() * heads * state_size);
    // Every chunk's own state: sum_s (decay to the chunk's end) k_s v_s'.
    const Index units = plan.num_chunks() * heads;
    parallel_for(0, units, block_grain(units), [&](Index begin, Index end) {
        const FlushDenormals scope;
        const Buffer scratch = workspace<T>(C * (V + 1));
        T* scaled_v = scratch.as<T>();     // [C, V]
        T* factor = scaled_v + C * V;      // [C]
        for (Index unit = begin; unit < end; ++unit) {
            const Chunk& chunk = plan.chunks[static_cast<std::size_t>(unit / heads)];
            const Index h = unit % heads, n = chunk.size;
            if (!plan.has_slot(chunk)) continue;
            decay_to_end(decays.of(plan, chunk, h), n, factor);
            for (Index i = 0; i < n; ++i) {
                const T* row = v + (chunk.first + i) * v_stride + h * V;
                for (Index c = 0; c < V; ++c) scaled_v[i * V + c] = factor[i] * row[c];
            }
            const T* kc = k + chunk.first * k_stride + h / plan.heads_per_group * K;
            T* state = states.as<T>() + ((plan.first_slot(chunk.document) + chunk.index) * heads + h) * state_size;
            if (transposed)
                blas_gemm(true, false, V, K, n, T{1}, scaled_v, V, kc, k_stride, T{0}, state, K);
            else
                blas_gemm(true, false, K, V, n, T{1}, kc, k_stride, scaled_v, V, T{0}, state, V);
        }
    });
    // Merges, over slices of the states that fit into the cache.
    const Index slice = 4096, slices = (state_size + slice - 1) / slice;
    parallel_for(0, plan.documents() * heads * slices, 1, [&](Index begin, Index end) {
        const FlushDenormals scope;
        for (Index unit = begin; unit < end; ++unit) {
            const Index document = unit / (heads * slices), h = unit / slices % heads, offset = unit % slices * slice;
            const Index count = std::min(slice, state_size - offset);
            T* base = states.as<T>() + (plan.first_slot(document) * heads + h) * state_size + offset;
            for (Index i = 1; i + 1 < plan.chunks_in(document); ++i)
                plan.for_each_merge(i, [&](Index left, Index right) {
                    const T factor = decays.between<T>(plan, document, h, left, right);
                    if (factor == 0) return;
                    const T* from = base + left * heads * state_size;
                    T* to = base + right * heads * state_size;
                    for (Index e = 0; e < count; ++e) to[e] += factor * from[e];
                });
        }
    });
    return states;
}

// factor[i] = (decay since chunk start) * (decay since the bucket's end) and the same times the level scale.
template <class T>
void source_factors(const Plan& plan, const Chunk& chunk, Index head, Index j, T decay, const T* since_start,
                    const T* level_scales, T* factor, T* scaled_factor) {
    for (Index i = 0; i < chunk.size; ++i) factor[i] = decay * since_start[i];
    if (!plan.tree) {
        std::copy_n(factor, chunk.size, scaled_factor);
        return;
    }
    const T* scale = level_scales + (chunk.first * plan.heads + head) * plan.levels + plan.column(plan.chunk_levels + j);
    for (Index i = 0; i < chunk.size; ++i) scaled_factor[i] = factor[i] * scale[i * plan.heads * plan.levels];
}

// ---- within a chunk -----------------------------------------------------------------------------------------------------

// masked = scores * mask on and below the diagonal, [n, C]; above it, masked stays zero.
template <class T>
void mask_scores(const Plan& plan, Index n, const T* scores, const T* factors, const T* scale, T* masked) {
    const Index C = plan.chunk_size, scale_stride = plan.heads * plan.levels;
    for (Index i = 0; i < n; ++i) masked[i * C + i] = scores[i * C + i] * (plan.tree ? scale[i * scale_stride] : T{1});
    Index level = 1;
    for (Index half = 1; half < n; half *= 2, ++level, factors += C)
        for (Index middle = half; middle < n; middle += 2 * half)
            for (Index t = middle; t < std::min(middle + half, n); ++t) {
                const T row = factors[t] * (plan.tree ? scale[t * scale_stride + plan.column(level)] : T{1});
                const T* from = scores + t * C + middle - half;
                const T* column = factors + middle - half;
                T* to = masked + t * C + middle - half;
                for (Index s = 0; s < half; ++s) to[s] = from[s] * (row * column[s]);
            }
}

// One row of a block, in pieces of W columns (W divides half), so that short rows are unrolled and long ones vectorised.
// Returns sum over columns of x * column * dm.
template <int W, class T>
T mask_row_backward(Index half, T row, const T* x, const T* dm, const T* column, T* m, T* dx, T* columns) {
    T lanes[W] = {};
    for (Index s = 0; s < half; s += W)
        for (int l = 0; l < W; ++l) {
            const T decayed = x[s + l] * column[s + l], product = decayed * dm[s + l];
            m[s + l] = decayed * row;
            dx[s + l] += dm[s + l] * (column[s + l] * row);
            columns[s + l] += product * row;
            lanes[l] += product;
        }
    for (int step = W / 2; step > 0; step /= 2)
        for (int l = 0; l < step; ++l) lanes[l] += lanes[l + step];
    return lanes[0];
}

// Backward of the masked scores: given d_masked (= do v'), makes masked, adds to d_scores and to dscale, and adds the
// decays' gradient to dg. A pair (t, s) of a block gives its gradient to the decays from s+1 to t: a sum over rows from
// the end of the right half, and a sum over columns from the start of the left half. Nothing cancels.
template <class T>
void mask_scores_backward(const Plan& plan, Index n, const T* scores, const T* d_masked, const T* factors, const T* scale,
                          T* masked, T* d_scores, T* dscale, double* dg, T* columns) {
    const Index C = plan.chunk_size, scale_stride = plan.heads * plan.levels;
    for (Index i = 0; i < n; ++i) {
        const T s = plan.tree ? scale[i * scale_stride] : T{1}, x = scores[i * C + i], dx = d_masked[i * C + i];
        masked[i * C + i] = x * s;
        d_scores[i * C + i] += dx * s;
        if (plan.tree) dscale[i * scale_stride] += x * dx;
    }
    Index level = 1;
    for (Index half = 1; half < n; half *= 2, ++level, factors += C)
        for (Index middle = half; middle < n; middle += 2 * half) {
            const Index begin = middle - half, end = std::min(middle + half, n);
            const T* column = factors + begin;
            std::fill_n(columns, half, T{0});  // gradient by column
            double rows = 0;                   // and summed over the rows from the end to t
            for (Index t = end - 1; t >= middle; --t) {
                const T row = factors[t] * (plan.tree ? scale[t * scale_stride + plan.column(level)] : T{1});
                const T* x = scores + t * C + begin;
                const T* dm = d_masked + t * C + begin;
                T* m = masked + t * C + begin;
                T* dx = d_scores + t * C + begin;
                const T sum = half >= 16  ? mask_row_backward<16>(half, row, x, dm, column, m, dx, columns)
                              : half == 8 ? mask_row_backward<8>(half, row, x, dm, column, m, dx, columns)
                              : half == 4 ? mask_row_backward<4>(half, row, x, dm, column, m, dx, columns)
                              : half == 2 ? mask_row_backward<2>(half, row, x, dm, column, m, dx, columns)
                                          : mask_row_backward<1>(half, row, x, dm, column, m, dx, columns);
                if (plan.tree) dscale[t * scale_stride + plan.column(level)] += factors[t] * sum;
                dg[t] += rows += static_cast<double>(row * sum);
            }
            double before = 0;
            for (Index s = 0; s < half; ++s) {
                dg[begin + s] += before;
                before += static_cast<double>(columns[s]);
            }
        }
}

// ---- forward ------------------------------------------------------------------------------------------------------------

template <class T>
void forward(const Ssd& args) {
    const Plan plan(args);
    const auto* q = static_cast<const T*>(args.q);
    const auto* k = static_cast<const T*>(args.k);
    const auto* v = static_cast<const T*>(args.v);
    const auto* level_scales = static_cast<const T*>(args.level_scales);
    auto* o = static_cast<T*>(args.o);
    const Index K = plan.key_width, V = plan.value_width, C = plan.chunk_size, heads = plan.heads;
    const Decays decays = make_decays(plan, static_cast<const T*>(args.g));
    const Buffer states = make_states(plan, decays, k, args.k_stride, v, args.v_stride, false);

    const Index units = plan.num_chunks() * plan.groups;
    parallel_for(0, units, block_grain(units), [&](Index begin, Index end) {
        const FlushDenormals scope;
        const Buffer scratch = workspace<T>(C * (2 * C + 3 * K + 2 * V + plan.chunk_levels + 3));
        T* scores = scratch.as<T>();              // [C, C]
        T* masked = scores + C * C;               // [C, C]
        T* qc = masked + C * C;                   // [C, K]
        T* kc = qc + C * K;                       // [C, K]
        T* scaled_q = kc + C * K;                 // [C, K]
        T* vc = scaled_q + C * K;                 // [C, V]
        T* oc = vc + C * V;                       // [C, V]
        T* since_start = oc + C * V;              // [C]
        T* factor = since_start + C;              // [C]
        T* scaled_factor = factor + C;            // [C]
        T* level_factors = scaled_factor + C;     // [chunk_levels, C]
        std::fill_n(masked, C * C, T{0});
        for (Index unit = begin; unit < end; ++unit) {
            const Chunk& chunk = plan.chunks[static_cast<std::size_t>(unit / plan.groups)];
            const Index group = unit % plan.groups, n = chunk.size;
            copy_rows(n, K, q + chunk.first * args.q_stride + group * K, args.q_stride, qc, K);
            copy_rows(n, K, k + chunk.first * args.k_stride + group * K, args.k_stride, kc, K);
            blas_gemm(false, true, n, n, K, T{1}, qc, K, kc, K, T{0}, scores, C);
            for (Index h = group * plan.heads_per_group; h < (group + 1) * plan.heads_per_group; ++h) {
                const double* step = decays.of(plan, chunk, h);
                const T* scale = plan.tree ? level_scales + (chunk.first * heads + h) * plan.levels : nullptr;
                copy_rows(n, V, v + chunk.first * args.v_stride + h * V, args.v_stride, vc, V);
                level_decays(plan, step, n, level_factors);
                mask_scores(plan, n, scores, level_factors, scale, masked);
                blas_gemm(false, false, n, V, n, T{1}, masked, C, vc, V, T{0}, oc, V);
                decay_since_start(step, n, since_start);
                plan.for_each_source(chunk.index, [&](Index j, Index slot) {
                    const T decay = decays.between<T>(plan, chunk.document, h, slot, chunk.index - 1);
                    if (decay == 0) return;
                    source_factors(plan, chunk, h, j, decay, since_start, level_scales, factor, scaled_factor);
                    scale_rows(n, K, qc, scaled_factor, scaled_q);
                    blas_gemm(false, false, n, V, K, T{1}, scaled_q, K,
                              states.as<T>() + ((plan.first_slot(chunk.document) + slot) * heads + h) * plan.state_size(), V,
                              T{1}, oc, V);
                });
                copy_rows(n, V, oc, V, o + (chunk.first * heads + h) * V, heads * V);
            }
        }
    });
}

// ---- backward -----------------------------------------------------------------------------------------------------------

// Gradients of the slots' states, [slot][head][V][K]. Products with the readers first (each slot by itself, in the order of its readers), then
// down the tree. crossing[left slot][head][slice] receives <decay * left, d_parent>: the gradient of the log decay over the
// right sibling.
template <class T>
Buffer make_state_gradients(const Plan& plan, const Decays& decays, const SsdBackward& args, const Buffer& states,
                            Index slice, std::vector<double>& crossing) {
    const auto* q = static_cast<const T*>(args.q);
    const auto* d_o = static_cast<const T*>(args.d_o);
    const auto* level_scales = static_cast<const T*>(args.level_scales);
    const Index K = plan.key_width, V = plan.value_width, C = plan.chunk_size, heads = plan.heads;
    const Index state_size = plan.state_size();
    Buffer gradients = workspace<T>(plan.num_slots() * heads * state_size);

    // The slots with most readers first, so that threads end together.
    struct Task {
        Index document, slot, readers;
    };
    std::vector<Task> tasks;
    for (Index d = 0; d < plan.documents(); ++d)
        for (Index i = 0; i + 1 < plan.chunks_in(d); ++i) tasks.push_back({d, i, plan.last_reader(d, i) - i});
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& x, const Task& y) { return x.readers > y.readers; });
    parallel_for(0, static_cast<Index>(tasks.size()) * heads, 1, [&](Index begin, Index end) {
        const FlushDenormals scope;
        const Buffer scratch = workspace<T>(C * (K + 3));
        T* scaled_q = scratch.as<T>();        // [C, K]
        T* since_start = scaled_q + C * K;    // [C]
        T* factor = since_start + C;          // [C]
        T* scaled_factor = factor + C;        // [C]
        for (Index unit = begin; unit < end; ++unit) {
            const Task& task = tasks[static_cast<std::size_t>(unit / heads)];
            const Index h = unit % heads;
            const Index j = plan.tree ? std::countr_zero(static_cast<std::uint64_t>(task.slot + 1)) + 1 : 1;
            T* gradient = gradients.as<T>() + ((plan.first_slot(task.document) + task.slot) * heads + h) * state_size;
            bool empty = true;
            for (Index c = task.slot + 1; c <= task.slot + task.readers; ++c) {
                const T decay = decays.between<T>(plan, task.document, h, task.slot, c - 1);
                if (decay == 0) break;  // and later readers are further away
                const Chunk& chunk =
                    plan.chunks[static_cast<std::size_t>(plan.first_chunk[static_cast<std::size_t>(task.document)] + c)];
                decay_since_start(decays.of(plan, chunk, h), chunk.size, since_start);
                source_factors(plan, chunk, h, j, decay, since_start, level_scales, factor, scaled_factor);
                for (Index i = 0; i < chunk.size; ++i) {
                    const T* row = q + (chunk.first + i) * args.q_stride + h / plan.heads_per_group * K;
                    for (Index x = 0; x < K; ++x) scaled_q[i * K + x] = scaled_factor[i] * row[x];
                }
                blas_gemm(true, false, V, K, chunk.size, T{1}, d_o + (chunk.first * heads + h) * V, heads * V, scaled_q, K,
                          empty ? T{0} : T{1}, gradient, K);
                empty = false;
            }
            if (empty) std::fill_n(gradient, state_size, T{0});
        }
    });

    const Index slices = (state_size + slice - 1) / slice;
    parallel_for(0, plan.documents() * heads * slices, 1, [&](Index begin, Index end) {
        const FlushDenormals scope;
        std::vector<std::pair<Index, Index>> merges;
        for (Index unit = begin; unit < end; ++unit) {
            const Index document = unit / (heads * slices), h = unit / slices % heads, part = unit % slices;
            const Index count = std::min(slice, state_size - part * slice);
            const Index base = (plan.first_slot(document) * heads + h) * state_size + part * slice;
            for (Index i = plan.chunks_in(document) - 2; i >= 1; --i) {
                merges.clear();
                plan.for_each_merge(i, [&](Index left, Index right) { merges.emplace_back(left, right); });
                for (auto merge = merges.rbegin(); merge != merges.rend(); ++merge) {
                    const auto [left, right] = *merge;
                    const T factor = decays.between<T>(plan, document, h, left, right);
                    if (factor == 0) continue;
                    const T* state = states.as<T>() + base + left * heads * state_size;
                    const T* from = gradients.as<T>() + base + right * heads * state_size;
                    T* to = gradients.as<T>() + base + left * heads * state_size;
                    double sum = 0;
                    for (Index e = 0; e < count; e += 256) {
                        const Index part_count = std::min<Index>(256, count - e);
                        sum += static_cast<double>(dot(state + e, from + e, part_count));
                        for (Index x = e; x < e + part_count; ++x) to[x] += factor * from[x];
                    }
                    crossing[static_cast<std::size_t>(((plan.first_slot(document) + left) * heads + h) * slices + part)] =
                        static_cast<double>(factor) * sum;
                }
            }
        }
    });
    return gradients;
}

template <class T>
void backward(const SsdBackward& args) {
    const Plan plan(args);
    const auto* q = static_cast<const T*>(args.q);
    const auto* k = static_cast<const T*>(args.k);
    const auto* v = static_cast<const T*>(args.v);
    const auto* d_o = static_cast<const T*>(args.d_o);
    const auto* level_scales = static_cast<const T*>(args.level_scales);
    auto* dq = static_cast<T*>(args.dq);
    auto* dk = static_cast<T*>(args.dk);
    auto* dv = static_cast<T*>(args.dv);
    auto* dg = static_cast<T*>(args.dg);
    auto* dlevel_scales = static_cast<T*>(args.dlevel_scales);
    const Index K = plan.key_width, V = plan.value_width, C = plan.chunk_size, heads = plan.heads;
    const Index state_size = plan.state_size(), tree_levels = plan.chunk_tree_levels();
    const Decays decays = make_decays(plan, static_cast<const T*>(args.g));
    // Transposed, so that most products of a level are of plain matrices: OpenBLAS is quicker at them.
    const Buffer states = make_states(plan, decays, k, args.k_stride, v, args.v_stride, true);
    const Index slice = 4096, slices = (state_size + slice - 1) / slice;
    std::vector<double> crossing(static_cast<std::size_t>(plan.num_slots() * heads * slices), 0.0);
    const Buffer gradients = make_state_gradients<T>(plan, decays, args, states, slice, crossing);
    // Sum over a chunk's tokens of what a level's bucket gives to o . do: [chunk][head][tree level]
    std::vector<double> received(static_cast<std::size_t>(plan.num_chunks() * heads * tree_levels), 0.0);

    const Index units = plan.num_chunks() * plan.groups;
    parallel_for(0, units, block_grain(units), [&](Index begin, Index end) {
        const FlushDenormals scope;
        const Buffer scratch =
            workspace<T>(C * (4 * C + 5 * K + 4 * V + plan.chunk_levels + 6) + C * std::max(K, V));
        T* scores = scratch.as<T>();           // [C, C]
        T* d_scores = scores + C * C;          // [C, C], summed over the group's heads
        T* masked = d_scores + C * C;          // [C, C]
        T* d_masked = masked + C * C;          // [C, C]
        T* qc = d_masked + C * C;              // [C, K]
        T* kc = qc + C * K;                    // [C, K]
        T* dqc = kc + C * K;                   // [C, K]
        T* dkc = dqc + C * K;                  // [C, K]
        T* vc = dkc + C * K;                   // [C, V]
        T* doc = vc + C * V;                   // [C, V]
        T* dvc = doc + C * V;                  // [C, V]
        T* scaled_v = dvc + C * V;             // [C, V]
        T* product = scaled_v + C * V;         // [C, max(K, V)]
        T* since_start = product + C * std::max(K, V);
        T* to_end = since_start + C;
        T* factor = to_end + C;
        T* scaled_factor = factor + C;
        T* columns = scaled_factor + C;
        T* level_factors = columns + C;        // [chunk_levels, C]
        std::vector<double> dg_chunk(static_cast<std::size_t>(C)), by_row(static_cast<std::size_t>(C));
        std::fill_n(masked, C * C, T{0});
        for (Index unit = begin; unit < end; ++unit) {
            const Index c = unit / plan.groups, group = unit % plan.groups;
            const Chunk& chunk = plan.chunks[static_cast<std::size_t>(c)];
            const Index n = chunk.size, slot_base = plan.first_slot(chunk.document);
            copy_rows(n, K, q + chunk.first * args.q_stride + group * K, args.q_stride, qc, K);
            copy_rows(n, K, k + chunk.first * args.k_stride + group * K, args.k_stride, kc, K);
            blas_gemm(false, true, n, n, K, T{1}, qc, K, kc, K, T{0}, scores, C);
            std::fill_n(d_scores, n * C, T{0});
            std::fill_n(dqc, n * K, T{0});
            std::fill_n(dkc, n * K, T{0});
            for (Index h = group * plan.heads_per_group; h < (group + 1) * plan.heads_per_group; ++h) {
                const double* step = decays.of(plan, chunk, h);
                const Index scale_offset = (chunk.first * heads + h) * plan.levels, scale_stride = heads * plan.levels;
                const T* scale = plan.tree ? level_scales + scale_offset : nullptr;
                T* dscale = plan.tree ? dlevel_scales + scale_offset : nullptr;
                if (plan.tree)
                    for (Index i = 0; i < n; ++i) std::fill_n(dscale + i * scale_stride, plan.levels, T{0});
                copy_rows(n, V, v + chunk.first * args.v_stride + h * V, args.v_stride, vc, V);
                copy_rows(n, V, d_o + (chunk.first * heads + h) * V, heads * V, doc, V);
                std::fill(dg_chunk.begin(), dg_chunk.end(), 0.0);

                // Within the chunk.
                level_decays(plan, step, n, level_factors);
                blas_gemm(false, true, n, n, V, T{1}, doc, V, vc, V, T{0}, d_masked, C);
                mask_scores_backward(plan, n, scores, d_masked, level_factors, scale, masked, d_scores, dscale,
                                     dg_chunk.data(), columns);
                blas_gemm(true, false, n, V, n, T{1}, masked, C, doc, V, T{0}, dvc, V);

                // What later chunks received from this one.
                T* dv_out = dv + chunk.first * args.dv_stride + h * V;
                if (!plan.has_slot(chunk)) {
                    copy_rows(n, V, dvc, V, dv_out, args.dv_stride);
                } else {
                    const T* gradient = gradients.as<T>() + ((slot_base + chunk.index) * heads + h) * state_size;
                    decay_to_end(step, n, to_end);
                    blas_gemm(false, true, n, V, K, T{1}, kc, K, gradient, K, T{0}, product, V);
                    scale_rows(n, V, vc, to_end, scaled_v);
                    double before = 0;
                    for (Index i = 0; i < n; ++i) {
                        const T* row = product + i * V;
                        for (Index x = 0; x < V; ++x) dv_out[i * args.dv_stride + x] = dvc[i * V + x] + to_end[i] * row[x];
                        dg_chunk[static_cast<std::size_t>(i)] += before;
                        before += static_cast<double>(dot(scaled_v + i * V, row, V));
                    }
                    blas_gemm(false, false, n, K, V, T{1}, scaled_v, V, gradient, K, T{1}, dkc, K);
                }

                // What this chunk received from earlier ones.
                std::fill(by_row.begin(), by_row.end(), 0.0);
                decay_since_start(step, n, since_start);
                plan.for_each_source(chunk.index, [&](Index j, Index slot) {
                    const T decay = decays.between<T>(plan, chunk.document, h, slot, chunk.index - 1);
                    if (decay == 0) return;
                    source_factors(plan, chunk, h, j, decay, since_start, level_scales, factor, scaled_factor);
                    blas_gemm(false, false, n, K, V, T{1}, doc, V,
                              states.as<T>() + ((slot_base + slot) * heads + h) * state_size, K, T{0}, product, K);
                    double sum = 0;
                    for (Index i = 0; i < n; ++i) {
                        const T* row = product + i * K;
                        const T inner = dot(qc + i * K, row, K);
                        if (plan.tree) dscale[i * scale_stride + plan.column(plan.chunk_levels + j)] += factor[i] * inner;
                        const auto weighted = static_cast<double>(scaled_factor[i] * inner);
                        by_row[static_cast<std::size_t>(i)] += weighted;
                        sum += weighted;
                        for (Index x = 0; x < K; ++x) dqc[i * K + x] += scaled_factor[i] * row[x];
                    }
                    received[static_cast<std::size_t>((c * heads + h) * tree_levels + j - 1)] = sum;
                });
                double after = 0;
                for (Index i = n - 1; i >= 0; --i) {
                    after += by_row[static_cast<std::size_t>(i)];
                    dg[(chunk.first + i) * heads + h] = static_cast<T>(dg_chunk[static_cast<std::size_t>(i)] + after);
                }
            }
            blas_gemm(false, false, n, K, n, T{1}, d_scores, C, kc, K, T{1}, dqc, K);
            blas_gemm(true, false, n, K, n, T{1}, d_scores, C, qc, K, T{1}, dkc, K);
            copy_rows(n, K, dqc, K, dq + chunk.first * args.dq_stride + group * K, args.dq_stride);
            copy_rows(n, K, dkc, K, dk + chunk.first * args.dk_stride + group * K, args.dk_stride);
        }
    });

    // Pairs of tokens with a whole chunk between them: the same amount for each of its decays.
    parallel_for(0, plan.documents() * heads, 1, [&](Index begin, Index end) {
        const FlushDenormals scope;
        std::vector<double> whole;
        for (Index unit = begin; unit < end; ++unit) {
            const Index document = unit / heads, h = unit % heads, count = plan.chunks_in(document);
            const Index first_chunk = plan.first_chunk[static_cast<std::size_t>(document)];
            whole.assign(static_cast<std::size_t>(count), 0.0);
            for (Index slot = 0; slot + 1 < count; ++slot) {
                // Between a bucket's end and a reader ...
                const Index j = plan.tree ? std::countr_zero(static_cast<std::uint64_t>(slot + 1)) + 1 : 1;
                double after = 0;
                for (Index c = plan.last_reader(document, slot); c > slot; --c) {
                    whole[static_cast<std::size_t>(c)] += after;
                    after += received[static_cast<std::size_t>(((first_chunk + c) * heads + h) * tree_levels + j - 1)];
                }
                // ... and inside a bucket, in the right half of a merge.
                plan.for_each_merge(slot, [&](Index left, Index right) {
                    double sum = 0;
                    for (Index part = 0; part < slices; ++part)
                        sum += crossing[static_cast<std::size_t>(((plan.first_slot(document) + left) * heads + h) * slices + part)];
                    for (Index c = left + 1; c <= right; ++c) whole[static_cast<std::size_t>(c)] += sum;
                });
            }
            for (Index c = 0; c < count; ++c) {
                const Chunk& chunk = plan.chunks[static_cast<std::size_t>(first_chunk + c)];
                for (Index i = 0; i < chunk.size; ++i) {
                    T& value = dg[(chunk.first + i) * heads + h];
                    value = static_cast<T>(static_cast<double>(value) + whole[static_cast<std::size_t>(c)]);
                }
            }
        }
    });
}

// ---- recurrent ----------------------------------------------------------------------------------------------------------

template <class T>
void recurrent(const SsdRecurrent& args) {
    const auto* q = static_cast<const T*>(args.q);
    const auto* k = static_cast<const T*>(args.k);
    const auto* v = static_cast<const T*>(args.v);
    const auto* g = static_cast<const T*>(args.g);
    const auto* level_scales = static_cast<const T*>(args.level_scales);
    auto* o = static_cast<T*>(args.o);
    const Index K = args.key_width, V = args.value_width, heads = args.heads, state_size = K * V;
    const Index level_stride = args.batch * heads * state_size;
    parallel_for(0, args.batch * heads, 1, [&](Index begin, Index end) {
        const FlushDenormals scope;
        for (Index row = begin; row < end; ++row) {
            const Index b = row / heads, h = row % heads, group = h / (heads / args.groups);
            T* state = static_cast<T*>(args.state) + row * state_size;  // of level 0
            for (Index i = 0; i < args.length; ++i) {
                const Index token = b * args.length + i;
                const auto position = static_cast<std::uint64_t>(args.position + i);
                const T* qt = q + token * args.q_stride + group * K;
                const T* kt = k + token * args.k_stride + group * K;
                const T* vt = v + token * args.v_stride + h * V;
                T* ot = o + (token * heads + h) * V;
                const T decay = std::exp(g[token * heads + h]);
                // ot += scale * (decayed state)' q
                const auto read = [&](T* s, T scale) {
                    for (Index x = 0; x < K; ++x) {
                        const T weight = scale * qt[x];
                        for (Index y = 0; y < V; ++y) {
                            s[x * V + y] *= decay;
                            ot[y] += weight * s[x * V + y];
                        }
                    }
                };
                if (level_scales == nullptr) {
                    std::fill_n(ot, V, T{0});
                    for (Index x = 0; x < K; ++x)
                        for (Index y = 0; y < V; ++y) {
                            T& s = state[x * V + y];
                            s = decay * s + kt[x] * vt[y];
                            ot[y] += qt[x] * s;
                        }
                    continue;
                }
                const T* scale = level_scales + (token * heads + h) * args.levels;
                if (position >= 1) {
                    const int full = std::countr_zero(position);  // levels 0 .. full move up
                    T* target = state + (full + 1) * level_stride;
                    std::copy_n(state, state_size, target);
                    for (int level = 1; level <= full; ++level) {
                        T* source = state + level * level_stride;
                        for (Index e = 0; e < state_size; ++e) target[e] += source[e];
                        std::fill_n(source, state_size, T{0});
                    }
                }
                const T own = scale[0] * dot(qt, kt, K);
                for (Index y = 0; y < V; ++y) ot[y] = own * vt[y];
                for (Index x = 0; x < K; ++x)
                    for (Index y = 0; y < V; ++y) state[x * V + y] = kt[x] * vt[y];
                // Token t holds level l >= 1 exactly where bit l-1 of t is set; the other levels are zero.
                for (Index level = 1; (position >> (level - 1)) != 0; ++level)
                    if ((position >> (level - 1)) & 1)
                        read(state + level * level_stride, scale[std::min(level, args.levels - 1)]);
            }
        }
    });
}

}  // namespace

void ssd_forward(const Exec&, const Ssd& args) {
    dispatch_cpu_float("ssd", args.dtype, [&]<class T>(TypeTag<T>) { forward<T>(args); });
}

void ssd_backward(const Exec&, const SsdBackward& args) {
    dispatch_cpu_float("ssd", args.dtype, [&]<class T>(TypeTag<T>) { backward<T>(args); });
}

void ssd_recurrent(const Exec&, const SsdRecurrent& args) {
    dispatch_cpu_float("ssd", args.dtype, [&]<class T>(TypeTag<T>) { recurrent<T>(args); });
}

}  // namespace fenwick::kernels::cpu
