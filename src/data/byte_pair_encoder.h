// Byte pair encoding of single words.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace fenwick::data {

class BytePairEncoder {
public:
    struct Merge {
        std::int32_t left, right, result;
    };
    // byte_ids: the token of each byte. merges: by rank, the first is done first; of two with one pair the last counts.
    BytePairEncoder(const std::array<std::int32_t, 256>& byte_ids, const std::vector<Merge>& merges);

    struct Workspace;
    // Appends the ids of `word`: its bytes, with the pair of the lowest rank (the leftmost of equals) merged until no pair
    // is left that has a rank. O(n log n).
    void encode(std::string_view word, Workspace& workspace, std::vector<std::int32_t>& ids) const;

    struct Symbol {
        std::int32_t id;
        std::uint32_t previous, next;
    };
    struct Workspace {
        std::vector<Symbol> symbols;
        std::vector<std::uint64_t> queue;  // a heap of rank << 32 | index of the left symbol
    };

private:
    static constexpr std::uint32_t no_rank = ~0u;
    struct Slot {
        std::uint64_t pair;
        std::uint32_t rank;
        std::int32_t result;
    };
    // The slot of a pair, or an empty one (no_rank).
    const Slot& find(std::int32_t left, std::int32_t right) const {
        const std::uint64_t pair = static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
        std::size_t at = (pair * 0x9e3779b97f4a7c15ull) >> shift_;
        while (slots_[at].pair != pair && slots_[at].rank != no_rank) at = (at + 1) & (slots_.size() - 1);
        return slots_[at];
    }

    std::array<std::int32_t, 256> byte_ids_;
    std::vector<Slot> slots_;  // open addressing, at most half full
    int shift_ = 0;
};

}  // namespace fenwick::data
