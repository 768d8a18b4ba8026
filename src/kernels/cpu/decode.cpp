// Decoding on the CPU, in float32: as kernels/decode.h says it, one head after another.
#include "kernels/decode.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <vector>

#include "base/parallel.h"
#include "base/random.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/flush_denormals.h"

namespace fenwick::kernels::cpu {
namespace {

using Index = std::int64_t;

void check_dtype(const char* op, DType dtype) {
    FENWICK_CHECK(dtype == DType::float32, "[{}] {} is not available on the CPU; use float32", op, name_of(dtype));
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float silu(float x) { return x * sigmoid(x); }
float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); }

float dot(const float* a, const float* b, Index count) { return cblas_sdot(static_cast<int>(count), a, 1, b, 1); }

// ---- projections -------------------------------------------------------------------------------------------------------

std::vector<float> make_input(const DecodeProjection& a) {
    std::vector<float> x(a.input, a.input + a.rows * a.in);
    if (a.input_kind == DecodeInput::plain) return x;
    const Index slice = a.in / a.groups;
    for (Index row = 0; row < a.rows; ++row) {
        const float* const gate = a.gate != nullptr ? a.gate + row * a.in : nullptr;
        float* const out = x.data() + row * a.in;
        if (a.input_kind == DecodeInput::gate_before)
            for (Index i = 0; i < a.in; ++i) out[i] *= silu(gate[i]);
        for (Index group = 0; group < a.groups; ++group) {
            float* const values = out + group * slice;
            const double squares = std::inner_product(values, values + slice, values, 0.0, std::plus<>(),
                                                      [](double u, double v) { return u * v; });
            const auto scale = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(slice) + a.eps));
            for (Index i = 0; i < slice; ++i) values[i] *= scale * a.norm_weight[(group * slice + i) % a.norm_width];
        }
        if (a.input_kind == DecodeInput::gate_after)
            for (Index i = 0; i < a.in; ++i) out[i] *= silu(gate[i]);
    }
    return x;
}

void finish(const DecodeColumns& part, Index column, Index row, float y) {
    const Index at = row * part.columns + column;
    switch (part.kind) {
        case DecodeOutput::store:
            part.out[at] = y;
            break;
        case DecodeOutput::add:
            part.out[at] += y;
            break;
        case DecodeOutput::swiglu:
            break;  // needs two columns
        case DecodeOutput::convolution: {
            const Index kept = part.width - 1;
            const float* const taps = part.taps + column * part.width;
            float* const tail = part.tail + row * kept * part.columns + column;
            float sum = part.bias != nullptr ? part.bias[column] : 0.0f;
            for (Index i = 0; i < kept; ++i) sum += taps[i] * tail[i * part.columns];
            for (Index i = 0; i + 1 < kept; ++i) tail[i * part.columns] = tail[(i + 1) * part.columns];
            if (kept > 0) tail[(kept - 1) * part.columns] = y;
            part.out[at] = silu(sum + taps[kept] * y);
            break;
        }
        case DecodeOutput::decay:
            part.out[at] = softplus(y + part.step_bias[column]);
            part.log_decay[at] = -std::exp(part.a_log[column]) * part.out[at];
            break;
        case DecodeOutput::level_scales:
            part.out[at] = softplus(part.level_weight[column] * y);
            break;
        case DecodeOutput::sigmoid:
            part.out[at] = sigmoid(y);
            break;
    }
}

}  // namespace

void decode_projection(const Exec&, const DecodeProjection& args) {
    check_dtype("decode_projection", args.dtype);
    const std::vector<float> x = make_input(args);
    const auto* weight = static_cast<const float*>(args.weight);
    for (int p = 0; p < args.parts; ++p) {
        const DecodeColumns& part = args.part[p];
        const bool pairs = part.kind == DecodeOutput::swiglu;
        const Index unit = pairs ? 2 : 1;
        parallel_for(0, part.columns / unit, std::max<Index>(1, 65536 / args.in), [&](Index begin, Index end) {
            const Index count = (end - begin) * unit;
            std::vector<float> y(static_cast<std::size_t>(count));
            for (Index row = 0; row < args.rows; ++row) {
                cblas_sgemv(CblasRowMajor, CblasNoTrans, static_cast<int>(count), static_cast<int>(args.in), 1.0f,
                            weight + begin * unit * args.in, static_cast<int>(args.in), x.data() + row * args.in, 1, 0.0f,
                            y.data(), 1);
                for (Index n = begin; n < end; ++n) {
                    const float* const own = y.data() + (n - begin) * unit;
                    if (pairs)
                        part.out[row * (part.columns / 2) + n] = silu(own[0]) * own[1];
                    else
                        finish(part, n, row, own[0]);
                }
            }
        });
        weight += part.columns * args.in;
    }
}

