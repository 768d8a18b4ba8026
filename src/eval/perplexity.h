// How well a model predicts a text: token perplexity, bits per byte, word perplexity.
#pragma once

#include <functional>

#include "data/corpus.h"
#include "model/language_model.h"

namespace fenwick::eval {

struct PerplexityOptions {
    std::int64_t context = 0;     // tokens a prediction may look back on, at most; > 0
    std::int64_t stride = 0;      // new targets a window; 0: context. Smaller: more context a token, more work
    std::int64_t batch = 1;       // windows a forward pass; changes speed only
    std::int64_t max_tokens = 0;  // score only the first so many tokens of the corpus; 0: all
};

struct PerplexityResult {
    double nll = 0;             // total negative log-likelihood of the text, in nats
    std::int64_t tokens = 0;    // targets scored: every token of the text once; end-of-document marks are not text
    std::int64_t bytes = 0;     // of the original UTF-8 text
    std::int64_t words = 0;     // whitespace-separated, of the original text

    double token_perplexity() const;  // exp(nll / tokens)
    double bits_per_byte() const;     // nll / ln 2 / bytes
    double word_perplexity() const;   // exp(nll / words)
};

// Each document is scored by itself, its first token given the end-of-document mark, in windows of `context` tokens; the
// tail is kept and nothing is padded into the score. Log-likelihoods are computed in float32 or better and summed in
// float64. `progress` (may be empty) is called with targets done and in all.
PerplexityResult perplexity(const model::LanguageModel& model, const data::TokenCorpus& corpus, const PerplexityOptions& options,
                            const std::function<void(std::int64_t done, std::int64_t total)>& progress = {});

}  // namespace fenwick::eval
