#include "model/safetensors.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files.h"

namespace fenwick::model::safetensors {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors values are little endian, as are all machines we run on");

constexpr std::uint64_t largest_header = 100'000'000;  // the format's own limit
constexpr std::size_t longest_name = 1024;

struct TypeInfo {
    Type type;
    std::string_view file_name, long_name;
    std::int64_t size;
};
constexpr TypeInfo types[] = {{Type::float32, "F32", "float32", 4},
                              {Type::bfloat16, "BF16", "bfloat16", 2},
                              {Type::float16, "F16", "float16", 2}};

// A name from a file, fit for one line of an error message.
std::string printable(std::string_view name) {
    std::string text;
    for (const char c : name.substr(0, 100)) text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
    return name.size() > 100 ? text + "..." : text;
}

// Parses JSON in which no object names a key twice (the usual parser keeps the last silently) and nothing nests deeply
// (printing recurses).
json parse_strictly(std::string_view text, const std::string& path) {
    std::vector<std::set<std::string>> open_objects;
    const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
        FENWICK_CHECK(depth <= 8, "{}: the header nests deeper than any tensor's entry does", path);
        if (event == json::parse_event_t::object_start) open_objects.emplace_back();
        if (event == json::parse_event_t::object_end) open_objects.pop_back();
        if (event == json::parse_event_t::key) {
            const auto& key = parsed.get_ref<const std::string&>();
            FENWICK_CHECK(open_objects.back().insert(key).second, "{}: the header names '{}' twice", path, printable(key));
        }
        return true;
    };
    try {
        return json::parse(text.begin(), text.end(), check);
    } catch (const json::exception& error) {
        fail("{}: the header is not JSON ({})", path, printable(error.what()));
    }
}

// A non-negative whole number; floats, negative numbers and anything else are refused.
std::uint64_t whole_number(const json& value, std::string_view what, const std::string& name, const std::string& path) {
    FENWICK_CHECK(value.is_number_unsigned(), "{}: tensor '{}': {} is {}; a whole number of at least 0 is needed", path, name, what,
                  printable(value.dump(-1, ' ', false, json::error_handler_t::replace)));
    return value.get<std::uint64_t>();
}

Entry parse_entry(const std::string& key, const json& value, std::uint64_t data_bytes, const std::string& path) {
    Entry entry;
    entry.name = key;
    const std::string name = printable(key);
    FENWICK_CHECK(!key.empty() && key.size() <= longest_name && name == key.substr(0, 100) + (key.size() > 100 ? "..." : ""),
                  "{}: tensor name '{}' is empty, longer than {} bytes or has control characters", path, name, longest_name);
    FENWICK_CHECK(value.is_object() && value.size() == 3 && value.contains("dtype") && value.contains("shape") &&
                      value.contains("data_offsets"),
                  "{}: tensor '{}' must have exactly dtype, shape and data_offsets", path, name);
    const json &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
    const std::string dtype_name =
        dtype.is_string() ? printable(dtype.get<std::string>()) : dtype.dump(-1, ' ', false, json::error_handler_t::replace);
    const auto* type =
        std::find_if(std::begin(types), std::end(types), [&](const TypeInfo& info) { return info.file_name == dtype_name; });
    FENWICK_CHECK(dtype.is_string() && type != std::end(types), "{}: tensor '{}' has dtype {}; F32, BF16 and F16 can be read", path,
                  name, printable(dtype_name));
    entry.type = type->type;
    FENWICK_CHECK(shape.is_array() && shape.size() <= 8, "{}: tensor '{}': shape must be a list of at most 8 sizes", path, name);
    const auto size = static_cast<std::uint64_t>(type->size);
    std::uint64_t bytes = size;
    bool empty = false;
    for (const json& element : shape) {
        const std::uint64_t side = whole_number(element, "a size in its shape", name, path);
        // More elements than the file has bytes cannot be; checked before the product is formed, so it never overflows.
        FENWICK_CHECK(side <= data_bytes && (side == 0 || bytes <= data_bytes / side),
                      "{}: tensor '{}' with a size of {} in its shape does not fit into the {} bytes of values", path, name, side,
                      data_bytes);
        empty = empty || side == 0;
        bytes *= std::max<std::uint64_t>(side, 1);
        entry.shape.push_back(static_cast<std::int64_t>(side));
    }
    if (empty) bytes = 0;
    FENWICK_CHECK(offsets.is_array() && offsets.size() == 2, "{}: tensor '{}': data_offsets must be two numbers", path, name);
    entry.begin = whole_number(offsets[0], "data_offsets", name, path);
    entry.end = whole_number(offsets[1], "data_offsets", name, path);
    FENWICK_CHECK(entry.begin <= entry.end, "{}: tensor '{}' ends at {}, before it begins at {}", path, name, entry.end, entry.begin);
    FENWICK_CHECK(entry.end <= data_bytes, "{}: tensor '{}' ends at byte {} of the values, but only {} follow the header (truncated?)",
                  path, name, entry.end, data_bytes);
    FENWICK_CHECK(entry.end - entry.begin == bytes, "{}: tensor '{}' has {} bytes, its shape {} of {} needs {}", path, name,
                  entry.end - entry.begin, to_string(entry.shape), dtype_name, bytes);
    return entry;
}

