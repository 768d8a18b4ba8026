#include "data/tokenize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>

#include "base/error.h"
#include "base/files.h"
#include "base/parallel.h"
#include "base/random.h"
#include "base/sha256.h"
#include "data/corpus.h"
#include "data/text_files.h"
#include "support/shared_data.h"
#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;

// The documents of a token file as text.
std::vector<std::string> documents_of(const std::string& path) {
    const TokenFile file(path);
    file.verify();
    const auto tokenizer = file.tokenizer();
    std::vector<std::string> documents;
    const auto& offsets = file.document_offsets();
    for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
        std::vector<std::int32_t> ids(static_cast<std::size_t>(offsets[d + 1] - offsets[d]));
        file.read(offsets[d], offsets[d + 1] - offsets[d], ids.data());
        EXPECT_EQ(ids.back(), file.info().end_of_document);
        documents.push_back(tokenizer->decode(ids.data(), static_cast<std::int64_t>(ids.size()) - 1));
    }
    return documents;
}

class Tokenize : public testing::Test {
protected:
    std::string text(const std::string& name, std::string_view contents) {
        test::write_text(folder_ / name, contents);
        return folder_ / name;
    }
    TokenFileInfo run(const std::vector<std::string>& files, DocumentUnit unit, const Tokenizer& tokenizer) {
        TokenizeOptions options;
        options.inputs = files;
        options.documents = unit;
        options.output = output_;
        options.overwrite = true;
        return tokenize(tokenizer, options).output;
    }
    TokenFileInfo run(const std::vector<std::string>& files, DocumentUnit unit) {
        return run(files, unit, *open_tokenizer("bytes"));
    }

    test::TemporaryFolder folder_;
    std::string output_ = folder_ / "out.h5";
};

TEST_F(Tokenize, FilesAreDocuments) {
    const auto a = text("a.txt", "one two\n\n three"), b = text("b.txt", "\n"), c = text("c.txt", ""),
               d = text("d.txt", "x\xff\x80 y");
    const auto info = run({a, b, c, d}, DocumentUnit::file);
    EXPECT_THAT(documents_of(output_), ElementsAre("one two\n\n three", "\n", "x\xff\x80 y"));
    EXPECT_EQ(info.num_documents, 3);
    EXPECT_EQ(info.num_tokens, 15 + 1 + 5 + 3);
    EXPECT_EQ(info.text_bytes, 15 + 1 + 5);
    EXPECT_EQ(info.text_words, 3 + 0 + 2);
    const TokenFile file(output_);
    EXPECT_THAT(file.document_bytes(), ElementsAre(15, 1, 5));
    EXPECT_THAT(file.document_words(), ElementsAre(3, 0, 2));
    const auto sources = file.sources();
    ASSERT_EQ(sources.size(), 4u);
    EXPECT_EQ(sources[0].name, a);
    EXPECT_EQ(sources[0].sha256, sha256_of_file(a));
    EXPECT_EQ(sources[3].bytes, 5);
}

TEST_F(Tokenize, LinesAreDocuments) {
    const auto a = text("a.txt", "\n one  two \r\n\n \t\nthree\rfour\n"), b = text("b.txt", "five"),
               c = text("c.txt", "\n\nsix\r");
    const auto info = run({a, b, c}, DocumentUnit::line);
    EXPECT_THAT(documents_of(output_), ElementsAre(" one  two ", "three\rfour", "five", "six"));
    // Separators count for the document before them, leading ones for the first.
    EXPECT_THAT(TokenFile(output_).document_bytes(), ElementsAre(1 + 12 + 1 + 3, 11, 4 + 2, 4));
    EXPECT_THAT(TokenFile(output_).document_words(), ElementsAre(2, 2, 1, 1));
    EXPECT_EQ(info.text_bytes, 28 + 4 + 6);
}

TEST_F(Tokenize, BlocksAreDocuments) {
    const auto a = text("a.txt", " \n\n  one\n two\r\nthree\n\n \n\nfour\n"), b = text("b.txt", "five\n\n \n");
    const auto info = run({a, b}, DocumentUnit::block);
    EXPECT_THAT(documents_of(output_), ElementsAre("  one\n two\r\nthree", "four", "five"));
    EXPECT_EQ(info.text_bytes, static_cast<std::int64_t>(read_file(a).size() + read_file(b).size()));
    EXPECT_EQ(info.text_words, 5);
}

