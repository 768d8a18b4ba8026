// The scan of Mamba-2 (Dao & Gu, arXiv 2405.21060), linear or log-linear (Guo et al., arXiv 2506.04761):
//   o_t = sum_{s <= t} level_scales[t, level(t,s)] * exp(sum_{r=s+1..t} g_r) * (q_t . k_s) v_s
// with level scales (log_linear_ssd), or the same without them (ssd). Scales of q are the caller's.
// Head h reads key group h / (heads / groups).
//
// Chunkwise: dense masked products within chunks; across chunks bucket states form a binary tree whose decays are
// scalars, so every chunk's output is independent once the tree is built. O(T log T) work, O(T / chunk_size) states.
#pragma once

#include "base/memory.h"
#include "kernels/kernel.h"
#include "kernels/levels.h"

namespace fenwick::kernels {

struct Ssd {
    DType dtype;
    Sequences sequences;
    std::int64_t heads = 0, groups = 0, key_width = 0, value_width = 0;
    std::int64_t levels = 0;      // columns of level_scales; 0 exactly when level_scales is null
    std::int64_t chunk_size = 64; // a power of two; changes speed, not the result
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
    const void* q = nullptr;             // [tokens, groups, key_width]
    const void* k = nullptr;             // [tokens, groups, key_width]
    const void* v = nullptr;             // [tokens, heads, value_width]
    const void* g = nullptr;             // [tokens, heads], gate dtype, log decay <= 0
    const void* level_scales = nullptr;  // [tokens, heads, levels], gate dtype, or null (ssd)
    void* o = nullptr;                   // [tokens, heads, value_width] dense
    Buffer* kept = nullptr;              // receives what ssd_backward would have to compute again; may stay empty
};
FENWICK_KERNEL(ssd_forward, Ssd)

// Gradients of every input. The decay's gradient: a pair (t, s) gives its share of
// o_t . do_t to g of the tokens s+1 .. t. d(Gamma_t) = o_t . do_t - v_t . dv_t, whose reverse cumulative sum is dg, would
// lose it in rounding where little is carried on; both devices sum the pairs themselves, so that nothing inexact cancels.
struct SsdBackward {
    DType dtype;
    Sequences sequences;
    std::int64_t heads = 0, groups = 0, key_width = 0, value_width = 0;
    std::int64_t levels = 0;
    std::int64_t chunk_size = 64;
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, dq_stride = 0, dk_stride = 0, dv_stride = 0;
    const void* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    const void* g = nullptr;
    const void* level_scales = nullptr;
    const void* d_o = nullptr;  // dense
    const Buffer* kept = nullptr;  // of ssd_forward on the same device with the same inputs; null or empty: computed again
    void* dq = nullptr;
    void* dk = nullptr;
    void* dv = nullptr;
    void* dg = nullptr;             // [tokens, heads]
    void* dlevel_scales = nullptr;  // [tokens, heads, levels], every element written (0 for levels a token does not see)
};
FENWICK_KERNEL(ssd_backward, SsdBackward)

// Recurrent form with carried state: `length` tokens of each of `batch` rows, all rows at the same position. Any split of
// a sequence into calls gives the result of the whole. Without level scales: one state a row, level_capacity = 1.
// With them: before token t >= 1 enters, levels 0..ctz(t) are added into level ctz(t)+1, which is empty then; all levels
// decay by exp(g_t), and k_t v_t' becomes level 0.
struct SsdRecurrent {
    DType dtype;
    std::int64_t batch = 0, length = 0, position = 0;  // position: tokens each row has seen before this call
    std::int64_t heads = 0, groups = 0, key_width = 0, value_width = 0, levels = 0;
    std::int64_t level_capacity = 1;  // >= levels_needed(position + length) with level scales
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
    const void* q = nullptr;  // [batch * length, groups, key_width], and so on as above
    const void* k = nullptr;
    const void* v = nullptr;
    const void* g = nullptr;
    const void* level_scales = nullptr;
    void* o = nullptr;
    void* state = nullptr;  // [level_capacity, batch, heads, key_width, value_width], gate dtype; zeros at position 0
};
FENWICK_KERNEL(ssd_recurrent, SsdRecurrent)

}  // namespace fenwick::kernels
