#include "base/hdf5.h"

#include <fcntl.h>
#include <hdf5.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>

#include "base/error.h"
#include "base/log.h"

namespace fenwick::hdf5 {
namespace {

static_assert(std::is_same_v<hid_t, std::int64_t> || sizeof(hid_t) == sizeof(std::int64_t));

// The distributions' library is not thread-safe: one lock around every use of it. Recursive, because handles close
// themselves while a method still holds it. Never destroyed, so that a static File may outlive everything.
class Lock {
public:
    Lock() : guard_(mutex()) {
        thread_local bool silenced = false;  // a thread-safe build keeps one error stack a thread
        if (!silenced) {
            // Every file is closed here and checked. The library's own clean-up at exit would only walk the ruins of
            // files whose close failed (disk full), and crash on them.
            H5dont_atexit();
            H5open();
            H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
            silenced = true;
        }
    }

private:
    static std::recursive_mutex& mutex() {
        static auto* instance = new std::recursive_mutex;
        return *instance;
    }
    std::lock_guard<std::recursive_mutex> guard_;
};

template <herr_t (*close)(hid_t)>
int locked_close(std::int64_t id) {
    const Lock lock;
    return close(id);
}
Handle own_file(hid_t id) { return {id, locked_close<H5Fclose>}; }
Handle own_dataset(hid_t id) { return {id, locked_close<H5Dclose>}; }
Handle own_space(hid_t id) { return {id, locked_close<H5Sclose>}; }
Handle own_type(hid_t id) { return {id, locked_close<H5Tclose>}; }
Handle own_attribute(hid_t id) { return {id, locked_close<H5Aclose>}; }
Handle own_properties(hid_t id) { return {id, locked_close<H5Pclose>}; }
Handle own_object(hid_t id) { return {id, locked_close<H5Oclose>}; }
Handle own_group(hid_t id) { return {id, locked_close<H5Gclose>}; }

constexpr std::string_view damage = "the file is damaged (a checksum does not fit)";

// Why a call failed: the system's reason where there is one, else what the innermost line of the error stack means to
// somebody who does not know the library. Its own words go to the log.
std::string reason(std::string_view path) {
    std::string text;
    H5Ewalk2(
        H5E_DEFAULT, H5E_WALK_UPWARD,
        [](unsigned, const H5E_error2_t* error, void* data) -> herr_t {
            auto& result = *static_cast<std::string*>(data);
            if (result.empty() && error->desc != nullptr) result = error->desc;
            return 0;
        },
        &text);
    H5Eclear2(H5E_DEFAULT);
    // "file write failed: time = ..., errno = 28, error message = 'No space left on device', buf = ..."
    constexpr std::string_view mark = "error message = '";
    if (const auto begin = text.find(mark); begin != std::string::npos) {
        const auto from = begin + mark.size();
        return text.substr(from, text.find('\'', from) - from);
    }
    if (text.find("memory allocation failed") != std::string::npos) throw std::bad_alloc();
    if (!text.empty()) spdlog::debug("{}: libhdf5: {}", path, text);
    if (text.find("checksum") != std::string::npos) return std::string(damage);
    if (text.starts_with("truncated file")) return "the file is cut off";
    return "the file is damaged, or none that libhdf5 can read";
}

// Of calls that fail only on a damaged file or without memory.
constexpr std::string_view call_failed = "cannot be read or written";

template <class Id>
Id checked(Id result, std::string_view path, std::string_view action) {
    if (result < 0) fail("{}: {}: {}", path, action, reason(path));
    return result;
}

// Closes now and reports what the library could not write.
void close_checked(Handle& handle, herr_t (*close)(hid_t), std::string_view path, std::string_view action) {
    const hid_t id = handle.release();
    checked(close(id), path, action);
}

template <class T>
hid_t native_type() {
    if constexpr (std::is_same_v<T, float>) return H5T_NATIVE_FLOAT;
    if constexpr (std::is_same_v<T, double>) return H5T_NATIVE_DOUBLE;
    if constexpr (std::is_same_v<T, std::int64_t>) return H5T_NATIVE_INT64;
    if constexpr (std::is_same_v<T, std::int32_t>) return H5T_NATIVE_INT32;
    if constexpr (std::is_same_v<T, std::uint16_t>) return H5T_NATIVE_UINT16;
    if constexpr (std::is_same_v<T, std::uint32_t>) return H5T_NATIVE_UINT32;
    if constexpr (std::is_same_v<T, std::uint64_t>) return H5T_NATIVE_UINT64;
    if constexpr (std::is_same_v<T, std::uint8_t>) return H5T_NATIVE_UINT8;
}

bool is_integer(hid_t type) { return H5Tget_class(type) == H5T_INTEGER; }
bool is_number(hid_t type) { return is_integer(type) || H5Tget_class(type) == H5T_FLOAT; }

ElementType element_type_of(hid_t type) {
    const std::size_t size = H5Tget_size(type);
    if (H5Tget_class(type) == H5T_FLOAT)
        return size == 4 ? ElementType::float32 : size == 8 ? ElementType::float64 : ElementType::other;
    if (!is_integer(type)) return ElementType::other;
    if (H5Tget_sign(type) == H5T_SGN_NONE) {
        switch (size) {
            case 1: return ElementType::uint8;
            case 2: return ElementType::uint16;
            case 4: return ElementType::uint32;
            case 8: return ElementType::uint64;
            default: return ElementType::other;
        }
    }
    return size == 4 ? ElementType::int32 : size == 8 ? ElementType::int64 : ElementType::other;
}

// Conversion to integers: a value that does not fit ends the read instead of being clipped.
H5T_conv_ret_t refuse_out_of_range(H5T_conv_except_t exception, hid_t, hid_t, void*, void*, void*) {
    return exception == H5T_CONV_EXCEPT_RANGE_HI || exception == H5T_CONV_EXCEPT_RANGE_LOW ? H5T_CONV_ABORT
                                                                                             : H5T_CONV_UNHANDLED;
}

Handle transfer_properties(hid_t memory_type, std::string_view path) {
    Handle properties = own_properties(checked(H5Pcreate(H5P_DATASET_XFER), path, call_failed));
    if (is_integer(memory_type))
        checked(H5Pset_type_conv_cb(properties.get(), refuse_out_of_range, nullptr), path, call_failed);
    return properties;
}

// Of files, groups and datasets to be made: no times are kept, so that the same contents give the same bytes.
Handle creation_properties(hid_t kind, std::string_view path) {
    Handle properties = own_properties(checked(H5Pcreate(kind), path, call_failed));
    checked(H5Pset_obj_track_times(properties.get(), false), path, call_failed);
    return properties;
}

Handle dataset_properties(std::string_view path) {
    Handle properties = creation_properties(H5P_DATASET_CREATE, path);
    checked(H5Pset_fill_time(properties.get(), H5D_FILL_TIME_NEVER), path, call_failed);
    return properties;
}

Handle access_properties(std::string_view path) {
    Handle properties = own_properties(checked(H5Pcreate(H5P_FILE_ACCESS), path, call_failed));
    // What is written has the format of HDF5 1.10, in which every structure of the file carries a checksum that the library
    // compares before it reads on. Damaged, the older ones lead it into divisions by zero, endless loops, and worse.
    checked(H5Pset_libver_bounds(properties.get(), H5F_LIBVER_V110, H5F_LIBVER_V110), path, call_failed);
    checked(H5Pset_fclose_degree(properties.get(), H5F_CLOSE_STRONG), path, call_failed);
    // Locks, except where the file system has none.
    checked(H5Pset_file_locking(properties.get(), true, true), path, call_failed);
    return properties;
}

std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::vector<std::int64_t> shape_of(hid_t dataset, std::string_view path) {
    const Handle space = own_space(checked(H5Dget_space(dataset), path, call_failed));
    const H5S_class_t kind = H5Sget_simple_extent_type(space.get());
    if (kind == H5S_NULL) return {0};
    const int rank = checked(H5Sget_simple_extent_ndims(space.get()), path, call_failed);
    std::vector<hsize_t> sizes(static_cast<std::size_t>(rank));
    if (rank > 0) checked(H5Sget_simple_extent_dims(space.get(), sizes.data(), nullptr), path, call_failed);
    return {sizes.begin(), sizes.end()};
}

bool link_exists(hid_t file, const std::string& name, std::string_view path) {
    const htri_t found = H5Lexists(file, name.c_str(), H5P_DEFAULT);
    if (found < 0)  // a part of the way is no group, or a group that cannot be read
        if (const std::string why = reason(path); why == damage) fail("{}: '{}' cannot be looked for: {}", path, name, why);
    return found > 0;
}

bool exists_in(hid_t file, const std::string& name, std::string_view path) {
    if (name.empty() || name == "/") return true;
    // H5Lexists needs every part of the way to exist, so ask part by part.
    for (std::size_t end = name.find('/', 1); end != std::string::npos; end = name.find('/', end + 1))
        if (!link_exists(file, name.substr(0, end), path)) return false;
    const bool found = link_exists(file, name, path) && H5Oexists_by_name(file, name.c_str(), H5P_DEFAULT) > 0;
    H5Eclear2(H5E_DEFAULT);
    return found;
}

Handle open_object(hid_t file, const std::string& name, std::string_view path) {
    FENWICK_CHECK(exists_in(file, name, path), "{}: object '{}' is missing", path, name);
    return own_object(
        checked(H5Oopen(file, name.c_str(), H5P_DEFAULT), path, fmt::format("object '{}' cannot be opened", name)));
}

bool is_dataset_in(hid_t file, const std::string& name, std::string_view path) {
    return exists_in(file, name, path) && H5Iget_type(open_object(file, name, path).get()) == H5I_DATASET;
}

Handle open_dataset(hid_t file, const std::string& name, std::string_view path) {
    FENWICK_CHECK(exists_in(file, name, path), "{}: dataset '{}' is missing", path, name);
    FENWICK_CHECK(is_dataset_in(file, name, path), "{}: '{}' is a group; a dataset is needed", path, name);
    return own_dataset(
        checked(H5Dopen2(file, name.c_str(), H5P_DEFAULT), path, fmt::format("dataset '{}' cannot be opened", name)));
}

std::int64_t file_bytes(const std::string& path) {
    struct stat status {};
    return ::stat(path.c_str(), &status) == 0 ? static_cast<std::int64_t>(status.st_size) : 0;
}

// The type of the file's elements can become `memory_type`: numbers any floating type, integers alone an integer.
void check_readable_as(hid_t dataset, hid_t memory_type, const std::string& name, std::string_view path) {
    const Handle type = own_type(checked(H5Dget_type(dataset), path, call_failed));
    FENWICK_CHECK(is_integer(memory_type) ? is_integer(type.get()) : is_number(type.get()),
                  "{}: dataset '{}' does not hold {}", path, name, is_integer(memory_type) ? "integers" : "numbers");
}

void read_all(hid_t file, const std::string& name, hid_t memory_type, void* out, std::int64_t count, const std::string& path) {
    const Handle dataset = open_dataset(file, name, path);
    check_readable_as(dataset.get(), memory_type, name, path);
    const DatasetInfo info{ElementType::other, shape_of(dataset.get(), path)};
    FENWICK_CHECK(info.count() == count, "{}: dataset '{}' has {} elements (shape {}); {} are needed", path, name, info.count(),
                  shape_text(info.shape), count);
    if (count == 0) return;
    const Handle transfer = transfer_properties(memory_type, path);
    checked(H5Dread(dataset.get(), memory_type, H5S_ALL, H5S_ALL, transfer.get(), out), path,
            fmt::format("dataset '{}' cannot be read", name));
}

void read_part(hid_t file, const std::string& name, hid_t memory_type, void* out, std::int64_t offset, std::int64_t count,
               const std::string& path) {
    const Handle dataset = open_dataset(file, name, path);
    check_readable_as(dataset.get(), memory_type, name, path);
    const auto shape = shape_of(dataset.get(), path);
    FENWICK_CHECK(shape.size() == 1, "{}: dataset '{}' has shape {}; one dimension is needed", path, name, shape_text(shape));
    FENWICK_CHECK(offset >= 0 && count >= 0 && offset <= shape[0] && count <= shape[0] - offset,
                  "{}: elements [{}, {}) of dataset '{}' are asked for, it has {}", path, offset, offset + count, name, shape[0]);
    if (count == 0) return;
    const Handle space = own_space(checked(H5Dget_space(dataset.get()), path, call_failed));
    const hsize_t start = static_cast<hsize_t>(offset), size = static_cast<hsize_t>(count);
    checked(H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, &start, nullptr, &size, nullptr), path, call_failed);
    const Handle memory = own_space(checked(H5Screate_simple(1, &size, nullptr), path, call_failed));
    const Handle transfer = transfer_properties(memory_type, path);
    checked(H5Dread(dataset.get(), memory_type, memory.get(), space.get(), transfer.get(), out), path,
            fmt::format("dataset '{}' cannot be read", name));
}

void make_groups(hid_t file, const std::string& name, std::string_view path) {
    if (exists_in(file, name, path)) return;
    if (const auto slash = name.rfind('/'); slash != std::string::npos) make_groups(file, name.substr(0, slash), path);
    const std::string action = fmt::format("group '{}' cannot be created", name);
    const Handle properties = creation_properties(H5P_GROUP_CREATE, path);
    Handle group =
        own_group(checked(H5Gcreate2(file, name.c_str(), H5P_DEFAULT, properties.get(), H5P_DEFAULT), path, action));
    close_checked(group, H5Gclose, path, action);
}

// A dataset that is not there yet, in groups that are made where they are missing.
Handle make_dataset(hid_t file, const std::string& name, hid_t type, hid_t space, hid_t properties, std::string_view path,
                    std::string_view action) {
    FENWICK_CHECK(!exists_in(file, name, path), "{}: '{}' exists already", path, name);
    if (const auto slash = name.rfind('/'); slash != std::string::npos) make_groups(file, name.substr(0, slash), path);
    return own_dataset(
        checked(H5Dcreate2(file, name.c_str(), type, space, H5P_DEFAULT, properties, H5P_DEFAULT), path, action));
}

void write_all(hid_t file, const std::string& name, hid_t type, const void* data, const std::vector<std::int64_t>& shape,
               const std::string& path) {
    const std::string action = fmt::format("dataset '{}' cannot be written", name);
    const std::vector<hsize_t> sizes(shape.begin(), shape.end());
    const Handle space = own_space(
        checked(sizes.empty() ? H5Screate(H5S_SCALAR) : H5Screate_simple(static_cast<int>(sizes.size()), sizes.data(), nullptr),
                path, action));
    const Handle properties = dataset_properties(path);
    Handle dataset = make_dataset(file, name, type, space.get(), properties.get(), path, action);
    if (DatasetInfo{ElementType::other, shape}.count() > 0)
        checked(H5Dwrite(dataset.get(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), path, action);
    close_checked(dataset, H5Dclose, path, action);
}

// length: of a dataset that does not grow; else -1.
void create_chunks(hid_t file, const std::string& name, hid_t type, std::int64_t length, std::int64_t chunk, int deflate,
                   const std::string& path) {
    const std::string action = fmt::format("dataset '{}' cannot be created", name);
    FENWICK_CHECK(chunk >= 1 && deflate >= 0 && deflate <= 9,
                  "{}: dataset '{}': chunk {} and deflate {} are asked for; at least 1 and 0 to 9 are needed", path, name, chunk,
                  deflate);
    const hsize_t size = length < 0 ? 0 : static_cast<hsize_t>(length), limit = length < 0 ? H5S_UNLIMITED : size,
                  chunk_size = static_cast<hsize_t>(length < 0 ? chunk : std::min(chunk, length));
    const Handle space = own_space(checked(H5Screate_simple(1, &size, &limit), path, action));
    const Handle properties = dataset_properties(path);
    checked(H5Pset_chunk(properties.get(), 1, &chunk_size), path, action);
    if (length >= 0) checked(H5Pset_alloc_time(properties.get(), H5D_ALLOC_TIME_EARLY), path, action);
    if (deflate > 0) {
        checked(H5Pset_shuffle(properties.get()), path, action);
        checked(H5Pset_deflate(properties.get(), static_cast<unsigned>(deflate)), path, action);
    }
    Handle dataset = make_dataset(file, name, type, space.get(), properties.get(), path, action);
    close_checked(dataset, H5Dclose, path, action);
}

// Of a one-dimensional dataset that is long enough.
void write_part(hid_t file, const std::string& name, hid_t type, const void* data, std::int64_t offset, std::int64_t count,
                const std::string& path) {
    if (count == 0) return;
    const std::string action = fmt::format("dataset '{}' cannot be written", name);
    Handle dataset = open_dataset(file, name, path);
    const Handle space = own_space(checked(H5Dget_space(dataset.get()), path, action));
    const hsize_t start = static_cast<hsize_t>(offset), size = static_cast<hsize_t>(count);
    checked(H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, &start, nullptr, &size, nullptr), path, action);
    const Handle memory = own_space(checked(H5Screate_simple(1, &size, nullptr), path, action));
    checked(H5Dwrite(dataset.get(), type, memory.get(), space.get(), H5P_DEFAULT, data), path, action);
    close_checked(dataset, H5Dclose, path, action);
}

void append_to(hid_t file, const std::string& name, hid_t type, const void* data, std::int64_t count,
               const std::string& path) {
    if (count == 0) return;
    std::int64_t length = 0;
    {
        const std::string action = fmt::format("dataset '{}' cannot be written", name);
        const Handle dataset = open_dataset(file, name, path);
        const auto shape = shape_of(dataset.get(), path);
        FENWICK_CHECK(shape.size() == 1, "{}: dataset '{}' has shape {}; one dimension is needed", path, name,
                      shape_text(shape));
        length = shape[0];
        const hsize_t end = static_cast<hsize_t>(length + count);
        checked(H5Dset_extent(dataset.get(), &end), path, action);
    }
    write_part(file, name, type, data, length, count, path);
}

// What the filters of create_chunks() make of a chunk; `skipped` says which of them did not do it any good.
std::vector<std::uint8_t> filtered(const std::uint8_t* chunk, std::size_t bytes, std::size_t element_bytes, int deflate,
                                   std::uint32_t& skipped) {
    std::vector<std::uint8_t> shuffled(bytes), packed(bytes);
    const std::size_t count = bytes / element_bytes;
    for (std::size_t part = 0; part < element_bytes; ++part)
        for (std::size_t i = 0; i < count; ++i) shuffled[part * count + i] = chunk[i * element_bytes + part];
    uLongf size = bytes;
    skipped = 0;
    if (compress2(packed.data(), &size, shuffled.data(), bytes, deflate) != Z_OK || size >= bytes) {
        skipped = 2;  // a bit a filter: the second one
        return shuffled;
    }
    packed.resize(size);
    return packed;
}

void append_chunks_to(hid_t file, const std::string& name, hid_t type, const void* data, std::int64_t count, int threads,
                      const std::string& path) {
    const std::string action = fmt::format("dataset '{}' cannot be written", name);
    Handle dataset = open_dataset(file, name, path);
    const auto shape = shape_of(dataset.get(), path);
    const Handle properties = own_properties(checked(H5Dget_create_plist(dataset.get()), path, action));
    hsize_t chunk = 0;
    unsigned flags = 0, level = 0, filter = 0;
    std::size_t values = 1;
    if (checked(H5Pget_nfilters(properties.get()), path, action) == 0) return append_to(file, name, type, data, count, path);
    checked(H5Pget_chunk(properties.get(), 1, &chunk), path, action);
    checked(H5Pget_filter_by_id2(properties.get(), H5Z_FILTER_DEFLATE, &flags, &values, &level, 0, nullptr, &filter), path,
            action);
    const auto length = static_cast<std::int64_t>(chunk);
    FENWICK_CHECK(shape.size() == 1 && shape[0] % length == 0 && count % length == 0,
                  "{}: dataset '{}': {} elements at {} are not whole chunks of {}", path, name, count, shape_text(shape),
                  length);
    const std::size_t element_bytes = H5Tget_size(type), chunk_bytes = chunk * element_bytes;
    std::vector<std::vector<std::uint8_t>> packed(static_cast<std::size_t>(count / length));
    std::vector<std::uint32_t> skipped(packed.size());
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
        for (std::size_t i = next++; i < packed.size(); i = next++)
            packed[i] = filtered(static_cast<const std::uint8_t*>(data) + i * chunk_bytes, chunk_bytes, element_bytes,
                                 static_cast<int>(level), skipped[i]);
    };
    {
        std::vector<std::jthread> helpers;
        const auto wanted = std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), packed.size());
        for (std::size_t i = 1; i < wanted; ++i) helpers.emplace_back(work);
        work();
    }
    hsize_t place = static_cast<hsize_t>(shape[0]);
    const hsize_t end = place + static_cast<hsize_t>(count);
    checked(H5Dset_extent(dataset.get(), &end), path, action);
    for (std::size_t i = 0; i < packed.size(); ++i, place += chunk)
        checked(H5Dwrite_chunk(dataset.get(), H5P_DEFAULT, skipped[i], &place, packed[i].size(), packed[i].data()), path,
                action);
    close_checked(dataset, H5Dclose, path, action);
}