// Random text in all units against a slow twin that has the whole text at once.
TEST_F(Tokenize, AgreesWithTheDefinition) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        Random random(seed);
        static const std::vector<std::string> parts = {"a", "bc", " ", "\n", "\n", "\n\n", "\r\n", "\t", "é"};
        std::string all;
        const auto count = 1 + random.below(60);
        for (std::uint64_t i = 0; i < count; ++i) all += parts[random.below(parts.size())];
        std::vector<std::string> lines, blocks;  // expected
        std::string block;
        bool in_block = false;
        for (std::size_t begin = 0; begin < all.size();) {
            const std::size_t newline = std::min(all.find('\n', begin), all.size());
            std::string line = all.substr(begin, newline - begin);
            const bool blank = line.find_first_not_of(" \t\r") == std::string::npos;
            if (blank && in_block) blocks.push_back(std::exchange(block, {}));
            if (!blank) {
                block += in_block ? "\n" + line : line;
                if (line.back() == '\r') line.pop_back();
                lines.push_back(line);
            }
            in_block = !blank;
            begin = newline + 1;
        }
        if (in_block) blocks.push_back(block);
        for (auto& each : blocks)
            if (each.back() == '\r') each.pop_back();
        const auto path = text("a.txt", all);
        if (lines.empty()) continue;
        const auto words = run({path}, DocumentUnit::file).text_words;
        EXPECT_THAT(documents_of(output_), ElementsAre(all));
        EXPECT_EQ(run({path}, DocumentUnit::line).text_bytes, static_cast<std::int64_t>(all.size())) << "seed " << seed;
        EXPECT_EQ(documents_of(output_), lines) << "seed " << seed;
        EXPECT_EQ(TokenFile(output_).info().text_words, words);
        EXPECT_EQ(run({path}, DocumentUnit::block).text_bytes, static_cast<std::int64_t>(all.size())) << "seed " << seed;
        EXPECT_EQ(documents_of(output_), blocks) << "seed " << seed;
        EXPECT_EQ(TokenFile(output_).info().text_words, words);
    }
}

// Long documents and lines are encoded in pieces; the result is the text all the same, with any number of threads.
TEST_F(Tokenize, LongTextAndAnyNumberOfThreads) {
    Random random(11);
    std::string words, solid, lines;
    while (words.size() < (1u << 20))
        words += std::string(1 + random.below(12), static_cast<char>('a' + random.below(26))) + " ";
    while (solid.size() < (200u << 10)) solid += "\xE6\x97\xA5";
    while (lines.size() < (4u << 20)) lines += std::string(random.below(20), 'x') + " line\n";
    const std::vector<std::string> files = {text("a.txt", words), text("b.txt", solid), text("c.txt", lines)};
    SentencePieceOptions training;
    training.vocab_size = 400;
    train_sentencepiece({text("d.txt", words.substr(0, 100000) + lines.substr(0, 50000))}, training, folder_ / "a.model");
    const auto trained = open_tokenizer(folder_ / "a.model"), bytes = open_tokenizer("bytes");
    const int threads_before = num_threads();
    for (const auto* tokenizer : {trained.get(), bytes.get()}) {
        std::string first;
        for (const int threads : {1, 2, 5}) {
            set_num_threads(threads);
            run(files, DocumentUnit::file, *tokenizer);
            if (threads == 1) {
                first = read_file(output_);
                const auto found = documents_of(output_);
                ASSERT_EQ(found.size(), 3u);
                EXPECT_TRUE(found[0] == words && found[1] == solid && found[2] == lines);
            } else {
                EXPECT_TRUE(read_file(output_) == first) << threads << " threads";
            }
        }
    }
    set_num_threads(threads_before);
    // Cut at newlines and before spaces, the ids are those of the whole.
    std::vector<std::int32_t> expected;
    trained->encode(lines, expected);
    run({files[2]}, DocumentUnit::file, *trained);
    std::vector<std::int32_t> ids(expected.size());
    const TokenFile file(output_);
    ASSERT_EQ(file.info().num_tokens, static_cast<std::int64_t>(expected.size()) + 1);
    file.read(0, static_cast<std::int64_t>(expected.size()), ids.data());
    EXPECT_TRUE(ids == expected);
}

TEST_F(Tokenize, ProgressRises) {
    std::vector<std::int64_t> seen;
    std::int64_t tokenized = 0;
    TokenizeOptions options;
    options.inputs = {text("a.txt", std::string(9 << 20, 'a'))};
    options.output = output_;
    options.progress = [&](const TokenizeProgress& progress) {
        EXPECT_EQ(progress.total_file_bytes, 9 << 20);
        EXPECT_FALSE(progress.resumed);
        seen.push_back(progress.file_bytes);
        tokenized = progress.text_bytes;
    };
    tokenize(*open_tokenizer("bytes"), options);
    ASSERT_GE(seen.size(), 2u);
    EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
    EXPECT_EQ(tokenized, 9 << 20);
    EXPECT_EQ(seen.back(), 9 << 20);
}

