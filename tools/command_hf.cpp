// fenwick import, fenwick export: models in the layout of Hugging Face.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>

#include "base/files.h"
#include "model/hf_layout.h"
#include "tools/command.h"
#include "tools/file_kind.h"
#include "tools/print.h"
#include "train/checkpoint.h"

namespace fenwick::tools {
namespace {

struct ExportCommand {
    std::string model, folder, dtype = "float32";
    model::ExportOptions options;
    double shard_gb = 5;
};

void run_export(ExportCommand command, bool quiet) {
    static const std::map<std::string, model::safetensors::Type> types = {{"float32", model::safetensors::Type::float32},
                                                                          {"bfloat16", model::safetensors::Type::bfloat16},
                                                                          {"float16", model::safetensors::Type::float16}};
    for (const char* name : {"", "config.json", "model.safetensors", "tokenizer.model", "tokenizer.json"})
        check_output((std::filesystem::path(command.folder) / name).string(), {command.model, train::find_checkpoint(command.model)});
    const train::LoadedModel loaded = train::load_model(command.model);
    command.options.dtype = types.at(command.dtype);
    command.options.max_shard_bytes = static_cast<std::int64_t>(command.shard_gb * 1e9);
    const auto tokenizer = data::restore_tokenizer(loaded.tokenizer.kind, loaded.tokenizer.definition);
    command.options.eos_token_id = tokenizer->end_of_document();
    model::export_hf(loaded.model, command.folder, command.options);
    if (loaded.tokenizer.kind != "bytes") {
        const char* name = loaded.tokenizer.kind == "sentencepiece" ? "tokenizer.model" : "tokenizer.json";
        write_file_atomically((std::filesystem::path(command.folder) / name).string(), loaded.tokenizer.definition);
    }
    if (!quiet)
        print_line(stdout, "{}: {}, {} parameters in {}", command.folder, model::name_of(loaded.model.config().type),
                   loaded.model.parameter_count(), command.dtype);
    if (!quiet && loaded.tokenizer.kind == "bytes" && loaded.model.config().vocab_size != tokenizer->vocab_size())
        print_line(stdout, "its tokenizer is bytes, in a vocabulary of {}: import it with --tokenizer bytes",
                   loaded.model.config().vocab_size);
}

struct ImportCommand {
    std::string folder, output, tokenizer;
    std::optional<std::string> end_of_document;
    std::int64_t sequence_length = 2048;
    bool overwrite = false;
};

void run_import(const ImportCommand& command, bool quiet) {
    namespace fs = std::filesystem;
    FENWICK_CHECK(fs::exists(command.folder), "{}: no such folder", command.folder);
    FENWICK_CHECK(fs::is_directory(command.folder), "{} is a file; a folder with config.json and model.safetensors is needed",
                  command.folder);
    const fs::path into = fs::path(command.output).parent_path();
    FENWICK_CHECK(into.empty() || fs::is_directory(into), "{}: cannot be written: its folder does not exist", command.output);
    std::vector<std::string> inputs = {command.tokenizer};
    for (const auto& entry : fs::directory_iterator(command.folder)) inputs.push_back(entry.path().string());
    check_output(command.output, inputs);
    FENWICK_CHECK(command.overwrite || !fs::exists(command.output),
                  "{} exists already; name another place, or give --overwrite to replace it", command.output);
    std::string source = command.tokenizer;
    for (const char* name : {"tokenizer.model", "tokenizer.json"})
        if (source.empty() && fs::exists(fs::path(command.folder) / name)) source = (fs::path(command.folder) / name).string();
    const model::LanguageModel imported = model::import_hf(command.folder, cpu_device, DType::float32);
    if (source.empty()) {
        FENWICK_CHECK(imported.config().vocab_size == data::open_tokenizer("bytes")->vocab_size(),
                      "{} has no tokenizer.model or tokenizer.json; name the model's tokenizer with --tokenizer", command.folder);
        source = "bytes";
    }
    const auto tokenizer = open_tokenizer_of(source, command.end_of_document);
    FENWICK_CHECK(tokenizer->vocab_size() <= imported.config().vocab_size,
                  "tokenizer {} has {} ids, the model in {} only {}; name the tokenizer that it was trained with", source,
                  tokenizer->vocab_size(), command.folder, imported.config().vocab_size);
    train::RunConfig config;
    config.model = imported.config();
    config.run_dir = fs::path(command.output).replace_extension().string();
    config.data.train = {{command.folder}};
    config.data.sequence_length = command.sequence_length;
    config.train.steps = 1;
    train::CheckpointHeader header;
    header.config = train::to_yaml(config);
    header.tokenizer = {tokenizer->kind(), tokenizer->identity(), tokenizer->definition()};
    train::save_checkpoint(command.output, header, train::Optimizer(imported.parameters(), config.optimizer));
    if (!quiet)
        print_line(stdout, "{}: {}, {} parameters", command.output, model::name_of(imported.config().type), imported.parameter_count());
}

}  // namespace

void add_export(CLI::App& app, const GlobalOptions& global) {
    auto options = std::make_shared<ExportCommand>();
    CLI::App* command = add_command(app, "export", "Write a model as a Hugging Face folder (config.json, model.safetensors)",
                                    "fenwick export runs/log_linear_mamba2 exported --dtype bfloat16", options,
                                    [&global](const ExportCommand& given) { run_export(given, global.quiet); });
    command->add_option("model", options->model, "Checkpoint, or run folder (its newest complete checkpoint)")->required();
    command->add_option("folder", options->folder, "Folder to write")->required();
    command->add_option("--dtype", options->dtype, "float32 (exact), bfloat16 or float16")
        ->check(CLI::IsMember({"float32", "bfloat16", "float16"}))
        ->capture_default_str();
    command->add_flag("--llama-names", options->options.llama_names, "A Transformer under the names of transformers' Llama");
    command->add_option("--shard-gb", options->shard_gb, "Largest file, in GB")->check(number_from_to(1e-6, 1e6))->capture_default_str();
}

void add_import(CLI::App& app, const GlobalOptions& global) {
    auto options = std::make_shared<ImportCommand>();
    CLI::App* command = add_command(app, "import", "Make a checkpoint from a Hugging Face folder",
                                    "fenwick import exported --output imported.h5", options,
                                    [&global](const ImportCommand& given) { run_import(given, global.quiet); });
    command->add_option("folder", options->folder, "Folder with config.json and model.safetensors (or shards)")->required();
    command->add_option("--output,-o", options->output, "Checkpoint to write (.h5)")->required();
    command->add_flag("--overwrite", options->overwrite, "Replace a file that stands at the output");
    command->add_option("--tokenizer", options->tokenizer,
                        "bytes, a SentencePiece .model, a tokenizer.json, or a file that holds the tokenizer (default: the "
                        "folder's tokenizer.model, else its tokenizer.json; without one bytes, if the model has 257 ids)");
    command->add_option("--end-of-document", options->end_of_document,
                        "The token that ends documents, where a tokenizer.json does not tell");
    command->add_option("--sequence-length", options->sequence_length, "Default context of evaluation")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
        ->capture_default_str();
}

}  // namespace fenwick::tools
