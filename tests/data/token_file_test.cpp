#include "data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "base/hdf5.h"
#include "base/parallel.h"
#include "base/random.h"
#include "data/tokenizer.h"
#include "support/damage.h"
#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;

// A tokenizer with any vocabulary, for its name alone.
class Named final : public Tokenizer {
public:
    explicit Named(std::int64_t vocab_size) : vocab_size_(vocab_size) {}
    std::string kind() const override { return "named"; }
    std::int64_t vocab_size() const override { return vocab_size_; }
    std::int32_t end_of_document() const override { return static_cast<std::int32_t>(vocab_size_ - 1); }
    void encode(std::string_view, std::vector<std::int32_t>&) const override {}
    std::string decode(const std::int32_t*, std::int64_t) const override { return ""; }
    std::string definition() const override { return "definition"; }
    bool lossless() const override { return true; }

private:
    std::int64_t vocab_size_;
};

struct Written {
    std::vector<std::int32_t> tokens;
    std::vector<std::int64_t> offsets{0}, bytes, words;
};

Written write(const std::string& path, const Tokenizer& tokenizer, std::int64_t documents, int deflate,
              std::int64_t longest = 5000, bool is_length_known = true) {
    Random random(3);
    Written written;
    std::vector<std::vector<std::int32_t>> texts(static_cast<std::size_t>(documents));
    std::int64_t tokens = documents;
    for (auto& ids : texts) {
        ids.resize(random.below(static_cast<std::uint64_t>(longest)));
        for (auto& id : ids) id = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(tokenizer.vocab_size() - 1)));
        tokens += static_cast<std::int64_t>(ids.size());
    }
    TokenFileWriter writer(path, tokenizer, deflate, is_length_known ? tokens : -1);
    for (std::int64_t d = 0; d < documents; ++d) {
        const auto& ids = texts[static_cast<std::size_t>(d)];
        const auto half = static_cast<std::int64_t>(ids.size() / 2);
        writer.append(ids.data(), half);
        writer.append(ids.data() + half, static_cast<std::int64_t>(ids.size()) - half);
        written.bytes.push_back(3 * d + 1);
        written.words.push_back(d);
        writer.end_document(written.bytes.back(), written.words.back());
        written.tokens.insert(written.tokens.end(), ids.begin(), ids.end());
        written.tokens.push_back(tokenizer.end_of_document());
        written.offsets.push_back(static_cast<std::int64_t>(written.tokens.size()));
    }
    writer.add_source({"a.txt", 10, "ff"});
    writer.add_source({"b\xff.txt", 11, "ee"});
    const TokenFileInfo info = writer.finish();
    EXPECT_EQ(info.num_tokens, written.offsets.back());
    return written;
}

struct Case {
    std::int64_t vocab_size, documents;
    int deflate;
};
class TokenFiles : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(, TokenFiles,
                         testing::Values(Case{257, 1, 0}, Case{257, 100, 0}, Case{65536, 40, 4}, Case{65537, 40, 0}, Case{100000, 40, 1}));

