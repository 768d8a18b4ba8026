#include "model/attention.h"

#include "kernels/softmax_attention.h"

namespace fenwick::model {
namespace {

// x [B, n, GD] becomes the cache's tokens position .. position + n - 1.
void write_cache(const Tensor& cache, const Tensor& x, std::int64_t position) {
    const std::int64_t batch = x.size(0), length = x.size(1), capacity = cache.size(1);
    const Tensor rows = cache.view({batch * capacity, -1}), tokens = x.contiguous().view({batch * length, -1});
    for (std::int64_t b = 0; b < batch; ++b)
        rows.narrow_rows(b * capacity + position, b * capacity + position + length)
            .copy_from(tokens.narrow_rows(b * length, (b + 1) * length));
}

}  // namespace

void Attention::declare(const ModelConfig& config, const std::string& prefix, std::vector<ParameterShape>& list) {
    const std::int64_t E = config.hidden_size, D = config.value_width();
    list.push_back({prefix + "q_proj.weight", {config.num_heads * D, E}});
    list.push_back({prefix + "k_proj.weight", {config.kv_heads() * D, E}});
    list.push_back({prefix + "v_proj.weight", {config.kv_heads() * D, E}});
    list.push_back({prefix + "o_proj.weight", {E, config.num_heads * D}, Initial::output_projection});
}

Attention::Attention(const ModelConfig& config, const std::string& prefix, const ParameterMap& parameters)
    : heads_(config.num_heads),
      groups_(config.kv_heads()),
      width_(config.value_width()),
      rope_theta_(config.rope_theta),
      q_proj_(parameters.get(prefix + "q_proj.weight")),
      k_proj_(parameters.get(prefix + "k_proj.weight")),
      v_proj_(parameters.get(prefix + "v_proj.weight")),
      o_proj_(parameters.get(prefix + "o_proj.weight")) {}

template <class Attend>
Variable Attention::mix(const Variable& x, const SequenceLayout& layout, std::int64_t position, Attend&& attend) const {
    const auto q = ops::rope(ops::linear(x, q_proj_), heads_, rope_theta_, layout, position);
    const auto k = ops::rope(ops::linear(x, k_proj_), groups_, rope_theta_, layout, position);
    return ops::linear(attend(q, k, ops::linear(x, v_proj_)), o_proj_);
}

Variable Attention::forward(const Variable& x, const SequenceLayout& layout) const {
    return mix(x, layout, 0, [&](const Variable& q, const Variable& k, const Variable& v) {
        return ops::softmax_attention(q, k, v, heads_, groups_, layout);
    });
}

Tensor Attention::step(const Tensor& x, MixerState& state, std::int64_t position) const {
    const std::int64_t batch = x.size(0), length = x.size(1);
    reserve(state, position, position + length);
    return mix(x, SequenceLayout::uniform(batch, length), position,
               [&](const Variable& q, const Variable& k, const Variable& v) {
                   write_cache(state.keys, k.value(), position);
                   write_cache(state.values, v.value(), position);
                   Tensor o = Tensor::empty(q.shape(), q.dtype(), q.device());
                   kernels::softmax_attention_cached(exec_of(o), {.dtype = o.dtype(),
                                                                  .batch = batch,
                                                                  .length = length,
                                                                  .position = position,
                                                                  .capacity = state.keys.size(1),
                                                                  .heads = heads_,
                                                                  .groups = groups_,
                                                                  .width = width_,
                                                                  .q_stride = q.value().row_stride(),
                                                                  .q = q.value().data(),
                                                                  .k_cache = state.keys.data(),
                                                                  .v_cache = state.values.data(),
                                                                  .o = o.data()});
                   return Variable(std::move(o));
               })
        .value();
}

void Attention::reserve(MixerState& state, std::int64_t position, std::int64_t tokens) const {
    for (Tensor* cache : {&state.keys, &state.values}) reserve_cache(*cache, position, tokens);
}

MixerState Attention::new_state(std::int64_t batch, DType dtype, Device device) const {
    MixerState state;
    state.keys = Tensor::zeros({batch, 0, groups_, width_}, dtype, device);
    state.values = Tensor::zeros({batch, 0, groups_, width_}, dtype, device);
    return state;
}

}  // namespace fenwick::model