// ---- states --------------------------------------------------------------------------------------------------------------

void decode_ssd(const Exec&, const DecodeSsd& a) {
    const Index K = a.key_width, V = a.value_width, heads = a.rows * a.heads, level_size = heads * K * V;
    const Index group_keys = a.rows * a.groups * K, per_group = a.heads / a.groups;
    const Index t = *a.position, now = t & 1, next = now ^ 1;
    const Index merged = a.levels > 0 && t > 0 ? std::countr_zero(static_cast<std::uint64_t>(t)) + 1 : 0;
    parallel_for(0, heads, 1, [&](Index begin, Index end) {
        const FlushDenormals scope;
        for (Index head = begin; head < end; ++head) {
            const Index row = head / a.heads, h = head % a.heads, group = row * a.groups + h / per_group;
            const float* const q = a.q + row * a.stride + h / per_group * K;
            const float* const k = a.k + row * a.stride + h / per_group * K;
            const float* const u = a.u + row * a.stride + h * V;
            const float decay = std::exp(a.log_decay[head]);
            float* const state = a.state + head * K * V;
            float* const o = a.o + head * V;
            std::vector<float> v(u, u + V);
            for (float& x : v) x *= a.step[head];
            for (Index j = 0; j < V; ++j) o[j] = a.skip[h] * u[j];
            if (a.levels == 0) {
                for (Index i = 0; i < K; ++i)
                    for (Index j = 0; j < V; ++j) {
                        float& s = state[i * V + j];
                        s = s * decay + k[i] * v[static_cast<std::size_t>(j)];
                        o[j] += q[i] * s;
                    }
                continue;
            }
            const auto scale = [&](Index level) { return a.level_scales[head * a.levels + std::min(level, a.levels - 1)]; };
            const auto factor = [&](Index copy, Index level) -> float& {
                return a.factors[(copy * decode_most_levels + level) * heads + head];
            };
            for (Index level = 0; level < a.level_capacity; ++level) factor(next, level) = 0;
            if (merged > 0) {
                const float* const last_k = a.last_k + now * group_keys + group * K;
                const float* const last_v = a.last_v + (now * heads + head) * V;
                float* const target = state + merged * level_size;
                for (Index i = 0; i < K; ++i)
                    for (Index j = 0; j < V; ++j) target[i * V + j] = last_k[i] * last_v[j];
                for (Index level = 0; level < merged; ++level)
                    if (const float f = factor(now, level); f != 0)
                        for (Index e = 0; e < K * V; ++e) target[e] += f * state[level * level_size + e];
                for (Index e = 0; e < K * V; ++e) target[e] *= decay;
                factor(next, merged) = 1;
                for (Index level = merged + 1; level < a.level_capacity; ++level)
                    factor(next, level) = factor(now, level) * decay;
                for (Index level = merged; level < a.level_capacity; ++level)
                    if (const float f = factor(next, level) * scale(level); f != 0)
                        for (Index i = 0; i < K; ++i)
                            for (Index j = 0; j < V; ++j) o[j] += f * q[i] * state[level * level_size + i * V + j];
            }
            const float own = scale(0) * dot(q, k, K);
            for (Index j = 0; j < V; ++j) o[j] += own * v[static_cast<std::size_t>(j)];
            std::copy(v.begin(), v.end(), a.last_v + (next * heads + head) * V);
            if (h % per_group == 0) std::copy_n(k, K, a.last_k + next * group_keys + group * K);
        }
    });
}

