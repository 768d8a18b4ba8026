// From text files to a token file.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data/token_file.h"
#include "data/tokenizer.h"

namespace fenwick::data {

// What becomes one document. A line's and a block's text is without its last newline ("\r\n" too); blank lines (of
// white space alone) separate blocks and are no documents. Every byte of the files counts as text of some document,
// separators as text of the document before them, so that bits per byte refer to the files as they are.
enum class DocumentUnit : std::uint8_t { file, line, block };
DocumentUnit document_unit_from(std::string_view name);  // "file", "line", "block"; throws Error naming these

struct TokenizeOptions {
    std::vector<std::string> files;  // in this order
    DocumentUnit documents = DocumentUnit::file;
    std::string output;
    int deflate = 0;  // compression, 0 (none) to 9
    // Called now and then with the bytes of text done and in all.
    std::function<void(std::int64_t done, std::int64_t total)> progress;
};

// Encodes on num_threads() threads; the file's bytes do not depend on how many. Memory is bounded: files are read in
// blocks, and long documents are encoded in pieces cut where the tokenizer allows (at newlines; lines of more than
// 64 KiB before a space, else between characters). With a tokenizer that does not split at newlines a document is
// encoded whole up to 64 MiB. Throws Error: a missing file, no text at all, a full disk; then nothing is left at `output`.
TokenFileInfo tokenize_files(const Tokenizer& tokenizer, const TokenizeOptions& options);

}  // namespace fenwick::data
