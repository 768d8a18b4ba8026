#include "data/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>
#include <tuple>

#include "base/error.h"
#include "base/files.h"
#include "base/random.h"
#include "base/sha256.h"
#include "data/loader.h"
#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using testing::HasSubstr;

// A folder of shards and, beside it, the same documents in one file.
class Corpus : public testing::Test {
protected:
    void write(const std::vector<int>& documents_of_shards) {
        fs::create_directories(folder_);
        Random random(5);
        CorpusManifest manifest;
        const auto tokenizer = open_tokenizer("bytes");
        TokenFileWriter whole(file_, *tokenizer);
        for (std::size_t s = 0; s < documents_of_shards.size(); ++s) {
            const std::string name = fmt::format("{:05}.h5", s), path = folder_ + "/" + name;
            TokenFileWriter shard(path, *tokenizer);
            for (int d = 0; d < documents_of_shards[s]; ++d) {
                std::vector<std::int32_t> ids(random.below(3000));
                for (auto& id : ids) id = static_cast<std::int32_t>(random.below(256));
                for (auto* writer : {&whole, &shard}) {
                    writer->append(ids.data(), static_cast<std::int64_t>(ids.size()));
                    writer->end_document(d + 1, d);
                }
            }
            const TokenFileInfo info = shard.finish();
            manifest.info.vocab_size = info.vocab_size;
            manifest.info.end_of_document = info.end_of_document;
            manifest.info.tokenizer_kind = info.tokenizer_kind;
            manifest.info.tokenizer_identity = info.tokenizer_identity;
            manifest.info.num_tokens += info.num_tokens;
            manifest.info.num_documents += info.num_documents;
            manifest.info.text_bytes += info.text_bytes;
            manifest.info.text_words += info.text_words;
            manifest.shards.push_back({name, size_of_file(path), TokenFile(path).digest(), info.num_tokens, info.num_documents,
                                       info.text_bytes, info.text_words});
        }
        whole.add_source({"a.txt", 7, "ff"});
        whole.finish();
        const std::string sources = "{\"name\":\"a.txt\",\"bytes\":7,\"sha256\":\"ff\"}\n";
        test::write_text(folder_ + "/sources.jsonl", sources);
        manifest.num_sources = 1;
        manifest.sources_sha256 = sha256_hex(sources);
        manifest.write(folder_);
    }
    std::string shard_path(int index) const { return fmt::format("{}/{:05}.h5", folder_, index); }

    test::TemporaryFolder temporary_;
    std::string folder_ = temporary_ / "corpus", file_ = temporary_ / "whole.h5";
};

TEST_F(Corpus, ShardsReadAsOneFile) {
    write({3, 1, 40, 7});
    const TokenCorpus shards(folder_), whole(file_);
    const TokenFile file(file_);
    EXPECT_EQ(shards.num_shards(), 4);
    EXPECT_EQ(whole.num_shards(), 1);
    for (const TokenCorpus* corpus : {&shards, &whole}) {
        EXPECT_EQ(corpus->info().num_tokens, file.info().num_tokens);
        EXPECT_EQ(corpus->info().num_documents, 51);
        EXPECT_EQ(corpus->info().vocab_size, 257);
        EXPECT_EQ(corpus->info().end_of_document, 256);
        EXPECT_EQ(corpus->info().text_bytes, file.info().text_bytes);
        EXPECT_EQ(corpus->info().text_words, file.info().text_words);
        EXPECT_EQ(corpus->info().tokenizer_identity, file.info().tokenizer_identity);
        EXPECT_EQ(corpus->document_offsets(), file.document_offsets());
        for (std::int64_t d = 0; d <= 51; ++d)
            EXPECT_EQ(corpus->document_offset(d), file.document_offsets()[static_cast<std::size_t>(d)]);
        for (std::int64_t d = 0; d < 51; ++d) {
            EXPECT_EQ(corpus->document_at(corpus->document_offset(d)), d);
            EXPECT_EQ(corpus->document_at(corpus->document_offset(d + 1) - 1), d);
        }
        ASSERT_EQ(corpus->sources().size(), 1u);
        EXPECT_EQ(corpus->sources()[0].name, "a.txt");
        EXPECT_EQ(corpus->tokenizer()->kind(), "bytes");
        corpus->verify();
    }
    EXPECT_EQ(shards.info().path, folder_);
    EXPECT_EQ(shards.first_document(2), 4);
    EXPECT_EQ(shards.first_document(4), 51);
    EXPECT_EQ(shards.first_token(1), file.document_offsets()[3]);
    EXPECT_NE(shards.identity(), whole.identity());
    EXPECT_EQ(shards.identity(), TokenCorpus(folder_).identity());

    std::vector<std::int32_t> all(static_cast<std::size_t>(file.info().num_tokens)), part(all.size());
    file.read(0, file.info().num_tokens, all.data());
    std::vector<std::thread> threads;  // ranges of all kinds, across shards too
    std::vector<int> wrong(3, 0);
    for (std::size_t t = 0; t < wrong.size(); ++t)
        threads.emplace_back([&, t] {
            Random random(t);
            std::vector<std::int32_t> own(all.size());
            for (int i = 0; i < 100; ++i) {
                const auto first = random.below(all.size() + 1), count = random.below(all.size() - first + 1);
                shards.read(static_cast<std::int64_t>(first), static_cast<std::int64_t>(count), own.data());
                wrong[t] += !std::equal(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(count),
                                        all.begin() + static_cast<std::ptrdiff_t>(first));
            }
        });
    for (auto& thread : threads) thread.join();
    EXPECT_THAT(wrong, testing::Each(0));
    EXPECT_THAT(error_of([&] { shards.read(file.info().num_tokens, 1, part.data()); }), HasSubstr("are asked for; the corpus has"));
    EXPECT_THAT(error_of([&] { (void)shards.document_offset(52); }), HasSubstr("document 52 is asked for; the corpus has 51"));
    EXPECT_THAT(error_of([&] { (void)shards.shard(4); }), HasSubstr("shard 4 is asked for; the corpus has 4"));
}

