// Small models of all five types, and how the tests of this folder run them.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "model/language_model.h"
#include "support/random_tensor.h"

namespace fenwick::test {

using model::LanguageModel;
using model::ModelConfig;
using model::ModelType;

constexpr ModelType all_types[] = {ModelType::transformer, ModelType::mamba2, ModelType::log_linear_mamba2,
                                   ModelType::gated_deltanet, ModelType::log_linear_gated_deltanet};

inline ModelConfig small_config(ModelType type) {
    ModelConfig config;
    config.type = type;
    config.vocab_size = 61;
    config.hidden_size = 32;
    config.num_layers = 2;
    config.intermediate_size = 48;
    config.num_heads = model::is_gated_deltanet(type) ? 2 : 4;
    config.head_dim = type == ModelType::transformer ? 8 : 16;
    config.num_kv_heads = 2;
    config.state_size = 16;
    config.n_groups = 2;
    config.num_levels = 10;
    config.chunk_size = 16;
    return config;
}

// Away from its initial values, where gates are alike and convolutions are weak: every parameter moves by a random amount.
inline void perturb(const LanguageModel& model, double deviation = 0.1) {
    std::uint64_t seed = 500;
    for (const auto& parameter : model.parameters()) {
        Tensor value = parameter.variable.value();
        auto values = value.to_vector<double>();
        Random random(++seed, 3);
        for (auto& x : values) x += deviation * random.normal();
        value.copy_from(Tensor::from(values, value.shape()));
    }
}

inline Tensor random_ids(std::int64_t batch, std::int64_t length, std::int64_t vocab, std::uint64_t seed) {
    Random random(seed, 5);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(batch * length));
    for (auto& id : ids) id = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(vocab)));
    return Tensor::from(ids, {batch, length});
}

// targets[b, t] = ids[b, t + 1]; -100 at the end of every row.
inline Tensor next_tokens(const Tensor& ids) {
    const auto from = ids.to_vector<std::int32_t>();
    std::vector<std::int32_t> to(from.size(), -100);
    const auto length = static_cast<std::size_t>(ids.size(1));
    for (std::size_t i = 0; i + 1 < from.size(); ++i)
        if ((i + 1) % length != 0) to[i] = from[i + 1];
    return Tensor::from(to, ids.shape());
}

// Loss, and the gradients of all parameters in their order.
inline std::pair<double, std::vector<Tensor>> loss_and_gradients(const LanguageModel& model, const Tensor& ids,
                                                                const SequenceLayout& layout) {
    const Tensor targets = next_tokens(ids);
    double valid = 0;
    for (const auto target : targets.to_vector<std::int32_t>()) valid += target >= 0;
    for (const auto& parameter : model.parameters()) parameter.variable.gradient()->clear();
    Tape tape;
    Variable loss;
    {
        Recording recording(tape);
        loss = model.loss(ids, targets, layout, valid).loss;
    }
    const double value = loss.value().item();
    tape.backward(loss);
    std::vector<Tensor> gradients;
    for (const auto& parameter : model.parameters()) gradients.push_back(parameter.variable.gradient()->or_zeros());
    return {value, gradients};
}

class EveryModel : public testing::TestWithParam<ModelType> {};
inline std::string type_name(const testing::TestParamInfo<ModelType>& info) { return std::string(model::name_of(info.param)); }

// ids on the host, [B, T]; columns begin .. end - 1.
inline Tensor columns_of(const Tensor& ids, std::int64_t begin, std::int64_t end) {
    const auto all = ids.to_vector<std::int32_t>();
    std::vector<std::int32_t> part;
    for (std::int64_t row = 0; row < ids.size(0); ++row)
        part.insert(part.end(), all.begin() + row * ids.size(1) + begin, all.begin() + row * ids.size(1) + end);
    return Tensor::from(part, {ids.size(0), end - begin});
}

}  // namespace fenwick::test
