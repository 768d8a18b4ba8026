// Channels are contiguous, so loops run over channels and vectorise. Work is cut into tiles of tokens and channels that stay
// in cache; a tile never crosses a document's start.
#include "kernels/causal_conv1d.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {
namespace {

constexpr std::int64_t tile_tokens = 64, tile_channels = 512;

// The document that holds `token`.
std::int64_t document_of(const Sequences& sequences, std::int64_t token) {
    const std::int64_t* end = sequences.offsets + sequences.count + 1;
    return std::upper_bound(sequences.offsets, end, token) - sequences.offsets - 1;
}

// weight [channels, width] as [width, channels]
template <class T>
std::vector<T> transposed(const void* weight, std::int64_t channels, std::int64_t width) {
    std::vector<T> result(static_cast<std::size_t>(channels * width));
    for (std::int64_t c = 0; c < channels; ++c)
        for (std::int64_t i = 0; i < width; ++i) result[i * channels + c] = static_cast<const T*>(weight)[c * width + i];
    return result;
}

// pre[c] = bias[c] + sum_i taps[i][c] x[i][c]; `weight` is transposed and starts at the tile's first channel.
template <class T>
void convolve(T* __restrict pre, std::int64_t count, const T* bias, const T* weight, std::int64_t channels,
              const T* const* rows, std::int64_t width) {
    if (width == 4) {
        const T *w0 = weight, *w1 = w0 + channels, *w2 = w1 + channels, *w3 = w2 + channels;
        const T *x0 = rows[0], *x1 = rows[1], *x2 = rows[2], *x3 = rows[3];
        for (std::int64_t c = 0; c < count; ++c)
            pre[c] = bias[c] + w0[c] * x0[c] + w1[c] * x1[c] + w2[c] * x2[c] + w3[c] * x3[c];
        return;
    }
    std::copy(bias, bias + count, pre);
    for (std::int64_t i = 0; i < width; ++i) {
        const T *w = weight + i * channels, *x = rows[i];
        for (std::int64_t c = 0; c < count; ++c) pre[c] += w[c] * x[c];
    }
}

// sums[i][c] += dp[c] x[i][c] for i < width, sums[width][c] += dp[c]: one token's share of dweight and dbias.
template <class T>
void add_to_sums(T* sums, std::int64_t count, std::int64_t channels, const T* dp, const T* const* rows, std::int64_t width) {
    for (std::int64_t i = 0; i < width; ++i) {
        const T* x = rows[i];
        assign(sums + i * channels, count, true, [=](std::int64_t c) { return dp[c] * x[c]; });
    }
    assign(sums + width * channels, count, true, [=](std::int64_t c) { return dp[c]; });
}

template <class T>
std::vector<T> bias_or_zeros(const void* bias, std::int64_t channels) {
    const auto* values = static_cast<const T*>(bias);
    return values == nullptr ? std::vector<T>(static_cast<std::size_t>(channels), T{0}) : std::vector<T>(values, values + channels);
}

}  // namespace

void causal_conv1d_forward(const Exec&, const CausalConv1d& args) {
    dispatch_cpu_float("causal_conv1d", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t channels = args.channels, width = args.width, tokens = args.sequences.num_tokens();
        const auto* x = static_cast<const T*>(args.x);
        auto* state = static_cast<T*>(args.state);
        const auto weight = transposed<T>(args.weight, channels, width);
        const auto bias = bias_or_zeros<T>(args.bias, channels);
        const std::vector<T> zeros(tile_channels, T{0});
        parallel_for(0, tokens, tile_tokens, [&](std::int64_t begin, std::int64_t end) {
            std::vector<const T*> rows(static_cast<std::size_t>(width));
            for (std::int64_t first = 0; first < channels; first += tile_channels) {
                const std::int64_t count = std::min(tile_channels, channels - first);
                std::int64_t document = document_of(args.sequences, begin);
                for (std::int64_t t = begin; t < end; ++t) {
                    if (t == args.sequences.offsets[document + 1]) ++document;
                    const std::int64_t position = t - args.sequences.offsets[document];
                    for (std::int64_t i = 0; i < width; ++i) {
                        const std::int64_t source = position - (width - 1) + i;  // in the document
                        rows[static_cast<std::size_t>(i)] =
                            source >= 0 ? x + (t - (width - 1) + i) * args.x_stride + first
                            : state != nullptr ? state + (document * (width - 1) + source + width - 1) * channels + first
                                               : zeros.data();
                    }
                    T* y = static_cast<T*>(args.y) + t * args.y_stride + first;
                    convolve(y, count, bias.data() + first, weight.data() + first, channels, rows.data(), width);
                    for (std::int64_t c = 0; c < count; ++c) y[c] = silu_of(y[c]);
                }
            }
        });
        if (state == nullptr) return;
        for (std::int64_t document = 0; document < args.sequences.count; ++document) {
            const std::int64_t length = args.sequences.length(document), start = args.sequences.offsets[document];
            T* rows = state + document * (width - 1) * channels;
            for (std::int64_t j = 0; j < width - 1; ++j) {
                const std::int64_t source = length - (width - 1) + j;  // in the document; negative: in the old state
                const T* from = source >= 0 ? x + (start + source) * args.x_stride : rows + (j + length) * channels;
                std::copy(from, from + channels, rows + j * channels);
            }
        }
    });
}

