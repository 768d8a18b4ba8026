// The slow twin of kernels/ssd.h: the sums of the definition, O(T^2), in double, with the gradients of every input.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/levels.h"

namespace fenwick::test {

// All arrays dense, as in kernels/ssd.h. levels == 0: the linear operator.
struct SsdProblem {
    std::vector<std::int64_t> offsets;  // of the documents, offsets[0] == 0
    std::int64_t heads = 1, groups = 1, key_width = 1, value_width = 1, levels = 0;
    std::vector<double> q, k, v, g, level_scales, d_o;

    std::int64_t num_tokens() const { return offsets.back(); }
};

struct SsdSolution {
    std::vector<double> o, dq, dk, dv, dg, dlevel_scales;
};

inline SsdSolution reference_ssd(const SsdProblem& p) {
    const std::int64_t tokens = p.num_tokens(), H = p.heads, G = p.groups, K = p.key_width, V = p.value_width, L = p.levels;
    const auto at = [](auto& values, std::int64_t i) -> auto& { return values[static_cast<std::size_t>(i)]; };
    SsdSolution out;
    out.o.assign(static_cast<std::size_t>(tokens * H * V), 0);
    out.dq.assign(static_cast<std::size_t>(tokens * G * K), 0);
    out.dk = out.dq;
    out.dv = out.o;
    out.dg.assign(static_cast<std::size_t>(tokens * H), 0);
    out.dlevel_scales.assign(static_cast<std::size_t>(tokens * H * L), 0);
    const bool gradients = !p.d_o.empty();
    for (std::size_t document = 0; document + 1 < p.offsets.size(); ++document)
        for (std::int64_t h = 0; h < H; ++h) {
            const std::int64_t group = h / (H / G), first = p.offsets[document];
            for (std::int64_t t = first; t < p.offsets[document + 1]; ++t) {
                double log_decay = 0;  // sum of g over s+1 .. t
                double carried = 0;    // sum over s' <= s of the pairs' gradient, for dg
                std::vector<double> pair(static_cast<std::size_t>(t - first + 1));
                for (std::int64_t s = t; s >= first; --s) {
                    const std::int64_t level = std::min<std::int64_t>(
                        kernels::level_of(static_cast<std::uint64_t>(t - first), static_cast<std::uint64_t>(s - first)), L - 1);
                    const double scale = L > 0 ? at(p.level_scales, (t * H + h) * L + level) : 1.0;
                    const double decay = std::exp(log_decay);
                    double score = 0;
                    for (std::int64_t x = 0; x < K; ++x)
                        score += at(p.q, (t * G + group) * K + x) * at(p.k, (s * G + group) * K + x);
                    for (std::int64_t y = 0; y < V; ++y)
                        at(out.o, (t * H + h) * V + y) += scale * decay * score * at(p.v, (s * H + h) * V + y);
                    log_decay += at(p.g, s * H + h);
                    if (!gradients) continue;
                    double inner = 0;  // v_s . do_t
                    for (std::int64_t y = 0; y < V; ++y)
                        inner += at(p.v, (s * H + h) * V + y) * at(p.d_o, (t * H + h) * V + y);
                    for (std::int64_t y = 0; y < V; ++y)
                        at(out.dv, (s * H + h) * V + y) += scale * decay * score * at(p.d_o, (t * H + h) * V + y);
                    for (std::int64_t x = 0; x < K; ++x) {
                        at(out.dq, (t * G + group) * K + x) += scale * decay * inner * at(p.k, (s * G + group) * K + x);
                        at(out.dk, (s * G + group) * K + x) += scale * decay * inner * at(p.q, (t * G + group) * K + x);
                    }
                    if (L > 0) at(out.dlevel_scales, (t * H + h) * L + level) += decay * score * inner;
                    at(pair, s - first) = scale * decay * score * inner;
                }
                // The pair (t, s) decays by g of the tokens s+1 .. t.
                for (std::int64_t r = first + 1; gradients && r <= t; ++r) {
                    carried += at(pair, r - 1 - first);
                    at(out.dg, r * H + h) += carried;
                }
            }
        }
    return out;
}

}  // namespace fenwick::test
