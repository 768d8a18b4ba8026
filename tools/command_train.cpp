// fenwick train: pretraining from a YAML config.
#include <cmath>
#include <cstdio>
#include <optional>

#include "tools/command.h"
#include "tools/print.h"
#include "tools/progress.h"
#include "train/trainer.h"

namespace fenwick::tools {
namespace {

struct TrainOptions {
    std::string config;
    std::vector<std::string> overrides;
    std::optional<std::string> run_dir;
    std::string resume = "no";
};

// "weights 3.3 GB, gradients 3.3 GB": the kinds that there are.
std::string memory_text(const std::array<std::int64_t, memory_kind_count>& bytes) {
    std::string text;
    for (std::size_t kind = 0; kind < memory_kind_count; ++kind)
        if (bytes[kind] > 0)
            text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name_of(static_cast<MemoryKind>(kind)),
                                bytes_text(static_cast<double>(bytes[kind])));
    return text;
}

// The live line on a terminal; elsewhere a plain line now and then.
class ProgressObserver final : public train::Observer {
public:
    explicit ProgressObserver(bool quiet) : quiet_(quiet), progress_(quiet) {}

    void on_start(const train::StartReport& start) override {
        first_step_ = start.first_step;
        if (quiet_) return;
        const auto& config = start.config;
        print_line(stderr, "{}, {} parameters, on {}{}; {} steps of {} tokens; run folder {}", model::name_of(config.model.type),
                   count_text(static_cast<double>(start.parameter_count)), name_of(start.device),
                   start.processes > 1 ? fmt::format(" x {} processes", start.processes) : "", config.train.steps,
                   count_text(static_cast<double>(config.train.batch_size * config.data.sequence_length)), config.run_dir);
        print_line(stderr, "{}: {} floating-point operations a token{}; memory {}",
                   start.device_name.empty() ? "CPU" : start.device_name, count_text(start.flops_per_token),
                   start.peak_flops > 0 ? fmt::format(", peak {}/s in bfloat16", count_text(start.peak_flops)) : "",
                   memory_text(start.memory.bytes));
        const auto corpora = config.data.train.size();
        print_line(stderr, "data: {} targets an epoch{}, rows filled to {:.1f}%",
                   count_text(static_cast<double>(start.tokens_per_epoch)),
                   config.data.train.front().weight > 0 && corpora > 1 ? fmt::format(" of {} corpora, mixed", corpora) : "",
                   100 * start.fill);
        if (!start.resumed_from.empty())
            print_line(stderr, "resumed from {} at step {}", start.resumed_from, start.first_step - 1);
    }

    void on_step(const train::StepReport& report) override {
        const double done = static_cast<double>(report.step) / static_cast<double>(report.total_steps);
        // Speed averaged over about twenty steps: single ones jump.
        speed_ = speed_ == 0 ? report.tokens_per_s : 0.95 * speed_ + 0.05 * report.tokens_per_s;
        const double steps_here = static_cast<double>(report.step - first_step_ + 1);
        const double left = report.time_s / steps_here * static_cast<double>(report.total_steps - report.step);
        if (report.valid_loss) valid_ = fmt::format("  valid {:.4f}", *report.valid_loss);
        progress_.show(fmt::format("step {}/{} ({:.0f}%)  loss {:.4f}{}  lr {:.2e}  grad norm {:.2f}  {} tokens/s{}  {} left{}",
                                   report.step, report.total_steps, 100 * done, report.loss, valid_, report.learning_rate,
                                   report.grad_norm, count_text(speed_),
                                   report.mfu ? fmt::format("  MFU {:.1f}%", 100 * *report.mfu) : "", duration_text(left),
                                   report.skipped ? "  update skipped: not finite" : ""),
                       report.valid_loss.has_value() || report.step == report.total_steps);
    }

    void on_end(const train::EndReport& end) override {
        progress_.clear();
        if (end.nothing_left) {
            print_line(stderr, "nothing is left to train: the run is at step {} of {} ({})", end.step, end.total_steps, end.checkpoint);
            return;
        }
        if (quiet_) return;
        if (end.signal != 0)
            print_line(stderr, "interrupted after step {}; {}", end.step,
                       end.checkpoint.empty() ? "train.keep_checkpoints is 0, so nothing was saved" : "continue with --resume auto");
        print_line(stderr, "{} in {}; {}", end.signal != 0 ? "stopped" : "trained", duration_text(end.time_s),
                   end.checkpoint.empty() ? "no checkpoint" : "checkpoint " + end.checkpoint);
        print_line(stderr, "peak memory {}: {}", bytes_text(static_cast<double>(end.memory.total_peak_bytes)),
                   memory_text(end.memory.peak_bytes));
    }

private:
    bool quiet_;
    Progress progress_;
    std::int64_t first_step_ = 1;
    double speed_ = 0;
    std::string valid_;
};

}  // namespace

void add_train(CLI::App& app, const GlobalOptions& global) {
    auto options = std::make_shared<TrainOptions>();
    CLI::App* command = add_command(
        app, "train", "Pretrain a model as a YAML config says",
        "fenwick train configs/quickstart/log_linear_mamba2.yaml --set data.train=train.h5 --set train.tokens=1000000",
        options, [&global](const TrainOptions& given) {
            std::vector<std::string> overrides = given.overrides;
            if (given.run_dir) {
                FENWICK_CHECK(!given.run_dir->empty(), "--run-dir is empty; a folder is needed");
                overrides.push_back("run_dir=" + train::yaml_text(*given.run_dir));  // a path as it stands, not YAML
            }
            if (global.threads > 0) overrides.push_back("train.num_threads=" + std::to_string(global.threads));
            train::EndReport end;
            bool failed = false;
            {
                const auto communicator = train::make_communicator();
                ProgressObserver observer(global.quiet);
                try {
                    train::RunConfig config;
                    train::together(*communicator, [&] { config = train::load_config(given.config, overrides); });
                    end = train::train(std::move(config), given.resume == "auto" ? train::Resume::automatic : train::Resume::no,
                                       *communicator, observer);
                } catch (const train::SharedError& error) {
                    if (error.speaks) print_line(stderr, "fenwick: {}", error.what());
                    failed = true;
                }
            }
            if (failed) throw Exit{2};  // every process ended in order, so that none is killed before it has spoken
            if (end.signal != 0) throw Exit{128 + end.signal};  // as a shell says it, so that scripts see that it is not finished
        });
    command->footer(footer_text("fenwick train configs/quickstart/log_linear_mamba2.yaml --set data.train=train.h5 --set train.tokens=1000000\n"
                                "SIGINT and SIGTERM end the run after the current step with a checkpoint, exit code 130 or 143; a second one kills."));
    command->add_option("config", options->config, "YAML file; docs/configuration.md lists the keys")->required();
    command->add_option("--set", options->overrides, "Override a key: --set train.steps=100 (may be repeated)")
        ->allow_extra_args(false)
        ->take_all();
    command->add_option("--run-dir", options->run_dir, "Folder for config, metrics and checkpoints (overrides run_dir)");
    command->add_option("--resume", options->resume, "auto: continue from the newest complete checkpoint in the run folder")
        ->check(CLI::IsMember({"no", "auto"}))
        ->capture_default_str();
}

}  // namespace fenwick::tools
