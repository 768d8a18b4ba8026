// Which document a token is in, on the device.
#pragma once

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

// Owns the device copy of the offsets; keep it until the kernels that use it are queued.
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
        const std::int64_t bytes = (sequences.count + 1) * static_cast<std::int64_t>(sizeof(std::int64_t));
        buffer_ = workspace(exec, bytes);
        // Pageable host memory is staged before the call returns, so the caller may free it at once.
        FENWICK_CUDA_CHECK(cudaMemcpyAsync(buffer_.data(), sequences.offsets, static_cast<std::size_t>(bytes),
                                           cudaMemcpyHostToDevice, stream_of(exec)));
        view_.offsets = buffer_.as<std::int64_t>();
    }
    const DeviceSequences& view() const { return view_; }

private:
    Buffer buffer_;
    DeviceSequences view_;
};

}  // namespace fenwick::kernels::cuda
