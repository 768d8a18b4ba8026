#include "data/token_file.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <list>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/crc32.h"
#include "base/error.h"
#include "base/files.h"
#include "base/hdf5.h"
#include "base/parallel.h"
#include "base/sha256.h"

namespace fenwick::data {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view format_name = "fenwick-tokens";
constexpr std::int64_t format_version = 1;
constexpr std::int64_t chunk_tokens = 1 << 15;      // of the files written here; readers take what the file says
constexpr std::int64_t record_chunk = 1 << 12;      // of the lists with one element a document or a chunk

static_assert(std::endian::native == std::endian::little, "checksums are over little-endian bytes");

// Grows a one-dimensional dataset by whole chunks and keeps a CRC-32 of all of it.
template <class T>
class Column {
public:
    // length: of all of it, where that is known and nothing is compressed; else -1.
    Column(std::string name, std::int64_t chunk, int deflate, hdf5::File& file, std::int64_t length = -1)
        : name_(std::move(name)), chunk_(chunk), batch_(deflate > 0 ? chunks_at_once * chunk : chunk), length_(length) {
        if (length_ >= 0)
            file.create_chunked<T>(name_, length_, chunk);
        else
            file.create_appendable<T>(name_, chunk, deflate);
    }
    void push(T value, hdf5::File& file) {
        push(&value, 1, file, [](std::uint32_t) {});
    }
    // Values of another integer type that are known to fit.
    template <class From, class OnChunk>
    void push(const From* values, std::int64_t count, hdf5::File& file, OnChunk&& on_chunk) {
        while (count > 0) {
            const std::int64_t step = std::min(count, batch_ - static_cast<std::int64_t>(pending_.size()));
            for (std::int64_t i = 0; i < step; ++i) pending_.push_back(static_cast<T>(values[i]));
            values += step;
            count -= step;
            if (static_cast<std::int64_t>(pending_.size()) == batch_) flush(file, on_chunk);
        }
    }
    template <class OnChunk>
    void flush(hdf5::File& file, OnChunk&& on_chunk) {
        const auto count = static_cast<std::int64_t>(pending_.size());
        crc_ = crc32_of(pending_.data(), pending_.size() * sizeof(T), crc_);
        for (std::int64_t first = 0; first < count; first += chunk_)
            on_chunk(
                crc32_of(pending_.data() + first, static_cast<std::size_t>(std::min(chunk_, count - first)) * sizeof(T)));
        const std::int64_t whole = count / chunk_ * chunk_;
        if (length_ >= 0) {
            FENWICK_CHECK(count <= length_ - written_, "[token file] '{}' was to have {} elements", name_, length_);
            file.write_slice(name_, written_, pending_.data(), count);
            written_ += count;
        } else if (whole > chunk_) {
            file.append_chunks(name_, pending_.data(), whole, num_threads());
            file.append(name_, pending_.data() + whole, count - whole);
        } else {
            file.append(name_, pending_.data(), count);
        }
        pending_.clear();
    }
    void flush(hdf5::File& file) {
        flush(file, [](std::uint32_t) {});
    }
    std::uint32_t crc() const { return crc_; }
    const std::string& name() const { return name_; }

private:
    static constexpr std::int64_t chunks_at_once = 32;  // compressed on all threads

    std::string name_;
    std::int64_t chunk_, batch_, length_, written_ = 0;  // elements
    std::vector<T> pending_;
    std::uint32_t crc_ = 0;
};

}  // namespace

// A file name need not be UTF-8; JSON must be.
std::string TokenSource::json() const {
    return nlohmann::json{{"name", name}, {"bytes", bytes}, {"sha256", sha256}}.dump(-1, ' ', false,
                                                                                   nlohmann::json::error_handler_t::replace);
}

TokenSource TokenSource::from_json(std::string_view text) {
    const auto json = nlohmann::json::parse(text);
    return {json.at("name"), json.at("bytes"), json.at("sha256")};
}

