#include "data/document_packing.h"

#include <algorithm>
#include <limits>
#include <set>

#include "base/error.h"

namespace fenwick::data {
namespace {

// A window ends when it holds at least so much. Larger windows fill rows better (a window's last rows stay open), smaller
// ones keep the documents of a row close together in the file.
constexpr std::size_t window_documents = 4096;
constexpr std::int64_t window_rows = 256;

}  // namespace

DocumentPacking::DocumentPacking(std::int64_t sequence_length) : length_(sequence_length) {
    FENWICK_CHECK(length_ >= 1 && length_ <= std::int64_t{1} << 31, "[packing] rows of {} tokens; 1 to 2^31 are possible", length_);
}

void DocumentPacking::add(std::int64_t begin, std::int64_t end) {
    FENWICK_CHECK(documents_ < std::numeric_limits<std::uint32_t>::max(), "[packing] more than {} documents in one corpus",
                  documents_);
    const auto document = static_cast<std::uint32_t>(documents_++);
    for (; end - begin >= length_; begin += length_) rows_.push_back({begin, 0, static_cast<std::uint32_t>(length_)});
    if (begin == end) return;
    rests_.emplace_back(static_cast<std::uint32_t>(end - begin), document);
    window_tokens_ += end - begin;
    if (rests_.size() >= window_documents && window_tokens_ / length_ >= window_rows) pack_window();
}

void DocumentPacking::finish() {
    pack_window();
    rows_.shrink_to_fit();
    members_.shrink_to_fit();
}

void DocumentPacking::pack_window() {
    std::vector<std::uint32_t> order(rests_.size());  // places in rests_, longest first
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return rests_[a].first > rests_[b].first; });

    std::vector<std::uint32_t> row_of(rests_.size()), free;  // free: of each row of this window
    std::set<std::pair<std::uint32_t, std::uint32_t>> open;  // (free tokens, row)
    for (const std::uint32_t i : order) {
        const std::uint32_t tokens = rests_[i].first;
        auto best = open.lower_bound({tokens, 0});
        if (best == open.end()) {
            row_of[i] = static_cast<std::uint32_t>(free.size());
            free.push_back(static_cast<std::uint32_t>(length_ - tokens));
            open.emplace(free.back(), row_of[i]);
        } else {
            auto node = open.extract(best);
            row_of[i] = node.value().second;
            free[row_of[i]] -= tokens;
            if (free[row_of[i]] == 0) continue;
            node.value().first = free[row_of[i]];
            open.insert(std::move(node));
        }
    }

    // Members of each row, in the order of the file.
    std::vector<std::uint32_t> counts(free.size(), 0);
    for (const std::uint32_t row : row_of) ++counts[row];
    std::vector<std::size_t> next;
    for (std::size_t row = 0, first = members_.size(); row < free.size(); first += counts[row++]) {
        next.push_back(first);
        rows_.push_back({static_cast<std::int64_t>(first), counts[row], static_cast<std::uint32_t>(length_ - free[row])});
    }
    members_.resize(members_.size() + rests_.size());
    for (std::size_t i = 0; i < rests_.size(); ++i) members_[next[row_of[i]]++] = rests_[i].second;
    rests_.clear();
    window_tokens_ = 0;
}

DocumentPacking::Row DocumentPacking::row(std::int64_t index) const {
    const StoredRow& stored = rows_[static_cast<std::size_t>(index)];
    if (stored.documents == 0) return {stored.first, {}, stored.tokens};
    return {0, {members_.data() + stored.first, stored.documents}, stored.tokens};
}

}  // namespace fenwick::data
