#include "data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "base/hdf5.h"
#include "base/random.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

using test::error_of;
using testing::HasSubstr;

// Ids of its own for every token of a test: 0 ends a document.
struct Numbers final : Tokenizer {
    std::string kind() const override { return "numbers"; }
    std::int64_t vocab_size() const override { return 1 << 20; }
    std::int32_t end_of_document() const override { return 0; }
    void encode(std::string_view, std::vector<std::int32_t>&) const override {}
    std::string decode(const std::int32_t*, std::int64_t) const override { return ""; }
    std::string definition() const override { return name; }
    bool lossless() const override { return false; }
    std::string name;
};

using Tokens = std::vector<std::int32_t>;
using Documents = std::vector<Tokens>;

// Documents of these lengths, their marks included; ids count from `first`.
Documents documents_of(const std::vector<std::int64_t>& lengths, std::int32_t first) {
    Documents documents;
    for (const std::int64_t length : lengths) {
        documents.emplace_back(static_cast<std::size_t>(length), 0);
        std::iota(documents.back().begin(), documents.back().end() - 1, first);
        first += static_cast<std::int32_t>(length - 1);
    }
    return documents;
}

void write(const std::string& path, const Documents& documents, const Tokenizer& tokenizer = Numbers()) {
    TokenFileWriter writer(path, tokenizer);
    for (const auto& document : documents) {
        writer.append(document.data(), static_cast<std::int64_t>(document.size()) - 1);
        writer.end_document(static_cast<std::int64_t>(document.size()), 1);
    }
    writer.finish();
}

// Many single tokens, many documents longer than a row.
std::vector<std::int64_t> random_lengths(std::int64_t count, std::int64_t row_length, std::uint64_t seed) {
    Random random(seed);
    std::vector<std::int64_t> lengths;
    for (std::int64_t i = 0; i < count; ++i)
        lengths.push_back(random.below(3) == 0 ? 1
                                               : 1 + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(
                                                         random.below(2) == 0 ? row_length + 1 : 4 * row_length))));
    return lengths;
}

// What one corpus must give in an epoch: every target with the token before it.
std::vector<std::pair<std::int32_t, std::int32_t>> pairs_of(const Documents& documents, Packing packing) {
    std::vector<std::pair<std::int32_t, std::int32_t>> pairs;
    std::int32_t before = 0;
    for (const auto& document : documents)
        for (const auto token : document) {
            pairs.emplace_back(before, token);
            before = token;
        }
    if (packing != Packing::documents) pairs.erase(pairs.begin());
    std::sort(pairs.begin(), pairs.end());
    return pairs;
}

std::vector<std::pair<std::int32_t, std::int32_t>> pairs_of(const Batch& batch) {
    std::vector<std::pair<std::int32_t, std::int32_t>> pairs;
    for (std::size_t i = 0; i < batch.targets.size(); ++i)
        if (batch.targets[i] != -100) pairs.emplace_back(batch.inputs[i], batch.targets[i]);
    EXPECT_EQ(static_cast<std::int64_t>(pairs.size()), batch.valid_targets);
    return pairs;
}

bool operator==(const Batch& a, const Batch& b) {
    return a.rows == b.rows && a.length == b.length && a.inputs == b.inputs && a.targets == b.targets && a.offsets == b.offsets &&
           a.valid_targets == b.valid_targets;
}

// One batch of all rows of several.
Batch joined(const std::vector<Batch>& parts) {
    Batch whole = parts.front();
    for (std::size_t i = 1; i < parts.size(); ++i) {
        const Batch& part = parts[i];
        for (std::size_t s = 1; s < part.offsets.size(); ++s) whole.offsets.push_back(whole.rows * whole.length + part.offsets[s]);
        whole.inputs.insert(whole.inputs.end(), part.inputs.begin(), part.inputs.end());
        whole.targets.insert(whole.targets.end(), part.targets.begin(), part.targets.end());
        whole.rows += part.rows;
        whole.valid_targets += part.valid_targets;
    }
    return whole;
}

