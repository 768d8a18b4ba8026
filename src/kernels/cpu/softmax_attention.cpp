// Tiles of queries and keys through BLAS, a running maximum and sum a row (the online softmax of Milakov & Gimelshein,
// arXiv 1805.02867, as in FlashAttention). Nothing of size T^2 is kept: backward forms the scores again, tile by tile.
#include "kernels/softmax_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/memory.h"
#include "base/parallel.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {
namespace {

constexpr std::int64_t tile = 128;  // queries and keys of a tile

// x = exp(x - shift); returns the sum.
template <class T>
T exp_row(T* x, std::int64_t count, T shift) {
    for (std::int64_t i = 0; i < count; ++i) x[i] = fast_exp(x[i] - shift);
    return lane_sum<T>(count, [x](std::int64_t i) { return x[i]; });
}

template <class T>
T scale_of(std::int64_t width) {
    return static_cast<T>(1.0 / std::sqrt(static_cast<double>(width)));
}

// `rows` queries, the first of which stands at position `first`, attend to keys 0 .. first + row. One head.
// o [rows, width] and lse [rows] (may be null) have strides of their own.
template <class T>
void attend(const T* q, std::int64_t q_stride, std::int64_t rows, std::int64_t first, const T* k, std::int64_t k_stride, const T* v,
            std::int64_t v_stride, std::int64_t width, T* o, std::int64_t o_stride, T* lse, std::int64_t lse_stride) {
    std::vector<T> scores(static_cast<std::size_t>(rows * tile)), sum(static_cast<std::size_t>(rows), T{0});
    std::vector<T> maximum(static_cast<std::size_t>(rows), -std::numeric_limits<T>::infinity());
    const std::int64_t keys = first + rows;
    for (std::int64_t start = 0; start < keys; start += tile) {
        const std::int64_t columns = std::min(tile, keys - start);
        T* s = scores.data();
        blas_gemm(false, true, rows, columns, width, scale_of<T>(width), q, q_stride, k + start * k_stride, k_stride, T{0}, s, tile);
        for (std::int64_t i = 0; i < rows; ++i) {
            T* row = s + i * tile;
            T* out = o + i * o_stride;
            const std::int64_t seen = std::clamp<std::int64_t>(first + i + 1 - start, 0, columns);
            std::fill(row + seen, row + columns, T{0});
            if (seen == 0) continue;  // not in the first tile: key 0 is seen by all
            auto& m = maximum[static_cast<std::size_t>(i)];
            auto& l = sum[static_cast<std::size_t>(i)];
            const T higher = std::max(m, lane_max(seen, row));
            const T old = start == 0 ? T{0} : std::exp(m - higher);
            l = l * old + exp_row(row, seen, higher);
            m = higher;
            if (start > 0 && old != T{1})
                for (std::int64_t c = 0; c < width; ++c) out[c] *= old;
        }
        blas_gemm(false, false, rows, width, columns, T{1}, s, tile, v + start * v_stride, v_stride, start == 0 ? T{0} : T{1}, o,
                  o_stride);
    }
    for (std::int64_t i = 0; i < rows; ++i) {
        const T l = sum[static_cast<std::size_t>(i)];
        for (std::int64_t c = 0; c < width; ++c) o[i * o_stride + c] /= l;
        if (lse != nullptr) lse[i * lse_stride] = maximum[static_cast<std::size_t>(i)] + std::log(l);
    }
}

// One tile of queries of one document.
struct QueryTile {
    std::int64_t document_start, first, rows;  // first: from the document's start
};

std::vector<QueryTile> query_tiles(const Sequences& sequences) {
    std::vector<QueryTile> tiles;
    for (std::int64_t d = 0; d < sequences.count; ++d)
        for (std::int64_t first = 0; first < sequences.length(d); first += tile)
            tiles.push_back({sequences.offsets[d], first, std::min(tile, sequences.length(d) - first)});
    return tiles;
}

// All gradients of one head of one document of `length` tokens. Outputs are overwritten, tile by tile: the first key tile
// opens every dq, the diagonal query tile opens its dk and dv.
template <class T>
void attend_backward(std::int64_t length, std::int64_t width, const T* q, std::int64_t q_stride, const T* k, std::int64_t k_stride,
                     const T* v, std::int64_t v_stride, const T* o, const T* d_o, std::int64_t o_stride, const T* lse,
                     std::int64_t lse_stride, T* dq, std::int64_t dq_stride, T* dk, std::int64_t dk_stride, T* dv,
                     std::int64_t dv_stride) {
    const T scale = scale_of<T>(width);
    std::vector<T> delta(static_cast<std::size_t>(length));  // o . do of every row: what the softmax's backward subtracts
    for (std::int64_t t = 0; t < length; ++t) {
        const T* orow = o + t * o_stride;
        const T* drow = d_o + t * o_stride;
        delta[static_cast<std::size_t>(t)] = lane_sum<T>(width, [=](std::int64_t c) { return orow[c] * drow[c]; });
    }
    std::vector<T> probabilities(static_cast<std::size_t>(tile * tile)), gradients(static_cast<std::size_t>(tile * tile));
    T* p = probabilities.data();
    T* ds = gradients.data();
    for (std::int64_t start = 0; start < length; start += tile) {
        const std::int64_t columns = std::min(tile, length - start);
        for (std::int64_t first = start; first < length; first += tile) {
            const std::int64_t rows = std::min(tile, length - first);
            blas_gemm(false, true, rows, columns, width, scale, q + first * q_stride, q_stride, k + start * k_stride, k_stride, T{0},
                      p, tile);
            blas_gemm(false, true, rows, columns, width, T{1}, d_o + first * o_stride, o_stride, v + start * v_stride, v_stride, T{0},
                      ds, tile);
            for (std::int64_t i = 0; i < rows; ++i) {
                T* pr = p + i * tile;
                T* dr = ds + i * tile;
                const std::int64_t seen = std::min(first + i + 1 - start, columns);
                const T shift = lse[(first + i) * lse_stride], mean = delta[static_cast<std::size_t>(first + i)];
                for (std::int64_t j = 0; j < seen; ++j) {
                    // The scores are formed by the same product as in forward, so this exponent is above 0 only by rounding.
                    pr[j] = fast_exp(std::min(pr[j] - shift, T{0}));
                    dr[j] = pr[j] * (dr[j] - mean);
                }
                std::fill(pr + seen, pr + columns, T{0});
                std::fill(dr + seen, dr + columns, T{0});
            }
            const T add_key = first == start ? T{0} : T{1}, add_query = start == 0 ? T{0} : T{1};
            blas_gemm(true, false, columns, width, rows, T{1}, p, tile, d_o + first * o_stride, o_stride, add_key,
                      dv + start * dv_stride, dv_stride);
            blas_gemm(true, false, columns, width, rows, scale, ds, tile, q + first * q_stride, q_stride, add_key,
                      dk + start * dk_stride, dk_stride);
            blas_gemm(false, false, rows, width, columns, scale, ds, tile, k + start * k_stride, k_stride, add_query,
                      dq + first * dq_stride, dq_stride);
        }
    }
}

// to [tokens, groups, width] = sum over the heads of each group of from [tokens, heads, width], in the order of the heads
template <class T>
void sum_heads(std::int64_t tokens, std::int64_t heads, std::int64_t groups, std::int64_t width, const T* from, T* to,
               std::int64_t to_stride) {
    const std::int64_t share = heads / groups;
    parallel_for(0, tokens, std::max<std::int64_t>(1, 16384 / (heads * width)), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t)
            for (std::int64_t h = 0; h < heads; ++h) {
                const T* fr = from + (t * heads + h) * width;
                T* tr = to + t * to_stride + h / share * width;
                if (h % share == 0) std::copy(fr, fr + width, tr);
                else
                    for (std::int64_t c = 0; c < width; ++c) tr[c] += fr[c];
            }
    });
}

}  // namespace

