#include "model/parameters.h"

#include <cmath>
#include <set>

#include "small_models.h"

namespace fenwick::model {
namespace {

std::string message_of(const ModelConfig& config) {
    try {
        config.validate();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

TEST(ModelConfig, NamesTheContradictionAndALegalAlternative) {
    const auto with = [](ModelType type, auto change) {
        ModelConfig config = test::small_config(type);
        EXPECT_EQ(message_of(config), "");
        change(config);
        return message_of(config);
    };
    EXPECT_EQ(with(ModelType::transformer, [](auto& c) { c.hidden_size = 100, c.num_heads = 16, c.head_dim = 0; }),
              "model.hidden_size 100 is not divisible by model.num_heads 16 (head_dim would be 6.25); use 96 or 112, or set "
              "model.head_dim");
    EXPECT_EQ(with(ModelType::transformer, [](auto& c) { c.num_heads = 6, c.num_kv_heads = 4; }),
              "model.num_heads 6 is not divisible by model.num_kv_heads 4; use 3");
    EXPECT_EQ(with(ModelType::transformer, [](auto& c) { c.head_dim = 7; }),
              "model.head_dim is 7; rotary positions turn pairs, so it must be even: use 8 (or another model.num_heads)");
    EXPECT_EQ(with(ModelType::mamba2, [](auto& c) { c.n_groups = 3; }),
              "model.num_heads 4 is not divisible by model.n_groups 3; use 2");
    EXPECT_EQ(with(ModelType::mamba2, [](auto& c) { c.chunk_size = 48; }),
              "model.chunk_size is 48; use 16, 32, 64, 128 or 256");
    EXPECT_EQ(with(ModelType::mamba2, [](auto& c) { c.vocab_size = 0; }),
              "model.vocab_size is 0; a whole number of at least 1 is needed, for example 32000");
    EXPECT_EQ(with(ModelType::gated_deltanet, [](auto& c) { c.expand_v = 1.3; }),
              "model.expand_v 1.3 times model.head_dim 16 is 20.8, not a whole positive width of values; use expand_v 1.25");
    EXPECT_NE(with(ModelType::log_linear_mamba2, [](auto& c) { c.num_levels = 0; }).find("model.num_levels is 0"),
              std::string::npos);
    EXPECT_NE(with(ModelType::mamba2, [](auto& c) { c.norm_eps = NAN; }).find("model.norm_eps"), std::string::npos);
    EXPECT_NE(with(ModelType::mamba2, [](auto& c) { c.hidden_size = std::int64_t{1} << 62; }).find("at most"), std::string::npos);
    EXPECT_EQ(with(ModelType::mamba2, [](auto& c) { c.num_levels = 0, c.num_kv_heads = 3; }), "");  // not its fields
}

TEST(ModelConfig, TypesByName) {
    for (const auto type : test::all_types) EXPECT_EQ(model_type_from(name_of(type)), type);
    try {
        model_type_from("mamba3");
        FAIL();
    } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "model.type is 'mamba3'; use one of transformer, mamba2, log_linear_mamba2, gated_deltanet, "
                                   "log_linear_gated_deltanet");
    }
}

TEST(ModelConfig, MlpWidth) {
    ModelConfig config;
    for (const auto& [hidden, width] : {std::pair<std::int64_t, std::int64_t>{1536, 4096}, {1537, 4352}, {96, 256}, {97, 512}}) {
        config.hidden_size = hidden;
        EXPECT_EQ(config.mlp_width(), width) << hidden;
    }
}

// The sizes of Guo et al., section 4: millions of parameters, rounded.
TEST(Parameters, CountsOfThePapersModels) {
    ModelConfig config;
    config.vocab_size = 32000;
    config.hidden_size = 1536;
    config.num_layers = 21;
    config.num_levels = 15;
    const auto millions = [&](ModelType type) {
        config.type = type;
        config.validate();
        return std::llround(static_cast<double>(parameter_count(config)) / 1e6);
    };
    config.num_heads = 16;
    EXPECT_EQ(millions(ModelType::transformer), 693);
    config.num_layers = 24;
    EXPECT_EQ(millions(ModelType::transformer), 778);
    config.num_layers = 21;
    config.num_heads = 48;
    config.head_dim = 64;
    EXPECT_EQ(millions(ModelType::mamba2), 802);
    EXPECT_EQ(millions(ModelType::log_linear_mamba2), 825);
    config.num_heads = 6;
    config.head_dim = 192;
    EXPECT_EQ(millions(ModelType::gated_deltanet), 793);
    EXPECT_EQ(millions(ModelType::log_linear_gated_deltanet), 796);
}

TEST(Parameters, NoDecayOnGatesNormsAndBiases) {
    for (const auto type : test::all_types)
        for (const auto& parameter : parameter_shapes(test::small_config(type)))
            EXPECT_EQ(parameter.weight_decay, parameter.shape.size() >= 2 && parameter.name.find(".L") == std::string::npos)
                << parameter.name;
}

TEST(Parameters, InitialValuesFollowTheirDistributions) {
    ModelConfig config = test::small_config(ModelType::gated_deltanet);
    config.num_layers = 8;
    const auto moments = [&](const Shape& shape, Initial initial) {
        const auto values = initial_values({"some.name", shape, initial}, config, 7);
        double mean = 0, square = 0, low = 1e300, high = -1e300;
        for (const double x : values) {
            mean += x, square += x * x;
            low = std::min(low, x), high = std::max(high, x);
        }
        const auto count = static_cast<double>(values.size());
        mean /= count;
        return std::array{mean, std::sqrt(square / count - mean * mean), low, high};
    };
    const auto normal = moments({400, 500}, Initial::normal);
    EXPECT_NEAR(normal[0], 0, 3e-4);
    EXPECT_NEAR(normal[1], 0.02, 3e-4);
    // U(-1, 1) / sqrt(fan_in 400) / sqrt(16): deviation 1 / sqrt(3 * 400 * 16)
    const auto output = moments({500, 400}, Initial::output_projection);
    EXPECT_NEAR(output[1], 1 / std::sqrt(3.0 * 400 * 16), 1e-4);
    EXPECT_LE(output[3], 1 / std::sqrt(400.0 * 16));
    EXPECT_GE(output[2], -1 / std::sqrt(400.0 * 16));
    const auto convolution = moments({5000, 1, 4}, Initial::convolution);
    EXPECT_NEAR(convolution[1], 0.5 / std::sqrt(3.0), 5e-3);
    EXPECT_LE(convolution[3], 0.5);
    const auto step = initial_values({"dt_bias", {20000}, Initial::step_bias}, config, 7);
    double mean_log = 0;
    for (const double x : step) {
        const double dt = std::log1p(std::exp(x));
        EXPECT_GE(dt, 1e-3 * (1 - 1e-9));
        EXPECT_LE(dt, 0.1 * (1 + 1e-9));
        mean_log += std::log(dt) / 20000;
    }
    EXPECT_NEAR(mean_log, (std::log(1e-3) + std::log(0.1)) / 2, 0.03);
    double mean_decay = 0;
    for (const double x : initial_values({"A_log", {20000}, Initial::log_uniform}, config, 7)) {
        ASSERT_TRUE(std::isfinite(x));
        mean_decay += std::exp(x) / 20000;
    }
    EXPECT_NEAR(mean_decay, 8, 0.15);
    const auto counting = initial_values({"A_log", {5}, Initial::log_counting}, config, 7);
    EXPECT_NEAR(std::exp(counting[4]), 5, 1e-12);
}

TEST(Parameters, InitialValuesAreAFunctionOfSeedAndName) {
    const ModelConfig config = test::small_config(ModelType::mamba2);
    const ParameterShape parameter{"a.weight", {300, 300}};
    const auto values = initial_values(parameter, config, 3);
    EXPECT_EQ(values, initial_values(parameter, config, 3));
    EXPECT_NE(values, initial_values(parameter, config, 4));
    EXPECT_NE(values, initial_values({"b.weight", {300, 300}}, config, 3));
    std::set<double> distinct(values.begin(), values.end());
    EXPECT_GT(distinct.size(), values.size() * 99 / 100);
}

}  // namespace
}  // namespace fenwick::model
