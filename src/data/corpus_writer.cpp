#include "data/corpus_writer.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/crc32.h"
#include "base/error.h"
#include "base/sha256.h"

namespace fenwick::data {
namespace {

namespace fs = std::filesystem;

// What the file of documents holds for each.
struct DocumentRecord {
    std::int64_t tokens, bytes, words;  // tokens: without the end-of-document token
};

// Reads a spool from its beginning.
class SpoolReader {
public:
    explicit SpoolReader(const std::string& path) : path_(path), file_(path, std::ios::binary) {
        FENWICK_CHECK(file_.is_open(), "{}: cannot be opened", path);
    }
    void read(void* out, std::size_t bytes) {
        file_.read(static_cast<char*>(out), static_cast<std::streamsize>(bytes));
        FENWICK_CHECK(static_cast<std::size_t>(file_.gcount()) == bytes, "{}: cannot be read to its end", path_);
    }

private:
    std::string path_;
    std::ifstream file_;
};

std::uint32_t crc_of_file(const std::string& path, std::int64_t bytes) {
    SpoolReader reader(path);
    std::vector<char> block(1 << 20);
    std::uint32_t crc = 0;
    while (bytes > 0) {
        const auto step = static_cast<std::size_t>(std::min<std::int64_t>(bytes, static_cast<std::int64_t>(block.size())));
        reader.read(block.data(), step);
        crc = crc32_of(block.data(), step, crc);
        bytes -= static_cast<std::int64_t>(step);
    }
    return crc;
}

std::string shard_name(std::size_t index) { return fmt::format("{:05}.h5", index); }

// is_as_left() is true, and throws no Error.
template <class Check>
void check_remains(const std::string& path, Check&& is_as_left) {
    bool right = false;
    try {
        right = is_as_left();
    } catch (const Error&) {
    }
    FENWICK_CHECK(right, "{} is not as the interrupted run left it; give --restart to begin anew", path);
}

}  // namespace

bool is_token_file_path(const std::string& output) {
    const auto extension = fs::path(output).extension();
    return extension == ".h5" || extension == ".H5";
}

void CorpusWriter::Spool::append(const void* data, std::size_t bytes) {
    crc = crc32_of(data, bytes, crc);
    file.append(data, bytes);
}

CorpusWriter::CorpusWriter(std::string output, const Tokenizer& tokenizer, std::int64_t shard_tokens, int deflate)
    : output_(std::move(output)),
      is_folder_(!is_token_file_path(output_)),
      tokenizer_(tokenizer),
      shard_tokens_(shard_tokens),
      deflate_(deflate),
      vocab_size_(tokenizer.vocab_size()),
      token_bytes_(token_bytes_for(tokenizer.vocab_size())) {
    // "corpus/" is the folder "corpus".
    while (output_.size() > 1 && output_.back() == '/') output_.pop_back();
    work_ = output_ + ".partial";
}

std::string CorpusWriter::spool(std::string_view kind, std::size_t shard) const {
    return fmt::format("{}/{:05}.{}", work_, shard, kind);
}
std::string CorpusWriter::staging_folder() const { return work_ + "/shards"; }
std::string CorpusWriter::staged(std::string_view name) const { return fmt::format("{}/{}", staging_folder(), name); }

void CorpusWriter::open_spools() {
    std::error_code error;
    fs::create_directories(staging_folder(), error);
    FENWICK_CHECK(!error, "{}: cannot be written: {}", output_, error.message());
    tokens_.emplace(spool("tokens", shards_.size()), 0, output_);
    documents_.emplace(spool("documents", shards_.size()), 0, output_);
    shard_ = {};
}

void CorpusWriter::append(const std::int32_t* ids, std::int64_t count) {
    if (!tokens_) open_spools();
    const auto size = static_cast<std::size_t>(count * token_bytes_);
    if (narrow_.size() < size) narrow_.resize(size);
    const auto vocab = static_cast<std::uint32_t>(vocab_size_);
    bool inside = true;
    const auto convert = [&]<class T>(T) {
        for (std::int64_t i = 0; i < count; ++i) {
            inside &= static_cast<std::uint32_t>(ids[i]) < vocab;
            const auto id = static_cast<T>(ids[i]);
            std::memcpy(narrow_.data() + i * static_cast<std::int64_t>(sizeof(T)), &id, sizeof(T));
        }
    };
    if (token_bytes_ == 2)
        convert(std::uint16_t{});
    else
        convert(std::uint32_t{});
    FENWICK_CHECK(inside, "{}: the tokenizer gives a token outside its vocabulary of {}", output_, vocab_size_);
    tokens_->append(narrow_.data(), size);
    document_tokens_ += count;
}

void CorpusWriter::end_document(std::int64_t bytes, std::int64_t words) {
    if (!documents_) open_spools();
    const DocumentRecord record{document_tokens_, bytes, words};
    documents_->append(&record, sizeof(record));
    shard_.num_tokens += document_tokens_ + 1;
    shard_.num_documents += 1;
    shard_.text_bytes += bytes;
    shard_.text_words += words;
    document_tokens_ = 0;
}

std::int64_t CorpusWriter::num_documents() const {
    std::int64_t count = shard_.num_documents;
    for (const auto& shard : shards_) count += shard.num_documents;
    return count;
}

void CorpusWriter::close_shard() { write_shard(""); }

void CorpusWriter::write_shard(const std::string& sources) {
    tokens_->file.flush();
    documents_->file.flush();
    const std::string name = shard_name(shards_.size()), path = staged(name);
    SpoolReader tokens(spool("tokens", shards_.size())), documents(spool("documents", shards_.size()));
    TokenFileWriter writer(path, tokenizer_, deflate_, shard_.num_tokens);
    std::vector<char> block(1 << 20);
    std::vector<std::int32_t> ids(block.size() / static_cast<std::size_t>(token_bytes_));
    for (std::int64_t d = 0; d < shard_.num_documents; ++d) {
        DocumentRecord record{};
        documents.read(&record, sizeof(record));
        for (std::int64_t left = record.tokens; left > 0;) {
            const auto step = std::min<std::int64_t>(left, static_cast<std::int64_t>(ids.size()));
            tokens.read(block.data(), static_cast<std::size_t>(step * token_bytes_));
            for (std::int64_t i = 0; i < step; ++i) {
                std::uint32_t id = 0;
                std::memcpy(&id, block.data() + i * token_bytes_, static_cast<std::size_t>(token_bytes_));
                ids[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(id);
            }
            writer.append(ids.data(), step);
            left -= step;
        }
        writer.end_document(record.bytes, record.words);
    }
    if (!sources.empty()) {
        std::ifstream file(sources, std::ios::binary);
        for (std::string line; std::getline(file, line);) writer.add_source(TokenSource::from_json(line));
    }
    writer.finish();
    shard_.file = name;
    shard_.bytes = size_of_file(path);
    shard_.digest = TokenFile(path).digest();
    shards_.push_back(shard_);
    shard_ = {};
    tokens_.reset();
    documents_.reset();
}

nlohmann::json CorpusWriter::commit() {
    nlohmann::json state = {{"shards", shards_}, {"open", nullptr}};
    if (tokens_ && shard_.num_documents > 0) {
        tokens_->file.sync();
        documents_->file.sync();
        state["open"] = shard_;
        state["open"]["tokens_bytes"] = tokens_->file.size();
        state["open"]["tokens_crc32"] = tokens_->crc;
        state["open"]["documents_bytes"] = documents_->file.size();
        state["open"]["documents_crc32"] = documents_->crc;
    }
    return state;
}

void CorpusWriter::forget_spools() {
    std::error_code ignored;
    for (std::size_t shard = shards_.size(); shard-- > 0;) {
        const bool tokens = fs::remove(spool("tokens", shard), ignored),
                   documents = fs::remove(spool("documents", shard), ignored);
        if (!tokens && !documents) break;
    }
}

void CorpusWriter::restore(const nlohmann::json& state) {
    std::set<std::string> known;
    shards_ = state.at("shards").get<std::vector<CorpusManifest::Shard>>();
    for (const auto& shard : shards_) {
        const std::string path = staged(shard.file);
        check_remains(path, [&] {
            if (size_of_file(path) != shard.bytes) return false;
            const TokenFile file(path);
            file.verify();
            return file.digest() == shard.digest;
        });
        known.insert(path);
    }
    const auto& open = state.at("open");
    if (!open.is_null()) {
        for (auto [kind, target] : {std::pair{"tokens", &tokens_}, std::pair{"documents", &documents_}}) {
            const std::string path = spool(kind, shards_.size());
            const std::int64_t bytes = open.at(fmt::format("{}_bytes", kind));
            const std::uint32_t crc = open.at(fmt::format("{}_crc32", kind));
            check_remains(path, [&] { return size_of_file(path) >= bytes && crc_of_file(path, bytes) == crc; });
            target->emplace(path, bytes, output_);
            (*target)->crc = crc;
            known.insert(path);
        }
        shard_ = open.get<CorpusManifest::Shard>();
    }
    // What came later than the state
    std::error_code ignored;
    for (const std::string& folder : {work_, staging_folder()})
        for (const auto& entry : fs::directory_iterator(folder, ignored)) {
            const auto extension = entry.path().extension();
            if ((extension == ".tokens" || extension == ".documents" || extension == ".h5" || extension == ".tmp") &&
                !known.contains(entry.path().string()))
                fs::remove(entry.path(), ignored);
        }
}

TokenFileInfo CorpusWriter::complete(const std::string& sources) {
    if (tokens_ && shard_.num_documents > 0) write_shard(is_folder_ ? "" : sources);
    CorpusManifest manifest;
    TokenFileInfo& info = manifest.info;
    info = TokenFile(staged(shards_.front().file)).info();
    info.path = output_;
    info.num_tokens = info.num_documents = info.text_bytes = info.text_words = 0;
    for (const auto& shard : shards_) {
        info.num_tokens += shard.num_tokens;
        info.num_documents += shard.num_documents;
        info.text_bytes += shard.text_bytes;
        info.text_words += shard.text_words;
    }
    if (!is_folder_) return info;
    const std::string text = read_file(sources);
    write_file_atomically(staged(sources_name), text);
    manifest.shards = shards_;
    manifest.num_sources = std::count(text.begin(), text.end(), '\n');
    manifest.sources_sha256 = sha256_hex(text);
    manifest.write(staging_folder());
    return info;
}

void CorpusWriter::check_complete() const {
    const std::string whole = is_folder_ ? staging_folder() : staged(shard_name(0));
    check_remains(whole, [&] {
        if (!fs::exists(whole)) return fs::exists(output_);
        TokenCorpus(whole).verify();
        return true;
    });
}

void CorpusWriter::publish() {
    const std::string from = is_folder_ ? staging_folder() : staged(shard_name(0));
    std::error_code ignored;
    if (!fs::exists(from, ignored)) return;
    if (is_folder_ && fs::exists(output_, ignored)) {
        // A folder cannot be replaced in one step: it is put aside first.
        const std::string aside = work_ + "/replaced";
        fs::remove_all(aside, ignored);
        std::error_code error;
        fs::rename(output_, aside, error);
        FENWICK_CHECK(!error, "{}: cannot be replaced: {}", output_, error.message());
    }
    publish_file(from, output_);
}

}  // namespace fenwick::data
