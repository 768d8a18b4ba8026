#include "model/mamba2.h"

#include "kernels/ssd.h"

namespace fenwick::model {
namespace {

struct Widths {
    explicit Widths(const ModelConfig& c)
        : inner(c.num_heads * c.head_dim), keys(c.n_groups * c.state_size), conv(inner + 2 * keys),
          levels(has_levels(c.type) ? c.num_levels : 0) {}
    std::int64_t inner;   // HV
    std::int64_t keys;    // GN
    std::int64_t conv;    // HV + 2GN
    std::int64_t levels;  // L
};

}  // namespace

void Mamba2::declare(const ModelConfig& config, const std::string& prefix, std::vector<ParameterShape>& list) {
    const Widths w(config);
    const std::int64_t H = config.num_heads, E = config.hidden_size;
    list.push_back({prefix + "in_proj.weight", {w.inner + w.conv + H + H * w.levels, E}});  // z | xBC | dt | dl
    list.push_back({prefix + "conv1d.weight", {w.conv, 1, config.conv_width}, Initial::convolution});
    list.push_back({prefix + "conv1d.bias", {w.conv}, Initial::zeros, false});
    list.push_back({prefix + "dt_bias", {H}, Initial::step_bias, false});
    list.push_back({prefix + "A_log", {H}, Initial::log_counting, false});
    if (w.levels > 0) list.push_back({prefix + "L", {H, w.levels}, Initial::ones, false});
    list.push_back({prefix + "D", {H}, Initial::ones, false});
    list.push_back({prefix + "norm.weight", {w.inner}, Initial::ones, false});
    list.push_back({prefix + "out_proj.weight", {E, w.inner}, Initial::output_projection});
}

Mamba2::Mamba2(const ModelConfig& config, const std::string& prefix, const ParameterMap& parameters)
    : config_(config),
      levels_(Widths(config).levels),
      in_proj_(parameters.get(prefix + "in_proj.weight")),
      conv_weight_(parameters.get(prefix + "conv1d.weight")),
      conv_bias_(parameters.get(prefix + "conv1d.bias")),
      dt_bias_(parameters.get(prefix + "dt_bias")),
      a_log_(parameters.get(prefix + "A_log")),
      level_weight_(levels_ > 0 ? parameters.get(prefix + "L") : Variable()),
      skip_(parameters.get(prefix + "D")),
      norm_(parameters.get(prefix + "norm.weight")),
      out_proj_(parameters.get(prefix + "out_proj.weight")) {}

template <class Convolve, class Scan>
Variable Mamba2::mix(const Variable& x, Convolve&& convolve, Scan&& scan) const {
    const Widths w(config_);
    const std::int64_t H = config_.num_heads;
    std::vector<std::int64_t> widths{w.inner, w.conv, H};
    if (levels_ > 0) widths.push_back(H * levels_);
    const auto projected = ops::split_columns(ops::linear(x, in_proj_), widths);  // z, xBC, dt, dl

    const auto weight = ops::view(conv_weight_, {w.conv, config_.conv_width});
    const auto convolved = ops::split_columns(convolve(projected[1], weight, conv_bias_), {w.inner, w.keys, w.keys});
    const Variable &u = convolved[0], &k = convolved[1], &q = convolved[2];  // x, B, C

    const auto gate = ops::decay_gate(projected[2], dt_bias_, a_log_);
    const auto level_scales = levels_ > 0 ? ops::level_scales(projected[3], level_weight_) : Variable();
    const auto o = scan(q, k, ops::scale_heads(u, gate.step), gate.g, level_scales);  // [B, T, HV]
    const auto y = ops::gated_rms_norm(ops::head_skip(o, u, skip_), projected[0], norm_, config_.norm_eps, config_.n_groups);
    return ops::linear(y, out_proj_);
}

Variable Mamba2::forward(const Variable& x, const SequenceLayout& layout) const {
    const ops::SsdOptions options{.heads = config_.num_heads,
                                  .groups = config_.n_groups,
                                  .chunk_size = config_.chunk_size,
                                  .level_overflow = config_.level_overflow};
    return mix(
        x,
        [&](const Variable& input, const Variable& weight, const Variable& bias) {
            return ops::causal_conv1d(input, weight, bias, layout);
        },
        [&](const Variable& q, const Variable& k, const Variable& v, const Variable& g, const Variable& level_scales) {
            return ops::ssd(q, k, v, g, level_scales, options, layout);
        });
}

Tensor Mamba2::step(const Tensor& x, MixerState& state, std::int64_t position) const {
    const std::int64_t batch = x.size(0), length = x.size(1);
    check_levels("log_linear_ssd", config_, position + length);
    reserve(state, position, position + length);
    return mix(
               x,
               [&](const Variable& input, const Variable& weight, const Variable& bias) {
                   return Variable(convolve_step(input.value(), weight, bias, state.convolutions[0]));
               },
               [&](const Variable& q, const Variable& k, const Variable& v, const Variable& g, const Variable& level_scales) {
                   Tensor o = Tensor::empty(v.shape(), v.dtype(), v.device());
                   kernels::ssd_recurrent(exec_of(o),
                                          {.dtype = o.dtype(),
                                           .batch = batch,
                                           .length = length,
                                           .position = position,
                                           .heads = config_.num_heads,
                                           .groups = config_.n_groups,
                                           .key_width = config_.state_size,
                                           .value_width = config_.head_dim,
                                           .levels = levels_,
                                           .level_capacity = state.levels.size(0),
                                           .q_stride = q.value().row_stride(),
                                           .k_stride = k.value().row_stride(),
                                           .v_stride = v.value().row_stride(),
                                           .q = q.value().data(),
                                           .k = k.value().data(),
                                           .v = v.value().data(),
                                           .g = g.value().data(),
                                           .level_scales = level_scales.defined() ? level_scales.value().data() : nullptr,
                                           .o = o.data(),
                                           .state = state.levels.data()});
                   return Variable(std::move(o));
               })
        .value();
}

void Mamba2::reserve(MixerState& state, std::int64_t, std::int64_t tokens) const {
    reserve_levels(state.levels, levels_ > 0, tokens);
}

MixerState Mamba2::new_state(std::int64_t batch, DType dtype, Device device) const {
    MixerState state;
    state.convolutions = {Tensor::zeros({batch, config_.conv_width - 1, Widths(config_).conv}, dtype, device)};
    state.levels = Tensor::zeros({1, batch, config_.num_heads, config_.state_size, config_.head_dim}, gate_dtype(dtype), device);
    return state;
}

}  // namespace fenwick::model
