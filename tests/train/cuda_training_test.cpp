// The same training on a GPU: agreement with the CPU, exact resume, NCCL. Skipped where there is no GPU.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "base/hdf5.h"
#include "base/log.h"
#include "base/memory_cuda.h"
#include "base/parallel.h"
#include "base/random.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "train/checkpoint.h"
#include "train/trainer.h"

namespace fenwick::train {
namespace {

namespace fs = std::filesystem;

struct Killed {};

struct Losses : Observer {
    std::vector<double> losses;
    std::vector<std::vector<double>> reports;  // loss, gradient norm, validation loss
    std::int64_t kill_after = -1;
    void on_step(const StepReport& report) override {
        losses.push_back(report.loss);
        reports.push_back({report.loss, report.grad_norm, report.valid_loss.value_or(0)});
        if (report.step == kill_after) throw Killed();
    }
};

struct CudaTrainingTest : testing::TestWithParam<const char*> {
    fs::path folder;

    void SetUp() override {
        if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
        spdlog::set_level(spdlog::level::off);
        folder = fs::path(testing::TempDir()) / fmt::format("fenwick_cuda_training_{}", getpid());
        fs::remove_all(folder);
        fs::create_directories(folder);
        // Text whose next byte can be learned; an odd number of tokens.
        const auto tokenizer = data::open_tokenizer("bytes");
        data::TokenFileWriter writer((folder / "train.h5").string(), *tokenizer);
        Random random(1);
        std::vector<std::int32_t> ids;
        for (std::int64_t i = 0; i < 6000; ++i)
            ids.push_back(static_cast<std::int32_t>('a' + (i % 7) + (random.below(8) == 0 ? 7 : 0)));
        writer.append(ids.data(), static_cast<std::int64_t>(ids.size()));
        writer.end_document(6000, 1);
        writer.finish();
        // The same in documents of random lengths, one in three of its mark alone.
        data::TokenFileWriter documents((folder / "documents.h5").string(), *tokenizer);
        for (std::int64_t begin = 0; begin < 6000;) {
            const auto length = std::min<std::int64_t>(random.below(3) == 0 ? 0 : static_cast<std::int64_t>(random.below(250)), 6000 - begin);
            documents.append(ids.data() + begin, length);
            documents.end_document(length, 1);
            begin += length;
        }
        documents.finish();
    }
    void TearDown() override {
        fs::remove_all(folder);
        spdlog::set_level(spdlog::level::info);
    }

    RunConfig config(const std::string& run, std::vector<std::string> overrides) const {
        const std::string type = GetParam();
        const std::string shape = type == "transformer"                            ? "num_heads: 2, head_dim: 64"
                                  : type.find("mamba2") != std::string::npos ? "num_heads: 4, head_dim: 32, state_size: 32"
                                                                                   : "num_heads: 2, head_dim: 32";
        const std::string text = fmt::format(R"(run_dir: {0}/{1}
model: {{type: {2}, hidden_size: 64, num_layers: 2, {3}, intermediate_size: 128}}
data: {{train: {0}/train.h5, valid: {0}/train.h5, sequence_length: 97}}
optimizer: {{learning_rate: 0.003}}
schedule: {{warmup_steps: 5}}
train: {{steps: 50, batch_size: 4, micro_batch: 2, validate_tokens: 200, seed: 5, device: cuda}}
)", folder.string(), run, type, shape);
        return parse_config(text, "test.yaml", overrides);
    }

    static void run(const RunConfig& config, Observer& observer, Resume resume = Resume::no) {
        const auto communicator = single_process();
        train(config, resume, *communicator, observer);
    }