Handle open_attribute(hid_t object, const std::string& object_name, const std::string& name, std::string_view path) {
    FENWICK_CHECK(H5Aexists(object, name.c_str()) > 0, "{}: attribute '{}' of '{}' is missing", path, name, object_name);
    return own_attribute(checked(H5Aopen(object, name.c_str(), H5P_DEFAULT), path,
                                 fmt::format("attribute '{}' of '{}' cannot be opened", name, object_name)));
}

// One number; `memory_type` says which.
void read_number_attribute(hid_t file, const std::string& object_name, const std::string& name, hid_t memory_type, void* out,
                           const std::string& path) {
    const Handle object = open_object(file, object_name, path);
    const Handle attribute = open_attribute(object.get(), object_name, name, path);
    const Handle type = own_type(checked(H5Aget_type(attribute.get()), path, call_failed));
    const Handle space = own_space(checked(H5Aget_space(attribute.get()), path, call_failed));
    FENWICK_CHECK((is_integer(memory_type) ? is_integer(type.get()) : is_number(type.get())) &&
                      H5Sget_simple_extent_npoints(space.get()) == 1,
                  "{}: attribute '{}' of '{}' is not one {}", path, name, object_name,
                  is_integer(memory_type) ? "integer" : "number");
    checked(H5Aread(attribute.get(), memory_type, out), path, fmt::format("attribute '{}' cannot be read", name));
}

