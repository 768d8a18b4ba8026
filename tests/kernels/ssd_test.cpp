#include "kernels/ssd.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "base/parallel.h"
#include "support/random_tensor.h"
#include "support/reference_ssd.h"

namespace fenwick {
namespace {

using test::random_tensor;
using test::reference_ssd;
using test::rms_ratio;
using test::SsdProblem;
using test::SsdSolution;

struct Sizes {
    std::vector<std::int64_t> lengths;  // of the documents
    std::int64_t heads = 2, groups = 1, key_width = 4, value_width = 3;
    std::int64_t levels = 0;  // -1: as many as the longest document needs
};

SsdProblem random_problem(const Sizes& sizes, std::int64_t seed, double decay = 0.1) {
    SsdProblem p;
    p.offsets = {0};
    for (auto length : sizes.lengths) p.offsets.push_back(p.offsets.back() + length);
    p.heads = sizes.heads;
    p.groups = sizes.groups;
    p.key_width = sizes.key_width;
    p.value_width = sizes.value_width;
    const auto longest = static_cast<std::uint64_t>(*std::max_element(sizes.lengths.begin(), sizes.lengths.end()));
    p.levels = sizes.levels < 0 ? kernels::levels_needed(longest) : sizes.levels;
    const std::int64_t tokens = p.num_tokens();
    const auto values = [&](std::int64_t count, std::int64_t i) {
        return random_tensor({count}, static_cast<std::uint64_t>(10 * seed + i)).to_vector<double>();
    };
    p.q = values(tokens * p.groups * p.key_width, 1);
    p.k = values(tokens * p.groups * p.key_width, 2);
    p.v = values(tokens * p.heads * p.value_width, 3);
    p.g = values(tokens * p.heads, 4);
    for (auto& g : p.g) g = -decay * std::abs(g);
    p.level_scales = values(tokens * p.heads * p.levels, 5);  // of either sign
    p.d_o = values(tokens * p.heads * p.value_width, 6);
    return p;
}

// Rows of `width` elements at a distance of width + gap, in a buffer full of NaN.
template <class T>
struct Strided {
    std::vector<T> data;
    std::int64_t width, stride;