std::int64_t token_bytes_for(std::int64_t vocab_size) { return vocab_size <= 65536 ? 2 : 4; }

// ---------------------------------------------------------------------------------------------------- writing

struct TokenFileWriter::Implementation {
    TokenFileInfo info;
    std::int64_t expected_tokens;
    std::string temporary;
    std::vector<std::uint8_t> definition;
    bool finished = false;
    hdf5::File file;
    std::unique_ptr<Column<std::uint16_t>> narrow;  // one of the two holds the tokens
    std::unique_ptr<Column<std::uint32_t>> wide;
    std::unique_ptr<Column<std::uint32_t>> chunk_checksums;
    std::unique_ptr<Column<std::int64_t>> offsets, bytes, words;
    std::string sources = "[";  // JSON, which as objects would take much more memory

    Implementation(const std::string& path, const Tokenizer& tokenizer, int deflate, std::int64_t num_tokens)
        : expected_tokens(num_tokens), temporary(path + ".tmp"), file(hdf5::File::create(temporary)) {
        info.path = path;
        info.vocab_size = tokenizer.vocab_size();
        info.end_of_document = tokenizer.end_of_document();
        info.tokenizer_kind = tokenizer.kind();
        info.tokenizer_identity = tokenizer.identity();
        const std::string bytes_of_model = tokenizer.definition();
        definition.assign(bytes_of_model.begin(), bytes_of_model.end());
        try {
            if (token_bytes_for(info.vocab_size) == 2)
                narrow = std::make_unique<Column<std::uint16_t>>("tokens", chunk_tokens, deflate, file,
                                                                 deflate > 0 ? -1 : num_tokens);
            else
                wide = std::make_unique<Column<std::uint32_t>>("tokens", chunk_tokens, deflate, file,
                                                               deflate > 0 ? -1 : num_tokens);
            chunk_checksums = std::make_unique<Column<std::uint32_t>>("token_checksums", record_chunk, 0, file);
            offsets = std::make_unique<Column<std::int64_t>>("documents/offsets", record_chunk, deflate, file);
            bytes = std::make_unique<Column<std::int64_t>>("documents/bytes", record_chunk, deflate, file);
            words = std::make_unique<Column<std::int64_t>>("documents/words", record_chunk, deflate, file);
            offsets->push(0, file);
        } catch (...) {
            ::unlink(temporary.c_str());
            throw;
        }
    }
    ~Implementation() {
        if (!finished) ::unlink(temporary.c_str());
    }

    void push(const std::int32_t* ids, std::int64_t count) {
        const auto keep_checksum = [&](std::uint32_t crc) { chunk_checksums->push(crc, file); };
        if (narrow)
            narrow->push(ids, count, file, keep_checksum);
        else
            wide->push(ids, count, file, keep_checksum);
        info.num_tokens += count;
    }
};

TokenFileWriter::TokenFileWriter(const std::string& path, const Tokenizer& tokenizer, int deflate, std::int64_t num_tokens)
    : implementation_(std::make_unique<Implementation>(path, tokenizer, deflate, num_tokens)) {}
TokenFileWriter::~TokenFileWriter() = default;

void TokenFileWriter::append(const std::int32_t* ids, std::int64_t count) {
    Implementation& self = *implementation_;
    const auto* bad = std::find_if(ids, ids + count, [&](std::int32_t id) { return id < 0 || id >= self.info.vocab_size; });
    FENWICK_CHECK(bad == ids + count, "{}: token {} is outside the vocabulary of {}", self.info.path, *bad, self.info.vocab_size);
    self.push(ids, count);
}

void TokenFileWriter::end_document(std::int64_t bytes, std::int64_t words) {
    Implementation& self = *implementation_;
    self.push(&self.info.end_of_document, 1);
    self.offsets->push(self.info.num_tokens, self.file);
    self.bytes->push(bytes, self.file);
    self.words->push(words, self.file);
    ++self.info.num_documents;
    self.info.text_bytes += bytes;
    self.info.text_words += words;
}

