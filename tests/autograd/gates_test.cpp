#include <cmath>

#include "support/operator_check.h"

namespace fenwick {
namespace {

using test::check_operator;
using test::random_tensor;
using test::rms_ratio;
using test::with_slices;

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

TEST(DecayGate, FollowsTheDefinition) {
    const Tensor raw = random_tensor({2, 5, 3}, 1, DType::float64, 4.0), bias = random_tensor({3}, 2), a_log = random_tensor({3}, 3);
    const auto gate = ops::decay_gate(raw, bias, a_log);
    const auto rs = raw.to_vector<double>(), bs = bias.to_vector<double>(), as = a_log.to_vector<double>();
    std::vector<double> step, g;
    for (std::size_t i = 0; i < rs.size(); ++i) {
        step.push_back(softplus(rs[i] + bs[i % 3]));
        g.push_back(-std::exp(as[i % 3]) * step.back());
    }
    EXPECT_LT(rms_ratio(gate.step.value().to_vector<double>(), step), 1e-15);
    EXPECT_LT(rms_ratio(gate.g.value().to_vector<double>(), g), 1e-15);
    EXPECT_EQ(gate.g.shape(), raw.shape());
}

TEST(DecayGate, Gradients) {
    enum { both, step_only, g_only };
    for (int used : {both, step_only, g_only}) {
        const auto fn = [=](const std::vector<Variable>& in) {
            const auto gate = ops::decay_gate(in[0], in[1], in[2]);
            return used == both ? std::vector{gate.step, gate.g} : std::vector{used == step_only ? gate.step : gate.g};
        };
        check_operator(fn, {random_tensor({1, 1}, 1), random_tensor({1}, 2), random_tensor({1}, 3)});
        check_operator(fn, {random_tensor({2, 700, 5}, 1), random_tensor({5}, 2), random_tensor({5}, 3)});
        check_operator(with_slices(fn, {0}), {random_tensor({9, 12}, 1), random_tensor({7}, 2), random_tensor({7}, 3)});
    }
}

TEST(LevelScales, FollowsTheDefinition) {
    const Tensor raw = random_tensor({4, 6}, 1, DType::float64, 5.0), weight = random_tensor({2, 3}, 2);
    const auto rs = raw.to_vector<double>(), ws = weight.to_vector<double>();
    std::vector<double> expected;
    for (std::size_t i = 0; i < rs.size(); ++i) expected.push_back(softplus(ws[i % 6] * rs[i]));
    EXPECT_LT(rms_ratio(ops::level_scales(raw, weight).value().to_vector<double>(), expected), 1e-15);
}

TEST(LevelScales, Gradients) {
    const auto fn = [](const std::vector<Variable>& in) { return std::vector{ops::level_scales(in[0], in[1])}; };
    check_operator(fn, {random_tensor({1, 1}, 1), random_tensor({1, 1}, 2)});
    check_operator(fn, {random_tensor({2, 300, 22}, 1), random_tensor({2, 11}, 2)});
    check_operator(with_slices(fn, {0}), {random_tensor({9, 26}, 1), random_tensor({3, 7}, 2)});
}

TEST(Sigmoid, ValuesAndGradients) {
    const Tensor x = Tensor::from(std::vector<double>{-1000, -2, 0, 3, 1000}, {5});
    const auto y = ops::sigmoid(x).value().to_vector<double>();
    const std::vector<double> expected{0, 1 / (1 + std::exp(2.0)), 0.5, 1 / (1 + std::exp(-3.0)), 1};
    for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(y[i], expected[i], 1e-15);
    const auto fn = [](const std::vector<Variable>& in) { return std::vector{ops::sigmoid(in[0])}; };
    check_operator(fn, {random_tensor({3, 5}, 1)});
    check_operator(with_slices(fn, {0}), {random_tensor({3, 9}, 1)});
}

TEST(ScaleHeads, ValuesAndGradients) {
    const Tensor x = Tensor::from(std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8}, {2, 4});
    const Tensor scale = Tensor::from(std::vector<double>{10, 100, -1, 0.5}, {2, 2});
    EXPECT_EQ(ops::scale_heads(x, scale).value().to_vector<double>(), (std::vector<double>{10, 20, 300, 400, -5, -6, 3.5, 4}));
    const auto fn = [](const std::vector<Variable>& in) { return std::vector{ops::scale_heads(in[0], in[1])}; };
    check_operator(fn, {random_tensor({1, 1}, 1), random_tensor({1, 1}, 2)});
    check_operator(fn, {random_tensor({2, 65, 12}, 1), random_tensor({2, 65, 3}, 2)});
    check_operator(with_slices(fn, {0, 1}), {random_tensor({7, 17}, 1), random_tensor({7, 9}, 2)});
}

TEST(HeadSkip, ValuesAndGradients) {
    const Tensor o = Tensor::from(std::vector<double>{1, 2, 3, 4}, {1, 4}), x = Tensor::from(std::vector<double>{5, 6, 7, 8}, {1, 4});
    const Tensor skip = Tensor::from(std::vector<double>{2, -1}, {2});
    EXPECT_EQ(ops::head_skip(o, x, skip).value().to_vector<double>(), (std::vector<double>{11, 14, -4, -4}));
    const auto fn = [](const std::vector<Variable>& in) { return std::vector{ops::head_skip(in[0], in[1], in[2])}; };
    check_operator(fn, {random_tensor({1, 1}, 1), random_tensor({1, 1}, 2), random_tensor({1}, 3)});
    check_operator(fn, {random_tensor({900, 24}, 1), random_tensor({900, 24}, 2), random_tensor({3}, 3)});
    check_operator(with_slices(fn, {0, 1}), {random_tensor({7, 17}, 1), random_tensor({7, 17}, 2), random_tensor({4}, 3)});
    // One variable as both o and x.
    check_operator([&](const auto& in) { return fn({in[0], in[0], in[1]}); }, {random_tensor({3, 8}, 1), random_tensor({2}, 2)});
}

TEST(Gates, RefuseWrongShapes) {
    const Variable x(random_tensor({3, 8}, 1)), three(random_tensor({3}, 1)), eight(random_tensor({8}, 1));
    EXPECT_THROW(ops::decay_gate(x, three, eight), Error);
    EXPECT_THROW(ops::decay_gate(x, eight, three), Error);
    EXPECT_THROW(ops::level_scales(x, Variable(random_tensor({2, 3}, 1))), Error);
    EXPECT_THROW(ops::scale_heads(x, Variable(random_tensor({3, 3}, 1))), Error);
    EXPECT_THROW(ops::scale_heads(x, Variable(random_tensor({2, 4}, 1))), Error);
    EXPECT_THROW(ops::head_skip(x, x, three), Error);
    EXPECT_THROW(ops::head_skip(Variable(random_tensor({3, 7}, 1)), x, eight), Error);
}

}  // namespace
}  // namespace fenwick
