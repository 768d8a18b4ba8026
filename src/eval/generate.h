// Text from a model, token by token.
#pragma once

#include <functional>
#include <vector>

#include "base/random.h"
#include "model/language_model.h"

namespace fenwick::eval {

struct SamplingOptions {
    double temperature = 1.0;  // 0: always the likeliest token
    std::int64_t top_k = 0;    // only the k likeliest tokens; 0: all
    double top_p = 1.0;        // of those, the fewest likeliest whose probabilities reach p (nucleus sampling)
    std::uint64_t seed = 0;
};

struct GenerateOptions {
    SamplingOptions sampling;
    std::int64_t max_tokens = 256;
    std::int64_t vocabulary = 0;           // draws ids below this alone, the tokenizer's where the model's is padded; 0: all
    std::int32_t end_of_text = -1;         // stops after this id; -1: never
    std::int64_t prompt_segment = 256;     // prompt tokens a call: bounds memory, not the result
    DType weights = DType::float32;        // of the matrices while tokens are drawn: bfloat16 on a GPU
};

// Feeds `prompt` (at least one token) and then each token drawn; the n-th draw is a pure function of the logits, the seed and
// n (kernels::Sample). `on_token` sees every new id, and how many tokens had been fed when it was drawn; it returns false
// to stop. On a GPU tokens are drawn ahead of it. Returns the ids drawn, end_of_text not among them.
std::vector<std::int32_t> generate(const model::LanguageModel& model, const std::vector<std::int32_t>& prompt,
                                   const GenerateOptions& options,
                                   const std::function<bool(std::int32_t id, std::int64_t position)>& on_token);

}  // namespace fenwick::eval
