#include "data/byte_level_bpe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "base/random.h"
#include "base/sha256.h"
#include "base/utf8.h"
#include "data/normalization.h"
#include "data/tokenizer_json.h"
#include "support/shared_data.h"
#include "support/small_tokenizer.h"
#include "support/temporary_folder.h"
#include "support/tokenizer_check.h"

namespace fenwick::data {
namespace {

using nlohmann::json;
using test::byte_level;
using test::decode;
using test::encode;
using test::encode_in_pieces;
using test::error_of;
using test::random_bytes;
using test::random_unicode;
using test::small_tokenizer;
using test::small_tokenizers;
using testing::ElementsAre;
using testing::HasSubstr;
using Ids = std::vector<std::int32_t>;

std::unique_ptr<Tokenizer> make(const json& file) { return make_tokenizer_json(file.dump(), "a.json"); }

// The text of each token.
std::vector<std::string> texts(const Tokenizer& tokenizer, std::string_view text) {
    std::vector<std::string> parts;
    for (const auto id : encode(tokenizer, text)) parts.push_back(decode(tokenizer, {id}));
    return parts;
}

// Random characters whose categories have not changed in the last versions of Unicode, many of them spaces, letters,
// digits and marks of several kinds.
std::string random_text(Random& random, std::size_t characters) {
    static const std::vector<std::string> pieces = {" ",
                                                    " ",
                                                    " ",
                                                    "  ",
                                                    "\n",
                                                    "\r\n",
                                                    "\t",
                                                    "\n\n",
                                                    "the",
                                                    " the",
                                                    "'s",
                                                    "'S",
                                                    "'ll",
                                                    "'",
                                                    "\u017f",
                                                    "12",
                                                    "12345",
                                                    "\u00b2",
                                                    "\u2163",
                                                    "\u0663",
                                                    "na\u00efve",
                                                    "e\u0301",
                                                    "\u0301",
                                                    "\u00a0",
                                                    "\u3000",
                                                    "\u2028",
                                                    "\u0085",
                                                    "\u180e",
                                                    "\u200b",
                                                    "\u200d",
                                                    "\ufeff",
                                                    "\u65e5\u672c\u8a9e",
                                                    "\ud55c\uad6d",
                                                    "\u1112\u1161\u11ab",
                                                    "\U0001F600",
                                                    "\u0928\u093f",
                                                    "\u0645\u064b",
                                                    "!?",
                                                    "...",
                                                    "_",
                                                    "<|endoftext|>",
                                                    "<pad>",
                                                    "<mask>",
                                                    " <mask> ",
                                                    "<word>",
                                                    "a<word>",
                                                    "w w",
                                                    "\u212b",
                                                    "\u2126",
                                                    std::string(1, '\0')};
    static const std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges = {
        {0x20, 0x7e},     {0x20, 0x7e},     {0xa0, 0x17f},    {0x300, 0x34e},    {0x391, 0x3c9},   {0x400, 0x45f},
        {0x5d0, 0x5ea},   {0x621, 0x652},   {0x905, 0x939},   {0x2000, 0x2027},  {0x2190, 0x22ff}, {0x3041, 0x3096},
        {0x4e00, 0x9fa5}, {0xac00, 0xd7a3}, {0xff01, 0xff5e}, {0x1f600, 0x1f64f}};
    std::string text;
    for (std::size_t i = 0; i < characters; ++i) {
        if (random.below(2) == 0) {
            text += pieces[random.below(pieces.size())];
            continue;
        }
        const auto [first, last] = ranges[random.below(ranges.size())];
        const auto code = static_cast<std::uint32_t>(first + random.below(last - first + 1));
        if (code < 0x80)
            text += static_cast<char>(code);
        else if (code < 0x800)
            text += {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
        else if (code < 0x10000)
            text += {static_cast<char>(0xe0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)),
                     static_cast<char>(0x80 | (code & 63))};
        else
            text += {static_cast<char>(0xf0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 63)),
                     static_cast<char>(0x80 | (code >> 6 & 63)), static_cast<char>(0x80 | (code & 63))};
    }
    return text;
}

#ifdef FENWICK_HAVE_PCRE2
class ByteLevelBpe : public testing::Test {};
#else
class ByteLevelBpe : public testing::Test {
    void SetUp() override { GTEST_SKIP() << "built without PCRE2"; }
};
#endif

TEST_F(ByteLevelBpe, GivesTheGoldenIdsOfPublicTokenizers) {
    const std::string golden = test::shared_file("golden/tokenizers.json"),
                      wikitext = test::shared_file("data/wikitext-2-raw/wiki.test.raw");
    const std::vector<std::pair<std::string, std::string>> files = {
        {"gpt2", test::shared_file("data/tokenizers/gpt2/tokenizer.json")},
        {"gpt2", test::shared_file("data/tokenizers/gpt2/vocab.bpe")},
        {"gpt-neox-20b", test::shared_file("data/tokenizers/gpt-neox-20b/20B_tokenizer.json")}};
    if (golden.empty() || wikitext.empty() || files.back().second.empty())
        GTEST_SKIP() << "no shared folder with golden tokenizers";
    const auto cases = json::parse(read_file(golden));
    for (const auto& [name, file] : files) {
        SCOPED_TRACE(file);
        const auto tokenizer = open_tokenizer(file);
        EXPECT_EQ(tokenizer->kind(), "tokenizer.json");
        EXPECT_EQ(tokenizer->vocab_size(), name == "gpt2" ? 50257 : 50281);
        EXPECT_EQ(tokenizer->end_of_document(), name == "gpt2" ? 50256 : 0);
        test::check_golden(*tokenizer, name, cases, read_file(wikitext));
    }
}

TEST_F(ByteLevelBpe, PublicTokenizersGiveBackAnyText) {
    const std::string gpt2 = test::shared_file("data/tokenizers/gpt2/tokenizer.json"),
                      neox = test::shared_file("data/tokenizers/gpt-neox-20b/20B_tokenizer.json");
    if (gpt2.empty() || neox.empty()) GTEST_SKIP() << "no shared folder with tokenizers";
    const auto lossless = open_tokenizer(gpt2), normalising = open_tokenizer(neox);
    for (std::uint64_t seed = 0; seed < 400; ++seed) {
        Random random(seed, 1);
        for (const std::string& text : {random_bytes(seed, 200), random_unicode(seed, 80), random_text(random, 60)}) {
            EXPECT_EQ(decode(*lossless, encode(*lossless, text)), text) << "seed " << seed;
            EXPECT_EQ(encode_in_pieces(*lossless, text, seed, 40), encode(*lossless, text)) << "seed " << seed;
            EXPECT_EQ(encode_in_pieces(*normalising, text, seed, 40), encode(*normalising, text)) << "seed " << seed;
        }
        std::string text;
        for (const char c : random_bytes(seed, 200))
            if (static_cast<unsigned char>(c) < 0xcc || static_cast<unsigned char>(c) > 0xf4)
                text += c;  // no character that NFC changes
        std::string expected;
        for (const char c : text)  // GPT-NeoX has no tokens for these, which UTF-8 never has
            expected += c == '\xc0' || c == '\xc1' || static_cast<unsigned char>(c) > 0xf4 ? "\uFFFD" : std::string(1, c);
        EXPECT_EQ(decode(*normalising, encode(*normalising, text)), expected) << "seed " << seed;
    }
}

TEST_F(ByteLevelBpe, SmallTokenizersGiveBackAnyText) {
    for (const auto& [name, small] : small_tokenizers()) {
        const auto tokenizer = make(small.file);
        EXPECT_EQ(tokenizer->lossless(), small.lossless) << name;
        if (!small.lossless) continue;
        for (std::uint64_t seed = 0; seed < 60; ++seed) {
            Random random(seed, 2);
            for (const std::string& text : {random_bytes(seed, 100), random_unicode(seed, 50), random_text(random, 40)})
                EXPECT_EQ(decode(*tokenizer, encode(*tokenizer, text)), text) << name << ", seed " << seed;
        }
    }
}

// The contract of safe_cut: whatever is cut, and however little of the text is seen when it is.
TEST_F(ByteLevelBpe, PiecesHaveTheIdsOfTheWhole) {
    for (const auto& [name, small] : small_tokenizers()) {
        const auto tokenizer = make(small.file);
        int pieces = 0;
        for (std::uint64_t seed = 0; seed < 300; ++seed) {
            Random random(seed, 3);
            std::string text = random_text(random, 40);
            if (seed % 3 == 0) text += random_bytes(seed, 20) + random_text(random, 20);
            EXPECT_EQ(encode_in_pieces(*tokenizer, text, seed, 30, &pieces), encode(*tokenizer, text))
                << name << ", seed " << seed;
            if (seed % 3 == 1)  // many bytes that continue no character
                for (int i = 0; i < 20; ++i) text += "\xe1\xb1\xb1\xb1\x80\xf0\x9f\x98 a"[random.below(10)];
            text.erase(0, random.below(4));
            const auto whole = encode(*tokenizer, text);
            for (int i = 0; i < 20; ++i) {
                const std::size_t seen = random.below(text.size() + 1),
                                  cut = tokenizer->safe_cut(std::string_view(text).substr(0, seen), random.below(seen + 1));
                if (cut == 0) continue;
                Ids ids = encode(*tokenizer, text.substr(0, cut));
                tokenizer->encode(std::string_view(text).substr(cut), ids);
                ASSERT_EQ(ids, whole) << name << ", seed " << seed << ", cut at " << cut << " having seen " << seen;
            }
        }
        EXPECT_GT(pieces, small.cuttable ? 500 : 0) << name;
    }
}

// Where there are no spaces, or the regex is not a known one, cuts come from matching.
TEST_F(ByteLevelBpe, CutsTextWithoutSpaces) {
    std::string text;
    for (int i = 0; i < 2000; ++i) text += i % 7 == 0 ? "\u3002" : "\u65e5\u672c";
    for (const char* name : {"gpt2", "llama3", "nfc", "lookahead"}) {
        const auto tokenizer = make(small_tokenizers().at(name).file);
        const std::size_t cut = tokenizer->safe_cut(text, 3000);
        EXPECT_GT(cut, 2900u) << name;
        EXPECT_LE(cut, 3000u) << name;
        EXPECT_EQ(encode_in_pieces(*tokenizer, text, 5, 300), encode(*tokenizer, text)) << name;
    }
    // One word of any length has no place to be cut.
    EXPECT_EQ(make(small_tokenizers().at("gpt2").file)->safe_cut(std::string(100000, 'a'), 90000), 0u);
}

// Against the public library, on the same files.
TEST_F(ByteLevelBpe, ThePublicLibraryGivesTheSame) {
    const char* python = std::getenv("FENWICK_PYTHON");
    if (python == nullptr || std::system((std::string(python) + " -c 'import tokenizers' 2>/dev/null").c_str()) != 0)
        GTEST_SKIP() << "FENWICK_PYTHON names no Python with the package tokenizers (tools/test sets it)";
    test::TemporaryFolder folder;
    std::map<std::string, json> files;
    for (const auto& [name, small] : small_tokenizers()) files[name] = small.file;
    for (const char* name : {"gpt2", "gpt-neox-20b/20B"}) {
        const std::string path = test::shared_file(std::string("data/tokenizers/") + name +
                                                   (name[3] == '2' ? "/tokenizer.json" : "_tokenizer.json"));
        if (!path.empty()) files[name] = json::parse(read_file(path));
    }
    json cases = json::array();
    std::vector<std::string> all;
    Random random(11);
    for (int i = 0; i < 400; ++i) all.push_back(random_text(random, 30));
    for (const char* text : {"", " ", "  ", "\n", "a", "<|endoftext|>", "a<mask>b", "a  <mask>  b", "<pad>  <pad>",
                             "<pad><pad><pad>", "the then the", "athe the. the", "<word>", "x<word>", "<word>x",
                             " <word> <word>", "12 12 the123456", "w w w w", "A\u030angstro\u0308m e\u0301"})
        all.push_back(text);
    int number = 0;
    for (const auto& [name, file] : files) {
        const std::string path = folder / fmt::format("{}.json", number++);
        test::write_text(path, file.dump());
        cases.push_back({{"name", name}, {"path", path}});
    }
    test::write_text(folder / "texts.json", json(all).dump());
    test::write_text(folder / "cases.json", cases.dump());
    test::write_text(
        folder / "encode.py",
        "import json, sys\n"
        "from tokenizers import Tokenizer\n"
        "folder = sys.argv[1]\n"
        "texts = json.load(open(folder + '/texts.json'))\n"
        "found = []\n"
        "for case in json.load(open(folder + '/cases.json')):\n"
        "    tokenizer = Tokenizer.from_file(case['path'])\n"
        "    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]\n"
        "    found.append({'ids': ids, 'text': [tokenizer.decode(i, skip_special_tokens=False) for i in ids]})\n"
        "json.dump(found, open(folder + '/found.json', 'w'))\n");
    ASSERT_EQ(std::system((std::string(python) + " " + (folder / "encode.py") + " " + folder.path()).c_str()), 0);
    const auto found = json::parse(read_file(folder / "found.json"));
    for (std::size_t i = 0; i < cases.size(); ++i) {
        const auto tokenizer = open_tokenizer(cases[i]["path"].get<std::string>());
        for (std::size_t j = 0; j < all.size(); ++j) {
            const auto ids = found[i]["ids"][j].get<Ids>();
            ASSERT_EQ(encode(*tokenizer, all[j]), ids) << cases[i]["name"] << ": " << json(all[j]);
            ASSERT_EQ(decode(*tokenizer, ids), found[i]["text"][j].get<std::string>())
                << cases[i]["name"] << ": " << json(all[j]);
        }
    }
}

TEST_F(ByteLevelBpe, SeveralThreadsGiveTheSame) {
    const auto tokenizer = make(small_tokenizers().at("llama3").file);
    std::vector<std::string> all;
    std::vector<Ids> expected(40), found(40);
    Random random(12);
    for (std::size_t i = 0; i < expected.size(); ++i) {
        all.push_back(random_text(random, 300));
        expected[i] = encode(*tokenizer, all[i]);
    }
    std::vector<std::thread> threads;
    for (std::size_t first = 0; first < 4; ++first)
        threads.emplace_back([&, first] {
            for (std::size_t i = first; i < found.size(); i += 4) tokenizer->encode(all[i], found[i]);
        });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(found, expected);
}

// What cannot be said of invalid UTF-8 in a tokenizer.json: its bytes are words of their own.
TEST_F(ByteLevelBpe, BytesThatAreNotUtf8AreWordsOfTheirOwn) {
    const auto tokenizer = make(small_tokenizer(byte_level(true), {" a", "ab", "\xff\xfe", "\xe6\x97", "a\xff"}));
    EXPECT_THAT(texts(*tokenizer,
                      "ab\xff\xfe\xff"
                      "ab \xe6\x97"),
                ElementsAre("ab", "\xff\xfe", "\xff", "ab", " ", "\xe6\x97"));
    EXPECT_THAT(texts(*tokenizer, "a\xff"), ElementsAre("a", "\xff"));  // no merge over the edge
    // A space is put before a text, not after bytes.
    const auto prefixed = make(small_tokenizer(byte_level(true, true), {" a", "\xff\xfe"}));
    EXPECT_THAT(texts(*prefixed,
                      "a\xff"
                      "a"),
                ElementsAre(" a", "\xff", "a"));
    // Bytes without a token become U+FFFD.
    auto file = small_tokenizer(byte_level(true), {"\uFFFD"});
    file["model"]["vocab"].erase(test::byte_as_character(0xff));
    EXPECT_EQ(decode(*make(file), encode(*make(file),
                                         "a\xff\xfe"
                                         "b")),
              "a\uFFFD\xfe"
              "b");
}

TEST_F(ByteLevelBpe, IgnoreMergesTakesWordsThatAreTokens) {
    // " then" can only be made by merges over " the"; with the merge gone it is still a word.
    auto file = small_tokenizer(byte_level(true), {" then"});
    file["model"]["merges"].erase(3);
    EXPECT_THAT(texts(*make(file), " then"), ElementsAre(" the", "n"));
    file["model"]["ignore_merges"] = true;
    EXPECT_THAT(texts(*make(file), " then thenx"), ElementsAre(" then", " the", "n", "x"));
}

// Merges by a queue against the plain way: of all pairs the lowest rank, leftmost first, again and again.
TEST(BytePairEncoder, MergesLikeThePlainLoop) {
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        Random random(seed);
        std::array<std::int32_t, 256> byte_ids{};
        for (int i = 0; i < 256; ++i) byte_ids[static_cast<std::size_t>(i)] = i;
        std::vector<BytePairEncoder::Merge> merges;
        std::map<std::pair<std::int32_t, std::int32_t>, std::size_t> ranks;
        std::vector<std::int32_t> tokens = {'a', 'b', 'c'};
        for (std::int32_t next = 256; next < 280; ++next) {
            const auto left = tokens[random.below(tokens.size())], right = tokens[random.below(tokens.size())];
            ranks[{left, right}] = merges.size();  // twice the same: the last counts
            merges.push_back({left, right, next});
            tokens.push_back(next);
        }
        const BytePairEncoder encoder(byte_ids, merges);
        BytePairEncoder::Workspace workspace;
        for (std::size_t length : {0, 1, 2, 3, 7, 20, 60}) {
            std::string word;
            for (std::size_t i = 0; i < length; ++i) word += static_cast<char>('a' + random.below(seed % 3 + 1));
            Ids expected(word.begin(), word.end());
            while (true) {
                std::size_t best = merges.size(), place = 0;
                for (std::size_t i = 0; i + 1 < expected.size(); ++i)
                    if (const auto found = ranks.find({expected[i], expected[i + 1]});
                        found != ranks.end() && found->second < best) {
                        best = found->second;
                        place = i;
                    }
                if (best == merges.size()) break;
                expected[place] = merges[best].result;
                expected.erase(expected.begin() + static_cast<std::ptrdiff_t>(place) + 1);
            }
            Ids ids = {7};
            encoder.encode(word, workspace, ids);
            expected.insert(expected.begin(), 7);
            EXPECT_EQ(ids, expected) << word << ", seed " << seed;
        }
    }
}

