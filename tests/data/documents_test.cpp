#include "data/documents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/random.h"
#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;

// Finds places to cut at newlines alone, or nowhere.
class Cutter final : public Tokenizer {
public:
    explicit Cutter(bool cuts) : cuts_(cuts) {}
    std::string kind() const override { return "cutter"; }
    std::int64_t vocab_size() const override { return 257; }
    std::int32_t end_of_document() const override { return 256; }
    void encode(std::string_view, std::vector<std::int32_t>&) const override {}
    std::string decode(const std::int32_t*, std::int64_t) const override { return ""; }
    std::string definition() const override { return ""; }
    bool lossless() const override { return cuts_; }
    std::size_t safe_cut(std::string_view text, std::size_t limit) const override {
        const auto newline = cuts_ ? text.rfind('\n', limit - 1) : std::string_view::npos;
        return newline == std::string_view::npos ? 0 : newline + 1;
    }

private:
    bool cuts_;
};

struct Split {
    std::vector<std::string> pieces;
    std::vector<TextPiece> info;
    std::size_t longest_batch = 0;
};

Split split(std::string_view text, DocumentUnit unit, const Tokenizer& tokenizer, std::size_t step, std::int64_t skip = 0) {
    Split result;
    DocumentSplitter splitter(unit, tokenizer, [&](const TextBatch& batch) {
        std::size_t end = 0;
        for (const TextPiece& piece : batch.pieces) {
            EXPECT_EQ(piece.begin, end) << "pieces are the whole of the batch";
            end = piece.end;
            result.pieces.push_back(batch.text.substr(piece.begin, piece.end - piece.begin));
            result.info.push_back(piece);
        }
        EXPECT_EQ(end, batch.text.size());
        result.longest_batch = std::max(result.longest_batch, batch.text.size());
    });
    splitter.begin_file(skip);
    for (; !text.empty(); text.remove_prefix(std::min(step, text.size()))) splitter.add(text.substr(0, step));
    splitter.end_file();
    splitter.flush();
    return result;
}

std::string lines_of_text(std::size_t bytes, std::size_t longest) {
    Random random(4);
    std::string text;
    while (text.size() < bytes) text += std::string(random.below(longest), 'x') + (random.below(5) == 0 ? "\n\n" : " y\n");
    return text;
}

// A piece ends at the last safe place in its first 32 KiB, or twice that and so on; blocks of any size give the same.
TEST(Documents, PiecesAreCutWhereTheTokenizerAllows) {
    const std::string text = lines_of_text(3 << 20, 2000) + std::string(100000, 'z') + "\n" + lines_of_text(200000, 30);
    const Cutter cutter(true);
    const Split whole = split(text, DocumentUnit::file, cutter, text.size());
    std::string all;
    for (std::size_t i = 0; i < whole.pieces.size(); ++i) {
        const bool last = i + 1 == whole.pieces.size();
        all += whole.pieces[i];
        EXPECT_EQ(whole.info[i].begins_document, i == 0);
        EXPECT_EQ(whole.info[i].ends_document, last);
        EXPECT_EQ(whole.info[i].unit, 0);
        EXPECT_LE(whole.pieces[i].size(), 128u << 10);
        if (!last) {
            EXPECT_EQ(whole.pieces[i].back(), '\n');
        }
    }
    EXPECT_TRUE(all == text);
    EXPECT_LT(whole.pieces.size(), text.size() / 30000 + 4);
    EXPECT_LE(whole.longest_batch, 512u << 10);
    for (const std::size_t step : {std::size_t{1}, std::size_t{777}, std::size_t{300000}})
        EXPECT_TRUE(split(text, DocumentUnit::file, cutter, step).pieces == whole.pieces) << step;
}

// Where no safe place is found a document goes whole up to 2 MiB; then it is cut before a space, else between characters.
TEST(Documents, PiecesEndSomewhereAllTheSame) {
    const Cutter cutter(false);
    std::string words, solid;
    while (words.size() < (9u << 20)) words += "word \xE6\x97\xA5 ";
    while (solid.size() < (9u << 20)) solid += "\xE6\x97\xA5";
    for (const std::string& text : {words, solid, words.substr(0, longest_piece)}) {
        const auto pieces = split(text, DocumentUnit::line, cutter, 1 << 20).pieces;
        EXPECT_EQ(pieces.size(), text.size() / longest_piece + (text.size() > longest_piece));
        std::string all;
        for (const auto& piece : pieces) {
            all += piece;
            EXPECT_NE(piece[0] & 0xc0, 0x80) << "a character is whole";
            if (text == words && !all.starts_with(piece)) {
                EXPECT_EQ(piece[0], ' ');
            }
        }
        EXPECT_TRUE(all == text);
    }
}