TEST_F(Corpus, MoreShardsThanStayOpen) {
    write(std::vector<int>(150, 1));
    EXPECT_GE(most_open_shards(), 16u);
    const TokenCorpus shards(folder_, 64);
    const TokenFile file(file_);
    const auto open_files = [] { return std::distance(fs::directory_iterator("/proc/self/fd"), {}); };
    const auto before = open_files();
    std::vector<std::int32_t> expected(500), found(500);
    Random random(9);
    for (int i = 0; i < 600; ++i) {
        const auto first = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(file.info().num_tokens - 500)));
        file.read(first, 500, expected.data());
        shards.read(first, 500, found.data());
        ASSERT_EQ(found, expected);
    }
    EXPECT_LE(open_files() - before, 64);
    shards.verify();
}

// Rows do not show where the shards are cut.
TEST_F(Corpus, ShardsTrainAsOneFile) {
    write({3, 1, 40, 7});
    for (const Packing packing : {Packing::stream, Packing::masked_stream, Packing::documents}) {
        const auto rows = [&](const std::string& path) {
            const Loader loader({.corpora = {{path}}, .sequence_length = 500, .packing = packing, .seed = 2});
            const Batch batch = loader.read(0, loader.rows_per_epoch() + 3);
            return std::tuple(batch.inputs, batch.targets, batch.offsets);
        };
        EXPECT_EQ(rows(folder_), rows(file_));
    }
}

