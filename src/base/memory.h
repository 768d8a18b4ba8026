// Owned memory on a device, and the count of it by kind.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/device.h"

namespace fenwick {

// What a block of memory is for; the memory table that `fenwick train` prints has one row a kind.
enum class MemoryKind : std::uint8_t { activations, weights, gradients, optimizer, workspace, data };
inline constexpr std::size_t memory_kind_count = 6;
std::string_view name_of(MemoryKind kind);

// While it lives, Buffers made by this thread count as `kind` (default: activations).
class MemoryKindScope {
public:
    explicit MemoryKindScope(MemoryKind kind);
    ~MemoryKindScope();
    MemoryKindScope(const MemoryKindScope&) = delete;
    MemoryKindScope& operator=(const MemoryKindScope&) = delete;

private:
    MemoryKind previous_;
};
MemoryKind current_memory_kind();

struct MemoryStats {
    std::array<std::int64_t, memory_kind_count> bytes{};       // live now
    std::array<std::int64_t, memory_kind_count> peak_bytes{};  // highest since the last reset, each kind by itself
    std::int64_t total_peak_bytes = 0;                         // highest sum of all kinds
};
MemoryStats memory_stats(DeviceType device);
void reset_peak_memory(DeviceType device);

// Uninitialised memory, aligned to 64 bytes (256 on CUDA). Moves, never copies. On CUDA, allocation and release are
// ordered on the current stream. With the environment variable FENWICK_POISON=1 every new buffer is filled with
// 0xff bytes, which read as NaN in all floating types: an element that nobody wrote is then found by any test.
// Throws Error when the device is out of memory, with the table of what is live.
class Buffer {
public:
    Buffer() = default;
    Buffer(Device device, std::size_t bytes);
    Buffer(Device device, std::size_t bytes, MemoryKind kind);
    Buffer(Buffer&& other) noexcept;
    Buffer& operator=(Buffer&& other) noexcept;
    ~Buffer();

    void* data() const { return data_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    std::size_t bytes() const { return bytes_; }
    Device device() const { return device_; }

private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
    Device device_{};
    MemoryKind kind_ = MemoryKind::activations;
};

// For the start of main(): activations come and go by the hundred megabytes each step, so freed memory stays in the heap
// instead of going back to the system and being faulted in again.
void keep_freed_memory();

// Plain byte operations on either device; on CUDA ordered on the current stream. Copies between devices synchronise
// when host memory is involved, so that the host buffer may be reused at once.
void fill_bytes(Device device, void* data, std::uint8_t value, std::size_t bytes);
void copy_bytes(Device to_device, void* to, Device from_device, const void* from, std::size_t bytes);

}  // namespace fenwick