TEST_F(Tokenize, SaysWhatIsWrongAndLeavesNothing) {
    const auto empty = text("empty.txt", ""), blank = text("blank.txt", " \n\n"), good = text("good.txt", "text");
    const std::string missing = folder_ / "missing.txt";
    EXPECT_EQ(error_of([&] { run({good, missing}, DocumentUnit::file); }), missing + ": no such file");
    EXPECT_EQ(error_of([&] { run({empty}, DocumentUnit::file); }), "no text to tokenize in " + empty);
    EXPECT_EQ(error_of([&] {
                  run({empty, empty, empty, empty, empty, empty}, DocumentUnit::file);
              }),
              "no text to tokenize in " + empty + ", " + empty + ", " + empty + ", " + empty + " and 2 more");
    EXPECT_EQ(error_of([&] { run({blank}, DocumentUnit::line); }), "no text to tokenize in " + blank);
    EXPECT_EQ(error_of([&] { run({}, DocumentUnit::line); }), "no text files to tokenize");
    EXPECT_THAT(error_of([] { document_unit_from("page"); }), HasSubstr("use file, line or block"));
    EXPECT_EQ(document_unit_from("block"), DocumentUnit::block);
    output_ = good;
    EXPECT_THAT(error_of([&] { run({good}, DocumentUnit::file); }), HasSubstr("the output would replace an input"));
    output_ = folder_ / "out.h5";
    const auto large = text("large.txt", std::string(1 << 20, 'a'));
    {
        const test::FileSizeLimit full(500000);
        EXPECT_THAT(error_of([&] { run({large}, DocumentUnit::file); }), HasSubstr("File too large"));
    }
    EXPECT_EQ(folder_.count(), 4u) << "text files alone";
}

#ifdef __SANITIZE_THREAD__
constexpr bool can_kill = false;
#else
constexpr bool can_kill = true;
#endif

// ---- corpora: many files, shards, a validation share

// Files of all kinds: small and long texts, JSON lines, folders, compressed where the program is there.
class TokenizeCorpus : public Tokenize {
protected:
    TokenizeCorpus() {
        Random random(8);
        std::filesystem::create_directories(folder_ / "in/deep");
        const auto sentence = [&] {
            std::string line;
            const auto words = 1 + random.below(12);
            for (std::uint64_t i = 0; i < words; ++i)
                line += std::string(1 + random.below(9), static_cast<char>('a' + random.below(26))) +
                        (random.below(20) == 0 ? "\n\n" : " ");
            return line;
        };
        for (int f = 0; f < 12; ++f) {
            std::string contents = f % 5 == 4 ? "  \n\n" : "";
            const auto parts = f == 5 ? 0 : f == 7 ? 40000 : 1 + random.below(400);
            for (std::uint64_t i = 0; i < parts; ++i) contents += sentence();
            text(fmt::format("in/{}{:02}.txt", f % 3 == 0 ? "deep/" : "", f), contents);
        }
        std::string lines;
        for (int i = 0; i < 3000; ++i) {
            std::string escaped;
            for (const char c : sentence()) escaped += c == '\n' ? std::string("\\n") : std::string(1, c);
            lines += i % 50 == 3   ? "{\"text\": \"\"}\n"
                     : i % 70 == 5 ? "\n"
                                   : "{\"id\": 7, \"text\": \"" + escaped + "\"}\n";
        }
        text("in/lines.jsonl", lines);
        options_.inputs = {folder_ / "in"};
        options_.documents = DocumentUnit::block;
        options_.output = folder_ / "corpus";
        options_.shard_tokens = 300000;
        options_.commit_bytes = 200000;
        options_.workers = 2;
    }

    void set_valid() {
        options_.valid_output = folder_ / "valid.h5";
        options_.valid_share = 0.1;
        options_.valid_seed = 3;
    }

    // Everything that a run leaves at its outputs, by name.
    std::map<std::string, std::string> outputs(const TokenizeOptions& options) const {
        std::map<std::string, std::string> found;
        for (const std::string& output : {options.output, options.valid_output}) {
            if (output.empty() || !std::filesystem::exists(output)) continue;
            EXPECT_FALSE(std::filesystem::exists(output + ".partial")) << output;
            if (!std::filesystem::is_directory(output))
                found[output] = read_file(output);
            else
                for (const auto& entry : std::filesystem::directory_iterator(output))
                    found[entry.path().string()] = read_file(entry.path().string());
        }
        return found;
    }
    void remove_outputs() const {
        for (const std::string& output : {options_.output, options_.valid_output})
            if (!output.empty()) {
                std::filesystem::remove_all(output);
                std::filesystem::remove_all(output + ".partial");
            }
    }

