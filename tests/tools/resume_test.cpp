// A run that is killed outright and resumed gives the bytes of one that was not.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>
#include <vector>

#include "support/temporary_folder.h"

namespace {

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// metrics.jsonl without its times, which stand last in every line.
std::string metrics(const std::string& run) {
    std::istringstream lines(read(run + "/metrics.jsonl"));
    std::string result;
    for (std::string line; std::getline(lines, line);) result += line.substr(0, line.find(",\"time_s\"")) + "\n";
    return result;
}

class Resume : public testing::TestWithParam<int> {
protected:
    pid_t start(const std::vector<std::string>& arguments) {
        std::vector<char*> argv = {const_cast<char*>(FENWICK_PROGRAM)};
        for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
        argv.push_back(nullptr);
        const pid_t child = fork();
        if (child == 0) {
            const int null = open("/dev/null", O_WRONLY);
            dup2(null, STDERR_FILENO);
            dup2(null, STDOUT_FILENO);
            execv(FENWICK_PROGRAM, argv.data());
            _exit(127);
        }
        return child;
    }
    int wait_for(pid_t child) {
        int status = 0;
        waitpid(child, &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }
    int run(const std::vector<std::string>& arguments) { return wait_for(start(arguments)); }
    std::vector<std::string> training(const std::string& run_dir) {
        return {"--quiet", "--threads", std::to_string(GetParam()), "train", folder_ / "config.yaml", "--resume", "auto", "--run-dir",
                run_dir};
    }
    fenwick::test::TemporaryFolder folder_;
};

TEST_P(Resume, SixtyStepsKilledTwiceAreSixtySteps) {
    std::string text;
    for (int i = 0; i < 3000; ++i) text += "sentence number " + std::to_string(i * 7919 % 1000) + " says little.\n";
    fenwick::test::write_text(folder_ / "text.txt", text);
    ASSERT_EQ(run({"--quiet", "tokenize", folder_ / "text.txt", "--documents", "line", "-o", folder_ / "tokens.h5"}), 0);
    const std::string packing = GetParam() == 1 ? "stream" : "documents";
    fenwick::test::write_text(folder_ / "config.yaml",
                              "run_dir: unused\n"
                              "model: {type: log_linear_mamba2, hidden_size: 64, num_layers: 2, num_heads: 4, head_dim: 32, state_size: 32}\n"
                              "data: {train: " + (folder_ / "tokens.h5") + ", valid: " + (folder_ / "tokens.h5") +
                                  ", sequence_length: 128, packing: " + packing + "}\n"
                              "train: {steps: 60, batch_size: 8, micro_batch: 4, checkpoint_every: 7, validate_every: 20, validate_tokens: 512}\n");
    const std::string whole = folder_ / "whole", killed = folder_ / "killed";
    ASSERT_EQ(run(training(whole)), 0);
    for (const char* step : {"\"step\":23,", "\"step\":41,"}) {
        const pid_t child = start(training(killed));
        for (int i = 0; i < 60000 && read(killed + "/metrics.jsonl").find(step) == std::string::npos; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        kill(child, SIGKILL);
        ASSERT_EQ(wait_for(child), -SIGKILL) << "the run ended before it could be killed";
    }
    ASSERT_EQ(run(training(killed)), 0);
    EXPECT_EQ(metrics(whole), metrics(killed));
    for (const auto& name : {whole, killed}) ASSERT_EQ(run({"--quiet", "export", name, name + "/exported"}), 0);
    const std::string weights = read(whole + "/exported/model.safetensors");
    EXPECT_GT(weights.size(), 100000u);
    EXPECT_TRUE(weights == read(killed + "/exported/model.safetensors")) << "weights differ";
}

INSTANTIATE_TEST_SUITE_P(Threads, Resume, testing::Values(1, 2));

}  // namespace