TEST(Documents, SkippedUnitsAreCountedAndLeftOut) {
    const std::string text = lines_of_text(900000, 300);
    const Cutter cutter(true);
    for (const auto unit : {DocumentUnit::line, DocumentUnit::block}) {
        const Split whole = split(text, unit, cutter, 5000);
        const std::int64_t units = whole.info.back().unit + 1;
        for (const std::int64_t skip : {std::int64_t{1}, units / 3, units - 1, units, units + 5}) {
            const Split rest = split(text, unit, cutter, 7000, skip);
            std::vector<std::string> expected;
            for (std::size_t i = 0; i < whole.pieces.size(); ++i)
                if (whole.info[i].unit >= skip) expected.push_back(whole.pieces[i]);
            EXPECT_TRUE(rest.pieces == expected) << skip;
            if (!rest.info.empty()) {
                EXPECT_EQ(rest.info[0].unit, skip);
            }
        }
    }
}

TEST(Documents, ManySmallDocumentsMakeSmallBatches) {
    std::string text;
    for (int i = 0; i < 100000; ++i) text += "a\n";
    std::size_t most = 0, documents = 0;
    const Cutter cutter(true);
    DocumentSplitter splitter(DocumentUnit::line, cutter, [&](const TextBatch& batch) {
        most = std::max(most, batch.pieces.size());
        documents += batch.pieces.size();
    });
    splitter.begin_file();
    splitter.add(text);
    splitter.end_file();
    splitter.flush();
    EXPECT_EQ(documents, 100000u);
    EXPECT_LE(most, 8192u);
}

TEST(Documents, JsonLinesOfAnyBlocks) {
    const std::string text = "{\"text\": 1}\n\n  \r\n{\"a\"\n: \n" + std::string(300000, 'b') + "\nlast";
    for (const std::size_t step : {std::size_t{1}, std::size_t{9}, text.size()}) {
        for (const std::int64_t skip : {0, 1, 4, 6}) {
            std::vector<std::pair<std::int64_t, std::string>> found, expected;
            JsonLineSplitter splitter([&](const TextBatch& batch) {
                for (const auto& piece : batch.pieces)
                    found.emplace_back(piece.unit, batch.text.substr(piece.begin, piece.end - piece.begin));
            });
            splitter.begin_file("a", skip);
            for (std::size_t i = 0; i < text.size(); i += step) splitter.add(std::string_view(text).substr(i, step));
            splitter.end_file();
            splitter.flush();
            for (const auto& [unit, line] : std::vector<std::pair<std::int64_t, std::string>>{
                     {0, "{\"text\": 1}"}, {3, "{\"a\""}, {4, ": "}, {5, std::string(300000, 'b')}, {6, "last"}})
                if (unit >= skip) expected.emplace_back(unit, line);
            EXPECT_TRUE(found == expected) << step << ", " << skip;
        }
    }
    JsonLineSplitter splitter([](const TextBatch&) {});
    splitter.begin_file("a.jsonl");
    splitter.add("{}\n");
    const std::string block(1 << 20, ' ');
    EXPECT_EQ(error_of([&] {
                  for (int i = 0; i < 40; ++i) splitter.add(block);
              }),
              "a.jsonl:2: the line has more than 32 MiB; is it JSON lines?");
}

TEST(Documents, TextOfJson) {
    EXPECT_EQ(json_text(R"({"text": "a\n\"b\" \u00e9 \ud83d\ude00", "n": [1, {"text": "no"}]})", "text"),
              "a\n\"b\" \xC3\xA9 \xF0\x9F\x98\x80");
    EXPECT_EQ(json_text(R"({"a": {"text": "inner"}, "text": "outer", "z": null})", "text"), "outer");
    EXPECT_EQ(json_text(R"( {"x y": ""} )", "x y"), "");
    EXPECT_EQ(json_text(R"({"text": 1, "text": "last"})", "text"), "last");
    const auto refusal = [](std::string_view line) { return error_of([&] { json_text(line, "text"); }); };
    EXPECT_EQ(refusal("{\"text\": \"a"), "it is not valid JSON (at byte 12)");
    EXPECT_THAT(refusal("{\"text\": \"\xff\"}"), HasSubstr("it is not valid JSON"));
    EXPECT_THAT(refusal("{\"text\": \"\\ud800\"}"), HasSubstr("it is not valid JSON"));
    EXPECT_THAT(refusal("{\"text\": \"a\"} {}"), HasSubstr("it is not valid JSON"));
    EXPECT_THAT(refusal("{\"text\": \"a\"},"), HasSubstr("it is not valid JSON"));
    EXPECT_EQ(refusal("{}"), "it has no field 'text'");
    EXPECT_EQ(refusal("{\"a\": {\"text\": \"b\"}}"), "it has no field 'text'");
    EXPECT_EQ(refusal("{\"text\": null}"), "its field 'text' is no text");
    EXPECT_EQ(refusal("{\"text\": [\"a\"]}"), "its field 'text' is no text");
    EXPECT_EQ(refusal("[{\"text\": \"a\"}]"), "it is no JSON object");
    EXPECT_EQ(refusal("\"text\""), "it is no JSON object");
    std::string deep = "{\"text\": \"a\", \"b\": ";
    deep += std::string(100000, '[') + std::string(100000, ']') + "}";
    EXPECT_EQ(json_text(deep, "text"), "a");
}

}  // namespace
}  // namespace fenwick::data
