// Byte-level BPE tokenizers from Hugging Face's tokenizer.json, and from GPT-2's vocab.bpe and encoder.json.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace fenwick::data {

// What is done: model BPE; pre-tokenizers Split, Digits and, as the last, ByteLevel; normalizer NFC or none; added tokens
// with all their flags; decoder ByteLevel. Post-processors only add begin and end tokens, which encode() never does;
// truncation and padding have no meaning for documents and are left out. Every other component, whatever is malformed, and
// a vocabulary without a token for each byte of UTF-8 is an Error of one line that begins with `name`.
// The end of a document is the token that `model.end_of_document` names (Fenwick's own key, which other programs pass
// over), else the one of the special tokens, or of the vocabulary, with a known name such as <|endoftext|>.
std::unique_ptr<Tokenizer> make_tokenizer_json(const std::string& definition, const std::string& name);

// The definition with another end of a document. Throws Error where it is no JSON object with a model.
std::string with_end_of_document(const std::string& definition, const std::string& token, const std::string& name);

// A tokenizer.json of the same ids as GPT-2's pair of files, vocab.bpe and encoder.json, read from these paths.
std::string tokenizer_json_of_gpt2(const std::string& merges_path, const std::string& vocabulary_path);

}  // namespace fenwick::data
