#include "data/text_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#ifdef FENWICK_HAVE_LZMA
#include <lzma.h>
#endif
#ifdef FENWICK_HAVE_ZSTD
#include <zstd.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/files.h"

namespace fenwick::data {
namespace {

namespace fs = std::filesystem;
using namespace std::string_view_literals;

constexpr std::size_t block_bytes = 1 << 18;

TextFile text_file(const std::string& path) {
    TextFile file{path, size_of_file(path)};
    struct stat status {};
    FENWICK_CHECK(::stat(path.c_str(), &status) == 0, "{}: {}", path, std::strerror(errno));
    file.modified = std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
    return file;
}

void list_folder(const std::string& folder, std::vector<TextFile>& files) {
    std::error_code error;
    std::vector<fs::directory_entry> entries;
    for (fs::directory_iterator next(folder, error); !error && next != fs::directory_iterator(); next.increment(error))
        if (!next->path().filename().string().starts_with('.')) entries.push_back(*next);
    FENWICK_CHECK(!error, "{}: cannot be read: {}", folder, error.message());
    std::sort(entries.begin(), entries.end(),
              [](const auto& a, const auto& b) { return a.path().filename().string() < b.path().filename().string(); });
    for (const auto& entry : entries) {
        std::error_code ignored;
        const bool is_folder = entry.is_directory(ignored);
        FENWICK_CHECK(!is_folder || !entry.is_symlink(ignored),
                      "{} is a link to a folder, which may lead in a circle; give that folder itself",
                      entry.path().string());
        if (is_folder)
            list_folder(entry.path().string(), files);
        else
            files.push_back(text_file(entry.path().string()));
    }
}

// What a file holds that is no text, "" for all else.
std::string_view container_name(std::string_view head) {
    if (head.starts_with("\x89HDF\r\n\x1a\n"sv)) return "an HDF5 file";
    if (head.starts_with("PK\x03\x04"sv) || head.starts_with("PK\x05\x06"sv)) return "a zip archive";
    if (head.starts_with("7z\xBC\xAF\x27\x1C"sv)) return "a 7z archive";
    if (head.starts_with("BZh"sv) && head.substr(4).starts_with("1AY&SY"sv)) return "compressed by bzip2";
    if (head.starts_with("\x04\x22\x4D\x18"sv)) return "compressed by lz4";
    if (head.starts_with("PAR1"sv)) return "a Parquet file";
    if (head.size() >= 262 && head.substr(257, 5) == "ustar"sv) return "a tar archive; unpack it and give the folder";
    return "";
}

}  // namespace

std::vector<TextFile> list_text_files(const std::vector<std::string>& paths) {
    std::vector<TextFile> files;
    for (const std::string& path : paths) {
        std::error_code ignored;
        if (!fs::is_directory(path, ignored)) {
            files.push_back(text_file(path));
            continue;
        }
        const std::size_t before = files.size();
        list_folder(path, files);
        FENWICK_CHECK(files.size() > before, "{} is a folder without a file in it", path);
    }
    return files;
}

// ---------------------------------------------------------------------------------------------------- compressions

// Turns what a file holds into text, block by block.
class TextReader::Decoder {
public:
    explicit Decoder(const std::string& path) : path_(path) {}
    virtual ~Decoder() = default;
    Decoder(const Decoder&) = delete;
    Decoder& operator=(const Decoder&) = delete;

    // Takes from `in` and gives into `out`, as much as it can of both; moves their beginnings.
    virtual void decode(std::string_view& in, char*& out, char* end) = 0;
    // Whether the file may end here.
    virtual bool complete() const = 0;

protected:
    // What comes behind a whole stream is another one.
    void check_follows(bool is_another, std::string_view compression) const {
        FENWICK_CHECK(is_another, "{}: something that is not {} follows its {} data", path_, compression, compression);
    }

