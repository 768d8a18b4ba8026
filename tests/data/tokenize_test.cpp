#include "data/tokenize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/files.h"
#include "base/parallel.h"
#include "base/random.h"
#include "base/sha256.h"
#include "support/shared_data.h"
#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;

// The documents of a token file as text.
std::vector<std::string> documents_of(const std::string& path) {
    const TokenFile file(path);
    file.verify();
    const auto tokenizer = file.tokenizer();
    std::vector<std::string> documents;
    const auto& offsets = file.document_offsets();
    for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
        std::vector<std::int32_t> ids(static_cast<std::size_t>(offsets[d + 1] - offsets[d]));
        file.read(offsets[d], offsets[d + 1] - offsets[d], ids.data());
        EXPECT_EQ(ids.back(), file.info().end_of_document);
        documents.push_back(tokenizer->decode(ids.data(), static_cast<std::int64_t>(ids.size()) - 1));
    }
    return documents;
}

class Tokenize : public testing::Test {
protected:
    std::string text(const std::string& name, std::string_view contents) {
        test::write_text(folder_ / name, contents);
        return folder_ / name;
    }
    TokenFileInfo run(const std::vector<std::string>& files, DocumentUnit unit, const Tokenizer& tokenizer) {
        TokenizeOptions options;
        options.files = files;
        options.documents = unit;
        options.output = output_;
        return tokenize_files(tokenizer, options);
    }
    TokenFileInfo run(const std::vector<std::string>& files, DocumentUnit unit) { return run(files, unit, *open_tokenizer("bytes")); }

    test::TemporaryFolder folder_;
    std::string output_ = folder_ / "out.h5";
};

TEST_F(Tokenize, FilesAreDocuments) {
    const auto a = text("a.txt", "one two\n\n three"), b = text("b.txt", "\n"), c = text("c.txt", ""), d = text("d.txt", "x\xff\x80 y");
    const auto info = run({a, b, c, d}, DocumentUnit::file);
    EXPECT_THAT(documents_of(output_), ElementsAre("one two\n\n three", "\n", "x\xff\x80 y"));
    EXPECT_EQ(info.num_documents, 3);
    EXPECT_EQ(info.num_tokens, 15 + 1 + 5 + 3);
    EXPECT_EQ(info.text_bytes, 15 + 1 + 5);
    EXPECT_EQ(info.text_words, 3 + 0 + 2);
    const TokenFile file(output_);
    EXPECT_THAT(file.document_bytes(), ElementsAre(15, 1, 5));
    EXPECT_THAT(file.document_words(), ElementsAre(3, 0, 2));
    const auto sources = file.sources();
    ASSERT_EQ(sources.size(), 4u);
    EXPECT_EQ(sources[0].name, a);
    EXPECT_EQ(sources[0].sha256, sha256_of_file(a));
    EXPECT_EQ(sources[3].bytes, 5);
}

TEST_F(Tokenize, LinesAreDocuments) {
    const auto a = text("a.txt", "\n one  two \r\n\n \t\nthree\rfour\n"), b = text("b.txt", "five"), c = text("c.txt", "\n\nsix\r");
    const auto info = run({a, b, c}, DocumentUnit::line);
    EXPECT_THAT(documents_of(output_), ElementsAre(" one  two ", "three\rfour", "five", "six"));
    // Separators count for the document before them, leading ones for the first.
    EXPECT_THAT(TokenFile(output_).document_bytes(), ElementsAre(1 + 12 + 1 + 3, 11, 4 + 2, 4));
    EXPECT_THAT(TokenFile(output_).document_words(), ElementsAre(2, 2, 1, 1));
    EXPECT_EQ(info.text_bytes, 28 + 4 + 6);
}

TEST_F(Tokenize, BlocksAreDocuments) {
    const auto a = text("a.txt", " \n\n  one\n two\r\nthree\n\n \n\nfour\n"), b = text("b.txt", "five\n\n \n");
    const auto info = run({a, b}, DocumentUnit::block);
    EXPECT_THAT(documents_of(output_), ElementsAre("  one\n two\r\nthree", "four", "five"));
    EXPECT_EQ(info.text_bytes, static_cast<std::int64_t>(read_file(a).size() + read_file(b).size()));
    EXPECT_EQ(info.text_words, 5);
}

