// fenwick eval: measures of a trained model.
#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "eval/perplexity.h"
#include "tools/command.h"
#include "tools/device_option.h"
#include "tools/print.h"
#include "tools/progress.h"
#include "train/checkpoint.h"

namespace fenwick::tools {
namespace {

struct PerplexityCommand {
    std::string model, tokens, json, device = "auto";
    eval::PerplexityOptions options;
};

void run_perplexity(const PerplexityCommand& command, bool quiet) {
    const data::TokenCorpus corpus(command.tokens);
    if (!command.json.empty()) check_output(command.json, {command.tokens, command.model, train::find_checkpoint(command.model)});
    const train::LoadedModel loaded = train::load_model(command.model, device_chosen(command.device));
    FENWICK_CHECK(corpus.info().tokenizer_identity == loaded.tokenizer.identity,
                  "{} was made with another tokenizer ({}) than the model was trained with ({}); tokenize the text with the "
                  "model's: fenwick tokenize TEXT --tokenizer {} --output FILE.h5",
                  command.tokens, corpus.info().tokenizer_kind, loaded.tokenizer.kind, command.model);
    eval::PerplexityOptions options = command.options;
    if (options.context == 0) options.context = loaded.config.data.sequence_length;
    // Enough windows to fill a batch of about 4,096 tokens, 65,536 on a GPU: speed only.
    const std::int64_t batch_tokens = loaded.model.device().is_cpu() ? 4096 : 65536;
    if (options.batch == 0) options.batch = std::max<std::int64_t>(1, batch_tokens / options.context);

    Progress progress(quiet);
    const auto result = eval::perplexity(loaded.model, corpus, options, [&](std::int64_t done, std::int64_t total) {
        progress.show(fmt::format("perplexity: {:.0f}%", 100.0 * static_cast<double>(done) / static_cast<double>(total)));
    });
    progress.clear();
    print_line(stdout, "{}, step {}, on {}, context {}", command.model, loaded.step, command.tokens, options.context);
    print_line(stdout, "  loss              {:.4f} nats a token", result.nll / static_cast<double>(result.tokens));
    print_line(stdout, "  token perplexity  {:.3f}  ({} tokens)", result.token_perplexity(), result.tokens);
    print_line(stdout, "  word perplexity   {:.2f}  ({} words)", result.word_perplexity(), result.words);
    print_line(stdout, "  bits per byte     {:.4f}  ({} bytes)", result.bits_per_byte(), result.bytes);
    if (!command.json.empty()) {
        const nlohmann::ordered_json json = {
            {"model", command.model}, {"step", loaded.step}, {"tokens_file", command.tokens}, {"context", options.context},
            {"nll", result.nll}, {"tokens", result.tokens}, {"words", result.words}, {"bytes", result.bytes},
            {"token_perplexity", result.token_perplexity()}, {"word_perplexity", result.word_perplexity()},
            {"bits_per_byte", result.bits_per_byte()}};
        write_file_atomically(command.json, json.dump() + "\n");
    }
}

}  // namespace

void add_eval(CLI::App& app, const GlobalOptions& global) {
    CLI::App* eval = app.add_subcommand("eval", "Measure a trained model");
    eval->require_subcommand(1);
    eval->footer(footer_text("fenwick eval perplexity runs/log_linear_mamba2 test.h5"));

    auto options = std::make_shared<PerplexityCommand>();
    options->options.batch = 0;
    CLI::App* command = add_command(*eval, "perplexity", "Token perplexity, word perplexity and bits per byte of a text",
                                    "fenwick eval perplexity runs/log_linear_mamba2 test.h5 --json test.json", options,
                                    [&global](const PerplexityCommand& given) { run_perplexity(given, global.quiet); });
    command->add_option("model", options->model, "Checkpoint, or run folder (its newest complete checkpoint)")->required();
    command->add_option("tokens", options->tokens, "Token file or corpus folder of the text")->required();
    command->add_option("--context", options->options.context, "Tokens a prediction may look back on (default: as trained)")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
    command->add_option("--stride", options->options.stride, "New tokens a window (default: the context); less is slower and "
                                                             "gives every token more context")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
    command->add_option("--batch", options->options.batch, "Windows a forward pass: speed only")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
    command->add_option("--max-tokens", options->options.max_tokens, "Score only the first so many tokens")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 50));
    add_device_option(command, options->device);
    command->add_option("--json", options->json, "Also write the result to this file");
}

}  // namespace fenwick::tools
