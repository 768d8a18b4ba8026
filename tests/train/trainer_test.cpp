#include "train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <tuple>

#include "base/files.h"
#include "base/hdf5.h"
#include "base/log.h"
#include "base/parallel.h"
#include "data/loader.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "support/random_tensor.h"
#include "train/checkpoint.h"

namespace fenwick::train {

Communicator& mpi_world();  // communicator_test.cpp

namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

struct Killed {};

// Keeps what it is told; can die or raise a signal after a step.
struct Recorder : Observer {
    std::vector<StepReport> steps;
    std::vector<std::string> checkpoints;
    std::string resumed_from;
    std::int64_t kill_after = -1, signal_after = -1;
    void on_start(const StartReport& report) override { resumed_from = report.resumed_from; }
    void on_step(const StepReport& report) override {
        steps.push_back(report);
        if (report.step == kill_after) throw Killed();
        if (report.step == signal_after) std::raise(SIGTERM);
    }
    void on_checkpoint(std::int64_t, const std::string& path) override { checkpoints.push_back(path); }
};

// A folder with a training file (an odd number of tokens, so that the last row of an epoch has fewer targets) and a
// validation file, both of text whose next byte can be learned.
struct TrainerTest : testing::Test {
    fs::path folder;

    void SetUp() override {
        spdlog::set_level(spdlog::level::off);
        folder = fs::path(testing::TempDir()) / fmt::format("fenwick_trainer_{}", getpid());
        fs::remove_all(folder);
        fs::create_directories(folder);
        write_tokens("train.h5", 1501, 1);
        write_tokens("valid.h5", 333, 2);
        write_documents("short.h5", 60, 20, 3);
        write_documents("long.h5", 12, 120, 4);
    }
    void TearDown() override {
        fs::remove_all(folder);
        set_num_threads(2);
        spdlog::set_level(spdlog::level::info);
    }

    void write_tokens(const std::string& name, std::int64_t count, std::uint64_t seed) const {
        const auto tokenizer = data::open_tokenizer("bytes");
        data::TokenFileWriter writer((folder / name).string(), *tokenizer);
        Random random(seed);
        std::vector<std::int32_t> ids;
        for (std::int64_t i = 0; i + 1 < count; ++i)
            ids.push_back(static_cast<std::int32_t>('a' + (i % 7) + (random.below(8) == 0 ? 7 : 0)));
        writer.append(ids.data(), static_cast<std::int64_t>(ids.size()));
        writer.end_document(count - 1, 1);
        writer.finish();
    }

    // Documents of random lengths up to `longest`, one in three of their mark alone.
    void write_documents(const std::string& name, int count, std::uint64_t longest, std::uint64_t seed) const {
        const auto tokenizer = data::open_tokenizer("bytes");
        data::TokenFileWriter writer((folder / name).string(), *tokenizer);
        Random random(seed);
        for (int d = 0; d < count; ++d) {
            std::vector<std::int32_t> ids(random.below(3) == 0 ? 0 : random.below(longest));
            for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>('a' + i % 7);
            writer.append(ids.data(), static_cast<std::int64_t>(ids.size()));
            writer.end_document(static_cast<std::int64_t>(ids.size()), 1);
        }
        writer.finish();
    }
    // Packed documents of a mixture
    std::vector<std::string> mixed(std::vector<std::string> overrides = {}) const {
        overrides.push_back(fmt::format("data.train=[{{path: {0}/short.h5, weight: 1}}, {{path: {0}/long.h5, weight: 3}}]", folder.string()));
        overrides.push_back(fmt::format("data.valid={}/long.h5", folder.string()));
        overrides.push_back("data.packing=documents");
        return overrides;
    }

    RunConfig config(const std::string& run, std::vector<std::string> overrides = {}) const {
        const std::string text = fmt::format(R"(run_dir: {0}/{1}
model: {{type: log_linear_mamba2, hidden_size: 16, num_layers: 2, num_heads: 2, head_dim: 8, state_size: 4,
         intermediate_size: 24, chunk_size: 16}}
data: {{train: {0}/train.h5, valid: {0}/valid.h5, sequence_length: 23}}
optimizer: {{learning_rate: 0.01}}
schedule: {{warmup_steps: 3}}
train: {{steps: 20, batch_size: 4, validate_every: 6, checkpoint_every: 4, seed: 5, device: cpu, num_threads: 1}}
)", folder.string(), run);
        return parse_config(text, "test.yaml", overrides);
    }

    static EndReport run(const RunConfig& config, Observer& observer, Resume resume = Resume::no) {
        const auto communicator = single_process();
        return train(config, resume, *communicator, observer);
    }
    static EndReport run(const RunConfig& config, Resume resume = Resume::no) {
        Observer silent;
        return run(config, silent, resume);
    }

    // metrics.jsonl without the times.
    static std::string metrics(const RunConfig& config) {
        std::istringstream lines(read_file(config.run_dir + "/metrics.jsonl"));
        std::string out, line;
        while (std::getline(lines, line)) out += line.substr(0, line.find(",\"time_s\"")) + "\n";
        return out;
    }

