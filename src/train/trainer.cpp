#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <optional>

#include "base/device_peaks.h"
#include "base/files.h"
#include "base/log.h"
#include "base/memory_cuda.h"
#include "base/parallel.h"
#include "data/corpus.h"
#include "data/loader.h"
#include "kernels/gemm.h"
#include "model/costs.h"
#include "train/batch_feed.h"
#include "train/checkpoint.h"
#include "train/optimizer.h"
#include "train/schedule.h"

namespace fenwick::train {
namespace {

namespace fs = std::filesystem;

// ---- signals -----------------------------------------------------------------------------------------------------------

volatile std::sig_atomic_t stop_requested = 0;  // the signal's number

extern "C" void request_stop(int signal) {
    stop_requested = signal;
    std::signal(signal, SIG_DFL);  // a second one kills
}

// While it lives, SIGINT and SIGTERM ask for a stop.
class SignalScope {
public:
    SignalScope() : interrupt_(std::signal(SIGINT, request_stop)), terminate_(std::signal(SIGTERM, request_stop)) {
        stop_requested = 0;
    }
    ~SignalScope() {
        std::signal(SIGINT, interrupt_);
        std::signal(SIGTERM, terminate_);
    }
    SignalScope(const SignalScope&) = delete;
    SignalScope& operator=(const SignalScope&) = delete;

private:
    void (*interrupt_)(int);
    void (*terminate_)(int);
};

// ---- small pieces --------------------------------------------------------------------------------------------------------

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

data::LoaderOptions loader_options(std::vector<data::WeightedCorpus> corpora, const RunConfig& config, bool shuffle) {
    return {.corpora = std::move(corpora),
            .sequence_length = config.data.sequence_length,
            .packing = config.data.packing,
            .seed = static_cast<std::uint64_t>(config.train.seed),
            .shuffle = shuffle};
}

// What several ranks must agree on after a step, in one reduction.
void reduce(Communicator& communicator, std::vector<double>& values) {
    const Tensor tensor = Tensor::from(values, {static_cast<std::int64_t>(values.size())});
    communicator.all_reduce_sum(tensor);
    values = tensor.to_vector<double>();
}

// The values of one-element tensors of one device, read with one wait for it.
std::vector<double> read_together(const std::vector<Tensor>& scalars) {
    const Tensor all = Tensor::empty({static_cast<std::int64_t>(scalars.size())}, DType::float64, scalars.front().device());
    for (std::size_t i = 0; i < scalars.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        all.narrow_rows(at, at + 1).copy_from(scalars[i].view({1}));
    }
    return all.to_vector<double>();
}

// ---- the loop ------------------------------------------------------------------------------------------------------------

class Trainer {
public:
    Trainer(RunConfig config, Communicator& communicator, Observer& observer)
        : config_(std::move(config)), communicator_(communicator), observer_(observer),
          device_(device_for(config_.train, communicator.local_rank())),
          loader_(loader_options(config_.data.train, config_, true)) {
        adopt_tokenizer();
        config_.model.validate();
        model_.emplace(config_.model, device_, config_.weight_dtype(), config_.train.dtype);
        if (config_.train.init_from.empty())
            model_->initialize(static_cast<std::uint64_t>(config_.train.seed));
        else
            begin_from(find_checkpoint(config_.train.init_from));
        model_->set_recompute(config_.train.recompute);
        optimizer_.emplace(model_->parameters(), config_.optimizer);
        flops_per_token_ = model::training_flops_per_token(config_.model, std::llround(loader_.mean_sequence_length()));
        if (device_.is_cuda()) {
            device_name_ = cuda_device_name(device_.index);
            if (const auto peaks = peaks_of(device_name_)) peak_flops_ = peaks->bfloat16_flops * communicator_.size();
        }
        if (!config_.data.valid.empty()) {
            validation_.emplace(loader_options({{config_.data.valid}}, config_, false));
            FENWICK_CHECK(validation_->tokenizer_identity() == tokenizer_.identity &&
                              validation_->vocab_size() == loader_.vocab_size(),
                          "{}: its tokenizer is not that of {}; tokenize both with the same one", config_.data.valid,
                          config_.data.train.front().path);
            // Damage is told now, not at the first validation.
            for_each_validation_batch([&](std::int64_t first, std::int64_t count) { (void)validation_->read(first, count); });
        }
    }

