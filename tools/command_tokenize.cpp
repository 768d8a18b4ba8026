// fenwick tokenize, fenwick tokenizer train: from text to token files.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/files.h"
#include "data/tokenize.h"
#include "tools/command.h"
#include "tools/file_kind.h"
#include "tools/print.h"
#include "tools/progress.h"

namespace fenwick::tools {
namespace {

struct TokenizeCommand {
    data::TokenizeOptions options;
    std::string tokenizer = "bytes", documents = "file", format = "auto";
    std::optional<std::string> end_of_document;
};

// While it lives, SIGINT and SIGTERM are told that nothing is lost before they end the program: what is done is on disk, and
// how far that reaches is in the journal.
class InterruptNotice {
public:
    explicit InterruptNotice(const std::string& output) {
        text_ = fmt::format("\nfenwick: interrupted; the same command goes on from what is done ({}.partial)\n", printable(output));
        for (const int signal : {SIGINT, SIGTERM})
            if (std::signal(signal, tell) == SIG_IGN) std::signal(signal, SIG_IGN);  // as under nohup
    }
    ~InterruptNotice() {
        for (const int signal : {SIGINT, SIGTERM})
            if (std::signal(signal, SIG_DFL) == SIG_IGN) std::signal(signal, SIG_IGN);
    }
    InterruptNotice(const InterruptNotice&) = delete;
    InterruptNotice& operator=(const InterruptNotice&) = delete;

private:
    static void tell(int signal) {
        [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text_.data(), text_.size());
        std::signal(signal, SIG_DFL);
        std::raise(signal);
    }
    static inline std::string text_;
};

void print_corpus(const data::TokenFileInfo& info) {
    print_line(stdout, "{}: {} tokens in {} documents, {:.2f} bytes a token, vocabulary of {}", info.path, info.num_tokens,
               info.num_documents, static_cast<double>(info.text_bytes) / static_cast<double>(info.num_tokens), info.vocab_size);
}

void run_tokenize(TokenizeCommand command, bool quiet) {
    data::TokenizeOptions& options = command.options;
    options.documents = data::document_unit_from(command.documents);
    options.format = data::text_format_from(command.format);
    const auto tokenizer = open_tokenizer_of(command.tokenizer, command.end_of_document);
    check_output(options.output, {command.tokenizer});
    if (!options.valid_output.empty()) check_output(options.valid_output, {command.tokenizer});
    Progress progress(quiet);
    std::int64_t before = -1;  // bytes of files that an interrupted run had done
    options.progress = [&](const data::TokenizeProgress& made) {
        const double share = static_cast<double>(made.file_bytes) / static_cast<double>(made.total_file_bytes);
        if (before < 0) {
            before = made.file_bytes * made.resumed;
            if (made.resumed) progress.show(fmt::format("going on from {:.0f}% of an interrupted run", 100 * share), true);
        }
        const double seconds = std::max(progress.seconds(), 1e-9);
        const auto done = static_cast<double>(made.file_bytes - before),
                   left = static_cast<double>(made.total_file_bytes - made.file_bytes);
        progress.show(fmt::format("tokenizing: {:.0f}%  {}/s  {} left", 100 * share,
                                  bytes_text(static_cast<double>(made.text_bytes) / seconds),
                                  duration_text(seconds * left / done)));
    };
    const auto result = [&] {
        const InterruptNotice notice(options.output);
        return data::tokenize(*tokenizer, options);
    }();
    progress.clear();
    if (quiet) return;
    print_corpus(result.output);
    if (result.valid) print_corpus(*result.valid);
}

struct TokenizerTrainCommand {
    std::vector<std::string> files;
    data::SentencePieceOptions options;
    std::string output;
    bool overwrite = false;
};

}  // namespace

void add_tokenize(CLI::App& app, const GlobalOptions& global) {
    auto command_options = std::make_shared<TokenizeCommand>();
    data::TokenizeOptions& options = command_options->options;
    CLI::App* command =
        add_command(app, "tokenize", "Make a corpus from text: a token file, or a folder of shards",
                    "fenwick tokenize books more.jsonl.zst --tokenizer bpe.model --output corpus "
                    "--valid-share 0.01 --valid-output valid.h5",
                    command_options, [&global](const TokenizeCommand& given) { run_tokenize(given, global.quiet); });
    command
        ->add_option("inputs", options.inputs,
                     "Text files, JSON lines and folders of these, in this order; plain or compressed by gzip, zstd or xz")
        ->required();
    command
        ->add_option("--output,-o", options.output,
                     "The token file to write (NAME.h5), or the folder for shards (any other name)")
        ->required();
    command
        ->add_option("--tokenizer", command_options->tokenizer,
                     "bytes; a SentencePiece .model; a tokenizer.json; GPT-2's vocab.bpe; or a corpus, checkpoint or run folder "
                     "whose tokenizer to use")
        ->capture_default_str();
    command->add_option("--end-of-document", command_options->end_of_document,
                        "The token that ends documents, where a tokenizer.json does not tell");
    command
        ->add_option(
            "--documents", command_options->documents,
            "What is one document of a text: file, line, or block (between blank lines); of JSON lines it is each line")
        ->check(CLI::IsMember({"file", "line", "block"}))
        ->capture_default_str();
    command
        ->add_option("--format", command_options->format,
                     "What the files hold: text, jsonl, or auto (jsonl by the names .jsonl, .ndjson, .json)")
        ->check(CLI::IsMember({"auto", "text", "jsonl"}))
        ->capture_default_str();
    command->add_option("--text-field", options.text_field, "The field of JSON lines that holds the text")
        ->capture_default_str();
    command->add_option("--valid-output", options.valid_output, "Where the validation share goes (NAME.h5 or a folder)");
    command
        ->add_option("--valid-share", options.valid_share,
                     "Share of the documents, drawn at random, that are for validation")
        ->check(number_from_to(0, 1));
    command->add_option("--valid-seed", options.valid_seed, "Of this draw")->check(number_from_to(0, 18446744073709551615.0))->capture_default_str();
    command
        ->add_option("--shard-tokens", options.shard_tokens,
                     "A shard ends with the document that brings it to so many tokens")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
        ->capture_default_str();
    command->add_option("--deflate", options.deflate, "Compression of the output, 0 (none) to 9")
        ->check(CLI::Range(0, 9))
        ->capture_default_str();
    command->add_option("--workers", options.workers, "Threads that encode: speed only (default: as --threads)")
        ->check(CLI::Range(1, 4096));
    command->add_flag("--overwrite", options.overwrite, "Replace a corpus that stands at the output");
    command->add_flag("--restart", options.restart, "Begin anew where an interrupted run would be continued");
}

void add_tokenizer(CLI::App& app, const GlobalOptions& global) {
    CLI::App* tokenizer = app.add_subcommand("tokenizer", "Make tokenizers");
    tokenizer->require_subcommand(1);
    tokenizer->footer(footer_text("fenwick tokenizer train train.txt --vocab-size 4096 --output bpe.model"));

    auto options = std::make_shared<TokenizerTrainCommand>();
    CLI::App* command = add_command(
        *tokenizer, "train", "Train a SentencePiece model on text files",
        "fenwick tokenizer train train.txt --vocab-size 4096 --output bpe.model", options,
        [&global](const TokenizerTrainCommand& given) {
            for (const std::string& file : given.files) (void)size_of_file(file);
            check_output(given.output, given.files);
            std::error_code ignored;
            FENWICK_CHECK(!std::filesystem::is_directory(given.output, ignored), "{} is a folder; name a file, as {}/bpe.model",
                          given.output, given.output);
            FENWICK_CHECK(given.overwrite || !std::filesystem::exists(given.output, ignored),
                          "{} exists already; name another place, or give --overwrite to replace it", given.output);
            Progress progress(global.quiet);
            progress.show("training the tokenizer", true);
            const std::int64_t wanted = given.options.vocab_size;
            const std::int64_t pieces = data::train_sentencepiece(given.files, given.options, given.output);
            progress.clear();
            if (global.quiet) return;
            print_line(stdout, "{}: {} pieces{}, trained in {}", given.output, pieces,
                       pieces < wanted ? fmt::format(" of {}: the text has no more", wanted) : "", duration_text(progress.seconds()));
        });
    command->add_option("files", options->files, "Text files")->required();
    command->add_option("--output,-o", options->output, "The .model file to write")->required();
    command->add_flag("--overwrite", options->overwrite, "Replace a file that stands at the output");
    command->add_option("--vocab-size", options->options.vocab_size, "Pieces in all; a text without so many gives fewer")
        ->check(CLI::Range(std::int64_t{300}, std::int64_t{1} << 20))
        ->capture_default_str();
    command->add_option("--type", options->options.model_type, "bpe or unigram")
        ->check(CLI::IsMember({"bpe", "unigram"}))
        ->capture_default_str();
    command
        ->add_option("--character-coverage", options->options.character_coverage,
                     "Share of the text's characters that get pieces of their own")
        ->check(number_from_to(0.98, 1))
        ->capture_default_str();
}

}  // namespace fenwick::tools