void write_attribute(hid_t file, const std::string& object_name, const std::string& name, hid_t type, const void* data,
                     const std::string& path) {
    const std::string action = fmt::format("attribute '{}' of '{}' cannot be written", name, object_name);
    const Handle object = open_object(file, object_name, path);
    if (H5Aexists(object.get(), name.c_str()) > 0) checked(H5Adelete(object.get(), name.c_str()), path, action);
    const Handle space = own_space(checked(H5Screate(H5S_SCALAR), path, action));
    Handle attribute =
        own_attribute(checked(H5Acreate2(object.get(), name.c_str(), type, space.get(), H5P_DEFAULT, H5P_DEFAULT), path, action));
    checked(H5Awrite(attribute.get(), type, data), path, action);
    close_checked(attribute, H5Aclose, path, action);
}

std::vector<std::string> children(hid_t file, const std::string& group_name, std::string_view path) {
    FENWICK_CHECK(exists_in(file, group_name, path), "{}: group '{}' is missing", path, group_name);
    const Handle group = own_group(checked(H5Gopen2(file, group_name.empty() ? "/" : group_name.c_str(), H5P_DEFAULT), path,
                                           fmt::format("'{}' is not a group", group_name)));
    std::vector<std::string> names;
    const auto collect = [](hid_t, const char* name, const auto*, void* found) -> herr_t {
        static_cast<std::vector<std::string>*>(found)->emplace_back(name);
        return 0;
    };
    checked(H5Literate(group.get(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, collect, &names), path,
            fmt::format("group '{}' cannot be listed", group_name));
    std::sort(names.begin(), names.end());
    return names;
}

void collect_datasets(hid_t file, const std::string& group, const std::string& prefix, int depth, std::vector<std::string>& found,
                      std::string_view path) {
    FENWICK_CHECK(depth < 64, "{}: groups are nested more than 64 deep (a link that points back?)", path);
    for (const std::string& name : children(file, group, path)) {
        const std::string full = group.empty() || group == "/" ? name : group + "/" + name;
        if (!exists_in(file, full, path)) continue;  // a link to nowhere
        if (is_dataset_in(file, full, path))
            found.push_back(prefix + name);
        else
            collect_datasets(file, full, prefix + name + "/", depth + 1, found, path);
    }
}

Handle open_file(const std::string& path, unsigned flags) {
    const int descriptor = ::open(path.c_str(), (flags == H5F_ACC_RDONLY ? O_RDONLY : O_RDWR) | O_CLOEXEC | O_NONBLOCK);
    FENWICK_CHECK(descriptor >= 0, "{}: {}", path, errno == ENOENT ? "no such file" : std::strerror(errno));
    struct stat status {};
    const bool known = ::fstat(descriptor, &status) == 0;
    ::close(descriptor);
    FENWICK_CHECK(!known || !S_ISDIR(status.st_mode), "{} is a folder; an HDF5 file is needed", path);
    FENWICK_CHECK(!known || S_ISREG(status.st_mode), "{} is a device, pipe or socket; an HDF5 file is needed", path);
    FENWICK_CHECK(is_hdf5(path), "{} is not an HDF5 file", path);
    const Handle access = access_properties(path);
    return own_file(checked(H5Fopen(path.c_str(), flags, access.get()), path, "cannot be opened"));
}

}  // namespace