    EndReport run(Resume resume) {
        try {
            return run_to_its_end(resume);
        } catch (const std::exception&) {
            remove_empty_run();
            throw;
        }
    }

private:
    EndReport run_to_its_end(Resume resume) {
        const std::string resumed_from = open_run_folder(resume);
        if (step_ >= config_.train.steps) {  // the folder stays as it is
            const EndReport end{.step = step_, .total_steps = config_.train.steps, .nothing_left = true, .checkpoint = resumed_from,
                                .memory = memory_stats(device_.type)};
            if (communicator_.is_root()) observer_.on_end(end);
            return end;
        }
        reset_peak_memory(device_.type);
        if (communicator_.is_root())
            observer_.on_start({.config = config_, .first_step = step_ + 1, .resumed_from = resumed_from,
                                .parameter_count = model_->parameter_count(), .tokens_per_epoch = loader_.tokens_per_epoch(),
                                .fill = loader_.fill(),
                                .flops_per_token = flops_per_token_, .device = device_, .device_name = device_name_,
                                .peak_flops = peak_flops_, .processes = communicator_.size(), .memory = memory_stats(device_.type)});

        feed_.emplace(loader_, BatchFeedOptions{.device = device_, .batch_rows = config_.train.batch_size,
                                                .first = communicator_.rank() * share_of_batch(), .share = share_of_batch(),
                                                .micro_rows = config_.train.micro_batch, .prefetch = config_.data.prefetch}, rows_);
        SignalScope signals;
        const auto& train = config_.train;
        int signal = 0;  // that asked for the end
        while (step_ < train.steps && signal == 0) {
            ++step_;
            const bool last = step_ == train.steps;
            const auto step_start = std::chrono::steady_clock::now();
            std::optional<StepReport> made = update(signal);
            if (!made) {
                --step_;
                stop_for_bad_data();
            }
            StepReport& report = *made;
            report.tokens_per_s = static_cast<double>(report.tokens - tokens_) / seconds_since(step_start);
            tokens_ = report.tokens;
            if (peak_flops_ > 0) report.mfu = report.tokens_per_s * flops_per_token_ / peak_flops_;
            const bool validates = validation_ && (last || is_due(train.validate_every));
            if (validates) report.valid_loss = validate();
            report.time_s = seconds_since(start_);
            if (communicator_.is_root()) {
                if (last || report.valid_loss || step_ % train.log_every == 0) metrics_->write(report);
                observer_.on_step(report);
            }
            if (validates && !report.valid_loss) stop_for_bad_data();
            if (last || signal != 0 || is_due(train.checkpoint_every)) save();
        }
        EndReport end{.step = step_, .total_steps = train.steps, .signal = step_ < train.steps ? signal : 0,
                      .checkpoint = keeps_checkpoints() ? checkpoint_path(checkpoints(), step_) : "", .time_s = seconds_since(start_),
                      .memory = memory_stats(device_.type)};
        if (communicator_.is_root()) observer_.on_end(end);
        return end;
    }

    bool is_due(std::int64_t every) const { return every > 0 && step_ % every == 0; }
    std::string checkpoints() const { return config_.run_dir + "/checkpoints"; }

