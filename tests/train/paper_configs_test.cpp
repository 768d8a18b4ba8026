// The configurations of configs/paper: the models of Guo et al. have the sizes that the paper gives, and one run sees
// 50 billion tokens.
#include <gtest/gtest.h>

#include <cmath>

#include "model/parameters.h"
#include "train/config.h"
#include "train/schedule.h"

namespace fenwick::train {
namespace {

RunConfig paper(const std::string& name) {
    return load_config(std::string(FENWICK_SOURCE_DIR) + "/configs/paper/" + name + ".yaml");
}

TEST(PaperConfigs, HaveThePapersSizes) {
    for (const auto& [name, millions] : {std::pair<const char*, std::int64_t>{"transformer", 693},
                                         {"transformer_24_layers", 778},
                                         {"mamba2", 802},
                                         {"log_linear_mamba2", 825},
                                         {"gated_deltanet", 793},
                                         {"log_linear_gated_deltanet", 796}}) {
        RunConfig config = paper(name);
        config.model.validate();
        EXPECT_EQ(std::llround(static_cast<double>(model::parameter_count(config.model)) / 1e6), millions) << name;
        EXPECT_EQ(config.model.mlp_width(), 4096) << name;
        if (model::has_levels(config.model.type)) {
            EXPECT_EQ(config.model.num_levels, 15) << name;
        }
        EXPECT_EQ(config.train.batch_size * config.data.sequence_length, 524288) << name;
        EXPECT_EQ(config.train.steps, 95368) << name;
        EXPECT_EQ(config.train.dtype, DType::bfloat16) << name;
        for (const int processes : {1, 2, 4, 8}) {
            RunConfig resolved = config;
            EXPECT_NO_THROW(resolve_for_processes(resolved, processes)) << name << " on " << processes;
        }
        const auto rate = [&](std::int64_t step) {
            return learning_rate(config.schedule, config.optimizer.learning_rate, step, config.train.steps);
        };
        EXPECT_NEAR(rate(1024), 3e-4, 1e-9) << name;
        EXPECT_NEAR(rate(config.train.steps), 3e-5, 1e-9) << name;
        EXPECT_LT(rate(1), 1e-6) << name;
    }
}

// Compared at equal tokens, so they must be of a size.
TEST(GutenbergConfigs, DifferInTheModelAlone) {
    RunConfig configs[2];
    for (const int i : {0, 1}) {
        const std::string name = i == 0 ? "log_linear_mamba2" : "transformer";
        configs[i] = load_config(std::string(FENWICK_SOURCE_DIR) + "/configs/gutenberg/" + name + ".yaml");
        configs[i].model.vocab_size = 32000;
        if (i == 0) configs[i].model.num_levels = 13;
        configs[i].model.validate();
        const double millions = static_cast<double>(model::parameter_count(configs[i].model)) / 1e6;
        EXPECT_NEAR(millions, 111, 2) << name;
        configs[i].model = {};
        configs[i].run_dir.clear();
    }
    EXPECT_EQ(to_yaml(configs[0]), to_yaml(configs[1]));
}

}  // namespace
}  // namespace fenwick::train
