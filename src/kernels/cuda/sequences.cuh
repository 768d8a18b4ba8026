// Which document a token is in, on the device.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {

// Sequences as a kernel parameter. Equal documents (a plain batch) need no table; otherwise `offsets` is on the device.
struct DeviceSequences {
    std::int64_t count = 0, tokens = 0;
    std::int64_t length = 0;  // of every document, or 0: see offsets
    const std::int64_t* offsets = nullptr;

    // The document that holds `token` < tokens.
    __device__ std::int64_t document_of(std::int64_t token) const {
        if (length > 0) return token / length;
        std::int64_t low = 0, high = count;  // offsets[low] <= token < offsets[high]
        while (high - low > 1) {
            const std::int64_t middle = (low + high) / 2;
            if (offsets[middle] <= token)
                low = middle;
            else
                high = middle;
        }
        return low;
    }
    __device__ std::int64_t start_of(std::int64_t document) const {
        return length > 0 ? document * length : offsets[document];
    }
    __device__ std::int64_t end_of(std::int64_t document) const { return start_of(document + 1); }
};

// Walks tokens in order and knows the bounds of the document they are in.
struct DocumentCursor {
    std::int64_t document, start, end;

    __device__ DocumentCursor(const DeviceSequences& sequences, std::int64_t token)
        : document(sequences.document_of(token)), start(sequences.start_of(document)), end(sequences.end_of(document)) {}
    // To the next token; `token` is less than the number of tokens and no more than one further than before.
    __device__ void advance(const DeviceSequences& sequences, std::int64_t token) {
        if (token < end) return;
        ++document;
        start = end;
        end = sequences.end_of(document);
    }
};

// A device copy of a short table of the host. Every layer asks for the same ones, so the last few are kept: a training step on
// packed documents copies each table once.
inline std::shared_ptr<const Buffer> table_on_device(const Exec& exec, const std::int64_t* values, std::size_t count) {
    struct Entry {
        std::vector<std::int64_t> values;
        std::shared_ptr<const Buffer> buffer;
    };
    constexpr std::size_t kept = 16;
    // Never destroyed: at process exit the CUDA runtime may be gone before static objects.
    static auto& mutex = *new std::mutex;
    static auto& cache = *new std::vector<Entry>;  // most recent last
    const std::lock_guard lock(mutex);
    const auto found = std::find_if(cache.rbegin(), cache.rend(), [&](const Entry& entry) {
        return entry.buffer->device() == exec.device && std::equal(entry.values.begin(), entry.values.end(), values, values + count);
    });
    if (found != cache.rend()) {
        std::rotate(found.base() - 1, found.base(), cache.end());
        return cache.back().buffer;
    }
    if (cache.size() == kept) cache.erase(cache.begin());
    auto buffer = std::make_shared<const Buffer>(workspace(exec, static_cast<std::int64_t>(count * sizeof(std::int64_t))));
    copy_bytes(exec.device, buffer->data(), cpu_device, values, buffer->bytes());
    cache.push_back({{values, values + count}, buffer});
    return buffer;
}

// Keep it until the kernels that use it are queued.
class SequencesOnDevice {
public:
    SequencesOnDevice(const Exec& exec, const Sequences& sequences) {
        view_.count = sequences.count;
        view_.tokens = sequences.num_tokens();
        const std::int64_t length = sequences.length(0);
        bool equal = true;
        for (std::int64_t i = 1; i < sequences.count && equal; ++i) equal = sequences.length(i) == length;
        if (equal) {
            view_.length = length;
            return;
        }
        offsets_ = table_on_device(exec, sequences.offsets, static_cast<std::size_t>(sequences.count + 1));
        view_.offsets = offsets_->as<std::int64_t>();
    }
    const DeviceSequences& view() const { return view_; }

private:
    std::shared_ptr<const Buffer> offsets_;
    DeviceSequences view_;
};

}  // namespace fenwick::kernels::cuda
