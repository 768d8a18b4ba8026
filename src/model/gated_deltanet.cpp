#include "model/gated_deltanet.h"

#include <cmath>

#include "kernels/gated_delta_rule.h"

namespace fenwick::model {
namespace {

std::int64_t levels_of(const ModelConfig& config) { return has_levels(config.type) ? config.num_levels : 0; }

}  // namespace

void GatedDeltaNet::declare(const ModelConfig& config, const std::string& prefix, std::vector<ParameterShape>& list) {
    const std::int64_t H = config.num_heads, E = config.hidden_size, V = config.value_width();
    const std::int64_t keys = H * config.head_dim, values = H * V, width = config.conv_width, levels = levels_of(config);
    list.push_back({prefix + "q_proj.weight", {keys, E}});
    list.push_back({prefix + "k_proj.weight", {keys, E}});
    list.push_back({prefix + "v_proj.weight", {values, E}});
    list.push_back({prefix + "a_proj.weight", {H, E}});
    list.push_back({prefix + "b_proj.weight", {H, E}});
    if (levels > 0) list.push_back({prefix + "l_proj.weight", {H * levels, E}});
    list.push_back({prefix + "q_conv1d.weight", {keys, 1, width}, Initial::convolution});
    list.push_back({prefix + "k_conv1d.weight", {keys, 1, width}, Initial::convolution});
    list.push_back({prefix + "v_conv1d.weight", {values, 1, width}, Initial::convolution});
    list.push_back({prefix + "A_log", {H}, Initial::log_uniform, false});
    list.push_back({prefix + "dt_bias", {H}, Initial::step_bias, false});
    if (levels > 0) list.push_back({prefix + "L", {H, levels}, Initial::ones, false});
    list.push_back({prefix + "g_proj.weight", {values, E}});
    list.push_back({prefix + "o_norm.weight", {V}, Initial::ones, false});
    list.push_back({prefix + "o_proj.weight", {E, values}, Initial::output_projection});
}

GatedDeltaNet::GatedDeltaNet(const ModelConfig& config, const std::string& prefix, const ParameterMap& parameters)
    : config_(config),
      levels_(levels_of(config)),
      q_proj_(parameters.get(prefix + "q_proj.weight")),
      k_proj_(parameters.get(prefix + "k_proj.weight")),
      v_proj_(parameters.get(prefix + "v_proj.weight")),
      a_proj_(parameters.get(prefix + "a_proj.weight")),
      b_proj_(parameters.get(prefix + "b_proj.weight")),
      g_proj_(parameters.get(prefix + "g_proj.weight")),
      l_proj_(levels_ > 0 ? parameters.get(prefix + "l_proj.weight") : Variable()),
      o_proj_(parameters.get(prefix + "o_proj.weight")),
      q_conv_(parameters.get(prefix + "q_conv1d.weight")),
      k_conv_(parameters.get(prefix + "k_conv1d.weight")),
      v_conv_(parameters.get(prefix + "v_conv1d.weight")),
      dt_bias_(parameters.get(prefix + "dt_bias")),
      a_log_(parameters.get(prefix + "A_log")),
      level_weight_(levels_ > 0 ? parameters.get(prefix + "L") : Variable()),
      norm_(parameters.get(prefix + "o_norm.weight")) {}

template <class Convolve, class Scan>
Variable GatedDeltaNet::mix(const Variable& x, Convolve&& convolve, Scan&& scan) const {
    const std::int64_t H = config_.num_heads, V = config_.value_width(), width = config_.conv_width;
    const auto convolved = [&](int which, const Variable& projection, const Variable& weight) {
        return convolve(which, ops::linear(x, projection), ops::view(weight, {weight.size(0), width}));
    };
    auto q = ops::l2norm(convolved(0, q_proj_, q_conv_), H);  // [B, T, HK]
    // The log-linear authors leave q unscaled (they divide the level scales by the scale).
    if (levels_ == 0) q = ops::scale(q, 1.0 / std::sqrt(static_cast<double>(config_.head_dim)));
    const auto k = ops::l2norm(convolved(1, k_proj_, k_conv_), H);  // [B, T, HK]
    const auto v = convolved(2, v_proj_, v_conv_);                  // [B, T, HV]

    const auto g = ops::decay_gate(ops::linear(x, a_proj_), dt_bias_, a_log_).g;
    const auto beta = ops::sigmoid(ops::linear(x, b_proj_));
    const auto level_scales = levels_ > 0 ? ops::level_scales(ops::linear(x, l_proj_), level_weight_) : Variable();
    const auto o = scan(q, k, v, g, beta, level_scales);  // [B, T, HV]

    const Shape heads{x.size(0), x.size(1), H, V};  // the norm is over each head, with one weight [V] for all
    const auto gate = ops::view(ops::linear(x, g_proj_), heads);
    const auto y = ops::rms_norm_gated(ops::view(o, heads), gate, norm_, config_.norm_eps);
    return ops::linear(ops::view(y, o.shape()), o_proj_);
}

Variable GatedDeltaNet::forward(const Variable& x, const SequenceLayout& layout) const {
    const ops::GatedDeltaRuleOptions options{
        .heads = config_.num_heads, .chunk_size = config_.chunk_size, .level_overflow = config_.level_overflow};
    return mix(
        x,
        [&](int, const Variable& input, const Variable& weight) { return ops::causal_conv1d(input, weight, {}, layout); },
        [&](const Variable& q, const Variable& k, const Variable& v, const Variable& g, const Variable& beta,
            const Variable& level_scales) { return ops::gated_delta_rule(q, k, v, g, beta, level_scales, options, layout); });
}

Tensor GatedDeltaNet::step(const Tensor& x, MixerState& state, std::int64_t position) const {
    const std::int64_t batch = x.size(0), length = x.size(1);
    check_levels("log_linear_gated_delta_rule", config_, position + length);
    reserve(state, position, position + length);
    return mix(
               x,
               [&](int which, const Variable& input, const Variable& weight) {
                   return Variable(
                       convolve_step(input.value(), weight, {}, state.convolutions[static_cast<std::size_t>(which)]));
               },
               [&](const Variable& q, const Variable& k, const Variable& v, const Variable& g, const Variable& beta,
                   const Variable& level_scales) {
                   Tensor o = Tensor::empty(v.shape(), v.dtype(), v.device());
                   kernels::gated_delta_rule_recurrent(
                       exec_of(o), {.dtype = o.dtype(),
                                    .batch = batch,
                                    .length = length,
                                    .position = position,
                                    .heads = config_.num_heads,
                                    .key_width = config_.head_dim,
                                    .value_width = config_.value_width(),
                                    .levels = levels_,
                                    .level_capacity = state.levels.size(0),
                                    .q_stride = q.value().row_stride(),
                                    .k_stride = k.value().row_stride(),
                                    .v_stride = v.value().row_stride(),
                                    .q = q.value().data(),
                                    .k = k.value().data(),
                                    .v = v.value().data(),
                                    .g = g.value().data(),
                                    .beta = beta.value().data(),
                                    .level_scales = level_scales.defined() ? level_scales.value().data() : nullptr,
                                    .o = o.data(),
                                    .state = state.levels.data()});
                   return Variable(std::move(o));
               })
        .value();
}

void GatedDeltaNet::reserve(MixerState& state, std::int64_t, std::int64_t tokens) const {
    reserve_levels(state.levels, levels_ > 0, tokens);
}

MixerState GatedDeltaNet::new_state(std::int64_t batch, DType dtype, Device device) const {
    const std::int64_t H = config_.num_heads, K = config_.head_dim, V = config_.value_width();
    MixerState state;
    for (const std::int64_t channels : {H * K, H * K, H * V})
        state.convolutions.push_back(Tensor::zeros({batch, config_.conv_width - 1, channels}, dtype, device));
    state.levels = Tensor::zeros({1, batch, H, K, V}, gate_dtype(dtype), device);
    return state;
}

}  // namespace fenwick::model
