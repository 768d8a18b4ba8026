#include "base/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/error.h"

namespace fenwick {
namespace {

// The system's reason for the last failed call.
std::string reason() { return errno == ENOENT ? "no such file" : std::strerror(errno); }

class Descriptor {
public:
    explicit Descriptor(int number) : number_(number) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (number_ >= 0) ::close(number_);
    }
    int get() const { return number_; }
    int release() { return std::exchange(number_, -1); }
    // Some file systems report a failed write only here.
    bool close() { return ::close(std::exchange(number_, -1)) == 0; }

private:
    int number_;
};

// Removes the temporary file unless it has been published.
class RemoveOnFailure {
public:
    explicit RemoveOnFailure(const std::string& path) : path_(path) {}
    RemoveOnFailure(const RemoveOnFailure&) = delete;
    RemoveOnFailure& operator=(const RemoveOnFailure&) = delete;
    ~RemoveOnFailure() {
        if (armed_) ::unlink(path_.c_str());
    }
    void disarm() { armed_ = false; }

private:
    const std::string& path_;
    bool armed_ = true;
};

void sync_folder_of(const std::string& path) {
    auto folder = std::filesystem::path(path).parent_path();
    if (folder.empty()) folder = ".";
    const Descriptor descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // Folders that cannot be opened or synced (some network file systems) leave the rename to the system's own pace.
    if (descriptor.get() < 0) return;
    if (::fsync(descriptor.get()) != 0 && errno == EIO) fail("{}: cannot be synced: {}", folder.string(), reason());
}

}  // namespace

FileLock::~FileLock() {
    if (descriptor_ >= 0) ::close(descriptor_);
}

bool FileLock::acquire(const std::string& path) {
    Descriptor descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    FENWICK_CHECK(descriptor.get() >= 0, "{}: cannot be opened: {}", path, reason());
    if (::flock(descriptor.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = descriptor.release();
    return true;
}

std::string read_file(const std::string& path) {
    const Descriptor descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    FENWICK_CHECK(descriptor.get() >= 0, "{}: {}", path, reason());
    struct stat status {};
    FENWICK_CHECK(::fstat(descriptor.get(), &status) == 0, "{}: {}", path, reason());
    FENWICK_CHECK(!S_ISDIR(status.st_mode), "{} is a folder; a file is needed", path);
    std::string bytes;
    if (S_ISREG(status.st_mode)) bytes.reserve(static_cast<std::size_t>(status.st_size));
    char block[1 << 16];
    while (true) {
        const ssize_t count = ::read(descriptor.get(), block, sizeof(block));
        if (count < 0 && errno == EINTR) continue;
        FENWICK_CHECK(count >= 0, "{}: cannot be read: {}", path, reason());
        if (count == 0) return bytes;
        bytes.append(block, static_cast<std::size_t>(count));
    }
}

std::int64_t size_of_file(const std::string& path) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    FENWICK_CHECK(status.type() != std::filesystem::file_type::not_found, "{}: no such file", path);
    FENWICK_CHECK(!error, "{}: {}", path, error.message());
    FENWICK_CHECK(!std::filesystem::is_directory(status), "{} is a folder; a file is needed", path);
    FENWICK_CHECK(std::filesystem::is_regular_file(status), "{} is a device, pipe or socket; a file is needed", path);
    const auto bytes = std::filesystem::file_size(path, error);
    FENWICK_CHECK(!error, "{}: {}", path, error.message());
    return static_cast<std::int64_t>(bytes);
}

std::string reason_not_made(const std::string& path, std::error_code error) {
    if (error != std::errc::no_such_file_or_directory) return error.message();
    std::error_code ignored;
    const auto folder = std::filesystem::absolute(path, ignored).parent_path();
    return std::filesystem::is_directory(folder, ignored) ? "no files can be made in " + folder.string()
                                                          : "its folder does not exist";
}

void make_folder(const std::string& path) {
    namespace fs = std::filesystem;
    std::error_code error, ignored;
    fs::create_directories(path, error);
    if (!error && fs::is_directory(path, ignored)) return;
    if (!error) error = std::make_error_code(std::errc::not_a_directory);
    fs::path first = fs::absolute(path, ignored);  // that is not there
    while (first.has_relative_path() && !fs::exists(first.parent_path(), ignored)) first = first.parent_path();
    fail("{}: the folder cannot be made: {}", path, reason_not_made(first.string(), error));
}

void check_output(const std::string& output, const std::vector<std::string>& inputs) {
    for (const std::string& input : inputs) {
        std::error_code ignored;
        FENWICK_CHECK(!std::filesystem::equivalent(input, output, ignored) &&
                          !std::filesystem::equivalent(input, output + ".tmp", ignored),
                      "{}: the output would replace an input, {}; name another file", output, input);
    }
}

namespace {
void write_all(int descriptor, std::string_view bytes, std::string_view shown) {
    while (!bytes.empty()) {
        const ssize_t count = ::write(descriptor, bytes.data(), bytes.size());
        if (count < 0 && errno == EINTR) continue;
        FENWICK_CHECK(count >= 0, "{}: cannot be written: {}", shown, reason());
        bytes.remove_prefix(static_cast<std::size_t>(count));
    }
}
}  // namespace

namespace {

// Where links at `path` lead in the end, whether anything is there or not.
std::string target_of(const std::string& path) {
    namespace fs = std::filesystem;
    fs::path target = path;
    std::error_code error;
    for (int links = 0; links < 40 && fs::is_symlink(fs::symlink_status(target, error)); ++links) {
        const fs::path next = fs::read_symlink(target, error);
        if (error) break;
        target = next.is_absolute() ? next : target.parent_path() / next;
    }
    return target.string();
}
bool is_device(const std::string& path) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status) &&
           !std::filesystem::is_directory(status);
}

}  // namespace