void TokenFileWriter::add_source(const TokenSource& source) {
    std::string& sources = implementation_->sources;
    if (sources.size() > 1) sources += ',';
    sources += source.json();
}

TokenFileInfo TokenFileWriter::finish() {
    Implementation& self = *implementation_;
    const TokenFileInfo& info = self.info;
    hdf5::File& file = self.file;
    FENWICK_CHECK(info.num_documents > 0, "{}: no document to write; the text is empty", info.path);
    FENWICK_CHECK(self.expected_tokens < 0 || info.num_tokens == self.expected_tokens,
                  "{}: {} tokens were announced, {} came", info.path, self.expected_tokens, info.num_tokens);
    const auto keep_checksum = [&](std::uint32_t crc) { self.chunk_checksums->push(crc, file); };
    if (self.narrow)
        self.narrow->flush(file, keep_checksum);
    else
        self.wide->flush(file, keep_checksum);
    self.chunk_checksums->flush(file);
    file.set_attribute("token_checksums", "crc32", std::int64_t{self.chunk_checksums->crc()});
    for (auto* column : {self.offsets.get(), self.bytes.get(), self.words.get()}) {
        column->flush(file);
        file.set_attribute(column->name(), "crc32", std::int64_t{column->crc()});
    }
    const auto write_bytes = [&](const std::string& name, const std::uint8_t* data, std::size_t size) {
        file.write(name, data, {static_cast<std::int64_t>(size)});
        file.set_attribute(name, "crc32", std::int64_t{crc32_of(data, size)});
    };
    write_bytes("tokenizer/definition", self.definition.data(), self.definition.size());
    self.sources += ']';
    write_bytes("sources", reinterpret_cast<const std::uint8_t*>(self.sources.data()), self.sources.size());
    file.set_attribute("/", "format", format_name);
    file.set_attribute("/", "version", format_version);
    file.set_attribute("/", "num_tokens", info.num_tokens);
    file.set_attribute("/", "num_documents", info.num_documents);
    file.set_attribute("/", "vocab_size", info.vocab_size);
    file.set_attribute("/", "text_bytes", info.text_bytes);
    file.set_attribute("/", "text_words", info.text_words);
    file.set_attribute("/", "end_of_document", std::int64_t{info.end_of_document});
    file.set_attribute("/", "chunk_tokens", chunk_tokens);
    file.set_attribute("/", "tokenizer_kind", std::string_view(info.tokenizer_kind));
    file.set_attribute("/", "tokenizer_identity", std::string_view(info.tokenizer_identity));
    file.flush();
    file.set_attribute("/", "complete", std::int64_t{1});
    file.close();
    publish_file(self.temporary, info.path);
    self.finished = true;
    return info;
}

// ---------------------------------------------------------------------------------------------------- reading

namespace {

hdf5::File open_tokens(const std::string& path) {
    if (fs::is_regular_file(path) && !hdf5::is_hdf5(path)) {
        const auto extension = fs::path(path).extension();
        FENWICK_CHECK(extension == ".h5" || extension == ".H5",
                      "{} is no token file; make one: fenwick tokenize {} --output NAME.h5", path, path);
        fail("{} is not an HDF5 file: it is damaged, or something else has its name", path);
    }
    return hdf5::File::open(path);
}

}  // namespace

bool is_token_file(const std::string& path) {
    try {
        const auto file = hdf5::File::open(path);
        return file.has_attribute("/", "format") && file.attribute_string("/", "format") == format_name;
    } catch (const Error&) {
        return false;
    }
}

struct TokenFile::Implementation {
    using Chunk = std::shared_ptr<const std::vector<std::uint8_t>>;

