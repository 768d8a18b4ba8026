// A tokenized corpus: one token file, or a folder of them (shards), seen as one stream of tokens and documents.
// docs/file-formats.md describes both.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/token_file.h"

namespace fenwick::data {

// The file that makes a folder of shards a whole: which shards, in which order, and what each holds.
inline constexpr std::string_view manifest_name = "manifest.json", sources_name = "sources.jsonl";

// A JSON object that carries a checksum over the rest of it, in "sha256". check_seal throws Error that names the file and
// ends with the remedy, and what nlohmann::json throws where there is no checksum.
void seal(nlohmann::json& object);
void check_seal(const nlohmann::json& object, const std::string& path, std::string_view remedy = "");

struct CorpusManifest {
    struct Shard {
        std::string file;        // name in the folder
        std::int64_t bytes = 0;  // of the file
        std::string digest;      // TokenFile::digest()
        std::int64_t num_tokens = 0, num_documents = 0, text_bytes = 0, text_words = 0;
    };
    TokenFileInfo info;         // sums over the shards; path is the folder
    std::vector<Shard> shards;  // at least one
    std::int64_t num_sources = 0;
    std::string sources_sha256;  // of the file `sources_name`

    // Both throw Error: not written, missing, damaged.
    void write(const std::string& folder) const;
    static CorpusManifest read(const std::string& folder);
};

void to_json(nlohmann::json& json, const CorpusManifest::Shard& shard);
void from_json(const nlohmann::json& json, CorpusManifest::Shard& shard);

bool is_corpus_folder(const std::string& path);  // holds a manifest
bool holds_shards(const std::string& path);      // a folder that does, or did

// How many shards a process can well keep open: a quarter of the files that the system lets it open.
std::size_t most_open_shards();

// Opening opens every shard, about a millisecond each, and compares its size and digest with the manifest's; of the tokens
// themselves it reads none. At most `most_open` stay open, others are opened anew when they are needed. A run with shuffled
// rows touches any shard at any time, so that it is much slower where they do not all stay open. Thread-safe.
class TokenCorpus {
public:
    // Throws Error: nothing there, a missing, foreign or truncated shard, another corpus's shard, a damaged manifest.
    explicit TokenCorpus(const std::string& path, std::size_t most_open = most_open_shards());
    ~TokenCorpus();
    TokenCorpus(TokenCorpus&&) noexcept;

    const TokenFileInfo& info() const;  // of the whole; path as given
    // SHA-256 over the shards' digests: equal where the tokenizer, the tokens, the documents and their cut into shards are.
    std::string identity() const;

    // Tokens [offset, offset + count) of the whole into out.
    void read(std::int64_t offset, std::int64_t count, std::int32_t* out) const;
    // Where document `index` of the whole begins, in tokens; of num_documents: num_tokens.
    std::int64_t document_offset(std::int64_t index) const;
    // The document that holds token `offset` of the whole, which has one.
    std::int64_t document_at(std::int64_t offset) const;
    // All of them: num_documents + 1, eight bytes each.
    std::vector<std::int64_t> document_offsets() const;
    std::vector<TokenSource> sources() const;
    std::string tokenizer_definition() const;
    std::unique_ptr<Tokenizer> tokenizer() const;
    void verify() const;  // every checksum of every shard

    std::int64_t num_shards() const;
    std::shared_ptr<const TokenFile> shard(std::int64_t index) const;
    // Of the whole: the first token and the first document of a shard; of num_shards: how many there are.
    std::int64_t first_token(std::int64_t shard) const;
    std::int64_t first_document(std::int64_t shard) const;

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace fenwick::data
