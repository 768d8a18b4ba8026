// Gated DeltaNet (Yang et al., arXiv 2412.06464) and, with num_levels > 0, its log-linear form (Guo et al., arXiv 2506.04761).
#pragma once

#include "model/mixer.h"

namespace fenwick::model {

class GatedDeltaNet final : public Mixer {
public:
    static void declare(const ModelConfig& config, const std::string& prefix, std::vector<ParameterShape>& list);
    GatedDeltaNet(const ModelConfig& config, const std::string& prefix, const ParameterMap& parameters);

    Variable forward(const Variable& x, const SequenceLayout& layout) const override;
    Tensor step(const Tensor& x, MixerState& state, std::int64_t position) const override;
    void reserve(MixerState& state, std::int64_t position, std::int64_t tokens) const override;
    MixerState new_state(std::int64_t batch, DType dtype, Device device) const override;

private:
    // All but the two operators that look back in time:
    // convolve(which of q 0, k 1, v 2; x, weight [channels, width]) and scan(q, k, v, g, beta, level_scales).
    template <class Convolve, class Scan>
    Variable mix(const Variable& x, Convolve&& convolve, Scan&& scan) const;

    ModelConfig config_;
    std::int64_t levels_;  // 0: the linear model
    Variable q_proj_, k_proj_, v_proj_, a_proj_, b_proj_, g_proj_, l_proj_, o_proj_;
    Variable q_conv_, k_conv_, v_conv_, dt_bias_, a_log_, level_weight_, norm_;
};

}  // namespace fenwick::model