// Values in the file's type, from float32.
std::vector<std::uint16_t> halves(const std::vector<float>& values, Type type, const std::string& name) {
    std::vector<std::uint16_t> result(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        result[i] = type == Type::bfloat16 ? to_bfloat16(values[i]) : to_float16(values[i]);
        FENWICK_CHECK(type == Type::bfloat16 || !std::isfinite(values[i]) || std::isfinite(from_float16(result[i])),
                      "tensor '{}' holds {}, beyond float16's 65504; export as bfloat16 or float32", name, values[i]);
    }
    return result;
}

}  // namespace

std::string_view name_of(Type type) { return types[static_cast<std::size_t>(type)].file_name; }
std::int64_t size_of(Type type) { return types[static_cast<std::size_t>(type)].size; }

Type type_from(std::string_view name) {
    for (const auto& info : types)
        if (info.long_name == name) return info.type;
    fail("dtype is '{}'; use float32, bfloat16 or float16", name);
}

std::uint16_t to_bfloat16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value)) return static_cast<std::uint16_t>((word >> 16) | 0x40u);
    return static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

float from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t to_float16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);   // NaN
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
    if (magnitude < 0x38800000u) {
        // Below 2^-14 the spacing is 2^-24: adding 2^-24 * 2^23 = 0.5 makes the hardware round to it.
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5f)));
    }
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float from_float16(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude < 0x400u) {
        const float value = static_cast<float>(magnitude) * 0x1.0p-24f;
        return sign != 0 ? -value : value;
    }
    return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

std::vector<Entry> parse_header(std::string_view header, std::uint64_t data_bytes, const std::string& path) {
    const json parsed = parse_strictly(header, path);
    FENWICK_CHECK(parsed.is_object(), "{}: the header must be a JSON object", path);
    std::vector<Entry> entries;
    for (const auto& [key, value] : parsed.items()) {
        if (key == "__metadata__") {
            FENWICK_CHECK(value.is_object(), "{}: __metadata__ must be an object", path);
            continue;
        }
        entries.push_back(parse_entry(key, value, data_bytes, path));
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
        return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    std::uint64_t covered = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
        FENWICK_CHECK(entries[i].begin >= covered, "{}: tensor '{}' begins at byte {}, inside '{}', which ends at {}", path,
                      printable(entries[i].name), entries[i].begin, i > 0 ? printable(entries[i - 1].name) : "the header", covered);
        FENWICK_CHECK(entries[i].begin == covered, "{}: bytes {} to {} before tensor '{}' belong to none", path, covered,
                      entries[i].begin, printable(entries[i].name));
        covered = entries[i].end;
    }
    FENWICK_CHECK(covered == data_bytes, "{}: {} bytes of values, but the tensors take {}", path, data_bytes, covered);
    return entries;
}