    // In another process, which ends without a word after so many reports of progress (0: never). Whether it was ended so.
    bool run_and_kill(const TokenizeOptions& options, const Tokenizer& tokenizer, int reports) {
        const pid_t child = fork();
        if (child == 0) {
            TokenizeOptions own = options;
            int seen = 0;
            own.progress = [&](const TokenizeProgress&) {
                if (++seen == reports) raise(SIGKILL);
            };
            try {
                fenwick::data::tokenize(tokenizer, own);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "%s\n", error.what());
                _exit(1);
            }
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
        return WIFSIGNALED(status);
    }

    TokenizeOptions options_;
    std::unique_ptr<Tokenizer> bytes_ = open_tokenizer("bytes");
};

std::vector<std::string> documents_of_corpus(const std::string& path) {
    const TokenCorpus corpus(path);
    corpus.verify();
    std::vector<std::string> documents;
    for (std::int64_t s = 0; s < corpus.num_shards(); ++s)
        for (auto& document : documents_of(corpus.shard(s)->info().path)) documents.push_back(std::move(document));
    return documents;
}

TEST_F(TokenizeCorpus, ShardsHoldTheDocumentsInOrder) {
    const auto result = tokenize(*bytes_, options_);
    EXPECT_FALSE(result.valid.has_value());
    const TokenCorpus corpus(options_.output);
    EXPECT_GE(corpus.num_shards(), 4);
    EXPECT_EQ(result.output.num_tokens, corpus.info().num_tokens);
    for (std::int64_t s = 0; s < corpus.num_shards(); ++s) {
        const auto file = corpus.shard(s);
        const auto& offsets = file->document_offsets();
        if (s + 1 < corpus.num_shards()) {
            EXPECT_GE(file->info().num_tokens, 300000);
        }
        EXPECT_LT(offsets[offsets.size() - 2], 300000) << "the last document of a shard begins before it is full";
    }
    TokenizeOptions single = options_;
    single.output = output_;
    const auto whole = tokenize(*bytes_, single).output;
    EXPECT_EQ(whole.num_tokens, result.output.num_tokens);
    EXPECT_EQ(whole.text_bytes, result.output.text_bytes);
    EXPECT_EQ(whole.text_words, result.output.text_words);
    const auto documents = documents_of(output_);
    EXPECT_TRUE(documents_of_corpus(options_.output) == documents);
    EXPECT_EQ(corpus.document_offsets(), TokenFile(output_).document_offsets());
    // JSON: what the lines say, those without text left out; text: the files' bytes, whoever they are credited to
    std::int64_t json = 0, text = 0, lines = 0;
    std::istringstream file(read_file(folder_ / "in/lines.jsonl"));
    for (std::string line; std::getline(file, line);) {
        if (line.empty()) continue;
        const std::string found = json_text(line, "text");
        json += static_cast<std::int64_t>(found.size());
        lines += !found.empty();
    }
    const auto sources = corpus.sources();
    ASSERT_EQ(sources.size(), 13u);
    for (const auto& source : sources) {
        EXPECT_EQ(source.sha256, sha256_of_file(source.name));
        if (!source.name.ends_with(".jsonl")) text += source.bytes;
    }
    EXPECT_EQ(result.output.text_bytes, text + json);
    EXPECT_EQ(sources[0].name, folder_ / "in/01.txt");
    EXPECT_EQ(sources[8].name, folder_ / "in/deep/00.txt");
    EXPECT_EQ(TokenFile(output_).sources().size(), 13u);
    EXPECT_EQ(std::count_if(documents.end() - lines, documents.end(), [](const auto& d) { return d.empty(); }), 0);
}

TEST_F(TokenizeCorpus, AnyNumberOfWorkersGivesTheSameFiles) {
    set_valid();
    std::map<std::string, std::string> first;
    for (const int workers : {1, 2, 8}) {
        options_.workers = workers;
        options_.deflate = 1;
        tokenize(*bytes_, options_);
        auto found = outputs(options_);
        EXPECT_GT(found.size(), 5u);
        if (workers == 1)
            first = std::move(found);
        else
            EXPECT_TRUE(found == first) << workers;
        remove_outputs();
    }
}