void decode_gated_delta_rule(const Exec&, const DecodeGatedDeltaRule& a) {
    const Index K = a.key_width, V = a.value_width, heads = a.rows * a.heads, level_size = heads * K * V;
    const Index t = *a.position, now = t & 1, next = now ^ 1;
    const Index merged = a.levels > 0 && t > 0 ? std::countr_zero(static_cast<std::uint64_t>(t)) + 1 : 0;
    parallel_for(0, heads, 1, [&](Index begin, Index end) {
        const FlushDenormals scope;
        for (Index head = begin; head < end; ++head) {
            const auto unit = [&](const float* x, double factor) {
                std::vector<float> y(x, x + K);
                const double squares =
                    std::inner_product(x, x + K, x, 0.0, std::plus<>(), [](double p, double r) { return p * r; });
                for (float& value : y) value *= static_cast<float>(factor / std::sqrt(squares + a.eps));
                return y;
            };
            const std::vector<float> q = unit(a.q + head * K, a.q_scale), k = unit(a.k + head * K, 1.0);
            const float* const v = a.v + head * V;
            float* const o = a.o + head * V;
            float* const state = a.state + head * K * V;
            const float decay = std::exp(a.log_decay[head]), beta = a.beta[head];
            std::fill_n(o, V, 0.0f);
            // S <- decay S + k u',  u = beta (v - decay S'k);  o += weight S'q
            const auto advance = [&](float* s, const float* value, float weight) {
                for (Index j = 0; j < V; ++j) {
                    float read = 0, out = 0;
                    for (Index i = 0; i < K; ++i) read += k[static_cast<std::size_t>(i)] * s[i * V + j];
                    const float u = beta * ((value != nullptr ? value[j] : 0.0f) - decay * read);
                    for (Index i = 0; i < K; ++i) {
                        float& x = s[i * V + j];
                        x = decay * x + k[static_cast<std::size_t>(i)] * u;
                        out += q[static_cast<std::size_t>(i)] * x;
                    }
                    o[j] += weight * out;
                }
            };
            if (a.levels == 0) {
                advance(state, v, 1);
                continue;
            }
            const auto scale = [&](Index level) { return a.level_scales[head * a.levels + std::min(level, a.levels - 1)]; };
            if (merged > 0) {
                const float* const last_k = a.last_k + (now * heads + head) * K;
                const float* const last_u = a.last_u + (now * heads + head) * V;
                float* const target = state + merged * level_size;
                for (Index i = 0; i < K; ++i)
                    for (Index j = 0; j < V; ++j) target[i * V + j] = last_k[i] * last_u[j];
                for (Index level = t == a.first_position ? 0 : 1; level < merged; ++level)
                    for (Index e = 0; e < K * V; ++e) target[e] += state[level * level_size + e];
                advance(target, nullptr, scale(merged));
                for (Index level = merged + 1; (t >> (level - 1)) != 0; ++level)
                    if (((t >> (level - 1)) & 1) != 0) advance(state + level * level_size, nullptr, scale(level));
            }
            const float own = scale(0) * beta * dot(q.data(), k.data(), K);
            for (Index j = 0; j < V; ++j) {
                o[j] += own * v[j];
                a.last_u[(next * heads + head) * V + j] = beta * v[j];
            }
            std::copy(k.begin(), k.end(), a.last_k + (next * heads + head) * K);
        }
    });
}

