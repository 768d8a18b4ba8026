#include "data/regex.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;

#ifdef FENWICK_HAVE_PCRE2

std::vector<std::string> matches(const Regex& regex, std::string_view text) {
    Regex::Matcher matcher(regex);
    std::vector<std::string> found;
    Regex::Matcher::Match match;
    for (std::size_t from = 0; matcher.find(text, from, false, match) == Regex::Matcher::Result::match; from = match.end)
        found.emplace_back(text.substr(match.begin, match.end - match.begin));
    return found;
}
std::vector<std::string> matches(const std::string& pattern, std::string_view text) { return matches(Regex(pattern), text); }

TEST(Regex, ReadsUnicodeProperties) {
    EXPECT_THAT(matches(R"(\p{L}+|\p{N}+)", "caf\u00e9 \u0663\u00bd\u2163 \u65e5\u672c"),
                ElementsAre("caf\u00e9", "\u0663\u00bd\u2163", "\u65e5\u672c"));
    EXPECT_THAT(matches(R"(\P{L})", "a1"), ElementsAre("1"));
    EXPECT_THAT(matches(R"(\p{^L})", "a1"), ElementsAre("1"));
    EXPECT_THAT(matches(R"([^\s\p{L}]+)", "a !? b"), ElementsAre("!?"));
    // Scripts are meant, not script extensions: U+3001 is used with Han and is not of it.
    EXPECT_THAT(matches(R"(\p{Han}+)", "\u65e5\u3001\u672c"), ElementsAre("\u65e5", "\u672c"));
    // White space is Unicode's: U+0085 and U+3000, not U+180E.
    EXPECT_THAT(matches(R"(\s)", " \u0085\u3000\u180e\u200b"), ElementsAre(" ", "\u0085", "\u3000"));
    EXPECT_THAT(matches(R"((?i:'s|'T))", "'S 's 't '\u017f"), ElementsAre("'S", "'s", "'t", "'\u017f"));
    EXPECT_THAT(matches(R"(\u00e9|\x41|\x{1F600}|\/)", "\u00e9A\U0001F600/"), ElementsAre("\u00e9", "A", "\U0001F600", "/"));
    EXPECT_THAT(matches(R"(a.)", "a\nab"), ElementsAre("ab"));
    EXPECT_THAT(matches(R"(x{2,3}|y{2}|[^a]?+b)", "xxxx yy bab"), ElementsAre("xxx", "yy", " b"));
    EXPECT_THAT(matches(Regex::literal(".+[\u00e9]"), "a.+[\u00e9]b"), ElementsAre(".+[\u00e9]"));
    EXPECT_THAT(matches(Regex::word_character(), "a-_\u0301 7\u24d0"), ElementsAre("a", "_", "\u0301", "7", "\u24d0"));
}

// Whether what follows could change the match.
TEST(Regex, KnowsWhatMoreTextCouldChange) {
    using Result = Regex::Matcher::Result;
    const auto result = [](const std::string& pattern, std::string_view text, std::size_t from) {
        const Regex regex(pattern);
        Regex::Matcher matcher(regex);
        Regex::Matcher::Match match;
        return matcher.find(text, from, true, match);
    };
    EXPECT_EQ(result(R"(\p{L}+)", "abc", 0), Result::open);
    EXPECT_EQ(result(R"(\p{L}+)", "abc ", 0), Result::match);
    EXPECT_EQ(result(R"(\p{L}+)", "   ", 0), Result::open);  // a letter may follow
    EXPECT_EQ(result(R"(\s+(?!\S)|\s+)", "  ", 0), Result::open);
    EXPECT_EQ(result(R"(\s+(?!\S)|\s+)", "  a", 0), Result::match);
    EXPECT_EQ(result(R"(a(?=bc)|a)", "ab", 0), Result::open);
    EXPECT_EQ(result(R"(a(?=bc)|a)", "ax", 0), Result::match);
    EXPECT_EQ(result(R"(a(?!bc))", "ab", 0), Result::open);
    EXPECT_EQ(result(R"(ab|abc)", "ab", 0), Result::match);
    EXPECT_EQ(result(R"(abc|ab)", "ab", 0), Result::open);
    EXPECT_EQ(result(R"(x{1,3})", "xxx", 0), Result::match);
    EXPECT_EQ(result(R"((?i:'s))", "'", 0), Result::open);
    EXPECT_TRUE(Regex(R"((?<=a)b)").looks_behind());
    EXPECT_TRUE(Regex(R"((?<!a)b)").looks_behind());
    EXPECT_FALSE(Regex(R"(a(?=b)|c(?!d))").looks_behind());
}

// What the dialects read differently is named, what is wrong explained.
TEST(Regex, RefusesByName) {
    const std::vector<std::pair<std::string, std::string>> refused = {
        {R"(a\w+)", R"('\w' at byte 1 is not supported)"},
        {R"(\bx)", R"('\b' at byte 0)"},
        {R"(^a)", "'^' at byte 0"},
        {R"(a$)", "'$' at byte 1"},
        {R"(\h)", R"('\h')"},
        {R"((a)\1)", R"('\1')"},
        {R"([a[b]])", "'[' at byte 2"},
        {R"([a&&b])", "'&&' at byte 2"},
        {R"([]a])", "']' at byte 1"},
        {R"(a{2}+)", "'{2}+' at byte 1"},
        {R"(a{,3})", "'{,3}' at byte 1"},
        {R"((?m:a))", "'(?m:' at byte 0"},
        {R"((?<n>a))", "'(?<n' at byte 0"},
        {R"((?R))", "'(?R)' at byte 0"},
        {R"((*FAIL))", "'(*' at byte 0"},
        {R"(\x8)", R"('\x8')"},
        {R"(\xE9)", R"('\xE9')"},
        {R"(\u12)", R"('\u12')"},
        {R"(\p{Alphabetic})", "unknown property"},
        {R"(\pL)", R"('\pL')"},
        {R"(a\)", R"('\')"},
        {R"((a)", "missing closing parenthesis"},
        {R"([a)", "missing terminating ]"},
        {R"(*a)", "quantifier does not follow a repeatable item"},
        {R"((?<=a+)b)", "lookbehind assertion is not fixed length"},
        {std::string(20000, 'a'), "a pattern of 20000 bytes; at most 16384 are supported"},
        {std::string(1000, '(') + std::string(1000, ')'), "parentheses are too deeply nested"}};
    for (const auto& [pattern, message] : refused)
        EXPECT_THAT(error_of([&text = pattern] { Regex regex(text); }), HasSubstr(message)) << pattern.substr(0, 40);
    // Endless backtracking ends.
    const Regex endless(R"((a|a?)+\p{N})");
    Regex::Matcher matcher(endless);
    Regex::Matcher::Match match;
    EXPECT_THAT(error_of([&] { matcher.find(std::string(3000, 'a') + "c", 0, false, match); }),
                HasSubstr("fails on 3001 bytes of text: match limit exceeded"));
}

#else

TEST(Regex, SaysThatPcre2IsMissing) {
    EXPECT_THAT(error_of([] { Regex regex("a"); }),
                HasSubstr("need PCRE2, which this build was made without; install libpcre2-dev"));
}

#endif

}  // namespace
}  // namespace fenwick::data