TEST_F(TokenizeCorpus, ValidationShareIsDrawnByDocument) {
    tokenize(*bytes_, options_);
    const auto all = documents_of_corpus(options_.output);
    remove_outputs();
    set_valid();
    const auto result = tokenize(*bytes_, options_);
    std::vector<std::string> train, valid;
    for (std::size_t d = 0; d < all.size(); ++d)
        (is_valid_document(3, static_cast<std::int64_t>(d), 0.1) ? valid : train).push_back(all[d]);
    EXPECT_TRUE(documents_of_corpus(options_.output) == train);
    EXPECT_TRUE(documents_of_corpus(options_.valid_output) == valid);
    EXPECT_NEAR(static_cast<double>(valid.size()) / static_cast<double>(all.size()), 0.1, 0.02);
    EXPECT_EQ(result.valid->num_documents, static_cast<std::int64_t>(valid.size()));
    // Seeds and documents draw independently; shares are nested.
    int both = 0, either = 0;
    for (std::int64_t d = 0; d < 10000; ++d) {
        both += is_valid_document(1, d, 0.5) && is_valid_document(2, d, 0.5);
        either += is_valid_document(1, d, 0.5);
        EXPECT_TRUE(!is_valid_document(1, d, 0.1) || is_valid_document(1, d, 0.2));
        EXPECT_FALSE(is_valid_document(1, d, 0));
    }
    EXPECT_NEAR(both, 2500, 200);
    EXPECT_NEAR(either, 5000, 250);
    remove_outputs();
    options_.valid_share = 1e-9;
    EXPECT_THAT(error_of([&] { tokenize(*bytes_, options_); }),
                HasSubstr("none falls into the validation share; change --valid-share or --valid-seed"));
}

TEST_F(TokenizeCorpus, CompressedFilesGiveTheSameTokens) {
    options_.output = output_;
    tokenize(*bytes_, options_);
    const TokenFile plain(output_);
    int packed = 0;
    for (const auto& [name, program, suffix] :
         {std::tuple{"in/07.txt", "gzip", ".gz"}, std::tuple{"in/lines.jsonl", "zstd", ".zst"},
          std::tuple{"in/deep/03.txt", "xz", ".xz"}}) {
        const std::string path = folder_ / name, other = path + suffix;
        if (std::system(fmt::format("{} -c {} > {} 2>/dev/null", program, path, other).c_str()) == 0 &&
            error_of([&] { TextReader{other}; }).empty()) {
            std::filesystem::remove(path);
            ++packed;
        } else {
            std::filesystem::remove(other);
        }
    }
    if (packed == 0) GTEST_SKIP() << "no program to compress with";
    options_.output = folder_ / "packed.h5";
    tokenize(*bytes_, options_);
    EXPECT_EQ(TokenFile(options_.output).digest(), plain.digest());
}

// Killed at any report of progress, again and again, and run to its end: the bytes of an unbroken run.
TEST_F(TokenizeCorpus, AKilledRunIsContinued) {
    if (!can_kill) GTEST_SKIP() << "the thread sanitizer does not follow a fork";
    for (const bool folder : {true, false}) {
        if (!folder) options_.output = output_;
        set_valid();
        if (folder) options_.valid_output = folder_ / "valid";
        tokenize(*bytes_, options_);
        const auto unbroken = outputs(options_);
        remove_outputs();
        for (const int reports : {1, 8, 20}) {
            int killed = 0;
            for (; killed < 1000 && run_and_kill(options_, *bytes_, reports + killed % 3); ++killed) {
                EXPECT_FALSE(std::filesystem::exists(options_.output)) << "nothing under the final name";
                EXPECT_FALSE(std::filesystem::exists(options_.valid_output));
                options_.workers = 1 + killed % 4;
                if (killed > 10) break;  // the first reports come before any commit: no progress is made
            }
            if (reports >= 8) {
                EXPECT_GE(killed, 1) << reports;
            }
            bool resumed = false;
            TokenizeOptions last = options_;
            last.progress = [&](const TokenizeProgress& progress) { resumed = progress.resumed; };
            if (!std::filesystem::exists(options_.output)) {
                tokenize(*bytes_, last);
                if (reports >= 20) {
                    EXPECT_TRUE(resumed) << reports;
                }
            }
            EXPECT_TRUE(outputs(options_) == unbroken) << reports;
            remove_outputs();
        }
    }
}

