// Byte-level BPE tokenizers of the GPT kind; tokenizer_json.h makes them from files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/added_tokens.h"
#include "data/byte_pair_encoder.h"
#include "data/regex.h"
#include "data/tokenizer.h"

namespace fenwick::data {

// A step that parts text into words. Each part is parted again by the next step.
struct PreTokenizer {
    bool prefix_space = false;     // a text that does not begin with a space gets one
    std::unique_ptr<Regex> regex;  // its matches are words, and so is what lies between; null: no parting
    bool matches_only = false;     // what lies between is dropped
};

struct ByteLevelBpeParts {
    std::string definition;  // a tokenizer.json
    bool nfc = false;        // texts are normalised
    std::vector<AddedToken> added_tokens;
    std::vector<PreTokenizer> pre_tokenizers;
    std::vector<std::string> token_bytes;    // of each id; "" for ids that no token has
    std::array<std::int32_t, 256> byte_ids;  // the token of each byte; -1 is allowed for those that UTF-8 never has
    std::vector<BytePairEncoder::Merge> merges;
    bool ignore_merges = false;             // a word that is a token is that token, whatever the merges say
    std::vector<std::int32_t> word_tokens;  // with ignore_merges: the tokens that words may be
    std::int32_t end_of_document = 0;
};

// Kind "tokenizer.json". encode() takes any bytes: those that are not UTF-8, which the format has no place for, are words
// of their own, and what stands around them is encoded as texts of their own (without a prefix space). So decode() gives
// back every text, but for what the file itself loses: normalisation, prefix spaces, stripped white space, and bytes without
// a token, which are encoded as U+FFFD.
std::unique_ptr<Tokenizer> make_byte_level_bpe(ByteLevelBpeParts parts);

}  // namespace fenwick::data