std::int64_t DatasetInfo::count() const {
    std::int64_t product = 1;
    for (const std::int64_t size : shape)
        if (size < 0 || __builtin_mul_overflow(product, size, &product)) fail("shape {} overflows 64 bits", shape_text(shape));
    return product;
}

bool is_hdf5(const std::string& path) {
    const Lock lock;
    const htri_t found = H5Fis_hdf5(path.c_str());
    H5Eclear2(H5E_DEFAULT);
    return found > 0;
}

File File::open(const std::string& path) {
    const Lock lock;
    return {path, open_file(path, H5F_ACC_RDONLY)};
}

File File::open_append(const std::string& path) {
    const Lock lock;
    return {path, open_file(path, H5F_ACC_RDWR)};
}

File File::create(const std::string& path) {
    const Lock lock;
    const Handle access = access_properties(path), creation = creation_properties(H5P_FILE_CREATE, path);
    // The root's attributes stand in its header, not in an index of their own, which would take longer to open.
    checked(H5Pset_attr_phase_change(creation.get(), 64, 48), path, call_failed);
    return {path, own_file(checked(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.get(), access.get()), path,
                                   "cannot be created"))};
}

bool File::exists(const std::string& name) const {
    const Lock lock;
    return exists_in(file_.get(), name, path_);
}