    hdf5::File file;
    TokenFileInfo info;
    std::int64_t token_bytes = 2, chunk_size = 0;
    std::size_t cache_bytes;
    std::vector<std::uint32_t> checksums;  // of each chunk
    // Where the file holds each chunk as it is, once it has been found right; or one of these.
    static constexpr std::int64_t not_checked = -1, is_right = -2;  // is_right: and compressed
    std::vector<std::atomic<std::int64_t>> positions;
    int descriptor = -1;
    std::once_flag first_is_known;
    std::int64_t first_position = -1;

    // A list with one element a document, read when it is first asked for: a corpus of many shards opens quickly and needs
    // memory for those lists alone that are used.
    std::mutex lists;
    std::vector<std::int64_t> offsets, bytes, words;

    // Compressed chunks. Least recently used ones make room.
    std::mutex mutex;
    std::list<std::int64_t> recent;  // newest first
    std::map<std::int64_t, std::pair<Chunk, std::list<std::int64_t>::iterator>> cache;

    Implementation(const std::string& path, std::size_t cache) : file(open_tokens(path)), cache_bytes(cache) {
        FENWICK_CHECK(file.has_attribute("/", "format") && file.attribute_string("/", "format") == format_name,
                      "{} is not a Fenwick token file (fenwick tokenize makes one)", path);
        const std::int64_t version = file.attribute_int("/", "version");
        FENWICK_CHECK(version == format_version, "{}: token file of version {}; this program reads version {}", path, version,
                      format_version);
        FENWICK_CHECK(file.has_attribute("/", "complete") && file.attribute_int("/", "complete") == 1,
                      "{}: token file was not written to its end; make it again with fenwick tokenize", path);
        info.path = path;
        info.num_tokens = file.attribute_int("/", "num_tokens");
        info.num_documents = file.attribute_int("/", "num_documents");
        info.vocab_size = file.attribute_int("/", "vocab_size");
        info.text_bytes = file.attribute_int("/", "text_bytes");
        info.text_words = file.attribute_int("/", "text_words");
        const std::int64_t end_of_document = file.attribute_int("/", "end_of_document");
        info.tokenizer_kind = file.attribute_string("/", "tokenizer_kind");
        info.tokenizer_identity = file.attribute_string("/", "tokenizer_identity");
        chunk_size = file.attribute_int("/", "chunk_tokens");
        const std::int64_t most = std::int64_t{1} << 40;
        FENWICK_CHECK(info.num_documents >= 1 && info.num_tokens >= info.num_documents && info.num_tokens < most &&
                          info.vocab_size >= 1 && info.vocab_size < (std::int64_t{1} << 31) && end_of_document >= 0 &&
                          end_of_document < info.vocab_size && chunk_size >= 1 && chunk_size <= (1 << 24),
                      "{}: damaged token file: {} tokens, {} documents, vocabulary {}, end of document {}, chunks of {}", path,
                      info.num_tokens, info.num_documents, info.vocab_size, end_of_document, chunk_size);
        info.end_of_document = static_cast<std::int32_t>(end_of_document);

        const auto tokens = file.info("tokens");
        token_bytes = token_bytes_for(info.vocab_size);
        FENWICK_CHECK(tokens.type == (token_bytes == 2 ? hdf5::ElementType::uint16 : hdf5::ElementType::uint32) &&
                          tokens.shape.size() == 1 && tokens.shape[0] == info.num_tokens,
                      "{}: damaged token file: dataset 'tokens' is not {} values of uint{}", path, info.num_tokens,
                      8 * token_bytes);
        checksums = column<std::uint32_t>("token_checksums", (info.num_tokens + chunk_size - 1) / chunk_size);
        positions = std::vector<std::atomic<std::int64_t>>(checksums.size());
        for (auto& position : positions) position.store(not_checked, std::memory_order_relaxed);
        descriptor = file.descriptor();
    }