struct Case {
    Packing packing;
    std::int64_t length;  // of a row
    std::vector<std::int64_t> documents;
    std::size_t files;
};

std::vector<Case> cases() {
    std::vector<Case> all;
    for (const Packing packing : {Packing::stream, Packing::masked_stream, Packing::documents}) {
        for (const std::int64_t length : {1, 2, 8, 33, 300}) {
            all.push_back({packing, length, {2}, 1});
            all.push_back({packing, length, {1, 1}, 2});
            all.push_back({packing, length, std::vector<std::int64_t>(40, 1), 3});
            all.push_back({packing, length, {3 * length}, 1});
            all.push_back({packing, length, {length, length + 1, 2 * length + 1}, 2});
            for (const std::uint64_t seed : {1, 2}) all.push_back({packing, length, random_lengths(60, length, seed), 1 + seed});
        }
        all.push_back({packing, 64, {64}, 1});
    }
    return all;
}

class LoaderCases : public testing::TestWithParam<Case> {
protected:
    static void SetUpTestSuite() { folder_ = new test::TemporaryFolder; }
    static void TearDownTestSuite() {
        delete folder_;
        folder_ = nullptr;
        written_.clear();
    }
    void SetUp() override {
        const auto& [packing, length, lengths, files] = GetParam();
        documents_ = documents_of(lengths, 1);
        // Files are synced to the disk when they are written, so that cases share them.
        auto& paths = written_[{lengths, files}];
        const std::string name = std::to_string(written_.size());
        const std::size_t count = documents_.size();
        for (std::size_t i = paths.size(); i < files; ++i) {
            paths.push_back(*folder_ / (name + "_" + std::to_string(i) + ".h5"));
            write(paths.back(), {documents_.begin() + static_cast<std::ptrdiff_t>(i * count / files),
                                 documents_.begin() + static_cast<std::ptrdiff_t>((i + 1) * count / files)});
        }
        for (const auto& path : paths) options_.corpora.push_back({path, 0});
        options_.packing = packing;
        options_.sequence_length = length;
        options_.seed = 7;
    }
    static inline test::TemporaryFolder* folder_ = nullptr;
    static inline std::map<std::pair<std::vector<std::int64_t>, std::size_t>, std::vector<std::string>> written_;
    Documents documents_;
    LoaderOptions options_;
};

INSTANTIATE_TEST_SUITE_P(, LoaderCases, testing::ValuesIn(cases()));

TEST_P(LoaderCases, EveryTokenIsATargetOncePerEpoch) {
    const auto expected = pairs_of(documents_, GetParam().packing);
    for (const bool shuffle : {false, true}) {
        options_.shuffle = shuffle;
        const Loader loader(options_);
        EXPECT_EQ(loader.tokens_per_epoch(), static_cast<std::int64_t>(expected.size()));
        const std::int64_t rows = loader.rows_per_epoch();
        EXPECT_DOUBLE_EQ(loader.fill(), static_cast<double>(expected.size()) / static_cast<double>(rows * GetParam().length));
        for (const std::int64_t epoch : {0, 1, 5}) {
            auto found = pairs_of(loader.read(epoch * rows, rows));
            EXPECT_EQ(loader.valid_targets(epoch * rows, rows), static_cast<std::int64_t>(found.size()));
            std::sort(found.begin(), found.end());
            EXPECT_EQ(found, expected) << "epoch " << epoch;
        }
    }
}

