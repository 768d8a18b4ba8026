#include "train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fenwick::train {
namespace {

TEST(Schedule, WarmsUpLinearlyInEveryCourse) {
    for (const auto type : {ScheduleType::cosine, ScheduleType::wsd, ScheduleType::linear, ScheduleType::constant}) {
        const ScheduleConfig schedule{.type = type, .warmup_steps = 10, .min_ratio = 0.1, .decay_steps = 20};
        EXPECT_DOUBLE_EQ(learning_rate(schedule, 2.0, 1, 100), 0.2);
        EXPECT_DOUBLE_EQ(learning_rate(schedule, 2.0, 5, 100), 1.0);
        EXPECT_DOUBLE_EQ(learning_rate(schedule, 2.0, 10, 100), 2.0);
    }
}

TEST(Schedule, Cosine) {
    const ScheduleConfig schedule{.type = ScheduleType::cosine, .warmup_steps = 10, .min_ratio = 0.1};
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 55, 100), 0.55);  // half way: the middle of 1 and 0.1
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 40, 100), 0.1 + 0.9 * 0.75);  // a third: cos(60 degrees) = 1/2
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 100, 100), 0.1);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 150, 100), 0.1);
}

TEST(Schedule, Linear) {
    const ScheduleConfig schedule{.type = ScheduleType::linear, .warmup_steps = 0, .min_ratio = 0.0};
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 1, 4), 0.75);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 4, 4), 0.0);
}

TEST(Schedule, WarmupStableDecay) {
    ScheduleConfig schedule{.type = ScheduleType::wsd, .warmup_steps = 10, .min_ratio = 0.2, .decay_steps = 20};
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 11, 100), 1.0);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 80, 100), 1.0);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 90, 100), 0.6);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 100, 100), 0.2);
    schedule.decay_shape = DecayShape::sqrt;
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 85, 100), 0.2 + 0.8 * 0.5);  // sqrt(1/4)
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 100, 100), 0.2);
}

TEST(Schedule, WarmupOfTheWholeRunAndRunsOfOneStep) {
    for (const auto type : {ScheduleType::cosine, ScheduleType::wsd, ScheduleType::linear, ScheduleType::constant}) {
        EXPECT_TRUE(std::isfinite(learning_rate({.type = type, .warmup_steps = 1, .decay_steps = 1}, 1.0, 1, 1)));
        EXPECT_DOUBLE_EQ(learning_rate({.type = type, .warmup_steps = 8}, 1.0, 8, 8), 1.0);
    }
}

}  // namespace
}  // namespace fenwick::train
