// Packed layouts for property tests.
#pragma once

#include <algorithm>

#include "autograd/sequence_layout.h"
#include "base/random.h"

namespace fenwick::test {

// Documents of random lengths, one in three of a single token, that cover `tokens`.
inline SequenceLayout random_layout(std::int64_t tokens, std::uint64_t seed) {
    Random random(seed, 7);
    std::vector<std::int64_t> offsets{0};
    while (offsets.back() < tokens) {
        const auto length = random.below(3) == 0 ? 1 : 1 + static_cast<std::int64_t>(random.below(100));
        offsets.push_back(std::min(tokens, offsets.back() + length));
    }
    return SequenceLayout::packed(std::move(offsets));
}

}  // namespace fenwick::test