    Strided(std::int64_t rows, std::int64_t columns, std::int64_t gap)
        : data(static_cast<std::size_t>(rows * (columns + gap)), std::numeric_limits<T>::quiet_NaN()),
          width(columns), stride(columns + gap) {}
    Strided(const std::vector<double>& dense, std::int64_t columns, std::int64_t gap)
        : Strided(static_cast<std::int64_t>(dense.size()) / columns, columns, gap) {
        for (std::size_t i = 0; i < dense.size(); ++i) data[index(i)] = static_cast<T>(dense[i]);
    }
    std::size_t index(std::size_t i) const {
        const auto w = static_cast<std::size_t>(width);
        return i / w * static_cast<std::size_t>(stride) + i % w;
    }
    std::vector<double> dense() const {
        std::vector<double> out(data.size() / static_cast<std::size_t>(stride) * static_cast<std::size_t>(width));
        for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<double>(data[index(i)]);
        return out;
    }
};

// Runs the kernel, with q, k, v and their gradients as slices of wider arrays.
template <class T>
SsdSolution run(const SsdProblem& p, std::int64_t chunk_size, std::int64_t gap = 3) {
    const std::int64_t tokens = p.num_tokens(), keys = p.groups * p.key_width, values = p.heads * p.value_width;
    const DType dtype = dtype_of<T>;
    const Strided<T> q(p.q, keys, gap), k(p.k, keys, gap), v(p.v, values, gap), g(p.g, p.heads, 0);
    const Strided<T> d_o(p.d_o, values, 0);
    std::vector<T> scales(p.level_scales.begin(), p.level_scales.end());
    Strided<T> o(tokens, values, 0), dq(tokens, keys, gap), dk(tokens, keys, gap), dv(tokens, values, gap);
    Strided<T> dg(tokens, p.heads, 0);
    std::vector<T> dscales(scales.size(), std::numeric_limits<T>::quiet_NaN());
    const kernels::Sequences sequences{static_cast<std::int64_t>(p.offsets.size()) - 1, p.offsets.data()};
    kernels::ssd_forward({}, {.dtype = dtype, .sequences = sequences, .heads = p.heads, .groups = p.groups,
                              .key_width = p.key_width, .value_width = p.value_width, .levels = p.levels,
                              .chunk_size = chunk_size, .q_stride = q.stride, .k_stride = k.stride, .v_stride = v.stride,
                              .q = q.data.data(), .k = k.data.data(), .v = v.data.data(), .g = g.data.data(),
                              .level_scales = p.levels > 0 ? scales.data() : nullptr, .o = o.data.data()});
    kernels::ssd_backward({}, {.dtype = dtype, .sequences = sequences, .heads = p.heads, .groups = p.groups,
                               .key_width = p.key_width, .value_width = p.value_width, .levels = p.levels,
                               .chunk_size = chunk_size, .q_stride = q.stride, .k_stride = k.stride, .v_stride = v.stride,
                               .dq_stride = dq.stride, .dk_stride = dk.stride, .dv_stride = dv.stride,
                               .q = q.data.data(), .k = k.data.data(), .v = v.data.data(), .g = g.data.data(),
                               .level_scales = p.levels > 0 ? scales.data() : nullptr, .d_o = d_o.data.data(),
                               .dq = dq.data.data(), .dk = dk.data.data(), .dv = dv.data.data(),
                               .dg = dg.data.data(), .dlevel_scales = p.levels > 0 ? dscales.data() : nullptr});
    return {o.dense(), dq.dense(), dk.dense(), dv.dense(), dg.dense(), std::vector<double>(dscales.begin(), dscales.end())};
}

void expect_close(const SsdSolution& actual, const SsdSolution& expected, double tolerance) {
    EXPECT_LT(rms_ratio(actual.o, expected.o), tolerance);
    EXPECT_LT(rms_ratio(actual.dq, expected.dq), tolerance);
    EXPECT_LT(rms_ratio(actual.dk, expected.dk), tolerance);
    EXPECT_LT(rms_ratio(actual.dv, expected.dv), tolerance);
    EXPECT_LT(rms_ratio(actual.dg, expected.dg), tolerance);
    EXPECT_LT(rms_ratio(actual.dlevel_scales, expected.dlevel_scales), tolerance);
}

TEST(Ssd, FourTokensByHand) {
    // One head of width 1; q = k = v = 1, decays of a half: o_t = sum_s lambda[t, level] 2^-(t-s).
    SsdProblem p;
    p.offsets = {0, 4};
    p.levels = 3;
    p.q = p.k = p.v = p.d_o = {1, 1, 1, 1};
    p.g = std::vector<double>(4, std::log(0.5));
    p.level_scales = {1, 10, 100, 1, 10, 100, 1, 10, 100, 1, 10, 100};
    const std::vector<double> expected = {1, 1 + 10 * 0.5, 1 + 100 * (0.5 + 0.25), 1 + 10 * 0.5 + 100 * (0.25 + 0.125)};
    for (std::int64_t chunk_size : {1, 2, 4, 64}) {
        const auto solution = run<double>(p, chunk_size);
        for (std::size_t t = 0; t < 4; ++t) EXPECT_NEAR(solution.o[t], expected[t], 1e-12) << "chunk_size " << chunk_size;
    }
}

TEST(Ssd, EveryLengthAroundTheChunksMatchesTheDefinition) {
    for (std::int64_t levels : {0, -1})
        for (std::int64_t chunk_size : {2, 8})
            for (std::int64_t length = 1; length <= 7 * chunk_size + 1; length += length < 3 * chunk_size + 2 ? 1 : 3) {
                SCOPED_TRACE(fmt::format("levels {} chunk_size {} length {}", levels, chunk_size, length));
                const auto p = random_problem({.lengths = {length}, .levels = levels}, length);
                expect_close(run<double>(p, chunk_size), reference_ssd(p), 1e-11);
            }
}

TEST(Ssd, OddLengthsAndWidthsMatchTheDefinition) {
    for (std::int64_t levels : {0, -1})
        for (std::int64_t length : {63, 64, 65, 127, 129, 255, 257, 1000}) {
            SCOPED_TRACE(fmt::format("levels {} length {}", levels, length));
            const auto p = random_problem({.lengths = {length}, .heads = length == 1000 ? 1 : 3, .key_width = 17,
                                           .value_width = 5, .levels = levels}, length);
            const auto expected = reference_ssd(p);
            expect_close(run<double>(p, 64), expected, 1e-11);
            expect_close(run<float>(p, 64), expected, 2e-5);
        }
}

TEST(Ssd, ChunkSizeDoesNotChangeTheResult) {
    for (std::int64_t levels : {0, -1, 4}) {
        const auto p = random_problem({.lengths = {300, 77}, .levels = levels}, 7, 0.02);
        const auto expected = reference_ssd(p);
        for (std::int64_t chunk_size : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}) {
            SCOPED_TRACE(fmt::format("levels {} chunk_size {}", levels, chunk_size));
            expect_close(run<double>(p, chunk_size), expected, 1e-11);
        }
    }
}

TEST(Ssd, GroupsShareKeys) {
    for (std::int64_t levels : {0, -1})
        for (std::int64_t groups : {1, 2, 3, 6}) {
            SCOPED_TRACE(fmt::format("levels {} groups {}", levels, groups));
            const auto p = random_problem({.lengths = {75, 18}, .heads = 6, .groups = groups, .key_width = 5, .levels = levels},
                                          groups);
            expect_close(run<double>(p, 16), reference_ssd(p), 1e-11);
        }
}

TEST(Ssd, PackedDocumentsDoNotSeeEachOther) {
    for (std::int64_t levels : {0, -1}) {
        const auto p = random_problem({.lengths = {1, 1, 37, 2, 1, 64, 16, 17, 3, 129, 1}, .levels = levels}, 3);
        expect_close(run<double>(p, 16), reference_ssd(p), 1e-11);
        const auto ones = random_problem({.lengths = std::vector<std::int64_t>(20, 1), .levels = levels}, 4);
        const auto solution = run<double>(ones, 16);
        expect_close(solution, reference_ssd(ones), 1e-11);
        for (double dg : solution.dg) EXPECT_EQ(dg, 0.0);  // nothing decays in a document of one token
    }
}

TEST(Ssd, LevelsBeyondTheLastScaleUseTheLast) {
    for (std::int64_t levels : {1, 2, 3, 5, 6}) {
        SCOPED_TRACE(fmt::format("levels {}", levels));
        const auto p = random_problem({.lengths = {150, 9}, .levels = levels}, levels);
        expect_close(run<double>(p, 8), reference_ssd(p), 1e-11);
        expect_close(run<double>(p, 32), reference_ssd(p), 1e-11);
    }
    // More columns than a document needs: their gradient is zero, not unwritten.
    const auto p = random_problem({.lengths = {20}, .levels = 9}, 9);
    expect_close(run<double>(p, 8), reference_ssd(p), 1e-11);
}

TEST(Ssd, StrongDecay) {
    for (std::int64_t levels : {0, -1}) {
        auto p = random_problem({.lengths = {200}, .levels = levels}, 11);
        // Mild, then a wall, then everywhere.
        for (std::size_t i = 150; i < 160; ++i) p.g[i] = -80;
        expect_close(run<double>(p, 16), reference_ssd(p), 1e-11);
        expect_close(run<float>(p, 16), reference_ssd(p), 2e-5);
        p.g.assign(p.g.size(), -80.0);
        const auto expected = reference_ssd(p);
        const auto solution = run<float>(p, 16);
        EXPECT_LT(rms_ratio(solution.o, expected.o), 1e-6);
        EXPECT_LT(rms_ratio(solution.dq, expected.dq), 1e-6);
        // exp(-80) is a normal float32, and the decay's gradient has no cancellation that could hide it.
        double error = 0, norm = 0;
        for (std::size_t i = 0; i < expected.dg.size(); ++i) {
            error = std::max(error, std::abs(solution.dg[i] - expected.dg[i]));
            norm = std::max(norm, std::abs(expected.dg[i]));
        }
        EXPECT_LT(error, 1e-5 * norm);
    }
}

TEST(Ssd, NoDecayAtAll) {
    for (std::int64_t levels : {0, -1}) {
        const auto p = random_problem({.lengths = {100}, .levels = levels}, 12, 0.0);
        expect_close(run<double>(p, 8), reference_ssd(p), 1e-11);
    }
}

TEST(Ssd, LevelScalesOfOneGiveTheLinearOperator) {
    auto p = random_problem({.lengths = {333, 5}, .levels = -1}, 13);
    p.level_scales.assign(p.level_scales.size(), 1.0);
    const auto log_linear = run<double>(p, 16);
    p.levels = 0;
    p.level_scales.clear();
    auto linear = run<double>(p, 16);
    linear.dlevel_scales = log_linear.dlevel_scales;
    expect_close(log_linear, linear, 1e-13);
}

TEST(Ssd, ScalesTimesTheirGradientsAreOutputTimesItsGradient) {
    const auto p = random_problem({.lengths = {200, 31}, .heads = 3, .levels = 6}, 14);
    const auto s = run<double>(p, 16);
    const auto L = static_cast<std::size_t>(p.levels), V = static_cast<std::size_t>(p.value_width);
    const auto row_of = [](const std::vector<double>& values, std::size_t row, std::size_t width) {
        return values.begin() + static_cast<std::ptrdiff_t>(row * width);
    };
    for (std::size_t row = 0; row < s.dg.size(); ++row) {
        const double scales = std::inner_product(row_of(p.level_scales, row, L), row_of(p.level_scales, row + 1, L),
                                                 row_of(s.dlevel_scales, row, L), 0.0);
        const double outputs =
            std::inner_product(row_of(s.o, row, V), row_of(s.o, row + 1, V), row_of(p.d_o, row, V), 0.0);
        EXPECT_NEAR(scales, outputs, 1e-9 * (1 + std::abs(outputs)));
    }
}

TEST(Ssd, ThreadsDoNotChangeABit) {
    const int threads = num_threads();
    for (std::int64_t levels : {0, -1}) {
        const auto p = random_problem({.lengths = {700, 1, 130}, .heads = 4, .key_width = 32, .value_width = 48,
                                       .levels = levels}, 15);
        set_num_threads(1);
        const auto one = run<float>(p, 32);
        for (int count : {2, 3}) {
            set_num_threads(count);
            const auto many = run<float>(p, 32);
            EXPECT_EQ(one.o, many.o);
            EXPECT_EQ(one.dq, many.dq);
            EXPECT_EQ(one.dk, many.dk);
            EXPECT_EQ(one.dv, many.dv);
            EXPECT_EQ(one.dg, many.dg);
            EXPECT_EQ(one.dlevel_scales, many.dlevel_scales);
        }
    }
    set_num_threads(threads);
}

TEST(Ssd, DecayGradientOfLongRowsIsAccurateInFloat32) {
    // Little decay over a long row: sums of all tokens' terms, which nearly cancel, would lose most digits.
    const auto p = random_problem({.lengths = {4096}, .heads = 1, .key_width = 4, .value_width = 4, .levels = -1}, 16, 1e-3);
    EXPECT_LT(rms_ratio(run<float>(p, 64).dg, run<double>(p, 64).dg), 2e-6);
}

// ---- recurrent --------------------------------------------------------------------------------------------------------

template <class T>
std::vector<double> run_recurrent(const SsdProblem& p, std::int64_t batch, const std::vector<std::int64_t>& segments) {
    const std::int64_t length = p.num_tokens() / batch, keys = p.groups * p.key_width, values = p.heads * p.value_width;
    const std::int64_t capacity = p.levels > 0 ? kernels::levels_needed(static_cast<std::uint64_t>(length)) : 1;
    std::vector<T> state(static_cast<std::size_t>(capacity * batch * p.heads * p.key_width * p.value_width), T{0});
    std::vector<double> o(static_cast<std::size_t>(batch * length * values));
    std::int64_t position = 0;
    for (auto segment : segments) {
        // The segment's tokens of every row: [batch * segment, width].
        const auto cut = [&](const std::vector<double>& all, std::int64_t width) {
            std::vector<double> part;
            for (std::int64_t b = 0; b < batch; ++b) {
                const auto from = all.begin() + (b * length + position) * width;
                part.insert(part.end(), from, from + segment * width);
            }
            return part;
        };
        const Strided<T> q(cut(p.q, keys), keys, 2), k(cut(p.k, keys), keys, 2), v(cut(p.v, values), values, 2);
        const Strided<T> g(cut(p.g, p.heads), p.heads, 0);
        const auto scales = cut(p.level_scales, p.heads * p.levels);
        const std::vector<T> level_scales(scales.begin(), scales.end());
        Strided<T> out(batch * segment, values, 0);
        kernels::ssd_recurrent({}, {.dtype = dtype_of<T>, .batch = batch, .length = segment, .position = position,
                                    .heads = p.heads, .groups = p.groups, .key_width = p.key_width,
                                    .value_width = p.value_width, .levels = p.levels, .level_capacity = capacity,
                                    .q_stride = q.stride, .k_stride = k.stride, .v_stride = v.stride,
                                    .q = q.data.data(), .k = k.data.data(), .v = v.data.data(), .g = g.data.data(),
                                    .level_scales = p.levels > 0 ? level_scales.data() : nullptr, .o = out.data.data(),
                                    .state = state.data()});
        const auto dense = out.dense();
        for (std::int64_t b = 0; b < batch; ++b)
            std::copy_n(dense.begin() + b * segment * values, segment * values, o.begin() + (b * length + position) * values);
        position += segment;
    }
    return o;
}

TEST(SsdRecurrent, AnySplitGivesTheWhole) {
    for (std::int64_t levels : {0, -1, 3})
        for (std::int64_t batch : {1, 3}) {
            SCOPED_TRACE(fmt::format("levels {} batch {}", levels, batch));
            auto p = random_problem({.lengths = std::vector<std::int64_t>(static_cast<std::size_t>(batch), 37), .heads = 4,
                                     .groups = 2, .key_width = 6, .value_width = 5, .levels = levels}, 21);
            p.d_o.clear();
            const auto expected = reference_ssd(p).o;
            const auto whole = run_recurrent<double>(p, batch, {37});
            EXPECT_LT(rms_ratio(whole, expected), 1e-12);
            EXPECT_EQ(run_recurrent<double>(p, batch, std::vector<std::int64_t>(37, 1)), whole);
            EXPECT_EQ(run_recurrent<double>(p, batch, {8, 8, 1, 15, 5}), whole);  // 32 is where a level is added
            EXPECT_EQ(run_recurrent<double>(p, batch, {3, 31, 3}), whole);
            EXPECT_LT(rms_ratio(run_recurrent<float>(p, batch, {20, 17}), expected), 1e-5);
        }
}

TEST(SsdRecurrent, AgreesWithTheChunkwiseForm) {
    for (std::int64_t levels : {0, -1}) {
        const auto p = random_problem({.lengths = {300}, .heads = 2, .key_width = 16, .value_width = 8, .levels = levels}, 22);
        EXPECT_LT(rms_ratio(run_recurrent<double>(p, 1, {1, 63, 64, 100, 72}), run<double>(p, 32).o), 1e-12);
    }
}

}  // namespace
}  // namespace fenwick
