#include "data/document_packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/random.h"

namespace fenwick::data {
namespace {

using Range = std::pair<std::int64_t, std::int64_t>;

// The documents' lengths one after another, packed; every row as the token ranges in it.
std::vector<std::vector<Range>> pack(const std::vector<std::int64_t>& lengths, std::int64_t row_length) {
    DocumentPacking packing(row_length);
    std::vector<Range> documents;
    std::int64_t begin = 0;
    for (const std::int64_t length : lengths) {
        packing.add(begin, begin + length);
        documents.emplace_back(begin, begin + length);
        begin += length;
    }
    packing.finish();
    std::vector<std::vector<Range>> rows;
    for (std::int64_t i = 0; i < packing.rows(); ++i) {
        const auto row = packing.row(i);
        rows.emplace_back();
        if (row.documents.empty()) rows.back().emplace_back(row.begin, row.begin + row_length);
        for (const auto document : row.documents) {
            const auto [first, last] = documents[document];
            rows.back().emplace_back(last - (last - first) % row_length, last);
        }
        std::int64_t tokens = 0;
        for (const auto& range : rows.back()) tokens += range.second - range.first;
        EXPECT_EQ(tokens, row.tokens);
        EXPECT_LE(tokens, row_length);
    }
    return rows;
}

// Of the kinds: 0 short ones, 1 of single tokens, 2 long ones, 3 everything.
std::vector<std::int64_t> random_lengths(int kind, std::int64_t count, std::int64_t row_length, std::uint64_t seed) {
    Random random(seed, static_cast<std::uint64_t>(kind));
    std::vector<std::int64_t> lengths;
    for (std::int64_t i = 0; i < count; ++i) {
        const auto below = [&](std::int64_t bound) { return 1 + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(bound))); };
        const std::uint64_t which = kind < 3 ? static_cast<std::uint64_t>(kind) : random.below(4);
        lengths.push_back(which == 0   ? below(std::max<std::int64_t>(row_length / 3, 1))
                          : which == 1 ? 1
                          : which == 2 ? below(5 * row_length)
                                       : row_length * below(3));
    }
    return lengths;
}

TEST(DocumentPacking, EveryTokenIsInOneRow) {
    for (const std::int64_t row_length : {1, 2, 7, 64, 1000})
        for (int kind = 0; kind < 4; ++kind)
            for (const std::int64_t count : {1, 5, 300, 10000}) {
                const auto lengths = random_lengths(kind, count, row_length, 1);
                std::vector<Range> all;
                for (const auto& row : pack(lengths, row_length)) all.insert(all.end(), row.begin(), row.end());
                std::sort(all.begin(), all.end());
                std::int64_t next = 0;
                for (const auto& [begin, end] : all) {
                    ASSERT_EQ(begin, next);
                    ASSERT_GT(end, begin);
                    next = end;
                }
                std::int64_t total = 0;
                for (const auto length : lengths) total += length;
                EXPECT_EQ(next, total);
            }
}

// Documents that fit into a row are never cut, longer ones only where a whole row ends.
TEST(DocumentPacking, CutsOnlyWhatIsLongerThanARow) {
    const std::int64_t row_length = 50;
    const auto lengths = random_lengths(3, 3000, row_length, 2);
    std::vector<std::int64_t> begins{0};
    for (const auto length : lengths) begins.push_back(begins.back() + length);
    for (const auto& row : pack(lengths, row_length))
        for (const auto& [begin, end] : row) {
            const auto document = std::upper_bound(begins.begin(), begins.end(), begin) - 1;
            EXPECT_LE(end, document[1]);
            EXPECT_EQ((begin - document[0]) % row_length, 0);
            EXPECT_TRUE(end == document[1] || end - begin == row_length);
        }
}

// Best fit by looking at every open row, for a corpus of one window.
TEST(DocumentPacking, IsBestFitLongestFirst) {
    for (const std::int64_t row_length : {3, 10, 77})
        for (int kind = 0; kind < 4; ++kind) {
            const auto lengths = random_lengths(kind, 500, row_length, 3);
            std::vector<std::pair<std::int64_t, std::size_t>> rests;  // minus length, document: ties in the order of the file
            for (std::size_t i = 0; i < lengths.size(); ++i)
                if (lengths[i] % row_length != 0) rests.emplace_back(-(lengths[i] % row_length), i);
            std::sort(rests.begin(), rests.end());
            std::vector<std::int64_t> used;
            std::vector<std::vector<std::size_t>> rows;
            for (const auto& [negative, document] : rests) {
                std::size_t best = used.size();
                for (std::size_t row = 0; row < used.size(); ++row)
                    if (used[row] - negative <= row_length && (best == used.size() || used[row] > used[best])) best = row;
                if (best == used.size()) {
                    used.push_back(0);
                    rows.emplace_back();
                }
                used[best] -= negative;
                rows[best].push_back(document);
            }
            std::vector<std::vector<Range>> expected;
            std::vector<std::int64_t> begins{0};
            for (const auto length : lengths) begins.push_back(begins.back() + length);
            for (auto& row : rows) {
                std::sort(row.begin(), row.end());
                expected.emplace_back();
                for (const auto document : row)
                    expected.back().emplace_back(begins[document + 1] - lengths[document] % row_length, begins[document + 1]);
            }
            auto found = pack(lengths, row_length);
            std::erase_if(found, [&](const auto& row) { return row[0].second - row[0].first == row_length; });
            EXPECT_EQ(found, expected) << "rows of " << row_length << ", kind " << kind;
        }
}

// Text has lengths over several powers of ten; a window is large enough to fill rows of any length with them.
TEST(DocumentPacking, FillsRows) {
    Random random(4);
    std::vector<std::int64_t> lengths;
    std::int64_t tokens = 0;
    for (int i = 0; i < 60000; ++i) {
        lengths.push_back(std::max<std::int64_t>(1, static_cast<std::int64_t>(std::exp(6.0 + 1.2 * random.normal()))));
        tokens += lengths.back();
    }
    for (const std::int64_t row_length : {512, 2048, 16384, 131072}) {
        const auto rows = static_cast<std::int64_t>(pack(lengths, row_length).size());
        EXPECT_GT(static_cast<double>(tokens) / static_cast<double>(rows * row_length), 0.99) << "rows of " << row_length;
    }
}

}  // namespace
}  // namespace fenwick::data
