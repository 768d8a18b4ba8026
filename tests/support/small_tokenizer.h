// Small byte-level BPE tokenizers as tokenizer.json.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fenwick::test {

// How such files write a byte: printable Latin-1 as itself, the others from U+0100 on.
inline std::string byte_as_character(unsigned char byte) {
    const auto printable = [](int value) {
        return (value > 32 && value < 127) || (value > 160 && value < 173) || value > 173;
    };
    int code = byte;
    if (!printable(byte)) {
        code = 256;
        for (int before = 0; before < byte; ++before) code += !printable(before);
    }
    if (code < 128) return std::string(1, static_cast<char>(code));
    return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
}
inline std::string bytes_as_characters(std::string_view bytes) {
    std::string text;
    for (const char c : bytes) text += byte_as_character(static_cast<unsigned char>(c));
    return text;
}

inline const char* gpt2_pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
inline const char* llama3_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

inline nlohmann::json byte_level(bool use_regex, bool add_prefix_space = false) {
    return {{"type", "ByteLevel"}, {"add_prefix_space", add_prefix_space}, {"trim_offsets", true}, {"use_regex", use_regex}};
}
inline nlohmann::json split(const std::string& regex) {
    return {{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
}
inline nlohmann::json sequence(const std::vector<nlohmann::json>& members) {
    return {{"type", "Sequence"}, {"pretokenizers", members}};
}
inline nlohmann::json added_token(std::int64_t id, const std::string& content, bool special = true) {
    return {{"id", id},        {"content", content}, {"single_word", false},  {"lstrip", false},
            {"rstrip", false}, {"special", special}, {"normalized", !special}};
}

// Ids: 0 to 255 the bytes, then every beginning of every word (a merge each), last "<|endoftext|>", a special token.
inline nlohmann::json small_tokenizer(const nlohmann::json& pre_tokenizer,
                                      const std::vector<std::string>& words = {
                                          " the",        " then",        " of",    "ing", "  ",   "    ",    "\n\n",
                                          " \n",         "'s",           "123",    "!!",  "lev",  " lev",    "el",
                                          " na\u00efve", "\u65e5\u672c", "\u0301", "aa",  "aaaa", "\xff\xfe"}) {
    nlohmann::json vocabulary, merges = nlohmann::json::array();
    for (int byte = 0; byte < 256; ++byte) vocabulary[byte_as_character(static_cast<unsigned char>(byte))] = byte;
    for (const std::string& word : words)
        for (std::size_t length = 2; length <= word.size(); ++length) {
            const std::string left = bytes_as_characters(word.substr(0, length - 1)),
                              right = bytes_as_characters(word.substr(length - 1, 1));
            if (vocabulary.contains(left + right)) continue;
            const auto id = vocabulary.size();
            vocabulary[left + right] = id;
            merges.push_back({left, right});
        }
    const auto end = static_cast<std::int64_t>(vocabulary.size());
    return {{"version", "1.0"},
            {"added_tokens", {added_token(end, "<|endoftext|>")}},
            {"normalizer", nullptr},
            {"pre_tokenizer", pre_tokenizer},
            {"post_processor", nullptr},
            {"decoder", byte_level(true)},
            {"model",
             {{"type", "BPE"},
              {"dropout", nullptr},
              {"unk_token", nullptr},
              {"continuing_subword_prefix", nullptr},
              {"end_of_word_suffix", nullptr},
              {"fuse_unk", false},
              {"byte_fallback", false},
              {"ignore_merges", false},
              {"vocab", vocabulary},
              {"merges", merges}}}};
}

struct SmallTokenizer {
    nlohmann::json file;
    bool lossless = true;  // every text comes back
    bool cuttable = true;  // safe_cut finds places in most texts
};

// All the ways to part text that matter: the public regexes, several steps, spaces added, words dropped, lookahead over
// several characters, matches that are empty, normal forms, added tokens of every kind.
inline std::map<std::string, SmallTokenizer> small_tokenizers() {
    using nlohmann::json;
    std::map<std::string, SmallTokenizer> made;
    const auto make = [&](const std::string& name, const json& pre_tokenizer, bool lossless = true,
                          bool cuttable = true) -> json& {
        made[name] = {small_tokenizer(pre_tokenizer), lossless, cuttable};
        return made[name].file;
    };
    // An added token, with the id of the vocabulary, or the next.
    const auto add = [](json& file, const std::string& content, bool special) -> json& {
        const auto& vocabulary = file["model"]["vocab"];
        auto& tokens = file["added_tokens"];
        const auto next = static_cast<std::int64_t>(vocabulary.size() + tokens.size());
        tokens.push_back(added_token(vocabulary.value(content, next), content, special));
        return tokens.back();
    };
    const json nfc = {{"type", "NFC"}}, llama3 = sequence({split(llama3_pattern), byte_level(false)}),
               lookahead = sequence({split(R"(the(?= then the)|[a-z]{2}(?=[^x]{3})|\S+?|\s+)"), byte_level(false)});
    make("gpt2", byte_level(true));
    make("gpt2 with prefix space", byte_level(true, true), false);
    make("llama3", llama3)["model"]["ignore_merges"] = true;
    make("digits", sequence({{{"type", "Digits"}, {"individual_digits", true}}, byte_level(true)}));
    make("three digits",
         sequence({split(R"(\p{N}{1,3})"), split(R"([一-龥぀-ゟ゠-ヿ]+)"), split(llama3_pattern), byte_level(false)}));
    make("no regex", byte_level(false), true, false);
    make("prefix space for each word", sequence({split(R"(\p{L}+)"), byte_level(true, true)}), false, false);
    make("lookahead", lookahead);
    make("lookbehind", sequence({split(R"((?<=[a-z]) | ?\S+)"), byte_level(false)}), true, false);
    make("empty matches", sequence({split(R"(\d*)"), byte_level(false)}), true, false);
    auto& only = make("matches only", sequence({split(R"( ?\p{L}+|\p{N}+)"), byte_level(false)}), false);
    only["pre_tokenizer"]["pretokenizers"][0].update({{"behavior", "Removed"}, {"invert", true}});
    auto& string = make("string", sequence({split(""), byte_level(true)}));
    string["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"String", "."}};
    make("nfc", byte_level(true), false)["normalizer"] = nfc;
    make("nfc, lookahead", lookahead, false)["normalizer"] = {{"type", "Sequence"}, {"normalizers", {nfc}}};
    make("added tokens", byte_level(true), false)["normalizer"] = nfc;
    make("added tokens, lookahead", lookahead);
    for (const char* name : {"added tokens", "added tokens, lookahead"}) {
        json& file = made[name].file;
        add(file, "<pad>", true);
        add(file, "    ", false);
        add(file, "w w", false);
        add(file, "\u00c5ngstr\u00f6m e\u0301", false);
        add(file, "<pad><pad>", true);
        add(file, "12", false);
    }
    json& around = make("added tokens that look around", llama3, false, false);
    add(around, "<mask>", true)["lstrip"] = true;
    add(around, "<word>", true)["single_word"] = true;
    add(around, "<pad>", true)["rstrip"] = true;
    add(around, "the", false)["single_word"] = true;
    add(make("lstrip", byte_level(true, true), false), "<mask>", true)["lstrip"] = true;
    return made;
}

}  // namespace fenwick::test