    const std::vector<std::int64_t>& document_offsets() {
        std::lock_guard lock(lists);
        if (offsets.empty()) {
            auto found = column<std::int64_t>("documents/offsets", info.num_documents + 1);
            bool monotone = found.front() == 0 && found.back() == info.num_tokens;
            for (std::size_t i = 1; i < found.size(); ++i) monotone = monotone && found[i] > found[i - 1];
            FENWICK_CHECK(monotone, "{}: damaged token file: document offsets do not rise from 0 to {}", info.path, info.num_tokens);
            offsets = std::move(found);
        }
        return offsets;
    }
    const std::vector<std::int64_t>& document_list(std::vector<std::int64_t>& list, const std::string& name, std::int64_t sum) {
        std::lock_guard lock(lists);
        if (list.empty()) {
            auto found = column<std::int64_t>(name, info.num_documents);
            const std::int64_t found_sum = std::accumulate(found.begin(), found.end(), std::int64_t{0});
            FENWICK_CHECK(found_sum == sum, "{}: damaged token file: '{}' adds up to {}, the file says {}", info.path, name, found_sum,
                          sum);
            list = std::move(found);
        }
        return list;
    }
    const std::vector<std::int64_t>& document_bytes() { return document_list(bytes, "documents/bytes", info.text_bytes); }
    const std::vector<std::int64_t>& document_words() { return document_list(words, "documents/words", info.text_words); }

    void check_crc(const std::string& name, std::uint32_t found) const {
        const std::int64_t stored = file.attribute_int(name, "crc32");
        FENWICK_CHECK(stored == found, "{}: dataset '{}' is damaged: checksum {:08x} is stored, its contents have {:08x}", info.path,
                      name, stored, found);
    }

    // A whole dataset of known length, its checksum checked.
    template <class T>
    std::vector<T> column(const std::string& name, std::int64_t count) const {
        const auto found = file.info(name);
        FENWICK_CHECK(found.shape.size() == 1 && found.shape[0] == count,
                      "{}: damaged token file: dataset '{}' has shape [{}]; [{}] is needed", info.path, name,
                      fmt::join(found.shape, ", "), count);
        auto values = file.read<T>(name);
        check_crc(name, crc32_of(values.data(), values.size() * sizeof(T)));
        return values;
    }
    std::string text(const std::string& name) const {
        const auto found = file.read<std::uint8_t>(name);
        check_crc(name, crc32_of(found.data(), found.size()));
        return {found.begin(), found.end()};
    }

    std::string name_of_chunk(std::int64_t index) const {
        const std::int64_t first = index * chunk_size;
        return fmt::format("{}: chunk {} of 'tokens' (tokens {} to {})", info.path, index, first,
                           std::min(first + chunk_size, info.num_tokens) - 1);
    }

    // Reads a chunk and compares its checksum, unless that was right before and `again` is false; notes where it can be read
    // from next time.
    Chunk load(std::int64_t index, bool again) {
        const std::int64_t first = index * chunk_size, count = std::min(chunk_size, info.num_tokens - first);
        auto data = std::make_shared<std::vector<std::uint8_t>>(static_cast<std::size_t>(count * token_bytes));
        try {
            if (token_bytes == 2)
                file.read_slice("tokens", first, count, reinterpret_cast<std::uint16_t*>(data->data()));
            else
                file.read_slice("tokens", first, count, reinterpret_cast<std::uint32_t*>(data->data()));
        } catch (const Error& error) {
            fail("{} is damaged: {}", name_of_chunk(index), error.what());
        }
        if (!again && position(index) == is_right) return data;
        const std::uint32_t found = crc32_of(data->data(), data->size()), stored = checksums[static_cast<std::size_t>(index)];
        FENWICK_CHECK(found == stored, "{} is damaged: checksum {:08x} is stored, its contents have {:08x}", name_of_chunk(index),
                      stored, found);
        note_position(index, *data);
        return data;
    }

    std::int64_t find_position(std::int64_t first) const {
        return token_bytes == 2 ? file.position_of_chunk<std::uint16_t>("tokens", first)
                                : file.position_of_chunk<std::uint32_t>("tokens", first);
    }