    void adopt_tokenizer() {
        const data::TokenCorpus& corpus = loader_.first_corpus();
        tokenizer_ = {corpus.info().tokenizer_kind, corpus.info().tokenizer_identity, corpus.tokenizer_definition()};
        if (config_.model.vocab_size == 0) config_.model.vocab_size = loader_.vocab_size();
        FENWICK_CHECK(config_.model.vocab_size >= loader_.vocab_size(),
                      "model.vocab_size is {}, but {} has token ids up to {}; use at least {}, or 0 to take it from there",
                      config_.model.vocab_size, config_.data.train.front().path, loader_.vocab_size() - 1, loader_.vocab_size());
    }

    // Equal sizes of vocabulary do not make the same ids of text.
    void begin_from(const std::string& checkpoint) {
        const TokenizerInfo theirs = read_checkpoint_header(checkpoint).tokenizer;
        FENWICK_CHECK(theirs.identity == tokenizer_.identity,
                      "train.init_from: {} was trained with another tokenizer ({}, identity {}) than {} was made with ({}, identity "
                      "{}); tokenize the text with the checkpoint's: fenwick tokenize TEXT --tokenizer {} --output FILE.h5",
                      checkpoint, theirs.kind, theirs.identity, config_.data.train.front().path, tokenizer_.kind,
                      tokenizer_.identity, checkpoint);
        load_weights(checkpoint, *model_);
    }

    // Makes the folder or continues in it; returns the checkpoint resumed from, or "".
    std::string open_run_folder(Resume resume) {
        lock_run_folder();
        const bool holds_run = fs::exists(config_.run_dir + "/config.yaml") || fs::exists(config_.run_dir + "/metrics.jsonl") ||
                               !checkpoint_steps(checkpoints()).empty();
        together(communicator_, [&] {
            FENWICK_CHECK(resume == Resume::automatic || !holds_run,
                          "{} already holds a run; continue it with --resume auto, or give another run_dir", config_.run_dir);
        });
        is_new_run_ = communicator_.is_root() && !holds_run;
        const std::string newest = holds_run ? agree_on_checkpoint() : "";
        if (!newest.empty()) together(communicator_, [&] { restore(newest); });
        communicator_.barrier();  // everyone has read before rank 0 writes
        if (communicator_.is_root() && step_ < config_.train.steps) {
            remove_temporaries();
            write_file_atomically(config_.run_dir + "/config.yaml", to_yaml(config_));
            metrics_.emplace(config_.run_dir + "/metrics.jsonl", step_);
        }
        return newest;
    }

    // Two runs in one folder would overwrite each other's files: rank 0 holds the folder's lock until the run ends.
    void lock_run_folder() {
        together(communicator_, [&] {
            if (!communicator_.is_root()) return;
            make_folder(checkpoints());
            FENWICK_CHECK(lock_.acquire(config_.run_dir + "/.lock"),
                          "{}: another run is training in this folder; wait for its end, or give another run_dir", config_.run_dir);
        });
    }

    // What a killed run was writing.
    void remove_temporaries() const {
        std::error_code ignored;
        for (const char* name : {"config.yaml.tmp", "metrics.jsonl.tmp"}) fs::remove(fs::path(config_.run_dir) / name, ignored);
        for (const auto& entry : fs::directory_iterator(checkpoints(), ignored))
            if (const auto name = entry.path().filename().string(); name.starts_with("step_") && name.ends_with(".h5.tmp"))
                fs::remove(entry.path(), ignored);
    }

    // A first run that failed before it had anything to show leaves nothing that would be in the way of the next one.
    void remove_empty_run() {
        const fs::path folder = config_.run_dir, written = folder / "metrics.jsonl";
        std::error_code ignored;
        if (!is_new_run_ || !checkpoint_steps(checkpoints()).empty()) return;
        if (fs::exists(written, ignored) && !fs::is_empty(written, ignored)) return;
        metrics_.reset();
        remove_temporaries();
        for (const fs::path& path : {written, folder / "config.yaml", folder / ".lock", fs::path(checkpoints()), folder})
            fs::remove(path, ignored);  // a folder only where nothing else is in it
    }

