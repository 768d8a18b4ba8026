// The differentiable operators: the catalogue. Each is defined in autograd/<op>.cpp, where forward is one kernel call and
// backward is written beside it. What is computed stands in kernels/<op>.h.
//
// Shapes: `...` are leading dimensions, usually [batch, length]; heads are merged into the last dimension, head-major
// ([..., heads * width]), so that slices of one wide projection (split_columns) go in without a copy. `tokens` is the
// product of the leading dimensions. Errors name the operator, the shapes found and the shape that would be right.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "autograd/sequence_layout.h"
#include "autograd/tape.h"

namespace fenwick::ops {

// ---- structure -------------------------------------------------------------------------------------------------------
Variable view(const Variable& x, Shape shape);                // x contiguous; one size may be -1
Variable cast(const Variable& x, DType dtype);                // itself if the dtype fits
// Same shape; y has x's dtype or, like a residual stream, gate_dtype of it, which is then the result's too.
Variable add(const Variable& x, const Variable& y);
Variable scale(const Variable& x, double factor);
// Cuts the last dimension into slices of the given widths (their sum must be the whole). No copy; the slices' gradients
// gather in one buffer.
std::vector<Variable> split_columns(const Variable& x, const std::vector<std::int64_t>& widths);

// Recomputation (activation checkpointing): runs body(inputs) without recording, and again, recorded, in backward.
// Parameters that body uses besides its inputs receive their gradients as usual. body must be deterministic.
Variable checkpoint(const std::function<Variable(const std::vector<Variable>&)>& body, const std::vector<Variable>& inputs);

// ---- projections -----------------------------------------------------------------------------------------------------
// y = x weight': x [..., in], weight [out, in] -> [..., out]. With a bfloat16 x and a float32 weight, the product is in
// bfloat16 and the weight's gradient in float32.
Variable linear(const Variable& x, const Variable& weight);
// Rows of table [vocab, width] -> [ids.shape..., width] in `dtype`; ids int32, on the table's device. An id outside the
// vocabulary is an error that names it and its place; on a GPU, where a look would wait for it, ids are taken as they are: the
// loader, perplexity and generate give none outside.
Variable embedding(const Tensor& ids, const Variable& table, DType dtype);

// ---- norms and activations -------------------------------------------------------------------------------------------
// Over each of `groups` equal slices of the last dimension; weight [width of the whole row].
Variable rms_norm(const Variable& x, const Variable& weight, double eps, std::int64_t groups = 1);
Variable rms_norm_gated(const Variable& x, const Variable& z, const Variable& weight, double eps, std::int64_t groups = 1);
Variable gated_rms_norm(const Variable& x, const Variable& z, const Variable& weight, double eps, std::int64_t groups = 1);
// The residual stream has gate_dtype of the activations' dtype: a sum over all layers, it is not rounded to bfloat16 at each.
// rms_norm of the stream in the activations' `dtype`:
Variable stream_rms_norm(const Variable& residual, const Variable& weight, double eps, DType dtype);
// The next stream and its norm in one pass: returns {rms_norm(x + residual) like x, x + residual}.
std::pair<Variable, Variable> add_rms_norm(const Variable& x, const Variable& residual, const Variable& weight, double eps);
Variable l2norm(const Variable& x, std::int64_t heads, double eps = 1e-6);  // over each head of the last dimension
Variable swiglu(const Variable& gate, const Variable& up);

// ---- sequence mixing -------------------------------------------------------------------------------------------------
// x [..., channels], weight [channels, width], bias [channels] or undefined. SiLU included.
Variable causal_conv1d(const Variable& x, const Variable& weight, const Variable& bias, const SequenceLayout& layout);

enum class LevelOverflow : std::uint8_t { clamp, error };  // when a document needs more levels than level_scales has

struct SsdOptions {
    std::int64_t heads = 0, groups = 1;
    std::int64_t chunk_size = 64;  // a power of two
    LevelOverflow level_overflow = LevelOverflow::clamp;
};
// q, k [..., groups * key_width]; v [..., heads * value_width]; g [..., heads]; level_scales [..., heads * levels], or
// undefined for the linear operator -> [..., heads * value_width]
Variable ssd(const Variable& q, const Variable& k, const Variable& v, const Variable& g, const Variable& level_scales,
             const SsdOptions& options, const SequenceLayout& layout);

struct GatedDeltaRuleOptions {
    std::int64_t heads = 0;
    std::int64_t chunk_size = 64;
    LevelOverflow level_overflow = LevelOverflow::clamp;
};
// q, k [..., heads * key_width]; v [..., heads * value_width]; g, beta [..., heads]; level_scales as above
Variable gated_delta_rule(const Variable& q, const Variable& k, const Variable& v, const Variable& g, const Variable& beta,
                          const Variable& level_scales, const GatedDeltaRuleOptions& options, const SequenceLayout& layout);

// q [..., heads * width], k and v [..., groups * width] -> [..., heads * width]
Variable softmax_attention(const Variable& q, const Variable& k, const Variable& v, std::int64_t heads, std::int64_t groups,
                           const SequenceLayout& layout);
// `position`: where every document's first token stands (decoding)
Variable rope(const Variable& x, std::int64_t heads, double theta, const SequenceLayout& layout, std::int64_t position = 0);

// ---- gates (results in gate_dtype(x.dtype())) -------------------------------------------------------------------------
struct DecayGate {
    Variable step;  // softplus(raw + step_bias)  [..., heads]
    Variable g;     // -exp(a_log) * step         [..., heads]
};
DecayGate decay_gate(const Variable& raw, const Variable& step_bias, const Variable& a_log);
// softplus(level_weight * raw): raw [..., heads * levels], level_weight [heads, levels] -> [..., heads * levels]
Variable level_scales(const Variable& raw, const Variable& level_weight);
Variable sigmoid(const Variable& x);
// x [..., heads * width] times scale [..., heads], per head
Variable scale_heads(const Variable& x, const Variable& scale);
// o + skip x, skip [heads]
Variable head_skip(const Variable& o, const Variable& x, const Variable& skip);

// ---- loss ------------------------------------------------------------------------------------------------------------
// Mean of the cross entropy over targets != -100 (kernels::ignore_index); logits [..., vocab], targets int32 [...].
// 0 where every target is ignored.
Variable cross_entropy(const Variable& logits, const Tensor& targets);

struct LinearCrossEntropy {
    Variable loss;     // sum of token_nll over valid targets / normalizer, one element, gate dtype
    Tensor token_nll;  // [...], gate dtype, 0 for ignored targets
};
// The loss of logits = x weight', without keeping logits: x [..., width], weight [vocab, width], in blocks of rows.
// `normalizer` is the number of valid targets that the mean is over (of the whole batch, over all processes and
// accumulation steps); its reciprocal scales loss and gradients.
LinearCrossEntropy linear_cross_entropy(const Variable& x, const Variable& weight, const Tensor& targets, double normalizer);

}  // namespace fenwick::ops