void decode_attention(const Exec&, const DecodeAttention& a) {
    check_dtype("decode_attention", a.dtype);
    const Index D = a.width, half = D / 2, t = *a.position, per_group = a.heads / a.groups;
    const auto rotate = [&](const float* x, float* y) {
        for (Index i = 0; i < half; ++i) {
            const double turns = static_cast<double>(t) * a.turns[i],
                         angle = 2 * std::numbers::pi * (turns - std::rint(turns));
            const auto cosine = static_cast<float>(std::cos(angle)), sine = static_cast<float>(std::sin(angle));
            y[i] = x[i] * cosine - x[i + half] * sine;
            y[i + half] = x[i + half] * cosine + x[i] * sine;
        }
    };
    auto* const keys = static_cast<float*>(a.k_cache);
    auto* const values = static_cast<float*>(a.v_cache);
    const auto entry = [&](Index row, Index key, Index group) { return ((row * a.capacity + key) * a.groups + group) * D; };
    for (Index row = 0; row < a.rows; ++row)
        for (Index group = 0; group < a.groups; ++group) {
            rotate(a.k + (row * a.groups + group) * D, keys + entry(row, t, group));
            std::copy_n(a.v + (row * a.groups + group) * D, D, values + entry(row, t, group));
        }
    parallel_for(0, a.rows * a.heads, 1, [&](Index begin, Index end) {
        std::vector<float> q(static_cast<std::size_t>(D)), weights(static_cast<std::size_t>(t + 1));
        for (Index head = begin; head < end; ++head) {
            const Index row = head / a.heads, group = head % a.heads / per_group;
            rotate(a.q + head * D, q.data());
            const float scale = 1.0f / std::sqrt(static_cast<float>(D));
            for (Index key = 0; key <= t; ++key)
                weights[static_cast<std::size_t>(key)] = scale * dot(q.data(), keys + entry(row, key, group), D);
            const float highest = *std::max_element(weights.begin(), weights.end());
            double total = 0;
            for (float& w : weights) total += w = std::exp(w - highest);
            float* const o = a.o + head * D;
            std::fill_n(o, D, 0.0f);
            for (Index key = 0; key <= t; ++key) {
                const auto weight = static_cast<float>(weights[static_cast<std::size_t>(key)] / total);
                for (Index j = 0; j < D; ++j) o[j] += weight * values[entry(row, key, group) + j];
            }
        }
    });
}

// ---- sampling
// --------------------------------------------------------------------------------------------------------------

namespace {

// -1 where the logits are not finite. `uniform` in [0, 1).
std::int32_t draw(const float* logits, const Sample& a, double uniform) {
    const auto count = static_cast<std::size_t>(a.vocabulary);
    const auto bad = [](float x) { return std::isnan(x) || x == std::numeric_limits<float>::infinity(); };
    if (std::any_of(logits, logits + count, bad)) return -1;
    if (a.temperature == 0) return static_cast<std::int32_t>(std::max_element(logits, logits + count) - logits);
    std::vector<std::int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    const auto likelier = [&](std::int32_t x, std::int32_t y) {
        return logits[x] != logits[y] ? logits[x] > logits[y] : x < y;
    };
    std::size_t kept = count;
    if (a.top_k > 0) kept = std::min(kept, static_cast<std::size_t>(a.top_k));
    // Without top-k and top-p the order does not matter, and sorting a whole vocabulary is most of the work.
    if (kept < count)
        std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(), likelier);
    else if (a.top_p < 1)
        std::sort(order.begin(), order.end(), likelier);
    const float highest = *std::max_element(logits, logits + count);
    std::vector<double> weights(kept);
    double total = 0;
    for (std::size_t i = 0; i < kept; ++i)
        total += weights[i] = std::exp((static_cast<double>(logits[order[i]]) - highest) / a.temperature);
    if (!std::isfinite(total)) return -1;
    if (a.top_p < 1) {
        double reached = 0;
        std::size_t reaching = 0;
        while (reaching < kept && reached < a.top_p * total) reached += weights[reaching++];
        kept = reaching;
        total = reached;
    }
    double left = uniform * total;
    for (std::size_t i = 0; i < kept; ++i) {
        left -= weights[i];
        if (left < 0) return order[i];
    }
    return order[kept - 1];  // rounding
}

}  // namespace

void sample(const Exec&, const Sample& a) {
    const Index n = *a.position - a.first_position;
    for (Index row = 0; row < a.rows; ++row) {
        Random random(a.seed, a.stream);
        random.seek(static_cast<std::uint64_t>(n * a.rows + row));
        const std::int32_t id = draw(a.logits + row * a.vocab, a, random.uniform());
        a.ids[row] = std::max(id, 0);
        a.drawn[n % a.history * a.rows + row] = id;
    }
    ++*a.position;
}

}  // namespace fenwick::kernels::cpu
