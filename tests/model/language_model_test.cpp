#include "model/language_model.h"

#include <cmath>

#include "model/parameters.h"
#include "small_models.h"

namespace fenwick::model {
namespace {

using test::all_types;
using test::loss_and_gradients;
using test::random_ids;
using test::rms_ratio;
using test::small_config;

LanguageModel small_model(ModelConfig config, DType dtype = DType::float64) {
    LanguageModel model(config, cpu_device, dtype, dtype);
    model.initialize(1);
    test::perturb(model);
    return model;
}

using test::EveryModel;
INSTANTIATE_TEST_SUITE_P(Types, EveryModel, testing::ValuesIn(all_types), test::type_name);

TEST_P(EveryModel, RecomputingChangesNoGradient) {
    LanguageModel model = small_model(small_config(GetParam()));
    const Tensor ids = random_ids(2, 37, 61, 1);
    const auto layout = SequenceLayout::uniform(2, 37);
    const auto plain = loss_and_gradients(model, ids, layout);
    for (const auto recompute : {Recompute::mixer, Recompute::block}) {
        model.set_recompute(recompute);
        const auto again = loss_and_gradients(model, ids, layout);
        EXPECT_NEAR(again.first, plain.first, 1e-14);
        for (std::size_t i = 0; i < plain.second.size(); ++i) {
            if (recompute == Recompute::mixer)
                EXPECT_EQ(again.second[i].to_vector<double>(), plain.second[i].to_vector<double>()) << model.parameters()[i].name;
            else  // the gradients of the residual stream add up in another order
                EXPECT_LT(rms_ratio(again.second[i], plain.second[i]), 1e-12) << model.parameters()[i].name;
        }
    }
}

TEST_P(EveryModel, RecomputingKeepsLess) {
    ModelConfig config = small_config(GetParam());
    config.num_layers = 6;
    LanguageModel model = small_model(config);
    const Tensor ids = random_ids(1, 128, 61, 1), targets = test::next_tokens(ids);
    const auto kept = [&](Recompute recompute) {
        model.set_recompute(recompute);
        const auto before = memory_stats(DeviceType::cpu).bytes[static_cast<std::size_t>(MemoryKind::activations)];
        Tape tape;
        Variable loss;
        {
            Recording recording(tape);
            loss = model.loss(ids, targets, SequenceLayout::uniform(1, 128), 127).loss;
        }
        return memory_stats(DeviceType::cpu).bytes[static_cast<std::size_t>(MemoryKind::activations)] - before;
    };
    const auto all = kept(Recompute::none), mixer = kept(Recompute::mixer), block = kept(Recompute::block);
    EXPECT_LT(mixer, all * 3 / 4);
    EXPECT_LT(block, mixer / 2);
}

TEST_P(EveryModel, RowsOfABatchDoNotMeet) {
    const LanguageModel model = small_model(small_config(GetParam()));
    const Tensor ids = random_ids(3, 41, 61, 2);
    const auto all = model.logits(ids, SequenceLayout::uniform(3, 41)).value().view({3, 41 * 61});
    for (std::int64_t b = 0; b < 3; ++b) {
        const auto row = model.logits(ids.narrow_rows(b, b + 1), SequenceLayout::uniform(1, 41)).value().view({1, 41 * 61});
        EXPECT_LT(rms_ratio(row, all.narrow_rows(b, b + 1)), 1e-12);
    }
}

TEST_P(EveryModel, PackedDocumentsEqualSeparateOnes) {
    const LanguageModel model = small_model(small_config(GetParam()));
    const std::vector<std::int64_t> offsets{0, 1, 2, 35, 36, 120};
    const Tensor ids = random_ids(1, 120, 61, 3);
    const Tensor packed = model.logits(ids, SequenceLayout::packed(offsets)).value().view({120, 61});
    const auto flat = ids.to_vector<std::int32_t>();
    for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
        const std::int64_t begin = offsets[d], end = offsets[d + 1];
        const Tensor document = Tensor::from(std::vector<std::int32_t>(flat.begin() + begin, flat.begin() + end), {1, end - begin});
        const Tensor alone = model.logits(document, SequenceLayout::uniform(1, end - begin)).value().view({-1, 61});
        EXPECT_LT(rms_ratio(alone, packed.narrow_rows(begin, end)), 1e-12) << "document " << d;
    }
}

TEST_P(EveryModel, NoTokenSeesTheFuture) {
    const LanguageModel model = small_model(small_config(GetParam()));
    const Tensor ids = random_ids(1, 70, 61, 4);
    auto changed = ids.to_vector<std::int32_t>();
    for (std::size_t t = 50; t < changed.size(); ++t) changed[t] = (changed[t] + 17) % 61;
    const auto layout = SequenceLayout::uniform(1, 70);
    const Tensor a = model.logits(ids, layout).value().view({70, 61});
    const Tensor b = model.logits(Tensor::from(changed, {1, 70}), layout).value().view({70, 61});
    EXPECT_LT(rms_ratio(b.narrow_rows(0, 50), a.narrow_rows(0, 50)), 1e-13);
    EXPECT_GT(rms_ratio(b.narrow_rows(50, 70), a.narrow_rows(50, 70)), 1e-3);
}

TEST_P(EveryModel, InitialisesFromSeedAlone) {
    const ModelConfig config = small_config(GetParam());
    LanguageModel a(config, cpu_device, DType::float32, DType::float32), b(config, cpu_device, DType::float32, DType::float32);
    a.initialize(5);
    b.initialize(5);
    const auto ids = random_ids(2, 20, 61, 1);
    const auto layout = SequenceLayout::uniform(2, 20);
    EXPECT_EQ(a.logits(ids, layout).value().to_vector<float>(), b.logits(ids, layout).value().to_vector<float>());
    const auto result = loss_and_gradients(a, ids, layout);
    EXPECT_NEAR(result.first, std::log(61.0), 0.1);  // a fresh model knows nothing
    b.initialize(6);
    EXPECT_NE(a.logits(ids, layout).value().to_vector<float>(), b.logits(ids, layout).value().to_vector<float>());
    EXPECT_EQ(a.parameter_count(), [&] {
        std::int64_t count = 0;
        for (const auto& parameter : a.parameters()) count += parameter.variable.value().count();
        return count;
    }());
}

// With dl = 0 every level scale is softplus(0) = ln 2. Mamba-2's skip is scaled alike, and norms without eps forget the factor.
TEST(LanguageModel, EqualLevelScalesGiveTheLinearModel) {
    for (const auto& [linear_type, levels_type] : {std::pair{ModelType::mamba2, ModelType::log_linear_mamba2},
                                                   std::pair{ModelType::gated_deltanet, ModelType::log_linear_gated_deltanet}}) {
        ModelConfig config = small_config(linear_type);
        config.norm_eps = 1e-30;
        const LanguageModel linear = small_model(config);
        config.type = levels_type;
        const LanguageModel levels(config, cpu_device, DType::float64, DType::float64);
        ParameterMap by_name;
        for (const auto& parameter : linear.parameters()) by_name.add(parameter.name, parameter.variable);
        for (const auto& parameter : levels.parameters()) {
            const auto ends_with = [&](std::string_view end) { return parameter.name.ends_with(end); };
            Tensor to = parameter.variable.value();
            if (ends_with(".L")) {
                to.fill(1.0);
            } else if (ends_with("l_proj.weight")) {
                to.fill(0.0);
            } else if (ends_with("in_proj.weight")) {
                const Tensor from = by_name.get(parameter.name).value();
                to.fill(0.0);
                to.narrow_rows(0, from.size(0)).copy_from(from);
            } else if (ends_with(".D")) {
                auto values = by_name.get(parameter.name).value().to_vector<double>();
                for (auto& x : values) x *= std::log(2.0);
                to.copy_from(Tensor::from(values, to.shape()));
            } else {
                to.copy_from(by_name.get(parameter.name).value());
            }
        }
        const Tensor ids = random_ids(2, 100, 61, 5);
        const auto layout = SequenceLayout::uniform(2, 100);
        EXPECT_LT(rms_ratio(levels.logits(ids, layout).value(), linear.logits(ids, layout).value()), 1e-11) << name_of(levels_type);
    }
}

TEST(LanguageModel, ChunkSizeChangesSpeedAlone) {
    for (const auto type : all_types) {
        ModelConfig config = small_config(type);
        const Tensor ids = random_ids(1, 150, 61, 6);
        const auto layout = SequenceLayout::uniform(1, 150);
        const Tensor expected = small_model(config).logits(ids, layout).value();
        config.chunk_size = 64;
        EXPECT_LT(rms_ratio(small_model(config).logits(ids, layout).value(), expected), 1e-11) << name_of(type);
    }
}

TEST(LanguageModel, RefusesWhatDoesNotFit) {
    const ModelConfig config = small_config(ModelType::transformer);
    EXPECT_THROW(LanguageModel(config, cpu_device, DType::bfloat16, DType::bfloat16), Error);
    EXPECT_THROW(LanguageModel(config, cpu_device, DType::float64, DType::float32), Error);
    const LanguageModel model = small_model(config);
    EXPECT_THROW(model.logits(random_ids(1, 5, 61, 1), SequenceLayout::uniform(1, 6)), Error);
    EXPECT_THROW(model.logits(random_ids(1, 50, 70, 1), SequenceLayout::uniform(1, 50)), Error);  // ids up to 69 of 61
}

}  // namespace
}  // namespace fenwick::model
