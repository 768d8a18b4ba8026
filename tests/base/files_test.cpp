#include "base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/sha256.h"
#include "support/temporary_folder.h"

namespace fenwick {
namespace {

using test::error_of;
using testing::HasSubstr;

TEST(Files, WritesReadsAndReplaces) {
    test::TemporaryFolder folder;
    const std::string path = folder / "a.bin";
    const std::string large(300000, 'x'), binary("\0\xff\n\r", 4);
    for (const std::string& bytes : {large, binary, std::string()}) {
        write_file_atomically(path, bytes);
        EXPECT_EQ(read_file(path), bytes);
    }
    EXPECT_EQ(folder.count(), 1u);
}

TEST(Files, ALockHasOneHolder) {
    test::TemporaryFolder folder;
    FileLock second;
    {
        FileLock first;
        EXPECT_TRUE(first.acquire(folder / ".lock"));
        EXPECT_FALSE(second.acquire(folder / ".lock"));
        EXPECT_TRUE(second.acquire(folder / "other"));
    }
    EXPECT_TRUE(second.acquire(folder / ".lock"));
    EXPECT_EQ(error_of([&] { second.acquire(folder / "no/.lock"); }), folder / "no/.lock" + std::string(": cannot be opened: no such file"));
}

TEST(Files, SizesOfRegularFilesOnly) {
    test::TemporaryFolder folder;
    test::write_text(folder / "a", "four");
    EXPECT_EQ(size_of_file(folder / "a"), 4);
    EXPECT_EQ(error_of([&] { size_of_file(folder / "b"); }), folder / "b" + std::string(": no such file"));
    EXPECT_EQ(error_of([&] { size_of_file(folder.path()); }), folder.path() + " is a folder; a file is needed");
    EXPECT_THAT(error_of([] { size_of_file("/dev/zero"); }), HasSubstr("/dev/zero is a device"));
}

TEST(Files, OutputsDoNotReplaceInputsUnderAnyName) {
    test::TemporaryFolder folder;
    test::write_text(folder / "in", "x");
    test::write_text(folder / "out.tmp", "x");
    std::filesystem::create_symlink(folder / "in", folder / "link");
    EXPECT_EQ(error_of([&] { check_output(folder / "new", {folder / "in", folder / "absent"}); }), "");
    for (const char* output : {"in", "./in", "link"})
        EXPECT_THAT(error_of([&] { check_output(folder / output, {folder / "absent", folder / "in"}); }),
                    HasSubstr("the output would replace an input"));
    EXPECT_THAT(error_of([&] { check_output(folder / "out", {folder / "out.tmp"}); }), HasSubstr("would replace an input"));
}

TEST(Files, SaysWhatIsWrong) {
    test::TemporaryFolder folder;
    EXPECT_EQ(error_of([&] { read_file(folder / "a"); }), folder / "a" + std::string(": no such file"));
    EXPECT_EQ(error_of([&] { read_file(folder.path()); }), folder.path() + " is a folder; a file is needed");
    EXPECT_EQ(error_of([&] { write_file_atomically(folder / "no/a", "x"); }),
              folder / "no/a" + std::string(": cannot be written: its folder does not exist"));
    EXPECT_EQ(error_of([&] { write_file_atomically("/proc/a", "x"); }), "/proc/a: cannot be written: no files can be made in /proc");
    EXPECT_EQ(error_of([&] { make_folder("/proc/a/b/c"); }), "/proc/a/b/c: the folder cannot be made: no files can be made in /proc");
    EXPECT_EQ(error_of([&] { make_folder("/dev/null"); }), "/dev/null: the folder cannot be made: Not a directory");
    std::filesystem::create_directory(folder / "d");
    EXPECT_EQ(error_of([&] { make_folder(folder / "d"); }), "");
    EXPECT_THAT(error_of([&] { write_file_atomically(folder / "d", "x"); }), HasSubstr("/d: cannot be put in place: "));
    EXPECT_EQ(error_of([&] { publish_file(folder / "none.tmp", folder / "none"); }), folder / "none.tmp" + std::string(": no such file"));
    EXPECT_EQ(folder.count(), 1u) << "no temporary file stays";
}

TEST(Files, LinksAreFollowedAndDevicesStay) {
    test::TemporaryFolder folder;
    write_file_atomically(folder / "file", "before");
    std::filesystem::create_symlink("file", folder / "link");
    std::filesystem::create_symlink(folder / "later", folder / "dangling");
    write_file_atomically(folder / "link", "behind the link");
    write_file_atomically(folder / "dangling", "made");
    EXPECT_TRUE(std::filesystem::is_symlink(folder / "link") && std::filesystem::is_symlink(folder / "dangling"));
    EXPECT_EQ(read_file(folder / "file"), "behind the link");
    EXPECT_EQ(read_file(folder / "later"), "made");

    const std::string pipe = folder / "pipe";
    ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
    const int reader = ::open(pipe.c_str(), O_RDWR | O_NONBLOCK);
    write_file_atomically(pipe, "through");
    char text[16];
    EXPECT_EQ(std::string(text, static_cast<std::size_t>(::read(reader, text, sizeof(text)))), "through");
    ::close(reader);
    write_file_atomically(folder / "temporary", "x");
    EXPECT_EQ(error_of([&] { publish_file(folder / "temporary", pipe); }), pipe + " is a device, pipe or socket; name a regular file");
    EXPECT_TRUE(std::filesystem::is_fifo(pipe));
    EXPECT_EQ(folder.count(), 5u) << "no temporary file stays";
}

TEST(Files, FullDiskKeepsWhatWasThere) {
    test::TemporaryFolder folder;
    const std::string path = folder / "a";
    write_file_atomically(path, "before");
    {
        const test::FileSizeLimit full(1000);
        EXPECT_EQ(error_of([&] { write_file_atomically(path, std::string(2000, 'x')); }), path + ": cannot be written: File too large");
    }
    EXPECT_EQ(read_file(path), "before");
    EXPECT_EQ(folder.count(), 1u);
}

// The examples of FIPS 180-4 (NIST's SHA256.pdf and the million a's).
TEST(Sha256, KnownAnswers) {
    EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(sha256_hex(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesGiveTheSameAsTheWhole) {
    std::string text;
    for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
    for (std::size_t length = 0; length <= text.size(); ++length)
        for (const std::size_t piece : {std::size_t{1}, std::size_t{3}, std::size_t{64}, std::size_t{100}}) {
            Sha256 hash;
            for (std::size_t at = 0; at < length; at += piece) hash.update(text.data() + at, std::min(piece, length - at));
            ASSERT_EQ(hash.hex(), sha256_hex(text.substr(0, length))) << length << " by " << piece;
        }
}

TEST(Sha256, OfAFile) {
    test::TemporaryFolder folder;
    const std::string bytes(3000000, 'q');
    test::write_text(folder / "a", bytes);
    EXPECT_EQ(sha256_of_file(folder / "a"), sha256_hex(bytes));
    EXPECT_THAT(error_of([&] { sha256_of_file(folder / "b"); }), HasSubstr("No such file"));
}

}  // namespace
}  // namespace fenwick
