// The program as a user runs it: text to perplexity in seconds, and one clear line with exit code 2 for bad input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/files.h"
#include "support/program.h"

namespace {

using fenwick::read_file;
using fenwick::test::expect_refused;
using fenwick::test::Outcome;
using fenwick::test::run_program;
using fenwick::test::write_text;
using testing::HasSubstr;

struct CommandLine : fenwick::test::ProgramTest<CommandLine> {
    static void prepare() {
        write_small_run(400, "log_linear_mamba2", "  valid: " + path("valid.h5") + "\n",
                        "  steps: 20\n  batch_size: 4\n  checkpoint_every: 10\n");
        write_text(path("valid.txt"), "line 7 of a text that repeats itself.\nand ends.\n");
        ASSERT_EQ(run_program("tokenize " + path("valid.txt") + " -o " + path("valid.h5")).exit_code, 0);
        const auto trained = run_program("train " + path("config.yaml"));
        ASSERT_EQ(trained.exit_code, 0) << trained.output;
    }
};

TEST_F(CommandLine, TrainsEvaluatesGeneratesAndDescribes) {
    const auto eval =
        run_program("--quiet eval perplexity " + path("run") + " " + path("valid.h5") + " --json " + path("eval.json"));
    EXPECT_EQ(eval.exit_code, 0);
    EXPECT_THAT(eval.output, HasSubstr("bits per byte"));
    EXPECT_THAT(read_file(path("eval.json")), HasSubstr("\"bits_per_byte\":"));

    const auto text = run_program("generate " + path("run") + " --prompt 'line ' --max-tokens 20 --seed 3");
    EXPECT_EQ(text.exit_code, 0);
    EXPECT_THAT(text.output, testing::StartsWith("line "));
    EXPECT_EQ(run_program("generate " + path("run") + " --prompt 'line ' --max-tokens 20 --seed 3").output, text.output);

    const auto stats = run_program("generate " + path("run") + " --max-tokens 40 --ignore-end --stats --device cpu");
    EXPECT_EQ(stats.exit_code, 0);
    for (const char* column : {"tokens/s", "state bytes", "GB read a token", "of copy"}) EXPECT_THAT(stats.output, HasSubstr(column));
    const auto refused = run_program("generate " + path("run") + " --dtype bfloat16 --device cpu");
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.output, HasSubstr("--dtype bfloat16 needs a GPU; use float32"));

    EXPECT_THAT(run_program("info " + path("run")).output, HasSubstr("step 20"));
    EXPECT_THAT(run_program("info " + path("train.h5")).output, HasSubstr("documents"));
    EXPECT_THAT(run_program("info " + path("config.yaml")).output, HasSubstr("parameters"));
    EXPECT_EQ(run_program("verify " + path("train.h5")).exit_code, 0);
    EXPECT_EQ(run_program("verify " + path("run")).exit_code, 0);
}

TEST_F(CommandLine, ExportAndImportAreExact) {
    ASSERT_EQ(run_program("export " + path("run") + " " + path("exported")).exit_code, 0);
    const auto imported =
        run_program("import " + path("exported") + " --tokenizer " + path("run") + " -o " + path("imported.h5"));
    ASSERT_EQ(imported.exit_code, 0) << imported.output;
    ASSERT_EQ(run_program("export " + path("imported.h5") + " " + path("again")).exit_code, 0);
    EXPECT_EQ(read_file(path("exported/model.safetensors")), read_file(path("again/model.safetensors")));
    EXPECT_EQ(read_file(path("exported/config.json")), read_file(path("again/config.json")));

    // Training goes on from imported weights: a step at learning rate 0 leaves them as they are.
    const auto trained =
        run_program("train " + path("config.yaml") + " --set train.steps=1 --set optimizer.learning_rate=1e-30 --run-dir " +
                    path("from_import") + " --set train.init_from=" + path("imported.h5"));
    ASSERT_EQ(trained.exit_code, 0) << trained.output;
    ASSERT_EQ(run_program("export " + path("from_import") + " " + path("third")).exit_code, 0);
    EXPECT_EQ(read_file(path("exported/model.safetensors")), read_file(path("third/model.safetensors")));
    expect_refused("train " + path("config.yaml") + " --set model.hidden_size=64 --set train.init_from=" + path("imported.h5") +
                   " --run-dir " + path("other"), "weights/");
}

