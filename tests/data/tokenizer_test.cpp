#include "data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sentencepiece_processor.h>

#include <sentencepiece_processor.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "base/random.h"
#include "base/sha256.h"
#include "base/utf8.h"
#include "support/shared_data.h"
#include "support/temporary_folder.h"
#include "support/tokenizer_check.h"

namespace fenwick::data {
namespace {

using test::error_of;
using testing::HasSubstr;

using test::decode;
using test::encode;
using test::encode_in_pieces;
using test::random_bytes;
using test::random_unicode;

TEST(Utf8, LengthOfValidAndInvalidCharacters) {
    EXPECT_EQ(utf8_length(""), 0u);
    EXPECT_EQ(utf8_length(std::string_view("\0", 1)), 1u);
    EXPECT_EQ(utf8_length("a"), 1u);
    EXPECT_EQ(utf8_length("\xC3\xA9"), 2u);
    EXPECT_EQ(utf8_length("\xE2\x96\x81"), 3u);
    EXPECT_EQ(utf8_length("\xF0\x9F\x9A\x80"), 4u);
    EXPECT_EQ(utf8_length("\xF4\x8F\xBF\xBF"), 4u);
    for (const char* bad : {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xC3", "\xC3(", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xE2\x96", "\xE2\x96(",
                            "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xF0\x9F\x9A", "\xFF"})
        EXPECT_EQ(utf8_length(bad), 0u);
}

TEST(ByteTokenizer, IdsAreBytes) {
    const auto tokenizer = open_tokenizer("bytes");
    EXPECT_EQ(tokenizer->kind(), "bytes");
    EXPECT_EQ(tokenizer->vocab_size(), 257);
    EXPECT_EQ(tokenizer->end_of_document(), 256);
    EXPECT_EQ(tokenizer->definition(), "");
    EXPECT_EQ(encode(*tokenizer, "A\n\xff"), (std::vector<std::int32_t>{65, 10, 255}));
    EXPECT_EQ(encode(*tokenizer, ""), std::vector<std::int32_t>{});
    EXPECT_EQ(decode(*tokenizer, {72, 105, 256, 33}), "Hi!");
    const std::string text = random_bytes(1, 5000);
    EXPECT_EQ(decode(*tokenizer, encode(*tokenizer, text)), text);
    EXPECT_EQ(encode_in_pieces(*tokenizer, text, 1, 100), encode(*tokenizer, text));
    EXPECT_THAT(error_of([&] { decode(*tokenizer, {257}); }), HasSubstr("token 257 is outside the vocabulary of 257"));
    EXPECT_THAT(error_of([&] { decode(*tokenizer, {-1}); }), HasSubstr("token -1 is outside"));
    EXPECT_EQ(tokenizer->identity(), sha256_hex(std::string_view("bytes\0", 6)));
    EXPECT_EQ(restore_tokenizer("bytes", "")->identity(), tokenizer->identity());
}

TEST(Tokenizer, SaysWhatIsWrong) {
    test::TemporaryFolder folder;
    const std::string model = folder / "a.model";
    EXPECT_EQ(error_of([&] { open_tokenizer(model); }),
              "tokenizer " + model + ": no such file; \"bytes\", or the path of a SentencePiece model, a tokenizer.json, or a vocab.bpe "
              "beside its encoder.json is needed");
    for (const std::string& text : {std::string(), std::string("hello\n"), random_bytes(3, 1000)}) {
        test::write_text(model, text);
        EXPECT_THAT(error_of([&] { open_tokenizer(model); }), HasSubstr(model + " is not a SentencePiece model"));
    }
    EXPECT_THAT(error_of([] { restore_tokenizer("gpt9", ""); }), HasSubstr("tokenizer kind 'gpt9' is unknown"));
    SentencePieceOptions options;
    const std::string text = folder / "a.txt", empty = folder / "empty.txt";
    test::write_text(text, "some text\n");
    test::write_text(empty, "");
    EXPECT_EQ(error_of([&] { train_sentencepiece({folder / "no.txt"}, options, model); }), folder / "no.txt" + std::string(": no such file"));
    EXPECT_EQ(error_of([&] { train_sentencepiece({empty}, options, model); }), "no text to train a tokenizer on: " + empty + " is empty");
    options.model_type = "wordpiece";
    EXPECT_THAT(error_of([&] { train_sentencepiece({text}, options, model); }), HasSubstr("use bpe or unigram"));
    options = {};
    options.vocab_size = 100;
    EXPECT_THAT(error_of([&] { train_sentencepiece({text}, options, model); }), HasSubstr("300 to 1048576"));
    options = {};
    options.character_coverage = 0.5;
    EXPECT_THAT(error_of([&] { train_sentencepiece({text}, options, model); }), HasSubstr("from 0.98 to 1"));
    options = {};
    // What is no file never ends (a folder read as a stream) or has no size.
    EXPECT_EQ(error_of([&] { train_sentencepiece({folder.path()}, options, model); }), folder.path() + " is a folder; a file is needed");
    EXPECT_THAT(error_of([&] { train_sentencepiece({"/dev/zero"}, options, model); }), HasSubstr("/dev/zero is a device"));
    EXPECT_THAT(error_of([&] { train_sentencepiece({text}, options, text); }), HasSubstr("the output would replace an input"));
    EXPECT_EQ(read_file(text), "some text\n");
    // What begins like compressed data or an archive is no text.
    const std::string gzip = folder / "a.gz", zip = folder / "a.zip";
    test::write_text(gzip, "\x1f\x8b\x08 and so on");
    test::write_text(zip, "PK\x03\x04 and so on");
    EXPECT_EQ(error_of([&] { train_sentencepiece({text, gzip}, options, model); }),
              gzip + " is compressed; a tokenizer is trained on plain text, so decompress it first");
    EXPECT_THAT(error_of([&] { train_sentencepiece({zip}, options, model); }), HasSubstr(zip + " is a zip archive"));
    // The library's own words stay inside.
    std::string characters;
    for (int code = 0x4e00; code < 0x5200; ++code)
        characters += {static_cast<char>(0xe0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)), static_cast<char>(0x80 | (code & 63))};
    const std::vector<std::pair<std::string, std::string>> hopeless = {
        {"a", "too little text in UTF-8"}, {"\xff\xfe\x80", "too little text in UTF-8"}, {characters, "too many different characters for 400"}};
    for (const auto& [content, message] : hopeless) {
        test::write_text(text, content);
        options.vocab_size = 400;
        const std::string error = error_of([&] { train_sentencepiece({text}, options, model); });
        EXPECT_THAT(error, HasSubstr(message));
        EXPECT_THAT(error, testing::Not(HasSubstr(".cc")));
    }
}

class TrainedTokenizer : public testing::TestWithParam<const char*> {
protected:
    static std::string corpus() {
        Random random(5);
        const std::vector<std::string> words = {"the", "of", "tree", "fenwick", "sum", "naïve", "level", "<unk>", ",", "prefix", "日本語"};
        std::string text;
        for (int i = 0; i < 20000; ++i) text += words[random.below(words.size())] + (random.below(12) == 0 ? " \n " : " ");
        // One line far longer than the trainer takes.
        for (int i = 0; i < 3000; ++i) text += "longline ";
        return text;
    }
};
INSTANTIATE_TEST_SUITE_P(, TrainedTokenizer, testing::Values("bpe", "unigram"));

TEST_P(TrainedTokenizer, IsLossless) {
    test::TemporaryFolder folder;
    const std::string text = corpus(), path = folder / "a.txt", model = folder / "a.model";
    test::write_text(path, text);
    SentencePieceOptions options;
    options.model_type = GetParam();
    options.vocab_size = 330;
    options.threads = 2;
    const std::int64_t pieces = train_sentencepiece({path}, options, model);
    const auto tokenizer = open_tokenizer(model);
    EXPECT_EQ(pieces, tokenizer->vocab_size());
    EXPECT_EQ(tokenizer->kind(), "sentencepiece");
    EXPECT_LE(tokenizer->vocab_size(), 330);
    EXPECT_TRUE(tokenizer->lossless());
    const auto ids = encode(*tokenizer, text);
    EXPECT_EQ(decode(*tokenizer, ids), text);
    EXPECT_THAT(ids, testing::Not(testing::Contains(tokenizer->end_of_document())));
    EXPECT_LT(ids.size(), text.size() / (options.model_type == "bpe" ? 3 : 1)) << "no piece longer than a byte was learnt";
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        const std::string unicode = random_unicode(seed, 60), bytes = random_bytes(seed, 100);
        EXPECT_EQ(decode(*tokenizer, encode(*tokenizer, unicode)), unicode) << "seed " << seed;
        EXPECT_EQ(decode(*tokenizer, encode(*tokenizer, bytes)), bytes) << "seed " << seed;
    }
    EXPECT_EQ(decode(*tokenizer, {tokenizer->end_of_document()}), "");
    // Word by word it gives what the library gives for whole lines, whatever the spaces.
    sentencepiece::SentencePieceProcessor library;
    ASSERT_TRUE(library.LoadFromSerializedProto(tokenizer->definition()).ok());
    Random random(8);
    for (int i = 0; i < 300; ++i) {
        std::string line = i % 2 == 0 ? text.substr(random.below(text.size() - 200), 200) : random_unicode(static_cast<std::uint64_t>(i), 40);
        while (line.find('\n') != std::string::npos) line.replace(line.find('\n'), 1, "   ");
        while (line.find("\xE2\x96\x81") != std::string::npos) line.erase(line.find("\xE2\x96\x81"), 3);
        bool valid = true;
        for (std::size_t at = 0; at < line.size(); at += std::max<std::size_t>(utf8_length(line.substr(at)), 1))
            valid = valid && utf8_length(line.substr(at)) > 0;
        if (valid) {
            EXPECT_EQ(encode(*tokenizer, line), library.EncodeAsIds(line)) << "line " << i;
        }
    }
    // Pieces have the ids of the whole.
    int parts = 0;
    EXPECT_EQ(encode_in_pieces(*tokenizer, text, 2, 500, &parts), ids);
    EXPECT_GT(parts, 400);
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
        const std::string mixed = random_unicode(seed, 80) + random_bytes(seed, 30) + text.substr(seed * 100, 300);
        EXPECT_EQ(encode_in_pieces(*tokenizer, mixed, seed, 60), encode(*tokenizer, mixed)) << "seed " << seed;
    }
    // The definition alone restores it.
    const auto restored = restore_tokenizer("sentencepiece", tokenizer->definition());
    EXPECT_EQ(restored->identity(), tokenizer->identity());
    EXPECT_EQ(encode(*restored, text), ids);
    EXPECT_NE(tokenizer->identity(), open_tokenizer("bytes")->identity());
}

