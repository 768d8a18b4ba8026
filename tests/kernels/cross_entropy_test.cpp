#include "kernels/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace fenwick::kernels {
namespace {

TEST(CrossEntropyKernel, GradientReplacesLogitsInsideTheirStride) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> logits{0, std::log(3.0f), nan, 5, 6, nan};  // two rows of 2, stride 3
    const std::vector<std::int32_t> targets{1, ignore_index};
    std::vector<float> loss(2, nan);
    cross_entropy({}, {.dtype = DType::float32, .rows = 2, .vocab = 2, .stride = 3, .targets = targets.data(),
                       .logits = logits.data(), .loss = loss.data(), .gradient = true, .gradient_scale = 2.0});
    EXPECT_NEAR(loss[0], std::log(4.0 / 3.0), 1e-6);
    EXPECT_EQ(loss[1], 0.0f);
    EXPECT_NEAR(logits[0], 0.5, 1e-6);
    EXPECT_NEAR(logits[1], -0.5, 1e-6);
    EXPECT_EQ(logits[3], 0.0f);
    EXPECT_EQ(logits[4], 0.0f);
    EXPECT_TRUE(std::isnan(logits[2]) && std::isnan(logits[5]));
}

TEST(CrossEntropyKernel, LogitsStayWithoutGradient) {
    std::vector<double> logits{1, 2, 3};
    const std::int32_t target = 0;
    double loss = NAN;
    cross_entropy({}, {.dtype = DType::float64, .rows = 1, .vocab = 3, .stride = 3, .targets = &target,
                       .logits = logits.data(), .loss = &loss});
    EXPECT_NEAR(loss, std::log(std::exp(0) + std::exp(1) + std::exp(2)), 1e-14);
    EXPECT_EQ(logits, (std::vector<double>{1, 2, 3}));
}

TEST(Sum, AddsInDoubleAndAccumulates) {
    const std::vector<float> values(50000, 0.1f);
    double total = 1;
    sum({}, {.dtype = DType::float32, .count = 50000, .values = values.data(), .total = &total, .accumulate_total = true});
    EXPECT_NEAR(total, 1 + 50000 * static_cast<double>(0.1f), 1e-8);
    sum({}, {.dtype = DType::float32, .count = 0, .total = &total});
    EXPECT_EQ(total, 0.0);
}

}  // namespace
}  // namespace fenwick::kernels