    // Rank 0 looks for the newest complete checkpoint and tells the others. "" if there is none.
    std::string agree_on_checkpoint() {
        const Tensor step = Tensor::full({1}, -1.0, DType::float64);
        if (communicator_.is_root())
            if (const auto newest = latest_complete(checkpoints()))
                *step.as<double>() = static_cast<double>(read_checkpoint_header(*newest).step);
        communicator_.broadcast(step, 0);
        return step.item() < 0 ? "" : checkpoint_path(checkpoints(), static_cast<std::int64_t>(step.item()));
    }

    void restore(const std::string& path) {
        const CheckpointHeader header = read_checkpoint_header(path);
        check_same_model(path, header, config_);
        FENWICK_CHECK(
            header.tokenizer.identity == tokenizer_.identity,
            "{}: its tokenizer is not that of {}; tokenize the text with the run's (fenwick tokenize TEXT --tokenizer {} "
            "--output FILE.h5), or give another run_dir",
            path, config_.data.train.front().path, config_.run_dir);
        if (communicator_.is_root())
            for (const auto& difference : differences(parse_config(header.config, path), config_, ""))
                if (difference.key != "run_dir" && difference.key != "train.num_threads" && difference.key != "data.prefetch")
                    spdlog::warn("{} was {} when {} was written, now it is {}", difference.key, difference.theirs, path,
                                 difference.ours);
        check_same_data(path, header);
        load_checkpoint(path, *optimizer_);
        step_ = saved_step_ = header.step;
        tokens_ = header.tokens;
        rows_ = loader_.rows_before(header.loader);
    }

    // The place in the data means something in that data alone. Other corpora named by the config are the user's will;
    // others under the names of before are likely an oversight.
    void check_same_data(const std::string& path, const CheckpointHeader& header) const {
        const auto& corpora = config_.data.train;
        if (parse_config(header.config, path).data.train != corpora) return;  // restore() has told
        std::vector<std::string> paths;
        for (const auto& corpus : corpora) paths.push_back(corpus.path);
        if (header.loader.data.empty()) {
            if (communicator_.is_root() && header.step > 0)
                spdlog::warn("{} does not say which data it was trained on; that {} still holds it is not checked", path,
                             fmt::join(paths, ", "));
            return;
        }
        FENWICK_CHECK(header.loader.data == loader_.data_identity(),
                      "{}: the data it was trained on has been replaced: {} holds another text, or another cut into shards. "
                      "Put the old "
                      "one back; or give the new one under another path to go on with it, or another run_dir to begin anew",
                      path, fmt::join(paths, ", "));
    }

    bool keeps_checkpoints() const { return config_.train.keep_checkpoints > 0; }

    void save() {
        if (!keeps_checkpoints()) return;
        write_checkpoint();
        communicator_.barrier();
    }

    // Where none of this step is there yet
    void write_checkpoint() {
        if (communicator_.is_root() && saved_step_ != step_) {
            const std::string path = checkpoint_path(checkpoints(), step_);
            save_checkpoint(path, {.step = step_, .tokens = tokens_, .loader = loader_.state_after(rows_), .config = to_yaml(config_),
                                   .tokenizer = tokenizer_}, *optimizer_);
            rotate_checkpoints(checkpoints(), step_, config_.train.keep_checkpoints);
            observer_.on_checkpoint(step_, path);
        }
        saved_step_ = step_;
    }

    // The data of one rank or several cannot be read. What was trained until then is saved before the run ends: every rank
    // stands behind step_, of which nothing is missing but, perhaps, its validation.
    [[noreturn]] void stop_for_bad_data() {
        const std::string others_data = "the data of another process cannot be read";
        std::string told;
        bool is_lost = false;  // on rank 0
        if (step_ > 0 && keeps_checkpoints()) {
            try {
                write_checkpoint();
                told = fmt::format("; step {} is saved: put the data right and go on with --resume auto", step_);
            } catch (const Error& error) {
                told = fmt::format("; step {} could not be saved: {}", step_, error.what());
                is_lost = true;
            }
        } else if (step_ > 0) {
            told = "; train.keep_checkpoints is 0, so nothing was saved";
        }
        together(communicator_, [&] {
            if (data_error_ || is_lost) fail("{}{}", data_error_.value_or(others_data), told);
        });
        throw SharedError(others_data, false);
    }