TEST_P(LoaderCases, MeanSequenceLengthIsThatOfTheRows) {
    const Loader loader(options_);
    const Batch batch = loader.read(0, loader.rows_per_epoch());
    double sum = 0;  // over targets; what fills up a row or follows the last target is no part of a sequence here
    for (std::size_t s = 0; s + 1 < batch.offsets.size(); ++s) {
        const auto begin = batch.targets.begin() + batch.offsets[s], end = batch.targets.begin() + batch.offsets[s + 1];
        const auto valid = static_cast<double>(end - begin - std::count(begin, end, -100));
        sum += valid * (GetParam().packing == Packing::stream ? static_cast<double>(GetParam().length) : valid);
    }
    EXPECT_NEAR(loader.mean_sequence_length(), sum / static_cast<double>(batch.valid_targets), 1e-9);
}

TEST_P(LoaderCases, SequencesAreRowsOrDocuments) {
    const auto [packing, length, lengths, files] = GetParam();
    const Loader loader(options_);
    // Where each token stands: its document and its place there. Marks are told by the token before them.
    std::map<std::pair<std::int32_t, std::int32_t>, std::pair<std::size_t, std::size_t>> places;
    for (std::size_t d = 0; d < documents_.size(); ++d)
        for (std::size_t i = 0; i < documents_[d].size(); ++i) {
            const std::int32_t before = i == 0 ? 0 : documents_[d][i - 1];
            if (before != 0 || documents_[d][i] != 0) places[{before, documents_[d][i]}] = {d, i};
        }
    const Batch batch = loader.read(0, 2 * loader.rows_per_epoch() + 1);
    ASSERT_EQ(batch.offsets.front(), 0);
    ASSERT_EQ(batch.offsets.back(), batch.rows * length);
    for (std::int64_t row = 0; row <= batch.rows; ++row)
        EXPECT_TRUE(std::binary_search(batch.offsets.begin(), batch.offsets.end(), row * length));
    if (packing == Packing::stream) {
        EXPECT_EQ(static_cast<std::int64_t>(batch.offsets.size()), batch.rows + 1);
    }
    for (std::size_t s = 0; s + 1 < batch.offsets.size(); ++s) {
        const auto begin = static_cast<std::size_t>(batch.offsets[s]), end = static_cast<std::size_t>(batch.offsets[s + 1]);
        ASSERT_LT(begin, end);
        std::optional<std::pair<std::size_t, std::size_t>> place;
        for (std::size_t i = begin; i < end; ++i) {
            EXPECT_TRUE(batch.inputs[i] >= 0 && batch.inputs[i] < 1 << 20);
            if (batch.targets[i] == -100) {  // at the end of a row, and where documents are packed a sequence by itself
                for (std::size_t j = i; j < end; ++j) EXPECT_EQ(batch.targets[j], -100);
                EXPECT_EQ(static_cast<std::int64_t>(end) % length, 0);
                if (packing == Packing::documents) {
                    EXPECT_EQ(i, begin);
                }
                break;
            }
            if (i > begin) {
                EXPECT_EQ(batch.inputs[i], batch.targets[i - 1]);
                if (packing != Packing::stream) {
                    EXPECT_NE(batch.inputs[i], 0) << "a document goes on behind its end";
                }
            }
            if (packing != Packing::documents || (batch.inputs[i] == 0 && batch.targets[i] == 0)) continue;
            const auto found = places.at({batch.inputs[i], batch.targets[i]});
            if (place) {
                EXPECT_EQ(found, std::pair(place->first, place->second + 1));
            }
            if (i == begin) {  // a document begins where it begins, or a whole number of rows later
                EXPECT_EQ(static_cast<std::int64_t>(found.second) % length, 0);
                const auto rest = static_cast<std::int64_t>(documents_[found.first].size() - found.second);
                EXPECT_EQ(static_cast<std::int64_t>(end - begin), std::min(rest, length));
            }
            place = found;
        }
    }
}

