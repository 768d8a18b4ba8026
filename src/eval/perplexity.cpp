#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/cross_entropy.h"

namespace fenwick::eval {
namespace {

// Inputs [first, first + length) of a document and how many of their targets, counted from the end, this window scores.
struct Window {
    std::int64_t document = 0, first = 0, length = 0, scored = 0;
};

std::vector<Window> windows_of(std::int64_t document, std::int64_t targets, std::int64_t context, std::int64_t stride) {
    std::vector<Window> windows;
    std::int64_t end = 0;  // targets scored so far
    while (end < targets) {
        const std::int64_t next = std::min(end == 0 ? context : end + stride, targets);
        const std::int64_t first = std::max<std::int64_t>(next - context, 0);
        windows.push_back({document, first, next - first, next - end});
        end = next;
    }
    return windows;
}

}  // namespace

double PerplexityResult::token_perplexity() const { return std::exp(nll / static_cast<double>(tokens)); }
double PerplexityResult::bits_per_byte() const { return nll / std::numbers::ln2 / static_cast<double>(bytes); }
double PerplexityResult::word_perplexity() const { return std::exp(nll / static_cast<double>(words)); }

PerplexityResult perplexity(const model::LanguageModel& model, const data::TokenCorpus& corpus, const PerplexityOptions& options,
                            const std::function<void(std::int64_t, std::int64_t)>& progress) {
    const std::int64_t stride = options.stride == 0 ? options.context : options.stride;
    FENWICK_CHECK(options.context >= 1, "[perplexity] context is {}; at least 1 token is needed", options.context);
    FENWICK_CHECK(stride >= 1 && stride <= options.context, "[perplexity] stride is {}; it must be from 1 to the context, {}",
                  stride, options.context);
    FENWICK_CHECK(options.batch >= 1, "[perplexity] batch is {}; at least 1 is needed", options.batch);
    const auto& info = corpus.info();
    FENWICK_CHECK(info.vocab_size <= model.config().vocab_size,
                  "[perplexity] {} has a vocabulary of {}, the model one of {}; use the tokenizer that the model was trained with",
                  info.path, info.vocab_size, model.config().vocab_size);

    // The text's tokens of each document, its closing mark left out.
    const auto offsets = corpus.document_offsets();
    const std::int64_t limit = options.max_tokens > 0 ? options.max_tokens : info.num_tokens;
    PerplexityResult result;
    std::vector<Window> windows;
    std::int64_t total = 0;
    for (std::int64_t document = 0; document < info.num_documents; ++document) {
        const std::int64_t begin = offsets[static_cast<std::size_t>(document)];
        const std::int64_t end = offsets[static_cast<std::size_t>(document) + 1] - 1;
        const std::int64_t targets = std::min(end - begin, limit - total);
        for (const auto& window : windows_of(document, targets, options.context, stride)) windows.push_back(window);
        total += std::max<std::int64_t>(targets, 0);
    }
    FENWICK_CHECK(total > 0, "[perplexity] {} holds no text", info.path);

    NoRecording no_recording;
    for (std::size_t begin = 0; begin < windows.size(); begin += static_cast<std::size_t>(options.batch)) {
        const std::size_t end = std::min(windows.size(), begin + static_cast<std::size_t>(options.batch));
        const auto rows = static_cast<std::int64_t>(end - begin);
        std::int64_t length = 0;
        for (std::size_t i = begin; i < end; ++i) length = std::max(length, windows[i].length);
        // Shorter rows are filled on the right, which a causal model never looks at, with ignored targets.
        std::vector<std::int32_t> inputs(static_cast<std::size_t>(rows * length), info.end_of_document);
        std::vector<std::int32_t> targets(inputs.size(), kernels::ignore_index);
        std::vector<std::int32_t> tokens;
        for (std::size_t i = begin; i < end; ++i) {
            const Window& window = windows[i];
            // Inputs are the document shifted right by one, behind the mark that ended the document before.
            const std::int64_t start = offsets[static_cast<std::size_t>(window.document)] + window.first;
            const std::int64_t mark = window.first == 0 ? 1 : 0;
            tokens.resize(static_cast<std::size_t>(window.length + 1));
            tokens.front() = info.end_of_document;
            corpus.read(start - 1 + mark, window.length + 1 - mark, tokens.data() + mark);
            const auto row = static_cast<std::ptrdiff_t>(i - begin) * length;
            std::copy(tokens.begin(), tokens.end() - 1, inputs.begin() + row);
            std::copy(tokens.end() - window.scored, tokens.end(), targets.begin() + row + window.length - window.scored);
        }
        const auto on_device = [&](const std::vector<std::int32_t>& values) {
            return Tensor::from(values, {rows, length}).to(model.device());
        };
        const auto loss = model.loss(on_device(inputs), on_device(targets), SequenceLayout::uniform(rows, length), 1.0);
        for (double nll : loss.token_nll.to_vector<double>()) result.nll += nll;
        for (std::size_t i = begin; i < end; ++i) result.tokens += windows[i].scored;
        if (progress) progress(result.tokens, total);
    }
    // A part of the corpus is credited with its share of bytes and words.
    const double share = static_cast<double>(total) / static_cast<double>(info.num_tokens - info.num_documents);
    result.bytes = std::llround(share * static_cast<double>(info.text_bytes));
    result.words = std::llround(share * static_cast<double>(info.text_words));
    return result;
}

}  // namespace fenwick::eval
