// What tests of tokenizers share: ids and texts in one call, texts of all kinds, encoding in pieces, what public libraries
// give.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/random.h"
#include "base/sha256.h"
#include "data/tokenizer.h"

namespace fenwick::test {

inline std::vector<std::int32_t> encode(const data::Tokenizer& tokenizer, std::string_view text) {
    std::vector<std::int32_t> ids;
    tokenizer.encode(text, ids);
    for (const auto id : ids) {
        EXPECT_GE(id, 0);
        EXPECT_LT(id, tokenizer.vocab_size());
    }
    return ids;
}
inline std::string decode(const data::Tokenizer& tokenizer, const std::vector<std::int32_t>& ids) {
    return tokenizer.decode(ids.data(), static_cast<std::int64_t>(ids.size()));
}

inline std::string random_bytes(std::uint64_t seed, std::size_t length) {
    Random random(seed);
    std::string text;
    for (std::size_t i = 0; i < length; ++i) text += static_cast<char>(random.below(256));
    return text;
}

// Characters of every length, with those that tokenizers treat in their own way among them.
inline std::string random_unicode(std::uint64_t seed, std::size_t characters) {
    static const std::vector<std::string> special = {" ",
                                                     "  ",
                                                     "\n",
                                                     "\r\n",
                                                     "\t",
                                                     "\xE2\x96\x81" /* U+2581 */,
                                                     "\xE2\x96\x85" /* U+2585 */,
                                                     "\xEF\xBF\xBD" /* U+FFFD */,
                                                     "\xE2\x81\x87" /* U+2047 */,
                                                     "<unk>",
                                                     "<s>",
                                                     "</s>",
                                                     "<0x0A>",
                                                     "<|unknown|>",
                                                     "<|end of document|>",
                                                     std::string(1, '\0'),
                                                     "e\xCC\x81",
                                                     "\xEF\xBB\xBF" /* byte order mark */,
                                                     "\xC2\xA0",
                                                     "the",
                                                     "The "};
    Random random(seed);
    std::string text;
    for (std::size_t i = 0; i < characters; ++i) {
        const std::uint64_t bits = 1 + random.below(21);
        const auto code = static_cast<std::uint32_t>(random.below(std::uint64_t{1} << bits));
        if (random.below(4) == 0)
            text += special[random.below(special.size())];
        else if (code < 0x80)
            text += static_cast<char>(code);
        else if (code < 0x800)
            text += {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
        else if (code < 0x10000 && (code < 0xd800 || code > 0xdfff))
            text += {static_cast<char>(0xe0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)),
                     static_cast<char>(0x80 | (code & 63))};
        else if (code >= 0x10000 && code < 0x110000)
            text += {static_cast<char>(0xf0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 63)),
                     static_cast<char>(0x80 | (code >> 6 & 63)), static_cast<char>(0x80 | (code & 63))};
    }
    return text;
}

// Encodes in pieces cut by safe_cut, each found from a window of at most `longest` bytes, or more where none is found.
inline std::vector<std::int32_t> encode_in_pieces(const data::Tokenizer& tokenizer, std::string_view text,
                                                  std::uint64_t seed, std::size_t longest, int* pieces = nullptr) {
    Random random(seed);
    std::vector<std::int32_t> ids;
    std::size_t reach = longest;
    bool is_first = true;
    while (!text.empty()) {
        const std::size_t window = std::min<std::size_t>(text.size(), 1 + random.below(reach));
        const std::size_t limit = 1 + random.below(window);
        std::size_t cut = tokenizer.safe_cut(text.substr(0, window), limit);
        EXPECT_LE(cut, limit);
        if (cut == 0 && window == text.size()) cut = text.size();
        if (cut == 0) {
            reach *= 2;
            continue;
        }
        if (is_first)
            tokenizer.encode(text.substr(0, cut), ids);
        else
            tokenizer.encode_continued(text.substr(0, cut), ids);
        is_first = false;
        text.remove_prefix(cut);
        reach = longest;
        if (pieces != nullptr) ++*pieces;
    }
    return ids;
}

// Ids, texts and pieces as golden/tokenizers.json has them of the public tokenizer `name`, for its strings and for
// `wikitext`, the text of WikiText-2's raw test file.
inline void check_golden(const data::Tokenizer& tokenizer, const std::string& name, const nlohmann::json& golden,
                         const std::string& wikitext) {
    const auto& expected = golden.at("tokenizers").at(name);
    for (std::size_t i = 0; i < golden.at("strings").size(); ++i) {
        const auto text = golden.at("strings").at(i).get<std::string>();
        const auto ids = expected.at("ids").at(i).get<std::vector<std::int32_t>>();
        EXPECT_EQ(encode(tokenizer, text), ids) << "string " << i;
        EXPECT_EQ(decode(tokenizer, ids), expected.at("decoded").at(i).get<std::string>()) << "string " << i;
        EXPECT_EQ(encode_in_pieces(tokenizer, text, i, 20), ids) << "string " << i;
    }
    const auto ids = encode(tokenizer, wikitext);
    const auto& whole = expected.at("wikitext2_test_raw");
    EXPECT_EQ(ids.size(), whole.at("tokens").get<std::size_t>());
    EXPECT_EQ(sha256_hex(std::string_view(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(ids[0]))),
              whole.at("sha256_uint32_le").get<std::string>());
    EXPECT_EQ(decode(tokenizer, ids) == wikitext, whole.at("round_trip").get<bool>());
    int pieces = 0;
    EXPECT_EQ(encode_in_pieces(tokenizer, wikitext, 1, 4000, &pieces), ids);
    EXPECT_GT(pieces, 500);
    const auto restored = data::restore_tokenizer(tokenizer.kind(), tokenizer.definition());
    EXPECT_EQ(restored->identity(), tokenizer.identity());
    EXPECT_EQ(encode(*restored, wikitext), ids);
}

}  // namespace fenwick::test
