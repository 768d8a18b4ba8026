// UTF-8, as far as tokenizing and messages need it.
#pragma once

#include <cstdint>
#include <string_view>

namespace fenwick {

// Bytes of the valid UTF-8 character at the start of `text` (1 to 4), or 0 where there is none: a stray continuation
// byte, an overlong form, a surrogate, a value past U+10FFFF or a cut character (RFC 3629, section 4).
constexpr std::size_t utf8_length(std::string_view text) {
    const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const auto continues = [&](std::size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
    const unsigned first = byte(0), second = byte(1);
    if (text.empty()) return 0;
    if (first < 0x80) return 1;
    if (first < 0xc2) return 0;
    if (first < 0xe0) return continues(1) ? 2 : 0;
    if (first < 0xf0) {
        const bool in_range = continues(1) && !(first == 0xe0 && second < 0xa0) && !(first == 0xed && second > 0x9f);
        return in_range && continues(2) ? 3 : 0;
    }
    if (first < 0xf5) {
        const bool in_range = continues(1) && !(first == 0xf0 && second < 0x90) && !(first == 0xf4 && second > 0x8f);
        return in_range && continues(2) && continues(3) ? 4 : 0;
    }
    return 0;
}

// The code point of a valid character of `length` bytes (what utf8_length gave for it).
constexpr char32_t utf8_code_point(std::string_view text, std::size_t length) {
    const auto byte = [&](std::size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[i])); };
    switch (length) {
        case 1: return byte(0);
        case 2: return (byte(0) & 0x1f) << 6 | (byte(1) & 0x3f);
        case 3: return (byte(0) & 0x0f) << 12 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f);
        default: return (byte(0) & 0x07) << 18 | (byte(1) & 0x3f) << 12 | (byte(2) & 0x3f) << 6 | (byte(3) & 0x3f);
    }
}

// Bytes of valid UTF-8 at the start of `text`.
constexpr std::size_t utf8_prefix(std::string_view text) {
    std::size_t at = 0;
    while (at < text.size()) {
        if (static_cast<unsigned char>(text[at]) < 0x80) {
            ++at;
            continue;
        }
        const std::size_t length = utf8_length(text.substr(at, 4));
        if (length == 0) break;
        at += length;
    }
    return at;
}

// Unicode's White_Space.
constexpr bool is_white_space(char32_t c) {
    return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

// The white space that separates words: ASCII's, as in the C locale.
constexpr bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

}  // namespace fenwick
