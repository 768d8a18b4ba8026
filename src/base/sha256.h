// SHA-256 (FIPS 180-4): identities of tokenizers, data files and configurations.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fenwick {

class Sha256 {
public:
    Sha256();
    void update(const void* data, std::size_t bytes);
    std::array<std::uint8_t, 32> digest();  // ends the computation
    std::string hex();                      // 64 lower-case digits; ends the computation

private:
    void block(const std::uint8_t* data);
    std::array<std::uint32_t, 8> state_;
    std::array<std::uint8_t, 64> pending_{};
    std::uint64_t total_ = 0;
};

std::string sha256_hex(std::string_view bytes);
std::string sha256_of_file(const std::string& path);  // throws Error if it cannot be read

}  // namespace fenwick
