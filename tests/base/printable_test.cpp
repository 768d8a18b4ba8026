#include "base/printable.h"

#include <gtest/gtest.h>

namespace fenwick {
namespace {

TEST(Printable, TextOfAnyLanguageStays) {
    for (const std::string text : {"", "runs/a b/step_4.h5: 'x' \\n", "Ärger, \xe2\x82\xac, \xf0\x9f\x8c\xb2, \xc2\xa0"})
        EXPECT_EQ(printable(text), text);
}

TEST(Printable, ControlCharactersAreWritten) {
    EXPECT_EQ(printable("a\nb\tc\rd"), "a\\nb\\tc\\rd");
    EXPECT_EQ(printable(std::string("\0\x1b[31m\x7f", 7)), "\\x00\\x1b[31m\\x7f");
    EXPECT_EQ(printable("\xc2\x9b" "2J\xc2\x80\xc2\x9f"), "\\u009b2J\\u0080\\u009f");  // U+009B begins a sequence as ESC [ does
    for (int c = 0; c < 256; ++c)
        for (const char shown : printable(std::string(1, static_cast<char>(c)))) EXPECT_TRUE(shown >= ' ' && shown <= '~') << c;
}

TEST(Printable, BytesThatAreNotUtf8AreWritten) {
    EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
    EXPECT_EQ(printable("\x9b" "31m"), "\\x9b31m");
    EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
    EXPECT_EQ(printable("\xe2\x82"), "\\xe2\\x82");
}

}  // namespace
}  // namespace fenwick
