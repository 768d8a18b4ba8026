#include "data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "base/random.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

using test::error_of;
using testing::HasSubstr;

// A token file whose tokens (the last excepted, which ends the document) are `tokens`.
void write_tokens(const std::string& path, const std::vector<std::int32_t>& tokens) {
    TokenFileWriter writer(path, *open_tokenizer("bytes"));
    writer.append(tokens.data(), static_cast<std::int64_t>(tokens.size()));
    writer.end_document(static_cast<std::int64_t>(tokens.size()), 1);
    writer.finish();
}

// Tokens that tell their place: pairs (place / 256, place % 256) would need two, so places below 256 only.
std::vector<std::int32_t> places(std::int64_t begin, std::int64_t end) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(end - begin));
    std::iota(values.begin(), values.end(), static_cast<std::int32_t>(begin));
    return values;
}

struct Case {
    std::int64_t tokens, length, rows;
};

class LoaderCases : public testing::TestWithParam<Case> {
protected:
    // Two files, 0 ... n - 3, 256 and n - 2, 256 among them: split at a third.
    LoaderOptions options(std::uint64_t seed = 7, bool shuffle = true) {
        const auto [tokens, length, rows] = GetParam();
        const std::int64_t split = std::max<std::int64_t>(tokens / 3, 1);
        write_tokens(folder_ / "a.h5", places(0, split - 1));
        write_tokens(folder_ / "b.h5", places(split, tokens - 1));
        return {{folder_ / "a.h5", folder_ / "b.h5"}, length, rows, seed, shuffle};
    }
    // The stream that options() makes.
    std::vector<std::int32_t> stream() const {
        const std::int64_t tokens = GetParam().tokens, split = std::max<std::int64_t>(tokens / 3, 1);
        auto values = places(0, tokens);
        values[static_cast<std::size_t>(split - 1)] = values.back() = 256;
        return values;
    }
    test::TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(, LoaderCases,
                         testing::Values(Case{2, 1, 1}, Case{2, 5, 3}, Case{3, 1, 2}, Case{65, 8, 3}, Case{66, 8, 3}, Case{64, 8, 3},
                                         Case{200, 7, 4}, Case{201, 16, 100}, Case{250, 1, 13}, Case{250, 249, 2}, Case{250, 300, 1}));

// The rows of `batches` global batches, one after the other: (inputs, targets) of a row each.
std::vector<std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>> rows_of(Loader& loader, std::int64_t global_rows,
                                                                                      std::int64_t batches, std::int64_t part) {
    std::vector<std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>> rows;
    for (std::int64_t b = 0; b < batches; ++b) {
        std::int64_t valid = 0;
        for (std::int64_t first = 0; first < global_rows; first += part) {
            const Batch batch = loader.peek(first, std::min(part, global_rows - first));
            valid += batch.valid_targets;
            for (std::int64_t r = 0; r < batch.rows; ++r)
                rows.push_back({{batch.inputs.begin() + r * batch.length, batch.inputs.begin() + (r + 1) * batch.length},
                                {batch.targets.begin() + r * batch.length, batch.targets.begin() + (r + 1) * batch.length}});
        }
        EXPECT_EQ(valid, loader.valid_targets());
        loader.advance();
    }
    return rows;
}

TEST_P(LoaderCases, EveryTokenIsATargetOncePerEpoch) {
    const auto [tokens, length, global_rows] = GetParam();
    const auto all = stream();
    for (const bool shuffle : {false, true}) {
        Loader loader(options(7, shuffle));
        EXPECT_EQ(loader.tokens_per_epoch(), tokens - 1);
        const std::int64_t per_epoch = loader.rows_per_epoch();
        ASSERT_EQ(per_epoch, (tokens - 1 + length - 1) / length);
        const std::int64_t epochs = 3, batches = (epochs * per_epoch + global_rows - 1) / global_rows;
        const auto rows = rows_of(loader, global_rows, batches, global_rows);
        for (std::int64_t epoch = 0; epoch < epochs; ++epoch) {
            std::vector<std::int32_t> pairs_found, pairs_expected;  // input and target as one number
            for (std::int64_t r = 0; r < per_epoch; ++r) {
                const auto& [inputs, targets] = rows[static_cast<std::size_t>(epoch * per_epoch + r)];
                for (std::size_t t = 0; t < inputs.size(); ++t) {
                    EXPECT_GE(inputs[t], 0);
                    EXPECT_LE(inputs[t], 256);
                    if (targets[t] != -100) pairs_found.push_back(inputs[t] * 1000 + targets[t]);
                    if (t > 0 && targets[t] != -100) {
                        EXPECT_EQ(inputs[t], targets[t - 1]);
                    }
                }
                if (!shuffle) {
                    EXPECT_EQ(inputs[0], all[static_cast<std::size_t>(r * length)]);
                }
            }
            for (std::size_t i = 1; i < all.size(); ++i) pairs_expected.push_back(all[i - 1] * 1000 + all[i]);
            std::sort(pairs_found.begin(), pairs_found.end());
            std::sort(pairs_expected.begin(), pairs_expected.end());
            EXPECT_EQ(pairs_found, pairs_expected) << "epoch " << epoch;
        }
    }
}

TEST_P(LoaderCases, OrderDoesNotDependOnHowABatchIsShared) {
    const auto given = options();
    Loader whole(given);
    const std::int64_t batches = 2 * whole.rows_per_epoch() / given.rows + 2;
    const auto expected = rows_of(whole, given.rows, batches, given.rows);
    for (const std::int64_t part : {1, 2, 3}) {
        Loader loader(given);
        EXPECT_EQ(rows_of(loader, given.rows, batches, part), expected) << "in parts of " << part;
    }
}

TEST_P(LoaderCases, ContinuesExactlyFromAnyState) {
    const auto given = options();
    Loader loader(given);
    const std::int64_t batches = std::min<std::int64_t>(2 * loader.rows_per_epoch() / given.rows + 2, 12);
    std::vector<LoaderState> states;
    for (std::int64_t b = 0; b < batches; ++b) {
        states.push_back(loader.state());
        loader.advance();
    }
    loader.seek({0, 0});
    const auto expected = rows_of(loader, given.rows, batches, given.rows);
    for (std::int64_t b = 0; b < batches; ++b) {
        Loader resumed(given);
        resumed.seek(states[static_cast<std::size_t>(b)]);
        EXPECT_EQ(resumed.state(), states[static_cast<std::size_t>(b)]);
        const auto rows = rows_of(resumed, given.rows, batches - b, given.rows);
        EXPECT_TRUE(std::equal(rows.begin(), rows.end(), expected.begin() + b * given.rows, expected.end())) << "batch " << b;
    }
}

TEST(Loader, EpochsAndSeedsHaveOrdersOfTheirOwn) {
    test::TemporaryFolder folder;
    write_tokens(folder / "a.h5", places(0, 250));
    const auto order = [&](std::uint64_t seed, std::int64_t epoch) {
        Loader loader({{folder / "a.h5"}, 4, 62, seed, true});
        loader.seek({epoch, 0});
        return loader.peek(0, 62).inputs;
    };
    EXPECT_NE(order(1, 0), order(1, 1));
    EXPECT_NE(order(1, 0), order(2, 0));
    EXPECT_EQ(order(1, 5), order(1, 5));
    EXPECT_NE(order(1, 0), places(0, 248));
}

TEST(Loader, SaysWhatIsWrong) {
    test::TemporaryFolder folder;
    const std::string a = folder / "a.h5", b = folder / "b.h5", one = folder / "one.h5";
    write_tokens(a, places(0, 30));
    write_tokens(one, {});
    EXPECT_THAT(error_of([&] { Loader({{}, 4, 1}); }), HasSubstr("no token files"));
    EXPECT_THAT(error_of([&] { Loader({{a}, 0, 1}); }), HasSubstr("both must be at least 1"));
    EXPECT_THAT(error_of([&] { Loader({{one}, 4, 1}); }), HasSubstr("hold 1 token; at least 2"));
    EXPECT_EQ(error_of([&] { Loader({{a, b}, 4, 1}); }), b + ": no such file");
    Loader loader({{a}, 4, 3});
    EXPECT_THAT(error_of([&] { loader.seek({0, 8}); }), HasSubstr("an epoch has 8 rows"));
    EXPECT_THAT(error_of([&] { loader.seek({-1, 0}); }), HasSubstr("no place in this data"));
    EXPECT_THAT(error_of([&] { loader.peek(2, 2); }), HasSubstr("rows [2, 4) of a global batch of 3"));
}

}  // namespace
}  // namespace fenwick::data
