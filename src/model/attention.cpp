#include "model/attention.h"

#include <algorithm>

#include "kernels/softmax_attention.h"

namespace fenwick::model {
namespace {

// Makes room for `tokens` tokens in a cache [B, capacity, G, D], at least doubling it: O(1) copies a token.
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
    return mix(x, SequenceLayout::uniform(batch, length), position,
               [&](const Variable& q, const Variable& k, const Variable& v) {
                   for (Tensor* cache : {&state.keys, &state.values}) reserve_cache(*cache, position, position + length);
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

MixerState Attention::new_state(std::int64_t batch, DType dtype, Device device) const {
    MixerState state;
    state.keys = Tensor::zeros({batch, 0, groups_, width_}, dtype, device);
    state.values = Tensor::zeros({batch, 0, groups_, width_}, dtype, device);
    return state;
}

}  // namespace fenwick::model
