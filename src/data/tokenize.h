// From text files to a corpus.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/documents.h"
#include "data/token_file.h"
#include "data/tokenizer.h"

namespace fenwick::data {

// by_name: files called *.jsonl, *.ndjson or *.json (and the same with .gz, .zst or .xz behind) hold JSON lines, all others
// text.
enum class TextFormat : std::uint8_t { by_name, text, json_lines };
TextFormat text_format_from(std::string_view name);  // "auto", "text", "jsonl"; throws Error naming these

struct TokenizeProgress {
    std::int64_t file_bytes = 0, total_file_bytes = 0;  // of the files as they lie on disk: read and in all
    std::int64_t text_bytes = 0;                        // tokenized by this run
    bool resumed = false;                               // an interrupted run is continued
};

struct TokenizeOptions {
    std::vector<std::string> inputs;  // files and folders (list_text_files), in this order
    TextFormat format = TextFormat::by_name;
    DocumentUnit documents = DocumentUnit::file;  // of text; each line of JSON lines is a document, but those without text
    std::string text_field = "text";              // of JSON lines
    std::string output;                           // NAME.h5 is one token file, any other name a folder of shards
    std::int64_t shard_tokens = 100'000'000;      // a shard ends with the document that brings it to so many
    int deflate = 0;                              // compression, 0 (none) to 9

    // With a valid_output every document goes there with the probability valid_share, drawn from (valid_seed, the document's
    // number) alone.
    std::string valid_output;
    double valid_share = 0;
    std::uint64_t valid_seed = 0;

    int workers = 0;                       // threads that encode; 0: num_threads(). The files' bytes do not depend on it
    bool overwrite = false;                // replace a corpus that stands at an output
    bool restart = false;                  // forget what an interrupted run left
    std::int64_t commit_bytes = 64 << 20;  // of text, after which progress is made safe
    // Called now and then, also when all is done.
    std::function<void(const TokenizeProgress&)> progress;
};

struct TokenizeResult {
    TokenFileInfo output;
    std::optional<TokenFileInfo> valid;
};

// Whether a document, counted from 0 over all files, is of the validation share.
bool is_valid_document(std::uint64_t seed, std::int64_t document, double share);

// One thread reads, `workers` encode, the calling one writes. Memory is bounded: what is on its way between them is, and
// long documents are encoded in pieces (documents.h).
//
// Everything is made in "<output>.partial" and put in place when it is whole. A run that was killed, or ended by an error
// after some progress, is continued by the same call, and the result has the same bytes; with other options, other files or
// a file that has changed since, the call is refused. Throws Error: an input that is missing, damaged, or no text; no text
// at all; a bad line of JSON ("FILE:LINE: what"), an output that exists, a full disk.
TokenizeResult tokenize(const Tokenizer& tokenizer, const TokenizeOptions& options);

}  // namespace fenwick::data