bool File::is_dataset(const std::string& name) const {
    const Lock lock;
    return is_dataset_in(file_.get(), name, path_);
}

std::vector<std::string> File::list(const std::string& group) const {
    const Lock lock;
    return children(file_.get(), group, path_);
}

std::vector<std::string> File::all_datasets(const std::string& group) const {
    const Lock lock;
    std::vector<std::string> found;
    collect_datasets(file_.get(), group, "", 0, found, path_);
    std::sort(found.begin(), found.end());
    return found;
}

void File::create_group(const std::string& name) {
    const Lock lock;
    make_groups(file_.get(), name, path_);
}

DatasetInfo File::info(const std::string& name) const {
    const Lock lock;
    const Handle dataset = open_dataset(file_.get(), name, path_);
    const Handle type = own_type(checked(H5Dget_type(dataset.get()), path_, call_failed));
    return {element_type_of(type.get()), shape_of(dataset.get(), path_)};
}

template <class T>
std::vector<T> File::read(const std::string& name) const {
    const Lock lock;
    const DatasetInfo found = info(name);
    // A damaged header can claim any size: believe no more than deflate could have packed into the file.
    const std::int64_t count = found.count(), most = (64 << 20) + 1100 * file_bytes(path_);
    FENWICK_CHECK(count <= most / static_cast<std::int64_t>(sizeof(T)), "{}: dataset '{}' claims shape {}, more than the file can hold",
                  path_, name, shape_text(found.shape));
    std::vector<T> values(static_cast<std::size_t>(count));
    read_all(file_.get(), name, native_type<T>(), values.data(), count, path_);
    return values;
}