    // The library looks for a chunk's place from the first one on, which over a large file would take the square of its
    // length; but where the number of tokens was known when the file was written, all chunks follow the first. What is found
    // in a place is compared, so that a wrong guess does no harm.
    void note_position(std::int64_t index, const std::vector<std::uint8_t>& contents) {
        std::call_once(first_is_known, [&] { first_position = find_position(0); });
        auto& noted = positions[static_cast<std::size_t>(index)];
        if (first_position < 0) return noted.store(is_right, std::memory_order_relaxed);
        std::vector<std::uint8_t> stored(contents.size());
        const auto is_at = [&](std::int64_t position) {
            return position >= 0 &&
                   ::pread(descriptor, stored.data(), stored.size(), position) == static_cast<ssize_t>(stored.size()) &&
                   stored == contents;
        };
        std::int64_t position = first_position + index * chunk_size * token_bytes;
        if (!is_at(position)) {
            position = find_position(index * chunk_size);
            if (!is_at(position)) return;
        }
        noted.store(position, std::memory_order_relaxed);
    }

    Chunk chunk(std::int64_t index) {
        {
            std::lock_guard lock(mutex);
            if (const auto found = cache.find(index); found != cache.end()) {
                recent.splice(recent.begin(), recent, found->second.second);
                return found->second.first;
            }
        }
        Chunk loaded = load(index, false);  // two threads may load the same; the first one in stays
        if (position(index) >= 0) return loaded;
        std::lock_guard lock(mutex);
        if (const auto found = cache.find(index); found != cache.end()) return found->second.first;
        const std::size_t most = std::max<std::size_t>(4, cache_bytes / static_cast<std::size_t>(chunk_size * token_bytes));
        while (cache.size() >= most) {
            cache.erase(recent.back());
            recent.pop_back();
        }
        recent.push_front(index);
        cache.emplace(index, std::pair{loaded, recent.begin()});
        return loaded;
    }

    std::int64_t position(std::int64_t index) const { return positions[static_cast<std::size_t>(index)].load(std::memory_order_relaxed); }

    // As token ids, checked against the vocabulary.
    void convert(const void* stored, std::int64_t count, std::int32_t* out) const {
        const auto widen = [&](const auto* values) {
            std::uint32_t highest = 0;
            for (std::int64_t i = 0; i < count; ++i) {
                highest = std::max<std::uint32_t>(highest, values[i]);
                out[i] = static_cast<std::int32_t>(values[i]);
            }
            FENWICK_CHECK(static_cast<std::int64_t>(highest) < info.vocab_size || count == 0,
                          "{}: a token is outside the vocabulary of {}", info.path, info.vocab_size);
        };
        if (token_bytes == 2)
            widen(static_cast<const std::uint16_t*>(stored));
        else
            widen(static_cast<const std::uint32_t*>(stored));
    }

    // Tokens [first, first + count) of a chunk. One whose checksum was right and that stands in the file as it is, is read from
    // there: the system keeps the file in memory, and only what is asked for is copied.
    void read(std::int64_t index, std::int64_t first, std::int64_t count, std::int32_t* out) {
        std::int64_t place = position(index);
        if (place < 0) {
            const Chunk whole = chunk(index);
            return convert(whole->data() + first * token_bytes, count, out);
        }
        alignas(8) std::uint8_t buffer[1 << 14];
        for (place += first * token_bytes; count > 0;) {
            const auto step = std::min(count, static_cast<std::int64_t>(sizeof(buffer)) / token_bytes);
            const auto bytes = static_cast<ssize_t>(step * token_bytes);
            errno = 0;
            FENWICK_CHECK(::pread(descriptor, buffer, static_cast<std::size_t>(bytes), place) == bytes, "{} cannot be read{}{}",
                          name_of_chunk(index), errno != 0 ? ": " : "; the file has become shorter",
                          errno != 0 ? std::strerror(errno) : "");
            convert(buffer, step, out);
            place += bytes;
            count -= step;
            out += step;
        }
    }
};