// Random text in all units against a slow twin that has the whole text at once.
TEST_F(Tokenize, AgreesWithTheDefinition) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        Random random(seed);
        static const std::vector<std::string> parts = {"a", "bc", " ", "\n", "\n", "\n\n", "\r\n", "\t", "é"};
        std::string all;
        const auto count = 1 + random.below(60);
        for (std::uint64_t i = 0; i < count; ++i) all += parts[random.below(parts.size())];
        std::vector<std::string> lines, blocks;  // expected
        std::string block;
        bool in_block = false;
        for (std::size_t begin = 0; begin < all.size();) {
            const std::size_t newline = std::min(all.find('\n', begin), all.size());
            std::string line = all.substr(begin, newline - begin);
            const bool blank = line.find_first_not_of(" \t\r") == std::string::npos;
            if (blank && in_block) blocks.push_back(std::exchange(block, {}));
            if (!blank) {
                block += in_block ? "\n" + line : line;
                if (line.back() == '\r') line.pop_back();
                lines.push_back(line);
            }
            in_block = !blank;
            begin = newline + 1;
        }
        if (in_block) blocks.push_back(block);
        for (auto& each : blocks)
            if (each.back() == '\r') each.pop_back();
        const auto path = text("a.txt", all);
        if (lines.empty()) continue;
        const auto words = run({path}, DocumentUnit::file).text_words;
        EXPECT_THAT(documents_of(output_), ElementsAre(all));
        EXPECT_EQ(run({path}, DocumentUnit::line).text_bytes, static_cast<std::int64_t>(all.size())) << "seed " << seed;
        EXPECT_EQ(documents_of(output_), lines) << "seed " << seed;
        EXPECT_EQ(TokenFile(output_).info().text_words, words);
        EXPECT_EQ(run({path}, DocumentUnit::block).text_bytes, static_cast<std::int64_t>(all.size())) << "seed " << seed;
        EXPECT_EQ(documents_of(output_), blocks) << "seed " << seed;
        EXPECT_EQ(TokenFile(output_).info().text_words, words);
    }
}

// Long documents and lines are encoded in pieces; the result is the text all the same, with any number of threads.
TEST_F(Tokenize, LongTextAndAnyNumberOfThreads) {
    Random random(11);
    std::string words, solid, lines;
    while (words.size() < (1u << 20)) words += std::string(1 + random.below(12), static_cast<char>('a' + random.below(26))) + " ";
    while (solid.size() < (200u << 10)) solid += "\xE6\x97\xA5";
    while (lines.size() < (4u << 20)) lines += std::string(random.below(20), 'x') + " line\n";
    const std::vector<std::string> files = {text("a.txt", words), text("b.txt", solid), text("c.txt", lines)};
    SentencePieceOptions training;
    training.vocab_size = 400;
    train_sentencepiece({text("d.txt", words.substr(0, 100000) + lines.substr(0, 50000))}, training, folder_ / "a.model");
    const auto trained = open_tokenizer(folder_ / "a.model"), bytes = open_tokenizer("bytes");
    const int threads_before = num_threads();
    for (const auto* tokenizer : {trained.get(), bytes.get()}) {
        std::string first;
        for (const int threads : {1, 2, 5}) {
            set_num_threads(threads);
            run(files, DocumentUnit::file, *tokenizer);
            if (threads == 1) {
                first = read_file(output_);
                const auto found = documents_of(output_);
                ASSERT_EQ(found.size(), 3u);
                EXPECT_TRUE(found[0] == words && found[1] == solid && found[2] == lines);
            } else {
                EXPECT_TRUE(read_file(output_) == first) << threads << " threads";
            }
        }
    }
    set_num_threads(threads_before);
    // Cut at newlines and before spaces, the ids are those of the whole.
    std::vector<std::int32_t> expected;
    trained->encode(lines, expected);
    run({files[2]}, DocumentUnit::file, *trained);
    std::vector<std::int32_t> ids(expected.size());
    const TokenFile file(output_);
    ASSERT_EQ(file.info().num_tokens, static_cast<std::int64_t>(expected.size()) + 1);
    file.read(0, static_cast<std::int64_t>(expected.size()), ids.data());
    EXPECT_TRUE(ids == expected);
}

