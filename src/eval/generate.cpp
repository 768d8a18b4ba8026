#include "eval/generate.h"

#include <algorithm>

#include "model/decoder.h"

namespace fenwick::eval {

std::vector<std::int32_t> generate(const model::LanguageModel& model, const std::vector<std::int32_t>& prompt,
                                   const GenerateOptions& options,
                                   const std::function<bool(std::int32_t, std::int64_t)>& on_token) {
    FENWICK_CHECK(!prompt.empty(), "[generate] the prompt is empty; at least one token is needed");
    FENWICK_CHECK(options.max_tokens >= 0 && options.prompt_segment >= 1,
                  "[generate] max_tokens is {}, prompt_segment {}; at least 0 and 1 are needed", options.max_tokens,
                  options.prompt_segment);
    FENWICK_CHECK(options.vocabulary <= model.config().vocab_size,
                  "[generate] the vocabulary of {} is larger than the model's, {}", options.vocabulary,
                  model.config().vocab_size);
    for (auto id : prompt)
        FENWICK_CHECK(id >= 0 && id < model.config().vocab_size,
                      "[generate] token id {} of the prompt is outside the vocabulary of {}", id, model.config().vocab_size);
    // All but the last token of the prompt in segments; the decoder takes it from there.
    const auto state = model.new_state(1);
    const auto before = static_cast<std::int64_t>(prompt.size()) - 1;
    for (std::int64_t begin = 0; begin < before; begin += options.prompt_segment) {
        const std::int64_t count = std::min(options.prompt_segment, before - begin);
        const std::span segment(prompt.data() + begin, static_cast<std::size_t>(count));
        (void)model.step(Tensor::from(segment, {1, count}).to(model.device()), *state);
    }
    model::Decoder decoder(model, *state,
                           {.weights = options.weights,
                            .reserve = std::min<std::int64_t>(options.max_tokens, 4096),
                            .vocabulary = options.vocabulary,
                            .temperature = options.sampling.temperature,
                            .top_k = options.sampling.top_k,
                            .top_p = options.sampling.top_p,
                            .seed = options.sampling.seed,
                            .stream = 0x67656e});
    decoder.feed({prompt.back()});
    const std::int64_t ahead = model.device().is_cuda() ? 3 : 1;  // tokens under way while the host looks at one
    std::int64_t queued = 0;
    std::vector<std::int32_t> drawn;
    while (static_cast<std::int64_t>(drawn.size()) < options.max_tokens) {
        const auto n = static_cast<std::int64_t>(drawn.size());
        for (; queued < std::min(n + ahead, options.max_tokens); ++queued) decoder.advance();
        const std::int32_t id = decoder.drawn(n).front();
        if (id == options.end_of_text) break;
        drawn.push_back(id);
        if (!on_token(id, before + 1 + n)) break;
    }
    return drawn;
}

}  // namespace fenwick::eval