    const std::string& path_;
};

namespace {

class Plain final : public TextReader::Decoder {
public:
    using Decoder::Decoder;
    void decode(std::string_view& in, char*& out, char* end) override {
        const std::size_t count = std::min(in.size(), static_cast<std::size_t>(end - out));
        std::memcpy(out, in.data(), count);
        out += count;
        in.remove_prefix(count);
    }
    bool complete() const override { return true; }
};

class Gzip final : public TextReader::Decoder {
public:
    explicit Gzip(const std::string& path) : Decoder(path) {
        FENWICK_CHECK(inflateInit2(&stream_, 16 + MAX_WBITS) == Z_OK, "{}: no memory to decompress it", path);
    }
    ~Gzip() override { inflateEnd(&stream_); }

    void decode(std::string_view& in, char*& out, char* end) override {
        if (ended_) {
            // Another member, or what tapes are filled up with.
            while (!in.empty() && in.front() == '\0') in.remove_prefix(1);
            if (in.empty()) return;
            check_follows(in.front() == '\x1f', "gzip");
            inflateReset(&stream_);
            ended_ = false;
        }
        stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(in.data()));
        stream_.avail_in = static_cast<uInt>(in.size());
        stream_.next_out = reinterpret_cast<Bytef*>(out);
        stream_.avail_out = static_cast<uInt>(std::min<std::ptrdiff_t>(end - out, 1 << 30));
        const int result = inflate(&stream_, Z_NO_FLUSH);
        in.remove_prefix(in.size() - stream_.avail_in);
        out = reinterpret_cast<char*>(stream_.next_out);
        ended_ = result == Z_STREAM_END;
        FENWICK_CHECK(ended_ || result == Z_OK || result == Z_BUF_ERROR, "{}: damaged gzip data ({})", path_,
                      stream_.msg != nullptr ? stream_.msg : "not what gzip writes");
    }
    bool complete() const override { return ended_; }

private:
    z_stream stream_{};
    bool ended_ = false;
};

#ifdef FENWICK_HAVE_ZSTD
class Zstd final : public TextReader::Decoder {
public:
    explicit Zstd(const std::string& path) : Decoder(path), stream_(ZSTD_createDStream()) {
        FENWICK_CHECK(stream_ != nullptr, "{}: no memory to decompress it", path);
    }
    ~Zstd() override { ZSTD_freeDStream(stream_); }

    void decode(std::string_view& in, char*& out, char* end) override {
        // The first byte of a frame, or of one to be skipped
        if (ended_ && !in.empty()) check_follows(in.front() == '\x28' || (in.front() & 0xf0) == 0x50, "zstd");
        ZSTD_inBuffer from{in.data(), in.size(), 0};
        ZSTD_outBuffer to{out, static_cast<std::size_t>(end - out), 0};
        const std::size_t result = ZSTD_decompressStream(stream_, &to, &from);
        FENWICK_CHECK(!ZSTD_isError(result), "{}: damaged zstd data ({})", path_, ZSTD_getErrorName(result));
        // 0: a frame has ended; a hint for the next one where nothing was left to do
        if (from.pos > 0 || to.pos > 0) ended_ = result == 0;
        in.remove_prefix(from.pos);
        out += to.pos;
    }
    bool complete() const override { return ended_; }

private:
    ZSTD_DStream* stream_;
    bool ended_ = false;
};
#endif

#ifdef FENWICK_HAVE_LZMA
class Xz final : public TextReader::Decoder {
public:
    explicit Xz(const std::string& path) : Decoder(path) { begin_stream(); }
    ~Xz() override { lzma_end(&stream_); }