TEST_F(Corpus, SaysWhatIsWrong) {
    EXPECT_EQ(error_of([&] { TokenCorpus{folder_}; }), folder_ + ": no such file");
    fs::create_directory(folder_);
    EXPECT_EQ(
        error_of([&] { TokenCorpus{folder_}; }),
        folder_ + " is a folder without manifest.json, no corpus; make one: fenwick tokenize " + folder_ + " --output NAME");
    write({3, 4, 5});
    const auto keep = temporary_ / "keep";
    const auto broken = [&](auto&& edit) {
        fs::remove_all(folder_);
        write({3, 4, 5});
        edit();
        return error_of([&] { TokenCorpus(folder_).verify(); });
    };
    EXPECT_EQ(broken([] {}), "");
    EXPECT_EQ(broken([&] { fs::remove(shard_path(1)); }), folder_ + ": shard 00001.h5 is missing; the corpus has 3 shards");
    EXPECT_THAT(broken([&] { fs::resize_file(shard_path(2), 5000); }), HasSubstr(shard_path(2) + " has 5000 bytes; manifest.json says "));
    // A good token file of the same size under the name of another is found when the corpus is opened.
    const auto write_alike = [&](const std::string& path, std::int32_t id) {
        TokenFileWriter writer(path, *open_tokenizer("bytes"));
        const std::vector<std::int32_t> ids(500, id);
        writer.append(ids.data(), 500);
        writer.end_document(500, 1);
        writer.finish();
    };
    fs::remove_all(folder_);
    write({3, 4, 5});
    auto manifest_of_alike = CorpusManifest::read(folder_);
    for (std::size_t i = 0; i < 3; ++i) {
        auto& shard = manifest_of_alike.shards[i];
        write_alike(shard_path(i), static_cast<std::int32_t>(i));
        shard = {shard.file, size_of_file(shard_path(i)), TokenFile(shard_path(i)).digest(), 501, 1, 500, 1};
    }
    manifest_of_alike.info.num_tokens = 3 * 501;
    manifest_of_alike.info.num_documents = 3;
    manifest_of_alike.write(folder_);
    EXPECT_EQ(error_of([&] { TokenCorpus{folder_}; }), "");
    write_alike(shard_path(2), 7);
    EXPECT_EQ(error_of([&] { TokenCorpus{folder_}; }),
              shard_path(2) + " is not the shard that manifest.json lists under this name: its contents are others");
    EXPECT_EQ(error_of([&] { TokenCorpus(folder_, 1); }),
              shard_path(2) + " is not the shard that manifest.json lists under this name: its contents are others");
    // Nor is one whose size was mended.
    EXPECT_THAT(broken([&] {
                    std::string bytes = read_file(shard_path(0));
                    fs::remove_all(folder_);
                    write({3, 4, 5});
                    TokenFileWriter writer(shard_path(0), *open_tokenizer("bytes"));
                    std::vector<std::int32_t> ids(static_cast<std::size_t>(TokenFile(shard_path(1)).info().num_tokens - 1), 7);
                    writer.append(ids.data(), static_cast<std::int64_t>(ids.size()));
                    writer.end_document(1, 1);
                    writer.finish();
                    fs::resize_file(shard_path(0), bytes.size());
                }),
                testing::AnyOf(HasSubstr("is not the shard that manifest.json lists under this name"),
                               HasSubstr("cannot be opened: the file is ")));
    EXPECT_THAT(broken([&] { fs::copy_file(shard_path(2), shard_path(3)); }),
                HasSubstr(shard_path(3) + " is no shard of this corpus: manifest.json lists 3, without it"));
    EXPECT_THAT(broken([&] {
                    fs::rename(shard_path(0), keep);
                    fs::rename(shard_path(1), shard_path(0));
                    fs::rename(keep, shard_path(1));
                }),
                HasSubstr("00000.h5 "));
    // Any change of the manifest is found
    const std::string manifest = folder_ + "/manifest.json";
    fs::remove_all(folder_);
    write({3, 4, 5});
    const std::string text = read_file(manifest);
    for (std::size_t i = 0; i < text.size(); i += 7) {
        std::string damaged = text;
        damaged[i] = static_cast<char>(damaged[i] ^ 1);
        if (text[i] == ' ' || text[i] == '\n') continue;  // may be white space of another kind
        test::write_text(manifest, damaged);
        EXPECT_NE(error_of([&] { TokenCorpus{folder_}; }), "") << "byte " << i;
    }
    for (const char* damaged : {"{}", "", "{\"format\": \"fenw", "[1e999]"})
        EXPECT_EQ(broken([&] { test::write_text(manifest, damaged); }),
                  manifest + " is damaged: it is not the JSON that fenwick tokenize writes");
    EXPECT_EQ(broken([&] { fs::remove(manifest); }),
              folder_ + ": manifest.json, which makes its shards one corpus, is missing; copy the folder again");
    EXPECT_EQ(broken([&] { test::write_text(shard_path(1), std::string(read_file(shard_path(1)).size(), '\0')); }),
              shard_path(1) + " is not an HDF5 file: it is damaged, or something else has its name");
    EXPECT_THAT(broken([&] { test::write_text(folder_ + "/sources.jsonl", "{\"name\":\"b.txt\",\"bytes\":7,\"sha256\":\"ff\"}\n"); }),
                HasSubstr("sources.jsonl is damaged: its contents have another checksum than manifest.json says"));
    EXPECT_THAT(broken([&] {
                    std::string bytes = read_file(shard_path(1)), tokens;
                    std::int32_t ids[40];
                    TokenFile(shard_path(1)).read(0, 40, ids);
                    for (const auto id : ids) tokens += {static_cast<char>(id & 255), static_cast<char>(id >> 8)};
                    const std::size_t at = bytes.find(tokens);
                    ASSERT_NE(at, std::string::npos);
                    bytes[at + 20] = static_cast<char>(bytes[at + 20] ^ 16);
                    test::write_text(shard_path(1), bytes);
                }),
                HasSubstr(shard_path(1) + ": chunk 0 of 'tokens'"));
}

}  // namespace
}  // namespace fenwick::data
