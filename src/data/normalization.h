// Unicode normalization form C.
#pragma once

#include <string>
#include <string_view>

namespace fenwick::data {

// Throws Error in a build without utf8proc.
void check_normalization_is_built();

// Appends the NFC of `text`, valid UTF-8, to `out`.
void append_nfc(std::string_view text, std::string& out);

// Bytes at the start of `text` that are their own NFC, whatever stands behind them or follows `text`. As far as is known at
// once: it ends before a character of starts_nfc_part, and before the first byte that is not UTF-8.
std::size_t nfc_prefix(std::string_view text);

// True for characters that NFC leaves as they are and never joins to what stands before them; what follows may be joined
// to them. Text may be parted in front of one: the parts' normal forms make the whole's. Not all such characters are known
// here, but those of most texts.
bool starts_nfc_part(char32_t c);

}  // namespace fenwick::data
