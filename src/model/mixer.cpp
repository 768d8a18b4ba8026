#include "model/mixer.h"

#include <algorithm>

#include "kernels/causal_conv1d.h"
#include "kernels/levels.h"
#include "model/attention.h"
#include "model/gated_deltanet.h"
#include "model/mamba2.h"

namespace fenwick::model {

std::int64_t MixerState::bytes() const {
    std::size_t total = 0;
    for (const auto& tail : convolutions) total += tail.bytes();
    for (const Tensor* tensor : {&levels, &keys, &values})
        if (tensor->defined()) total += tensor->bytes();
    return static_cast<std::int64_t>(total);
}

MixerState MixerState::clone() const {
    const auto copy = [](const Tensor& tensor) { return tensor.defined() ? tensor.clone() : Tensor(); };
    MixerState result{.convolutions = {}, .levels = copy(levels), .keys = copy(keys), .values = copy(values)};
    for (const auto& tail : convolutions) result.convolutions.push_back(copy(tail));
    return result;
}

std::unique_ptr<Mixer> make_mixer(const ModelConfig& config, const std::string& prefix, const ParameterMap& parameters) {
    if (is_mamba2(config.type)) return std::make_unique<Mamba2>(config, prefix, parameters);
    if (is_gated_deltanet(config.type)) return std::make_unique<GatedDeltaNet>(config, prefix, parameters);
    return std::make_unique<Attention>(config, prefix, parameters);
}

Tensor convolve_step(const Tensor& x, const Variable& weight, const Variable& bias, Tensor& tail) {
    const std::int64_t channels = x.columns();
    const SequenceLayout layout = SequenceLayout::uniform(x.size(0), x.size(1));
    Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
    kernels::causal_conv1d_forward(exec_of(y), {.dtype = y.dtype(),
                                                .sequences = layout.sequences(),
                                                .channels = channels,
                                                .width = weight.size(-1),
                                                .x_stride = x.row_stride(),
                                                .y_stride = channels,
                                                .x = x.data(),
                                                .weight = weight.value().data(),
                                                .bias = bias.defined() ? bias.value().data() : nullptr,
                                                .y = y.data(),
                                                .state = tail.data()});
    return y;
}

void reserve_levels(Tensor& levels, bool has_levels, std::int64_t tokens) {
    const std::int64_t needed = has_levels ? kernels::levels_needed(static_cast<std::uint64_t>(tokens)) : 1;
    if (levels.size(0) >= needed) return;
    Shape shape = levels.shape();
    shape[0] = needed;
    Tensor grown = Tensor::zeros(shape, levels.dtype(), levels.device());
    if (levels.count() > 0) grown.view({needed, -1}).narrow_rows(0, levels.size(0)).copy_from(levels.view({levels.size(0), -1}));
    levels = std::move(grown);
}

void reserve_cache(Tensor& cache, std::int64_t seen, std::int64_t tokens) {
    const std::int64_t batch = cache.size(0), capacity = cache.size(1);
    if (capacity >= tokens) return;
    const std::int64_t grown_capacity = std::max<std::int64_t>({2 * capacity, tokens, 16});
    Tensor grown = Tensor::zeros({batch, grown_capacity, cache.size(2), cache.size(3)}, cache.dtype(), cache.device());
    if (seen > 0) {
        const Tensor from = cache.view({batch * capacity, -1}), to = grown.view({batch * grown_capacity, -1});
        for (std::int64_t b = 0; b < batch; ++b)
            to.narrow_rows(b * grown_capacity, b * grown_capacity + seen)
                .copy_from(from.narrow_rows(b * capacity, b * capacity + seen));
    }
    cache = std::move(grown);
}

void check_levels(std::string_view where, const ModelConfig& config, std::int64_t tokens) {
    if (config.level_overflow != ops::LevelOverflow::error || config.num_levels == 0) return;
    const int needed = kernels::levels_needed(static_cast<std::uint64_t>(tokens));
    FENWICK_CHECK(needed <= config.num_levels,
                  "[{}] the model has {} levels, a sequence of {} tokens needs {}; set model.level_overflow to clamp", where,
                  config.num_levels, tokens, needed);
}

}  // namespace fenwick::model
