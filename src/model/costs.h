// What a model costs, from its configuration alone: parameters by kind, arithmetic a token, memory for a batch.
// Behind `fenwick info CONFIG` and the share of the hardware's peak (MFU) that training prints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/language_model.h"

namespace fenwick::model {

struct CountOf {
    std::string kind;
    std::int64_t count = 0;
};
// In this order: embedding, head (absent if tied), mixer projections, convolutions, gates (A_log, dt_bias, D, L), norms, mlp.
// Kinds that the model lacks are left out.
std::vector<CountOf> parameters_by_kind(const ModelConfig& config);

// Floating-point operations (a multiply-add is 2) of one token's forward pass, over all layers, in sequences of `length`
// tokens on average over their positions. Products are counted as the algorithm needs them: masked halves at half.
// Norms, gates and activations (below 1 % of a usual model) are not counted, nor is what recomputation repeats.
struct OperatorFlops {
    std::string op;
    double flops = 0;  // a token
};
std::vector<OperatorFlops> forward_flops(const ModelConfig& config, std::int64_t length);

// Forward plus backward of one token: a product's backward is two products of its size, so 3 times the forward's.
double training_flops_per_token(const ModelConfig& config, std::int64_t length);

struct MemoryEstimate {  // bytes
    std::int64_t weights = 0, gradients = 0, optimizer = 0, activations = 0;
    std::int64_t total() const { return weights + gradients + optimizer + activations; }
};
// Of one process that trains on `batch` rows of `length` tokens at a time: float32 weights, their gradients, AdamW's two
// moments, and at the peak (where backward begins) what it needs of all layers and the first gradients.
MemoryEstimate training_memory(const ModelConfig& config, std::int64_t batch, std::int64_t length, DType compute_dtype,
                               Recompute recompute);

// Bytes that one row's decoding state holds after `tokens` tokens: O(log tokens) for log-linear models, constant for linear
// ones, O(tokens) for the Transformer (whose cache doubles, so up to twice its content).
std::int64_t decode_state_bytes(const ModelConfig& config, std::int64_t tokens, DType compute_dtype);

// Bytes of matrices in `dtype` that every token of the Decoder (model/decoder.h) reads.
std::int64_t decode_weight_bytes(const ModelConfig& config, DType dtype);
// Bytes of device memory that the Decoder's token at `position` (tokens seen before it) moves for its states: what it reads
// and writes, of `batch` rows, with a Transformer's cache in `cache_dtype`.
std::int64_t decode_state_traffic(const ModelConfig& config, std::int64_t position, std::int64_t batch, DType cache_dtype);

}  // namespace fenwick::model