File File::open(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    FENWICK_CHECK(stream.good(), "{}: cannot be opened: {}", path, std::strerror(errno));
    stream.seekg(0, std::ios::end);
    const auto end = static_cast<std::int64_t>(stream.tellg());
    FENWICK_CHECK(stream.good() && end >= 0, "{}: is not a regular file", path);
    const auto size = static_cast<std::uint64_t>(end);
    FENWICK_CHECK(size >= 8, "{}: has {} bytes; a safetensors file begins with 8 bytes of header length", path, size);
    stream.seekg(0);
    std::uint64_t length = 0;
    stream.read(reinterpret_cast<char*>(&length), 8);
    FENWICK_CHECK(length <= largest_header, "{}: claims a header of {} bytes; at most {} are allowed (is it a safetensors file?)", path,
                  length, largest_header);
    FENWICK_CHECK(length <= size - 8, "{}: claims a header of {} bytes, but only {} follow (truncated?)", path, length, size - 8);
    std::string header(length, '\0');
    stream.read(header.data(), static_cast<std::streamsize>(length));
    FENWICK_CHECK(stream.good(), "{}: the header cannot be read", path);
    File file;
    file.path_ = path;
    file.data_offset_ = 8 + length;
    file.entries_ = parse_header(header, size - file.data_offset_, path);
    return file;
}

Tensor File::read(const Entry& entry) const {
    std::ifstream stream(path_, std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(data_offset_ + entry.begin));
    Tensor tensor = Tensor::empty(entry.shape, DType::float32);
    const auto count = static_cast<std::size_t>(tensor.count());
    auto* values = tensor.as<float>();
    const auto read_bytes = [&](void* to, std::size_t bytes) {
        stream.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
        FENWICK_CHECK(stream.good() || bytes == 0, "{}: tensor '{}' cannot be read in full", path_, printable(entry.name));
    };
    if (entry.type == Type::float32) {
        read_bytes(values, 4 * count);
        return tensor;
    }
    std::vector<std::uint16_t> block(std::min<std::size_t>(count, 1 << 20));
    for (std::size_t first = 0; first < count; first += block.size()) {
        const std::size_t n = std::min(block.size(), count - first);
        read_bytes(block.data(), 2 * n);
        for (std::size_t i = 0; i < n; ++i)
            values[first + i] = entry.type == Type::bfloat16 ? from_bfloat16(block[i]) : from_float16(block[i]);
    }
    return tensor;
}

void write(const std::string& path, const std::vector<NamedTensor>& tensors, Type type) {
    nlohmann::ordered_json header;
    header["__metadata__"]["format"] = "pt";  // what transformers looks for
    std::uint64_t offset = 0;
    for (const auto& [name, value] : tensors) {
        FENWICK_CHECK(!header.contains(name), "{}: tensor '{}' is given twice", path, name);
        const std::uint64_t end = offset + static_cast<std::uint64_t>(value.count() * size_of(type));
        header[name] = {{"dtype", name_of(type)}, {"shape", value.shape()}, {"data_offsets", {offset, end}}};
        offset = end;
    }
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');  // values begin at a multiple of 8 bytes
    const std::string temporary = path + ".tmp";
    try {
        std::ofstream stream(temporary, std::ios::binary | std::ios::trunc);
        FENWICK_CHECK(stream.good(), "{}: cannot be written: {}", path, std::strerror(errno));
        const auto put = [&](const void* bytes, std::size_t count) {
            stream.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count));
            FENWICK_CHECK(stream.good(), "{}: cannot be written: {}", path, std::strerror(errno));
        };
        const std::uint64_t length = text.size();
        put(&length, 8);
        put(text.data(), text.size());
        for (const auto& [name, value] : tensors) {
            const auto values = value.to_vector<float>();
            if (type == Type::float32) {
                put(values.data(), 4 * values.size());
            } else {
                const auto rounded = halves(values, type, name);
                put(rounded.data(), 2 * rounded.size());
            }
        }
        stream.flush();
        FENWICK_CHECK(stream.good(), "{}: cannot be written: {}", path, std::strerror(errno));
        stream.close();
        publish_file(temporary, path);
    } catch (...) {
        std::remove(temporary.c_str());
        throw;
    }
}

}  // namespace fenwick::model::safetensors
