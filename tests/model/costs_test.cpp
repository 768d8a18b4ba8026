#include "model/costs.h"

#include <numeric>

#include "model/parameters.h"
#include "small_models.h"

namespace fenwick::model {
namespace {

double total(const std::vector<OperatorFlops>& list) {
    return std::accumulate(list.begin(), list.end(), 0.0, [](double sum, const auto& entry) { return sum + entry.flops; });
}

TEST(Costs, KindsAddUpToAllParameters) {
    for (const auto type : test::all_types)
        for (const bool tied : {false, true}) {
            ModelConfig config = test::small_config(type);
            config.tie_embeddings = tied;
            std::int64_t sum = 0;
            for (const auto& entry : parameters_by_kind(config)) {
                EXPECT_GT(entry.count, 0);
                EXPECT_FALSE(tied && entry.kind == "head");
                sum += entry.count;
            }
            EXPECT_EQ(sum, parameter_count(config));
        }
}

TEST(Costs, FlopsOfThePapersTransformer) {
    ModelConfig config;
    config.type = ModelType::transformer;
    config.vocab_size = 32000;
    config.hidden_size = 1536;
    config.num_layers = 21;
    config.num_heads = 16;
    // 2 a weight of every product (the embedding's table is only read), and 4 E (T + 1) / 2 a layer of attention
    const double weights = static_cast<double>(parameter_count(config)) - 32000.0 * 1536 - (2 * 21 + 1) * 1536;
    EXPECT_DOUBLE_EQ(total(forward_flops(config, 16384)), 2 * weights + 21.0 * 2 * 1536 * 16385);
    EXPECT_DOUBLE_EQ(training_flops_per_token(config, 16384), 3 * total(forward_flops(config, 16384)));
}

TEST(Costs, GrowthWithTheSequence) {
    for (const auto type : test::all_types) {
        const ModelConfig config = test::small_config(type);
        const double at_1k = total(forward_flops(config, 1024)), at_2k = total(forward_flops(config, 2048)),
                     at_4k = total(forward_flops(config, 4096));
        if (has_levels(type)) {  // half a level more each time the sequence doubles
            EXPECT_GT(at_2k, at_1k) << name_of(type);
            EXPECT_NEAR(at_4k - at_2k, at_2k - at_1k, 1e-6 * at_1k) << name_of(type);
        } else if (type == ModelType::transformer) {
            EXPECT_NEAR(at_4k - at_2k, 2 * (at_2k - at_1k), 1e-6 * at_1k);
        } else {
            EXPECT_EQ(at_4k, at_1k) << name_of(type);
        }
    }
}

TEST(Costs, MemoryEstimateIsNearWhatIsMeasured) {
    for (const auto type : test::all_types)
        for (const auto recompute : {Recompute::none, Recompute::mixer, Recompute::block}) {
            ModelConfig config = test::small_config(type);
            config.num_layers = 6;
            LanguageModel model(config, cpu_device, DType::float32, DType::float32);
            model.initialize(1);
            model.set_recompute(recompute);
            const Tensor ids = test::random_ids(2, 256, 61, 1), targets = test::next_tokens(ids);
            const auto slot = static_cast<std::size_t>(MemoryKind::activations);
            const auto before = memory_stats(DeviceType::cpu).bytes[slot];
            reset_peak_memory(DeviceType::cpu);
            Tape tape;
            Variable loss;
            {
                Recording recording(tape);
                loss = model.loss(ids, targets, SequenceLayout::uniform(2, 256), 510).loss;
            }
            tape.backward(loss);
            const auto measured = static_cast<double>(memory_stats(DeviceType::cpu).peak_bytes[slot] - before);
            const auto estimated = static_cast<double>(training_memory(config, 2, 256, DType::float32, recompute).activations);
            EXPECT_GT(estimated / measured, 0.9) << name_of(type) << " recompute " << static_cast<int>(recompute);
            EXPECT_LT(estimated / measured, 1.2) << name_of(type) << " recompute " << static_cast<int>(recompute);
        }
}

TEST(Costs, DecodeStateIsWhatTheModelHolds) {
    for (const auto type : test::all_types) {
        const ModelConfig config = test::small_config(type);
        LanguageModel model(config, cpu_device, DType::float32, DType::float32);
        model.initialize(1);
        for (const std::int64_t tokens : {1, 16, 100, 256}) {
            const auto state = model.new_state(1);
            model.step(test::random_ids(1, tokens, 61, 1), *state);
            const std::int64_t held = type == ModelType::transformer ? std::max<std::int64_t>(tokens, 16) : tokens;
            EXPECT_EQ(state->bytes(), decode_state_bytes(config, held, DType::float32)) << name_of(type) << " " << tokens;
        }
    }
}

// What the decoder moves, added up over positions by hand.
TEST(Costs, DecodingTraffic) {
    for (const auto type : test::all_types) {
        const ModelConfig config = test::small_config(type);
        const std::int64_t state = 2 * 4 * config.num_heads * config.key_width() * config.value_width();  // two layers
        const auto states = [&](std::int64_t position) { return decode_state_traffic(config, position, 1, DType::bfloat16) / state; };
        EXPECT_EQ(decode_state_traffic(config, 7, 3, DType::bfloat16), 3 * decode_state_traffic(config, 7, 1, DType::bfloat16));
        if (type == ModelType::transformer) {
            EXPECT_EQ(decode_state_traffic(config, 9, 1, DType::bfloat16), 2 * 2 * 10 * 2 * config.key_width() * 2);
        } else if (!has_levels(type)) {
            EXPECT_EQ(states(7), 2);
        } else {
            const bool decayed_aside = is_mamba2(type);
            EXPECT_EQ(states(0), 0);
            EXPECT_EQ(states(1), 1);                      // 1 is written
            EXPECT_EQ(states(2), 2);                      // 1 is read, 2 written
            EXPECT_EQ(states(7), decayed_aside ? 3 : 5);  // 2 and 3 are read; 1 (and 2 and 3) written
            EXPECT_EQ(states(8), 4);                      // 1 to 3 are read, 4 written
        }
        // All matrices but the embedding
        std::int64_t matrices = 0;
        for (const auto& shape : parameter_shapes(config))
            if (shape.name.find("_proj.weight") != std::string::npos || shape.name == "lm_head.weight") matrices += count_of(shape.shape);
        EXPECT_EQ(decode_weight_bytes(config, DType::bfloat16), 2 * matrices);
    }
}

}  // namespace
}  // namespace fenwick::model
