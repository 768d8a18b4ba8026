#include <cmath>

#include "support/operator_check.h"
#include "support/random_layout.h"

namespace fenwick {
namespace {

using test::check_operator;
using test::random_layout;
using test::random_tensor;
using test::with_slices;

std::vector<double> reference(const Tensor& x, const Tensor& weight, const Tensor& bias, const SequenceLayout& layout) {
    const auto xs = x.to_vector<double>(), ws = weight.to_vector<double>();
    const auto bs = bias.defined() ? bias.to_vector<double>() : std::vector<double>(static_cast<std::size_t>(x.columns()), 0.0);
    const std::int64_t channels = x.columns(), width = weight.size(1);
    std::vector<double> y(xs.size());
    for (std::int64_t document = 0; document < layout.count(); ++document) {
        const auto begin = layout.offsets()[static_cast<std::size_t>(document)];
        const auto end = layout.offsets()[static_cast<std::size_t>(document) + 1];
        for (std::int64_t t = begin; t < end; ++t)
            for (std::int64_t c = 0; c < channels; ++c) {
                double sum = bs[static_cast<std::size_t>(c)];
                for (std::int64_t i = 0; i < width; ++i) {
                    const std::int64_t s = t - (width - 1) + i;
                    if (s >= begin) sum += ws[static_cast<std::size_t>(c * width + i)] * xs[static_cast<std::size_t>(s * channels + c)];
                }
                y[static_cast<std::size_t>(t * channels + c)] = sum / (1 + std::exp(-sum));
            }
    }
    return y;
}

TEST(CausalConv1d, FollowsTheDefinition) {
    std::uint64_t seed = 0;
    for (std::int64_t width : {1, 2, 3, 4, 5})
        for (std::int64_t length : {1, 2, 3, 63, 64, 65, 200})
            for (std::int64_t channels : {1, 7, 520}) {
                if (channels > 100 && (width != 4 || length > 65)) continue;
                const Tensor x = random_tensor({2, length, channels}, ++seed), weight = random_tensor({channels, width}, ++seed);
                const Tensor bias = seed % 4 == 0 ? Tensor() : random_tensor({channels}, seed);
                for (const auto& layout : {SequenceLayout::uniform(2, length), random_layout(2 * length, seed)})
                    EXPECT_LT(test::rms_ratio(ops::causal_conv1d(x, weight, bias, layout).value().to_vector<double>(),
                                              reference(x, weight, bias, layout)), 1e-14)
                        << "width " << width << ", length " << length << ", channels " << channels;
            }
}

TEST(CausalConv1d, Gradients) {
    const auto with_bias = [](SequenceLayout layout) {
        return [=](const std::vector<Variable>& in) { return std::vector{ops::causal_conv1d(in[0], in[1], in[2], layout)}; };
    };
    const auto without_bias = [](SequenceLayout layout) {
        return [=](const std::vector<Variable>& in) { return std::vector{ops::causal_conv1d(in[0], in[1], {}, layout)}; };
    };
    for (std::int64_t width : {1, 3, 4})
        for (std::int64_t length : {1, 2, 65}) {
            const Tensor x = random_tensor({2, length, 6}, 1), weight = random_tensor({6, width}, 2), bias = random_tensor({6}, 3);
            check_operator(with_bias(SequenceLayout::uniform(2, length)), {x, weight, bias});
            check_operator(without_bias(random_layout(2 * length, 5)), {x, weight});
        }
    check_operator(with_bias(random_layout(1000, 1)), {random_tensor({1000, 9}, 1), random_tensor({9, 4}, 2), random_tensor({9}, 3)});
    check_operator(with_bias(random_layout(9, 2)), {random_tensor({9, 600}, 1), random_tensor({600, 4}, 2), random_tensor({600}, 3)});
    check_operator(with_slices(with_bias(random_layout(70, 3)), {0}),
                   {random_tensor({70, 10}, 1), random_tensor({5, 4}, 2), random_tensor({5}, 3)});
}

TEST(CausalConv1d, ConstantWeights) {
    check_operator(
        [](const auto& in) {
            const Variable weight(random_tensor({3, 4}, 2, in[0].dtype())), bias(random_tensor({3}, 3, in[0].dtype()));
            return std::vector{ops::causal_conv1d(in[0], weight, bias, SequenceLayout::uniform(1, 8))};
        },
        {random_tensor({1, 8, 3}, 1)});
}

TEST(CausalConv1d, RefusesWrongShapes) {
    const Variable x(random_tensor({1, 8, 3}, 1)), weight(random_tensor({3, 4}, 2));
    EXPECT_THROW(ops::causal_conv1d(x, Variable(random_tensor({4, 4}, 2)), {}, SequenceLayout::uniform(1, 8)), Error);
    EXPECT_THROW(ops::causal_conv1d(x, weight, Variable(random_tensor({4}, 2)), SequenceLayout::uniform(1, 8)), Error);
    EXPECT_THROW(ops::causal_conv1d(x, weight, {}, SequenceLayout::uniform(1, 7)), Error);
}

}  // namespace
}  // namespace fenwick
