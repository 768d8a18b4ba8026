#include "base/timer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "base/device_peaks.h"
#include "base/memory_cuda.h"

namespace fenwick {
namespace {

void pass_time() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

TEST(Timer, MarksAreInOrder) {
    const TimeMark begin(cpu_device);
    pass_time();
    const TimeMark end(cpu_device);
    EXPECT_GE(seconds_between(begin, end), 0.002);
    EXPECT_LE(seconds_between(end, begin), -0.002);
}

TEST(Timer, MarksOfAGpu) {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    const Device device{DeviceType::cuda, 0};
    TimeMark begin(device);
    TimeMark end(device);
    synchronize(device);
    EXPECT_GE(seconds_between(begin, end), 0.0);
    EXPECT_FALSE(cuda_device_name(0).empty());
}

TEST(Timer, LapsGoToTheOperatorBeforeThem) {
    lap("nobody listens");
    EXPECT_FALSE(profiling());
    start_profile(cpu_device);
    EXPECT_TRUE(profiling());
    pass_time();
    lap("a", "forward");
    lap("b", "forward");
    pass_time();
    lap("a", "forward");
    const auto times = stop_profile();
    EXPECT_FALSE(profiling());
    ASSERT_EQ(times.size(), 2u);
    EXPECT_EQ(times.at("a forward").calls, 2);
    EXPECT_GE(times.at("a forward").seconds, 0.004);
    EXPECT_EQ(times.at("b forward").calls, 1);
    EXPECT_TRUE(stop_profile().empty());
}

TEST(DevicePeaks, ByTheDriversName) {
    EXPECT_EQ(peaks_of("NVIDIA H200")->bfloat16_flops, 989e12);
    EXPECT_EQ(peaks_of("NVIDIA H100 80GB HBM3")->bfloat16_flops, 989e12);
    EXPECT_EQ(peaks_of("NVIDIA H100 PCIe")->bfloat16_flops, 756e12);
    EXPECT_EQ(peaks_of("NVIDIA A100-SXM4-40GB")->bfloat16_flops, 312e12);
    EXPECT_EQ(peaks_of("NVIDIA L40S")->bfloat16_flops, 362e12);
    EXPECT_EQ(peaks_of("NVIDIA L4")->bfloat16_flops, 121e12);
    EXPECT_FALSE(peaks_of("A card of tomorrow").has_value());
}

}  // namespace
}  // namespace fenwick
