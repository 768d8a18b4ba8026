// Corpora as a user makes and meets them, damaged ones too: one clear line, exit code 2, nothing lost.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "support/small_tokenizer.h"
#include "support/temporary_folder.h"

namespace {

namespace fs = std::filesystem;
using fenwick::test::write_text;
using testing::HasSubstr;

struct Outcome {
    int exit_code = -1;
    std::string output;         // standard output and error
    std::int64_t peak_kib = 0;  // memory
};

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

class CorpusCommands : public testing::Test {
protected:
    // interrupt_at: once there is such a file, the program is sent SIGINT.
    Outcome fenwick(const std::vector<std::string>& arguments, const std::string& interrupt_at = "") {
        std::vector<char*> argv = {const_cast<char*>(FENWICK_PROGRAM)};
        for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
        argv.push_back(nullptr);
        const std::string log = folder_ / "log";
        const pid_t child = fork();
        if (child == 0) {
            const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
            dup2(file, STDOUT_FILENO);
            dup2(file, STDERR_FILENO);
            execv(FENWICK_PROGRAM, argv.data());
            _exit(127);
        }
        if (!interrupt_at.empty()) {
            bool is_running = true;
            for (; is_running && !fs::exists(interrupt_at); usleep(1000)) is_running = waitpid(child, nullptr, WNOHANG) == 0;
            if (is_running) kill(child, SIGINT);
        }
        int status = 0;
        rusage usage{};
        wait4(child, &status, 0, &usage);
        return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(log), usage.ru_maxrss};
    }
    void expect_refused(const std::vector<std::string>& arguments, const std::string& message) {
        const Outcome outcome = fenwick(arguments);
        EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
        EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
        EXPECT_THAT(outcome.output, HasSubstr(message));
    }
    void succeed(const std::vector<std::string>& arguments) {
        const Outcome outcome = fenwick(arguments);
        ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    }
    // A corpus of several shards of short lines.
    void make_corpus() {
        std::string text;
        for (int i = 0; i < 2000; ++i) text += "line " + std::to_string(i * i) + " of a text that repeats itself.\n";
        write_text(folder_ / "text.txt", text);
        succeed({"tokenize", folder_ / "text.txt", "--documents", "line", "--shard-tokens", "20000", "-o", corpus_});
    }

    fenwick::test::TemporaryFolder folder_;
    std::string corpus_ = folder_ / "corpus";
};

// From the file that others made through token file, checkpoint and exported folder and back.
TEST_F(CorpusCommands, ATokenizerJsonGoesWithTheModel) {
    namespace test = fenwick::test;
    auto file = test::small_tokenizer(test::byte_level(true));
    const std::string definition = file.dump(), tokenizer = folder_ / "tokenizer.json";
    write_text(tokenizer, definition);
    write_text(folder_ / "text.txt", "the tree then the level of the tree\n<|endoftext|> the end \xff\n");
    const std::string tokens = folder_ / "a.h5";
    const Outcome made = fenwick({"tokenize", folder_ / "text.txt", "--tokenizer", tokenizer, "-o", tokens});
    if (made.output.find("which this build was made without") != std::string::npos) GTEST_SKIP() << made.output;
    ASSERT_EQ(made.exit_code, 0) << made.output;
    EXPECT_THAT(fenwick({"info", tokens}).output, HasSubstr("tokenizer.json"));
    succeed({"tokenize", folder_ / "text.txt", "--tokenizer", tokens, "-o", folder_ / "b.h5"});
    EXPECT_EQ(read(tokens), read(folder_ / "b.h5"));

    write_text(folder_ / "config.yaml",
               "run_dir: " + folder_ / "run" + "\nmodel: {type: mamba2, vocab_size: " +
                   std::to_string(file["model"]["vocab"].size() + 1) +
                   ", hidden_size: 32, num_layers: 1, num_heads: 2, head_dim: 16, state_size: 16}\ndata: {train: " + tokens +
                   ", valid: " + tokens +
                   ", sequence_length: 8}\ntrain: {steps: 1, batch_size: 1, device: cpu, validate_tokens: 8}\n");
    succeed({"--quiet", "train", folder_ / "config.yaml"});
    succeed({"export", folder_ / "run", folder_ / "exported"});
    EXPECT_EQ(read(folder_ / "exported/tokenizer.json"), definition);
    succeed({"import", folder_ / "exported", "-o", folder_ / "imported.h5"});
    succeed({"--quiet", "eval", "perplexity", folder_ / "imported.h5", tokens});
    succeed({"--quiet", "generate", folder_ / "imported.h5", "--prompt", "the", "--max-tokens", "4"});

    // Several ends of a document: one is named, and goes with the tokenizer.
    file["added_tokens"].push_back(test::added_token(static_cast<std::int64_t>(file["model"]["vocab"].size()) + 1, "</s>"));
    write_text(tokenizer, file.dump());
    expect_refused({"tokenize", folder_ / "text.txt", "--tokenizer", tokenizer, "-o", folder_ / "c.h5"},
                   "'<|endoftext|>' and '</s>' could end a document; name one with --end-of-document");
    succeed({"tokenize", folder_ / "text.txt", "--tokenizer", tokenizer, "--end-of-document", "</s>", "-o", folder_ / "c.h5"});
    EXPECT_THAT(fenwick({"info", folder_ / "c.h5"}).output, HasSubstr("</s>"));  // the end of the text
    expect_refused({"tokenize", folder_ / "text.txt", "--tokenizer", tokens, "--end-of-document", "</s>", "-o", folder_ / "d.h5"},
                   "has its end of a document; --end-of-document is for a tokenizer.json");
}