// Global batches of 24 rows, shared out to processes and cut into micro-batches of any size.
TEST_P(LoaderCases, OrderDoesNotDependOnWhoReads) {
    const Loader whole(options_);
    std::vector<Loader> own;  // of each process
    for (int rank = 0; rank < 8; ++rank) own.emplace_back(options_);
    const std::int64_t batch_rows = 24;
    for (std::int64_t step = 0; step < 3; ++step) {
        const Batch expected = whole.read(step * batch_rows, batch_rows);
        for (const std::int64_t processes : {1, 2, 3, 4, 8})
            for (const std::int64_t micro : {std::int64_t{1}, batch_rows / processes}) {
                std::vector<Batch> parts;
                for (std::int64_t rank = 0; rank < processes; ++rank) {
                    const Loader& loader = own[static_cast<std::size_t>(rank)];
                    const std::int64_t share = batch_rows / processes, first = step * batch_rows + rank * share;
                    for (std::int64_t row = 0; row < share; row += micro) parts.push_back(loader.read(first + row, micro));
                }
                EXPECT_TRUE(joined(parts) == expected) << processes << " processes, micro-batches of " << micro;
            }
    }
}

// What a checkpoint holds says exactly how many rows there have been.
TEST_P(LoaderCases, StatesAreRowCounts) {
    const Loader loader(options_);
    for (std::int64_t rows = 0; rows < 3 * loader.rows_per_epoch(); ++rows) {
        const LoaderState state = loader.state_after(rows);
        EXPECT_EQ(state,
                  (LoaderState{rows / loader.rows_per_epoch(), rows % loader.rows_per_epoch(), loader.data_identity()}));
        EXPECT_EQ(loader.rows_before(state), rows);
        EXPECT_DOUBLE_EQ(loader.epochs_after(rows).at(0), static_cast<double>(rows) / static_cast<double>(loader.rows_per_epoch()));
    }
    for (const LoaderState& none : {LoaderState{0, loader.rows_per_epoch()}, LoaderState{-1, 0}, LoaderState{0, -1}})
        EXPECT_THAT(error_of([&] { (void)loader.rows_before(none); }), HasSubstr("no place in this data"));
}

// The rows of a stream as they have always been: cut every T tokens in the order of the files.
TEST(Loader, AStreamWithoutShufflingIsTheFilesInOrder) {
    test::TemporaryFolder folder;
    const Documents documents = documents_of({5, 1, 9}, 1);
    write(folder / "a.h5", {documents[0]});
    write(folder / "b.h5", {documents[1], documents[2]});
    LoaderOptions options{.corpora = {{folder / "a.h5"}, {folder / "b.h5"}}, .sequence_length = 6, .shuffle = false};
    const Batch batch = Loader(options).read(0, 3);
    EXPECT_EQ(batch.inputs, (Tokens{1, 2, 3, 4, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0}));
    EXPECT_EQ(batch.targets, (Tokens{2, 3, 4, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12, 0, -100, -100, -100, -100}));
    EXPECT_EQ(batch.offsets, (std::vector<std::int64_t>{0, 6, 12, 18}));
    options.packing = Packing::masked_stream;
    EXPECT_EQ(Loader(options).read(0, 3).inputs, batch.inputs);
    EXPECT_EQ(Loader(options).read(0, 3).targets, batch.targets);
    EXPECT_EQ(Loader(options).read(0, 3).offsets, (std::vector<std::int64_t>{0, 4, 5, 6, 12, 18}));
    options.packing = Packing::documents;
    const Batch packed = Loader(options).read(0, 3);  // 9 = 6 + 3; 5 + 1 fit together
    EXPECT_EQ(packed.inputs, (Tokens{0, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 0, 10, 11, 12, 0, 0, 0}));
    EXPECT_EQ(packed.targets, (Tokens{5, 6, 7, 8, 9, 10, 1, 2, 3, 4, 0, 0, 11, 12, 0, -100, -100, -100}));
    EXPECT_EQ(packed.offsets, (std::vector<std::int64_t>{0, 6, 11, 12, 15, 18}));
}

// ---- mixtures --------------------------------------------------------------------------------------------------------