    // Every tensor of the final checkpoint, as it is stored.
    static std::map<std::string, std::vector<double>> tensors(const RunConfig& config) {
        const auto file = hdf5::File::open(checkpoint_path(config.run_dir + "/checkpoints", config.train.steps));
        std::map<std::string, std::vector<double>> all;
        for (const std::string group : {"weights", "optimizer"})
            for (const auto& name : file.all_datasets(group)) all[name + " of " + group] = file.read<double>(group + "/" + name);
        return all;
    }
    // Largest RMS error ratio of any weight.
    static double weight_error(const RunConfig& a, const RunConfig& b) {
        const auto left = tensors(a), right = tensors(b);
        double worst = left.size() == right.size() ? 0 : INFINITY;
        for (const auto& [name, values] : left)
            if (name.ends_with("of weights")) worst = std::max(worst, test::rms_ratio(values, right.at(name)));
        return worst;
    }
};

template <class Body>
std::string error_of(Body&& body) {
    try {
        body();
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

TEST_F(TrainerTest, LearnsAndWritesTheRunFolder) {
    Recorder recorder;
    const RunConfig wanted = config("a", {"train.steps=40"});
    const EndReport end = run(wanted, recorder);
    EXPECT_EQ(end.step, 40);
    EXPECT_EQ(end.signal, 0);
    ASSERT_EQ(recorder.steps.size(), 40u);
    EXPECT_NEAR(recorder.steps.front().loss, std::log(257), 0.3);
    EXPECT_LT(recorder.steps.back().loss, 3.5);
    EXPECT_LT(*recorder.steps.back().valid_loss, 3.5);
    EXPECT_EQ(recorder.steps[0].tokens, 4 * 23);
    EXPECT_FALSE(recorder.steps[4].valid_loss.has_value());
    EXPECT_TRUE(recorder.steps[5].valid_loss.has_value());
    EXPECT_EQ(recorder.checkpoints.size(), 10u);
    EXPECT_EQ(recorder.resumed_from, "");
    EXPECT_EQ(checkpoint_steps(wanted.run_dir + "/checkpoints"), (std::vector<std::int64_t>{36, 40}));
    // An epoch has 1500 targets in 66 rows, the last of which has 5; 40 steps are 160 rows, in which it comes up 2 or 3 times.
    EXPECT_THAT(recorder.steps.back().tokens, testing::AnyOf(160 * 23 - 2 * 18, 160 * 23 - 3 * 18));
    EXPECT_EQ(load_config(wanted.run_dir + "/config.yaml").model.vocab_size, 257);
    EXPECT_THAT(metrics(wanted), StartsWith("{\"step\":1,\"tokens\":92,\"loss\":5."));
}

TEST_F(TrainerTest, AccumulationChangesNothingButRounding) {
    for (const auto& [dtype, tolerance] : {std::pair{"float32", 1e-5}, std::pair{"float64", 1e-10}}) {
        Recorder whole;
        const RunConfig reference = config(fmt::format("whole_{}", dtype), {fmt::format("train.dtype={}", dtype)});
        run(reference, whole);
        for (const int micro : {2, 1}) {
            Recorder split;
            const RunConfig parts = config(fmt::format("micro_{}_{}", micro, dtype),
                                           {fmt::format("train.dtype={}", dtype), fmt::format("train.micro_batch={}", micro)});
            run(parts, split);
            for (std::size_t i = 0; i < whole.steps.size(); ++i) {
                EXPECT_NEAR(split.steps[i].loss, whole.steps[i].loss, tolerance * whole.steps[i].loss) << i;
                if (whole.steps[i].valid_loss) {
                    EXPECT_NEAR(*split.steps[i].valid_loss, *whole.steps[i].valid_loss, tolerance * whole.steps[i].loss);
                }
            }
            EXPECT_LT(weight_error(parts, reference), tolerance);
        }
    }
}

TEST_F(TrainerTest, ResumeIsExactWhereverTheRunIsKilled) {
    const RunConfig straight = config("straight");
    run(straight);
    const std::string expected = metrics(straight);
    for (const int threads : {1, 2}) {
        const RunConfig killed = config(fmt::format("killed_{}", threads), {fmt::format("train.num_threads={}", threads)});
        // After 3 steps there is no checkpoint yet; 8 is one; the others fall between.
        for (const std::int64_t step : {3, 8, 11, 18}) {
            Recorder recorder;
            recorder.kill_after = step;
            EXPECT_THROW(run(killed, recorder, Resume::automatic), Killed);
        }
        // Half a line and half a checkpoint, as a crash may leave them.
        { std::ofstream(killed.run_dir + "/metrics.jsonl", std::ios::app) << "{\"step\":19,\"tok"; }
        const std::vector<std::string> left_over{"config.yaml.tmp", "metrics.jsonl.tmp", "checkpoints/step_20.h5.tmp"};
        for (const auto& name : left_over) std::ofstream(killed.run_dir + "/" + name) << "half";
        fs::copy_file(checkpoint_path(killed.run_dir + "/checkpoints", 16), killed.run_dir + "/checkpoints/step_17.h5");
        fs::resize_file(killed.run_dir + "/checkpoints/step_17.h5", 5000);
        Recorder recorder;
        run(killed, recorder, Resume::automatic);
        EXPECT_EQ(recorder.resumed_from, checkpoint_path(killed.run_dir + "/checkpoints", 16));
        EXPECT_EQ(metrics(killed), expected);
        EXPECT_EQ(tensors(killed), tensors(straight));
        for (const auto& name : left_over) EXPECT_FALSE(fs::exists(killed.run_dir + "/" + name)) << name;
    }
}

TEST_F(TrainerTest, MixturesOfPackedDocumentsResumeExactly) {
    const RunConfig straight = config("straight", mixed());
    Recorder whole;
    run(straight, whole);
    EXPECT_LT(whole.steps.back().loss, whole.steps.front().loss - 1);
    const RunConfig killed = config("killed", mixed({"train.num_threads=2", "data.prefetch=0"}));
    for (const std::int64_t step : {3, 8, 11, 18}) {
        Recorder recorder;
        recorder.kill_after = step;
        EXPECT_THROW(run(killed, recorder, Resume::automatic), Killed);
    }
    run(killed, Resume::automatic);
    EXPECT_EQ(metrics(killed), metrics(straight));
    EXPECT_EQ(tensors(killed), tensors(straight));
}

// The trainer's mean over packed documents is that of every document alone.
TEST_F(TrainerTest, PackedDocumentsDoNotSeeEachOther) {
    for (const std::string type : {"transformer", "mamba2", "log_linear_mamba2", "gated_deltanet", "log_linear_gated_deltanet"}) {
        const std::vector<std::string> overrides = mixed({"model.type=" + type, "train.steps=3", "train.dtype=float64"});
        Recorder recorder;
        const RunConfig packed = config("packed_" + type, overrides);
        run(packed, recorder);
        const LoadedModel loaded = load_model(packed.run_dir, cpu_device, DType::float64);
        const data::TokenFile file(packed.data.valid);
        const auto& offsets = file.document_offsets();
        double sum = 0;
        std::int64_t count = 0;
        for (std::size_t d = 0; d + 1 < offsets.size(); ++d)
            for (std::int64_t begin = offsets[d]; begin < offsets[d + 1]; begin += 23) {
                const std::int64_t length = std::min<std::int64_t>(23, offsets[d + 1] - begin);
                std::vector<std::int32_t> tokens(static_cast<std::size_t>(length + 1), 256);  // behind the mark before
                const std::int64_t before = begin > 0 ? 1 : 0;
                file.read(begin - before, length + before, tokens.data() + 1 - before);
                const Shape shape{1, length};
                const auto result = loaded.model.loss(Tensor::from(std::vector<std::int32_t>(tokens.begin(), tokens.end() - 1), shape),
                                                      Tensor::from(std::vector<std::int32_t>(tokens.begin() + 1, tokens.end()), shape),
                                                      SequenceLayout::uniform(1, length), 1.0);
                sum += result.loss.value().item();
                count += length;
            }
        EXPECT_EQ(count, file.info().num_tokens);
        EXPECT_NEAR(*recorder.steps.back().valid_loss, sum / static_cast<double>(count), 1e-10) << type;
    }
}

TEST_F(TrainerTest, PrefetchChangesNothing) {
    const RunConfig none = config("none", mixed({"data.prefetch=0", "train.micro_batch=1"}));
    run(none);
    for (const int prefetch : {1, 2, 9}) {
        const RunConfig ahead = config(fmt::format("ahead_{}", prefetch), mixed({fmt::format("data.prefetch={}", prefetch),
                                                                                  "train.micro_batch=1"}));
        run(ahead);
        EXPECT_EQ(metrics(ahead), metrics(none));
        EXPECT_EQ(tensors(ahead), tensors(none));
    }
}

// Several chunks of tokens, and one of them with a flipped bit: what a run says when it comes to it.
struct DamagedTrainerTest : TrainerTest {
    static constexpr std::int64_t chunk_tokens = 1 << 15, chunks = 12;
    std::string path, good;

    void SetUp() override {
        TrainerTest::SetUp();
        write_tokens("train.h5", chunks * chunk_tokens, 1);
        path = (folder / "train.h5").string();
        good = read_file(path);
    }

    void damage(std::int64_t chunk) const {
        const auto position = hdf5::File::open(path).position_of_chunk<std::uint16_t>("tokens", chunk * chunk_tokens);
        std::string bytes = good;
        bytes.at(static_cast<std::size_t>(position) + 1000) ^= 1;
        write(bytes);
    }
    void write(const std::string& bytes) const {
        std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    }
    // Damages a chunk that steps before `least` do without and one from `least` to `most` needs; returns that step.
    std::int64_t damage_for_a_step(const RunConfig& wanted, std::int64_t least, std::int64_t most) const {
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
            damage(chunk);
            const data::Loader loader({.corpora = wanted.data.train, .sequence_length = wanted.data.sequence_length,
                                       .packing = wanted.data.packing, .seed = static_cast<std::uint64_t>(wanted.train.seed)});
            for (std::int64_t step = 1; step <= most; ++step) {
                const std::int64_t rows = wanted.train.batch_size;
                if (error_of([&] { (void)loader.read((step - 1) * rows, rows); }) == "no error") continue;
                if (step < least) break;
                return step;
            }
        }
        ADD_FAILURE() << "no chunk is first needed by steps " << least << " to " << most;
        return 0;
    }
    // What verify() says of the file, which is what a run says.
    std::string complaint() const {
        return error_of([&] { data::TokenFile(path).verify(); });
    }
};

// The run ends in one line, with a checkpoint of the last step done; mended, it goes on as if nothing had been.
TEST_F(DamagedTrainerTest, WhatWasTrainedIsSaved) {
    const std::vector<std::string> rarely{"train.checkpoint_every=0", "train.micro_batch=2"};
    const RunConfig straight = config("straight", rarely);
    run(straight);
    const std::int64_t step = damage_for_a_step(straight, 4, 15);
    const std::string said = complaint();
    EXPECT_THAT(said, testing::ContainsRegex("train.h5: chunk [0-9]+ of 'tokens' .tokens [0-9]+ to [0-9]+. is damaged: checksum "));
    for (const int prefetch : {0, 2}) {
        damage_for_a_step(straight, 4, 15);
        auto overrides = rarely;
        overrides.push_back(fmt::format("data.prefetch={}", prefetch));
        const RunConfig broken = config(fmt::format("broken_{}", prefetch), overrides);
        const std::string checkpoint = checkpoint_path(broken.run_dir + "/checkpoints", step - 1);
        Recorder recorder;
        EXPECT_EQ(error_of([&] { run(broken, recorder); }),
                  said + fmt::format("; step {} is saved: put the data right and go on with --resume auto", step - 1));
        EXPECT_EQ(recorder.steps.size(), static_cast<std::size_t>(step - 1));
        EXPECT_EQ(recorder.checkpoints, std::vector<std::string>{checkpoint});
        // As long as it is not mended, there is nothing more to save.
        Recorder again;
        EXPECT_EQ(error_of([&] { run(broken, again, Resume::automatic); }),
                  said + fmt::format("; step {} is saved: put the data right and go on with --resume auto", step - 1));
        EXPECT_TRUE(again.steps.empty() && again.checkpoints.empty());
        EXPECT_EQ(latest_complete(broken.run_dir + "/checkpoints"), checkpoint);
        write(good);
        EXPECT_EQ(run(broken, Resume::automatic).step, 20);
        EXPECT_EQ(metrics(broken), metrics(straight));
        EXPECT_EQ(tensors(broken), tensors(straight));
    }
}

TEST_F(DamagedTrainerTest, WhereNothingCanBeSaved) {
    const RunConfig wanted = config("a", {"train.keep_checkpoints=0"});
    damage_for_a_step(wanted, 4, 15);
    EXPECT_EQ(error_of([&] { run(wanted); }), complaint() + "; train.keep_checkpoints is 0, so nothing was saved");
    // In the first step there is nothing to save, and no folder stays.
    const RunConfig first = config("b");
    damage_for_a_step(first, 1, 1);
    EXPECT_EQ(error_of([&] { run(first); }), complaint());
    EXPECT_FALSE(fs::exists(folder / "b"));
}

// Validation data is read before the run begins; where it is damaged only then, the step that was to be validated is saved.
TEST_F(DamagedTrainerTest, ValidationData) {
    const std::string valid = (folder / "valid.h5").string();
    const RunConfig wanted = config("a", {"data.train=" + (folder / "train.h5").string(), "data.valid=" + path,
                                         "train.validate_tokens=40000", "data.train=" + valid});
    damage(1);
    EXPECT_EQ(error_of([&] { run(wanted); }), complaint());
    EXPECT_FALSE(fs::exists(folder / "a"));
    damage(2);  // beyond what a validation reads
    struct Cut : Recorder {
        const DamagedTrainerTest* test = nullptr;
        void on_start(const StartReport&) override { fs::resize_file(test->path, 1000); }
    } recorder;
    recorder.test = this;
    EXPECT_EQ(error_of([&] { run(wanted, recorder); }),
              path + ": chunk 0 of 'tokens' (tokens 0 to 32767) cannot be read; the file has become shorter; step 6 is saved: put the "
                     "data right and go on with --resume auto");
    ASSERT_EQ(recorder.steps.size(), 6u);
    EXPECT_EQ(recorder.steps.back().valid_loss, std::nullopt);
    EXPECT_THAT(metrics(wanted), HasSubstr("{\"step\":6,"));
    write(good);
    EXPECT_EQ(run(wanted, Resume::automatic).step, 20);
}

// Whatever is damaged, however few checkpoints are kept, and wherever the next run ends, the folder holds a good one.
TEST_F(TrainerTest, RotationNeverLeavesDamagedCheckpointsAlone) {
    for (const std::int64_t keep : {1, 2, 3})
        for (const std::int64_t steps : {9, 12, 14}) {
            run(config("a", {"train.steps=16", "train.keep_checkpoints=3"}));  // 8, 12, 16
            const std::string checkpoints = (folder / "a/checkpoints").string();
            for (const std::int64_t step : {12, 16}) fs::resize_file(checkpoint_path(checkpoints, step), 5000);
            Recorder recorder;
            run(config("a", {fmt::format("train.steps={}", steps), fmt::format("train.keep_checkpoints={}", keep)}), recorder,
                Resume::automatic);
            EXPECT_EQ(recorder.resumed_from, checkpoint_path(checkpoints, 8));
            EXPECT_EQ(latest_complete(checkpoints), checkpoint_path(checkpoints, steps));
            const auto left = checkpoint_steps(checkpoints);
            EXPECT_EQ(left.back(), steps);
            EXPECT_LE(static_cast<std::int64_t>(left.size()), keep);
            for (const auto step : left) EXPECT_NO_THROW(verify_checkpoint(checkpoint_path(checkpoints, step)));
            fs::remove_all(folder / "a");
        }
}

TEST_F(TrainerTest, NoCheckpointIsWrittenWhereNoneIsKept) {
    Recorder recorder;
    const EndReport end = run(config("a", {"train.steps=9", "train.keep_checkpoints=0"}), recorder);
    EXPECT_EQ(recorder.steps.size(), 9u);
    EXPECT_EQ(end.checkpoint, "");
    EXPECT_TRUE(checkpoint_steps((folder / "a/checkpoints").string()).empty());
    // What was done is lost, and the run begins anew.
    Recorder again;
    run(config("a", {"train.steps=9"}), again, Resume::automatic);
    EXPECT_EQ(again.resumed_from, "");
    ASSERT_EQ(again.steps.size(), 9u);
    EXPECT_EQ(again.steps.back().loss, recorder.steps.back().loss);
}

TEST_F(TrainerTest, ASecondRunInTheFolderIsRefused) {
    struct Second : Observer {
        RunConfig other;
        std::vector<std::string> errors;
        void on_step(const StepReport&) override {
            for (const Resume resume : {Resume::no, Resume::automatic}) errors.push_back(error_of([&] { run(other, resume); }));
        }
    } second;
    second.other = config("a", {"train.steps=3", "train.seed=9"});
    run(config("a", {"train.steps=3"}), second);
    ASSERT_EQ(second.errors.size(), 6u);
    for (const auto& error : second.errors)
        EXPECT_EQ(error, (folder / "a").string() +
                             ": another run is training in this folder; wait for its end, or give another run_dir");
    EXPECT_EQ(load_config((folder / "a/config.yaml").string()).train.seed, 5);
    EXPECT_EQ(run(config("a", {"train.steps=4"}), Resume::automatic).step, 4);  // free again
}

TEST_F(TrainerTest, EveryModelLearnsResumesExactlyAndMayRecompute) {
    for (const std::string type : {"transformer", "mamba2", "log_linear_mamba2", "gated_deltanet", "log_linear_gated_deltanet"}) {
        const auto configured = [&](const std::string& name, const std::string& recompute) {
            return config(type + name, {"model.type=" + type, "train.recompute=" + recompute, "train.steps=8"});
        };
        Recorder straight;
        run(configured("straight", "none"), straight);
        EXPECT_LT(straight.steps.back().loss, straight.steps.front().loss - 0.1) << type;

        Recorder killed;
        killed.kill_after = 6;
        EXPECT_THROW(run(configured("killed", "none"), killed), Killed);
        run(configured("killed", "none"), Resume::automatic);
        EXPECT_EQ(metrics(configured("killed", "none")), metrics(configured("straight", "none"))) << type;

        // Gradients may be added up in another order.
        for (const std::string recompute : {"mixer", "block"}) {
            Recorder recorder;
            run(configured(recompute, recompute), recorder);
            for (std::size_t i = 0; i < straight.steps.size(); ++i)
                EXPECT_NEAR(recorder.steps[i].loss, straight.steps[i].loss, 1e-5) << type << ", recompute " << recompute;
        }
    }
}

TEST_F(TrainerTest, ASignalEndsTheRunWithACheckpoint) {
    const RunConfig straight = config("straight"), stopped = config("stopped");
    run(straight);
    Recorder recorder;
    recorder.signal_after = 5;
    const EndReport end = run(stopped, recorder);
    EXPECT_EQ(end.signal, SIGTERM);
    EXPECT_EQ(end.step, 6);  // the step after the signal is finished
    EXPECT_EQ(end.checkpoint, checkpoint_path(stopped.run_dir + "/checkpoints", 6));
    EXPECT_EQ(latest_complete(stopped.run_dir + "/checkpoints"), end.checkpoint);
    EXPECT_EQ(run(stopped, Resume::automatic).signal, 0);
    EXPECT_EQ(metrics(stopped), metrics(straight));
    EXPECT_EQ(tensors(stopped), tensors(straight));
}

TEST_F(TrainerTest, AFinishedRunIsLeftAlone) {
    const RunConfig wanted = config("a", {"train.steps=4"});
    run(wanted);
    const std::string lines = read_file(wanted.run_dir + "/metrics.jsonl");
    EXPECT_EQ(error_of([&] { run(wanted); }),
              wanted.run_dir + " already holds a run; continue it with --resume auto, or give another run_dir");
    const std::string resolved = read_file(wanted.run_dir + "/config.yaml");
    for (const std::string steps : {"train.steps=4", "train.steps=3", "train.steps=1"}) {
        Recorder recorder;
        const EndReport end = run(config("a", {steps, "schedule.warmup_steps=0"}), recorder, Resume::automatic);
        EXPECT_TRUE(end.nothing_left);
        EXPECT_EQ(end.step, 4);
        EXPECT_TRUE(recorder.steps.empty() && recorder.checkpoints.empty());
        EXPECT_EQ(read_file(wanted.run_dir + "/metrics.jsonl"), lines);
        EXPECT_EQ(read_file(wanted.run_dir + "/config.yaml"), resolved);
        EXPECT_EQ(checkpoint_steps(wanted.run_dir + "/checkpoints"), std::vector<std::int64_t>{4});
    }
    // Longer: it goes on from there.
    EXPECT_EQ(run(config("a", {"train.steps=6"}), Resume::automatic).step, 6);
    EXPECT_THAT(read_file(wanted.run_dir + "/metrics.jsonl"), StartsWith(lines));
}

TEST_F(TrainerTest, ACheckpointOfAnotherModelIsRefused) {
    run(config("a", {"train.steps=4"}));
    EXPECT_EQ(error_of([&] { run(config("a", {"train.steps=8", "model.state_size=8"}), Resume::automatic); }),
              checkpoint_path((folder / "a/checkpoints").string(), 4) +
                  ": checkpoint of another model: model.state_size is 4 there, 8 here");
    EXPECT_EQ(error_of([&] { run(config("b", {"model.vocab_size=100"})); }),
              fmt::format("model.vocab_size is 100, but {}/train.h5 has token ids up to 256; use at least 257, or 0 to take it "
                          "from there", folder.string()));
}

// Ids outside the model's vocabulary would be read from behind its table.
TEST_F(TrainerTest, AValidationFileOfAnotherVocabularyIsRefused) {
    const std::string valid = (folder / "valid.h5").string();
    hdf5::File file = hdf5::File::open_append(valid);
    file.set_attribute("/", "vocab_size", std::int64_t{300});
    file.close();
    EXPECT_EQ(error_of([&] { run(config("a", {})); }),
              fmt::format("{}: its tokenizer is not that of {}/train.h5; tokenize both with the same one", valid, folder.string()));
}

// The place in the data is kept as a number of rows, which of other data are other rows.
TEST_F(TrainerTest, DataThatWasReplacedIsRefused) {
    const std::string train = (folder / "train.h5").string(), kept = (folder / "kept.h5").string();
    run(config("a", {"train.steps=4"}));
    fs::copy_file(train, kept);
    write_tokens("train.h5", 1501, 9);
    const std::string checkpoint = checkpoint_path((folder / "a/checkpoints").string(), 4);
    EXPECT_THAT(error_of([&] { run(config("a", {"train.steps=8"}), Resume::automatic); }),
                StartsWith(checkpoint + ": the data it was trained on has been replaced: " + train + " holds another text"));
    // Other data that the config names, and the old data at another place
    EXPECT_EQ(run(config("a", {"train.steps=5", "data.train=" + kept}), Resume::automatic).step, 5);
    EXPECT_EQ(run(config("a", {"train.steps=6"}), Resume::automatic).step, 6);
    EXPECT_EQ(run(config("a", {"train.steps=7"}), Resume::automatic).step, 7);
    // The same text made again
    write_tokens("train.h5", 1501, 9);
    EXPECT_EQ(run(config("a", {"train.steps=8"}), Resume::automatic).step, 8);
}

TEST_F(TrainerTest, ARunThatFailsAtOnceLeavesNoFolder) {
    struct Failing : Observer {
        void on_step(const StepReport&) override { fail("no"); }
    } failing;
    const RunConfig wanted = config("a", {"train.log_every=7", "train.validate_every=0"});
    EXPECT_EQ(error_of([&] { run(wanted, failing); }), "no");
    EXPECT_FALSE(fs::exists(folder / "a"));
    fs::create_directories(folder / "a");
    std::ofstream(folder / "a/notes.txt") << "mine";
    EXPECT_EQ(error_of([&] { run(wanted, failing); }), "no");
    EXPECT_EQ(std::distance(fs::directory_iterator(folder / "a"), {}), 1);
    // What it has logged stays.
    EXPECT_EQ(error_of([&] { run(config("a", {"train.log_every=1"}), failing); }), "no");
    EXPECT_TRUE(fs::exists(folder / "a/config.yaml"));
    EXPECT_EQ(metrics(wanted).find("{\"step\":1,"), 0u);
    EXPECT_EQ(run(wanted, Resume::automatic).step, 20);
    // Nor does one go that fails later.
    EXPECT_EQ(error_of([&] { run(config("a", {"train.steps=30"}), failing, Resume::automatic); }), "no");
    EXPECT_TRUE(fs::exists(folder / "a/checkpoints/step_20.h5"));
}

TEST_F(TrainerTest, LossesThatAreNotFinite) {
    // Weights explode after the first update.
    const std::vector<std::string> explosive{"optimizer.learning_rate=1e30", "schedule.warmup_steps=0", "train.steps=3"};
    EXPECT_THAT(error_of([&] { run(config("stop", explosive)); }),
                testing::AllOf(StartsWith("step 2: the loss is "), HasSubstr("first tensor that is not finite: ")));
    auto skipping = explosive;
    skipping.push_back("train.on_nan=skip");
    Recorder recorder;
    const RunConfig wanted = config("skip", skipping);
    run(wanted, recorder);
    ASSERT_EQ(recorder.steps.size(), 3u);
    EXPECT_FALSE(recorder.steps[0].skipped);
    EXPECT_TRUE(recorder.steps[1].skipped);
    EXPECT_THAT(metrics(wanted), HasSubstr("\"skipped\":true"));
}

TEST_F(TrainerTest, TheValidationLossIsThatOfTheSavedModel) {
    Recorder recorder;
    const RunConfig wanted = config("a", {"train.steps=5"});
    run(wanted, recorder);
    const LoadedModel loaded = load_model(wanted.run_dir);
    EXPECT_EQ(loaded.step, 5);
    EXPECT_EQ(loaded.tokenizer.kind, "bytes");
    const data::TokenFile file(wanted.data.valid);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(file.info().num_tokens));
    file.read(0, file.info().num_tokens, tokens.data());
    // Windows of 23 targets, one by one, the tail as short as it is.
    double sum = 0;
    std::int64_t count = 0;
    for (std::size_t begin = 0; begin + 1 < tokens.size(); begin += 23) {
        const std::size_t length = std::min<std::size_t>(23, tokens.size() - 1 - begin);
        const auto at = [&](std::size_t i) { return tokens.begin() + static_cast<std::ptrdiff_t>(i); };
        const std::vector<std::int32_t> inputs(at(begin), at(begin + length)), targets(at(begin + 1), at(begin + 1 + length));
        const Shape shape{1, static_cast<std::int64_t>(length)};
        const auto result = loaded.model.loss(Tensor::from(inputs, shape), Tensor::from(targets, shape),
                                              SequenceLayout::uniform(1, shape[1]), 1.0);
        sum += result.loss.value().item();
        count += shape[1];
    }
    EXPECT_EQ(count, 332);
    EXPECT_NEAR(*recorder.steps.back().valid_loss, sum / static_cast<double>(count), 1e-5);

    Recorder limited;
    run(config("b", {"train.steps=5", "train.validate_tokens=40"}), limited);  // two rows of 23
    EXPECT_NE(*limited.steps.back().valid_loss, *recorder.steps.back().valid_loss);
}

// All processes work in rank 0's folder.
class SharedFolder {
public:
    SharedFolder(fs::path& folder, Communicator& world) : folder_(folder), own_(folder), world_(world) {
        const Tensor process = Tensor::full({1}, static_cast<double>(getpid()), DType::float64);
        world.broadcast(process, 0);
        folder = fs::path(testing::TempDir()) / fmt::format("fenwick_trainer_{}", static_cast<std::int64_t>(process.item()));
    }
    ~SharedFolder() {
        world_.barrier();
        folder_ = own_;
    }
    SharedFolder(const SharedFolder&) = delete;
    SharedFolder& operator=(const SharedFolder&) = delete;

private:
    fs::path& folder_;
    fs::path own_;
    Communicator& world_;
};

using MpiTrainer = TrainerTest;

// Several processes give the run of one, up to rounding; resume keeps working.
TEST_F(MpiTrainer, EqualsOneProcess) {
    if (mpi_world().size() == 1) GTEST_SKIP() << "runs under mpirun (ctest: train_mpi_2, train_mpi_4)";
    Communicator& world = mpi_world();
    const SharedFolder shared(folder, world);
    int number = 0;
    for (const auto& [dtype, tolerance, micro, packed] :
         {std::tuple{"float32", 1e-5, 2, false}, std::tuple{"float32", 1e-5, 1, true}, std::tuple{"float64", 1e-10, 2, true},
          std::tuple{"float64", 1e-10, 1, false}}) {
        std::vector<std::string> overrides{fmt::format("train.dtype={}", dtype), "train.batch_size=8",
                                           fmt::format("train.micro_batch={}", micro)};
        if (packed) overrides = mixed(overrides);
        const RunConfig together = config(fmt::format("together_{}", ++number), overrides);
        const RunConfig alone = config(fmt::format("alone_{}", number), overrides);
        Recorder several, one;
        EXPECT_EQ(train(together, Resume::no, world, several).step, 20);
        if (world.is_root()) {
            run(alone, one);
            for (std::size_t i = 0; i < one.steps.size(); ++i) {
                EXPECT_NEAR(several.steps[i].loss, one.steps[i].loss, tolerance * one.steps[i].loss) << i;
                EXPECT_EQ(several.steps[i].tokens, one.steps[i].tokens);
            }
            EXPECT_NEAR(*several.steps.back().valid_loss, *one.steps.back().valid_loss, tolerance * one.steps.back().loss);
            EXPECT_LT(weight_error(together, alone), tolerance);
            // As after a crash: the last checkpoint is lost.
            fs::remove(checkpoint_path(together.run_dir + "/checkpoints", 20));
        }
        const auto before = world.is_root() ? metrics(together) : "";
        if (world.is_root()) {  // one process goes on where several were
            fs::copy(together.run_dir, folder / "continued", fs::copy_options::recursive);
            const RunConfig continued = config("continued", overrides);
            Recorder recorder;
            run(continued, recorder, Resume::automatic);
            EXPECT_EQ(recorder.steps.size(), 4u);
            for (std::size_t i = 0; i < recorder.steps.size(); ++i) {
                EXPECT_NEAR(recorder.steps[i].loss, one.steps[16 + i].loss, tolerance * one.steps[16 + i].loss);
                EXPECT_EQ(recorder.steps[i].tokens, one.steps[16 + i].tokens);
            }
            fs::remove_all(folder / "continued");
        }
        world.barrier();
        Recorder resumed;
        train(together, Resume::automatic, world, resumed);
        if (world.is_root()) {
            EXPECT_EQ(resumed.resumed_from, checkpoint_path(together.run_dir + "/checkpoints", 16));
            EXPECT_EQ(metrics(together), before);
            fs::remove(checkpoint_path(alone.run_dir + "/checkpoints", 20));
        }
        // Several go on where one was.
        Recorder taken_over;
        train(alone, Resume::automatic, world, taken_over);
        if (world.is_root()) {
            ASSERT_EQ(taken_over.steps.size(), 4u);
            for (std::size_t i = 0; i < 4; ++i) {
                EXPECT_NEAR(taken_over.steps[i].loss, one.steps[16 + i].loss, tolerance * one.steps[16 + i].loss);
                EXPECT_EQ(taken_over.steps[i].tokens, one.steps[16 + i].tokens);
            }
        }
    }
}

using MpiDamagedTrainer = DamagedTrainerTest;

// One process meets the damage; all of them end, one of them speaks, and the last step done is saved.
TEST_F(MpiDamagedTrainer, AllEndTogether) {
    if (mpi_world().size() == 1) GTEST_SKIP() << "runs under mpirun (ctest: train_mpi_2, train_mpi_4)";
    Communicator& world = mpi_world();
    const SharedFolder shared(folder, world);
    path = (folder / "train.h5").string();
    const RunConfig wanted = config("a", {"train.checkpoint_every=0"});
    const Tensor step = Tensor::full({1}, 0.0, DType::float64);
    if (world.is_root()) *step.as<double>() = static_cast<double>(damage_for_a_step(wanted, 4, 15));
    world.broadcast(step, 0);
    const auto last = static_cast<std::int64_t>(step.item()) - 1;
    Observer silent;
    bool speaks = false;
    try {
        train(wanted, Resume::no, world, silent);
        ADD_FAILURE() << "no error";
    } catch (const SharedError& error) {
        speaks = error.speaks;
        if (speaks) {
            EXPECT_EQ(error.what(), complaint() + fmt::format("; step {} is saved: put the data right and go on with --resume auto", last));
        }
    }
    const Tensor speakers = Tensor::full({1}, speaks ? 1.0 : 0.0, DType::float64);
    world.all_reduce_sum(speakers);
    EXPECT_GE(speakers.item(), 1);
    EXPECT_EQ(latest_complete(wanted.run_dir + "/checkpoints"), checkpoint_path(wanted.run_dir + "/checkpoints", last));
    world.barrier();
    if (world.is_root()) write(good);
    world.barrier();
    EXPECT_EQ(train(wanted, Resume::automatic, world, silent).step, 20);
}

}  // namespace
}  // namespace fenwick::train
