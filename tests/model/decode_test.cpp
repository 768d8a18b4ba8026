// Decoding: any split of a sequence into calls gives the logits of the whole.
#include <cmath>
#include <numeric>

#include "small_models.h"

namespace fenwick::model {
namespace {

using test::columns_of;
using test::random_ids;
using test::small_config;

class Decoding : public testing::TestWithParam<ModelType> {};
INSTANTIATE_TEST_SUITE_P(Types, Decoding, testing::ValuesIn(test::all_types), test::type_name);

LanguageModel small_model(const ModelConfig& config, DType dtype) {
    LanguageModel model(config, cpu_device, dtype, dtype);
    model.initialize(1);
    test::perturb(model, 0.05);
    return model;
}

// The logits of all tokens, fed in pieces of these lengths.
std::vector<double> decode(const LanguageModel& model, DecodeState& state, const Tensor& ids, const std::vector<std::int64_t>& pieces) {
    const std::int64_t batch = ids.size(0), vocab = model.config().vocab_size;
    std::vector<std::vector<double>> rows(static_cast<std::size_t>(batch));
    std::int64_t begin = 0;
    for (const auto n : pieces) {
        const auto values = model.step(columns_of(ids, begin, begin + n), state).to_vector<double>();  // [B, n, vocab]
        for (std::int64_t b = 0; b < batch; ++b)
            rows[static_cast<std::size_t>(b)].insert(rows[static_cast<std::size_t>(b)].end(), values.begin() + b * n * vocab,
                                                     values.begin() + (b + 1) * n * vocab);
        begin += n;
    }
    std::vector<double> all;
    for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
    return all;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
    double largest = a.size() == b.size() ? 0 : INFINITY;
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
        largest = std::abs(a[i] - b[i]) <= largest ? largest : std::abs(a[i] - b[i]);
    return largest;
}

TEST_P(Decoding, TokenByTokenEqualsTheWholeInFloat32) {
    const LanguageModel model = small_model(small_config(GetParam()), DType::float32);
    const Tensor ids = random_ids(2, 300, 61, 1);
    const auto whole = model.logits(ids, SequenceLayout::uniform(2, 300)).value().to_vector<double>();
    const auto state = model.new_state(2);
    EXPECT_LT(largest_difference(decode(model, *state, ids, std::vector<std::int64_t>(300, 1)), whole), 1e-5);
    EXPECT_EQ(state->position(), 300);
}

TEST_P(Decoding, AnySplitEqualsTheWhole) {
    const LanguageModel model = small_model(small_config(GetParam()), DType::float64);
    const Tensor ids = random_ids(2, 140, 61, 2);
    const auto whole = model.logits(ids, SequenceLayout::uniform(2, 140)).value().to_vector<double>();
    for (const std::vector<std::int64_t>& pieces :
         {std::vector<std::int64_t>{140}, {1, 139}, {2, 1, 64, 65, 8}, {63, 1, 1, 75}, {128, 12}, {7, 9, 16, 32, 64, 12}}) {
        const auto state = model.new_state(2);
        EXPECT_LT(largest_difference(decode(model, *state, ids, pieces), whole), 1e-11) << to_string(pieces);
    }
}

TEST_P(Decoding, ACloneContinuesWhereItWasTaken) {
    const LanguageModel model = small_model(small_config(GetParam()), DType::float64);
    const Tensor ids = random_ids(1, 80, 61, 3), other = random_ids(1, 80, 61, 4);
    const auto whole = model.logits(ids, SequenceLayout::uniform(1, 80)).value().to_vector<double>();
    const auto state = model.new_state(1);
    model.step(columns_of(ids, 0, 37), *state);
    const auto saved = state->clone();
    EXPECT_EQ(saved->position(), 37);
    EXPECT_EQ(saved->bytes(), state->bytes());
    model.step(columns_of(other, 0, 43), *state);  // must not touch the copy
    const auto rest = model.step(columns_of(ids, 37, 80), *saved).to_vector<double>();
    EXPECT_LT(largest_difference(rest, {whole.begin() + 37 * 61, whole.end()}), 1e-11);
}

TEST_P(Decoding, StateGrowsAsTheModelPromises) {
    ModelConfig config = small_config(GetParam());
    config.num_layers = 1;
    const LanguageModel model = small_model(config, DType::float32);
    const auto bytes_after = [&](std::int64_t tokens) {
        const auto state = model.new_state(1);
        model.step(random_ids(1, tokens, 61, 1), *state);
        return state->bytes();
    };
    const auto at_64 = bytes_after(64), at_1024 = bytes_after(1024);
    if (GetParam() == ModelType::transformer) {
        EXPECT_EQ(at_1024, 16 * at_64);
    } else if (has_levels(GetParam())) {  // 7 and 11 level states
        const std::int64_t one = 4 * config.num_heads * config.key_width() * config.value_width();
        EXPECT_EQ(at_1024 - at_64, 4 * one);
    } else {
        EXPECT_EQ(at_1024, at_64);
    }
}

TEST_P(Decoding, BeyondTheTrainedLevels) {
    ModelConfig config = small_config(GetParam());
    config.num_levels = 4;  // enough for 8 tokens
    const Tensor ids = random_ids(1, 50, 61, 5);
    const LanguageModel model = small_model(config, DType::float64);
    const auto whole = model.logits(ids, SequenceLayout::uniform(1, 50)).value().to_vector<double>();
    const auto state = model.new_state(1);
    EXPECT_LT(largest_difference(decode(model, *state, ids, {20, 1, 1, 28}), whole), 1e-11);
    if (!has_levels(GetParam())) return;
    config.level_overflow = ops::LevelOverflow::error;
    const LanguageModel strict = small_model(config, DType::float64);
    EXPECT_THROW(strict.logits(ids, SequenceLayout::uniform(1, 50)), Error);
    const auto strict_state = strict.new_state(1);
    EXPECT_NO_THROW(strict.step(columns_of(ids, 0, 8), *strict_state));
    EXPECT_THROW(strict.step(columns_of(ids, 8, 9), *strict_state), Error);
}

TEST_P(Decoding, RefusesAStateThatDoesNotFit) {
    const LanguageModel model = small_model(small_config(GetParam()), DType::float64);
    const auto state = model.new_state(2);
    EXPECT_THROW(model.step(random_ids(1, 3, 61, 1), *state), Error);
    ModelConfig deeper = small_config(GetParam());
    deeper.num_layers = 3;
    EXPECT_THROW(model.step(random_ids(2, 3, 61, 1), *small_model(deeper, DType::float64).new_state(2)), Error);
    EXPECT_THROW(model.new_state(0), Error);
}

}  // namespace
}  // namespace fenwick::model
