// The gate arithmetic of the mixers; inputs in the activation dtype, everything computed and written in gate dtype.
// softplus(x) = log(1 + exp(x)), computed without overflow.
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

// Decay gates of Mamba-2 and Gated DeltaNet: step = softplus(raw + step_bias), g = -exp(a_log) * step.
// Mamba-2: raw is dt, step its dt. Gated DeltaNet: raw = a_proj x, only g is used.
struct DecayGate {
    DType dtype;
    std::int64_t tokens = 0, heads = 0;
    std::int64_t raw_stride = 0;
    const void* raw = nullptr;        // [tokens, heads], activation dtype
    const void* step_bias = nullptr;  // [heads] (dt_bias)
    const void* a_log = nullptr;      // [heads]
    void* step = nullptr;             // [tokens, heads], gate dtype
    void* g = nullptr;                // [tokens, heads], gate dtype, <= 0
};
FENWICK_KERNEL(decay_gate_forward, DecayGate)

struct DecayGateBackward {
    DType dtype;
    std::int64_t tokens = 0, heads = 0;
    std::int64_t raw_stride = 0, draw_stride = 0;
    const void* raw = nullptr;
    const void* step_bias = nullptr;
    const void* a_log = nullptr;
    const void* dstep = nullptr;  // may be null: no gradient through step
    const void* dg = nullptr;     // may be null
    void* draw = nullptr;         // activation dtype
    void* dstep_bias = nullptr;   // [heads]
    void* da_log = nullptr;       // [heads]
    bool accumulate_draw = false, accumulate_dstep_bias = false, accumulate_da_log = false;
};
FENWICK_KERNEL(decay_gate_backward, DecayGateBackward)

// level_scales = softplus(level_weight * raw): raw [tokens, heads, levels] (activation dtype, token stride raw_stride),
// level_weight [heads, levels] (the models' parameter L), level_scales [tokens, heads, levels] dense, gate dtype.
struct LevelScales {
    DType dtype;
    std::int64_t tokens = 0, heads = 0, levels = 0;
    std::int64_t raw_stride = 0;
    const void* raw = nullptr;
    const void* level_weight = nullptr;
    void* level_scales = nullptr;
};
FENWICK_KERNEL(level_scales_forward, LevelScales)

struct LevelScalesBackward {
    DType dtype;
    std::int64_t tokens = 0, heads = 0, levels = 0;
    std::int64_t raw_stride = 0, draw_stride = 0;
    const void* raw = nullptr;
    const void* level_weight = nullptr;
    const void* dlevel_scales = nullptr;
    void* draw = nullptr;
    void* dlevel_weight = nullptr;  // [heads, levels]
    bool accumulate_draw = false, accumulate_dlevel_weight = false;
};
FENWICK_KERNEL(level_scales_backward, LevelScalesBackward)

// y = sigmoid(x): x [count] activation dtype, y gate dtype. beta of the delta rule.
struct Sigmoid {
    DType dtype;
    std::int64_t count = 0;
    const void* x = nullptr;
    void* y = nullptr;
};
FENWICK_KERNEL(sigmoid_forward, Sigmoid)

struct SigmoidBackward {
    DType dtype;
    std::int64_t count = 0;
    const void* y = nullptr;   // gate dtype, as forward wrote it
    const void* dy = nullptr;  // gate dtype
    void* dx = nullptr;        // activation dtype
    bool accumulate_dx = false;
};
FENWICK_KERNEL(sigmoid_backward, SigmoidBackward)

}  // namespace fenwick::kernels