TokenFile::TokenFile(const std::string& path, std::size_t cache_bytes)
    : implementation_(std::make_unique<Implementation>(path, cache_bytes)) {}
TokenFile::~TokenFile() = default;
TokenFile::TokenFile(TokenFile&&) noexcept = default;

const TokenFileInfo& TokenFile::info() const { return implementation_->info; }
const std::vector<std::int64_t>& TokenFile::document_offsets() const { return implementation_->document_offsets(); }
const std::vector<std::int64_t>& TokenFile::document_bytes() const { return implementation_->document_bytes(); }
const std::vector<std::int64_t>& TokenFile::document_words() const { return implementation_->document_words(); }
std::string TokenFile::tokenizer_definition() const { return implementation_->text("tokenizer/definition"); }

std::string TokenFile::digest() const {
    const Implementation& self = *implementation_;
    std::string text = fmt::format("{} {} {} {} {} {} {} {} {}", self.info.num_tokens, self.info.num_documents, self.info.vocab_size,
                                   self.info.end_of_document, self.info.text_bytes, self.info.text_words, self.chunk_size,
                                   self.info.tokenizer_kind, self.info.tokenizer_identity);
    for (const char* name : {"token_checksums", "documents/offsets", "documents/bytes", "documents/words", "tokenizer/definition"})
        text += fmt::format(" {:08x}", self.file.attribute_int(name, "crc32"));
    return sha256_hex(text);
}

void TokenFile::read(std::int64_t offset, std::int64_t count, std::int32_t* out) const {
    Implementation& self = *implementation_;
    FENWICK_CHECK(offset >= 0 && count >= 0 && offset <= self.info.num_tokens && count <= self.info.num_tokens - offset,
                  "{}: tokens [{}, {}) are asked for; the file has {}", self.info.path, offset, offset + count,
                  self.info.num_tokens);
    while (count > 0) {
        const std::int64_t first = offset % self.chunk_size, step = std::min(count, self.chunk_size - first);
        self.read(offset / self.chunk_size, first, step, out);
        offset += step;
        count -= step;
        out += step;
    }
}

std::vector<TokenSource> TokenFile::sources() const {
    std::vector<TokenSource> found;
    try {
        for (const auto& source : nlohmann::json::parse(implementation_->text("sources")))
            found.push_back({source.at("name"), source.at("bytes"), source.at("sha256")});
    } catch (const nlohmann::json::exception&) {
        fail("{}: dataset 'sources' is damaged: it is not the JSON that fenwick tokenize writes", info().path);
    }
    return found;
}

std::unique_ptr<Tokenizer> TokenFile::tokenizer() const {
    auto restored = restore_tokenizer(info().tokenizer_kind, tokenizer_definition());
    FENWICK_CHECK(restored->identity() == info().tokenizer_identity && restored->vocab_size() == info().vocab_size,
                  "{}: the stored tokenizer is not the one the tokens were made with", info().path);
    return restored;
}

void TokenFile::verify() const {
    Implementation& self = *implementation_;
    const auto& offsets = self.document_offsets();
    self.document_bytes();
    self.document_words();
    tokenizer();
    sources();
    std::vector<std::int32_t> ids(static_cast<std::size_t>(self.chunk_size));
    std::size_t document = 1;
    for (std::int64_t index = 0; index < static_cast<std::int64_t>(self.checksums.size()); ++index) {
        const std::int64_t first = index * self.chunk_size, count = std::min(self.chunk_size, self.info.num_tokens - first);
        self.convert(self.load(index, true)->data(), count, ids.data());
        for (; document < offsets.size() && offsets[document] <= first + count; ++document)
            FENWICK_CHECK(ids[static_cast<std::size_t>(offsets[document] - 1 - first)] == self.info.end_of_document,
                          "{}: document {} does not end with the end-of-document token", self.info.path, document - 1);
    }
}

}  // namespace fenwick::data