// What the public `safetensors` package reads of an exported folder and writes again, this program imports to the same bits.
TEST_F(CommandLine, ThePublicSafetensorsPackageReadsAndWritesTheSame) {
    const char* python = std::getenv("FENWICK_PYTHON");
    if (python == nullptr) GTEST_SKIP() << "FENWICK_PYTHON names no Python with numpy and safetensors (tools/test sets it)";
    ASSERT_EQ(run_program("export " + path("run") + " " + path("ours")).exit_code, 0);
    write_text(path("resave.py"),
               "import os, shutil, sys\n"
               "from safetensors.numpy import load_file, save_file\n"
               "ours, theirs = sys.argv[1:]\n"
               "os.makedirs(theirs)\n"
               "shutil.copy(ours + '/config.json', theirs)\n"
               "save_file(load_file(ours + '/model.safetensors'), theirs + '/model.safetensors')\n");
    ASSERT_EQ(std::system((std::string(python) + " " + path("resave.py") + " " + path("ours") + " " + path("theirs")).c_str()), 0);
    const auto imported =
        run_program("import " + path("theirs") + " --tokenizer " + path("run") + " -o " + path("theirs.h5"));
    ASSERT_EQ(imported.exit_code, 0) << imported.output;
    ASSERT_EQ(run_program("export " + path("theirs.h5") + " " + path("back")).exit_code, 0);
    EXPECT_EQ(read_file(path("ours/model.safetensors")), read_file(path("back/model.safetensors")));
}

TEST_F(CommandLine, EveryCommandHasHelpWithAnExample) {
    for (const std::string command : {"", "tokenizer", "tokenizer train", "tokenize", "train", "eval", "eval perplexity", "generate",
                                      "export", "import", "info", "verify"}) {
        const auto help = run_program(command + " --help");
        EXPECT_EQ(help.exit_code, 0) << command;
        EXPECT_THAT(help.output, HasSubstr("Example:\n  fenwick ")) << command;
    }
}

TEST_F(CommandLine, BadInputGivesOneLineAndExitCode2) {
    const std::string config = path("config.yaml");
    // The command line itself
    expect_refused("", "subcommand is required");
    expect_refused("trian", "unknown command 'trian'");
    expect_refused("train", "config");
    expect_refused("--log-level loud info " + config, "log level 'loud' is unknown");
    // Configs: unknown key with the nearest one and its line, wrong type, contradiction
    write_text(path("typo.yaml"), read_file(config) + "  micro_bach: 2\n");
    expect_refused("train " + path("typo.yaml"),
                   "typo.yaml:17: unknown key 'train.micro_bach'; did you mean 'train.micro_batch'?");
    expect_refused("train " + config + " --set train.steps=ten", "train.steps is 'ten'");
    expect_refused("train " + config + " --set model.nonsense=1", "unknown key 'model.nonsense'");
    expect_refused("train " + config + " --set train.batch_size=4 --set train.micro_batch=3 --run-dir " + path("new"), "micro_batch");
    expect_refused("train " + path("absent.yaml"), "absent.yaml");
    // A run that exists
    expect_refused("train " + config, "run");
    // Files: missing, foreign, truncated, damaged
    expect_refused("eval perplexity " + path("absent") + " " + path("valid.h5"), "absent");
    expect_refused("eval perplexity " + path("run") + " " + path("absent.h5"), "absent.h5");
    expect_refused("eval perplexity " + path("run") + " " + path("text.txt"), "text.txt");
    expect_refused("info " + path("text.txt"), "text.txt");
    const std::string tokens = read_file(path("train.h5"));
    write_text(path("short.h5"), tokens.substr(0, tokens.size() / 2));
    expect_refused("info " + path("short.h5"), "short.h5");
    const std::string checkpoint = read_file(path("run/checkpoints/step_20.h5"));
    write_text(path("short_checkpoint.h5"), checkpoint.substr(0, checkpoint.size() * 2 / 3));
    expect_refused("generate " + path("short_checkpoint.h5"), "short_checkpoint.h5");
    // Data: nothing to tokenize, a tokenizer that is none, a vocabulary that is too small
    write_text(path("empty.txt"), "");
    expect_refused("tokenize " + path("empty.txt") + " -o " + path("empty.h5"), "empty.txt");
    EXPECT_FALSE(std::filesystem::exists(path("empty.h5")));
    expect_refused("tokenize " + path("absent.txt") + " -o " + path("x.h5"), "absent.txt");
    expect_refused("tokenize " + path("text.txt") + " --tokenizer " + path("valid.txt") + " -o " + path("x.h5"), "valid.txt");
    expect_refused("train " + config + " --set model.vocab_size=100 --run-dir " + path("small"), "vocab");
    // A checkpoint of another model
    expect_refused("train " + config + " --resume auto --set model.hidden_size=64", "hidden_size");
}

