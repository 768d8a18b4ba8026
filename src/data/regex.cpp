#include "data/regex.h"

#include <algorithm>
#include <cctype>

#include "base/error.h"

#ifdef FENWICK_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

namespace fenwick::data {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }
bool is_name(char c) { return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

// Rewrites for PCRE2 what it spells differently, and refuses what it would silently read differently. What is left to
// PCRE2 it reads the same or refuses.
class Translation {
public:
    explicit Translation(std::string pattern) : in_(std::move(pattern)) {}

    std::string run() {
        while (at_ < in_.size()) {
            const char c = in_[at_];
            if (c == '\\')
                escape();
            else if (in_class_)
                class_character(c);
            else if (c == '[')
                open_class();
            else if (c == '(')
                group();
            else if (c == '{')
                interval();
            else if (c == '^' || c == '$')
                refuse(1);  // of lines, not of the text, in Oniguruma
            else
                take(1);
        }
        return std::move(out_);
    }

private:
    char next(std::size_t ahead) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
    void take(std::size_t count) {
        count = std::min(count, in_.size() - at_);
        out_.append(in_, at_, count);
        at_ += count;
    }
    [[noreturn]] void refuse(std::size_t length) const {
        fail("'{}' at byte {} is not supported", in_.substr(at_, length), at_);
    }

    void escape() {
        const char c = next(1);
        switch (c) {
            // PCRE2's \s has U+180E besides Unicode's white space.
            case 's':
                out_ += "\\p{wspace}", at_ += 2;
                return;
            case 'S':
                out_ += "\\P{wspace}", at_ += 2;
                return;
            case 'd':
            case 'D':
            case 'r':
            case 'n':
            case 't':
            case 'f':
                take(2);
                return;
            case 'p':
            case 'P':
                property();
                return;
            case 'u': {
                for (std::size_t i = 2; i < 6; ++i)
                    if (!is_hex(next(i))) refuse(6);
                out_ += "\\x{" + in_.substr(at_ + 2, 4) + "}";
                at_ += 6;
                return;
            }
            case 'x': {
                if (next(2) == '{') {
                    std::size_t end = 3;
                    while (is_hex(next(end))) ++end;
                    if (end == 3 || end > 11 || next(end) != '}') refuse(end + 1);
                    take(end + 1);
                    return;
                }
                // Two digits are a byte, which may be no character by itself.
                if (!is_hex(next(2)) || !is_hex(next(3)) || next(2) > '7') refuse(4);
                take(4);
                return;
            }
            default:
                if (static_cast<unsigned char>(c) >= 0x80 || !std::ispunct(static_cast<unsigned char>(c))) refuse(2);
                take(2);
        }
    }

    // Categories of one or two letters are the same in both; longer names are taken for scripts, which PCRE2 would read as
    // Script_Extensions.
    void property() {
        std::size_t begin = 3, end = 3;
        if (next(2) != '{') refuse(3);
        if (next(begin) == '^') end = ++begin;
        while (is_name(next(end))) ++end;
        if (end == begin || next(end) != '}') refuse(end + 1);
        out_ += in_.substr(at_, begin) + (end - begin > 2 ? "sc:" : "") + in_.substr(at_ + begin, end + 1 - begin);
        at_ += end + 1;
    }

    void open_class() {
        in_class_ = true;
        take(next(1) == '^' ? 2 : 1);
        if (next(0) == ']') refuse(1);
    }
    void class_character(char c) {
        if (c == '[' || (c == '&' && next(1) == '&')) refuse(c == '[' ? 1 : 2);  // nested classes, intersections
        if (c == ']') in_class_ = false;
        take(1);
    }

    void group() {
        if (next(1) == '*') refuse(2);
        if (next(1) != '?') return take(1);
        for (const std::string_view known : {"(?:", "(?=", "(?!", "(?>", "(?i:", "(?<=", "(?<!"})
            if (std::string_view(in_).substr(at_, known.size()) == known) return take(known.size());
        refuse(4);
    }

    void interval() {
        std::size_t end = 1;
        while (is_digit(next(end))) ++end;
        const bool from = end > 1;
        if (next(end) == ',') ++end;
        while (is_digit(next(end))) ++end;
        if (!from || next(end) != '}') refuse(end + 1);
        // Neither possessive nor lazy in Oniguruma, but a repetition of the repetition.
        if (next(end + 1) == '+' || next(end + 1) == '?') refuse(end + 2);
        take(end + 1);
    }

    std::string in_, out_;
    std::size_t at_ = 0;
    bool in_class_ = false;
};

std::string checked_length(std::string_view pattern) {
    constexpr std::size_t longest = 1 << 14;
    FENWICK_CHECK(pattern.size() <= longest, "a pattern of {} bytes; at most {} are supported", pattern.size(), longest);
    return std::string(pattern);
}

std::string quoted(std::string_view text) {
    std::string pattern;
    for (const char c : text) {
        if (static_cast<unsigned char>(c) < 0x80 && std::ispunct(static_cast<unsigned char>(c))) pattern += '\\';
        pattern += c;
    }
    return pattern;
}

}  // namespace

