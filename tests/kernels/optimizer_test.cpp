#include "kernels/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "base/random.h"

namespace fenwick::kernels {
namespace {

template <class T>
std::vector<T> draw(std::int64_t count, std::uint64_t seed) {
    Random random(seed);
    std::vector<T> values(static_cast<std::size_t>(count));
    for (auto& value : values) value = static_cast<T>(random.normal());
    return values;
}

template <class T>
struct State {
    std::vector<T> parameter, gradient, m, v;
    double weight_decay;
};

// Three steps over tensors of all sizes, with new gradients every step.
template <class T>
std::vector<State<T>> three_steps() {
    std::vector<State<T>> states;
    for (std::int64_t count : {1, 7, 16384, 40001}) {
        const auto size = static_cast<std::size_t>(count);
        states.push_back({draw<T>(count, 1), {}, std::vector<T>(size, T{0}), std::vector<T>(size, T{0}), count % 2 == 0 ? 0.1 : 0.0});
    }
    for (std::int64_t step = 1; step <= 3; ++step) {
        std::vector<AdamWTensor> tensors;
        for (auto& state : states) {
            state.gradient = draw<T>(static_cast<std::int64_t>(state.parameter.size()), 10 + static_cast<std::uint64_t>(step));
            tensors.push_back({static_cast<std::int64_t>(state.parameter.size()), state.parameter.data(), state.gradient.data(),
                               state.m.data(), state.v.data(), state.weight_decay});
        }
        adamw({}, {.dtype = dtype_of<T>, .tensor_count = 4, .tensors = tensors.data(), .step = step, .learning_rate = 0.02,
                   .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .gradient_scale = 0.5});
    }
    return states;
}

TEST(AdamW, FollowsTheFormula) {
    const auto states = three_steps<double>();
    for (const auto& state : states) {
        auto expected = draw<double>(static_cast<std::int64_t>(state.parameter.size()), 1);
        std::vector<double> m(expected.size(), 0.0), v(expected.size(), 0.0);
        for (int step = 1; step <= 3; ++step) {
            const auto gradient = draw<double>(static_cast<std::int64_t>(expected.size()), 10 + static_cast<std::uint64_t>(step));
            for (std::size_t i = 0; i < expected.size(); ++i) {
                const double g = 0.5 * gradient[i];
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                const double m_hat = m[i] / (1 - std::pow(0.9, step)), v_hat = v[i] / (1 - std::pow(0.95, step));
                expected[i] = expected[i] * (1 - 0.02 * state.weight_decay) - 0.02 * m_hat / (std::sqrt(v_hat) + 1e-8);
            }
        }
        double worst = 0;
        for (std::size_t i = 0; i < expected.size(); ++i) {
            worst = std::max(worst, std::abs(expected[i] - state.parameter[i]));
            worst = std::max(worst, std::abs(m[i] - state.m[i]) + std::abs(v[i] - state.v[i]));
        }
        EXPECT_LT(worst, 1e-14) << expected.size() << " elements";
    }
}

TEST(AdamW, FloatFollowsDoubleAndThreadsDoNotMatter) {
    const auto exact = three_steps<double>();
    const auto single = three_steps<float>();
    for (std::size_t t = 0; t < exact.size(); ++t)
        for (std::size_t i = 0; i < exact[t].parameter.size(); ++i)
            ASSERT_NEAR(single[t].parameter[i], exact[t].parameter[i], 2e-6 * (1 + std::abs(exact[t].parameter[i])));
    const int threads = num_threads();
    set_num_threads(3);
    const auto again = three_steps<float>();
    set_num_threads(threads);
    for (std::size_t t = 0; t < exact.size(); ++t) EXPECT_EQ(again[t].parameter, single[t].parameter);
}

TEST(SumSquares, OverSeveralTensors) {
    const auto a = draw<float>(1, 1), b = draw<float>(40001, 2), c = draw<float>(16384, 3);
    double expected = 0;
    for (const auto* values : {&a, &b, &c})
        for (float value : *values) expected += static_cast<double>(value) * static_cast<double>(value);
    const void* tensors[] = {a.data(), b.data(), c.data()};
    const std::int64_t counts[] = {1, 40001, 16384};
    double total = NAN;
    const SumSquares args{.dtype = DType::float32, .tensor_count = 3, .tensors = tensors, .counts = counts, .total = &total};
    sum_squares({}, args);
    EXPECT_NEAR(total, expected, 1e-12 * expected);
    const double first = total;
    const int threads = num_threads();
    set_num_threads(3);
    sum_squares({}, args);
    set_num_threads(threads);
    EXPECT_EQ(total, first);
    sum_squares({}, {.dtype = DType::float32, .tensor_count = 0, .total = &total});
    EXPECT_EQ(total, 0.0);
}

}  // namespace
}  // namespace fenwick::kernels