    std::int64_t share_of_batch() const { return config_.train.batch_size / communicator_.size(); }

    // read(), unless data of this rank cannot be read; the rank then goes on to the next reduction, where the others wait for
    // it, and tells them.
    template <class Read>
    void unless_damaged(Read&& read) {
        try {
            if (!data_error_) read();
        } catch (const Error& error) {
            data_error_ = error.what();
        }
    }

    // Forward and backward over this rank's rows of the global batch, reduction, one update. Nothing, and no update, where a
    // rank's data cannot be read. `signal`: one that any rank got, or 0.
    std::optional<StepReport> update(int& signal) {
        const auto& train = config_.train;
        optimizer_->zero_gradients();
        std::vector<Tensor> losses;
        std::int64_t valid = 0;  // of all ranks and accumulation steps
        for (std::int64_t rows = 0; rows < share_of_batch(); rows += train.micro_batch) {
            const MicroBatch* batch = nullptr;
            unless_damaged([&] { batch = &feed_->next(); });
            if (batch == nullptr) break;
            valid = batch->step_targets;
            if (batch->valid_targets == 0) continue;
            Tape tape;
            Variable loss;
            {
                Recording recording(tape);
                loss = model_->loss(batch->inputs, batch->targets, batch->layout, static_cast<double>(valid)).loss;
            }
            tape.backward(loss);
            losses.push_back(loss.value());
        }

        communicator_.all_reduce_sum(optimizer_->gradients());
        // The only place of a step where the host waits for a GPU.
        losses.push_back(optimizer_->gradient_squares());
        const std::vector<double> values = read_together(losses);
        std::vector<double> sums{0.0, stop_requested == SIGINT ? 1.0 : 0.0, stop_requested == SIGTERM ? 1.0 : 0.0,
                                 data_error_ ? 1.0 : 0.0};
        for (std::size_t i = 0; i + 1 < values.size(); ++i) sums[0] += values[i];
        reduce(communicator_, sums);
        signal = sums[1] > 0 ? SIGINT : sums[2] > 0 ? SIGTERM : 0;
        if (sums[3] > 0) return {};
        rows_ += train.batch_size;

        StepReport report{.step = step_, .total_steps = train.steps, .tokens = tokens_ + valid, .loss = sums[0]};
        report.learning_rate = learning_rate(config_.schedule, config_.optimizer.learning_rate, step_, train.steps);
        report.grad_norm = std::sqrt(values.back());
        report.skipped = !std::isfinite(report.loss) || !std::isfinite(report.grad_norm);
        if (report.skipped && train.on_nan == NanPolicy::stop) fail_not_finite(report);
        if (!report.skipped) optimizer_->update(step_, report.learning_rate, report.grad_norm);
        return report;
    }

    [[noreturn]] void fail_not_finite(const StepReport& report) const {
        const std::string tensor = optimizer_->first_not_finite();
        fail("step {}: the loss is {}, the gradient norm {}; first tensor that is not finite: {}. Lower "
             "optimizer.learning_rate or optimizer.clip_norm, or set train.on_nan to skip",
             report.step, report.loss, report.grad_norm, tensor.empty() ? "the loss" : tensor);
    }

    std::int64_t validation_rows() const {
        const std::int64_t length = config_.data.sequence_length, all = validation_->rows_per_epoch();
        const std::int64_t wanted = (config_.train.validate_tokens + length - 1) / length;
        return wanted > 0 ? std::min(all, wanted) : all;
    }