TEST_F(TokenizeCorpus, AnotherRunIsNotMixedIn) {
    if (!can_kill) GTEST_SKIP() << "the thread sanitizer does not follow a fork";
    ASSERT_TRUE(run_and_kill(options_, *bytes_, 14));
    const std::string work = options_.output + ".partial", restart = ", or --restart to begin anew";
    ASSERT_TRUE(std::filesystem::exists(work + "/journal.json"));
    const auto refusal = [&](auto&& change) {
        TokenizeOptions other = options_;
        change(other);
        return error_of([&] { tokenize(*bytes_, other); });
    };
    EXPECT_EQ(refusal([](auto& o) { o.documents = DocumentUnit::line; }),
              work + " holds an interrupted run with another --documents; give the same to go on" + restart);
    EXPECT_EQ(refusal([](auto& o) { o.shard_tokens = 7; }),
              work + " holds an interrupted run with another --shard-tokens; give the same to go on" + restart);
    EXPECT_THAT(refusal([](auto& o) { o.deflate = 7; }), HasSubstr("another --deflate;"));
    EXPECT_THAT(refusal([&](auto& o) { o.valid_output = folder_ / "v", o.valid_share = 0.5; }),
                HasSubstr("another --valid-output;"));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "v.partial"));
    EXPECT_THAT(refusal([&](auto& o) { o.inputs.push_back(folder_ / "in/01.txt"); }),
                HasSubstr("over fewer files, without " + (folder_ / "in/01.txt")));
    const auto removed = [&](const char* name) {
        return work + " holds an interrupted run that reads " + (folder_ / name) +
               ", which is no longer among the files; give the same to go on" + restart;
    };
    EXPECT_EQ(refusal([&](auto& o) { o.inputs = {folder_ / "in/01.txt"}; }), removed("in/02.txt"));
    const std::string changed = folder_ / "in/11.txt", before = read_file(changed);
    std::filesystem::rename(changed, folder_ / "away");
    EXPECT_EQ(refusal([](auto&) {}), removed("in/11.txt"));
    std::filesystem::rename(folder_ / "away", changed);
    EXPECT_EQ(refusal([&](auto& o) {
                  o.inputs = {folder_ / "in/11.txt", folder_ / "in"};
              }),
              work + " holds an interrupted run that reads " + (folder_ / "in/01.txt") + " where " + changed +
                  " is given now; give the same to go on" + restart);
    text("in/11.txt", before + "more");
    EXPECT_EQ(refusal([](auto&) {}),
              changed + " has changed since the run that " + work + " holds was interrupted; give --restart to begin anew");
    text("in/11.txt", before);
    {
        FileLock lock;
        ASSERT_TRUE(lock.acquire(work + "/lock"));
        EXPECT_EQ(refusal([](auto&) {}),
                  options_.output + ": another run is writing it; wait for its end, or name another output");
    }
    // A shard that was damaged meanwhile is not built upon.
    const std::string journal = read_file(work + "/journal.json");
    for (const char* damaged : {"{", "{\"version\": 2}", "[]"}) {
        text("corpus.partial/journal.json", damaged);
        EXPECT_EQ(refusal([](auto&) {}), work +
                                             "/journal.json is damaged: it is not the JSON that fenwick tokenize writes; "
                                             "give --restart to begin anew");
    }
    // Every digit of it counts; version 1 had no checksum.
    for (std::size_t at = 0; at < journal.size(); ++at) {
        if (journal[at] < '0' || journal[at] > '9') continue;
        std::string damaged = journal;
        damaged[at] = damaged[at] == '7' ? '6' : '7';
        text("corpus.partial/journal.json", damaged);
        ASSERT_THAT(refusal([](auto&) {}), testing::AllOf(testing::StartsWith(work + "/journal.json "),
                                                          testing::EndsWith("; give --restart to begin anew")));
    }
    for (const auto& [key, said] :
         {std::pair("\"documents\":", "is damaged: its contents have another checksum than it says"),
          std::pair("\"version\":", "was written by another version of this program")}) {
        std::string contents = journal;
        contents.insert(contents.find(key) + std::string_view(key).size(), "1");
        text("corpus.partial/journal.json", contents);
        EXPECT_EQ(refusal([](auto&) {}), work + "/journal.json " + said + "; give --restart to begin anew");
    }
    TokenizeOptions anew = options_;
    anew.restart = true;
    tokenize(*bytes_, anew);
    const auto found = outputs(options_);
    remove_outputs();
    tokenize(*bytes_, options_);
    EXPECT_TRUE(outputs(options_) == found);
}

