// Text files as people have them: one by one or in folders, plain or compressed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/sha256.h"

namespace fenwick::data {

struct TextFile {
    std::string path;
    std::int64_t bytes = 0;     // as it lies on disk
    std::int64_t modified = 0;  // nanoseconds since 1970
};

// Files as they are given, in this order; a folder stands for every file below it, by name (bytes compared) at each level.
// Names in folders that begin with a dot are passed over. Throws Error for what is missing, unreadable or no file (a pipe, a
// device, inside folders a link to a folder) and for a folder without a file.
std::vector<TextFile> list_text_files(const std::vector<std::string>& paths);

// The text of a file, decompressed. Its first bytes say how it is stored: gzip, zstd and xz are read, of one stream or
// several one after the other; everything else is text. Archives and other containers are refused by name. Memory does not
// depend on the file's size. Throws Error that names the file, from read() too: damaged or cut off, or a compression that
// this build does not have.
class TextReader {
public:
    explicit TextReader(const std::string& path);
    ~TextReader();
    TextReader(const TextReader&) = delete;
    TextReader& operator=(const TextReader&) = delete;

    // Fills out[0, count) as far as there is text; less than count only at the end.
    std::size_t read(char* out, std::size_t count);
    std::int64_t bytes_read() const { return bytes_read_; }  // of the file as it lies on disk
    bool compressed() const { return compressed_; }
    std::string sha256() { return hash_.hex(); }  // of the file as it lies on disk; once read() has reached the end

    class Decoder;

private:
    void refill();

    std::string path_;
    int descriptor_ = -1;
    std::string block_;         // of the file
    std::size_t position_ = 0;  // in block_
    bool at_end_ = false, first_ = true, compressed_ = false;
    std::int64_t bytes_read_ = 0;
    Sha256 hash_;
    std::unique_ptr<Decoder> decoder_;
};

}  // namespace fenwick::data
