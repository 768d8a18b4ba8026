// What a newcomer does wrong: each gives one clear line and exit code 2, at once, and leaves the files as they were.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "support/temporary_folder.h"

namespace {

using fenwick::test::write_text;
using testing::HasSubstr;

struct Outcome {
    int exit_code = -1;
    std::string output;  // standard output and error
};

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Through the shell, ended after a minute (code 124): nothing here may hang.
Outcome fenwick(const std::string& arguments, const std::string& before = "") {
    Outcome outcome;
    const std::string line = "{ " + before + " timeout 60 " + FENWICK_PROGRAM + " " + arguments + " ; } 2>&1";
    FILE* pipe = popen(line.c_str(), "r");
    char buffer[4096];
    while (const std::size_t count = std::fread(buffer, 1, sizeof(buffer), pipe)) outcome.output.append(buffer, count);
    const int status = pclose(pipe);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return outcome;
}

void expect_refused(const std::string& arguments, const std::string& message, const std::string& before = "") {
    const Outcome outcome = fenwick(arguments, before);
    EXPECT_EQ(outcome.exit_code, 2) << arguments << "\n" << outcome.output;
    EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << arguments << "\n" << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(message)) << arguments;
}

class Robustness : public testing::Test {
protected:
    static void SetUpTestSuite() {
        folder_ = new fenwick::test::TemporaryFolder;
        std::string text;
        for (int i = 0; i < 200; ++i) text += "line " + std::to_string(i * i) + " of a text that repeats itself.\n";
        write_text(path("text.txt"), text);
        write_text(path("config.yaml"),
                   "run_dir: " + path("run") + "\n"
                   "model:\n  type: mamba2\n  hidden_size: 32\n  num_layers: 1\n  num_heads: 2\n  head_dim: 16\n  state_size: 16\n"
                   "data:\n  train: " + path("train.h5") + "\n  sequence_length: 64\n"
                   "train:\n  steps: 2\n  batch_size: 2\n  device: cpu\n");
        ASSERT_EQ(fenwick("tokenize " + path("text.txt") + " -o " + path("train.h5")).exit_code, 0);
        for (const std::string& more : {std::string(), " --set model.vocab_size=4096 --run-dir " + path("padded")}) {
            const auto trained = fenwick("train " + path("config.yaml") + more);
            ASSERT_EQ(trained.exit_code, 0) << trained.output;
        }
    }
    static void TearDownTestSuite() {
        delete folder_;
        folder_ = nullptr;
    }
    static std::string path(const std::string& name) { return *folder_ / name; }
    static fenwick::test::TemporaryFolder* folder_;
};
fenwick::test::TemporaryFolder* Robustness::folder_ = nullptr;

