#include "data/corpus.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <list>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "base/sha256.h"

namespace fenwick::data {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view format_name = "fenwick-corpus";
constexpr std::int64_t format_version = 1;
constexpr std::size_t cache_bytes = 64 << 20;  // of decoded chunks, over all open shards

std::string in_folder(const std::string& folder, std::string_view name) { return (fs::path(folder) / name).string(); }

// Over everything but the checksum itself.
std::string checksum_of(nlohmann::json object) {
    object.erase("sha256");
    return sha256_hex(object.dump());
}

}  // namespace

void seal(nlohmann::json& object) { object["sha256"] = checksum_of(object); }

void check_seal(const nlohmann::json& object, const std::string& path, std::string_view remedy) {
    FENWICK_CHECK(object.at("sha256") == checksum_of(object), "{} is damaged: its contents have another checksum than it says{}",
                  path, remedy);
}

std::size_t most_open_shards() {
    // The limit that counts is often a low default for programs that use select(), far below what is allowed.
    static const std::size_t most = [] {
        rlimit limit{};
        if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return std::size_t{64};
        const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, 4096);
        if (limit.rlim_cur < wanted) {
            rlimit raised{wanted, limit.rlim_max};
            if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
        }
        return std::clamp<std::size_t>(limit.rlim_cur / 4, 16, 1024);
    }();
    return most;
}

bool is_corpus_folder(const std::string& path) {
    std::error_code ignored;
    return fs::is_regular_file(fs::path(path) / manifest_name, ignored);
}

bool holds_shards(const std::string& path) {
    std::error_code ignored;
    return fs::is_regular_file(fs::path(path) / "00000.h5", ignored);
}

void to_json(nlohmann::json& json, const CorpusManifest::Shard& shard) {
    json = {{"file", shard.file},
            {"bytes", shard.bytes},
            {"digest", shard.digest},
            {"num_tokens", shard.num_tokens},
            {"num_documents", shard.num_documents},
            {"text_bytes", shard.text_bytes},
            {"text_words", shard.text_words}};
}

void from_json(const nlohmann::json& json, CorpusManifest::Shard& shard) {
    shard = {json.at("file"),          json.at("bytes"),      json.at("digest"),    json.at("num_tokens"),
             json.at("num_documents"), json.at("text_bytes"), json.at("text_words")};
}

void CorpusManifest::write(const std::string& folder) const {
    nlohmann::json json = {{"format", format_name},
                           {"version", format_version},
                           {"num_tokens", info.num_tokens},
                           {"num_documents", info.num_documents},
                           {"vocab_size", info.vocab_size},
                           {"end_of_document", info.end_of_document},
                           {"text_bytes", info.text_bytes},
                           {"text_words", info.text_words},
                           {"tokenizer_kind", info.tokenizer_kind},
                           {"tokenizer_identity", info.tokenizer_identity},
                           {"num_sources", num_sources},
                           {"sources_sha256", sources_sha256},
                           {"shards", shards}};
    seal(json);
    write_file_atomically(in_folder(folder, manifest_name), json.dump(1) + "\n");
}

CorpusManifest CorpusManifest::read(const std::string& folder) {
    const std::string path = in_folder(folder, manifest_name);
    CorpusManifest manifest;
    TokenFileInfo& info = manifest.info;
    info.path = folder;
    try {
        const auto json = nlohmann::json::parse(read_file(path));
        FENWICK_CHECK(json.at("format") == format_name, "{} is not the manifest of a Fenwick corpus", path);
        const std::int64_t version = json.at("version");
        FENWICK_CHECK(version == format_version, "{}: corpus of version {}; this program reads version {}", path, version,
                      format_version);
        check_seal(json, path);
        info.num_tokens = json.at("num_tokens");
        info.num_documents = json.at("num_documents");
        info.vocab_size = json.at("vocab_size");
        info.end_of_document = json.at("end_of_document");
        info.text_bytes = json.at("text_bytes");
        info.text_words = json.at("text_words");
        info.tokenizer_kind = json.at("tokenizer_kind");
        info.tokenizer_identity = json.at("tokenizer_identity");
        manifest.num_sources = json.at("num_sources");
        manifest.sources_sha256 = json.at("sources_sha256");
        manifest.shards = json.at("shards").get<std::vector<Shard>>();
    } catch (const nlohmann::json::exception&) {
        fail("{} is damaged: it is not the JSON that fenwick tokenize writes", path);
    }
    std::int64_t tokens = 0, documents = 0;
    for (const Shard& shard : manifest.shards) {
        tokens += shard.num_tokens;
        documents += shard.num_documents;
        FENWICK_CHECK(shard.num_tokens >= 1 && shard.num_documents >= 1 && fs::path(shard.file).filename() == shard.file,
                      "{} is damaged: shard '{}' has {} tokens in {} documents", path, shard.file, shard.num_tokens,
                      shard.num_documents);
    }
    FENWICK_CHECK(!manifest.shards.empty() && tokens == info.num_tokens && documents == info.num_documents,
                  "{} is damaged: its shards add up to {} tokens in {} documents, it says {} and {}", path, tokens,
                  documents, info.num_tokens, info.num_documents);
    return manifest;
}