TEST_F(CorpusCommands, AFolderOfShardsStandsWhereATokenFileDoes) {
    make_corpus();
    const auto info = fenwick({"info", corpus_});
    EXPECT_EQ(info.exit_code, 0);
    for (const char* part :
         {"corpus of 5 shards: ", "documents                        2,000", "document lengths in tokens",
          "vocabulary used: ", "first 48 tokens: \"line 0 of a text that repeats itself.line 1 of \"", "source: "})
        EXPECT_THAT(info.output, HasSubstr(part));
    EXPECT_EQ(fenwick({"verify", corpus_}).output, corpus_ + ": every checksum is right\n");
    EXPECT_EQ(fenwick({"verify", corpus_ + "/00003.h5"}).output, corpus_ + "/00003.h5: every checksum is right\n");
    write_text(folder_ / "config.yaml", "run_dir: " + folder_ / "run" +
                                            "\nmodel: {type: mamba2, vocab_size: 300, hidden_size: 32, num_layers: 1, "
                                            "num_heads: 2, head_dim: 16, state_size: 16}\n"
                                            "data: {train: " +
                                            corpus_ + ", valid: " + corpus_ +
                                            ", sequence_length: 64}\n"
                                            "train: {steps: 2, batch_size: 2, device: cpu, validate_tokens: 512}\n");
    succeed({"--quiet", "train", folder_ / "config.yaml"});
    const auto measured = fenwick({"--quiet", "eval", "perplexity", folder_ / "run", corpus_, "--max-tokens", "3000"});
    EXPECT_EQ(measured.exit_code, 0) << measured.output;
    EXPECT_THAT(measured.output, HasSubstr("(3000 tokens)"));
    // The same measured over one file of the same documents
    succeed({"tokenize", folder_ / "text.txt", "--documents", "line", "--tokenizer", corpus_, "-o", folder_ / "single.h5"});
    auto single =
        fenwick({"--quiet", "eval", "perplexity", folder_ / "run", folder_ / "single.h5", "--max-tokens", "3000"}).output;
    EXPECT_EQ(single.substr(single.find('\n')), measured.output.substr(measured.output.find('\n')));

    // Other data than the checkpoint's
    succeed({"tokenizer", "train", folder_ / "text.txt", "--vocab-size", "300", "-o", folder_ / "a.model"});
    succeed({"tokenize", folder_ / "text.txt", "--tokenizer", folder_ / "a.model", "-o", folder_ / "other"});
    expect_refused({"eval", "perplexity", folder_ / "run", folder_ / "other"},
                   "was made with another tokenizer (sentencepiece) than the model");
    expect_refused({"train", folder_ / "config.yaml", "--resume", "auto", "--set", "train.steps=4", "--set",
                    "data.train=" + folder_ / "other", "--set", "data.valid=" + folder_ / "other"},
                   "its tokenizer is not that of");
    expect_refused({"train", folder_ / "config.yaml", "--run-dir", folder_ / "small", "--set", "model.vocab_size=200"},
                   "model.vocab_size is 200");
}

TEST_F(CorpusCommands, DamageIsSaidInOneLine) {
    make_corpus();
    const std::string shard = corpus_ + "/00002.h5", good = read(shard), manifest = read(corpus_ + "/manifest.json");
    const auto refused_everywhere = [&](const std::string& message) {
        for (const std::string command : {"info", "verify"}) expect_refused({command, corpus_}, message);
    };
    write_text(shard, good.substr(0, good.size() / 2));
    refused_everywhere(shard + " has " + std::to_string(good.size() / 2) + " bytes; manifest.json says " +
                       std::to_string(good.size()));
    fs::remove(shard);
    refused_everywhere(corpus_ + ": shard 00002.h5 is missing; the corpus has 5 shards");
    write_text(shard, good);
    std::string flipped = good;
    // A token of the shard: "line " in two bytes a letter
    const auto at = flipped.find(std::string("l\0i\0n\0e\0 \0", 10));
    ASSERT_NE(at, std::string::npos);
    flipped[at + 4] = 'm';
    write_text(shard, flipped);
    refused_everywhere(shard + ": chunk 0 of 'tokens' (tokens 0 to ");
    fs::copy_file(corpus_ + "/00001.h5", corpus_ + "/00009.h5");
    refused_everywhere("00009.h5 is no shard of this corpus: manifest.json lists 5, without it");
    fs::remove(corpus_ + "/00009.h5");
    write_text(shard, good);
    succeed({"verify", corpus_});
    fs::remove(corpus_ + "/manifest.json");
    expect_refused({"verify", corpus_}, corpus_ + ": manifest.json, which makes its shards one corpus, is missing");
    write_text(corpus_ + "/manifest.json", manifest.substr(0, manifest.size() / 2));
    refused_everywhere("manifest.json is damaged");
}