TEST_P(TrainedTokenizer, TrainsTheSameTwice) {
    test::TemporaryFolder folder;
    test::write_text(folder / "a.txt", corpus());
    SentencePieceOptions options;
    options.model_type = GetParam();
    options.vocab_size = 320;
    options.threads = 2;
    options.sample_bytes = 30000;  // a part of the lines
    train_sentencepiece({folder / "a.txt"}, options, folder / "a.model");
    train_sentencepiece({folder / "a.txt"}, options, folder / "b.model");
    EXPECT_EQ(read_file(folder / "a.model"), read_file(folder / "b.model"));
}

// A model of the public kind (dummy prefix, end piece): what the library itself gives.
TEST(SentencePiece, GivesTheGoldenIdsOfAPublicModel) {
    const std::string golden = test::shared_file("golden/tokenizers.json"),
                      wikitext = test::shared_file("data/wikitext-2-raw/wiki.test.raw"),
                      model = test::shared_file("data/tokenizers/llama2/tokenizer.model");
    if (golden.empty() || model.empty() || wikitext.empty()) GTEST_SKIP() << "no shared folder with golden tokenizers";
    const auto tokenizer = open_tokenizer(model);
    EXPECT_FALSE(tokenizer->lossless());
    EXPECT_EQ(tokenizer->safe_cut("Some words.\nMore", 14), 4u);
    EXPECT_EQ(tokenizer->safe_cut("Some ", 5), 4u);
    EXPECT_EQ(tokenizer->end_of_document(), 2);
    test::check_golden(*tokenizer, "llama2", nlohmann::json::parse(read_file(golden)), read_file(wikitext));
}