// Every output may be a bare name in the folder where one stands, as the examples of --help have it.
TEST_F(CommandLine, OutputsMayBeBareNames) {
    const std::string there = "cd " + path("") + " && ";
    const auto in_folder = [&](const std::string& arguments) {
        const int status = std::system((there + FENWICK_PROGRAM + " --quiet " + arguments + " > out.log 2>&1").c_str());
        EXPECT_EQ(WEXITSTATUS(status), 0) << arguments << "\n" << read_file(path("out.log"));
    };
    in_folder("tokenize text.txt -o bare_tokens.h5");
    in_folder("train config.yaml --set train.steps=1 --run-dir bare_run --set data.train=bare_tokens.h5");
    in_folder("export bare_run bare_exported");
    in_folder("import bare_exported --tokenizer bare_run --output bare_imported.h5");
    in_folder("verify bare_imported.h5");
    in_folder("eval perplexity bare_imported.h5 valid.h5 --json bare.json");
    EXPECT_THAT(read_file(path("bare.json")), HasSubstr("bits_per_byte"));
}

TEST_F(CommandLine, RunDirIsAPathAsItStands) {
    for (const std::string name : {"a #1", "b: c", "*d", "[e]", "null", "12"}) {
        const auto trained =
            run_program("--quiet train " + path("config.yaml") + " --set train.steps=1 --run-dir '" + path(name) + "'");
        EXPECT_EQ(trained.exit_code, 0) << trained.output;
        EXPECT_FALSE(read_file(path(name + "/config.yaml")).empty()) << name;
    }
    expect_refused("train " + path("config.yaml") + " --run-dir ''", "--run-dir is empty");
    expect_refused("train " + path("config.yaml") + " --set run_dir=", "run_dir is empty");
}

TEST_F(CommandLine, NothingLeftToTrainIsSaid) {
    const std::string before = read_file(path("run/config.yaml"));
    const auto again = run_program("train " + path("config.yaml") + " --set train.steps=1 --resume auto --log-level error");
    EXPECT_EQ(again.exit_code, 0);
    EXPECT_EQ(again.lines(), 1u) << again.output;
    EXPECT_THAT(again.output, HasSubstr("nothing is left to train: the run is at step 20 of 1"));
    EXPECT_EQ(read_file(path("run/config.yaml")), before);
}

// Exit code 128 + the signal after a clean checkpoint; a finished run gives 0.
TEST_F(CommandLine, AStoppedRunSaysSoByItsExitCode) {
    for (const auto& [signal, code] : {std::pair{"INT", 130}, std::pair{"TERM", 143}}) {
        const std::string run = path(std::string("stopped_") + signal);
        const std::string script =
            std::string(FENWICK_PROGRAM) + " --quiet train " + path("config.yaml") + " --set train.steps=1000000 --run-dir " + run +
            " & child=$!; while ! grep -qs step " + run + "/metrics.jsonl; do kill -0 $child || exit 1; sleep 0.01; done; kill -" + signal +
            " $child; wait $child";
        // A shell without job control lets its background processes ignore SIGINT; with it (-m) it does not.
        write_text(path("stop.sh"), "set -m\n" + script + "\n");
        const int status = std::system(("bash " + path("stop.sh") + " > " + path("stop.log") + " 2>&1").c_str());
        EXPECT_EQ(WEXITSTATUS(status), code) << read_file(path("stop.log"));
        EXPECT_EQ(run_program("verify " + run).exit_code, 0);
    }
}

TEST_F(CommandLine, HugeNumbersAreRefused) {
    const std::string config = path("config.yaml");
    for (const std::string command : {"train ", "info "})
        for (const std::string given :
             {"--set data.sequence_length=9223372036854775807",
              "--set train.batch_size=4294967296 --set data.sequence_length=4294967296 --set train.steps=0 --set train.tokens=1000",
              "--set train.batch_size=9223372036854775807 --set train.steps=0 --set train.tokens=1000",
              "--set train.batch_size=1000000000", "--set train.num_threads=5000",
              "--set schedule.type=wsd --set schedule.decay_steps=9223372036854775807"})
            expect_refused(command + config + " " + given, "");
}

TEST_F(CommandLine, InvalidUtf8IsTextForTheByteTokenizer) {
    write_text(path("binary.txt"), std::string("\xff\xfe\x00\x80 broken \xc3", 13));
    EXPECT_EQ(run_program("tokenize " + path("binary.txt") + " -o " + path("binary.h5")).exit_code, 0);
    EXPECT_THAT(run_program("info " + path("binary.h5")).output, HasSubstr("text bytes"));
}

}  // namespace
