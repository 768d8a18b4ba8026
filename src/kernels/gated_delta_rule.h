// The scan of Gated DeltaNet (Yang et al., arXiv 2412.06464), linear or log-linear (Guo et al., arXiv 2506.04761):
//   S_t = exp(g_t) (I - beta_t k_t k_t') S_{t-1} + beta_t k_t v_t',   o_t = S_t' q_t
// and with level scales the state is split by level: o_t = sum_l level_scales[t, l] S_t^(l)' q_t, every level's state
// takes the transition, only level 0 takes the new outer product. Scales of q are the caller's. q and k have one head a
// value head. The recurrence is stable where beta_t |k_t|^2 <= 2 (keys of length 1, beta in (0, 2)).
//
// Chunkwise (docs/architecture.md): the unit lower-triangular system of a chunk is solved once, an effective query that
// all levels share reads the states that enter the chunk, and level states merge as the bits of the chunk index say.
#pragma once

#include "kernels/kernel.h"
#include "kernels/levels.h"

namespace fenwick::kernels {

struct GatedDeltaRule {
    DType dtype;
    Sequences sequences;
    std::int64_t heads = 0, key_width = 0, value_width = 0;
    std::int64_t levels = 0;       // 0 exactly when level_scales is null
    std::int64_t chunk_size = 64;  // a power of two
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
    const void* q = nullptr;             // [tokens, heads, key_width]
    const void* k = nullptr;             // [tokens, heads, key_width]
    const void* v = nullptr;             // [tokens, heads, value_width]
    const void* g = nullptr;             // [tokens, heads], gate dtype, log decay <= 0
    const void* beta = nullptr;          // [tokens, heads], gate dtype
    const void* level_scales = nullptr;  // [tokens, heads, levels], gate dtype, or null
    void* o = nullptr;                   // [tokens, heads, value_width] dense
};
FENWICK_KERNEL(gated_delta_rule_forward, GatedDeltaRule)

struct GatedDeltaRuleBackward {
    DType dtype;
    Sequences sequences;
    std::int64_t heads = 0, key_width = 0, value_width = 0;
    std::int64_t levels = 0;
    std::int64_t chunk_size = 64;
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, dq_stride = 0, dk_stride = 0, dv_stride = 0;
    const void* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    const void* g = nullptr;
    const void* beta = nullptr;
    const void* level_scales = nullptr;
    const void* d_o = nullptr;
    void* dq = nullptr;
    void* dk = nullptr;
    void* dv = nullptr;
    void* dg = nullptr;
    void* dbeta = nullptr;
    void* dlevel_scales = nullptr;  // every element written
};
FENWICK_KERNEL(gated_delta_rule_backward, GatedDeltaRuleBackward)

// Recurrent form with carried state, as SsdRecurrent in kernels/ssd.h.
struct GatedDeltaRuleRecurrent {
    DType dtype;
    std::int64_t batch = 0, length = 0, position = 0;
    std::int64_t heads = 0, key_width = 0, value_width = 0, levels = 0;
    std::int64_t level_capacity = 1;
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
    const void* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    const void* g = nullptr;
    const void* beta = nullptr;
    const void* level_scales = nullptr;
    void* o = nullptr;
    void* state = nullptr;  // [level_capacity, batch, heads, key_width, value_width], gate dtype; zeros at position 0
};
FENWICK_KERNEL(gated_delta_rule_recurrent, GatedDeltaRuleRecurrent)

}  // namespace fenwick::kernels