template <class T>
void File::read_into(const std::string& name, T* out, std::int64_t expected_count) const {
    const Lock lock;
    read_all(file_.get(), name, native_type<T>(), out, expected_count, path_);
}

template <class T>
void File::read_slice(const std::string& name, std::int64_t offset, std::int64_t count, T* out) const {
    const Lock lock;
    read_part(file_.get(), name, native_type<T>(), out, offset, count, path_);
}

template <class T>
std::int64_t File::position_of_chunk(const std::string& name, std::int64_t first) const {
    const Lock lock;
    const Handle dataset = open_dataset(file_.get(), name, path_);
    const Handle type = own_type(checked(H5Dget_type(dataset.get()), path_, call_failed));
    const Handle properties = own_properties(checked(H5Dget_create_plist(dataset.get()), path_, call_failed));
    const Handle space = own_space(checked(H5Dget_space(dataset.get()), path_, call_failed));
    if (H5Tequal(type.get(), native_type<T>()) <= 0 || H5Pget_layout(properties.get()) != H5D_CHUNKED ||
        H5Pget_nfilters(properties.get()) != 0 || H5Sget_simple_extent_ndims(space.get()) != 1)
        return -1;
    const auto coordinate = static_cast<hsize_t>(first);
    unsigned filters = 0;
    haddr_t address = HADDR_UNDEF;
    hsize_t bytes = 0;
    if (H5Dget_chunk_info_by_coord(dataset.get(), &coordinate, &filters, &address, &bytes) < 0) {
        H5Eclear2(H5E_DEFAULT);
        return -1;
    }
    return address == HADDR_UNDEF ? -1 : static_cast<std::int64_t>(address);
}

