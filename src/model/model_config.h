// What a model is: everything that fixes its parameters' shapes and what it computes.
#pragma once

#include <cstdint>
#include <string_view>

#include "autograd/ops.h"

namespace fenwick::model {

enum class ModelType : std::uint8_t { transformer, mamba2, log_linear_mamba2, gated_deltanet, log_linear_gated_deltanet };
std::string_view name_of(ModelType type);              // "log_linear_mamba2"
ModelType model_type_from(std::string_view name);      // throws Error with the five names

constexpr bool has_levels(ModelType type) {
    return type == ModelType::log_linear_mamba2 || type == ModelType::log_linear_gated_deltanet;
}
constexpr bool is_mamba2(ModelType type) { return type == ModelType::mamba2 || type == ModelType::log_linear_mamba2; }
constexpr bool is_gated_deltanet(ModelType type) {
    return type == ModelType::gated_deltanet || type == ModelType::log_linear_gated_deltanet;
}

// Fields that a model type does not use are ignored by it.
struct ModelConfig {
    ModelType type = ModelType::log_linear_mamba2;
    std::int64_t vocab_size = 0;
    std::int64_t hidden_size = 0;        // E
    std::int64_t num_layers = 0;
    std::int64_t intermediate_size = 0;  // of the MLP; 0: 256 * ceil((8/3 E) / 256)
    double norm_eps = 1e-5;
    bool tie_embeddings = false;
    double initializer_range = 0.02;

    std::int64_t num_heads = 0;     // H
    std::int64_t head_dim = 0;      // Transformer: 0 = E / H. Mamba-2: V. Gated DeltaNet: K
    std::int64_t num_kv_heads = 0;  // Transformer: G; 0 = H
    double rope_theta = 10000.0;    // Transformer
    std::int64_t state_size = 128;  // Mamba-2: N (key width)
    std::int64_t n_groups = 1;      // Mamba-2: G
    double expand_v = 2.0;          // Gated DeltaNet: V = expand_v * K, a whole number
    std::int64_t conv_width = 4;    // Mamba-2 and Gated DeltaNet

    std::int64_t num_levels = 0;  // L of the log-linear models
    ops::LevelOverflow level_overflow = ops::LevelOverflow::clamp;
    std::int64_t chunk_size = 64;  // speed only

    std::int64_t mlp_width() const;
    std::int64_t key_width() const;    // of one head
    std::int64_t value_width() const;  // of one head
    std::int64_t kv_heads() const;     // Transformer: G
    // Throws Error with names, values and a legal alternative where the shape contradicts itself.
    void validate() const;
};

}  // namespace fenwick::model
