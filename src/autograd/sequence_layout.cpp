#include "autograd/sequence_layout.h"

#include <algorithm>

namespace fenwick {

SequenceLayout SequenceLayout::uniform(std::int64_t batch, std::int64_t length) {
    FENWICK_CHECK(batch >= 1 && length >= 1, "[SequenceLayout] {} rows of {} tokens; at least 1 of each is needed", batch,
                  length);
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(batch) + 1);
    for (std::int64_t i = 0; i <= batch; ++i) offsets[static_cast<std::size_t>(i)] = i * length;
    return packed(std::move(offsets));
}

SequenceLayout SequenceLayout::packed(std::vector<std::int64_t> offsets) {
    FENWICK_CHECK(offsets.size() >= 2 && offsets.front() == 0,
                  "[SequenceLayout] offsets must start at 0 and name at least one document");
    SequenceLayout layout;
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
        const std::int64_t length = offsets[i + 1] - offsets[i];
        FENWICK_CHECK(length != 0, "[SequenceLayout] document {} is empty (offset {} twice); drop it", i, offsets[i]);
        FENWICK_CHECK(length > 0, "[SequenceLayout] offsets fall from {} to {} at document {}; they must rise", offsets[i],
                      offsets[i + 1], i);
        layout.max_length_ = std::max(layout.max_length_, length);
    }
    layout.offsets_ = std::make_shared<const std::vector<std::int64_t>>(std::move(offsets));
    return layout;
}

void SequenceLayout::check(std::string_view op, std::int64_t tokens) const {
    FENWICK_CHECK(offsets_ != nullptr, "[{}] no sequence layout was given", op);
    FENWICK_CHECK(num_tokens() == tokens, "[{}] the sequence layout covers {} tokens, the inputs have {}", op, num_tokens(),
                  tokens);
}

}  // namespace fenwick
