// The gated delta rule from its definition, slowly, in double: the oracle of every faster form.
//
// Written out, o_t = sum_s level_scales[t, level(t,s)] c_ts v_s with
//   c_ts = beta_s (x_s . k_s),   x_t = q_t,   x_{s-1} = exp(g_s) (x_s - beta_s (x_s . k_s) k_s):
// the query of token t carried backwards through the transitions. No states, no chunks, no merging of levels.
// The gradients follow the same chain in the other direction. O(T^2 (K + V)).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/random.h"
#include "kernels/levels.h"

namespace fenwick::test {

struct ReferenceGatedDeltaRule {
    std::int64_t heads = 1, key_width = 1, value_width = 1;
    std::int64_t levels = 0;                // 0: linear
    std::vector<std::int64_t> offsets;      // documents, as kernels::Sequences
    std::vector<double> q, k, v;            // [tokens, heads, width]
    std::vector<double> g, beta;            // [tokens, heads]
    std::vector<double> level_scales;       // [tokens, heads, levels]
    std::vector<double> o;                  // after forward()
    std::vector<double> dq, dk, dv, dg, dbeta, dlevel_scales;  // after backward()

    std::int64_t tokens() const { return offsets.back(); }

    // Normal queries and values, keys of length 1, beta in (0, 2), level scales of both signs around 0.5, and g around
    // -decay (exactly 0 where decay is 0).
    static ReferenceGatedDeltaRule random(std::vector<std::int64_t> offsets, std::int64_t heads, std::int64_t key_width,
                                          std::int64_t value_width, std::int64_t levels, std::uint64_t seed,
                                          double decay = 0.1) {
        ReferenceGatedDeltaRule x;
        x.heads = heads, x.key_width = key_width, x.value_width = value_width, x.levels = levels;
        x.offsets = std::move(offsets);
        Random numbers(seed, 7);
        const auto normal = [&](std::int64_t count, double mean, double deviation) {
            std::vector<double> values(static_cast<std::size_t>(count));
            for (auto& value : values) value = mean + deviation * numbers.normal();
            return values;
        };
        const std::int64_t rows = x.tokens() * heads;
        x.q = normal(rows * key_width, 0, 1), x.k = normal(rows * key_width, 0, 1), x.v = normal(rows * value_width, 0, 1);
        for (std::int64_t row = 0; row < rows; ++row) {
            double squares = 1e-6;
            double* key = x.k.data() + row * key_width;
            for (std::int64_t i = 0; i < key_width; ++i) squares += key[i] * key[i];
            for (std::int64_t i = 0; i < key_width; ++i) key[i] /= std::sqrt(squares);
        }
        x.g = normal(rows, 0, decay), x.beta = normal(rows, 0, 1), x.level_scales = normal(rows * levels, 0.5, 1);
        for (auto& g : x.g) g = -decay * 0.2 - std::abs(g);
        for (auto& beta : x.beta) beta = 2 / (1 + std::exp(-beta));
        return x;
    }

    void forward() { run({}); }
    void backward(const std::vector<double>& d_o) { run(d_o); }  // computes o, too

private:
    void run(const std::vector<double>& d_o) {
        const std::int64_t K = key_width, V = value_width, H = heads;
        o.assign(v.size(), 0.0);
        const bool gradients = !d_o.empty();
        if (gradients) {
            dq.assign(q.size(), 0.0), dk.assign(k.size(), 0.0), dv.assign(v.size(), 0.0);
            dg.assign(g.size(), 0.0), dbeta.assign(beta.size(), 0.0), dlevel_scales.assign(level_scales.size(), 0.0);
        }
        std::vector<double> x, dx(static_cast<std::size_t>(K));  // x: x_s of one t, for s = t, t - 1, .., 0
        for (std::size_t document = 0; document + 1 < offsets.size(); ++document)
            for (std::int64_t h = 0; h < H; ++h)
                for (std::int64_t t = 0, length = offsets[document + 1] - offsets[document]; t < length; ++t) {
                    const auto row = [&](std::int64_t s) { return (offsets[document] + s) * H + h; };
                    const auto scale_index = [&](std::int64_t s) {
                        const auto level = kernels::level_of(static_cast<std::uint64_t>(t), static_cast<std::uint64_t>(s));
                        return row(t) * levels + std::min<std::int64_t>(level, levels - 1);
                    };
                    const auto dot = [](const double* a, const double* b, std::int64_t count) {
                        double sum = 0;
                        for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
                        return sum;
                    };
                    x.resize(static_cast<std::size_t>((t + 2) * K));
                    std::copy_n(q.data() + row(t) * K, K, x.data());
                    double* ot = o.data() + row(t) * V;
                    for (std::int64_t s = t; s >= 0; --s) {
                        const double *xs = x.data() + (t - s) * K, *ks = k.data() + row(s) * K, *vs = v.data() + row(s) * V;
                        double* next = x.data() + (t - s + 1) * K;
                        const double c = at(beta, row(s)) * dot(xs, ks, K), alpha = std::exp(at(g, row(s)));
                        const double scale = levels > 0 ? at(level_scales, scale_index(s)) : 1.0;
                        for (std::int64_t j = 0; j < V; ++j) ot[j] += scale * c * vs[j];
                        for (std::int64_t i = 0; i < K; ++i) next[i] = alpha * (xs[i] - c * ks[i]);
                    }
                    if (!gradients) continue;
                    const double* d_ot = d_o.data() + row(t) * V;
                    std::fill(dx.begin(), dx.end(), 0.0);  // gradient of x_{s-1}; nothing reads x_{-1}
                    for (std::int64_t s = 0; s <= t; ++s) {
                        const double *xs = x.data() + (t - s) * K, *ks = k.data() + row(s) * K, *vs = v.data() + row(s) * V;
                        const double dot_xk = dot(xs, ks, K), beta_s = at(beta, row(s)), c = beta_s * dot_xk;
                        const double alpha = std::exp(at(g, row(s)));
                        const double read = dot(d_ot, vs, V);
                        const double scale = levels > 0 ? at(level_scales, scale_index(s)) : 1.0;
                        if (levels > 0) at(dlevel_scales, scale_index(s)) += c * read;
                        for (std::int64_t j = 0; j < V; ++j) at(dv, row(s) * V + j) += scale * c * d_ot[j];
                        at(dg, row(s)) += dot(dx.data(), xs + K, K);
                        const double dc = scale * read - alpha * dot(dx.data(), ks, K);
                        at(dbeta, row(s)) += dc * dot_xk;
                        for (std::int64_t i = 0; i < K; ++i) {
                            const double w = alpha * at(dx, i);
                            at(dk, row(s) * K + i) += dc * beta_s * xs[i] - c * w;
                            at(dx, i) = w + dc * beta_s * ks[i];
                        }
                    }
                    for (std::int64_t i = 0; i < K; ++i) at(dq, row(t) * K + i) += at(dx, i);
                }
    }
    static double& at(std::vector<double>& values, std::int64_t i) { return values[static_cast<std::size_t>(i)]; }
};

}  // namespace fenwick::test