TEST_P(TokenFiles, RoundTrip) {
    const auto [vocab_size, documents, deflate] = GetParam();
    test::TemporaryFolder folder;
    const Named tokenizer(vocab_size);
    const Written written = write(folder / "a.h5", tokenizer, documents, deflate);
    EXPECT_EQ(folder.count(), 1u) << "the temporary file is gone";
    const TokenFile file(folder / "a.h5");
    EXPECT_EQ(file.info().path, folder / "a.h5");
    EXPECT_EQ(file.info().num_tokens, static_cast<std::int64_t>(written.tokens.size()));
    EXPECT_EQ(file.info().num_documents, documents);
    EXPECT_EQ(file.info().vocab_size, vocab_size);
    EXPECT_EQ(file.info().end_of_document, vocab_size - 1);
    EXPECT_EQ(file.info().tokenizer_kind, "named");
    EXPECT_EQ(file.info().tokenizer_identity, tokenizer.identity());
    EXPECT_EQ(file.tokenizer_definition(), "definition");
    EXPECT_EQ(file.document_offsets(), written.offsets);
    EXPECT_EQ(file.document_bytes(), written.bytes);
    EXPECT_EQ(file.document_words(), written.words);
    EXPECT_EQ(file.info().text_bytes, std::accumulate(written.bytes.begin(), written.bytes.end(), std::int64_t{0}));
    EXPECT_EQ(file.info().text_words, std::accumulate(written.words.begin(), written.words.end(), std::int64_t{0}));
    ASSERT_EQ(file.sources().size(), 2u);
    EXPECT_EQ(file.sources()[0].name, "a.txt");
    EXPECT_EQ(file.sources()[1].bytes, 11);
    std::vector<std::int32_t> all(written.tokens.size());
    file.read(0, file.info().num_tokens, all.data());
    EXPECT_EQ(all, written.tokens);
    const TokenFile fresh(folder / "a.h5");  // whose chunks are met in any order, and then again
    Random random(1);
    for (int i = 0; i < 400; ++i) {
        const auto first = random.below(written.tokens.size() + 1), count = random.below(written.tokens.size() - first + 1);
        std::vector<std::int32_t> part(count);
        (i % 2 == 0 ? file : fresh).read(static_cast<std::int64_t>(first), static_cast<std::int64_t>(count), part.data());
        EXPECT_TRUE(std::equal(part.begin(), part.end(), written.tokens.begin() + static_cast<std::ptrdiff_t>(first)));
    }
    EXPECT_THAT(error_of([&] { file.read(file.info().num_tokens, 1, all.data()); }), HasSubstr("are asked for; the file has"));
    EXPECT_THAT(error_of([&] { file.read(-1, 1, all.data()); }), HasSubstr("are asked for"));
    // The same calls give the same bytes.
    write(folder / "b.h5", tokenizer, documents, deflate);
    EXPECT_EQ(read_file(folder / "a.h5"), read_file(folder / "b.h5"));
    // The digest does not ask how the file is stored, and differs where its contents do.
    write(folder / "b.h5", tokenizer, documents, deflate == 0 ? 9 : 0);
    EXPECT_EQ(file.digest(), TokenFile(folder / "b.h5").digest());
    write(folder / "b.h5", tokenizer, documents, deflate, 5000, false);
    EXPECT_EQ(file.digest(), TokenFile(folder / "b.h5").digest());
    TokenFile(folder / "b.h5").read(0, file.info().num_tokens, all.data());
    EXPECT_EQ(all, written.tokens);
    write(folder / "b.h5", tokenizer, documents + 1, deflate);
    EXPECT_NE(file.digest(), TokenFile(folder / "b.h5").digest());
}

TEST(TokenFile, VerifyAcceptsAWholeFileAndThreadsShareIt) {
    test::TemporaryFolder folder;
    for (const int deflate : {0, 1}) {
        const Written written = write(folder / "a.h5", *open_tokenizer("bytes"), 60, deflate);
        const TokenFile file(folder / "a.h5");
        file.verify();
        EXPECT_EQ(file.tokenizer()->kind(), "bytes");
        const TokenFile shared(folder / "a.h5");
        std::vector<std::thread> threads;
        std::vector<int> wrong(4, 0);
        for (std::size_t t = 0; t < 4; ++t)
            threads.emplace_back([&, t] {
                Random random(t);
                std::int32_t part[97];
                for (int i = 0; i < 300; ++i) {
                    const auto first = random.below(written.tokens.size() - 97);
                    shared.read(static_cast<std::int64_t>(first), 97, part);
                    wrong[t] += !std::equal(part, part + 97, written.tokens.begin() + static_cast<std::ptrdiff_t>(first));
                }
            });
        for (auto& thread : threads) thread.join();
        EXPECT_THAT(wrong, testing::Each(0));
    }
}

TEST(TokenFile, AFileThatShrinksWhileItIsOpen) {
    test::TemporaryFolder folder;
    const Written written = write(folder / "a.h5", *open_tokenizer("bytes"), 60, 0);
    const TokenFile file(folder / "a.h5");
    std::vector<std::int32_t> all(written.tokens.size());
    file.read(0, file.info().num_tokens, all.data());
    std::filesystem::resize_file(folder / "a.h5", 3000);
    EXPECT_THAT(error_of([&] { file.read(0, file.info().num_tokens, all.data()); }),
                HasSubstr(folder / "a.h5" + ": chunk 0 of 'tokens' (tokens 0 to 32767) cannot be read; the file has become shorter"));
}

