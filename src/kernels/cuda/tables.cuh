// Tables that the host makes for kernels, of documents mostly, and memory that a call carves up.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {

// One piece of device memory for many arrays: first the sizes, then the pointers. The caller's pointers are set by
// allocate() or place(), and must be where they were when they were added.
class Arena {
public:
    template <class E>
    void add(E** pointer, std::int64_t count) {
        entries_.push_back({[pointer](void* at) { *pointer = static_cast<E*>(at); }, total_});
        total_ += round_up(count * static_cast<std::int64_t>(sizeof(E)), 256);
    }
    // The array is a copy of `table`.
    template <class E>
    void add(const E** pointer, std::span<const E> table) {
        contents_.resize(static_cast<std::size_t>(total_) + table.size_bytes());
        if (!table.empty()) std::memcpy(contents_.data() + total_, table.data(), table.size_bytes());
        add(pointer, static_cast<std::int64_t>(table.size()));
    }
    void allocate(const Exec& exec, MemoryKind kind = MemoryKind::workspace) {
        buffer_ = Buffer(exec.device, static_cast<std::size_t>(total_), kind);
        place(buffer_);
        if (contents_.empty()) return;
        // Pageable host memory is staged before the call returns.
        FENWICK_CUDA_CHECK(
            cudaMemcpyAsync(buffer_.data(), contents_.data(), contents_.size(), cudaMemcpyHostToDevice, stream_of(exec)));
    }
    // Into memory that another arena of the same sizes has allocated.
    void place(const Buffer& buffer) const {
        for (auto& entry : entries_) entry.set(buffer.as<unsigned char>() + entry.offset);
    }
    Buffer release() { return std::move(buffer_); }

private:
    struct Entry {
        std::function<void(void*)> set;
        std::int64_t offset;
    };
    std::vector<Entry> entries_;
    std::vector<unsigned char> contents_;
    std::int64_t total_ = 0;
    Buffer buffer_;
};

inline std::span<const std::int64_t> offsets_of(const Sequences& sequences) {
    return {sequences.offsets, static_cast<std::size_t>(sequences.count) + 1};
}

// The entry that `matches`, else what make() gives. Every layer of a model asks for the same ones, so the last `kept` of an
// Entry's type stay: a training step makes each once.
template <class Entry, class Matches, class Make>
std::shared_ptr<const Entry> recent(std::size_t kept, Matches&& matches, Make&& make) {
    // Never destroyed: at process exit the CUDA runtime may be gone before static objects.
    static auto& mutex = *new std::mutex;
    static auto& cache = *new std::vector<std::shared_ptr<const Entry>>;  // most recent last
    const std::lock_guard lock(mutex);
    const auto found = std::find_if(cache.rbegin(), cache.rend(), [&](const auto& entry) { return matches(*entry); });
    if (found != cache.rend()) {
        std::rotate(found.base() - 1, found.base(), cache.end());
        return cache.back();
    }
    if (cache.size() == kept) cache.erase(cache.begin());
    return cache.emplace_back(make());
}

}  // namespace fenwick::kernels::cuda
