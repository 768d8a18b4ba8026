#include "base/sha256.h"

#include <bit>
#include <cstring>
#include <fstream>
#include <vector>

#include "base/error.h"

namespace fenwick {
namespace {

// FIPS 180-4, section 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> round_constants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

}  // namespace

// FIPS 180-4, section 5.3.3: the first 32 bits of the fractional parts of the square roots of the first 8 primes.
Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::block(const std::uint8_t* data) {
    std::array<std::uint32_t, 64> schedule;
    for (std::size_t i = 0; i < 16; ++i)
        schedule[i] = (std::uint32_t{data[4 * i]} << 24) | (std::uint32_t{data[4 * i + 1]} << 16) |
                      (std::uint32_t{data[4 * i + 2]} << 8) | std::uint32_t{data[4 * i + 3]};
    for (std::size_t i = 16; i < 64; ++i) {
        const std::uint32_t a = schedule[i - 15], b = schedule[i - 2];
        schedule[i] = schedule[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + schedule[i - 7] +
                      (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t i = 0; i < 64; ++i) {
        const std::uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) +
                                    round_constants[i] + schedule[i];
        const std::uint32_t second =
            (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + first;
        d = c;
        c = b;
        b = a;
        a = first + second;
    }
    const std::array<std::uint32_t, 8> sums = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state_[i] += sums[i];
}

void Sha256::update(const void* data, std::size_t bytes) {
    auto* next = static_cast<const std::uint8_t*>(data);
    std::size_t filled = total_ % 64;
    total_ += bytes;
    if (filled > 0) {
        const std::size_t taken = std::min(bytes, 64 - filled);
        std::memcpy(pending_.data() + filled, next, taken);
        next += taken;
        bytes -= taken;
        if (filled + taken < 64) return;
        block(pending_.data());
    }
    for (; bytes >= 64; next += 64, bytes -= 64) block(next);
    if (bytes > 0) std::memcpy(pending_.data(), next, bytes);
}

std::array<std::uint8_t, 32> Sha256::digest() {
    const std::uint64_t bits = total_ * 8;
    // A one bit, zeros up to 8 bytes before the end of a block, the length in bits.
    std::array<std::uint8_t, 72> padding{0x80};
    const std::size_t zeros_end = (total_ % 64 < 56 ? 56 : 120) - total_ % 64;
    for (std::size_t i = 0; i < 8; ++i) padding[zeros_end + i] = static_cast<std::uint8_t>(bits >> (56 - 8 * i));
    update(padding.data(), zeros_end + 8);
    std::array<std::uint8_t, 32> result;
    for (std::size_t i = 0; i < 32; ++i) result[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return result;
}

std::string Sha256::hex() {
    std::string text;
    for (const std::uint8_t byte : digest()) text += fmt::format("{:02x}", byte);
    return text;
}

std::string sha256_hex(std::string_view bytes) {
    Sha256 hash;
    hash.update(bytes.data(), bytes.size());
    return hash.hex();
}

std::string sha256_of_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    FENWICK_CHECK(file.is_open(), "{}: cannot be opened: {}", path, std::strerror(errno));
    Sha256 hash;
    std::vector<char> block(1 << 20);
    while (file) {
        file.read(block.data(), static_cast<std::streamsize>(block.size()));
        hash.update(block.data(), static_cast<std::size_t>(file.gcount()));
    }
    FENWICK_CHECK(file.eof(), "{}: cannot be read: {}", path, std::strerror(errno));
    return hash.hex();
}

}  // namespace fenwick