// Any flipped bit of the tokens is found, by the chunk that holds it, and the other chunks stay readable.
TEST(TokenFile, DamageIsFoundByChunk) {
    test::TemporaryFolder folder;
    const std::string path = folder / "a.h5";
    const Written written = write(path, *open_tokenizer("bytes"), 60, 0);
    ASSERT_GT(written.tokens.size(), 4u << 15);
    // Find chunk 2 by what it holds.
    std::string bytes = read_file(path), wanted;
    for (std::size_t i = 2 << 15; i < (2 << 15) + 40; ++i) {
        wanted += static_cast<char>(written.tokens[i] & 255);
        wanted += static_cast<char>(written.tokens[i] >> 8);
    }
    const auto at = bytes.find(wanted);
    ASSERT_NE(at, std::string::npos);
    bytes[at + 1000] = static_cast<char>(bytes[at + 1000] ^ 4);
    test::write_text(path, bytes);
    const TokenFile file(path);
    std::vector<std::int32_t> out(1 << 15);
    file.read(0, 1 << 15, out.data());
    EXPECT_TRUE(std::equal(out.begin(), out.end(), written.tokens.begin()));
    file.read(3 << 15, 100, out.data());
    const std::string message = error_of([&] { file.read((2 << 15) - 1, 2, out.data()); });
    EXPECT_THAT(message, HasSubstr(path + ": chunk 2 of 'tokens' (tokens 65536 to 98303) is damaged: checksum "));
    EXPECT_EQ(error_of([&] { file.verify(); }), message);
}

// Every byte of a small file damaged in turn, but of the chunks' contents only some: an Error of one line, or the tokens as
// they were. HDF5's own structures, which are most of such a file, must not lead the library astray.
TEST(TokenFile, NoDamagedByteGivesOtherTokens) {
    test::TemporaryFolder folder;
    const std::string path = folder / "a.h5";
    const Written written = write(path, *open_tokenizer("bytes"), 5, 0, 60);
    std::vector<std::pair<std::size_t, std::size_t>> contents;  // where they are, and how many bytes
    {
        const auto file = hdf5::File::open(path);
        contents.emplace_back(file.position_of_chunk<std::uint16_t>("tokens", 0), 2 * written.tokens.size());
        contents.emplace_back(file.position_of_chunk<std::uint32_t>("token_checksums", 0), 4 << 12);
        for (const char* name : {"documents/offsets", "documents/bytes", "documents/words"})
            contents.emplace_back(file.position_of_chunk<std::int64_t>(name, 0), 8 << 12);
    }
    const auto step = [&](std::size_t position) {
        for (const auto& [begin, size] : contents)
            if (position >= begin && position < begin + size)
                return std::min<std::size_t>(begin + size - position, position < begin + 64 ? 1 : 4099);
        return std::size_t{1};
    };
    int refused = 0, checked = 0;
    test::for_each_damaged_byte(path, step, [&](std::size_t position) {
        ++checked;
        const std::string message = error_of([&] {
            const TokenFile file(path);
            file.verify();
            std::vector<std::int32_t> out(static_cast<std::size_t>(file.info().num_tokens));
            file.read(0, file.info().num_tokens, out.data());
            EXPECT_EQ(out, written.tokens) << "byte " << position;
            EXPECT_EQ(file.document_offsets(), written.offsets) << "byte " << position;
        });
        EXPECT_EQ(message.find('\n'), std::string::npos) << message;
        // In words of ours, not of the library's
        for (const char* word : {"H5", "HDF5 error", "unable", "can't", "bad ", "invalid", "unknown", "wrong", "version number"})
            EXPECT_EQ(message.find(word), std::string::npos) << message;
        refused += !message.empty();
    });
    EXPECT_GT(checked, 3000);
    EXPECT_GT(refused, checked / 2);
    TokenFile(path).verify();
}