struct Mixed : testing::TestWithParam<Packing> {
    // Of very different sizes
    std::vector<Documents> corpora{documents_of(random_lengths(4, 20, 1), 1), documents_of(random_lengths(300, 20, 2), 10000),
                                   documents_of({1, 2}, 100000), documents_of(random_lengths(50, 20, 3), 200000)};
    std::vector<double> weights{2, 5, 1, 3};
    test::TemporaryFolder folder;

    LoaderOptions options() {
        LoaderOptions options{.corpora = {}, .sequence_length = 20, .packing = GetParam(), .seed = 3};
        for (std::size_t i = 0; i < corpora.size(); ++i) {
            const std::string path = folder / (std::to_string(i) + ".h5");
            write(path, corpora[i]);
            options.corpora.push_back({path, weights[i]});
        }
        return options;
    }
    // Of which corpus a row is.
    std::size_t source_of(const Batch& row) const {
        for (std::size_t i = 0; i < row.targets.size(); ++i)
            for (const auto id : {row.inputs[i], row.targets[i]})
                if (id > 0) return id < 10000 ? 0 : id < 100000 ? 1 : id < 200000 ? 2 : 3;
        return 2;  // the only corpus with rows of marks alone would be one of single tokens
    }
};

INSTANTIATE_TEST_SUITE_P(, Mixed, testing::Values(Packing::stream, Packing::masked_stream, Packing::documents));

TEST_P(Mixed, SharesAreTheWeightsAndEveryCorpusHasEpochsOfItsOwn) {
    for (auto& corpus : corpora)  // so that a row tells where it is from
        std::erase_if(corpus, [](const Tokens& document) { return document.size() == 1; });
    const auto given = options();
    const Loader mixed(given);
    std::vector<std::vector<Batch>> rows(corpora.size());
    std::vector<double> targets(corpora.size(), 0);
    const std::int64_t count = 6000;
    for (std::int64_t row = 0; row < count; ++row) {
        Batch batch = mixed.read(row, 1);
        const std::size_t source = source_of(batch);
        targets[source] += static_cast<double>(batch.valid_targets);
        rows[source].push_back(std::move(batch));
    }
    const double all = std::accumulate(targets.begin(), targets.end(), 0.0);
    for (std::size_t i = 0; i < corpora.size(); ++i) {
        EXPECT_NEAR(targets[i] / all, weights[i] / 11, 0.003) << "corpus " << i;
        const auto expected = pairs_of(corpora[i], GetParam());
        auto alone = given;
        alone.corpora = {given.corpora[i]};
        const auto epoch = static_cast<std::size_t>(Loader(alone).rows_per_epoch());
        ASSERT_GT(rows[i].size(), epoch);
        EXPECT_NEAR(mixed.epochs_after(count)[i], static_cast<double>(rows[i].size()) / static_cast<double>(epoch), 1e-9);
        for (std::size_t begin = 0; begin + epoch <= rows[i].size(); begin += epoch) {
            auto found = pairs_of(joined({rows[i].begin() + static_cast<std::ptrdiff_t>(begin),
                                          rows[i].begin() + static_cast<std::ptrdiff_t>(begin + epoch)}));
            std::sort(found.begin(), found.end());
            ASSERT_EQ(found, expected) << "corpus " << i << " from its row " << begin;
        }
    }
}

TEST_P(Mixed, OrderDoesNotDependOnWhoReads) {
    const auto given = options();
    const Loader whole(given);
    EXPECT_EQ(whole.rows_before(whole.state_after(12345)), 12345);
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1000}, std::int64_t{1} << 40}) {
        const Batch expected = whole.read(first, 48);
        for (const std::int64_t part : {1, 6, 16}) {
            std::vector<Batch> parts;
            for (std::int64_t row = 0; row < 48; row += part) parts.push_back(Loader(given).read(first + row, part));
            EXPECT_TRUE(joined(parts) == expected) << "from row " << first << " in parts of " << part;
        }
    }
}