    static std::map<std::string, std::vector<double>> tensors(const RunConfig& config) {
        const auto file = hdf5::File::open(checkpoint_path(config.run_dir + "/checkpoints", config.train.steps));
        std::map<std::string, std::vector<double>> all;
        for (const std::string group : {"weights", "optimizer"})
            for (const auto& name : file.all_datasets(group)) all[name + " of " + group] = file.read<double>(group + "/" + name);
        return all;
    }
};

INSTANTIATE_TEST_SUITE_P(Models, CudaTrainingTest,
                         testing::Values("transformer", "mamba2", "log_linear_mamba2", "gated_deltanet",
                                         "log_linear_gated_deltanet"),
                         [](const auto& info) { return std::string(info.param); });

// Runs `body`; skips where the build has no CUDA code for an operator of the model.
#define RUN_OR_SKIP(body)                                                                             \
    try {                                                                                             \
        body;                                                                                         \
    } catch (const Error& error) {                                                                    \
        if (std::string(error.what()).find("built without CUDA code") == std::string::npos) throw;    \
        GTEST_SKIP() << error.what();                                                                 \
    }

TEST_P(CudaTrainingTest, AgreesWithTheCpuInFloat32) {
    Losses cpu, gpu;
    RUN_OR_SKIP(run(config("gpu", {}), gpu));
    run(config("cpu", {"train.device=cpu"}), cpu);
    ASSERT_EQ(cpu.losses.size(), 50u);
    ASSERT_EQ(gpu.losses.size(), 50u);
    for (std::size_t i = 0; i < 50; ++i) EXPECT_NEAR(gpu.losses[i], cpu.losses[i], 1e-3 * cpu.losses[i]) << "step " << i + 1;
    EXPECT_LT(gpu.losses.back(), 0.6 * gpu.losses.front());
    EXPECT_NEAR(gpu.reports.back()[2], cpu.reports.back()[2], 1e-3 * cpu.reports.back()[2]);
}

// Every batch has another number of documents.
TEST_P(CudaTrainingTest, PackedDocumentsAgreeWithTheCpu) {
    const std::string documents = (folder / "documents.h5").string();
    for (const std::string packing : {"documents", "masked_stream"}) {
        const std::vector<std::string> overrides{"data.packing=" + packing, "data.train=" + documents, "data.valid=" + documents,
                                                 "train.steps=20"};
        auto on_cpu = overrides;
        on_cpu.push_back("train.device=cpu");
        Losses cpu, gpu;
        RUN_OR_SKIP(run(config("gpu_" + packing, overrides), gpu));
        run(config("cpu_" + packing, on_cpu), cpu);
        ASSERT_EQ(gpu.losses.size(), 20u);
        for (std::size_t i = 0; i < 20; ++i) EXPECT_NEAR(gpu.losses[i], cpu.losses[i], 1e-3 * cpu.losses[i]) << "step " << i + 1;
        EXPECT_NEAR(gpu.reports.back()[2], cpu.reports.back()[2], 1e-3 * cpu.reports.back()[2]);
    }
}

TEST_P(CudaTrainingTest, PrefetchChangesNoBit) {
    const std::string documents = (folder / "documents.h5").string();
    std::vector<std::string> overrides{"data.packing=documents", "data.train=" + documents, "train.micro_batch=1",
                                       "train.dtype=bfloat16", "train.steps=15", "data.prefetch=0"};
    Losses expected;
    const RunConfig none = config("none", overrides);
    RUN_OR_SKIP(run(none, expected));
    for (const std::string prefetch : {"1", "3", "12"}) {
        overrides.back() = "data.prefetch=" + prefetch;
        Losses found;
        const RunConfig ahead = config("ahead_" + prefetch, overrides);
        run(ahead, found);
        EXPECT_EQ(found.reports, expected.reports) << "prefetch " << prefetch;
        EXPECT_EQ(tensors(ahead), tensors(none)) << "prefetch " << prefetch;
    }
}

TEST_P(CudaTrainingTest, LearnsTheSameInBfloat16) {
    Losses full, half;
    RUN_OR_SKIP(run(config("half", {"train.dtype=bfloat16"}), half));
    run(config("full", {}), full);
    for (std::size_t i = 0; i < 50; ++i) EXPECT_NEAR(half.losses[i], full.losses[i], 0.05 * full.losses[i]) << "step " << i + 1;
}

TEST_P(CudaTrainingTest, RoundsToTf32OnlyWhenAsked) {
    Losses before, rounded, after;
    RUN_OR_SKIP(run(config("before", {"train.steps=6"}), before));
    run(config("rounded", {"train.steps=6", "train.tf32=true"}), rounded);
    run(config("after", {"train.steps=6"}), after);
    EXPECT_EQ(after.reports, before.reports);
    EXPECT_NE(rounded.losses, before.losses);
    for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(rounded.losses[i], before.losses[i], 0.01 * before.losses[i]) << "step " << i + 1;
}

TEST_P(CudaTrainingTest, ResumesToTheBitAndRecomputesToTheBit) {
    for (const std::string dtype : {"float32", "bfloat16"}) {
        const std::vector<std::string> common{"train.dtype=" + dtype, "train.steps=12", "train.checkpoint_every=5"};
        const RunConfig whole = config("whole_" + dtype, common), cut = config("cut_" + dtype, common);
        Losses uninterrupted, first, second;
        RUN_OR_SKIP(run(whole, uninterrupted));
        first.kill_after = 8;
        EXPECT_THROW(run(cut, first), Killed);
        run(cut, second, Resume::automatic);
        EXPECT_EQ(second.reports.size(), 7u);  // from the checkpoint of step 5
        for (std::size_t i = 0; i < second.reports.size(); ++i) EXPECT_EQ(second.reports[i], uninterrupted.reports[5 + i]);
        EXPECT_EQ(tensors(cut), tensors(whole));
        for (const std::string recompute : {"mixer", "block"}) {
            auto overrides = common;
            overrides.push_back("train.recompute=" + recompute);
            Losses again;
            run(config(recompute + dtype, overrides), again);
            EXPECT_EQ(again.losses.front(), uninterrupted.losses.front()) << recompute;
        }
    }
}

TEST_P(CudaTrainingTest, NcclWithOneProcessChangesNoBit) {
    const char* const before = std::getenv("FENWICK_NCCL");
    const std::string kept = before != nullptr ? before : "";
    const std::vector<std::string> common{"train.steps=6"};
    const RunConfig plain = config("plain", common), over_nccl = config("nccl", common);
    Losses expected, found;
    RUN_OR_SKIP(run(plain, expected));
    setenv("FENWICK_NCCL", "1", 1);
    {
        const auto communicator = make_communicator();
        train(over_nccl, Resume::no, *communicator, found);
        const Tensor values = Tensor::full({5}, 3.0, DType::float32, Device{DeviceType::cuda, 0});
        communicator->all_reduce_sum(values);
        communicator->broadcast(values, 0);
        EXPECT_EQ(values.to_vector<double>(), std::vector<double>(5, 3.0));
    }
    if (before != nullptr)
        setenv("FENWICK_NCCL", kept.c_str(), 1);
    else
        unsetenv("FENWICK_NCCL");
    EXPECT_EQ(found.reports, expected.reports);
    EXPECT_EQ(tensors(over_nccl), tensors(plain));
}

}  // namespace
}  // namespace fenwick::train
