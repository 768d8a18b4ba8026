#include "eval/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace fenwick::eval {

std::int32_t sample(const std::vector<float>& logits, const SamplingOptions& options, Random& random) {
    FENWICK_CHECK(!logits.empty(), "[sample] there are no logits");
    FENWICK_CHECK(options.temperature >= 0, "[sample] temperature is {}; 0 or more is needed", options.temperature);
    FENWICK_CHECK(options.top_k >= 0, "[sample] top_k is {}; 0 or more is needed", options.top_k);
    FENWICK_CHECK(options.top_p > 0 && options.top_p <= 1, "[sample] top_p is {}; it must be above 0 and at most 1", options.top_p);
    if (options.temperature == 0)
        return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());

    std::vector<std::int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const auto likelier = [&](std::int32_t a, std::int32_t b) {
        const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
        return x != y ? x > y : a < b;
    };
    std::size_t kept = order.size();
    if (options.top_k > 0) kept = std::min(kept, static_cast<std::size_t>(options.top_k));
    // Without top-k and top-p the order does not matter, and sorting a whole vocabulary is most of the work.
    if (kept < order.size())
        std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(), likelier);
    else if (options.top_p < 1)
        std::sort(order.begin(), order.end(), likelier);

    const float highest = *std::max_element(logits.begin(), logits.end());
    std::vector<double> weights(kept);
    double total = 0;
    for (std::size_t i = 0; i < kept; ++i) {
        weights[i] = std::exp((static_cast<double>(logits[static_cast<std::size_t>(order[i])]) - highest) / options.temperature);
        total += weights[i];
    }
    FENWICK_CHECK(std::isfinite(total), "[sample] the logits are not finite");
    if (options.top_p < 1) {
        double reached = 0;
        std::size_t count = 0;
        while (count < kept && reached < options.top_p * total) reached += weights[count++];
        kept = count;
        total = reached;
    }
    double left = random.uniform() * total;
    for (std::size_t i = 0; i < kept; ++i) {
        left -= weights[i];
        if (left < 0) return order[i];
    }
    return order[kept - 1];  // rounding
}

std::vector<std::int32_t> generate(const model::LanguageModel& model, const std::vector<std::int32_t>& prompt,
                                   const GenerateOptions& options,
                                   const std::function<bool(std::int32_t, const model::DecodeState&)>& on_token) {
    FENWICK_CHECK(!prompt.empty(), "[generate] the prompt is empty; at least one token is needed");
    FENWICK_CHECK(options.max_tokens >= 0 && options.prompt_segment >= 1,
                  "[generate] max_tokens is {}, prompt_segment {}; at least 0 and 1 are needed", options.max_tokens,
                  options.prompt_segment);
    const std::int64_t vocabulary = options.vocabulary > 0 ? options.vocabulary : model.config().vocab_size;
    FENWICK_CHECK(vocabulary <= model.config().vocab_size, "[generate] the vocabulary of {} is larger than the model's, {}", vocabulary,
                  model.config().vocab_size);
    for (auto id : prompt)
        FENWICK_CHECK(id >= 0 && id < model.config().vocab_size, "[generate] token id {} of the prompt is outside the vocabulary of {}",
                      id, model.config().vocab_size);
    const auto state = model.new_state(1);
    Random random(options.sampling.seed, 0x67656e);
    // The last position's logits after feeding ids.
    const auto feed = [&](const std::int32_t* ids, std::int64_t count) {
        const Tensor input = Tensor::from(std::span(ids, static_cast<std::size_t>(count)), {1, count}).to(model.device());
        return model.step(input, *state).view({count, -1}).narrow_rows(count - 1, count).to_vector<float>();
    };
    std::vector<float> logits;
    const auto length = static_cast<std::int64_t>(prompt.size());
    for (std::int64_t begin = 0; begin < length; begin += options.prompt_segment)
        logits = feed(prompt.data() + begin, std::min(options.prompt_segment, length - begin));

    std::vector<std::int32_t> drawn;
    while (static_cast<std::int64_t>(drawn.size()) < options.max_tokens) {
        logits.resize(static_cast<std::size_t>(vocabulary));  // rows of a padded vocabulary are no tokens
        const std::int32_t id = sample(logits, options.sampling, random);
        if (id == options.end_of_text) break;
        drawn.push_back(id);
        if (!on_token(id, *state)) break;
        if (static_cast<std::int64_t>(drawn.size()) < options.max_tokens) logits = feed(&id, 1);
    }
    return drawn;
}

}  // namespace fenwick::eval
