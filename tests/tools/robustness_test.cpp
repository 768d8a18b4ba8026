// What a newcomer does wrong: each gives one clear line and exit code 2, at once, and leaves the files as they were.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "base/files.h"
#include "support/program.h"

namespace {

using fenwick::read_file;
using fenwick::test::expect_refused;
using fenwick::test::run_program;
using fenwick::test::write_text;
using testing::HasSubstr;

struct Robustness : fenwick::test::ProgramTest<Robustness> {
    static void prepare() {
        write_small_run(200, "mamba2", "", "  steps: 2\n  batch_size: 2\n  device: cpu\n");
        for (const std::string& more : {std::string(), " --set model.vocab_size=4096 --run-dir " + path("padded")}) {
            const auto trained = run_program("train " + path("config.yaml") + more);
            ASSERT_EQ(trained.exit_code, 0) << trained.output;
        }
    }
};

TEST_F(Robustness, WhatIsNoFileIsRefusedAtOnce) {
    expect_refused("tokenizer train " + folder_->path() + " -o " + path("c"), "is a folder");
    for (const std::string command : {"tokenizer train ", "tokenize "}) {
        expect_refused(command + "/dev/zero -o " + path("c"), "/dev/zero is a device");
        expect_refused(command + path("nope") + " -o " + path("c"), "no such file");
    }
    ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
    for (const std::string command : {"info ", "verify "}) {
        expect_refused(command + path("nope.h5"), "nope.h5: no such file");
        expect_refused(command + path("pipe"), path("pipe") + " is a device, pipe or socket; a file is needed");
    }
    expect_refused("eval perplexity " + path("run") + " " + path("pipe"), "is a device, pipe or socket");
}

// A link to itself stands for folders that one may not read: root, too, gets the system's refusal.
TEST_F(Robustness, TheSystemsRefusalNamesTheFile) {
    std::filesystem::create_symlink("loop.h5", path("loop.h5"));
    std::filesystem::create_directory(path("closed"));
    std::filesystem::create_symlink("checkpoints", path("closed/checkpoints"));
    const std::string said = ": Too many levels of symbolic links\n";
    const std::string folder = "fenwick: " + path("closed/checkpoints") + said;
    expect_refused("info " + path("closed"), folder);
    expect_refused("verify " + path("closed"), folder);
    expect_refused("tokenize " + path("text.txt") + " --tokenizer " + path("closed") + " -o " + path("c"), folder);
    for (const std::string& command : {"info " + path("loop.h5"), "verify " + path("loop.h5"),
                                       "train " + path("config.yaml") + " --run-dir " + path("c") + " --set data.train=" + path("loop.h5")})
        expect_refused(command, "fenwick: " + path("loop.h5") + said);
}

TEST_F(Robustness, ALimitOfFileSizeIsAFullDisk) {
    expect_refused("--quiet tokenize " + path("text.txt") + " -o " + path("limited.h5"), "limited.h5: cannot be written: File too large",
                   "ulimit -f 8;");
    for (const std::string left : {"limited.h5", "limited.h5.partial"}) EXPECT_FALSE(std::filesystem::exists(path(left))) << left;
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_F(Robustness, ThreadsThatCannotStartAreRefused) {
    expect_refused("--threads 4000 info " + path("config.yaml"), "lower --threads", "ulimit -v 2000000;");
}

TEST_F(Robustness, EachCommandSaysWhatTakesLessMemory) {
    std::string line = "{\"text\": \"";
    for (int i = 0; i < 6000000; ++i) line += "word ";
    write_text(path("long.jsonl"), line + "\"}\n");
    const std::string before = "ulimit -v 300000; OPENBLAS_NUM_THREADS=1", command = "--quiet tokenize " + path("long.jsonl") + " -o " + path("long.h5");
    expect_refused(command + " --workers 2", "fenwick: out of memory; lower --workers from 2\n", before);
    expect_refused(command + " --workers 1", "fenwick: out of memory with one worker; shorter documents (lines of JSON) need less\n", before);
    EXPECT_FALSE(std::filesystem::exists(path("long.h5.partial")));
    const std::string large = " --set model.hidden_size=8192 --set model.intermediate_size=65536 --run-dir " + path("large");
    expect_refused("--quiet train " + path("config.yaml") + large,
                   "; lower train.micro_batch or data.sequence_length, or set train.recompute: block\n", "ulimit -v 1000000; OPENBLAS_NUM_THREADS=1");
    EXPECT_FALSE(std::filesystem::exists(path("large")));
}
#endif

TEST_F(Robustness, InputsAreNotOverwritten) {
    const std::string text = read_file(path("text.txt")), tokens = read_file(path("train.h5"));
    const std::string said = "the output would replace an input";
    expect_refused("tokenizer train " + path("text.txt") + " -o " + path("text.txt"), said);
    expect_refused("tokenize " + path("text.txt") + " -o " + path("text.txt"), said);
    expect_refused("tokenize " + path("text.txt") + " --tokenizer " + path("train.h5") + " -o " + path("train.h5"), said);
    expect_refused("eval perplexity " + path("run") + " " + path("train.h5") + " --json " + path("train.h5"), said);
    expect_refused("eval perplexity " + path("run") + " " + path("train.h5") + " --json " + path("run/checkpoints/step_2.h5"), said);
    expect_refused("export " + path("run") + " " + path("run"), said);
    expect_refused("bench step " + path("config.yaml") + " --json " + path("config.yaml"), said);
    ASSERT_EQ(run_program("export " + path("run") + " " + path("exported")).exit_code, 0);
    expect_refused("import " + path("exported") + " -o " + path("exported/model.safetensors"), said);
    EXPECT_EQ(read_file(path("text.txt")), text);
    EXPECT_EQ(read_file(path("train.h5")), tokens);
}

TEST_F(Robustness, PaddedVocabularyIsNeverDrawn) {
    const auto text = run_program("generate " + path("padded") + " --prompt a --max-tokens 200 --ignore-end");
    EXPECT_EQ(text.exit_code, 0) << text.output;
}

// Names and values reach a terminal with their control characters written out, and a message keeps to its line.
TEST_F(Robustness, ControlCharactersAreWrittenOut) {
    const std::string raw = "e\x1b[31m\nf\xff", shown = "e\\x1b[31m\\nf\\xff";
    const auto is_plain = [](const std::string& output) {
        return std::all_of(output.begin(), output.end(), [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); });
    };
    EXPECT_EQ(run_program("info '" + path(raw) + "'").output, "fenwick: " + path(shown) + ": no such file\n");
    expect_refused("train " + path("config.yaml") + " --set 'data.packing=" + raw + "'", "data.packing is 'e\\x1b[31m f\\xff'; one of stream");  // YAML folds lines
    std::filesystem::copy_file(path("text.txt"), path(raw));
    const std::string tokens = path(raw + ".h5");
    const auto made = run_program("tokenize '" + path(raw) + "' -o '" + tokens + "'");
    EXPECT_EQ(made.exit_code, 0);
    EXPECT_THAT(made.output, HasSubstr(path(shown) + ".h5: "));
    EXPECT_TRUE(is_plain(made.output)) << made.output;
    const auto told = run_program("info '" + tokens + "'");
    EXPECT_THAT(told.output, HasSubstr("token file: " + path(shown) + ".h5\n"));
    EXPECT_THAT(told.output, HasSubstr("  source: " + path("e\\x1b[31m\\nf")));  // JSON has no bytes that are not UTF-8
    EXPECT_TRUE(std::all_of(told.output.begin(), told.output.end(), [](char c) { return c == '\n' || (c != '\x7f' && (c < 0 || c >= ' ')); }));
    // The run's own config says it in YAML; a warning of the log on resuming, too.
    std::filesystem::copy_file(tokens, path("t\x1b"));
    const std::string run = "train " + path("config.yaml") + " --run-dir '" + path("r\x1b") + "'";
    ASSERT_EQ(run_program(run).exit_code, 0);
    EXPECT_THAT(read_file(path("r\x1b/config.yaml")), HasSubstr("run_dir: \"" + path("r\\x1b") + "\"\n"));
    const auto resumed = run_program(run + " --resume auto --set train.steps=3 --set 'data.train=\"" + path("t\\x1b") + "\"'");
    EXPECT_EQ(resumed.exit_code, 0);
    EXPECT_THAT(resumed.output, HasSubstr("fenwick: warning: data.train was "));
    EXPECT_THAT(resumed.output, HasSubstr("now it is [\"" + path("t\\x1b") + "\"]\n"));
    EXPECT_THAT(resumed.output, HasSubstr("run folder " + path("r\\x1b")));
    EXPECT_TRUE(is_plain(resumed.output)) << resumed.output;
}

TEST_F(Robustness, PlacesOfOutputs) {
    const std::string tokenize = "--quiet tokenize " + path("text.txt") + " --documents line -o ";
    expect_refused(tokenize + "/proc/x.h5", "fenwick: /proc/x.h5: cannot be written: no files can be made in /proc\n");
    expect_refused(tokenize + path("no/x.h5"), "fenwick: " + path("no/x.h5") + ": cannot be written: its folder does not exist\n");
    expect_refused("train " + path("config.yaml") + " --run-dir /proc/r",
                   "fenwick: /proc/r/checkpoints: the folder cannot be made: no files can be made in /proc\n");
    expect_refused("export " + path("run") + " /proc/e", "fenwick: /proc/e: the folder cannot be made: no files can be made in /proc\n");
    // One place under two names, where nothing stands yet
    expect_refused(tokenize + "x.h5 --valid-share 0.5 --valid-output ./x.h5",
                   "fenwick: x.h5 is the output and the output of the validation share; name two\n", "cd " + path("") + " &&");
    EXPECT_FALSE(std::filesystem::exists(path("x.h5.partial")));
    // A file in whatever case
    ASSERT_EQ(run_program(tokenize + path("capital.H5")).exit_code, 0);
    EXPECT_TRUE(std::filesystem::is_regular_file(path("capital.H5")));
    EXPECT_EQ(run_program("verify " + path("capital.H5")).output, path("capital.H5") + ": every checksum is right\n");
}

// Of the same size of vocabulary, so that its weights would fit.
TEST_F(Robustness, WeightsOfAnotherTokenizerAreRefused) {
    ASSERT_EQ(run_program("tokenizer train " + path("text.txt") + " --vocab-size 300 -o " + path("other.model")).exit_code, 0);
    ASSERT_EQ(run_program("tokenize " + path("text.txt") + " --tokenizer " + path("other.model") + " -o " + path("other.h5")).exit_code, 0);
    const auto identity_in = [](const std::string& file) {
        const std::string text = run_program("info " + file).output;
        return text.substr(text.find("identity ") + 9, 64);
    };
    const std::string ours = identity_in(path("other.h5")), theirs = identity_in(path("train.h5")),
                      checkpoint = path("padded/checkpoints/step_2.h5");
    const auto with = [](const std::string& init_from) {
        return "train " + path("config.yaml") + " --set model.vocab_size=4096 --set data.train=" + path("other.h5") + " --run-dir " +
               path("begun") + " --set train.init_from=" + init_from;
    };
    for (const std::string& init_from : {path("padded"), checkpoint})
        expect_refused(with(init_from), "train.init_from: " + checkpoint + " was trained with another tokenizer (bytes, identity " +
                                            theirs + ") than " + path("other.h5") + " was made with (sentencepiece, identity " + ours +
                                            "); tokenize the text with the checkpoint's: fenwick tokenize TEXT --tokenizer " +
                                            checkpoint + " --output FILE.h5");
    EXPECT_FALSE(std::filesystem::exists(path("begun")));
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

TEST_F(Robustness, TokenizerTrainingReplacesOnlyWhenAsked) {
    const std::string command = "tokenizer train " + path("text.txt") + " --vocab-size 300 -o ";
    write_text(path("mine.model"), "mine");
    expect_refused(command + path("mine.model"), "mine.model exists already; name another place, or give --overwrite");
    EXPECT_EQ(read_file(path("mine.model")), "mine");
    EXPECT_EQ(run_program(command + path("mine.model") + " --overwrite").exit_code, 0);
    EXPECT_NE(read_file(path("mine.model")), "mine");
    expect_refused(command + folder_->path(), "is a folder; name a file");
}

TEST_F(Robustness, TokenizerTrainingSaysTheRealCount) {
    const auto trained = run_program("tokenizer train " + path("text.txt") + " --vocab-size 30000 -o " + path("c.model"));
    EXPECT_EQ(trained.exit_code, 0) << trained.output;
    EXPECT_THAT(trained.output, HasSubstr("pieces of 30000: the text has no more"));
}

TEST_F(Robustness, PromptsWithNulAreEchoedWhole) {
    const auto text = run_program("generate " + path("run") + " --prompt - --max-tokens 0", "printf 'ab\\000cd' |");
    EXPECT_EQ(text.output, std::string("ab\0cd\n", 6));
}

TEST_F(Robustness, ImportFindsTheBytesTokenizerAndMakesNoFolder) {
    ASSERT_EQ(run_program("export " + path("run") + " " + path("bytes")).exit_code, 0);
    const auto imported = run_program("import " + path("bytes") + " -o " + path("imported.h5"));
    EXPECT_EQ(imported.exit_code, 0) << imported.output;
    expect_refused("import " + path("bytes") + " -o " + path("missing/imported.h5"), "its folder does not exist");
    EXPECT_FALSE(std::filesystem::exists(path("missing")));
    EXPECT_THAT(run_program("export " + path("padded") + " " + path("padded_bytes")).output, HasSubstr("--tokenizer bytes"));
    expect_refused("import " + path("padded_bytes") + " -o " + path("padded.h5"), "--tokenizer");
    // What stands there stays, until told otherwise.
    const std::string before = read_file(path("imported.h5"));
    expect_refused("import " + path("bytes") + " --sequence-length 7 -o " + path("imported.h5"), "--overwrite");
    EXPECT_TRUE(read_file(path("imported.h5")) == before);
    EXPECT_EQ(run_program("import " + path("bytes") + " --sequence-length 7 --overwrite -o " + path("imported.h5")).exit_code, 0);
    EXPECT_FALSE(read_file(path("imported.h5")) == before);
}

TEST_F(Robustness, EveryHelpNamesTheGlobalOptions) {
    for (const std::string command : {"tokenizer train", "tokenize", "train", "eval perplexity", "generate", "export", "import", "bench",
                                      "bench ssd", "info", "verify"})
        EXPECT_THAT(run_program(command + " --help").output, HasSubstr("--log-level")) << command;
}

}  // namespace
