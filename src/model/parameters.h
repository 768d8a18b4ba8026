// The parameters of a model: their names, shapes and initial values, from the configuration alone.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/model_config.h"

namespace fenwick::model {

// How a parameter starts. Source of the values: the public code of the log-linear-attention and Mamba-2 authors.
enum class Initial : std::uint8_t {
    normal,             // N(0, initializer_range): projections, embedding, head
    output_projection,  // Kaiming uniform (a = sqrt 5): U(-1, 1) / sqrt(fan_in), divided by sqrt(2 num_layers)
    convolution,        // U(-1, 1) / sqrt(width), as the Mamba-2 reference leaves its convolution
    zeros,
    ones,
    log_counting,  // A_log of Mamba-2: log(1), log(2), .., log(H)
    log_uniform,   // A_log of Gated DeltaNet: log of U(0, 16]
    step_bias,     // dt_bias: the inverse softplus of a step that is log-uniform in [1e-3, 0.1], at least 1e-4
};

struct ParameterShape {
    std::string name;  // flash-linear-attention's: "backbone.layers.0.mixer.in_proj.weight"
    Shape shape;
    Initial initial = Initial::normal;
    bool weight_decay = true;  // false for A_log, dt_bias, D, L, norms, biases
};

// Every parameter of the model once, in the order of the layers (a tied head is the embedding). Allocates nothing.
std::vector<ParameterShape> parameter_shapes(const ModelConfig& config);
std::int64_t parameter_count(const ModelConfig& config);

// The prefix of all names but the head's: "backbone." for Mamba-2, else "model.".
std::string_view name_prefix(ModelType type);

// The initial values: a pure function of seed, name, shape and config; the number of threads does not matter.
std::vector<double> initial_values(const ParameterShape& parameter, const ModelConfig& config, std::uint64_t seed);

// Parameters by name, from which modules take theirs.
class ParameterMap {
public:
    void add(std::string name, Variable variable) { variables_.emplace(std::move(name), std::move(variable)); }
    const Variable& get(const std::string& name) const {
        const auto found = variables_.find(name);
        FENWICK_CHECK(found != variables_.end(), "[model] there is no parameter '{}'", name);
        return found->second;
    }

private:
    std::unordered_map<std::string, Variable> variables_;
};

}  // namespace fenwick::model
