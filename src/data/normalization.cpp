#include "data/normalization.h"

#include <cstdlib>
#include <memory>

#include "base/error.h"
#include "base/utf8.h"

#ifdef FENWICK_HAVE_UTF8PROC
#include <utf8proc.h>
#endif

namespace fenwick::data {

bool starts_nfc_part(char32_t c) {
    // Stretches of starters with NFC_Quick_Check=Yes, which Unicode keeps stable. The order is that of frequency.
    constexpr struct {
        char32_t first, last;
    } stretches[] = {
        {0x0000, 0x02ff},    // Latin
        {0x2002, 0x20cf},    // punctuation, currency
        {0x3400, 0x4dbf},    // Han
        {0x4e00, 0x9fff},    // Han
        {0x3041, 0x3098},    // Hiragana
        {0x309b, 0x30ff},    // Katakana
        {0x3001, 0x3029},    // Han punctuation
        {0xac00, 0xd7a3},    // Hangul syllables
        {0x0388, 0x0482},    // Greek, Cyrillic
        {0x048a, 0x0590},    // Cyrillic, Armenian
        {0x2190, 0x2328},    // arrows, mathematics
        {0x2400, 0x2adb},    // boxes, shapes, symbols
        {0xff01, 0xffef},    // full width
        {0x1f000, 0x1faff},  // emoji
    };
    for (const auto& stretch : stretches)
        if (c >= stretch.first && c <= stretch.last) return true;
    return false;
}

#ifdef FENWICK_HAVE_UTF8PROC

namespace {

void normalize_part(std::string_view text, std::string& out) {
    utf8proc_uint8_t* made = nullptr;
    const utf8proc_ssize_t size =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                     &made, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(made, &std::free);
    FENWICK_CHECK(size >= 0, "NFC of {} bytes of text: {}", text.size(), utf8proc_errmsg(size));
    out.append(reinterpret_cast<const char*>(made), static_cast<std::size_t>(size));
}

// Calls use(begin, end, sure) for the parts of valid text one after another: [begin, end) is its own NFC where `sure`, else
// it has to be normalised, by itself.
template <class Use>
void for_each_nfc_part(std::string_view text, const Use& use) {
    const auto starts_part = [&](std::size_t at) {
        const std::size_t length = utf8_length(text.substr(at, 4));
        return length == 0 || starts_nfc_part(utf8_code_point(text.substr(at), length));
    };
    const auto behind = [&](std::size_t at) { return at + utf8_length(text.substr(at, 4)); };
    std::size_t done = 0, last = 0;  // `last`: the last character, which what follows may change
    for (std::size_t at = 0; at < text.size();) {
        if (starts_part(at)) {
            last = at;
            at = behind(at);
            continue;
        }
        use(done, last, true);
        while (at < text.size() && !starts_part(at)) at = behind(at);
        use(last, at, false);
        done = last = at;
    }
    use(done, text.size(), true);
}

}  // namespace

void check_normalization_is_built() {}

void append_nfc(std::string_view text, std::string& out) {
    for_each_nfc_part(text, [&](std::size_t begin, std::size_t end, bool sure) {
        if (sure)
            out.append(text, begin, end - begin);
        else
            normalize_part(text.substr(begin, end - begin), out);
    });
}

std::size_t nfc_prefix(std::string_view text) {
    text = text.substr(0, utf8_prefix(text));
    std::size_t normal = 0;  // where the last part begins
    bool equal = true;
    std::string part;
    for_each_nfc_part(text, [&](std::size_t begin, std::size_t end, bool sure) {
        if (!equal || begin == end) return;
        part.clear();
        if (!sure) normalize_part(text.substr(begin, end - begin), part);
        equal = sure || part == text.substr(begin, end - begin);
        if (!equal || !sure) {
            normal = equal && end < text.size() ? end : begin;
            return;
        }
        // Its last character is a part of its own.
        normal = end;
        do --normal;
        while ((text[normal] & 0xc0) == 0x80);
    });
    return normal;
}

#else

void check_normalization_is_built() {
    fail("NFC needs utf8proc, which this build was made without; install libutf8proc-dev and build again");
}
void append_nfc(std::string_view text, std::string& out) { out.append(text); }
std::size_t nfc_prefix(std::string_view) { return 0; }

#endif

}  // namespace fenwick::data