TEST_F(TokenizeCorpus, DamagedRemainsAreNotBuiltUpon) {
    if (!can_kill) GTEST_SKIP() << "the thread sanitizer does not follow a fork";
    options_.commit_bytes = 50000;
    ASSERT_TRUE(run_and_kill(options_, *bytes_, 14));
    const std::string work = options_.output + ".partial";
    const auto journal = nlohmann::json::parse(read_file(work + "/journal.json"));
    const auto& state = journal.at("outputs").at(0);
    std::vector<std::string> paths;
    for (const auto& shard : state.at("shards")) paths.push_back(work + "/shards/" + shard.at("file").get<std::string>());
    ASSERT_FALSE(state.at("open").is_null());
    for (const char* kind : {"tokens", "documents"})
        paths.push_back(fmt::format("{}/{:05}.{}", work, state.at("shards").size(), kind));
    EXPECT_GE(paths.size(), 3u);
    for (const std::string& path : paths) {
        const std::string good = read_file(path);
        const auto expect_refused = [&] {
            EXPECT_EQ(error_of([&] { tokenize(*bytes_, options_); }),
                      path + " is not as the interrupted run left it; give --restart to begin anew");
        };
        test::write_text(path, good.substr(0, good.size() - 1));
        if (path.ends_with(".h5")) expect_refused();  // of the others more may be there than the journal counts
        for (const std::size_t at : {std::size_t{0}, good.find("the ")}) {
            std::string contents = good;
            if (at >= contents.size()) continue;
            contents[at] = static_cast<char>(contents[at] ^ 1);
            test::write_text(path, contents);
            expect_refused();
        }
        test::write_text(path, std::string(good.size(), '\0'));
        expect_refused();
        std::filesystem::remove(path);
        expect_refused();
        test::write_text(path, good);
    }
    tokenize(*bytes_, options_);
    documents_of_corpus(options_.output);
}

// Wherever the disk fills: one line, nothing under the final name, and with room the same command ends the work.
TEST_F(TokenizeCorpus, AFullDiskKeepsWhatIsDone) {
    set_valid();
    tokenize(*bytes_, options_);
    const auto unbroken = outputs(options_);
    remove_outputs();
    for (const rlim_t limit : {100, 60000, 450000, 620000}) {
        std::string message;
        {
            const test::FileSizeLimit full(limit);
            message = error_of([&] { tokenize(*bytes_, options_); });
        }
        EXPECT_THAT(message, HasSubstr("File too large")) << limit;
        EXPECT_EQ(message.find('\n'), std::string::npos);
        EXPECT_TRUE(outputs(options_).empty());
        const bool kept = std::filesystem::exists(options_.output + ".partial");
        EXPECT_EQ(kept, message.ends_with("; what is done is kept in " + options_.output +
                                          ".partial: the same command goes on from there"));
        EXPECT_EQ(kept, limit >= 450000) << limit;
        tokenize(*bytes_, options_);
        EXPECT_TRUE(outputs(options_) == unbroken) << limit;
        remove_outputs();
    }
}

TEST_F(TokenizeCorpus, OutputsThatExistAreKept) {
    tokenize(*bytes_, options_);
    const auto before = outputs(options_);
    const std::string exists = " exists already; name another place, or give --overwrite to replace it";
    EXPECT_EQ(error_of([&] { tokenize(*bytes_, options_); }), options_.output + exists);
    EXPECT_TRUE(outputs(options_) == before);
    // Replaced as a whole
    options_.overwrite = true;
    options_.shard_tokens = 600000;
    tokenize(*bytes_, options_);
    EXPECT_LT(outputs(options_).size(), before.size());
    documents_of_corpus(options_.output);
    // What is no corpus is never replaced.
    options_.output = folder_ / "precious";
    std::filesystem::create_directory(options_.output);
    text("precious/a", "b");
    EXPECT_EQ(error_of([&] { tokenize(*bytes_, options_); }),
              options_.output + " is no corpus, and is not replaced; name another place");
    EXPECT_EQ(read_file(folder_ / "precious/a"), "b");
    EXPECT_FALSE(std::filesystem::exists(folder_ / "precious.partial"));
    options_.output = text("notes.h5", "mine");
    EXPECT_EQ(error_of([&] { tokenize(*bytes_, options_); }),
              options_.output + " is no corpus, and is not replaced; name another place");
    EXPECT_EQ(read_file(options_.output), "mine");
    // A corpus with files of the user's beside it, and a folder that has the name of the work folder by chance
    options_.output = folder_ / "mixed";
    tokenize(*bytes_, options_);
    text("mixed/mine.txt", "x");
    EXPECT_THAT(error_of([&] { tokenize(*bytes_, options_); }), HasSubstr("holds mine.txt, which is no part of a corpus"));
    EXPECT_EQ(read_file(folder_ / "mixed/mine.txt"), "x");
    options_.output = folder_ / "chance";
    std::filesystem::create_directory(folder_ / "chance.partial");
    text("chance.partial/mine.txt", "x");
    EXPECT_THAT(error_of([&] { tokenize(*bytes_, options_); }), HasSubstr("chance.partial is in the way"));
    EXPECT_EQ(read_file(folder_ / "chance.partial/mine.txt"), "x");
    options_.output = folder_ / "in/corpus";
    EXPECT_THAT(error_of([&] { tokenize(*bytes_, options_); }),
                HasSubstr("would lie in " + folder_.path() + "/in, a folder that is read"));
    options_.output = folder_ / "no/corpus";
    EXPECT_EQ(error_of([&] { tokenize(*bytes_, options_); }),
              options_.output + ": cannot be written: its folder does not exist");
    set_valid();
    options_.output = folder_ / "other";
    options_.valid_output = folder_ / "no/valid.h5";
    EXPECT_EQ(error_of([&] { tokenize(*bytes_, options_); }),
              options_.valid_output + ": cannot be written: its folder does not exist");
    EXPECT_FALSE(std::filesystem::exists(folder_ / "other.partial"));
    options_.valid_output = folder_ / "other/";
    EXPECT_THAT(error_of([&] { tokenize(*bytes_, options_); }),
                HasSubstr("is the output and the output of the validation share"));
}

