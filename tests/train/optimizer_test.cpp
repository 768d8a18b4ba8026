#include "train/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/random_tensor.h"

namespace fenwick::train {
namespace {

using test::random_tensor;

std::vector<model::Parameter> two_parameters() {
    return {{"w", Variable(random_tensor({3, 4}, 1), true), true}, {"norm", Variable(random_tensor({5}, 2), true), false}};
}

TEST(Optimizer, UpdatesAsTheFormulasSay) {
    const OptimizerConfig config{.beta1 = 0.8, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.5, .clip_norm = 0.7};
    Optimizer optimizer(two_parameters(), config);
    std::vector<std::vector<double>> value, m, v;
    for (const auto& parameter : optimizer.parameters()) {
        value.push_back(parameter.variable.value().to_vector<double>());
        m.emplace_back(value.back().size(), 0.0);
        v.emplace_back(value.back().size(), 0.0);
    }
    for (std::int64_t step = 1; step <= 3; ++step) {
        optimizer.zero_gradients();
        double squares = 0;
        for (std::size_t p = 0; p < 2; ++p) {
            // Two contributions: gradients accumulate.
            const auto& variable = optimizer.parameters()[p].variable;
            variable.gradient()->add(random_tensor(variable.shape(), 10 * static_cast<std::uint64_t>(step) + p));
            variable.gradient()->add(random_tensor(variable.shape(), 90 * static_cast<std::uint64_t>(step) + p));
            for (const double g : variable.grad().to_vector<double>()) squares += g * g;
        }
        const double norm = optimizer.gradient_norm();
        EXPECT_NEAR(norm, std::sqrt(squares), 1e-12 * norm);
        ASSERT_GT(norm, config.clip_norm);
        const double lr = 0.1 / static_cast<double>(step);
        for (std::size_t p = 0; p < 2; ++p) {
            const auto gradient = optimizer.parameters()[p].variable.grad().to_vector<double>();
            for (std::size_t i = 0; i < gradient.size(); ++i) {
                const double g = gradient[i] * config.clip_norm / norm;
                m[p][i] = 0.8 * m[p][i] + 0.2 * g;
                v[p][i] = 0.9 * v[p][i] + 0.1 * g * g;
                const double m_hat = m[p][i] / (1 - std::pow(0.8, static_cast<double>(step)));
                const double v_hat = v[p][i] / (1 - std::pow(0.9, static_cast<double>(step)));
                value[p][i] = value[p][i] * (1 - lr * (p == 0 ? 0.5 : 0.0)) - lr * m_hat / (std::sqrt(v_hat) + 1e-3);
            }
        }
        optimizer.update(step, lr, norm);
        for (std::size_t p = 0; p < 2; ++p) {
            EXPECT_LT(test::rms_ratio(optimizer.parameters()[p].variable.value().to_vector<double>(), value[p]), 1e-12);
            EXPECT_LT(test::rms_ratio(optimizer.first_moment(p).to_vector<double>(), m[p]), 1e-12);
            EXPECT_LT(test::rms_ratio(optimizer.second_moment(p).to_vector<double>(), v[p]), 1e-12);
        }
    }
}

TEST(Optimizer, GradientsShareOneBufferThatIsKept) {
    Optimizer optimizer(two_parameters(), {});
    const auto& variable = optimizer.parameters()[1].variable;
    const void* before = variable.grad().data();
    variable.gradient()->add(Tensor::full({5}, 2.0, DType::float64));
    EXPECT_EQ(variable.grad().data(), before);
    EXPECT_DOUBLE_EQ(optimizer.gradient_norm(), std::sqrt(20.0));
    variable.gradient()->clear();  // as an operator might: the next contribution lands in the buffer again
    variable.gradient()->add(Tensor::full({5}, 1.0, DType::float64));
    EXPECT_EQ(variable.grad().data(), before);
    EXPECT_DOUBLE_EQ(optimizer.gradient_norm(), std::sqrt(5.0));
    optimizer.zero_gradients();
    EXPECT_EQ(optimizer.gradient_norm(), 0.0);
}

TEST(Optimizer, NamesTheFirstTensorThatIsNotFinite) {
    Optimizer optimizer(two_parameters(), {});
    EXPECT_EQ(optimizer.first_not_finite(), "");
    optimizer.parameters()[0].variable.grad().as<double>()[3] = NAN;
    EXPECT_EQ(optimizer.first_not_finite(), "gradient of w");
    optimizer.parameters()[1].variable.grad().as<double>()[2] = INFINITY;
    EXPECT_EQ(optimizer.first_not_finite(), "gradient of norm");
    EXPECT_FALSE(std::isfinite(optimizer.gradient_norm()));
    optimizer.parameters()[0].variable.value().as<double>()[0] = INFINITY;
    EXPECT_EQ(optimizer.first_not_finite(), "weights of w");
}

}  // namespace
}  // namespace fenwick::train
