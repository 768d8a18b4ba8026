// Whole documents packed into rows of T tokens, from their lengths alone.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace fenwick::data {

// A document longer than T gives whole rows of T tokens, as often as T goes into it; what is left of it, and every shorter
// document, is packed with others by best fit, the longest first (best-fit decreasing), inside windows of neighbouring
// documents. Every token is in one row. Deterministic; works in the memory of one window and keeps 4 bytes a document and
// 16 bytes a row.
// Source: Ding et al., "Fewer truncations improve language modeling" (arXiv 2404.10830).
class DocumentPacking {
public:
    explicit DocumentPacking(std::int64_t sequence_length);

    // The next document: tokens [begin, end), begin the end of the one before. finish() comes after the last.
    void add(std::int64_t begin, std::int64_t end);
    void finish();

    struct Row {
        std::int64_t begin = 0;                    // where documents is empty: T tokens of one document from here
        std::span<const std::uint32_t> documents;  // else: of each of these its last length % T tokens
        std::int64_t tokens = 0;                   // in all
    };
    std::int64_t rows() const { return static_cast<std::int64_t>(rows_.size()); }
    Row row(std::int64_t index) const;

private:
    struct StoredRow {
        std::int64_t first;  // token, or place in members_
        std::uint32_t documents, tokens;
    };
    void pack_window();

    std::int64_t length_;
    std::vector<StoredRow> rows_;
    std::vector<std::uint32_t> members_;  // documents, row after row
    // The open window: rests of documents, in the order of these
    std::vector<std::pair<std::uint32_t, std::uint32_t>> rests_;  // tokens, document
    std::int64_t window_tokens_ = 0, documents_ = 0;
};

}  // namespace fenwick::data
