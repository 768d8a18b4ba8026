// What mixes tokens along the sequence: the part of a block in which the five models differ.
#pragma once

#include <memory>
#include <vector>

#include "model/parameters.h"

namespace fenwick::model {

// What one layer carries from token to token while it generates.
struct MixerState {
    std::vector<Tensor> convolutions;  // each [B, width-1, channels], the last inputs, oldest first
    Tensor levels;                     // [level_capacity, B, H, K, V], gate dtype: the recurrent states by level
    Tensor keys, values;               // [B, capacity, G, D]: the Transformer's cache

    std::int64_t bytes() const;
    MixerState clone() const;
};

class Mixer {
public:
    virtual ~Mixer() = default;

    // Training form: x [B, T, E], normed -> [B, T, E]. Chunkwise; nothing crosses a document's boundary.
    virtual Variable forward(const Variable& x, const SequenceLayout& layout) const = 0;
    // Decoding form: x [B, n, E], the tokens after the `position` that the state has seen -> [B, n, E]. Recurrent.
    virtual Tensor step(const Tensor& x, MixerState& state, std::int64_t position) const = 0;
    // Room in a state that has seen `position` tokens for `tokens` in all; step() makes its own.
    virtual void reserve(MixerState& state, std::int64_t position, std::int64_t tokens) const = 0;
    // Fresh state for `batch` rows whose activations have `dtype`.
    virtual MixerState new_state(std::int64_t batch, DType dtype, Device device) const = 0;
};

std::unique_ptr<Mixer> make_mixer(const ModelConfig& config, const std::string& prefix, const ParameterMap& parameters);

// ---- what the decoding forms share -------------------------------------------------------------------------------------
// x [B, n, channels] continues the rows whose last inputs are in `tail`, which moves on.
Tensor convolve_step(const Tensor& x, const Variable& weight, const Variable& bias, Tensor& tail);
// Room for the level states of `tokens` tokens (1 state without levels); states that are there stay.
void reserve_levels(Tensor& levels, bool has_levels, std::int64_t tokens);
// Room for `tokens` tokens in a cache [B, capacity, G, D] with `seen` of them; at least doubles: O(1) copies a token.
void reserve_cache(Tensor& cache, std::int64_t seen, std::int64_t tokens);
// What ops do in training: an error if the config asks for one and `tokens` tokens use more levels than there are.
void check_levels(std::string_view where, const ModelConfig& config, std::int64_t tokens);

}  // namespace fenwick::model
