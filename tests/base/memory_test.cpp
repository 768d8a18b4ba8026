#include "base/memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "base/dtype.h"
#include "support/temporary_folder.h"

namespace fenwick {
namespace {

using testing::HasSubstr;

std::int64_t live(MemoryKind kind) { return memory_stats(DeviceType::cpu).bytes[static_cast<std::size_t>(kind)]; }
std::int64_t peak(MemoryKind kind) { return memory_stats(DeviceType::cpu).peak_bytes[static_cast<std::size_t>(kind)]; }

TEST(Memory, CountsByKindAndPeak) {
    const auto weights = live(MemoryKind::weights), workspace = live(MemoryKind::workspace);
    reset_peak_memory(DeviceType::cpu);
    const auto total = memory_stats(DeviceType::cpu).total_peak_bytes;
    {
        const MemoryKindScope scope(MemoryKind::weights);
        EXPECT_EQ(current_memory_kind(), MemoryKind::weights);
        const Buffer a(cpu_device, 1000);
        const Buffer b(cpu_device, 500, MemoryKind::workspace);
        EXPECT_EQ(live(MemoryKind::weights), weights + 1000);
        EXPECT_EQ(live(MemoryKind::workspace), workspace + 500);
    }
    EXPECT_EQ(current_memory_kind(), MemoryKind::activations);
    EXPECT_EQ(live(MemoryKind::weights), weights);
    EXPECT_EQ(live(MemoryKind::workspace), workspace);
    EXPECT_EQ(peak(MemoryKind::weights), weights + 1000);
    EXPECT_EQ(memory_stats(DeviceType::cpu).total_peak_bytes, total + 1500);
    reset_peak_memory(DeviceType::cpu);
    EXPECT_EQ(peak(MemoryKind::weights), weights);
}

TEST(Memory, BuffersAreAlignedAndMove) {
    const auto before = live(MemoryKind::data);
    Buffer a(cpu_device, 100, MemoryKind::data);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data()) % 64, 0u);
    void* const data = a.data();
    Buffer b = std::move(a);
    EXPECT_EQ(b.data(), data);
    EXPECT_EQ(b.bytes(), 100u);
    EXPECT_EQ(live(MemoryKind::data), before + 100);
    Buffer c(cpu_device, 7, MemoryKind::data);
    c = std::move(b);
    EXPECT_EQ(c.data(), data);
    const Buffer none(cpu_device, 0);
    EXPECT_EQ(none.data(), nullptr);
    EXPECT_EQ(Buffer().bytes(), 0u);
}

TEST(Memory, BytesAreFilledAndCopied) {
    const Buffer a(cpu_device, 16), b(cpu_device, 16);
    fill_bytes(cpu_device, a.data(), 7, 16);
    copy_bytes(cpu_device, b.data(), cpu_device, a.data(), 16);
    EXPECT_EQ(b.as<std::uint8_t>()[15], 7);
}

TEST(Memory, PoisonReadsAsNaN) {
    const char* wanted = std::getenv("FENWICK_POISON");
    if (wanted == nullptr || std::strcmp(wanted, "1") != 0) GTEST_SKIP() << "FENWICK_POISON is not set";
    const Buffer a(cpu_device, 16);
    EXPECT_TRUE(std::isnan(a.as<float>()[3]));
    EXPECT_TRUE(std::isnan(a.as<double>()[1]));
}

TEST(Memory, OutOfMemorySaysWhatIsLive) {
    const std::string message = test::error_of([] { const Buffer huge(cpu_device, std::size_t{1} << 62); });
    EXPECT_THAT(message, HasSubstr("out of memory on cpu"));
    EXPECT_THAT(message, HasSubstr("activations"));
    EXPECT_THAT(test::error_of([] { const Buffer wraps(cpu_device, ~std::size_t{0}); }), HasSubstr("out of memory on cpu"));
}

TEST(DType, SizesAndNames) {
    EXPECT_EQ(size_of(DType::float64), 8u);
    EXPECT_EQ(size_of(DType::bfloat16), 2u);
    EXPECT_EQ(name_of(DType::bfloat16), "bfloat16");
    EXPECT_EQ(dtype_of<std::int32_t>, DType::int32);
    EXPECT_TRUE(is_floating(DType::bfloat16));
    EXPECT_FALSE(is_floating(DType::uint8));
    EXPECT_EQ(gate_dtype(DType::bfloat16), DType::float32);
    EXPECT_EQ(gate_dtype(DType::float64), DType::float64);
    const auto size = [](DType dtype) { return dispatch_cpu_float("op", dtype, [](auto tag) { return sizeof(typename decltype(tag)::type); }); };
    EXPECT_EQ(size(DType::float32), 4u);
    EXPECT_EQ(size(DType::float64), 8u);
    EXPECT_EQ(test::error_of([&] { size(DType::bfloat16); }), "[op] dtype bfloat16 is not available on the CPU; use float32 or float64");
}

}  // namespace
}  // namespace fenwick
