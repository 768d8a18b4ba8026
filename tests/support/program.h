// The program as a user runs it, for the tests of the command line.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>

#include "support/temporary_folder.h"

namespace fenwick::test {

struct Outcome {
    int exit_code = -1;
    std::string output;  // standard output and error
    std::size_t lines() const { return static_cast<std::size_t>(std::count(output.begin(), output.end(), '\n')); }
};

// Through the shell, ended after minutes (code 124), for nothing may hang. `before` stands before the program's name.
inline Outcome run_program(const std::string& arguments, const std::string& before = "") {
    Outcome outcome;
    const std::string line = "{ " + before + " timeout 300 " + FENWICK_PROGRAM + " " + arguments + " ; } 2>&1";
    FILE* pipe = popen(line.c_str(), "r");
    char buffer[4096];
    while (const std::size_t count = std::fread(buffer, 1, sizeof(buffer), pipe)) outcome.output.append(buffer, count);
    const int status = pclose(pipe);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return outcome;
}

// One line that says `message`, and exit code 2.
inline void expect_refused(const std::string& arguments, const std::string& message, const std::string& before = "") {
    const Outcome outcome = run_program(arguments, before);
    EXPECT_EQ(outcome.exit_code, 2) << arguments << "\n" << outcome.output;
    EXPECT_EQ(outcome.lines(), 1u) << arguments << "\n" << outcome.output;
    EXPECT_THAT(outcome.output, testing::HasSubstr(message)) << arguments;
}

// One folder for all tests of a suite; Suite::prepare() fills it.
template <class Suite>
class ProgramTest : public testing::Test {
public:
    static void SetUpTestSuite() {
        folder_.emplace();
        Suite::prepare();
    }
    static void TearDownTestSuite() { folder_.reset(); }

protected:
    static std::string path(const std::string& name) { return *folder_ / name; }

    // text.txt, train.h5 made of it, and config.yaml, which trains a small model on that; `data` and `train` are further
    // lines of these sections.
    static void write_small_run(int lines_of_text, const std::string& model_type, const std::string& data,
                                const std::string& train) {
        std::string text;
        for (int i = 0; i < lines_of_text; ++i)
            text += "line " + std::to_string(i * i) + " of a text that repeats itself.\n";
        write_text(path("text.txt"), text);
        write_text(path("config.yaml"),
                   "run_dir: " + path("run") + "\nmodel:\n  type: " + model_type +
                       "\n  hidden_size: 32\n  num_layers: 1\n  num_heads: 2\n  head_dim: 16\n  state_size: 16\n"
                       "data:\n  train: " +
                       path("train.h5") + "\n" + data + "  sequence_length: 64\ntrain:\n" + train);
        ASSERT_EQ(run_program("tokenize " + path("text.txt") + " -o " + path("train.h5")).exit_code, 0);
    }

    static inline std::optional<TemporaryFolder> folder_;
};

}  // namespace fenwick::test
