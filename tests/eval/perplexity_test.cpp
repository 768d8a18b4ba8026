#include "eval/perplexity.h"

#include <gtest/gtest.h>

#include <cmath>

#include "data/tokenize.h"
#include "support/temporary_folder.h"

namespace fenwick::eval {
namespace {

model::LanguageModel small_model() {
    model::LanguageModel model({.vocab_size = 257, .hidden_size = 16, .num_layers = 2, .num_heads = 2, .head_dim = 16,
                                .state_size = 8, .num_levels = 8},
                               cpu_device, DType::float64, DType::float64);
    model.initialize(3);
    return model;
}

class Perplexity : public testing::Test {
protected:
    // Each text a document.
    data::TokenCorpus tokens(const std::vector<std::string>& texts) {
        data::TokenizeOptions options;
        for (std::size_t i = 0; i < texts.size(); ++i) {
            options.inputs.push_back(folder_ / ("text" + std::to_string(i)));
            test::write_text(options.inputs.back(), texts[i]);
        }
        options.output = folder_ / "tokens.h5";
        options.overwrite = true;
        data::tokenize(*data::open_tokenizer("bytes"), options);
        return data::TokenCorpus(options.output);
    }

    // The definition: each byte given at most `context` tokens before it, from full logits, a token at a time.
    double slow_nll(const model::LanguageModel& model, const std::string& text, std::int64_t context, std::int64_t stride) {
        std::vector<std::int32_t> ids = {256};
        for (unsigned char c : text) ids.push_back(c);
        double nll = 0;
        for (std::int64_t t = 0; t < static_cast<std::int64_t>(text.size()); ++t) {
            // The window that scores target t: the first covers `context` targets, later ones `stride` each.
            const std::int64_t size = static_cast<std::int64_t>(text.size());
            std::int64_t end = std::min(context, size);
            while (end <= t) end = std::min(end + stride, size);
            const std::int64_t begin = std::max<std::int64_t>(0, end - context);
            const std::vector<std::int32_t> input(ids.begin() + begin, ids.begin() + t + 1);
            const auto length = static_cast<std::int64_t>(input.size());
            const auto logits = model.logits(Tensor::from(input, {1, length}), SequenceLayout::uniform(1, length))
                                    .value().view({length, 257}).narrow_rows(length - 1, length).to_vector<double>();
            double sum = 0;
            for (double x : logits) sum += std::exp(x);
            nll += std::log(sum) - logits[static_cast<std::size_t>(ids[static_cast<std::size_t>(t) + 1])];
        }
        return nll;
    }

    test::TemporaryFolder folder_;
};

const std::string first = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.", second = "a", third = "Five words are in here.";

TEST_F(Perplexity, EqualsTheDefinitionForAnyContextStrideAndBatch) {
    const auto model = small_model();
    const auto file = tokens({first, second, third});
    struct Setting {
        std::int64_t context, stride;
    };
    for (const auto& [context, stride] : {Setting{16, 16}, Setting{16, 5}, Setting{7, 1}, Setting{1, 1}, Setting{500, 500}}) {
        double expected = 0;
        for (const auto* text : {&first, &second, &third}) expected += slow_nll(model, *text, context, stride);
        for (std::int64_t batch : {1, 3, 64}) {
            SCOPED_TRACE(fmt::format("context {} stride {} batch {}", context, stride, batch));
            const auto result = perplexity(model, file, {.context = context, .stride = stride, .batch = batch});
            EXPECT_NEAR(result.nll, expected, 1e-9 * expected);
            EXPECT_EQ(result.tokens, static_cast<std::int64_t>(first.size() + second.size() + third.size()));
        }
    }
}

TEST_F(Perplexity, CountsBytesAndWordsOfTheText) {
    const auto model = small_model();
    const auto result = perplexity(model, tokens({first, second, third}), {.context = 32});
    EXPECT_EQ(result.bytes, static_cast<std::int64_t>(first.size() + second.size() + third.size()));
    EXPECT_EQ(result.words, 14 + 1 + 5);
    EXPECT_DOUBLE_EQ(result.bits_per_byte(), result.nll / std::log(2.0) / static_cast<double>(result.bytes));
    EXPECT_DOUBLE_EQ(result.word_perplexity(), std::exp(result.nll / 20));
    EXPECT_DOUBLE_EQ(result.token_perplexity(), std::exp(result.nll / static_cast<double>(result.tokens)));
}

TEST_F(Perplexity, MayStopEarly) {
    const auto model = small_model();
    const auto result = perplexity(model, tokens({first, second, third}), {.context = 16, .max_tokens = 20});
    EXPECT_EQ(result.tokens, 20);
    EXPECT_NEAR(result.nll, slow_nll(model, first.substr(0, 20), 16, 16), 1e-9 * result.nll);
}

TEST_F(Perplexity, RefusesWhatItCannotScore) {
    const auto model = small_model();
    const auto file = tokens({first});
    EXPECT_EQ(test::error_of([&] { perplexity(model, file, {.context = 0}); }),
              "[perplexity] context is 0; at least 1 token is needed");
    EXPECT_EQ(test::error_of([&] { perplexity(model, file, {.context = 8, .stride = 9}); }),
              "[perplexity] stride is 9; it must be from 1 to the context, 8");
}

}  // namespace
}  // namespace fenwick::eval
