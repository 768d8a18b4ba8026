// Which tokens of a batch form a document.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "autograd/tensor.h"

namespace fenwick {

// Documents packed along the flattened token dimension [B * T]; nothing (convolution, scan, attention, position) crosses
// a boundary. Cheap to copy: the offsets are shared.
class SequenceLayout {
public:
    SequenceLayout() = default;
    // `batch` rows of `length` tokens, each row one document.
    static SequenceLayout uniform(std::int64_t batch, std::int64_t length);
    // cu_seqlens: offsets[0] == 0, strictly increasing (an empty document is refused by its number).
    static SequenceLayout packed(std::vector<std::int64_t> offsets);

    std::int64_t count() const { return static_cast<std::int64_t>(offsets_->size()) - 1; }
    std::int64_t num_tokens() const { return offsets_->back(); }
    std::int64_t max_length() const { return max_length_; }
    const std::vector<std::int64_t>& offsets() const { return *offsets_; }
    // Valid while this layout (or a copy) lives.
    kernels::Sequences sequences() const { return {.count = count(), .offsets = offsets_->data()}; }
    // Throws unless it covers exactly `tokens` tokens.
    void check(std::string_view op, std::int64_t tokens) const;

private:
    std::shared_ptr<const std::vector<std::int64_t>> offsets_;
    std::int64_t max_length_ = 0;
};

}  // namespace fenwick