// With p the pre-activation and dp = dy silu'(p):
// dx[s] = sum_i w[i] dp[s + width-1 - i], dw[i] = sum_t dp[t] x[t - (width-1) + i], dbias = sum_t dp[t].
// A tile recomputes p for its own tokens and for the width-1 tokens after it.
void causal_conv1d_backward(const Exec&, const CausalConv1dBackward& args) {
    dispatch_cpu_float("causal_conv1d", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t channels = args.channels, width = args.width, tokens = args.sequences.num_tokens();
        const auto* x = static_cast<const T*>(args.x);
        const auto weight = transposed<T>(args.weight, channels, width);
        const auto bias = bias_or_zeros<T>(args.bias, channels);
        const std::vector<T> zeros(tile_channels, T{0});
        // Sums: rows 0 .. width-1 are dweight transposed, row `width` is dbias.
        const auto sums = sum_over_rows<T>(tokens, channels * (width + 1), [&](std::int64_t begin, std::int64_t end, T* partial) {
            std::vector<const T*> rows(static_cast<std::size_t>(width));
            std::vector<T> scratch(static_cast<std::size_t>((tile_tokens + width - 1) * tile_channels)), sum(tile_channels);
            for (std::int64_t first = 0; first < channels; first += tile_channels) {
                const std::int64_t count = std::min(tile_channels, channels - first);
                std::int64_t document = document_of(args.sequences, begin);
                for (std::int64_t tile = begin; tile < end;) {
                    if (tile == args.sequences.offsets[document + 1]) ++document;
                    const std::int64_t document_begin = args.sequences.offsets[document];
                    const std::int64_t document_end = args.sequences.offsets[document + 1];
                    const std::int64_t tile_end = std::min({tile + tile_tokens, end, document_end});
                    const std::int64_t reach = std::min(tile_end + width - 1, document_end);  // dp is needed up to here
                    for (std::int64_t t = tile; t < reach; ++t) {
                        for (std::int64_t i = 0; i < width; ++i) {
                            const std::int64_t source = t - (width - 1) + i;
                            rows[static_cast<std::size_t>(i)] =
                                source >= document_begin ? x + source * args.x_stride + first : zeros.data();
                        }
                        T* dp = scratch.data() + (t - tile) * tile_channels;
                        const T* dy = static_cast<const T*>(args.dy) + t * args.dy_stride + first;
                        convolve(dp, count, bias.data() + first, weight.data() + first, channels, rows.data(), width);
                        for (std::int64_t c = 0; c < count; ++c) dp[c] = dy[c] * silu_slope(dp[c], sigmoid_of(dp[c]));
                        if (t >= tile_end) continue;
                        add_to_sums(partial + first, count, channels, dp, rows.data(), width);
                    }
                    for (std::int64_t s = tile; s < tile_end; ++s) {
                        T* dx = static_cast<T*>(args.dx) + s * args.dx_stride + first;
                        for (std::int64_t i = 0; i < width; ++i) {
                            const std::int64_t t = s + width - 1 - i;
                            rows[static_cast<std::size_t>(i)] =
                                t < reach ? scratch.data() + (t - tile) * tile_channels : zeros.data();
                        }
                        T* to = args.accumulate_dx ? sum.data() : dx;
                        convolve(to, count, zeros.data(), weight.data() + first, channels, rows.data(), width);
                        if (args.accumulate_dx) assign(dx, count, true, [to](std::int64_t c) { return to[c]; });
                    }
                    tile = tile_end;
                }
            }
        }, tile_tokens);
        auto* dweight = static_cast<T*>(args.dweight);
        for (std::int64_t c = 0; c < channels; ++c)
            for (std::int64_t i = 0; i < width; ++i)
                dweight[c * width + i] = sums[i * channels + c] + (args.accumulate_dweight ? dweight[c * width + i] : T{0});
        if (args.dbias != nullptr) store_sums(sums.data() + width * channels, channels, args.dbias, args.accumulate_dbias);
    });
}

}  // namespace fenwick::kernels::cpu