struct TokenCorpus::Implementation {
    using Shard = std::shared_ptr<const TokenFile>;

    CorpusManifest manifest;
    bool is_folder = false;
    std::size_t most;  // shards that stay open
    std::vector<std::int64_t> tokens{0}, documents{0};  // where each shard begins, and the ends

    std::mutex mutex;
    std::vector<Shard> open;        // one a shard, null where it is closed
    std::list<std::size_t> recent;  // the open ones, most recently used first
    std::vector<std::list<std::size_t>::iterator> place;

    Implementation(const std::string& path, std::size_t most_open) : most(most_open) {
        std::error_code ignored;
        is_folder = fs::is_directory(path, ignored);
        Shard single;
        if (is_folder) {
            if (!is_corpus_folder(path)) {
                FENWICK_CHECK(!holds_shards(path),
                              "{}: {}, which makes its shards one corpus, is missing; copy the folder again", path,
                              manifest_name);
                fail("{} is a folder without {}, no corpus; make one: fenwick tokenize {} --output NAME", path,
                     manifest_name, path);
            }
            manifest = CorpusManifest::read(path);
            check_folder();
        } else {
            single = std::make_shared<TokenFile>(path, cache_bytes);
            manifest.info = single->info();
            manifest.shards = {{path, 0, single->digest(), manifest.info.num_tokens, manifest.info.num_documents,
                                manifest.info.text_bytes, manifest.info.text_words}};
        }
        for (const auto& shard : manifest.shards) {
            tokens.push_back(tokens.back() + shard.num_tokens);
            documents.push_back(documents.back() + shard.num_documents);
        }
        open.resize(manifest.shards.size());
        place.resize(manifest.shards.size());
        if (single) {
            open[0] = single;
            place[0] = recent.insert(recent.begin(), 0);
        } else {
            // A wrong shard is told now, not when a run reaches it after days.
            for (std::size_t i = 0; i < manifest.shards.size(); ++i) shard(i);
        }
    }

    std::string path_of(const CorpusManifest::Shard& shard) const {
        return is_folder ? in_folder(manifest.info.path, shard.file) : shard.file;
    }

    void check_folder() const {
        const std::string& folder = manifest.info.path;
        std::set<std::string> listed;
        for (const auto& shard : manifest.shards) {
            listed.insert(shard.file);
            const std::string path = path_of(shard);
            std::error_code error;
            FENWICK_CHECK(fs::exists(path, error), "{}: shard {} is missing; the corpus has {} shards", folder, shard.file,
                          manifest.shards.size());
            const std::int64_t bytes = size_of_file(path);
            FENWICK_CHECK(bytes == shard.bytes, "{} has {} bytes; {} says {}: it is cut off, or of another corpus", path,
                          bytes, manifest_name, shard.bytes);
        }
        for (const auto& entry : fs::directory_iterator(folder))
            FENWICK_CHECK(entry.path().extension() != ".h5" || listed.contains(entry.path().filename().string()),
                          "{} is no shard of this corpus: {} lists {}, without it", entry.path().string(), manifest_name,
                          manifest.shards.size());
    }

    Shard shard(std::size_t index) {
        std::lock_guard lock(mutex);
        if (open[index]) {
            recent.splice(recent.begin(), recent, place[index]);
            return open[index];
        }
        const CorpusManifest::Shard& listed = manifest.shards[index];
        auto file = std::make_shared<TokenFile>(path_of(listed), cache_bytes / std::min(most, manifest.shards.size()));
        FENWICK_CHECK(file->digest() == listed.digest && file->info().num_tokens == listed.num_tokens &&
                          file->info().num_documents == listed.num_documents &&
                          file->info().tokenizer_identity == manifest.info.tokenizer_identity &&
                          file->info().vocab_size == manifest.info.vocab_size,
                      "{} is not the shard that {} lists under this name: its contents are others", file->info().path,
                      manifest_name);
        if (recent.size() >= most) {
            open[recent.back()].reset();  // whoever uses it still holds it
            recent.pop_back();
        }
        place[index] = recent.insert(recent.begin(), index);
        return open[index] = std::move(file);
    }

    static std::size_t holder(const std::vector<std::int64_t>& starts, std::int64_t index) {
        return static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), index) - starts.begin()) - 1;
    }
};

TokenCorpus::TokenCorpus(const std::string& path, std::size_t most_open)
    : implementation_(std::make_unique<Implementation>(path, std::max<std::size_t>(most_open, 1))) {}
