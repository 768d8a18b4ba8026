// Mamba-2 (Dao & Gu, arXiv 2405.21060) and, with num_levels > 0, its log-linear form (Guo et al., arXiv 2506.04761).
#pragma once

#include "model/mixer.h"

namespace fenwick::model {

class Mamba2 final : public Mixer {
public:
    static void declare(const ModelConfig& config, const std::string& prefix, std::vector<ParameterShape>& list);
    Mamba2(const ModelConfig& config, const std::string& prefix, const ParameterMap& parameters);

    Variable forward(const Variable& x, const SequenceLayout& layout) const override;
    Tensor step(const Tensor& x, MixerState& state, std::int64_t position) const override;
    void reserve(MixerState& state, std::int64_t position, std::int64_t tokens) const override;
    MixerState new_state(std::int64_t batch, DType dtype, Device device) const override;

private:
    // All but the two operators that look back in time:
    // convolve(x, weight [channels, width], bias) and scan(q, k, v, g, level_scales).
    template <class Convolve, class Scan>
    Variable mix(const Variable& x, Convolve&& convolve, Scan&& scan) const;

    ModelConfig config_;
    std::int64_t levels_;  // 0: the linear model
    Variable in_proj_, conv_weight_, conv_bias_, dt_bias_, a_log_, level_weight_, skip_, norm_, out_proj_;
};

}  // namespace fenwick::model