TEST_F(TokenizeCorpus, BadInputsAreNamed) {
    options_.output = output_;
    const auto refusal = [&](const std::string& name, std::string_view contents) {
        options_.inputs = {folder_ / "in/01.txt", text(name, contents)};
        const std::string message = error_of([&] { tokenize(*bytes_, options_); });
        EXPECT_FALSE(std::filesystem::exists(output_));
        EXPECT_FALSE(std::filesystem::exists(output_ + ".partial"));
        return message;
    };
    const std::string path = folder_ / "bad.jsonl";
    EXPECT_EQ(refusal("bad.jsonl", "{\"text\": \"a\"}\n\n{\"text\": \"b\"\n"),
              path + ":3: it is not valid JSON (at byte 13)");
    EXPECT_EQ(refusal("bad.jsonl", "{\"text\": \"a\"}\n{\"content\": \"b\"}"), path + ":2: it has no field 'text'");
    EXPECT_EQ(refusal("bad.jsonl", "{\"text\": 1}"), path + ":1: its field 'text' is no text");
    EXPECT_THAT(refusal("bad.json", "[\n1]"), HasSubstr("bad.json:1: "));
    EXPECT_EQ(refusal("bad.gz", std::string_view("\x1f\x8b\x08\0\0\0\0\0\0\x03", 10)),
              folder_ / "bad.gz" + std::string(": the compressed data is cut off"));
    options_.text_field = "content";
    EXPECT_EQ(refusal("bad.jsonl", "{\"text\": \"a\"}\n"), path + ":1: it has no field 'content'");
    // The format may be given instead of guessed.
    options_.inputs = {text("b.txt", "{\"content\": \"x\"}\n{\"content\": \"y\"}\n")};
    options_.format = TextFormat::json_lines;
    tokenize(*bytes_, options_);
    EXPECT_THAT(documents_of(output_), ElementsAre("x", "y"));
    options_.inputs = {text("b.jsonl", "{\"content\": \"x\"}\n")};
    options_.format = TextFormat::text;
    options_.overwrite = true;
    tokenize(*bytes_, options_);
    EXPECT_THAT(documents_of(output_), ElementsAre("{\"content\": \"x\"}"));
    EXPECT_THAT(error_of([] { text_format_from("csv"); }), HasSubstr("use auto, text or jsonl"));
    const auto with_valid = [&](double share, const std::string& output) {
        options_.valid_share = share;
        options_.valid_output = output;
        return error_of([&] { tokenize(*bytes_, options_); });
    };
    EXPECT_EQ(with_valid(0.5, ""), "--valid-share is 0.5, and nothing says where these documents go; name --valid-output");
    EXPECT_EQ(with_valid(0, folder_ / "v.h5"),
              "--valid-share is 0 beside --valid-output; it must be above 0 and below 1, as in --valid-share 0.01");
    EXPECT_EQ(with_valid(1, folder_ / "v.h5"),
              "--valid-share is 1 beside --valid-output; it must be above 0 and below 1, as in --valid-share 0.01");
}

TEST_F(Tokenize, WikiText2) {
    const std::string path = test::shared_file("data/wikitext-2-tokens/wiki.test.tokens");
    if (path.empty()) GTEST_SKIP() << "no shared folder with WikiText-2";
    const auto info = run({path}, DocumentUnit::file);
    EXPECT_EQ(info.text_words, 241211);
    EXPECT_EQ(info.text_bytes, 1256449);
    EXPECT_EQ(info.num_tokens, 1256450);
    SentencePieceOptions training;
    training.vocab_size = 512;
    training.sample_bytes = 300000;
    train_sentencepiece({path}, training, folder_ / "a.model");
    const auto tokenizer = open_tokenizer(folder_ / "a.model");
    EXPECT_EQ(tokenizer->vocab_size(), 512);
    run({path}, DocumentUnit::file, *tokenizer);
    EXPECT_TRUE(documents_of(output_).at(0) == read_file(path));
    EXPECT_EQ(run({path}, DocumentUnit::line, *tokenizer).text_words, 241211);
}

}  // namespace
}  // namespace fenwick::data
