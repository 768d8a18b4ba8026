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

    virtual std::string kind() const = 0;               // "bytes", "sentencepiece", "tokenizer.json"
    virtual std::int64_t vocab_size() const = 0;
    virtual std::int32_t end_of_document() const = 0;   // the id written after each document; not text
    // Appends the ids of `text`; never adds begin or end tokens. Safe to call from several threads.
    virtual void encode(std::string_view text, std::vector<std::int32_t>& ids) const = 0;
    // Of text that goes on where a document was cut (safe_cut): without what encode() puts before a text. Else the same.
    virtual void encode_continued(std::string_view text, std::vector<std::int32_t>& ids) const { encode(text, ids); }
    // The text of ids; end_of_document reads as "" or, in a tokenizer.json, as its name. Throws Error for an id outside
    // [0, vocab_size).
    virtual std::string decode(const std::int32_t* ids, std::int64_t count) const = 0;
    // The file that defines it (a SentencePiece model, a tokenizer.json), "" for bytes: stored in token files and checkpoints, so that
    // either alone suffices to decode.
    virtual std::string definition() const = 0;
    // A place where `text` may be cut so that its parts are encoded by themselves: some p with 0 < p <= limit <= text.size()
    // such that encode(text[:p]) followed by encode_continued(text[p:] + more) is encode(text + more), whatever `more` is,
    // "" too; of a text that is itself a continuation, encode_continued() in both places. As late as it is cheaply found; 0
    // where none is found: take a longer text, or encode the document whole. `text` begins where a document begins, or at
    // such a place; what lies after `limit` is only looked at (a few dozen bytes help, and it may end within a character).
    // So a document of any size is encoded in pieces, on several threads, with the ids of the whole. The cost is far below
    // that of encoding text[:limit]. Thread-safe.
    virtual std::size_t safe_cut(std::string_view text, std::size_t limit) const;
    // Whether decode gives back every text, whatever its bytes.
    virtual bool lossless() const = 0;
    // SHA-256 of kind and definition: two tokenizers with the same identity give the same ids.
    std::string identity() const;
};

// "bytes", or the path of a SentencePiece .model, of a Hugging Face tokenizer.json, of GPT-2's vocab.bpe or encoder.json (or
// merges.txt, vocab.json: the same under other names), or of a folder that holds one of these. `end_of_document` names the
// token that ends documents where a tokenizer.json has none of the usual names, or several. Throws Error naming what is
// wrong.
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name_or_path, const std::string& end_of_document = "");
// From what a token file or checkpoint stores.
std::unique_ptr<Tokenizer> restore_tokenizer(const std::string& kind, const std::string& definition);

struct SentencePieceOptions {
    std::int64_t vocab_size = 4096;      // pieces in all; 256 are bytes, 3 the unknown piece, end of document and newline
    std::string model_type = "bpe";      // "bpe" or "unigram"
    int threads = 0;                     // 0: num_threads()
    double character_coverage = 0.9995;  // share of the text's characters that get pieces; others become bytes
    std::int64_t sample_bytes = 64 << 20;  // larger corpora are trained on evenly spaced lines of about this many bytes
};

// Trains a SentencePiece model on text files and writes it to `output_path` (atomically). The model is lossless:
// decode(encode(x)) == x for any bytes, so that bits per byte can be counted. No normalisation, no dummy prefix, no
// removal of spaces; rare characters and invalid UTF-8 fall back to bytes; a newline is a piece of its own.
// Returns its number of pieces: fewer than asked for where the text has no more. Throws Error: no usable text, an output
// that would replace a text file, more characters than the vocabulary holds.
std::int64_t train_sentencepiece(const std::vector<std::string>& files, const SentencePieceOptions& options,
                         const std::string& output_path);

}  // namespace fenwick::data
