#include "eval/generate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "support/temporary_folder.h"

namespace fenwick::eval {
namespace {

TEST(Sample, ZeroTemperatureTakesTheLikeliest) {
    Random random(1);
    EXPECT_EQ(sample({0.5f, 2.0f, 1.0f}, {.temperature = 0}, random), 1);
}

TEST(Sample, FollowsTheSoftmaxAtTheTemperature) {
    Random random(7);
    const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 2.0f};
    for (const double temperature : {0.5, 1.0, 2.0}) {
        double total = 0;
        for (float x : logits) total += std::exp(x / temperature);
        std::vector<int> counts(4);
        constexpr int draws = 40000;
        for (int i = 0; i < draws; ++i) ++counts[static_cast<std::size_t>(sample(logits, {.temperature = temperature}, random))];
        for (std::size_t i = 0; i < 4; ++i) {
            const double p = std::exp(logits[i] / temperature) / total;
            EXPECT_NEAR(static_cast<double>(counts[i]) / draws, p, 5 * std::sqrt(p * (1 - p) / draws));
        }
    }
}

TEST(Sample, TopKAndTopPCutTheTail) {
    Random random(3);
    const std::vector<float> logits = {std::log(0.5f), std::log(0.1f), std::log(0.3f), std::log(0.1f)};
    std::map<std::int32_t, int> seen;
    for (int i = 0; i < 2000; ++i) ++seen[sample(logits, {.top_k = 2}, random)];
    EXPECT_EQ(seen.size(), 2u);
    EXPECT_NEAR(seen[0] / 2000.0, 0.5 / 0.8, 0.06);
    seen.clear();
    for (int i = 0; i < 2000; ++i) ++seen[sample(logits, {.top_p = 0.85}, random)];  // 0.5 + 0.3 < 0.85 <= 0.5 + 0.3 + 0.1
    EXPECT_EQ(seen.size(), 3u);
    EXPECT_EQ(seen.count(3), 0u) << "ties go to the lower id";
    seen.clear();
    for (int i = 0; i < 500; ++i) ++seen[sample(logits, {.top_p = 0.4}, random)];
    EXPECT_EQ(seen.size(), 1u) << "at least one token stays";
}

TEST(Sample, RefusesBadOptions) {
    Random random(1);
    EXPECT_EQ(test::error_of([&] { sample({1.0f}, {.temperature = -1}, random); }),
              "[sample] temperature is -1; 0 or more is needed");
    EXPECT_EQ(test::error_of([&] { sample({1.0f}, {.top_p = 0}, random); }),
              "[sample] top_p is 0; it must be above 0 and at most 1");
    EXPECT_EQ(test::error_of([&] { sample({NAN, 1.0f}, {}, random); }), "[sample] the logits are not finite");
}

class Generate : public testing::Test {
protected:
    Generate()
        : model_({.vocab_size = 40, .hidden_size = 16, .num_layers = 1, .num_heads = 2, .head_dim = 16, .state_size = 8, .num_levels = 6},
                 cpu_device, DType::float32, DType::float32) {
        model_.initialize(5);
    }
    std::vector<std::int32_t> run(GenerateOptions options, std::vector<std::int32_t> prompt = {1, 2, 3, 4, 5}) {
        return generate(model_, prompt, options, [](std::int32_t, const model::DecodeState&) { return true; });
    }
    model::LanguageModel model_;
};

TEST_F(Generate, GreedyTokensAreThoseOfTheFullForward) {
    const auto drawn = run({.sampling = {.temperature = 0}, .max_tokens = 20});
    std::vector<std::int32_t> ids = {1, 2, 3, 4, 5};
    for (auto id : drawn) {
        const auto length = static_cast<std::int64_t>(ids.size());
        const auto logits = model_.logits(Tensor::from(ids, {1, length}), SequenceLayout::uniform(1, length))
                                .value().view({length, 40}).narrow_rows(length - 1, length).to_vector<float>();
        EXPECT_EQ(id, std::max_element(logits.begin(), logits.end()) - logits.begin());
        ids.push_back(id);
    }
}

TEST_F(Generate, SeedAloneDecidesHoweverThePromptIsFed) {
    const auto once = run({.sampling = {.seed = 9}, .max_tokens = 30});
    EXPECT_EQ(once.size(), 30u);
    EXPECT_EQ(run({.sampling = {.seed = 9}, .max_tokens = 30, .prompt_segment = 2}), once);
    EXPECT_NE(run({.sampling = {.seed = 10}, .max_tokens = 30}), once);
}

TEST_F(Generate, StopsAtTheEndOfTextAndWhenAsked) {
    const auto all = run({.sampling = {.seed = 9}, .max_tokens = 30});
    const auto until = run({.sampling = {.seed = 9}, .max_tokens = 30, .end_of_text = all[4]});
    const auto first = std::find(all.begin(), all.end(), all[4]);
    EXPECT_EQ(until, std::vector<std::int32_t>(all.begin(), first));
    int calls = 0;
    generate(model_, {1}, {.max_tokens = 30}, [&](std::int32_t, const model::DecodeState&) { return ++calls < 3; });
    EXPECT_EQ(calls, 3);
    EXPECT_EQ(test::error_of([&] { run({}, {}); }), "[generate] the prompt is empty; at least one token is needed");
    EXPECT_EQ(test::error_of([&] { run({}, {40}); }), "[generate] token id 40 of the prompt is outside the vocabulary of 40");
}

}  // namespace
}  // namespace fenwick::eval
