#include "base/memory.h"

#include <malloc.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/memory_cuda.h"

namespace fenwick {
namespace {

thread_local MemoryKind thread_memory_kind = MemoryKind::activations;

struct Accounts {
    std::mutex mutex;
    MemoryStats stats[2];
};
Accounts& accounts() {
    static Accounts* instance = new Accounts;  // outlives every static Buffer
    return *instance;
}

void account(Device device, MemoryKind kind, std::int64_t bytes) {
    auto& all = accounts();
    std::lock_guard lock(all.mutex);
    MemoryStats& stats = all.stats[static_cast<std::size_t>(device.type)];
    auto& live = stats.bytes[static_cast<std::size_t>(kind)];
    live += bytes;
    auto& peak = stats.peak_bytes[static_cast<std::size_t>(kind)];
    if (live > peak) peak = live;
    std::int64_t total = 0;
    for (auto each : stats.bytes) total += each;
    if (total > stats.total_peak_bytes) stats.total_peak_bytes = total;
}

bool poison_wanted() {
    static const bool wanted = [] {
        const char* text = std::getenv("FENWICK_POISON");
        return text != nullptr && *text != '\0' && std::strcmp(text, "0") != 0;
    }();
    return wanted;
}

[[noreturn]] void out_of_memory(Device device, std::size_t bytes) {
    const MemoryStats stats = memory_stats(device.type);
    std::string table;
    for (std::size_t kind = 0; kind < memory_kind_count; ++kind)
        table += fmt::format("{}{} {:.1f} MiB", kind ? ", " : "", name_of(static_cast<MemoryKind>(kind)),
                             static_cast<double>(stats.bytes[kind]) / 0x1p20);
    fail("out of memory on {}: {:.1f} MiB more were asked for while these are live: {}; lower train.micro_batch or "
         "data.sequence_length, or set train.recompute: block",
         name_of(device), static_cast<double>(bytes) / 0x1p20, table);
}

}  // namespace

std::string_view name_of(MemoryKind kind) {
    static constexpr std::string_view names[] = {"activations", "weights", "gradients", "optimizer", "workspace", "data"};
    static_assert(std::size(names) == memory_kind_count);
    return names[static_cast<std::size_t>(kind)];
}

MemoryKindScope::MemoryKindScope(MemoryKind kind) : previous_(std::exchange(thread_memory_kind, kind)) {}
MemoryKindScope::~MemoryKindScope() { thread_memory_kind = previous_; }
MemoryKind current_memory_kind() { return thread_memory_kind; }

MemoryStats memory_stats(DeviceType device) {
    auto& all = accounts();
    std::lock_guard lock(all.mutex);
    return all.stats[static_cast<std::size_t>(device)];
}

void reset_peak_memory(DeviceType device) {
    auto& all = accounts();
    std::lock_guard lock(all.mutex);
    MemoryStats& stats = all.stats[static_cast<std::size_t>(device)];
    stats.peak_bytes = stats.bytes;
    stats.total_peak_bytes = 0;
    for (auto each : stats.bytes) stats.total_peak_bytes += each;
}

Buffer::Buffer(Device device, std::size_t bytes) : Buffer(device, bytes, thread_memory_kind) {}

Buffer::Buffer(Device device, std::size_t bytes, MemoryKind kind) : bytes_(bytes), device_(device), kind_(kind) {
    if (bytes == 0) return;
    if (device.is_cpu()) {
        const std::size_t rounded = (bytes + 63) / 64 * 64;
        data_ = rounded < bytes ? nullptr : std::aligned_alloc(64, rounded);
    } else {
        data_ = detail::cuda_allocate(device.index, bytes);
    }
    if (data_ == nullptr) out_of_memory(device, bytes);
    account(device_, kind_, static_cast<std::int64_t>(bytes_));
    if (poison_wanted()) fill_bytes(device_, data_, 0xff, bytes_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_),
      kind_(other.kind_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(device_, other.device_);
    std::swap(kind_, other.kind_);
    return *this;
}

Buffer::~Buffer() {
    if (data_ == nullptr) return;
    account(device_, kind_, -static_cast<std::int64_t>(bytes_));
    if (device_.is_cpu())
        std::free(data_);
    else
        detail::cuda_release(device_.index, data_);
}

void keep_freed_memory() {
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, -1);
}

void fill_bytes(Device device, void* data, std::uint8_t value, std::size_t bytes) {
    if (bytes == 0) return;
    if (device.is_cpu())
        std::memset(data, value, bytes);
    else
        detail::cuda_fill(device.index, data, value, bytes);
}

void copy_bytes(Device to_device, void* to, Device from_device, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    if (to_device.is_cpu() && from_device.is_cpu())
        std::memcpy(to, from, bytes);
    else
        detail::cuda_copy(to_device, to, from_device, from, bytes);
}

}  // namespace fenwick