void write_file_atomically(const std::string& path, std::string_view bytes) {
    if (is_device(path)) {  // there is nothing to replace
        Descriptor descriptor(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
        FENWICK_CHECK(descriptor.get() >= 0, "{}: cannot be written: {}", path, reason());
        write_all(descriptor.get(), bytes, path);
        FENWICK_CHECK(descriptor.close(), "{}: cannot be written: {}", path, reason());
        return;
    }
    const std::string temporary = target_of(path) + ".tmp";
    Descriptor descriptor(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    FENWICK_CHECK(descriptor.get() >= 0, "{}: cannot be written: {}", path,
                  reason_not_made(path, {errno, std::generic_category()}));
    RemoveOnFailure guard(temporary);
    write_all(descriptor.get(), bytes, path);
    FENWICK_CHECK(descriptor.close(), "{}: cannot be written: {}", path, reason());
    publish_file(temporary, path);
    guard.disarm();
}

void publish_file(const std::string& temporary, const std::string& path) {
    RemoveOnFailure guard(temporary);
    {
        Descriptor descriptor(::open(temporary.c_str(), O_RDONLY | O_CLOEXEC));
        FENWICK_CHECK(descriptor.get() >= 0, "{}: {}", temporary, reason());
        FENWICK_CHECK(::fsync(descriptor.get()) == 0, "{}: cannot be synced to disk: {}", path, reason());
    }
    FENWICK_CHECK(!is_device(path), "{} is a device, pipe or socket; name a regular file", path);
    const std::string target = target_of(path);
    FENWICK_CHECK(::rename(temporary.c_str(), target.c_str()) == 0, "{}: cannot be put in place: {}", path, reason());
    guard.disarm();
    sync_folder_of(target);
}

AppendFile::AppendFile(const std::string& path, std::int64_t bytes, std::string shown)
    : size_(bytes), shown_(std::move(shown)) {
    Descriptor descriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    FENWICK_CHECK(descriptor.get() >= 0, "{}: cannot be written: {}", shown_, reason());
    struct stat status {};
    FENWICK_CHECK(::fstat(descriptor.get(), &status) == 0 && status.st_size >= bytes, "{} has {} bytes; {} are needed", path,
                  static_cast<std::int64_t>(status.st_size), bytes);
    FENWICK_CHECK(status.st_size == bytes || ::ftruncate(descriptor.get(), bytes) == 0, "{}: cannot be written: {}", shown_,
                  reason());
    descriptor_ = descriptor.release();
}

AppendFile::~AppendFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
}

void AppendFile::append(const void* data, std::size_t bytes) {
    constexpr std::size_t most = 1 << 20;
    if (buffer_.size() + bytes > most) flush();
    size_ += static_cast<std::int64_t>(bytes);
    const std::string_view view(static_cast<const char*>(data), bytes);
    if (bytes > most)
        write_all(descriptor_, view, shown_);
    else
        buffer_.append(view);
}

void AppendFile::flush() {
    write_all(descriptor_, buffer_, shown_);
    buffer_.clear();
}

void AppendFile::sync() {
    flush();
    FENWICK_CHECK(::fdatasync(descriptor_) == 0, "{}: cannot be synced to disk: {}", shown_, reason());
}

}  // namespace fenwick
