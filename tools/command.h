// The subcommands of `fenwick`. Each lives in tools/command_<name>.cpp, adds itself to the program, and is run by CLI11
// once the whole line is parsed.
#pragma once

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <memory>
#include <string>

namespace fenwick::tools {

// Thrown by a command that has said all there is to say: the program ends with this code.
struct Exit {
    int code = 0;
};

struct GlobalOptions {
    bool quiet = false;             // no progress, only results and errors
    std::string log_level = "warn";
    int threads = 0;                // 0: FENWICK_NUM_THREADS, else all cores
};

void add_tokenizer(CLI::App& app, const GlobalOptions& global);
void add_tokenize(CLI::App& app, const GlobalOptions& global);
void add_train(CLI::App& app, const GlobalOptions& global);
void add_eval(CLI::App& app, const GlobalOptions& global);
void add_export(CLI::App& app, const GlobalOptions& global);
void add_generate(CLI::App& app, const GlobalOptions& global);
void add_import(CLI::App& app, const GlobalOptions& global);
void add_bench(CLI::App& app, const GlobalOptions& global);
void add_info(CLI::App& app, const GlobalOptions& global);
void add_verify(CLI::App& app, const GlobalOptions& global);

// What stands below a command's help.
inline std::string footer_text(const std::string& example) {
    return "Options of every command: --quiet, --threads N, --log-level LEVEL (fenwick --help)\n\nExample:\n  " + example;
}

// A finite number in [low, high]; unlike CLI::Range it refuses nan.
inline CLI::Validator number_from_to(double low, double high) {
    const std::string range = fmt::format("{} to {}", low, high);
    return CLI::Validator(
        [=](std::string& text) {
            double value = 0;
            const bool number = CLI::detail::lexical_cast(text, value);
            return number && value >= low && value <= high ? std::string() : fmt::format("'{}' is no number from {}", text, range);
        },
        "FROM " + range);
}

// A subcommand whose options live as long as the program: run(options) is its callback.
template <class Options, class Run>
CLI::App* add_command(CLI::App& app, const char* name, const char* description, const char* example,
                      const std::shared_ptr<Options>& options, Run run) {
    CLI::App* command = app.add_subcommand(name, description);
    command->footer(footer_text(example));
    command->callback([options, run] { run(*options); });
    return command;
}

}  // namespace fenwick::tools