TEST(TokenFile, SaysWhatIsWrong) {
    test::TemporaryFolder folder;
    const std::string path = folder / "a.h5", foreign = folder / "foreign.h5";
    EXPECT_EQ(error_of([&] { TokenFile(folder / "no.h5"); }), folder / "no.h5" + std::string(": no such file"));
    test::write_text(folder / "a.txt", "text");
    EXPECT_EQ(
        error_of([&] { TokenFile(folder / "a.txt"); }),
        (folder / "a.txt") + " is no token file; make one: fenwick tokenize " + (folder / "a.txt") + " --output NAME.h5");
    test::write_text(path, std::string(100000, '\0'));
    EXPECT_EQ(error_of([&] { TokenFile{path}; }),
              path + " is not an HDF5 file: it is damaged, or something else has its name");
    {
        hdf5::File file = hdf5::File::create(foreign);
        const double value = 1;
        file.write("tokens", &value, {1});
        file.close();
    }
    EXPECT_EQ(error_of([&] { TokenFile{foreign}; }), foreign + " is not a Fenwick token file (fenwick tokenize makes one)");
    const auto change = [&](auto&& edit) {
        write(path, *open_tokenizer("bytes"), 5, 0);
        hdf5::File file = hdf5::File::open_append(path);
        edit(file);
        file.close();
        return error_of([&] { TokenFile(path).verify(); });
    };
    EXPECT_EQ(change([](hdf5::File&) {}), "");
    EXPECT_THAT(change([](hdf5::File& file) { file.set_attribute("/", "complete", std::int64_t{0}); }), HasSubstr("not written to its end"));
    EXPECT_THAT(change([](hdf5::File& file) { file.set_attribute("/", "version", std::int64_t{9}); }),
                HasSubstr("token file of version 9; this program reads version 1"));
    EXPECT_THAT(change([](hdf5::File& file) { file.set_attribute("/", "num_tokens", std::int64_t{77777}); }), HasSubstr("is not 77777 values"));
    EXPECT_THAT(change([](hdf5::File& file) { file.set_attribute("/", "num_documents", std::int64_t{4}); }),
                HasSubstr("dataset 'documents/offsets' has shape [6]; [5] is needed"));
    EXPECT_THAT(change([](hdf5::File& file) { file.set_attribute("/", "vocab_size", std::int64_t{200}); }), HasSubstr("damaged token file"));
    EXPECT_THAT(change([](hdf5::File& file) { file.set_attribute("/", "vocab_size", std::int64_t{70000}); }), HasSubstr("values of uint32"));
    change([](hdf5::File& file) {
        file.set_attribute("/", "vocab_size", std::int64_t{50});
        file.set_attribute("/", "end_of_document", std::int64_t{0});
    });
    std::int32_t ids[20];
    EXPECT_THAT(error_of([&] { TokenFile(path).read(0, 20, ids); }), HasSubstr("a token is outside the vocabulary of 50"));
    EXPECT_THAT(change([](hdf5::File& file) { file.set_attribute("/", "text_words", std::int64_t{1}); }), HasSubstr("the file says"));
    EXPECT_THAT(change([](hdf5::File& file) { file.set_attribute("/", "tokenizer_identity", std::string_view("other")); }),
                HasSubstr("is not the one the tokens were made with"));
    write(path, *open_tokenizer("bytes"), 5, 0);
    std::filesystem::resize_file(path, 30000);
    EXPECT_THAT(error_of([&] { TokenFile{path}; }), HasSubstr("cannot be opened: the file is cut off"));
}

TEST(TokenFileWriter, LeavesNothingBehindOnFailure) {
    test::TemporaryFolder folder;
    const std::string path = folder / "a.h5";
    const auto bytes = open_tokenizer("bytes");
    const std::int32_t ids[] = {1, 2, 300};
    EXPECT_THAT(error_of([&] { TokenFileWriter(path, *bytes).append(ids, 3); }), HasSubstr("token 300 is outside the vocabulary of 257"));
    EXPECT_THAT(error_of([&] { TokenFileWriter(path, *bytes).finish(); }), HasSubstr("no document"));
    { const TokenFileWriter abandoned(path, *bytes); }
    EXPECT_EQ(folder.count(), 0u);
    EXPECT_THAT(error_of([&] { TokenFileWriter(folder / "no/a.h5", *bytes); }), HasSubstr("cannot be created"));
    // A full disk, wherever it fills, keeps the file that was there before.
    test::write_text(path, "before");
    for (const rlim_t limit : {0, 1000, 10000, 100000, 200000, 250000}) {
        const test::FileSizeLimit full(limit);
        EXPECT_THAT(error_of([&] { write(path, *bytes, 60, 0); }), HasSubstr("File too large")) << limit;
    }
    EXPECT_EQ(folder.count(), 1u);
    EXPECT_EQ(read_file(path), "before");
}

}  // namespace
}  // namespace fenwick::data
