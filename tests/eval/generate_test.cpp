#include "eval/generate.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/temporary_folder.h"

namespace fenwick::eval {
namespace {

class Generate : public testing::Test {
protected:
    Generate()
        : model_({.vocab_size = 40, .hidden_size = 16, .num_layers = 1, .num_heads = 2, .head_dim = 16, .state_size = 8, .num_levels = 6},
                 cpu_device, DType::float32, DType::float32) {
        model_.initialize(5);
    }
    std::vector<std::int32_t> run(GenerateOptions options, std::vector<std::int32_t> prompt = {1, 2, 3, 4, 5}) {
        return generate(model_, prompt, options, [](std::int32_t, std::int64_t) { return true; });
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
    generate(model_, {1}, {.max_tokens = 30}, [&](std::int32_t, std::int64_t position) { return position == 1 + calls && ++calls < 3; });
    EXPECT_EQ(calls, 3);
    EXPECT_EQ(test::error_of([&] { run({.sampling = {.top_p = 0}}); }), "[sample] top_p is 0; it must be above 0 and at most 1");
    EXPECT_EQ(test::error_of([&] { run({}, {}); }), "[generate] the prompt is empty; at least one token is needed");
    EXPECT_EQ(test::error_of([&] { run({}, {40}); }), "[generate] token id 40 of the prompt is outside the vocabulary of 40");
}

}  // namespace
}  // namespace fenwick::eval