    // body(first row, rows) for this rank's micro-batches of a validation; where it has none left, of no rows.
    template <class Body>
    void for_each_validation_batch(Body&& body) const {
        const std::int64_t rows = validation_rows(), micro = config_.train.micro_batch;
        for (std::int64_t base = 0; base < rows; base += micro * communicator_.size()) {
            const std::int64_t first = base + communicator_.rank() * micro;
            body(first, std::clamp<std::int64_t>(rows - first, 0, micro));
        }
    }

    // Mean negative log-likelihood over the validation rows. Sums are kept in float64, row by row. Nothing where a rank's rows
    // cannot be read.
    std::optional<double> validate() {
        const std::int64_t rows = validation_rows();
        std::vector<double> sums{0.0, 0.0, 0.0};  // negative log-likelihood, targets, ranks that failed
        for_each_validation_batch([&](std::int64_t first, std::int64_t count) {
            data::Batch batch;
            unless_damaged([&] { batch = validation_->read(first, count); });
            if (batch.rows > 0) {
                const Shape shape{batch.rows, batch.length};
                const auto result = model_->loss(Tensor::from(batch.inputs, shape, device_), Tensor::from(batch.targets, shape, device_),
                                                 SequenceLayout::packed(batch.offsets), 1.0);
                for (const double nll : result.token_nll.to_vector<double>()) sums[0] += nll;
                sums[1] += static_cast<double>(batch.valid_targets);
            }
            // Rank 0 has the first rows of each round.
            if (communicator_.is_root())
                observer_.on_validation(std::min(first + config_.train.micro_batch * communicator_.size(), rows), rows);
        });
        sums[2] = data_error_ ? 1 : 0;
        reduce(communicator_, sums);
        if (sums[2] > 0) return {};
        return sums[1] > 0 ? sums[0] / sums[1] : 0.0;
    }

    RunConfig config_;
    Communicator& communicator_;
    Observer& observer_;
    Device device_;
    FileLock lock_;
    bool is_new_run_ = false;  // whose folder held none before; on rank 0
    data::Loader loader_;
    std::optional<data::Loader> validation_;
    std::optional<BatchFeed> feed_;
    TokenizerInfo tokenizer_;
    std::optional<model::LanguageModel> model_;
    std::optional<Optimizer> optimizer_;
    std::optional<MetricsFile> metrics_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    std::string device_name_;
    double flops_per_token_ = 0, peak_flops_ = 0;
    std::int64_t step_ = 0;    // updates done, or the one in progress
    std::int64_t saved_step_ = 0;  // of the newest checkpoint, on rank 0
    std::optional<std::string> data_error_;  // of this rank's data
    std::int64_t tokens_ = 0;  // targets trained on
    std::int64_t rows_ = 0;    // rows that the loader has given
};

}  // namespace

Device device_for(const TrainConfig& train, int local_rank) {
    const int gpus = train.device == DeviceChoice::cpu || train.dtype == DType::float64 ? 0 : cuda_device_count();
    FENWICK_CHECK(train.device != DeviceChoice::cuda || gpus > 0,
                  "train.device is cuda, but this program sees no GPU (or was built without CUDA); use cpu or auto");
    FENWICK_CHECK(train.dtype != DType::bfloat16 || gpus > 0,
                  "train.dtype is bfloat16, which needs a GPU, and none is seen; use float32");
    return gpus > 0 ? Device{DeviceType::cuda, local_rank % gpus} : cpu_device;
}

EndReport train(RunConfig config, Resume resume, Communicator& communicator, Observer& observer) {
    std::optional<Trainer> trainer;
    together(communicator, [&] {
        resolve_for_processes(config, communicator.size());
        if (config.train.num_threads > 0) set_num_threads(static_cast<int>(config.train.num_threads));
        kernels::allow_tf32(config.train.tf32);
        trainer.emplace(std::move(config), communicator, observer);
    });
    return trainer->run(resume);
}

}  // namespace fenwick::train