TEST_F(CorpusCommands, OptionsOfTokenizing) {
    write_text(folder_ / "a.jsonl",
               "{\"body\": \"one\"}\n{\"body\": \"two\"}\n{\"body\": \"three\"}\n{\"body\": \"four\"}\n");
    write_text(folder_ / "empty.txt", "");
    const std::vector<std::string> command = {"tokenize", folder_ / "a.jsonl", folder_ / "empty.txt", "--text-field", "body",
                                              "-o",       folder_ / "a.h5"};
    const auto with = [&](std::vector<std::string> more) {
        more.insert(more.begin(), command.begin(), command.end());
        return more;
    };
    // An empty file is a source without documents.
    const auto made =
        fenwick(with({"--workers", "2", "--valid-share", "0.5", "--valid-output", folder_ / "v.h5", "--valid-seed", "1"}));
    EXPECT_EQ(made.exit_code, 0) << made.output;
    EXPECT_THAT(made.output, HasSubstr("a.h5: "));
    EXPECT_THAT(made.output, HasSubstr("v.h5: "));
    expect_refused(command, "a.h5 exists already; name another place, or give --overwrite");
    succeed(with({"--overwrite"}));
    EXPECT_THAT(fenwick({"info", folder_ / "a.h5"}).output, HasSubstr("empty.txt (0 bytes)"));
    expect_refused(with({"--overwrite", "--valid-share", "0.5"}), "--valid-share is 0.5, and nothing says where these documents go; name --valid-output");
    expect_refused(with({"--overwrite", "--end-of-document", ""}), "--end-of-document is empty");
    expect_refused({"tokenize", folder_ / "empty.txt", "-o", folder_ / "b.h5"}, "no text to tokenize in ");
    expect_refused({"tokenize", folder_ / "a.jsonl", "-o", folder_ / "b.h5"}, "a.jsonl:1: it has no field 'text'");
    EXPECT_FALSE(fs::exists(folder_ / "b.h5.partial"));
}

TEST_F(CorpusCommands, AShardOfACorpusIsNotReplaced) {
    make_corpus();
    const std::string shard = corpus_ + "/00000.h5", before = read(shard);
    for (const std::string& output : {shard, corpus_ + "/00099.h5"})
        expect_refused({"tokenize", folder_ / "text.txt", "--overwrite", "-o", output},
                       output + " would be a shard of the corpus " + corpus_ + ", which would no longer be whole; name another place");
    EXPECT_EQ(read(shard), before);
    EXPECT_FALSE(fs::exists(corpus_ + "/00099.h5"));
    EXPECT_FALSE(fs::exists(shard + ".partial"));
    succeed({"verify", corpus_});
}

TEST_F(CorpusCommands, AnInterruptedRunSaysThatItCanGoOn) {
    write_text(folder_ / "zeros.txt", "");
    fs::resize_file(folder_ / "zeros.txt", std::uintmax_t{4} << 30);  // minutes, and no room on the disk
    const auto outcome = fenwick({"tokenize", folder_ / "zeros.txt", "-o", folder_ / "z.h5"}, folder_ / "z.h5.partial");
    EXPECT_EQ(outcome.exit_code, -1) << "ended by the signal";
    EXPECT_THAT(outcome.output, HasSubstr("\nfenwick: interrupted; the same command goes on from what is done (" +
                                          (folder_ / "z.h5") + ".partial)\n"));
    EXPECT_FALSE(fs::exists(folder_ / "z.h5"));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// One line of 48 MB takes no more memory than one of 4 MB, nor does one document, nor many small ones.
TEST_F(CorpusCommands, MemoryDoesNotGrowWithTheText) {
    const auto peak = [&](std::size_t bytes, const char* unit, const std::string& part) {
        {
            std::ofstream file(folder_ / "long.txt", std::ios::binary);
            std::string block;
            while (block.size() < (1u << 20)) block += part;
            for (std::size_t written = 0; written < bytes; written += block.size()) file << block;
        }
        const auto outcome = fenwick({"tokenize", folder_ / "long.txt", "--documents", unit, "--workers", "2", "--overwrite",
                                      "-o", folder_ / "long.h5"});
        EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
        return outcome.peak_kib;
    };
    const auto small = peak(4 << 20, "line", "x");
    EXPECT_LT(peak(48 << 20, "line", "x"), small + (32 << 10));
    EXPECT_LT(peak(16 << 20, "file", "some words\n"), small + (32 << 10));
    EXPECT_LT(peak(4 << 20, "line", "few words\n"), small + (32 << 10));
    EXPECT_LT(small, 256 << 10);
}
#endif

}  // namespace
