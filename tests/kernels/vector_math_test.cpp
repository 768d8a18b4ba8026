#include "kernels/cpu/vector_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace fenwick::kernels::cpu {
namespace {

// |actual - exact| in units of the last place of the float nearest to exact
double ulps(float actual, double exact) {
    const float nearest = static_cast<float>(exact);
    const double unit = std::nextafter(std::abs(nearest), INFINITY) - std::abs(nearest);
    return std::abs(static_cast<double>(actual) - exact) / unit;
}

TEST(VectorMath, ExpIsWithinTwoUlps) {
    double worst = 0;
    for (double x = -103.9; x < 88.72; x += 1.7e-5) {
        const auto rounded = static_cast<float>(x);
        worst = std::max(worst, ulps(fast_exp(rounded), std::exp(static_cast<double>(rounded))));
    }
    EXPECT_LT(worst, 2.0);
    EXPECT_EQ(fast_exp(0.0f), 1.0f);
    EXPECT_EQ(fast_exp(-0.0f), 1.0f);
}

TEST(VectorMath, ExpAtTheEndsOfTheRange) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (float x : {-104.0f, -150.0f, -1e30f, -infinity}) EXPECT_EQ(fast_exp(x), 0.0f) << x;
    for (float x : {88.73f, 100.0f, 1e30f, infinity}) EXPECT_EQ(fast_exp(x), infinity) << x;
    EXPECT_TRUE(std::isnan(fast_exp(std::numeric_limits<float>::quiet_NaN())));
    EXPECT_EQ(fast_exp(-1e4), 0.0);
}

TEST(VectorMath, ActivationsAgainstDouble) {
    double softplus_error = 0, sigmoid_error = 0;
    for (double x = -80; x < 80; x += 1e-4) {
        const auto rounded = static_cast<float>(x);
        const double exact = rounded, softplus = std::max(exact, 0.0) + std::log1p(std::exp(-std::abs(exact)));
        softplus_error = std::max(softplus_error, ulps(softplus_of(rounded), softplus));
        sigmoid_error = std::max(sigmoid_error, ulps(sigmoid_of(rounded), 1 / (1 + std::exp(-exact))));
    }
    EXPECT_LT(softplus_error, 4.0);
    EXPECT_LT(sigmoid_error, 4.0);
    EXPECT_EQ(softplus_of(1000.0f), 1000.0f);
    EXPECT_EQ(softplus_of(-1000.0f), 0.0f);
    EXPECT_EQ(silu_of(-500.0f), 0.0f);
    for (double x : {-3.0, -0.1, 0.0, 0.7, 4.0}) {
        const double numeric = (silu_of(x + 1e-6) - silu_of(x - 1e-6)) / 2e-6;
        EXPECT_NEAR(silu_slope(x, sigmoid_of(x)), numeric, 1e-8);
    }
}

TEST(VectorMath, LaneSumAndMaxOverEveryLength) {
    for (std::int64_t count = 1; count < 70; ++count) {
        std::vector<float> x(static_cast<std::size_t>(count));
        for (std::int64_t i = 0; i < count; ++i) x[static_cast<std::size_t>(i)] = static_cast<float>((i * 37) % 71 - 35);
        double sum = 0;
        for (float value : x) sum += value;
        EXPECT_EQ(lane_sum<float>(count, [&](std::int64_t i) { return x[static_cast<std::size_t>(i)]; }), sum) << count;
        EXPECT_EQ(lane_max(count, x.data()), *std::max_element(x.begin(), x.end())) << count;
    }
    EXPECT_EQ(lane_sum<double>(0, [](std::int64_t) { return 1.0; }), 0.0);
}

}  // namespace
}  // namespace fenwick::kernels::cpu
