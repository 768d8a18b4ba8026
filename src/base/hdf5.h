// HDF5 through its C interface, every call checked at the call, handles owned. Token files, checkpoints and golden
// cases all go through here. Errors name the file and the object: "runs/a/step_40.h5: dataset 'tokens' is missing".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"

namespace fenwick::hdf5 {

// An owned HDF5 identifier (hid_t); closes itself.
class Handle {
public:
    Handle() = default;
    Handle(std::int64_t id, int (*close)(std::int64_t)) : id_(id), close_(close) {}
    Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
    Handle& operator=(Handle&& other) noexcept {
        std::swap(id_, other.id_);
        std::swap(close_, other.close_);
        return *this;
    }
    ~Handle() { reset(); }
    void reset() {
        if (id_ >= 0) close_(id_);
        id_ = -1;
    }
    std::int64_t get() const { return id_; }
    std::int64_t release() { return std::exchange(id_, -1); }  // the caller closes it
    explicit operator bool() const { return id_ >= 0; }

private:
    std::int64_t id_ = -1;
    int (*close_)(std::int64_t) = nullptr;
};

// How a stored number type is seen: bfloat16 has no HDF5 type and is stored as uint16 with the attribute
// "dtype" = "bfloat16"; callers handle that themselves.
enum class ElementType : std::uint8_t { float32, float64, int64, int32, uint16, uint32, uint64, uint8, other };

struct DatasetInfo {
    ElementType type = ElementType::other;
    std::vector<std::int64_t> shape;
    std::int64_t count() const;  // number of elements
};

bool is_hdf5(const std::string& path);  // a file with HDF5's signature, whatever follows

// One open file. All object names are paths from the root ("in/params/lm_head.weight").
class File {
public:
    static File open(const std::string& path);        // read only; throws Error: missing, not HDF5, truncated
    static File open_append(const std::string& path); // read and write an existing file
    static File create(const std::string& path);      // truncates an existing file; in the format of HDF5 1.10
    const std::string& path() const { return path_; }

    bool exists(const std::string& name) const;  // group or dataset
    bool is_dataset(const std::string& name) const;
    std::vector<std::string> list(const std::string& group) const;         // direct children, sorted by name
    std::vector<std::string> all_datasets(const std::string& group) const; // every dataset below, paths relative to group
    void create_group(const std::string& name);                            // parents as needed

    DatasetInfo info(const std::string& name) const;

    // Reads the whole dataset, or `count` elements from `offset` of a one-dimensional one, converted to the element
    // type of T (float, double, int64_t, int32_t, uint16_t, uint32_t, uint64_t, uint8_t).
    template <class T>
    std::vector<T> read(const std::string& name) const;
    template <class T>
    void read_into(const std::string& name, T* out, std::int64_t expected_count) const;
    template <class T>
    void read_slice(const std::string& name, std::int64_t offset, std::int64_t count, T* out) const;

    // For reading past the library, from any thread and without its lock: where in the file the elements of a chunk of a
    // one-dimensional dataset stand as they stand in memory as T, the first of them element `first`; -1 if they do not
    // (filters, another layout or type). Files with a user block are not looked at.
    template <class T>
    std::int64_t position_of_chunk(const std::string& name, std::int64_t first) const;
    int descriptor() const;  // the open file's, for pread

    // Writes a contiguous dataset of the given shape; parents are created.
    template <class T>
    void write(const std::string& name, const T* data, const std::vector<std::int64_t>& shape);

    // A one-dimensional dataset of known length, in chunks that lie in the file one after another, for write_slice().
    template <class T>
    void create_chunked(const std::string& name, std::int64_t length, std::int64_t chunk);
    template <class T>
    void write_slice(const std::string& name, std::int64_t offset, const T* data, std::int64_t count);

    // A one-dimensional dataset that grows by appending; chunked, with gzip at level `deflate` (0: none).
    template <class T>
    void create_appendable(const std::string& name, std::int64_t chunk, int deflate);
    template <class T>
    void append(const std::string& name, const T* data, std::int64_t count);
    // The same for whole chunks where a chunk begins; they are compressed on so many threads.
    template <class T>
    void append_chunks(const std::string& name, const T* data, std::int64_t count, int threads);

    // Attributes of a group or dataset ("/" is the root).
    bool has_attribute(const std::string& object, const std::string& name) const;
    std::string attribute_string(const std::string& object, const std::string& name) const;
    std::int64_t attribute_int(const std::string& object, const std::string& name) const;
    double attribute_double(const std::string& object, const std::string& name) const;
    void set_attribute(const std::string& object, const std::string& name, std::string_view value);
    void set_attribute(const std::string& object, const std::string& name, std::int64_t value);
    void set_attribute(const std::string& object, const std::string& name, double value);

    void flush();  // to the operating system; does not sync the disk
    void close();  // throws if buffered data cannot be written (disk full); the destructor only discards

private:
    File(std::string path, Handle handle) : path_(std::move(path)), file_(std::move(handle)) {}
    std::string path_;
    Handle file_;
};

}  // namespace fenwick::hdf5