#ifdef FENWICK_HAVE_PCRE2

namespace {

std::string message_of(int code) {
    unsigned char text[256] = {};
    pcre2_get_error_message(code, text, sizeof(text));
    return reinterpret_cast<const char*>(text);
}

template <auto release>
struct Release {
    template <class T>
    void operator()(T* object) const {
        release(object);
    }
};
template <class T, auto release>
using Handle = std::unique_ptr<T, Release<release>>;

}  // namespace

struct Regex::Implementation {
    Handle<pcre2_code, pcre2_code_free> code;
    bool compiled = false;  // to machine code
};

struct Regex::Matcher::Implementation {
    const Regex::Implementation* regex;
    Handle<pcre2_match_data, pcre2_match_data_free> data;
    Handle<pcre2_match_context, pcre2_match_context_free> context;
    Handle<pcre2_jit_stack, pcre2_jit_stack_free> stack;
};

Regex::Regex(std::string pattern, const std::string& translated)
    : pattern_(std::move(pattern)), implementation_(std::make_unique<Implementation>()) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    Handle<pcre2_compile_context, pcre2_compile_context_free> context(pcre2_compile_context_create(nullptr));
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    implementation_->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                              PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset,
                                              context.get()));
    FENWICK_CHECK(implementation_->code != nullptr, "{}", message_of(error));
    // Without: slower, the same.
    implementation_->compiled =
        pcre2_jit_compile(implementation_->code.get(), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD) == 0;
}

bool Regex::looks_behind() const {
    std::uint32_t characters = 0;
    pcre2_pattern_info(implementation_->code.get(), PCRE2_INFO_MAXLOOKBEHIND, &characters);
    return characters > 0;
}

Regex::Matcher::Matcher(const Regex& regex) : implementation_(std::make_unique<Implementation>()) {
    Implementation& self = *implementation_;
    self.regex = regex.implementation_.get();
    self.data.reset(pcre2_match_data_create(1, nullptr));
    self.context.reset(pcre2_match_context_create(nullptr));
    pcre2_set_heap_limit(self.context.get(), 64 << 10);  // KiB
    if (self.regex->compiled) {
        self.stack.reset(pcre2_jit_stack_create(32 << 10, 1 << 20, nullptr));
        pcre2_jit_stack_assign(self.context.get(), nullptr, self.stack.get());
    }
}

Regex::Matcher::Result Regex::Matcher::find(std::string_view text, std::size_t from, bool more_follows, Match& match) {
    Implementation& self = *implementation_;
    const std::uint32_t options = more_follows ? PCRE2_PARTIAL_HARD : 0;
    const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    const int result = self.regex->compiled ? pcre2_jit_match(self.regex->code.get(), subject, text.size(), from, options,
                                                              self.data.get(), self.context.get())
                                            : pcre2_match(self.regex->code.get(), subject, text.size(), from,
                                                          options | PCRE2_NO_UTF_CHECK, self.data.get(), self.context.get());
    if (result == PCRE2_ERROR_NOMATCH) return more_follows ? Result::open : Result::none;
    if (result == PCRE2_ERROR_PARTIAL) return Result::open;
    FENWICK_CHECK(result >= 0, "a regular expression of the tokenizer fails on {} bytes of text: {}", text.size(),
                  message_of(result));
    const PCRE2_SIZE* place = pcre2_get_ovector_pointer(self.data.get());
    match = {place[0], place[1]};
    return Result::match;
}

#else

struct Regex::Implementation {};
struct Regex::Matcher::Implementation {};

Regex::Regex(std::string, const std::string&) {
    fail("regular expressions need PCRE2, which this build was made without; install libpcre2-dev and build again");
}
bool Regex::looks_behind() const { return true; }
Regex::Matcher::Matcher(const Regex&) {}
Regex::Matcher::Result Regex::Matcher::find(std::string_view, std::size_t, bool, Match&) { return Result::none; }

#endif

Regex::Regex(const std::string& pattern) : Regex(pattern, Translation(checked_length(pattern)).run()) {}
Regex Regex::literal(std::string_view text) { return Regex(std::string(text), quoted(checked_length(text))); }
Regex Regex::word_character() {
    const std::string pattern = "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]";
    return Regex(pattern, pattern);
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex::Matcher::~Matcher() = default;
Regex::Matcher::Matcher(Matcher&&) noexcept = default;

}  // namespace fenwick::data