TEST_F(Tokenize, ProgressRises) {
    std::vector<std::int64_t> seen;
    TokenizeOptions options;
    options.files = {text("a.txt", std::string(9 << 20, 'a'))};
    options.output = output_;
    options.progress = [&](std::int64_t done, std::int64_t total) {
        EXPECT_EQ(total, 9 << 20);
        seen.push_back(done);
    };
    tokenize_files(*open_tokenizer("bytes"), options);
    ASSERT_GE(seen.size(), 2u);
    EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
    EXPECT_EQ(seen.back(), 9 << 20);
}

TEST_F(Tokenize, SaysWhatIsWrongAndLeavesNothing) {
    const auto empty = text("empty.txt", ""), blank = text("blank.txt", " \n\n"), good = text("good.txt", "text");
    const std::string missing = folder_ / "missing.txt";
    EXPECT_EQ(error_of([&] { run({good, missing}, DocumentUnit::file); }), missing + ": no such file");
    EXPECT_EQ(error_of([&] { run({folder_.path()}, DocumentUnit::file); }), folder_.path() + " is a folder; a file is needed");
    EXPECT_EQ(error_of([&] { run({empty}, DocumentUnit::file); }), "no text to tokenize in " + empty);
    EXPECT_EQ(error_of([&] { run({empty, empty, empty, empty, empty, empty}, DocumentUnit::file); }),
              "no text to tokenize in " + empty + ", " + empty + ", " + empty + ", " + empty + " and 2 more");
    EXPECT_EQ(error_of([&] { run({blank}, DocumentUnit::line); }), "no text to tokenize in " + blank);
    EXPECT_EQ(error_of([&] { run({}, DocumentUnit::line); }), "no text files to tokenize");
    EXPECT_THAT(error_of([] { document_unit_from("page"); }), HasSubstr("use file, line or block"));
    EXPECT_EQ(document_unit_from("block"), DocumentUnit::block);
    output_ = good;
    EXPECT_THAT(error_of([&] { run({good}, DocumentUnit::file); }), HasSubstr("the output would replace an input"));
    output_ = folder_ / "out.h5";
    const auto large = text("large.txt", std::string(1 << 20, 'a'));
    {
        const test::FileSizeLimit full(500000);
        EXPECT_THAT(error_of([&] { run({large}, DocumentUnit::file); }), HasSubstr("File too large"));
    }
    EXPECT_EQ(folder_.count(), 4u) << "text files alone";
}

TEST_F(Tokenize, WikiText2) {
    const std::string path = test::shared_file("data/wikitext-2-tokens/wiki.test.tokens");
    if (path.empty()) GTEST_SKIP() << "no shared folder with WikiText-2";
    const auto info = run({path}, DocumentUnit::file);
    EXPECT_EQ(info.text_words, 241211);
    EXPECT_EQ(info.text_bytes, 1256449);
    EXPECT_EQ(info.num_tokens, 1256450);
    SentencePieceOptions training;
    training.vocab_size = 512;
    training.sample_bytes = 300000;
    train_sentencepiece({path}, training, folder_ / "a.model");
    const auto tokenizer = open_tokenizer(folder_ / "a.model");
    EXPECT_EQ(tokenizer->vocab_size(), 512);
    run({path}, DocumentUnit::file, *tokenizer);
    EXPECT_TRUE(documents_of(output_).at(0) == read_file(path));
    EXPECT_EQ(run({path}, DocumentUnit::line, *tokenizer).text_words, 241211);
}

}  // namespace
}  // namespace fenwick::data
