#include <cmath>

#include "support/operator_check.h"

namespace fenwick {
namespace {

using test::check_operator;
using test::random_tensor;
using test::rms_ratio;
using test::with_slices;

std::vector<double> reference(const Tensor& x, std::int64_t heads, double theta, const SequenceLayout& layout,
                              std::int64_t position) {
    const auto in = x.to_vector<double>();
    auto out = in;
    const std::int64_t width = x.columns() / heads, half = width / 2;
    for (std::int64_t d = 0; d < layout.count(); ++d) {
        const std::int64_t begin = layout.offsets()[static_cast<std::size_t>(d)];
        for (std::int64_t t = begin; t < layout.offsets()[static_cast<std::size_t>(d) + 1]; ++t)
            for (std::int64_t h = 0; h < heads; ++h)
                for (std::int64_t i = 0; i < half; ++i) {
                    const auto at = static_cast<std::size_t>((t * heads + h) * width + i);
                    const auto pair = at + static_cast<std::size_t>(half);
                    const double angle = static_cast<double>(position + t - begin) *
                                         std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(width));
                    out[at] = in[at] * std::cos(angle) - in[pair] * std::sin(angle);
                    out[pair] = in[pair] * std::cos(angle) + in[at] * std::sin(angle);
                }
    }
    return out;
}

TEST(Rope, FollowsTheDefinition) {
    std::uint64_t seed = 0;
    for (std::int64_t length : {1, 2, 65})
        for (std::int64_t width : {2, 6, 64})
            for (std::int64_t position : {0, 1000}) {
                const auto layout = SequenceLayout::uniform(2, length);
                const Tensor x = random_tensor({2, length, 3 * width}, ++seed);
                const auto y = ops::rope(x, 3, 10000.0, layout, position).value();
                EXPECT_LT(rms_ratio(y.to_vector<double>(), reference(x, 3, 10000.0, layout, position)), 1e-13);
            }
    const auto packed = SequenceLayout::packed({0, 1, 2, 40, 41, 700});
    const Tensor x = random_tensor({1, 700, 16}, 77);
    EXPECT_LT(rms_ratio(ops::rope(x, 2, 500.0, packed).value().to_vector<double>(), reference(x, 2, 500.0, packed, 0)), 1e-13);
}

TEST(Rope, Gradients) {
    const auto layout = SequenceLayout::packed({0, 1, 6, 20});
    const auto fn = [&](const std::vector<Variable>& x) { return std::vector{ops::rope(x[0], 2, 100.0, layout, 3)}; };
    check_operator(fn, {random_tensor({20, 12}, 1)}, 1e-8);
    check_operator(with_slices(fn, {0}), {random_tensor({20, 17}, 2)}, 1e-8);
}

TEST(Rope, ScoresDependOnDistancesAlone) {
    const auto layout = SequenceLayout::uniform(1, 1);
    const Tensor q = random_tensor({1, 8}, 1), k = random_tensor({1, 8}, 2);
    const auto score = [&](std::int64_t i, std::int64_t j) {
        const auto a = ops::rope(q, 1, 10000.0, layout, i).value().to_vector<double>();
        const auto b = ops::rope(k, 1, 10000.0, layout, j).value().to_vector<double>();
        double sum = 0;
        for (std::size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
        return sum;
    };
    EXPECT_NEAR(score(7, 3), score(100007, 100003), 1e-10);
}

TEST(Rope, RefusesOddWidths) {
    EXPECT_THROW(ops::rope(random_tensor({2, 9}, 1), 3, 10000.0, SequenceLayout::uniform(1, 2)), Error);
    EXPECT_THROW(ops::rope(random_tensor({2, 8}, 1), 1, 10000.0, SequenceLayout::uniform(1, 3)), Error);
}

}  // namespace
}  // namespace fenwick
