// fenwick info, fenwick verify: what a file is, and whether it is whole.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "data/corpus.h"
#include "kernels/levels.h"
#include "model/costs.h"
#include "tools/command.h"
#include "tools/file_kind.h"
#include "tools/print.h"
#include "tools/progress.h"
#include "train/checkpoint.h"

namespace fenwick::tools {
namespace {

void print(const std::string& line) { print_line(stdout, "{}", line); }

std::string with_separators(std::int64_t number) {
    std::string digits = std::to_string(number);
    for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3) digits.insert(static_cast<std::size_t>(i), ",");
    return digits;
}

struct InfoCommand {
    std::string path;
    std::int64_t batch = 0, length = 0;
    std::vector<std::string> overrides;
};

void print_model(const model::ModelConfig& config, std::int64_t batch, std::int64_t length, DType dtype,
                 model::Recompute recompute) {
    print(fmt::format("model: {}, hidden {}, {} layers, vocabulary {}", model::name_of(config.type), config.hidden_size,
                      config.num_layers, config.vocab_size));
    std::int64_t total = 0;
    print("parameters");
    for (const auto& kind : model::parameters_by_kind(config)) {
        print(fmt::format("  {:<22}{:>16}", kind.kind, with_separators(kind.count)));
        total += kind.count;
    }
    print(fmt::format("  {:<22}{:>16}  ({})", "in all", with_separators(total), count_text(static_cast<double>(total))));
    print(fmt::format("floating-point operations a token, forward, at {} tokens", with_separators(length)));
    for (const auto& op : model::forward_flops(config, length))
        print(fmt::format("  {:<22}{:>16}", op.op, count_text(op.flops)));
    print(
        fmt::format("  {:<22}{:>16}", "forward and backward", count_text(model::training_flops_per_token(config, length))));
    const auto memory = model::training_memory(config, batch, length, dtype, recompute);
    print(
        fmt::format("memory to train {} rows of {} tokens at a time in {}", batch, with_separators(length), name_of(dtype)));
    const auto row = [](const char* name, std::int64_t bytes) {
        print(fmt::format("  {:<22}{:>16}", name, bytes_text(static_cast<double>(bytes))));
    };
    row("weights", memory.weights);
    row("gradients", memory.gradients);
    row("optimizer", memory.optimizer);
    row("activations, about", memory.activations);
    row("in all, about", memory.total());
    print("decoding state of one row");
    for (const std::int64_t tokens : {std::int64_t{1} << 10, std::int64_t{1} << 14, std::int64_t{1} << 18})
        row(fmt::format("after {} tokens", with_separators(tokens)).c_str(),
            model::decode_state_bytes(config, tokens, dtype));
}

void print_tokens(const std::string& path) {
    const data::TokenCorpus corpus(path);
    const auto& info = corpus.info();
    // All is read before anything is said: damage is then the only thing that is.
    // Lengths by powers of two
    std::map<int, std::int64_t> histogram;
    for (std::int64_t shard = 0; shard < corpus.num_shards(); ++shard) {
        const auto file = corpus.shard(shard);
        const auto& offsets = file->document_offsets();
        for (std::size_t i = 0; i + 1 < offsets.size(); ++i)
            ++histogram[kernels::bit_width64(static_cast<std::uint64_t>(offsets[i + 1] - offsets[i]))];
    }
    // Which ids occur
    std::vector<bool> seen(static_cast<std::size_t>(info.vocab_size));
    std::vector<std::int32_t> ids(std::size_t{1} << 20);
    for (std::int64_t begin = 0; begin < info.num_tokens; begin += static_cast<std::int64_t>(ids.size())) {
        const auto count = std::min<std::int64_t>(static_cast<std::int64_t>(ids.size()), info.num_tokens - begin);
        corpus.read(begin, count, ids.data());
        for (std::int64_t i = 0; i < count; ++i) seen[static_cast<std::size_t>(ids[static_cast<std::size_t>(i)])] = true;
    }
    const auto used = std::count(seen.begin(), seen.end(), true);
    const std::int64_t shown = std::min<std::int64_t>(48, info.num_tokens);
    corpus.read(0, shown, ids.data());
    const std::string beginning = corpus.tokenizer()->decode(ids.data(), shown);
    const auto sources = corpus.sources();
    if (corpus.num_shards() == 1)
        print(fmt::format("token file: {}", path));
    else
        print(fmt::format("corpus of {} shards: {}", corpus.num_shards(), path));
    print(fmt::format("  {:<22}{:>16}", "tokens", with_separators(info.num_tokens)));
    print(fmt::format("  {:<22}{:>16}", "documents", with_separators(info.num_documents)));
    print(fmt::format("  {:<22}{:>16}", "text bytes", with_separators(info.text_bytes)));
    print(fmt::format("  {:<22}{:>16}", "text words", with_separators(info.text_words)));
    print(fmt::format("  {:<22}{:>16.3f}", "bytes a token",
                      static_cast<double>(info.text_bytes) / static_cast<double>(info.num_tokens)));
    print(fmt::format("  tokenizer: {}, vocabulary of {}, identity {}", info.tokenizer_kind, info.vocab_size,
                      info.tokenizer_identity));
    print("  document lengths in tokens");
    for (const auto& [bits, count] : histogram)
        print(fmt::format("    {:>14} to {:<14}{:>12}", with_separators(std::int64_t{1} << (bits - 1)),
                          with_separators((std::int64_t{1} << bits) - 1), with_separators(count)));
    print(fmt::format("  vocabulary used: {} of {} ids ({:.1f}%)", used, info.vocab_size,
                      100.0 * static_cast<double>(used) / static_cast<double>(info.vocab_size)));
    print(fmt::format("  first {} tokens: {:?}", shown, beginning));
    // As many as a screen takes
    constexpr std::size_t most_sources = 20;
    for (std::size_t i = 0; i < std::min(most_sources, sources.size()); ++i)
        print(fmt::format("  source: {} ({} bytes)", sources[i].name, with_separators(sources[i].bytes)));
    if (sources.size() > most_sources)
        print(
            fmt::format("  and {} more sources", with_separators(static_cast<std::int64_t>(sources.size() - most_sources))));
}

void print_checkpoint(const std::string& given, const InfoCommand& command) {
    const std::string path = train::find_checkpoint(given);
    const auto header = train::read_checkpoint_header(path);
    const auto config = train::parse_config(header.config, path);
    print(fmt::format("checkpoint: {}", path));
    print(fmt::format("  step {}, {} tokens trained on; loader at epoch {}, row {}", header.step,
                      with_separators(header.tokens), header.loader.epoch, header.loader.row));
    print(fmt::format("  tokenizer: {}, identity {}", header.tokenizer.kind, header.tokenizer.identity));
    print_model(config.model, command.batch > 0 ? command.batch : std::max<std::int64_t>(config.train.micro_batch, 1),
                command.length > 0 ? command.length : config.data.sequence_length, config.train.dtype,
                config.train.recompute);
}

void run_info(const InfoCommand& command) {
    switch (kind_of_file(command.path)) {
        case FileKind::corpus:
            return print_tokens(command.path);
        case FileKind::checkpoint:
        case FileKind::run_folder:
            return print_checkpoint(command.path, command);
        case FileKind::config: {
            auto config = train::load_config(command.path, command.overrides);
            // The configuration may leave the vocabulary to the token file.
            if (config.model.vocab_size == 0 && !config.data.train.empty())
                config.model.vocab_size = data::TokenCorpus(config.data.train.front().path).info().vocab_size;
            config.model.validate();
            const std::int64_t batch = command.batch > 0              ? command.batch
                                       : config.train.micro_batch > 0 ? config.train.micro_batch
                                                                      : config.train.batch_size;
            return print_model(config.model, batch, command.length > 0 ? command.length : config.data.sequence_length,
                               config.train.dtype, config.train.recompute);
        }
        case FileKind::other:
            break;
    }
    fail("{} is no config (.yaml), token file, corpus folder, checkpoint or run folder", command.path);
}

}  // namespace

