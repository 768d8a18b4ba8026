#include "model/parameters.h"

#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "base/random.h"
#include "model/attention.h"
#include "model/gated_deltanet.h"
#include "model/mamba2.h"
#include "model/mlp.h"

namespace fenwick::model {
namespace {

// FNV-1a: the random stream of a name.
std::uint64_t stream_of(std::string_view name) {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
}

}  // namespace

std::string_view name_prefix(ModelType type) { return is_mamba2(type) ? "backbone." : "model."; }

std::vector<ParameterShape> parameter_shapes(const ModelConfig& config) {
    const std::string prefix(name_prefix(config.type));
    const std::string mixer = is_mamba2(config.type) ? "mixer" : "attn";
    const std::int64_t E = config.hidden_size;
    std::vector<ParameterShape> list;
    list.push_back({prefix + "embeddings.weight", {config.vocab_size, E}});
    for (std::int64_t i = 0; i < config.num_layers; ++i) {
        const std::string layer = fmt::format("{}layers.{}.", prefix, i);
        list.push_back({layer + mixer + "_norm.weight", {E}, Initial::ones, false});
        if (is_mamba2(config.type)) Mamba2::declare(config, layer + "mixer.", list);
        else if (is_gated_deltanet(config.type)) GatedDeltaNet::declare(config, layer + "attn.", list);
        else Attention::declare(config, layer + "attn.", list);
        list.push_back({layer + "mlp_norm.weight", {E}, Initial::ones, false});
        Mlp::declare(config, layer + "mlp.", list);
    }
    list.push_back({prefix + (is_mamba2(config.type) ? "norm_f.weight" : "norm.weight"), {E}, Initial::ones, false});
    if (!config.tie_embeddings) list.push_back({"lm_head.weight", {config.vocab_size, E}});
    return list;
}

std::int64_t parameter_count(const ModelConfig& config) {
    std::int64_t count = 0;
    for (const auto& parameter : parameter_shapes(config)) count += count_of(parameter.shape);
    return count;
}

std::vector<double> initial_values(const ParameterShape& parameter, const ModelConfig& config, std::uint64_t seed) {
    const std::int64_t count = count_of(parameter.shape);
    const double fan_in = static_cast<double>(parameter.shape.back());  // of [out, in] and [channels, 1, width]
    const std::uint64_t stream = stream_of(parameter.name);
    std::vector<double> values(static_cast<std::size_t>(count));
    parallel_for(0, count, 1 << 16, [&](std::int64_t begin, std::int64_t end) {
        Random random(seed, stream);
        random.seek(static_cast<std::uint64_t>(2 * begin));  // an element owns two draws, used or not
        for (std::int64_t i = begin; i < end; ++i) {
            double& value = values[static_cast<std::size_t>(i)];
            switch (parameter.initial) {
                case Initial::normal: value = config.initializer_range * random.normal(); continue;
                case Initial::output_projection:
                    value = random.uniform(-1, 1) / std::sqrt(fan_in * 2.0 * static_cast<double>(config.num_layers));
                    break;
                case Initial::convolution: value = random.uniform(-1, 1) / std::sqrt(fan_in); break;
                case Initial::zeros: value = 0; continue;
                case Initial::ones: value = 1; continue;
                case Initial::log_counting: value = std::log(static_cast<double>(i + 1)); continue;
                case Initial::log_uniform: value = std::log(16.0 * (1.0 - random.uniform())); break;
                case Initial::step_bias: {
                    const double step = std::max(std::exp(random.uniform(std::log(1e-3), std::log(0.1))), 1e-4);
                    value = step + std::log(-std::expm1(-step));  // the inverse of softplus
                    break;
                }
            }
            random.seek(static_cast<std::uint64_t>(2 * (i + 1)));
        }
    });
    return values;
}

}  // namespace fenwick::model
