// Files on disk, written so that a crash or a full disk never leaves half a file under its final name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace fenwick {

// A file that one holder at a time, of all processes of the machine, can own (and of others, where the file system carries
// locks between machines). The system lets go of it when the process ends in whatever way.
class FileLock {
public:
    FileLock() = default;
    FileLock(const FileLock&) = delete;
    FileLock& operator=(const FileLock&) = delete;
    ~FileLock();
    // Makes the file if it is not there. False: someone else holds it. Throws Error if it cannot be opened. File systems
    // without locks count as free.
    bool acquire(const std::string& path);

private:
    int descriptor_ = -1;
};

std::string read_file(const std::string& path);  // throws Error "PATH: no such file" and the like

// Writes to "<path>.tmp", syncs, renames over `path`, syncs the folder. On failure removes the temporary file and
// throws Error with the system's reason ("No space left on device"); what stood at `path` before stays. Links are followed;
// devices, pipes and sockets are written to as they are.
void write_file_atomically(const std::string& path, std::string_view bytes);

// Bytes of a regular file. Throws Error for what is missing, a folder, or a device, pipe or socket, which may never end.
std::int64_t size_of_file(const std::string& path);

// Throws Error where writing `output` (or the temporary file "<output>.tmp") would replace one of the inputs, under
// whatever name, links included. Inputs that are not there are passed over.
void check_output(const std::string& output, const std::vector<std::string>& inputs);

// Why nothing can be made at `path`, from the system's reason: where that is "no such file", the folder is missing, or is
// one (of /proc) in which no files can be made.
std::string reason_not_made(const std::string& path, std::error_code error);

// Makes a folder, and those above it, where it is not there. Throws Error.
void make_folder(const std::string& path);

// The second half of write_file_atomically for a file already written at `temporary` (an HDF5 checkpoint), or for a folder
// where nothing stands at `path`. A device, pipe or socket at `path` is an Error.
void publish_file(const std::string& temporary, const std::string& path);

// A file that grows at its end. Throws Error with the system's reason, also from sync().
class AppendFile {
public:
    // Makes the file if it is not there, and cuts what it holds past its first `bytes`. `shown` names it in messages.
    AppendFile(const std::string& path, std::int64_t bytes, std::string shown);
    AppendFile(const AppendFile&) = delete;
    AppendFile& operator=(const AppendFile&) = delete;
    ~AppendFile();
    void append(const void* data, std::size_t bytes);  // buffered
    void flush();                                      // to the operating system
    void sync();                                       // to the disk
    std::int64_t size() const { return size_; }        // with what is buffered

private:
    int descriptor_ = -1;
    std::int64_t size_;
    std::string buffer_, shown_;
};

}  // namespace fenwick
