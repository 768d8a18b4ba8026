// CRC-32, zlib's: checksums of what files hold.
#pragma once

#include <zlib.h>

#include <cstddef>
#include <cstdint>

namespace fenwick {

// Of `bytes` bytes that follow others whose checksum is `before`.
inline std::uint32_t crc32_of(const void* data, std::size_t bytes, std::uint32_t before = 0) {
    return static_cast<std::uint32_t>(crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

}  // namespace fenwick
