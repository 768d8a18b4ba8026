// The gated MLP of every block: down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202).
#pragma once

#include "model/parameters.h"

namespace fenwick::model {

class Mlp {
public:
    static void declare(const ModelConfig& config, const std::string& prefix, std::vector<ParameterShape>& list) {
        const std::int64_t E = config.hidden_size, width = config.mlp_width();
        list.push_back({prefix + "gate_proj.weight", {width, E}});
        list.push_back({prefix + "up_proj.weight", {width, E}});
        list.push_back({prefix + "down_proj.weight", {E, width}, Initial::output_projection});
    }

    Mlp(const std::string& prefix, const ParameterMap& parameters)
        : gate_proj_(parameters.get(prefix + "gate_proj.weight")),
          up_proj_(parameters.get(prefix + "up_proj.weight")),
          down_proj_(parameters.get(prefix + "down_proj.weight")) {}

    // x [B, T, E] -> [B, T, E]
    Variable forward(const Variable& x) const {
        return ops::linear(ops::swiglu(ops::linear(x, gate_proj_), ops::linear(x, up_proj_)), down_proj_);
    }

private:
    Variable gate_proj_, up_proj_, down_proj_;
};

}  // namespace fenwick::model