    void decode(std::string_view& in, char*& out, char* end) override {
        if (ended_) {
            while (!in.empty() && in.front() == '\0') in.remove_prefix(1);  // padding
            if (in.empty()) return;
            check_follows(in.front() == '\xFD', "xz");
            begin_stream();
            ended_ = false;
        }
        stream_.next_in = reinterpret_cast<const std::uint8_t*>(in.data());
        stream_.avail_in = in.size();
        stream_.next_out = reinterpret_cast<std::uint8_t*>(out);
        stream_.avail_out = static_cast<std::size_t>(end - out);
        const lzma_ret result = lzma_code(&stream_, LZMA_RUN);
        in.remove_prefix(in.size() - stream_.avail_in);
        out = reinterpret_cast<char*>(stream_.next_out);
        ended_ = result == LZMA_STREAM_END;
        FENWICK_CHECK(result != LZMA_MEMLIMIT_ERROR,
                      "{}: needs more than 256 MB to be decompressed; compress it with a smaller dictionary", path_);
        FENWICK_CHECK(ended_ || result == LZMA_OK || result == LZMA_BUF_ERROR, "{}: damaged xz data", path_);
    }
    bool complete() const override { return ended_; }

private:
    void begin_stream() {
        constexpr std::uint64_t most_memory = 256 << 20;  // xz -9 needs 65 MB
        FENWICK_CHECK(lzma_stream_decoder(&stream_, most_memory, 0) == LZMA_OK, "{}: no memory to decompress it", path_);
    }

    lzma_stream stream_ = LZMA_STREAM_INIT;
    bool ended_ = false;
};
#endif

std::unique_ptr<TextReader::Decoder> make_decoder(const std::string& path, std::string_view head) {
    if (head.starts_with("\x1f\x8b"sv)) return std::make_unique<Gzip>(path);
    // A frame, or one of those that zstd's tools put before it to be skipped
    if (head.starts_with("\x28\xB5\x2F\xFD"sv) ||
        (head.size() >= 4 && (head[0] & 0xf0) == 0x50 && head.substr(1, 3) == "\x2A\x4D\x18"sv)) {
#ifdef FENWICK_HAVE_ZSTD
        return std::make_unique<Zstd>(path);
#else
        fail("{} is compressed by zstd, which this build cannot read; install libzstd-dev and build again", path);
#endif
    }
    if (head.starts_with("\xFD"
                         "7zXZ\0"sv)) {
#ifdef FENWICK_HAVE_LZMA
        return std::make_unique<Xz>(path);
#else
        fail("{} is compressed by xz, which this build cannot read; install liblzma-dev and build again", path);
#endif
    }
    return std::make_unique<Plain>(path);
}

void refuse_containers(const std::string& path, std::string_view head) {
    const auto name = container_name(head);
    FENWICK_CHECK(name.empty(), "{} is {}; text and JSON lines are read, plain or compressed by gzip, zstd or xz", path,
                  name);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- reading

TextReader::TextReader(const std::string& path) : path_(path) {
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    FENWICK_CHECK(descriptor_ >= 0, "{}: cannot be opened: {}", path,
                  errno == ENOENT ? "no such file" : std::strerror(errno));
    try {
        refill();
        refuse_containers(path_, block_);
        decoder_ = make_decoder(path_, block_);
        compressed_ = dynamic_cast<const Plain*>(decoder_.get()) == nullptr;
    } catch (...) {
        ::close(descriptor_);
        throw;
    }
}

TextReader::~TextReader() { ::close(descriptor_); }

void TextReader::refill() {
    position_ = 0;
    block_.resize(block_bytes);
    ssize_t count = 0;
    do count = ::read(descriptor_, block_.data(), block_.size());
    while (count < 0 && errno == EINTR);
    FENWICK_CHECK(count >= 0, "{}: cannot be read: {}", path_, std::strerror(errno));
    block_.resize(static_cast<std::size_t>(count));
    at_end_ = count == 0;
    bytes_read_ += count;
    hash_.update(block_.data(), block_.size());
}

std::size_t TextReader::read(char* out, std::size_t count) {
    char *next = out, *end = out + count;
    while (next < end) {
        if (position_ == block_.size() && !at_end_) refill();
        std::string_view in = std::string_view(block_).substr(position_);
        const char* const before = next;
        const std::size_t before_in = in.size();
        decoder_->decode(in, next, end);
        position_ = block_.size() - in.size();
        if (at_end_ && next == before && in.size() == before_in) {
            FENWICK_CHECK(decoder_->complete(), "{}: the compressed data is cut off", path_);
            break;
        }
    }
    const auto found = static_cast<std::size_t>(next - out);
    if (std::exchange(first_, false)) refuse_containers(path_, std::string_view(out, found));
    return found;
}

}  // namespace fenwick::data
