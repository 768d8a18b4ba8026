// Tokenized corpora on disk: HDF5, described in docs/file-formats.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace fenwick::data {

// Of a stored token: 2 where that holds every id of the vocabulary, else 4.
std::int64_t token_bytes_for(std::int64_t vocab_size);

struct TokenFileInfo {
    std::string path;
    std::int64_t num_tokens = 0;     // end-of-document tokens included
    std::int64_t num_documents = 0;
    std::int64_t vocab_size = 0;
    std::int64_t text_bytes = 0;     // bytes of the original text
    std::int64_t text_words = 0;     // whitespace-separated words of the original text
    std::int32_t end_of_document = 0;
    std::string tokenizer_kind, tokenizer_identity;
};

// A text file that tokens were made from.
struct TokenSource {
    std::string name;
    std::int64_t bytes = 0;
    std::string sha256;

    std::string json() const;  // one line, {"bytes", "name", "sha256"}
    static TokenSource from_json(std::string_view text);  // throws nlohmann::json::exception
};

// Whether the file says that it is one; it may be damaged.
bool is_token_file(const std::string& path);

// Reads a token file. Opening checks the format mark, the completion mark and the sizes; a chunk of tokens and a list of
// the documents are read and checked when they are first asked for; verify() checks everything. All of it is thread-safe.
class TokenFile {
public:
    // cache_bytes: of decoded chunks that are kept, about.
    explicit TokenFile(const std::string& path, std::size_t cache_bytes = 64 << 20);
    ~TokenFile();
    TokenFile(TokenFile&&) noexcept;

    const TokenFileInfo& info() const;
    // SHA-256 over the header and the checksums, and so over all that the file holds but `sources`: equal where the tokens, the
    // documents and the tokenizer are.
    std::string digest() const;
    // Tokens [offset, offset + count) into out. A damaged chunk is an Error that names it.
    void read(std::int64_t offset, std::int64_t count, std::int32_t* out) const;
    const std::vector<std::int64_t>& document_offsets() const;  // num_documents + 1, in tokens
    // Of the original text of each document; their sums are info().text_bytes and text_words. num_documents each.
    const std::vector<std::int64_t>& document_bytes() const;
    const std::vector<std::int64_t>& document_words() const;
    std::vector<TokenSource> sources() const;
    std::string tokenizer_definition() const;
    std::unique_ptr<Tokenizer> tokenizer() const;
    void verify() const;

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

// Writes a token file in one pass, with bounded memory: to "<path>.tmp", put in place by finish(). A writer that is
// destroyed before finish() leaves nothing behind. The same calls give the same bytes.
class TokenFileWriter {
public:
    // deflate: 0 (none) to 9. num_tokens: of the whole, ends of documents included, where that is known, for the file to be
    // read faster: exactly so many are then to be written.
    TokenFileWriter(const std::string& path, const Tokenizer& tokenizer, int deflate = 0, std::int64_t num_tokens = -1);
    ~TokenFileWriter();
    TokenFileWriter(const TokenFileWriter&) = delete;
    TokenFileWriter& operator=(const TokenFileWriter&) = delete;

    void append(const std::int32_t* ids, std::int64_t count);  // to the open document; ids must be in the vocabulary
    // Closes the document: writes the end-of-document token. bytes and words are of its original text.
    void end_document(std::int64_t bytes, std::int64_t words);
    void add_source(const TokenSource& source);
    TokenFileInfo finish();  // syncs, renames; throws Error when there is no document

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace fenwick::data