TEST_P(Mixed, OneWeightedCorpusIsTheCorpus) {
    auto given = options();
    given.corpora.resize(2);
    given.corpora.erase(given.corpora.begin());
    const Batch weighted = Loader(given).read(0, 100);
    given.corpora.front().weight = 0;
    EXPECT_TRUE(Loader(given).read(0, 100) == weighted);
}

// ---- orders and errors -----------------------------------------------------------------------------------------------

TEST(Loader, EpochsAndSeedsHaveOrdersOfTheirOwn) {
    test::TemporaryFolder folder;
    write(folder / "a.h5", documents_of({250}, 1));
    const auto order = [&](std::uint64_t seed, std::int64_t epoch) {
        const Loader loader({.corpora = {{folder / "a.h5"}}, .sequence_length = 4, .seed = seed});
        return loader.read(63 * epoch, 63).inputs;
    };
    EXPECT_NE(order(1, 0), order(1, 1));
    EXPECT_NE(order(1, 0), order(2, 0));
    EXPECT_EQ(order(1, 5), order(1, 5));
    Tokens sorted(248);
    std::iota(sorted.begin(), sorted.end(), 1);
    EXPECT_NE(order(1, 0), sorted);
}

TEST(Loader, SaysWhatIsWrong) {
    test::TemporaryFolder folder;
    const std::string a = folder / "a.h5", b = folder / "b.h5", one = folder / "one.h5", other = folder / "other.h5";
    write(a, documents_of({30}, 1));
    write(one, documents_of({1}, 1));
    Numbers other_numbers;
    other_numbers.name = "other";
    write(other, documents_of({30}, 1), other_numbers);
    const auto error = [](std::vector<WeightedCorpus> corpora, std::int64_t length = 4, Packing packing = Packing::stream) {
        return error_of([&] { Loader({.corpora = std::move(corpora), .sequence_length = length, .packing = packing}); });
    };
    EXPECT_THAT(error({}), HasSubstr("no token files"));
    EXPECT_THAT(error({{a}}, 0), HasSubstr("must be at least 1"));
    EXPECT_THAT(error({{one}}), HasSubstr("hold 1 token; at least 2"));
    EXPECT_EQ(error({{one}}, 4, Packing::documents), "");
    EXPECT_EQ(error({{a}, {b}}), b + ": no such file");
    EXPECT_THAT(error({{a}, {other}}), HasSubstr(a + " and " + other + " were made with different tokenizers"));
    EXPECT_THAT(error({{a, 1}, {other, 1}}), HasSubstr(a + " and " + other + " were made with different tokenizers"));
    // An id that the model does not have would be read from behind its table.
    const std::string damaged = folder / "damaged.h5";
    write(damaged, documents_of({30}, 1));
    {
        hdf5::File file = hdf5::File::open_append(damaged);
        file.set_attribute("/", "vocab_size", TokenFile(a).info().vocab_size + 1);
        file.close();
    }
    const std::string what = a + " has a vocabulary of 1048576 and " + damaged + " one of 1048577, by the same tokenizer";
    EXPECT_THAT(error({{a}, {damaged}}), HasSubstr(what));
    EXPECT_THAT(error({{a, 1}, {damaged, 1}}), HasSubstr(what));
    EXPECT_EQ(error({{a, 1}, {one}}), "[loader] " + a + " has a weight and " + one + " has none; give each corpus a weight above 0, or none");
    EXPECT_THAT(error({{a, -1}, {one, 1}}), HasSubstr("give each corpus a weight above 0, or none"));
    EXPECT_EQ(error({{a, 1}, {a, 1e-10}}),
              "data.train: the weight of " + a + ", 1e-10, gives it less than 1e-09 of the rows; give it more, or leave it out");
}

}  // namespace
}  // namespace fenwick::data
