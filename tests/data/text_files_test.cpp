#include "data/text_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/files.h"
#include "base/random.h"
#include "base/sha256.h"
#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;

std::string read_text(const std::string& path, std::size_t step = 10007) {
    TextReader reader(path);
    std::string text, block(step, '\0');
    while (const std::size_t count = reader.read(block.data(), block.size())) {
        text.append(block, 0, count);
        if (count < block.size()) break;
    }
    EXPECT_EQ(reader.bytes_read(), size_of_file(path));
    EXPECT_EQ(reader.sha256(), sha256_of_file(path));
    return text;
}

std::string sample(std::size_t bytes) {
    Random random(1);
    std::string text;
    while (text.size() < bytes)
        text += std::string(1 + random.below(9), static_cast<char>('a' + random.below(26))) +
                (random.below(9) == 0 ? "\n" : " ");
    return text;
}

TEST(TextFiles, FoldersAreReadByNameWithoutHiddenFiles) {
    test::TemporaryFolder folder;
    fs::create_directories(folder / "in/b/deep");
    fs::create_directories(folder / "in/.git");
    for (const char* name :
         {"in/b.txt", "in/a.txt", "in/b/2", "in/b/10", "in/b/deep/x", "in/.hidden", "in/.git/config", "one", ".two"})
        test::write_text(folder / name, name);
    fs::create_symlink(folder / "one", folder / "in/c");
    std::vector<std::string> names;
    for (const auto& file : list_text_files({folder / "one", folder / "in", folder / ".two"})) {
        names.push_back(fs::path(file.path).lexically_relative(folder.path()).string());
        EXPECT_EQ(file.bytes, size_of_file(file.path));
        EXPECT_GT(file.modified, 0);
    }
    EXPECT_THAT(names, ElementsAre("one", "in/a.txt", "in/b/10", "in/b/2", "in/b/deep/x", "in/b.txt", "in/c", ".two"));
    fs::create_directory_symlink(folder / "in", folder / "in/b/up");
    EXPECT_THAT(error_of([&] { list_text_files({folder / "in"}); }), HasSubstr("in/b/up is a link to a folder"));
    fs::create_directories(folder / "empty/.git");
    EXPECT_EQ(error_of([&] { list_text_files({folder / "empty"}); }),
              folder / "empty" + std::string(" is a folder without a file in it"));
    EXPECT_EQ(error_of([&] { list_text_files({folder / "no"}); }), folder / "no" + std::string(": no such file"));
}

class Compressed : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, Compressed, testing::Values("gzip", "zstd", "xz"), [](const auto& info) { return info.param; });

TEST_P(Compressed, StreamsAreReadWholeOrRefused) {
    const std::string program = GetParam();
    if (std::system((program + " --version >/dev/null 2>&1").c_str()) != 0) GTEST_SKIP() << "no program " << program;
    test::TemporaryFolder folder;
    const std::string path = folder / "a.packed", text = sample(700000);
    const auto compress = [&](std::string_view part) {
        test::write_text(folder / "part", part);
        EXPECT_EQ(std::system(fmt::format("{} -c {} > {} 2>/dev/null", program, folder / "part", path).c_str()), 0);
        return read_file(path);
    };
    const std::string one = compress(text);
    if (const auto refusal = error_of([&] { TextReader{path}; });
        refusal.find("this build cannot read") != std::string::npos)
        GTEST_SKIP() << refusal;
    for (const std::size_t step : {std::size_t{1000}, std::size_t{262144}, std::size_t{1 << 20}})
        EXPECT_TRUE(read_text(path, step) == text) << step;
    // Several streams one after the other, an empty one among them
    const std::string empty = compress(""), tail = compress("tail");
    test::write_text(path, one + empty + tail + tail);
    EXPECT_TRUE(read_text(path) == text + "tailtail");
    test::write_text(path, empty);
    EXPECT_EQ(read_text(path), "");
    // Cut off anywhere after its mark, also in the second stream
    for (const std::size_t size : {std::size_t{8}, std::size_t{20}, one.size() / 2, one.size() - 1,
                                   one.size() + tail.size() / 2, one.size() + tail.size() - 1}) {
        test::write_text(path, (one + tail).substr(0, size));
        EXPECT_EQ(error_of([&] { read_text(path); }), path + ": the compressed data is cut off") << size;
    }
    // Damaged data is refused; gzip and xz always carry a checksum, and so does what the program zstd writes.
    Random random(2);
    for (int i = 0; i < 30; ++i) {
        std::string damaged = one;
        const auto at = 20 + random.below(one.size() - 40);
        damaged[at] = static_cast<char>(damaged[at] ^ (1 << random.below(8)));
        test::write_text(path, damaged);
        EXPECT_THAT(error_of([&] { read_text(path); }), HasSubstr(path + ": ")) << at;
    }
    if (program == "gzip") {
        test::write_text(path, one + std::string(1000, '\0'));
        EXPECT_TRUE(read_text(path) == text);
    }
    for (const std::string& tail : {std::string("something else that is longer than a header"), std::string("x")}) {
        test::write_text(path, one + tail);
        EXPECT_EQ(error_of([&] { read_text(path); }),
                  path + ": something that is not " + program + " follows its " + program + " data");
    }
}

TEST(TextFiles, PlainTextIsAnyBytes) {
    test::TemporaryFolder folder;
    for (const std::string& text : {std::string(), std::string("a"), std::string("\x1f"),
                                    std::string("\xFD"
                                                "7z"),
                                    std::string("BZh is a word"), std::string("\0\0\xff", 3), sample(600000)}) {
        test::write_text(folder / "a", text);
        EXPECT_TRUE(read_text(folder / "a") == text);
    }
}

TEST(TextFiles, ContainersAreRefusedByName) {
    test::TemporaryFolder folder;
    const std::string path = folder / "a";
    const auto refusal = [&](std::string_view bytes) {
        test::write_text(path, bytes);
        return error_of([&] { read_text(path); });
    };
    std::string tar(1024, '\0');
    tar.replace(257, 5, "ustar");
    EXPECT_EQ(refusal(tar), path +
                                " is a tar archive; unpack it and give the folder; text and JSON lines are read, plain or "
                                "compressed by gzip, zstd or xz");
    EXPECT_THAT(refusal("PK\x03\x04 and so on"), HasSubstr(path + " is a zip archive; text"));
    EXPECT_THAT(refusal("PAR1...."), HasSubstr("is a Parquet file"));
    EXPECT_THAT(refusal("BZh91AY&SY"), HasSubstr("is compressed by bzip2"));
    EXPECT_THAT(refusal("\x89HDF\r\n\x1a\n...."), HasSubstr("is an HDF5 file"));
    // Inside a compressed file too
    test::write_text(path, tar);
    if (std::system(fmt::format("gzip -c {0} > {0}.gz", path).c_str()) != 0) GTEST_SKIP() << "no program gzip";
    EXPECT_THAT(error_of([&] { read_text(path + ".gz"); }), HasSubstr(".gz is a tar archive"));
}

}  // namespace
}  // namespace fenwick::data