int File::descriptor() const {
    const Lock lock;
    void* handle = nullptr;
    checked(H5Fget_vfd_handle(file_.get(), H5P_DEFAULT, &handle), path_, call_failed);
    return *static_cast<int*>(handle);
}

template <class T>
void File::write(const std::string& name, const T* data, const std::vector<std::int64_t>& shape) {
    const Lock lock;
    write_all(file_.get(), name, native_type<T>(), data, shape, path_);
}

template <class T>
void File::create_appendable(const std::string& name, std::int64_t chunk, int deflate) {
    const Lock lock;
    create_chunks(file_.get(), name, native_type<T>(), -1, chunk, deflate, path_);
}

template <class T>
void File::create_chunked(const std::string& name, std::int64_t length, std::int64_t chunk) {
    const Lock lock;
    create_chunks(file_.get(), name, native_type<T>(), length, chunk, 0, path_);
}

template <class T>
void File::write_slice(const std::string& name, std::int64_t offset, const T* data, std::int64_t count) {
    const Lock lock;
    write_part(file_.get(), name, native_type<T>(), data, offset, count, path_);
}

template <class T>
void File::append(const std::string& name, const T* data, std::int64_t count) {
    const Lock lock;
    append_to(file_.get(), name, native_type<T>(), data, count, path_);
}

template <class T>
void File::append_chunks(const std::string& name, const T* data, std::int64_t count, int threads) {
    const Lock lock;
    append_chunks_to(file_.get(), name, native_type<T>(), data, count, threads, path_);
}

