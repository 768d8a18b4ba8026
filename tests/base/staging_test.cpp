#include "base/staging.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "base/memory_cuda.h"

namespace fenwick {
namespace {

// Hands `rounds` blocks of numbers through one buffer; each is read out of the device's memory behind other work.
void check(Device device, std::size_t count, int rounds) {
    const Buffer to(device, 4 * count), busy(device, std::size_t{1} << 26);
    const Buffer kept(device, 4 * count * static_cast<std::size_t>(rounds));
    StagingBuffer staging(device, 4 * count);
    EXPECT_EQ(staging.bytes(), 4 * count);
    for (int round = 0; round < rounds; ++round) {
        staging.wait_until_free();
        auto* host = static_cast<std::uint32_t*>(staging.host());
        for (std::size_t i = 0; i < count; ++i) host[i] = static_cast<std::uint32_t>(1000 * static_cast<std::size_t>(round) + i);
        staging.upload(to.data());
        staging.acquire();
        fill_bytes(device, busy.data(), 1, busy.bytes());
        copy_bytes(device, kept.as<std::uint32_t>() + count * static_cast<std::size_t>(round), device, to.data(), 4 * count);
        staging.release();
    }
    std::vector<std::uint32_t> found(count * static_cast<std::size_t>(rounds));
    copy_bytes(cpu_device, found.data(), device, kept.data(), kept.bytes());
    for (std::size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], 1000 * (i / count) + i % count);
}

TEST(StagingBuffer, OnTheCpu) {
    for (const std::size_t count : {1, 7, 999}) check(cpu_device, count, 5);
}

TEST(StagingBuffer, OnAGpu) {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    for (const std::size_t count : {1, 7, 999}) check({DeviceType::cuda, 0}, count, 50);
}

}  // namespace
}  // namespace fenwick