void softmax_attention_forward(const Exec&, const SoftmaxAttention& args) {
    dispatch_cpu_float("softmax_attention", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* q = static_cast<const T*>(args.q);
        const auto* k = static_cast<const T*>(args.k);
        const auto* v = static_cast<const T*>(args.v);
        auto* o = static_cast<T*>(args.o);
        auto* lse = static_cast<T*>(args.lse);
        const std::int64_t heads = args.heads, share = args.heads / args.groups, width = args.width;
        const auto tiles = query_tiles(args.sequences);
        parallel_for(0, static_cast<std::int64_t>(tiles.size()) * heads, 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                const QueryTile& part = tiles[static_cast<std::size_t>(i / heads)];
                const std::int64_t h = i % heads, token = part.document_start + part.first;
                attend(q + token * args.q_stride + h * width, args.q_stride, part.rows, part.first,
                       k + part.document_start * args.k_stride + h / share * width, args.k_stride,
                       v + part.document_start * args.v_stride + h / share * width, args.v_stride, width,
                       o + (token * heads + h) * width, heads * width, lse + token * heads + h, heads);
            }
        });
    });
}

void softmax_attention_backward(const Exec&, const SoftmaxAttentionBackward& args) {
    dispatch_cpu_float("softmax_attention", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* q = static_cast<const T*>(args.q);
        const auto* k = static_cast<const T*>(args.k);
        const auto* v = static_cast<const T*>(args.v);
        const auto* o = static_cast<const T*>(args.o);
        const auto* d_o = static_cast<const T*>(args.d_o);
        const auto* lse = static_cast<const T*>(args.lse);
        auto* dq = static_cast<T*>(args.dq);
        auto* dk = static_cast<T*>(args.dk);
        auto* dv = static_cast<T*>(args.dv);
        const std::int64_t heads = args.heads, groups = args.groups, share = heads / groups, width = args.width;
        const std::int64_t tokens = args.sequences.num_tokens(), dense = heads * width;
        // Heads of one group each write a gradient of their own, summed afterwards in their order: parallel and repeatable.
        const std::size_t shared_bytes = share > 1 ? static_cast<std::size_t>(tokens * dense) * sizeof(T) : 0;
        const Buffer shared_dk(cpu_device, shared_bytes, MemoryKind::workspace);
        const Buffer shared_dv(cpu_device, shared_bytes, MemoryKind::workspace);
        T* const head_dk = share > 1 ? shared_dk.as<T>() : dk;
        T* const head_dv = share > 1 ? shared_dv.as<T>() : dv;
        const std::int64_t dk_stride = share > 1 ? dense : args.dk_stride, dv_stride = share > 1 ? dense : args.dv_stride;
        parallel_for(0, args.sequences.count * heads, 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                const std::int64_t h = i % heads, token = args.sequences.offsets[i / heads], column = h * width;
                attend_backward(args.sequences.length(i / heads), width, q + token * args.q_stride + column, args.q_stride,
                                k + token * args.k_stride + h / share * width, args.k_stride,
                                v + token * args.v_stride + h / share * width, args.v_stride, o + token * dense + column,
                                d_o + token * dense + column, dense, lse + token * heads + h, heads,
                                dq + token * args.dq_stride + column, args.dq_stride, head_dk + token * dk_stride + column, dk_stride,
                                head_dv + token * dv_stride + column, dv_stride);
            }
        });
        if (share > 1) {
            sum_heads(tokens, heads, groups, width, head_dk, dk, args.dk_stride);
            sum_heads(tokens, heads, groups, width, head_dv, dv, args.dv_stride);
        }
    });
}

void softmax_attention_cached(const Exec&, const SoftmaxAttentionCached& args) {
    dispatch_cpu_float("softmax_attention_cached", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* q = static_cast<const T*>(args.q);
        const auto* k = static_cast<const T*>(args.k_cache);
        const auto* v = static_cast<const T*>(args.v_cache);
        auto* o = static_cast<T*>(args.o);
        const std::int64_t heads = args.heads, share = args.heads / args.groups, width = args.width, dense = heads * width;
        const std::int64_t stride = args.groups * width, tiles = (args.length + tile - 1) / tile;
        parallel_for(0, args.batch * tiles * heads, 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                const std::int64_t h = i % heads, first = i / heads % tiles * tile, row = i / (heads * tiles);
                const std::int64_t token = row * args.length + first, cache = row * args.capacity * stride + h / share * width;
                attend(q + token * args.q_stride + h * width, args.q_stride, std::min(tile, args.length - first),
                       args.position + first, k + cache, stride, v + cache, stride, width, o + token * dense + h * width, dense,
                       static_cast<T*>(nullptr), std::int64_t{0});
            }
        });
    });
}

}  // namespace fenwick::kernels::cpu
