#include "base/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/utf8.h"

namespace fenwick {

std::string printable(std::string_view text) {
    std::string out;
    const auto append = std::back_inserter(out);
    while (!text.empty()) {
        const std::size_t length = utf8_length(text);
        const char32_t c = length > 0 ? utf8_code_point(text, length) : static_cast<unsigned char>(text.front());
        if (c == '\n') {
            out += "\\n";
        } else if (c == '\t') {
            out += "\\t";
        } else if (c == '\r') {
            out += "\\r";
        } else if (length == 0 || c < 0x20 || c == 0x7f) {
            fmt::format_to(append, "\\x{:02x}", static_cast<unsigned>(c));
        } else if (c >= 0x80 && c < 0xa0) {
            fmt::format_to(append, "\\u{:04x}", static_cast<unsigned>(c));
        } else {
            out += text.substr(0, length);
        }
        text.remove_prefix(std::max<std::size_t>(length, 1));
    }
    return out;
}

}  // namespace fenwick