void add_info(CLI::App& app, const GlobalOptions&) {
    auto options = std::make_shared<InfoCommand>();
    CLI::App* command = add_command(app, "info", "Describe a config, corpus, checkpoint or run folder",
                                    "fenwick info configs/paper/log_linear_mamba2.yaml", options, run_info);
    command->add_option("path", options->path, "Config (.yaml), token file, corpus folder, checkpoint, or run folder")
        ->required();
    command->add_option("--batch", options->batch, "Rows of the memory estimate (default: the config's micro batch)")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30));
    command->add_option("--length", options->length, "Tokens a row of the estimates (default: the config's)")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
    command->add_option("--set", options->overrides, "Override a key of the config (may be repeated)")
        ->allow_extra_args(false)
        ->take_all();
}

void add_verify(CLI::App& app, const GlobalOptions& global) {
    auto path = std::make_shared<std::string>();
    CLI::App* command = add_command(app, "verify", "Check every checksum of a corpus or checkpoint",
                                    "fenwick verify train.h5", path, [&global](const std::string& given) {
                                        switch (kind_of_file(given)) {
                                            case FileKind::corpus:
                                                data::TokenCorpus(given).verify();
                                                break;
                                            case FileKind::checkpoint:
                                            case FileKind::run_folder:
                                                train::verify_checkpoint(train::find_checkpoint(given));
                                                break;
                                            default:
                                                fail("{} is no token file, corpus folder, checkpoint or run folder", given);
                                        }
                                        if (!global.quiet) print(given + ": every checksum is right");
                                    });
    command
        ->add_option("path", *path, "Token file, corpus folder, checkpoint, or run folder (its newest complete checkpoint)")
        ->required();
}

}  // namespace fenwick::tools