TEST_F(ByteLevelBpe, LongWordsTakeNoQuadraticTime) {
    const auto tokenizer = make(small_tokenizer(byte_level(true), {"aaaaaaaa", "        "}));
    const std::string word(3'000'000, 'a');
    const auto ids = encode(*tokenizer, word);
    EXPECT_EQ(decode(*tokenizer, ids), word);
    const std::string spaces(1'000'000, ' ');
    EXPECT_EQ(decode(*tokenizer, encode(*tokenizer, spaces)), spaces);
}

TEST(Normalization, PartsMakeTheWhole) {
#ifndef FENWICK_HAVE_UTF8PROC
    GTEST_SKIP() << "built without utf8proc";
#endif
    const auto nfc = [](std::string_view text) {
        std::string normal;
        append_nfc(text, normal);
        return normal;
    };
    EXPECT_EQ(nfc(""), "");
    EXPECT_EQ(nfc("plain text, caf\u00e9"), "plain text, caf\u00e9");
    EXPECT_EQ(nfc("e\u0301 \u212b \u1112\u1161\u11ab a\u0301\u0323 \u0301x"), "\u00e9 \u00c5 \ud55c \u1ea1\u0301 \u0301x");
    EXPECT_EQ(nfc("\uac00\u11a8"), "\uac01");  // a syllable and a final
    EXPECT_EQ(nfc(std::string("\0e\u0301\0", 5)), std::string("\0\u00e9\0", 4));
    EXPECT_EQ(nfc_prefix("abc"), 2u);  // what follows may change the c
    EXPECT_EQ(nfc_prefix("abe\u0301cd"), 2u);
    EXPECT_EQ(nfc_prefix("ab\xff"
                         "cd"),
              1u);
    for (std::uint64_t seed = 0; seed < 2000; ++seed) {
        Random random(seed);
        const std::string text = random_text(random, 12), whole = nfc(text);
        EXPECT_EQ(nfc(whole), whole);
        for (std::size_t at = 0; at < text.size(); at += utf8_length(std::string_view(text).substr(at))) {
            const auto rest = std::string_view(text).substr(at);
            if (!starts_nfc_part(utf8_code_point(rest, utf8_length(rest.substr(0, 4))))) continue;
            EXPECT_EQ(nfc(text.substr(0, at)) + nfc(rest), whole) << "seed " << seed << " at " << at;
        }
        const std::size_t prefix = nfc_prefix(text);
        EXPECT_EQ(whole.substr(0, prefix), text.substr(0, prefix)) << "seed " << seed;
        EXPECT_EQ(nfc(text.substr(0, prefix)) + nfc(text.substr(prefix)), whole) << "seed " << seed;
    }
}

}  // namespace
}  // namespace fenwick::data
