// Tokenized corpora on disk: HDF5, described in docs/file-formats.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fenwick::data {

struct TokenFileInfo {
    std::string path;
    std::int64_t num_tokens = 0;     // end-of-document tokens included
    std::int64_t num_documents = 0;
    std::int64_t vocab_size = 0;
    std::int64_t text_bytes = 0;     // UTF-8 bytes of the original text
    std::int64_t text_words = 0;     // whitespace-separated words of the original text
    std::int32_t end_of_document = 0;
    std::string tokenizer_kind, tokenizer_identity;
};

// Reads a token file. Opening checks the format mark, the completion mark and the offsets; verify() every checksum.
class TokenFile {
public:
    explicit TokenFile(const std::string& path);
    ~TokenFile();
    TokenFile(TokenFile&&) noexcept;

    const TokenFileInfo& info() const;
    // Tokens [offset, offset + count) into out. Thread-safe. A damaged chunk is an Error that names it.
    void read(std::int64_t offset, std::int64_t count, std::int32_t* out) const;
    const std::vector<std::int64_t>& document_offsets() const;  // num_documents + 1, in tokens
    std::string tokenizer_definition() const;
    void verify() const;

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace fenwick::data
