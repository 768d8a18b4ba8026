// The safetensors file format: 8 bytes of header length (little endian), a JSON header that names every tensor's dtype,
// shape and place, then the values. Source: the format's public description (huggingface/safetensors).
//
// Such files come from strangers: every length, offset, size, dtype and name is checked before it is used, and whatever
// does not fit is refused with the file, the tensor and what would be right.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/tensor.h"

namespace fenwick::model::safetensors {

enum class Type : std::uint8_t { float32, bfloat16, float16 };
std::string_view name_of(Type type);       // as in the files: "F32", "BF16", "F16"
Type type_from(std::string_view name);     // "float32", "bfloat16", "float16" (command line); throws Error
std::int64_t size_of(Type type);

struct Entry {
    std::string name;
    Type type = Type::float32;
    Shape shape;                        // [] is a single value
    std::uint64_t begin = 0, end = 0;   // bytes, from the end of the header
};

// Checks a header against the number of bytes that follow it, and returns its tensors in the order of their places.
// Tensors must cover those bytes exactly: no overlap, no gap, nothing behind the last. `path` is for errors.
std::vector<Entry> parse_header(std::string_view header, std::uint64_t data_bytes, const std::string& path);

class File {
public:
    static File open(const std::string& path);  // reads and checks the header
    const std::vector<Entry>& entries() const { return entries_; }
    // The tensor's values as float32 on the CPU (exact for all three types). Throws if `entry` cannot be read in full.
    Tensor read(const Entry& entry) const;

private:
    std::string path_;
    std::uint64_t data_offset_ = 0;
    std::vector<Entry> entries_;
};

struct NamedTensor {
    std::string name;
    Tensor value;  // floating, any device
};
// Writes the tensors in this order, converted to `type` (round to nearest even), with a temporary file first. A finite value
// that float16 cannot hold is an error that names the tensor.
void write(const std::string& path, const std::vector<NamedTensor>& tensors, Type type);

// Single values, for tests and for the functions above.
std::uint16_t to_bfloat16(float value);
std::uint16_t to_float16(float value);  // round to nearest even; too large becomes infinity
float from_bfloat16(std::uint16_t bits);
float from_float16(std::uint16_t bits);

}  // namespace fenwick::model::safetensors
