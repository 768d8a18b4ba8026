// Models as folders in the layout of Hugging Face: config.json beside model.safetensors, whole or in shards.
//
// Read and written: flash-linear-attention's transformer, mamba2, log_linear_mamba2 and gated_deltanet (whose parameter
// names are ours), log_linear_gated_deltanet in the same manner, and transformers' llama for the Transformer.
// What such a config.json may say but we do not compute (biases, windows, scaled rotary positions ...) is refused by name.
#pragma once

#include <string>
#include <string_view>

#include "model/language_model.h"
#include "model/safetensors.h"

namespace fenwick::model {

// config.json's text -> configuration, validated. `path` is for errors.
ModelConfig config_from_hf(std::string_view json, const std::string& path);

struct ExportOptions {
    safetensors::Type dtype = safetensors::Type::float32;
    bool llama_names = false;                              // the Transformer as transformers' llama
    std::int64_t max_shard_bytes = 5'000'000'000;          // one file if everything fits
    std::int64_t bos_token_id = -1, eos_token_id = -1;     // < 0: not written
};
std::string config_to_hf(const ModelConfig& config, const ExportOptions& options);

// Makes `folder` if needed. Files appear under their final names only when complete; config.json last.
void export_hf(const LanguageModel& model, const std::string& folder, const ExportOptions& options);

// Reads config.json and all weights. Missing, extra and misshapen tensors are errors that name them.
LanguageModel import_hf(const std::string& folder, Device device, DType compute_dtype);

}  // namespace fenwick::model
