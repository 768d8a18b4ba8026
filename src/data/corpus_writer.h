// Writes a corpus, one token file or a folder of shards, so that it can be broken off at any moment and continued.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/files.h"
#include "data/corpus.h"
#include "data/tokenizer.h"

namespace fenwick::data {

// A path that ends in .h5 (or .H5) is one token file; any other is a folder of shards.
bool is_token_file_path(const std::string& output);

// Everything is made in the folder "<output>.partial". Tokens and documents of the shard being filled go to plain files,
// whose lengths and checksums are the state; a full shard is written as a token file from these, in one pass, so that its
// bytes do not depend on where the work was broken off. Methods throw Error: a full disk, a damaged state.
class CorpusWriter {
public:
    // shard_tokens: a shard of a folder ends with the document that brings it to so many. deflate: 0 (none) to 9.
    CorpusWriter(std::string output, const Tokenizer& tokenizer, std::int64_t shard_tokens, int deflate);

    void append(const std::int32_t* ids, std::int64_t count);  // to the open document; ids must be in the vocabulary
    void end_document(std::int64_t bytes, std::int64_t words);
    bool shard_is_full() const { return is_folder_ && shard_.num_tokens >= shard_tokens_; }
    std::int64_t num_documents() const;  // in all, between documents

    // Between documents. A shard that is closed is complete on disk; the files it was made from stay until forget_spools().
    void close_shard();
    nlohmann::json commit();                    // what has been written is on disk, and this is where it stands
    void forget_spools();                       // once the state is safe
    // Of commit(). Reads what is there from end to end, and throws Error where it is not as it was left; removes what came
    // later.
    void restore(const nlohmann::json& state);

    // The last shard is closed and the whole is complete in the work folder. `sources`: a file of JSON lines, as in a
    // corpus.
    TokenFileInfo complete(const std::string& sources);
    void check_complete() const;  // of another run, and not yet put in place: as it was left, or an Error
    // Puts it in place; what stands at the output is replaced. Does nothing where that has been done.
    void publish();

    const std::string& output() const { return output_; }
    const std::string& work_folder() const { return work_; }

private:
    std::string spool(std::string_view kind, std::size_t shard) const;
    std::string staging_folder() const;
    std::string staged(std::string_view name) const;
    void open_spools();
    void write_shard(const std::string& sources);

    struct Spool {
        Spool(const std::string& path, std::int64_t bytes, const std::string& shown) : file(path, bytes, shown) {}
        AppendFile file;
        std::uint32_t crc = 0;
        void append(const void* data, std::size_t bytes);
    };

    std::string output_, work_;
    bool is_folder_;
    const Tokenizer& tokenizer_;
    std::int64_t shard_tokens_;
    int deflate_;
    std::int64_t vocab_size_, token_bytes_;
    std::vector<CorpusManifest::Shard> shards_;  // finished
    CorpusManifest::Shard shard_;                // sums of the open one
    std::int64_t document_tokens_ = 0;           // of the open document
    std::optional<Spool> tokens_, documents_;
    std::vector<char> narrow_;  // tokens on their way to the file
};

}  // namespace fenwick::data
