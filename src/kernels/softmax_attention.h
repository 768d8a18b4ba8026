// Causal softmax attention with grouped key/value heads (GQA), scale 1/sqrt(width), within each document.
// Computed in tiles with a running maximum, so memory is O(T). Head h reads key/value head h / (heads / groups).
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

struct SoftmaxAttention {
    DType dtype;
    Sequences sequences;
    std::int64_t heads = 0, groups = 0, width = 0;
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
    const void* q = nullptr;  // [tokens, heads, width]
    const void* k = nullptr;  // [tokens, groups, width]
    const void* v = nullptr;  // [tokens, groups, width]
    void* o = nullptr;        // [tokens, heads, width] dense
    void* lse = nullptr;      // [tokens, heads], gate dtype: log-sum-exp of the scaled scores, kept for backward
};
FENWICK_KERNEL(softmax_attention_forward, SoftmaxAttention)

struct SoftmaxAttentionBackward {
    DType dtype;
    Sequences sequences;
    std::int64_t heads = 0, groups = 0, width = 0;
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, dq_stride = 0, dk_stride = 0, dv_stride = 0;
    const void* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    const void* o = nullptr;
    const void* lse = nullptr;
    const void* d_o = nullptr;  // dense
    void* dq = nullptr;
    void* dk = nullptr;
    void* dv = nullptr;
};
FENWICK_KERNEL(softmax_attention_backward, SoftmaxAttentionBackward)

// Decoding: `length` new tokens of each of `batch` rows attend to the cache, into which their k and v were already
// written at positions position .. position + length - 1. Query i sees cache entries 0 .. position + i.
struct SoftmaxAttentionCached {
    DType dtype;
    std::int64_t batch = 0, length = 0, position = 0, capacity = 0;
    std::int64_t heads = 0, groups = 0, width = 0;
    std::int64_t q_stride = 0;
    const void* q = nullptr;        // [batch * length, heads, width]
    const void* k_cache = nullptr;  // [batch, capacity, groups, width]
    const void* v_cache = nullptr;  // [batch, capacity, groups, width]
    void* o = nullptr;              // [batch * length, heads, width] dense
};
FENWICK_KERNEL(softmax_attention_cached, SoftmaxAttentionCached)

}  // namespace fenwick::kernels
