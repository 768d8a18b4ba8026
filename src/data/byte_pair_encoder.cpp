#include "data/byte_pair_encoder.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "base/error.h"

namespace fenwick::data {

BytePairEncoder::BytePairEncoder(const std::array<std::int32_t, 256>& byte_ids, const std::vector<Merge>& merges)
    : byte_ids_(byte_ids) {
    slots_.assign(std::bit_ceil(2 * merges.size() + 2), {~std::uint64_t{0}, no_rank, 0});
    shift_ = 64 - std::countr_zero(slots_.size());
    for (std::size_t rank = 0; rank < merges.size(); ++rank) {
        const Merge& merge = merges[rank];
        const_cast<Slot&>(find(merge.left, merge.right)) = {
            static_cast<std::uint64_t>(merge.left) << 32 | static_cast<std::uint32_t>(merge.right),
            static_cast<std::uint32_t>(rank), merge.result};
    }
}

void BytePairEncoder::encode(std::string_view word, Workspace& workspace, std::vector<std::int32_t>& ids) const {
    FENWICK_CHECK(word.size() < 0x7fffffff, "a word of {} bytes is too long to encode", word.size());
    constexpr std::uint32_t none = ~0u;
    auto& symbols = workspace.symbols;
    auto& queue = workspace.queue;
    symbols.clear();
    queue.clear();
    const auto size = static_cast<std::uint32_t>(word.size());
    for (std::uint32_t i = 0; i < size; ++i)
        symbols.push_back(
            {byte_ids_[static_cast<unsigned char>(word[i])], i > 0 ? i - 1 : none, i + 1 < size ? i + 1 : none});
    const auto entry = [&](std::uint32_t left) {
        const Slot& slot = find(symbols[left].id, symbols[symbols[left].next].id);
        return static_cast<std::uint64_t>(slot.rank) << 32 | left;
    };
    const auto has_rank = [](std::uint64_t queued) { return queued >> 32 != no_rank; };
    const auto push = [&](std::uint32_t left) {
        const std::uint64_t queued = entry(left);
        if (!has_rank(queued)) return;
        queue.push_back(queued);
        std::push_heap(queue.begin(), queue.end(), std::greater<>());
    };
    for (std::uint32_t i = 0; i + 1 < size; ++i)
        if (const std::uint64_t queued = entry(i); has_rank(queued)) queue.push_back(queued);
    std::make_heap(queue.begin(), queue.end(), std::greater<>());
    while (!queue.empty()) {
        std::pop_heap(queue.begin(), queue.end(), std::greater<>());
        const std::uint64_t queued = queue.back();
        queue.pop_back();
        const auto left = static_cast<std::uint32_t>(queued);
        Symbol& symbol = symbols[left];
        // The pair may be gone: merged away (id -1), at the end, or with another partner.
        if (symbol.id < 0 || symbol.next == none) continue;
        Symbol& partner = symbols[symbol.next];
        const Slot& slot = find(symbol.id, partner.id);
        if (slot.rank != queued >> 32) continue;
        symbol.id = slot.result;
        partner.id = -1;
        symbol.next = partner.next;
        if (symbol.next != none) {
            symbols[symbol.next].previous = left;
            push(left);
        }
        if (symbol.previous != none) push(symbol.previous);
    }
    for (std::uint32_t i = 0; i != none && size > 0; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace fenwick::data
