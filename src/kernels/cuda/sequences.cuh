// Which document a token is in, on the device.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/tables.cuh"

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

// A device copy of a short table of the host.
struct DeviceTable {
    std::vector<std::int64_t> values;
    Device device;
    Buffer memory;
    const std::int64_t* data = nullptr;
};
inline std::shared_ptr<const DeviceTable> table_on_device(const Exec& exec, std::span<const std::int64_t> values) {
    return recent<DeviceTable>(
        16, [&](const DeviceTable& table) { return table.device == exec.device && std::ranges::equal(table.values, values); },
        [&] {
            auto table = std::make_shared<DeviceTable>();
            table->values.assign(values.begin(), values.end());
            table->device = exec.device;
            Arena arena;
            arena.add(&table->data, values);
            arena.allocate(exec);
            table->memory = arena.release();
            return table;
        });
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
        offsets_ = table_on_device(exec, offsets_of(sequences));
        view_.offsets = offsets_->data;
    }
    const DeviceSequences& view() const { return view_; }

private:
    std::shared_ptr<const DeviceTable> offsets_;
    DeviceSequences view_;
};

}  // namespace fenwick::kernels::cuda
