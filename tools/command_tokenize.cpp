// fenwick tokenize, fenwick tokenizer train: from text to token files.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "base/files.h"
#include "data/tokenize.h"
#include "tools/command.h"
#include "tools/file_kind.h"
#include "tools/progress.h"

namespace fenwick::tools {
namespace {

struct TokenizeCommand {
    data::TokenizeOptions options;
    std::string tokenizer = "bytes", documents = "file";
};

void run_tokenize(TokenizeCommand command, bool quiet) {
    command.options.documents = data::document_unit_from(command.documents);
    const auto tokenizer = open_tokenizer_of(command.tokenizer);
    check_output(command.options.output, {command.tokenizer});
    Progress progress(quiet);
    command.options.progress = [&](std::int64_t done, std::int64_t total) {
        const double seconds = progress.seconds(), share = static_cast<double>(done) / static_cast<double>(std::max<std::int64_t>(total, 1));
        progress.show(fmt::format("tokenizing: {:.0f}%  {}/s  {} left", 100 * share,
                                  bytes_text(static_cast<double>(done) / std::max(seconds, 1e-9)),
                                  duration_text(share > 0 ? seconds / share - seconds : 0)));
    };
    const auto info = data::tokenize_files(*tokenizer, command.options);
    progress.clear();
    if (!quiet)
        std::printf("%s: %lld tokens in %lld documents, %.2f bytes a token, vocabulary of %lld\n", info.path.c_str(),
                    static_cast<long long>(info.num_tokens), static_cast<long long>(info.num_documents),
                    static_cast<double>(info.text_bytes) / static_cast<double>(info.num_tokens),
                    static_cast<long long>(info.vocab_size));
}

struct TokenizerTrainCommand {
    std::vector<std::string> files;
    data::SentencePieceOptions options;
    std::string output;
};

}  // namespace

void add_tokenize(CLI::App& app, const GlobalOptions& global) {
    auto options = std::make_shared<TokenizeCommand>();
    CLI::App* command = add_command(app, "tokenize", "Make a token file from text files",
                                    "fenwick tokenize book1.txt book2.txt --tokenizer bpe.model --output train.h5", options,
                                    [&global](const TokenizeCommand& given) { run_tokenize(given, global.quiet); });
    command->add_option("files", options->options.files, "Text files, in this order")->required();
    command->add_option("--output,-o", options->options.output, "The token file to write")->required();
    command->add_option("--tokenizer", options->tokenizer,
                        "bytes; a SentencePiece .model; or a token file, checkpoint or run folder whose tokenizer to use")
        ->capture_default_str();
    command->add_option("--documents", options->documents, "What is one document: file, line, or block (between blank lines)")
        ->check(CLI::IsMember({"file", "line", "block"}))
        ->capture_default_str();
    command->add_option("--deflate", options->options.deflate, "Compression of the token file, 0 (none) to 9")
        ->check(CLI::Range(0, 9))
        ->capture_default_str();
}

void add_tokenizer(CLI::App& app, const GlobalOptions& global) {
    CLI::App* tokenizer = app.add_subcommand("tokenizer", "Make tokenizers");
    tokenizer->require_subcommand(1);
    tokenizer->footer(footer_text("fenwick tokenizer train train.txt --vocab-size 4096 --output bpe.model"));

    auto options = std::make_shared<TokenizerTrainCommand>();
    CLI::App* command = add_command(*tokenizer, "train", "Train a SentencePiece model on text files",
                                    "fenwick tokenizer train train.txt --vocab-size 4096 --output bpe.model", options,
                                    [&global](const TokenizerTrainCommand& given) {
                                        for (const std::string& file : given.files) (void)size_of_file(file);
                                        check_output(given.output, given.files);
                                        Progress progress(global.quiet);
                                        progress.show("training the tokenizer", true);
                                        const std::int64_t wanted = given.options.vocab_size;
                                        const std::int64_t pieces =
                                            data::train_sentencepiece(given.files, given.options, given.output);
                                        progress.clear();
                                        if (global.quiet) return;
                                        std::printf("%s: %lld pieces%s, trained in %s\n", given.output.c_str(),
                                                    static_cast<long long>(pieces),
                                                    pieces < wanted ? fmt::format(" of {}: the text has no more", wanted).c_str() : "",
                                                    duration_text(progress.seconds()).c_str());
                                    });
    command->add_option("files", options->files, "Text files")->required();
    command->add_option("--output,-o", options->output, "The .model file to write")->required();
    command->add_option("--vocab-size", options->options.vocab_size, "Pieces in all; a text without so many gives fewer")
        ->check(CLI::Range(std::int64_t{300}, std::int64_t{1} << 20))
        ->capture_default_str();
    command->add_option("--type", options->options.model_type, "bpe or unigram")
        ->check(CLI::IsMember({"bpe", "unigram"}))
        ->capture_default_str();
    command->add_option("--character-coverage", options->options.character_coverage,
                        "Share of the text's characters that get pieces of their own")
        ->check(number_from_to(0.98, 1))
        ->capture_default_str();
}

}  // namespace fenwick::tools
