// fenwick bench: every operator runs, the figures are there, and bad sizes are refused in one line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "support/temporary_folder.h"

namespace {

using testing::HasSubstr;

std::pair<int, std::string> fenwick(const std::string& arguments) {
    std::string output;
    FILE* pipe = popen((std::string(FENWICK_PROGRAM) + " " + arguments + " 2>&1").c_str(), "r");
    char buffer[4096];
    while (const std::size_t count = std::fread(buffer, 1, sizeof(buffer), pipe)) output.append(buffer, count);
    const int status = pclose(pipe);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output};
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Bench, EveryOperatorAtASmallSize) {
    const fenwick::test::TemporaryFolder folder;
    for (const std::string op :
         {"ssd --heads 2 --key_width 8 --value_width 4", "log_linear_ssd --heads 2 --key_width 8 --value_width 4",
          "gated_delta_rule --heads 2 --key_width 8 --value_width 16",
          "log_linear_gated_delta_rule --heads 2 --key_width 8 --value_width 16 --levels 3",
          "softmax_attention --heads 4 --groups 2 --width 8", "rope --heads 2 --width 8", "causal_conv1d --channels 12",
          "rms_norm --width 24", "add_rms_norm --width 24", "gated_rms_norm --width 24 --groups 2", "l2norm --heads 3 --width 8",
          "swiglu --width 24", "decay_gate --heads 3", "level_scales --heads 3", "scale_heads --heads 3 --width 8",
          "head_skip --heads 3 --width 8", "embedding --vocab 50 --width 8", "linear --in 16 --out 24",
          "linear_cross_entropy --width 16 --vocab 50", "adamw --parameters 1000"}) {
        const std::string json = folder / "out.json";
        const auto [code, output] =
            fenwick("bench " + op + " --tokens 256 --length 128 --repetitions 2 --device cpu --json " + json);
        ASSERT_EQ(code, 0) << op << "\n" << output;
        EXPECT_THAT(output, HasSubstr("forward"));
        EXPECT_THAT(read(json), HasSubstr("\"tokens\": 256")) << op;
        EXPECT_EQ(read(json).find("\"median_s\": 0.0,"), std::string::npos) << op;
    }
}

TEST(Bench, AStepOfAConfigWithoutData) {
    const fenwick::test::TemporaryFolder folder;
    const std::string config = folder / "config.yaml", json = folder / "step.json";
    fenwick::test::write_text(config, "run_dir: none\nmodel: {type: log_linear_mamba2, vocab_size: 100, hidden_size: 32, num_layers: 1,"
                                      " num_heads: 2, head_dim: 16, state_size: 16}\n"
                                      "data: {train: none.h5, sequence_length: 64}\n"
                                      "train: {steps: 1, batch_size: 2, micro_batch: 1, device: cpu}\n");
    const auto [code, output] = fenwick("bench step " + config + " --steps 2 --operators --json " + json);
    ASSERT_EQ(code, 0) << output;
    for (const char* part : {"tokens/s", "peak memory", "optimizer", "ssd backward", "linear forward"})
        EXPECT_THAT(output, HasSubstr(part));
    EXPECT_THAT(read(json), HasSubstr("\"flops_per_token\""));

    // Beside steps on data
    fenwick::test::write_text(folder / "text.txt", std::string(3000, 'a'));
    ASSERT_EQ(fenwick("tokenize " + (folder / "text.txt") + " -o " + (folder / "tokens.h5")).first, 0);
    for (const std::string packing : {"stream", "documents"}) {
        const auto compared = fenwick("bench step " + config + " --data --steps 2 --json " + json + " --set data.train=" +
                                      (folder / "tokens.h5") + " --set model.vocab_size=257 --set data.packing=" + packing);
        ASSERT_EQ(compared.first, 0) << compared.second;
        EXPECT_THAT(compared.second, HasSubstr("data over constant"));
        EXPECT_THAT(read(json), HasSubstr("\"data_over_constant\""));
    }
    EXPECT_THAT(fenwick("bench step " + config + " --data").second, HasSubstr("none.h5: no such file"));
    EXPECT_THAT(fenwick("bench step " + config + " --data --set data.train=" + (folder / "tokens.h5")).second,
                HasSubstr("model.vocab_size is 100, but"));

    const auto refused = fenwick("bench step " + config + " --set model.vocab_size=0");
    EXPECT_EQ(refused.first, 2);
    EXPECT_THAT(refused.second, HasSubstr("leaves the vocabulary to none.h5"));
}

TEST(Bench, Decoding) {
    const fenwick::test::TemporaryFolder folder;
    const std::string config = folder / "config.yaml", json = folder / "out.json";
    fenwick::test::write_text(config, "run_dir: runs/x\nmodel: {type: log_linear_mamba2, vocab_size: 100, hidden_size: 32, num_layers: 2, "
                                      "num_heads: 2, head_dim: 16, state_size: 16, num_levels: 6}\n"
                                      "data: {train: none.h5, sequence_length: 32}\ntrain: {steps: 1}\n");
    for (const std::string way : {"", " --plain", " --batch 3", " --separate", " --operators"}) {
        const auto [code, output] = fenwick("bench decode " + config + " --history 40 1000 --tokens 16 --seconds 0.01 --device cpu --json " + json + way);
        ASSERT_EQ(code, 0) << output;
        EXPECT_THAT(output, HasSubstr("of copy"));
        EXPECT_THAT(read(json), HasSubstr("\"history\": 1000"));
        EXPECT_THAT(read(json), HasSubstr("\"seconds_per_token\""));
    }
    const auto refused = fenwick("bench decode " + config + " --history 5 --device cpu");
    EXPECT_EQ(refused.first, 2);
    EXPECT_THAT(refused.second, HasSubstr("--history 5 with --tokens 64: at least 37 is needed"));
}

TEST(Bench, RefusesSizesThatDoNotFit) {
    const auto [code, output] = fenwick("bench rms_norm --tokens 100 --length 64 --device cpu");
    EXPECT_EQ(code, 2);
    EXPECT_THAT(output, HasSubstr("--tokens 100 is not a multiple of --length 64"));
    EXPECT_EQ(fenwick("bench rms_norm --width 0").first, 2);
    EXPECT_EQ(fenwick("bench").first, 2);
}

}  // namespace