// The space that such a model puts before a text is not put before what follows a cut.
TEST(SentencePiece, APublicModelGivesTheSameInPieces) {
    const std::string model = test::shared_file("data/tokenizers/llama2/tokenizer.model");
    if (model.empty()) GTEST_SKIP() << "no shared folder with tokenizers";
    const auto tokenizer = open_tokenizer(model);
    sentencepiece::SentencePieceProcessor library;
    ASSERT_TRUE(library.Load(model).ok());
    const auto expect_same = [&](const std::string& text, std::uint64_t seed) {
        std::vector<int> expected;
        ASSERT_TRUE(library.Encode(text, &expected).ok());
        EXPECT_EQ(encode(*tokenizer, text), expected) << "'" << text << "'";
        EXPECT_EQ(test::encode_in_pieces(*tokenizer, text, seed, 30), expected) << "'" << text << "'";
    };
    for (const char* text : {"", " ", "  ", "a", " a", "a ", "a  ", "  a  b ", "a \n b", " \n", "a\xE2\x96\x81 b",
                             "a \xE2\x96\x81", "<s> </s>"})
        for (std::uint64_t seed = 0; seed < 5; ++seed) expect_same(text, seed);
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        expect_same(test::random_unicode(seed, 200), seed);
        expect_same(test::random_bytes(seed, 300), seed);
    }
}

}  // namespace
}  // namespace fenwick::data
