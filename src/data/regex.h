// Regular expressions over UTF-8, written as tokenizer.json files write them (Oniguruma's dialect), matched by PCRE2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace fenwick::data {

class Regex {
public:
    // Throws Error: bad syntax, a construct that the two libraries read differently (the message names it), or a build
    // without PCRE2.
    explicit Regex(const std::string& pattern);
    ~Regex();
    Regex(Regex&&) noexcept;
    static Regex literal(std::string_view text);
    static Regex word_character();  // Unicode's \w: letters, marks, decimal digits, connectors, joiners

    const std::string& pattern() const { return pattern_; }  // as given
    bool looks_behind() const;                               // whether a match may depend on text before it

    class Matcher;

private:
    struct Implementation;
    Regex(std::string pattern, const std::string& translated);
    std::string pattern_;
    std::unique_ptr<Implementation> implementation_;
};

// What one thread needs to match. The Regex must outlive it.
class Regex::Matcher {
public:
    explicit Matcher(const Regex& regex);
    ~Matcher();
    Matcher(Matcher&&) noexcept;

    struct Match {
        std::size_t begin = 0, end = 0;
    };
    enum class Result : std::uint8_t { match, none, open };
    // The first match at or after `from`. `text` must be valid UTF-8. With `more_follows`, open: more text at the end
    // could change the result (none, too, when text of the future could match). Throws Error where it takes too many
    // steps.
    Result find(std::string_view text, std::size_t from, bool more_follows, Match& match);

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace fenwick::data
