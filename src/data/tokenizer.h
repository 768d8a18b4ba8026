// Tokenizers: text to token ids and back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fenwick::data {

class Tokenizer {
public:
    virtual ~Tokenizer() = default;

    virtual std::string kind() const = 0;               // "bytes", "sentencepiece", ...
    virtual std::int64_t vocab_size() const = 0;
    virtual std::int32_t end_of_document() const = 0;   // the id written after each document; not text
    // Appends the ids of `text`; never adds begin or end tokens. Safe to call from several threads.
    virtual void encode(std::string_view text, std::vector<std::int32_t>& ids) const = 0;
    virtual std::string decode(const std::int32_t* ids, std::int64_t count) const = 0;
    // The file that defines it (a SentencePiece model), "" for bytes: stored in token files and checkpoints, so that
    // either alone suffices to decode.
    virtual std::string definition() const = 0;
    // SHA-256 of kind and definition: two tokenizers with the same identity give the same ids.
    std::string identity() const;
};

// "bytes", or the path of a SentencePiece .model file. Throws Error naming what is wrong.
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name_or_path);
// From what a token file or checkpoint stores.
std::unique_ptr<Tokenizer> restore_tokenizer(const std::string& kind, const std::string& definition);

}  // namespace fenwick::data
