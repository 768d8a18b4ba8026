// fenwick generate: a prompt in, text out.
#include <fmt/format.h>

#include <cstdio>
#include <iostream>
#include <iterator>
#include <optional>

#include "eval/generate.h"
#include "model/costs.h"
#include "tools/command.h"
#include "tools/device_option.h"
#include "tools/file_kind.h"
#include "tools/measure.h"
#include "tools/progress.h"
#include "train/checkpoint.h"

namespace fenwick::tools {
namespace {

struct GenerateCommand {
    std::string model, prompt, device = "auto", dtype;
    eval::GenerateOptions options;
    bool ignore_end = false, stats = false;
};

// Cuts `text` before a character that is not complete yet, which the next token may complete.
std::size_t complete_prefix(std::string_view text) {
    std::size_t lead = text.size();
    for (std::size_t back = 1; back <= 4 && back <= text.size(); ++back) {
        const auto byte = static_cast<unsigned char>(text[text.size() - back]);
        if ((byte & 0xc0) == 0x80) continue;  // a continuation byte
        const std::size_t needed = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
        if (needed > back) lead = text.size() - back;
        break;
    }
    return lead;
}

void run_generate(GenerateCommand command) {
    const Device device = device_chosen(command.device);
    std::optional<DType> dtype;  // as the model was trained, where that can be
    if (!command.dtype.empty()) dtype = command.dtype == "bfloat16" ? DType::bfloat16 : DType::float32;
    FENWICK_CHECK(dtype != DType::bfloat16 || device.is_cuda(), "--dtype bfloat16 needs a GPU; use float32");
    const train::LoadedModel loaded = train::load_model(command.model, device, dtype);
    const bool rounded = device.is_cuda() && dtype.value_or(loaded.config.train.dtype) == DType::bfloat16;
    command.options.weights = rounded ? DType::bfloat16 : DType::float32;
    const auto tokenizer = data::restore_tokenizer(loaded.tokenizer.kind, loaded.tokenizer.definition);
    std::string prompt = command.prompt;
    if (prompt == "-") prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
    // A text begins behind the mark that ended the one before.
    std::vector<std::int32_t> ids = {tokenizer->end_of_document()};
    tokenizer->encode(prompt, ids);
    command.options.vocabulary = tokenizer->vocab_size();
    if (!command.ignore_end) command.options.end_of_text = tokenizer->end_of_document();

    std::fwrite(prompt.data(), 1, prompt.size(), stdout);
    std::vector<std::int32_t> pending;  // ids whose text is not shown yet
    const auto show = [&](bool all) {
        const std::string text = tokenizer->decode(pending.data(), static_cast<std::int64_t>(pending.size()));
        if (const std::size_t complete = all ? text.size() : complete_prefix(text); all || complete == text.size()) {
            std::fwrite(text.data(), 1, complete, stdout);
            std::fflush(stdout);
            pending.clear();
        }
    };
    struct Line {
        std::int64_t tokens;  // fed
        double seconds, moved;  // since the start, and bytes of weights and states
    };
    std::vector<Line> lines;
    const Progress clock(true);
    std::int64_t next_line = 1;
    double moved = 0;
    const auto& model = loaded.model.config();
    const auto weights = static_cast<double>(model::decode_weight_bytes(model, command.options.weights));
    eval::generate(loaded.model, ids, command.options, [&](std::int32_t id, std::int64_t position) {
        pending.push_back(id);
        show(false);
        moved += weights + static_cast<double>(model::decode_state_traffic(model, position - 1, 1, command.options.weights));
        if (command.stats && position >= next_line) {
            lines.push_back({position, clock.seconds(), moved});
            while (next_line <= position) next_line *= 2;
        }
        return std::ferror(stdout) == 0;  // a full disk: main says so
    });
    show(true);
    std::fputc('\n', stdout);
    if (!command.stats) return;
    std::fflush(stdout);
    const double copy = measure_copy(device, 0.2, 0);
    std::fprintf(stderr, "%12s %16s %14s %18s %9s\n", "tokens", "state bytes", "tokens/s", "GB read a token", "of copy");
    for (std::size_t i = 1; i < lines.size(); ++i) {  // the first line has the prompt in it
        const double seconds = std::max(lines[i].seconds - lines[i - 1].seconds, 1e-9), bytes = lines[i].moved - lines[i - 1].moved;
        const auto tokens = static_cast<double>(lines[i].tokens - lines[i - 1].tokens);
        std::fprintf(stderr, "%12lld %16lld %14.1f %18.6f %8.1f%%\n", static_cast<long long>(lines[i].tokens),
                     static_cast<long long>(model::decode_state_bytes(model, lines[i].tokens, command.options.weights)),
                     tokens / seconds, 1e-9 * bytes / tokens, 100 * bytes / seconds / copy);
    }
}

}  // namespace

void add_generate(CLI::App& app, const GlobalOptions&) {
    auto options = std::make_shared<GenerateCommand>();
    CLI::App* command = add_command(app, "generate", "Continue a text",
                                    "fenwick generate runs/log_linear_mamba2 --prompt 'The river' --temperature 0.8 --top-p 0.95",
                                    options, run_generate);
    command->add_option("model", options->model, "Checkpoint, or run folder (its newest complete checkpoint)")->required();
    command->add_option("--prompt", options->prompt, "The text to continue; - reads standard input");
    command->add_option("--max-tokens", options->options.max_tokens, "Tokens to draw at most")
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
        ->capture_default_str();
    command->add_option("--temperature", options->options.sampling.temperature, "0: always the likeliest token")
        ->check(number_from_to(0, 1e6))
        ->capture_default_str();
    command->add_option("--top-k", options->options.sampling.top_k, "Only the k likeliest tokens; 0: all")
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
        ->capture_default_str();
    command->add_option("--top-p", options->options.sampling.top_p, "The fewest likeliest tokens whose probabilities reach p")
        ->check(number_from_to(1e-9, 1))
        ->capture_default_str();
    command->add_option("--seed", options->options.sampling.seed, "Of the draws")->check(number_from_to(0, 18446744073709551615.0))->capture_default_str();
    add_device_option(command, options->device);
    command->add_option("--dtype", options->dtype, "Of the weights: float32 or bfloat16 (default: as the model was trained; bfloat16 needs a GPU)")
        ->check(CLI::IsMember({"float32", "bfloat16"}));
    command->add_flag("--ignore-end", options->ignore_end, "Go on past the end of the text");
    command->add_flag("--stats", options->stats, "Print tokens/s, bytes read a token and their share of the speed of a copy, at growing lengths");
}

}  // namespace fenwick::tools