TokenCorpus::~TokenCorpus() = default;
TokenCorpus::TokenCorpus(TokenCorpus&&) noexcept = default;

const TokenFileInfo& TokenCorpus::info() const { return implementation_->manifest.info; }
std::int64_t TokenCorpus::num_shards() const { return static_cast<std::int64_t>(implementation_->manifest.shards.size()); }
std::int64_t TokenCorpus::first_token(std::int64_t shard) const {
    return implementation_->tokens.at(static_cast<std::size_t>(shard));
}
std::int64_t TokenCorpus::first_document(std::int64_t shard) const {
    return implementation_->documents.at(static_cast<std::size_t>(shard));
}
std::string TokenCorpus::tokenizer_definition() const { return shard(0)->tokenizer_definition(); }
std::unique_ptr<Tokenizer> TokenCorpus::tokenizer() const { return shard(0)->tokenizer(); }

std::shared_ptr<const TokenFile> TokenCorpus::shard(std::int64_t index) const {
    FENWICK_CHECK(index >= 0 && index < num_shards(), "{}: shard {} is asked for; the corpus has {}", info().path, index,
                  num_shards());
    return implementation_->shard(static_cast<std::size_t>(index));
}

std::string TokenCorpus::identity() const {
    std::string digests;
    for (const auto& shard : implementation_->manifest.shards) digests += shard.digest;
    return sha256_hex(digests);
}

void TokenCorpus::read(std::int64_t offset, std::int64_t count, std::int32_t* out) const {
    Implementation& self = *implementation_;
    FENWICK_CHECK(offset >= 0 && count >= 0 && offset <= info().num_tokens && count <= info().num_tokens - offset,
                  "{}: tokens [{}, {}) are asked for; the corpus has {}", info().path, offset, offset + count,
                  info().num_tokens);
    for (std::size_t index = Implementation::holder(self.tokens, offset); count > 0; ++index) {
        const std::int64_t step = std::min(count, self.tokens[index + 1] - offset);
        self.shard(index)->read(offset - self.tokens[index], step, out);
        offset += step;
        count -= step;
        out += step;
    }
}

std::int64_t TokenCorpus::document_offset(std::int64_t index) const {
    Implementation& self = *implementation_;
    FENWICK_CHECK(index >= 0 && index <= info().num_documents, "{}: document {} is asked for; the corpus has {}",
                  info().path, index, info().num_documents);
    if (index == info().num_documents) return info().num_tokens;
    const std::size_t shard = Implementation::holder(self.documents, index);
    return self.tokens[shard] +
           self.shard(shard)->document_offsets()[static_cast<std::size_t>(index - self.documents[shard])];
}

std::int64_t TokenCorpus::document_at(std::int64_t offset) const {
    Implementation& self = *implementation_;
    FENWICK_CHECK(offset >= 0 && offset < info().num_tokens, "{}: token {} is asked for; the corpus has {}", info().path, offset,
                  info().num_tokens);
    const std::size_t index = Implementation::holder(self.tokens, offset);
    const auto file = self.shard(index);
    return self.documents[index] + static_cast<std::int64_t>(Implementation::holder(file->document_offsets(), offset - self.tokens[index]));
}

std::vector<std::int64_t> TokenCorpus::document_offsets() const {
    const Implementation& self = *implementation_;
    std::vector<std::int64_t> offsets;
    offsets.reserve(static_cast<std::size_t>(info().num_documents + 1));
    for (std::int64_t index = 0; index < num_shards(); ++index) {
        const auto file = shard(index);
        const auto& of_shard = file->document_offsets();
        const std::int64_t start = self.tokens[static_cast<std::size_t>(index)];
        for (std::size_t i = 0; i + 1 < of_shard.size(); ++i) offsets.push_back(start + of_shard[i]);
    }
    offsets.push_back(info().num_tokens);
    return offsets;
}

std::vector<TokenSource> TokenCorpus::sources() const {
    const Implementation& self = *implementation_;
    if (!self.is_folder) return shard(0)->sources();
    const std::string path = in_folder(info().path, sources_name);
    std::vector<TokenSource> found;
    Sha256 hash;
    std::ifstream file(path, std::ios::binary);
    FENWICK_CHECK(file.is_open(), "{} is missing", path);
    try {
        for (std::string line; std::getline(file, line);) {
            line += '\n';
            hash.update(line.data(), line.size());
            found.push_back(TokenSource::from_json(line));
        }
    } catch (const nlohmann::json::exception&) {
        fail("{} is damaged: a line of it is not what {} counts on", path, manifest_name);
    }
    FENWICK_CHECK(hash.hex() == self.manifest.sources_sha256,
                  "{} is damaged: its contents have another checksum than {} says", path, manifest_name);
    return found;
}

void TokenCorpus::verify() const {
    sources();
    for (std::int64_t index = 0; index < num_shards(); ++index) shard(index)->verify();
}

}  // namespace fenwick::data