TEST_F(Robustness, WhatIsNoFileIsRefusedAtOnce) {
    expect_refused("tokenizer train " + folder_->path() + " -o " + path("c"), "is a folder");
    for (const std::string command : {"tokenizer train ", "tokenize "}) {
        expect_refused(command + "/dev/zero -o " + path("c"), "/dev/zero is a device");
        expect_refused(command + path("nope") + " -o " + path("c"), "no such file");
    }
    for (const std::string command : {"info ", "verify "}) expect_refused(command + path("nope.h5"), "nope.h5: no such file");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_F(Robustness, ThreadsThatCannotStartAreRefused) {
    expect_refused("--threads 4000 info " + path("config.yaml"), "lower --threads", "ulimit -v 2000000;");
}
#endif

TEST_F(Robustness, InputsAreNotOverwritten) {
    const std::string text = read(path("text.txt")), tokens = read(path("train.h5"));
    const std::string said = "the output would replace an input";
    expect_refused("tokenizer train " + path("text.txt") + " -o " + path("text.txt"), said);
    expect_refused("tokenize " + path("text.txt") + " -o " + path("text.txt"), said);
    expect_refused("tokenize " + path("text.txt") + " --tokenizer " + path("train.h5") + " -o " + path("train.h5"), said);
    expect_refused("eval perplexity " + path("run") + " " + path("train.h5") + " --json " + path("train.h5"), said);
    expect_refused("eval perplexity " + path("run") + " " + path("train.h5") + " --json " + path("run/checkpoints/step_2.h5"), said);
    expect_refused("export " + path("run") + " " + path("run"), said);
    expect_refused("bench step " + path("config.yaml") + " --json " + path("config.yaml"), said);
    ASSERT_EQ(fenwick("export " + path("run") + " " + path("exported")).exit_code, 0);
    expect_refused("import " + path("exported") + " -o " + path("exported/model.safetensors"), said);
    EXPECT_EQ(read(path("text.txt")), text);
    EXPECT_EQ(read(path("train.h5")), tokens);
}

TEST_F(Robustness, PaddedVocabularyIsNeverDrawn) {
    const auto text = fenwick("generate " + path("padded") + " --prompt a --max-tokens 200 --ignore-end");
    EXPECT_EQ(text.exit_code, 0) << text.output;
}

TEST_F(Robustness, FullStandardOutputIsAnError) {
    for (const std::string& arguments : {"info " + path("train.h5"), "generate " + path("run") + " --max-tokens 5",
                                        "--quiet eval perplexity " + path("run") + " " + path("train.h5"), std::string("--help")})
        expect_refused(arguments + " > /dev/full", "standard output cannot be written");
}

TEST_F(Robustness, NumbersOutOfRangeAreRefused) {
    for (const std::string number : {"nan", "inf", "-1"}) {
        for (const std::string option : {"--temperature ", "--top-p "})
            expect_refused("generate " + path("run") + " --prompt hello " + option + number, option.substr(0, option.size() - 1));
        expect_refused("export " + path("run") + " " + path("e2") + " --shard-gb " + number, "--shard-gb");
        expect_refused("bench operators --seconds " + number, "--seconds");
    }
    expect_refused("bench operators --tokens -5 --length 0", "--");
    expect_refused("bench operators --tokens 100 --length 64", "not a multiple");
    for (const std::string op : {"operators", "ssd", "embedding", "linear"})
        for (const std::string option : {"--tokens ", "--length "})
            for (const std::string number : {"0", "-5", "1152921504606846976"}) expect_refused("bench " + op + " " + option + number, option.substr(0, 8));
    expect_refused("bench nope", "unknown operator 'nope'; there are ");
    expect_refused("tokenizer train " + path("text.txt") + " --vocab-size 100 -o " + path("c"), "300");
}

TEST_F(Robustness, TokenizerTrainingSaysTheRealCount) {
    const auto trained = fenwick("tokenizer train " + path("text.txt") + " --vocab-size 30000 -o " + path("c.model"));
    EXPECT_EQ(trained.exit_code, 0) << trained.output;
    EXPECT_THAT(trained.output, HasSubstr("pieces of 30000: the text has no more"));
}

TEST_F(Robustness, PromptsWithNulAreEchoedWhole) {
    const auto text = fenwick("generate " + path("run") + " --prompt - --max-tokens 0", "printf 'ab\\000cd' |");
    EXPECT_EQ(text.output, std::string("ab\0cd\n", 6));
}

TEST_F(Robustness, ImportFindsTheBytesTokenizerAndMakesNoFolder) {
    ASSERT_EQ(fenwick("export " + path("run") + " " + path("bytes")).exit_code, 0);
    const auto imported = fenwick("import " + path("bytes") + " -o " + path("imported.h5"));
    EXPECT_EQ(imported.exit_code, 0) << imported.output;
    expect_refused("import " + path("bytes") + " -o " + path("missing/imported.h5"), "its folder does not exist");
    EXPECT_FALSE(std::filesystem::exists(path("missing")));
    EXPECT_THAT(fenwick("export " + path("padded") + " " + path("padded_bytes")).output, HasSubstr("--tokenizer bytes"));
    expect_refused("import " + path("padded_bytes") + " -o " + path("imported.h5"), "--tokenizer");
}

TEST_F(Robustness, EveryHelpNamesTheGlobalOptions) {
    for (const std::string command : {"tokenizer train", "tokenize", "train", "eval perplexity", "generate", "export", "import", "bench",
                                      "bench ssd", "info", "verify"})
        EXPECT_THAT(fenwick(command + " --help").output, HasSubstr("--log-level")) << command;
}

}  // namespace
