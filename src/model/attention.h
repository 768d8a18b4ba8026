// The Transformer's mixer: causal softmax attention with rotary positions and grouped key/value heads.
#pragma once

#include "model/mixer.h"

namespace fenwick::model {

class Attention final : public Mixer {
public:
    static void declare(const ModelConfig& config, const std::string& prefix, std::vector<ParameterShape>& list);
    Attention(const ModelConfig& config, const std::string& prefix, const ParameterMap& parameters);

    Variable forward(const Variable& x, const SequenceLayout& layout) const override;
    Tensor step(const Tensor& x, MixerState& state, std::int64_t position) const override;
    void reserve(MixerState& state, std::int64_t position, std::int64_t tokens) const override;
    MixerState new_state(std::int64_t batch, DType dtype, Device device) const override;

private:
    // attend(q [B, T, HD], k [B, T, GD], v [B, T, GD]), q and k rotated.
    template <class Attend>
    Variable mix(const Variable& x, const SequenceLayout& layout, std::int64_t position, Attend&& attend) const;

    std::int64_t heads_, groups_, width_;
    double rope_theta_;
    Variable q_proj_, k_proj_, v_proj_, o_proj_;
};

}  // namespace fenwick::model