#define FENWICK_HDF5_TYPE(T)                                                                      \
    template std::vector<T> File::read<T>(const std::string&) const;                              \
    template void File::read_into<T>(const std::string&, T*, std::int64_t) const;                 \
    template void File::read_slice<T>(const std::string&, std::int64_t, std::int64_t, T*) const;  \
    template std::int64_t File::position_of_chunk<T>(const std::string&, std::int64_t) const;     \
    template void File::write<T>(const std::string&, const T*, const std::vector<std::int64_t>&); \
    template void File::create_appendable<T>(const std::string&, std::int64_t, int);              \
    template void File::append<T>(const std::string&, const T*, std::int64_t);                    \
    template void File::append_chunks<T>(const std::string&, const T*, std::int64_t, int);        \
    template void File::create_chunked<T>(const std::string&, std::int64_t, std::int64_t);        \
    template void File::write_slice<T>(const std::string&, std::int64_t, const T*, std::int64_t)
FENWICK_HDF5_TYPE(float);
FENWICK_HDF5_TYPE(double);
FENWICK_HDF5_TYPE(std::int64_t);
FENWICK_HDF5_TYPE(std::int32_t);
FENWICK_HDF5_TYPE(std::uint16_t);
FENWICK_HDF5_TYPE(std::uint32_t);
FENWICK_HDF5_TYPE(std::uint64_t);
FENWICK_HDF5_TYPE(std::uint8_t);
#undef FENWICK_HDF5_TYPE

bool File::has_attribute(const std::string& object, const std::string& name) const {
    const Lock lock;
    if (!exists_in(file_.get(), object, path_)) return false;
    const Handle opened = open_object(file_.get(), object, path_);
    return H5Aexists(opened.get(), name.c_str()) > 0;
}

std::string File::attribute_string(const std::string& object, const std::string& name) const {
    const Lock lock;
    const Handle opened = open_object(file_.get(), object, path_);
    const Handle attribute = open_attribute(opened.get(), object, name, path_);
    const Handle type = own_type(checked(H5Aget_type(attribute.get()), path_, call_failed));
    const Handle space = own_space(checked(H5Aget_space(attribute.get()), path_, call_failed));
    FENWICK_CHECK(H5Tget_class(type.get()) == H5T_STRING && H5Sget_simple_extent_npoints(space.get()) == 1,
                  "{}: attribute '{}' of '{}' is not one string", path_, name, object);
    const std::string action = fmt::format("attribute '{}' of '{}' cannot be read", name, object);
    if (H5Tis_variable_str(type.get()) > 0) {  // as h5py writes them
        char* text = nullptr;
        checked(H5Aread(attribute.get(), type.get(), &text), path_, action);
        const std::string value = text != nullptr ? text : "";
        H5free_memory(text);
        return value;
    }
    std::string value(H5Tget_size(type.get()), '\0');
    checked(H5Aread(attribute.get(), type.get(), value.data()), path_, action);
    value.resize(value.find_last_not_of('\0') + 1);  // the padding
    return value;
}

std::int64_t File::attribute_int(const std::string& object, const std::string& name) const {
    const Lock lock;
    std::int64_t value = 0;
    read_number_attribute(file_.get(), object, name, H5T_NATIVE_INT64, &value, path_);
    return value;
}

double File::attribute_double(const std::string& object, const std::string& name) const {
    const Lock lock;
    double value = 0;
    read_number_attribute(file_.get(), object, name, H5T_NATIVE_DOUBLE, &value, path_);
    return value;
}

void File::set_attribute(const std::string& object, const std::string& name, std::string_view value) {
    const Lock lock;
    FENWICK_CHECK(value.size() < 64000, "{}: attribute '{}' of '{}' has {} bytes; HDF5 holds less than 64 KB in an attribute, "
                  "write a dataset", path_, name, object, value.size());
    const Handle type = own_type(checked(H5Tcopy(H5T_C_S1), path_, call_failed));
    checked(H5Tset_size(type.get(), std::max<std::size_t>(value.size(), 1)), path_, call_failed);
    checked(H5Tset_strpad(type.get(), H5T_STR_NULLPAD), path_, call_failed);
    checked(H5Tset_cset(type.get(), H5T_CSET_UTF8), path_, call_failed);
    write_attribute(file_.get(), object, name, type.get(), value.empty() ? "" : value.data(), path_);
}

void File::set_attribute(const std::string& object, const std::string& name, std::int64_t value) {
    const Lock lock;
    write_attribute(file_.get(), object, name, H5T_NATIVE_INT64, &value, path_);
}

void File::set_attribute(const std::string& object, const std::string& name, double value) {
    const Lock lock;
    write_attribute(file_.get(), object, name, H5T_NATIVE_DOUBLE, &value, path_);
}

void File::flush() {
    const Lock lock;
    checked(H5Fflush(file_.get(), H5F_SCOPE_GLOBAL), path_, "cannot be written");
}

void File::close() {
    if (!file_) return;
    const Lock lock;
    close_checked(file_, H5Fclose, path_, "cannot be written");
}

}  // namespace fenwick::hdf5
