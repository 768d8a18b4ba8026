// fenwick: the command line.
#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>

#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/parallel.h"
#include "kernels/cpu/blas.h"
#include "tools/command.h"
#include "tools/print.h"
#include "tools/version.h"

namespace {

// Exit codes: 0 success, 1 a defect of this program, 2 something the user can mend, 130 and 143 training that SIGINT or
// SIGTERM ended early, with a checkpoint.
constexpr int exit_defect = 1, exit_bad_input = 2;

int report(std::string_view message, int code) {
    fenwick::tools::print_line(stderr, "fenwick: {}", message);
    return code;
}

// The words of a line that belong to no command, said with what could stand there; "" if there are none.
std::string unknown_command(const CLI::App& app) {
    const std::vector<std::string> words = app.remaining(true);
    if (words.empty()) return "";
    const CLI::App* last = &app;  // the innermost command of the line
    while (!last->get_subcommands().empty()) last = last->get_subcommands().back();
    const auto commands = last->get_subcommands([](const CLI::App*) { return true; });
    if (commands.empty()) return "";
    if (last == &app) return fmt::format("unknown command '{}'; fenwick --help lists the commands", words.front());
    std::vector<std::string> names;
    for (const CLI::App* command : commands) names.push_back(command->get_name());
    return fmt::format("{}: unknown {} '{}'; there are {}", last->get_name(), last->get_name() == "bench" ? "operator" : "command",
                       words.front(), fmt::join(names, ", "));
}

// What takes less memory, in words of the command that ran out of it.
std::string_view memory_advice(const CLI::App& app) {
    const auto given = app.get_subcommands();
    const std::string command = given.empty() ? "" : given.front()->get_name();
    if (command == "train" || command == "bench") return "; lower train.micro_batch or data.sequence_length";
    if (command == "eval") return "; lower --batch or --context";
    return "";
}

// What a command wrote and could not: a full disk shows when the buffer is flushed.
int finish(int code) {
    errno = 0;
    const bool lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
    if (!lost || code != 0) return code;
    return report(fmt::format("standard output cannot be written{}{}", errno != 0 ? ": " : "", errno != 0 ? std::strerror(errno) : ""),
                  exit_bad_input);
}

}  // namespace

int main(int argc, char** argv) {
    fenwick::kernels::cpu::use_fast_blas(argv);
    std::signal(SIGXFSZ, SIG_IGN);  // a write past the limit of a file's size fails, and says so, as on a full disk
    fenwick::keep_freed_memory();

    CLI::App app("Pretraining of log-linear-attention models, from text to perplexity.", "fenwick");
    app.set_version_flag("--version", FENWICK_VERSION);
    app.require_subcommand(1);
    app.fallthrough();
    app.footer("Example:\n  fenwick train configs/quickstart/log_linear_mamba2.yaml\n  fenwick train --help");

    fenwick::tools::GlobalOptions global;
    app.add_flag("--quiet", global.quiet, "No progress: only results and errors");
    app.add_option("--log-level", global.log_level, "trace, debug, info, warn, error or off")->capture_default_str();
    app.add_option("--threads", global.threads, "CPU threads (default: FENWICK_NUM_THREADS, else every core)")
        ->check(CLI::Range(1, 4096));
    app.parse_complete_callback([&] {
        fenwick::set_log_level(global.log_level);
        if (global.threads > 0) fenwick::set_num_threads(global.threads);
    });

    using namespace fenwick::tools;
    add_tokenizer(app, global);
    add_tokenize(app, global);
    add_train(app, global);
    add_eval(app, global);
    add_generate(app, global);
    add_export(app, global);
    add_import(app, global);
    add_bench(app, global);
    add_info(app, global);
    add_verify(app, global);

    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& request) {  // --help, --version
        return finish(app.exit(request));
    } catch (const fenwick::tools::Exit& exit) {
        return exit.code;
    } catch (const CLI::ParseError& error) {
        // CLI11 misses the subcommand before it sees that a word is none.
        if (const std::string unknown = unknown_command(app); !unknown.empty()) return report(unknown, exit_bad_input);
        return report(error.what(), exit_bad_input);
    } catch (const fenwick::Error& error) {
        return report(error.what(), exit_bad_input);
    } catch (const std::filesystem::filesystem_error& error) {  // a folder that may not be read, a link to itself
        return report(fmt::format("{}: {}", error.path1().string(), error.code().message()), exit_bad_input);
    } catch (const std::bad_alloc&) {
        return report(fmt::format("out of memory{}", memory_advice(app)), exit_bad_input);
    } catch (const std::exception& error) {
        return report(std::string("internal error: ") + error.what(), exit_defect);
    }
    return finish(0);
}
