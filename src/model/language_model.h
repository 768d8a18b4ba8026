// A causal language model: embedding, blocks of mixer and MLP, final norm, head.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/model_config.h"

namespace fenwick::model {

enum class Recompute : std::uint8_t { none, mixer, block };  // what backward computes again instead of keeping

struct Parameter {
    std::string name;    // flash-linear-attention's: "backbone.layers.0.mixer.in_proj.weight"
    Variable variable;   // a leaf; float32 master weights (float64 in tests)
    bool weight_decay;   // false for A_log, dt_bias, D, L, norms, biases
};

// What a model carries from token to token while it generates; made by LanguageModel::new_state.
class DecodeState {
public:
    virtual ~DecodeState() = default;
    virtual std::int64_t position() const = 0;  // tokens seen
    virtual std::int64_t bytes() const = 0;     // of all state tensors
    virtual std::unique_ptr<DecodeState> clone() const = 0;
};

class LanguageModel {
public:
    // Parameters are made on `device` in `dtype` (float32; float64 in tests), not yet initialised.
    // Activations have `compute_dtype`: the same, or bfloat16 on CUDA.
    LanguageModel(const ModelConfig& config, Device device, DType dtype, DType compute_dtype);
    ~LanguageModel();
    LanguageModel(LanguageModel&&) noexcept;

    const ModelConfig& config() const;
    Device device() const;
    // Every parameter once (a tied head is the embedding), in a fixed order: that of the layers.
    const std::vector<Parameter>& parameters() const;
    std::int64_t parameter_count() const;

    // The initialisation of design/math: a pure function of seed and parameter names.
    void initialize(std::uint64_t seed);

    void set_recompute(Recompute recompute);

    // ids int32 [B, T] on the model's device; the layout covers B * T tokens.
    Variable hidden(const Tensor& ids, const SequenceLayout& layout) const;  // [B, T, E], after the final norm
    Variable logits(const Tensor& ids, const SequenceLayout& layout) const;  // [B, T, vocab]
    // targets int32 [B, T] (targets[b, t] is the token after ids[b, t], or -100); see ops::linear_cross_entropy.
    ops::LinearCrossEntropy loss(const Tensor& ids, const Tensor& targets, const SequenceLayout& layout,
                                 double normalizer) const;

    std::unique_ptr<DecodeState> new_state(std::int64_t batch) const;
    // A state as after `tokens` tokens, of random numbers: for benchmarks, which need a long history at once.
    std::unique_ptr<DecodeState> random_state(std::int64_t batch, std::int64_t tokens, std::uint64_t seed) const;
    // Feeds ids [B, n] (n >= 1: a whole prompt or one token) and returns the logits of all n positions [B, n, vocab].
    // Any split of a sequence into calls gives the logits of the whole.
    Tensor step(const Tensor& ids, DecodeState& state) const;

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace fenwick::model
