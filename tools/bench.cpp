// CPU benchmarks (Google Benchmark): the operators at growing lengths, a training step against what OpenBLAS alone takes for
// its matrix products, and reading of token files. docs/benchmarks/ holds figures with machine and command.
#include <benchmark/benchmark.h>
#include <cblas.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "base/parallel.h"
#include "base/random.h"
#include "data/loader.h"
#include "data/token_file.h"
#include "kernels/cpu/blas.h"
#include "kernels/levels.h"
#include "model/language_model.h"
#include "train/config.h"
#include "train/optimizer.h"

extern "C" void openblas_set_num_threads(int count);

namespace {

using namespace fenwick;

Tensor normal(Shape shape, double deviation, std::uint64_t seed) {
    Random random(seed);
    std::vector<float> values(static_cast<std::size_t>(count_of(shape)));
    for (auto& value : values) value = static_cast<float>(deviation * random.normal());
    return Tensor::from(values, std::move(shape));
}

// log_linear_ssd of one row: H 4, K 64, V 64, G 1, the levels that T needs.
struct SsdInputs {
    static constexpr std::int64_t heads = 4, key_width = 64, value_width = 64;
    explicit SsdInputs(std::int64_t length, bool levels, bool gradients)
        : q(normal({1, length, key_width}, 0.3, 1), gradients),
          k(normal({1, length, key_width}, 0.3, 2), gradients),
          v(normal({1, length, heads * value_width}, 1.0, 3), gradients),
          g(Tensor::full({1, length, heads}, -0.05, DType::float32), gradients),
          layout(SequenceLayout::uniform(1, length)) {
        if (levels) {
            const std::int64_t count = kernels::levels_needed(static_cast<std::uint64_t>(length));
            level_scales = Variable(normal({1, length, heads * count}, 0.5, 4), gradients);
        }
    }
    Variable run() const { return ops::ssd(q, k, v, g, level_scales, {.heads = heads, .groups = 1}, layout); }

    Variable q, k, v, g, level_scales;
    SequenceLayout layout;
};

void count_tokens(benchmark::State& state, std::int64_t tokens) {
    state.counters["time_per_token"] =
        benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void ssd_forward(benchmark::State& state, bool levels) {
    const SsdInputs inputs(state.range(0), levels, false);
    for (auto _ : state) benchmark::DoNotOptimize(inputs.run().value().data());
    count_tokens(state, state.range(0));
}

void ssd_forward_backward(benchmark::State& state, bool levels) {
    const SsdInputs inputs(state.range(0), levels, true);
    for (auto _ : state) {
        Tape tape;
        Variable o;
        {
            Recording recording(tape);
            o = inputs.run();
        }
        tape.backward(o);
        for (const Variable* input : {&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.level_scales})
            if (input->requires_grad()) input->gradient()->clear();
    }
    count_tokens(state, state.range(0));
}

BENCHMARK_CAPTURE(ssd_forward, log_linear, true)->RangeMultiplier(2)->Range(1 << 10, 1 << 16)->UseRealTime();
BENCHMARK_CAPTURE(ssd_forward_backward, log_linear, true)->RangeMultiplier(2)->Range(1 << 10, 1 << 16)->UseRealTime();
BENCHMARK_CAPTURE(ssd_forward, linear, false)->RangeMultiplier(8)->Range(1 << 10, 1 << 16)->UseRealTime();
BENCHMARK_CAPTURE(ssd_forward_backward, linear, false)->RangeMultiplier(8)->Range(1 << 10, 1 << 16)->UseRealTime();

// ---- training steps of the quickstart models ----------------------------------------------------------------------------

constexpr std::int64_t vocabulary = 4096;  // as tools/quickstart makes it

// configs/quickstart/<name>.yaml for rows of `length` tokens; 0: as configured
train::RunConfig quickstart_config(const std::string& name, std::int64_t length = 0) {
    std::vector<std::string> overrides = {"model.vocab_size=" + std::to_string(vocabulary), "train.tokens=0", "train.steps=1000"};
    if (length > 0) overrides.push_back("data.sequence_length=" + std::to_string(length));
    return train::load_config(std::string(FENWICK_SOURCE_DIR) + "/configs/quickstart/" + name + ".yaml", overrides);
}

// The matrix products of projections and head of a quickstart step, forward and both gradients, by OpenBLAS alone with all
// threads: what training is measured against.
class QuickstartProducts {
public:
    QuickstartProducts() {
        const auto run = quickstart_config("log_linear_mamba2");
        const auto& config = run.model;
        rows_ = run.train.batch_size * run.data.sequence_length;
        const std::int64_t width = config.hidden_size, inner = config.num_heads * config.head_dim;
        const std::int64_t projected =
            2 * inner + 2 * config.n_groups * config.state_size + config.num_heads * (1 + config.num_levels);
        products_ = {{width, projected, config.num_layers}, {inner, width, config.num_layers},
                     {width, config.mlp_width(), 2 * config.num_layers}, {config.mlp_width(), width, config.num_layers},
                     {width, config.vocab_size, 1}};
        const std::int64_t widest = std::max({projected, inner, config.mlp_width(), config.vocab_size});
        x_ = normal({rows_, widest}, 1.0, 1);
        w_ = normal({widest, widest}, 1.0, 2);
        y_ = normal({rows_, widest}, 1.0, 3);
    }

    double flops() const {
        double sum = 0;
        for (const auto& p : products_) sum += 6.0 * static_cast<double>(rows_ * p.in * p.out * p.times);
        return sum;
    }

    double seconds() const {
        const auto start = std::chrono::steady_clock::now();
        openblas_set_num_threads(num_threads());
        float *x = x_.as<float>(), *w = w_.as<float>(), *y = y_.as<float>();
        for (const auto& p : products_)
            for (std::int64_t i = 0; i < p.times; ++i) {
                kernels::cpu::blas_gemm(false, true, rows_, p.out, p.in, 1.f, x, p.in, w, p.in, 0.f, y, p.out);
                kernels::cpu::blas_gemm(false, false, rows_, p.in, p.out, 1.f, y, p.out, w, p.in, 0.f, x, p.in);
                kernels::cpu::blas_gemm(true, false, p.out, p.in, rows_, 1.f, y, p.out, x, p.in, 0.f, w, p.in);
            }
        benchmark::ClobberMemory();
        openblas_set_num_threads(1);
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }

private:
    struct Product {
        std::int64_t in, out, times;
    };
    std::int64_t rows_ = 0;
    std::vector<Product> products_;
    Tensor x_, w_, y_;
};

// With `against_products`, each step is followed by its products, and the counters say how they compare.
void training_step(benchmark::State& state, const std::string& name, std::int64_t rows, std::int64_t length, bool against_products) {
    const auto config = quickstart_config(name, length);
    if (length == 0) length = config.data.sequence_length;
    model::LanguageModel model(config.model, cpu_device, DType::float32, DType::float32);
    model.initialize(1);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * length));
    Random random(5);
    for (auto& id : ids) id = static_cast<std::int32_t>(random.below(vocabulary));
    const Tensor tokens = Tensor::from(ids, {rows, length});
    const auto layout = SequenceLayout::uniform(rows, length);
    train::Optimizer optimizer(model.parameters(), config.optimizer);
    std::int64_t step = 0;
    std::optional<QuickstartProducts> products;
    if (against_products) products.emplace();
    double step_seconds = 0, product_seconds = 0;
    for (auto _ : state) {
        const auto start = std::chrono::steady_clock::now();
        Tape tape;
        {
            Recording recording(tape);
            const auto loss = model.loss(tokens, tokens, layout, static_cast<double>(ids.size()));
            tape.backward(loss.loss);
        }
        optimizer.update(++step, 1e-6, optimizer.gradient_norm());
        optimizer.zero_gradients();
        step_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (products) {
            state.PauseTiming();
            product_seconds += products->seconds();
            state.ResumeTiming();
        }
    }
    if (products) {
        state.counters["products_over_step"] = product_seconds / step_seconds;
        state.counters["products_GFLOP/s"] = products->flops() * static_cast<double>(state.iterations()) * 1e-9 / product_seconds;
    }
    state.counters["tokens_per_s"] =
        benchmark::Counter(static_cast<double>(ids.size()), benchmark::Counter::kIsIterationInvariantRate);
}

void register_training_steps() {
    const auto quickstart = quickstart_config("log_linear_mamba2");
    benchmark::RegisterBenchmark("training_step/quickstart", training_step, std::string("log_linear_mamba2"),
                                 quickstart.train.batch_size, std::int64_t{0}, true)
        ->UseRealTime()->Unit(benchmark::kMillisecond);
    for (const std::string name : {"transformer", "mamba2", "log_linear_mamba2", "gated_deltanet", "log_linear_gated_deltanet"})
        for (const std::int64_t length : {1 << 10, 1 << 12, 1 << 14})
            benchmark::RegisterBenchmark(("training_step/" + name + "/" + std::to_string(length)).c_str(), training_step, name,
                                         std::int64_t{1}, length, false)
                ->UseRealTime()->Unit(benchmark::kMillisecond);
}

// ---- reading --------------------------------------------------------------------------------------------------------------

// A token file that is larger than what a reader keeps decoded, gone at the end: lengths of documents vary as those of text do.
class BenchmarkCorpus {
public:
    static const std::string& path(int deflate) {
        static BenchmarkCorpus corpora[2];
        BenchmarkCorpus& corpus = corpora[deflate > 0];
        if (corpus.path_.empty()) corpus.write(deflate);
        return corpus.path_;
    }
    ~BenchmarkCorpus() {
        if (!path_.empty()) std::filesystem::remove(path_);
    }

private:
    void write(int deflate) {
        path_ = (std::filesystem::temp_directory_path() / ("fenwick_bench_" + std::to_string(getpid()) + "_" + std::to_string(deflate))).string();
        data::TokenFileWriter writer(path_, *data::open_tokenizer("bytes"), deflate);
        Random random(1);
        std::vector<std::int32_t> ids;
        for (std::int64_t tokens = 0; tokens < std::int64_t{1} << 27; tokens += static_cast<std::int64_t>(ids.size()) + 1) {
            ids.resize(static_cast<std::size_t>(std::exp(6.0 + 1.2 * random.normal())) + 1);
            for (auto& id : ids) id = static_cast<std::int32_t>(random.below(256));
            writer.append(ids.data(), static_cast<std::int64_t>(ids.size()));
            writer.end_document(1, 1);
        }
        writer.finish();
    }
    std::string path_;
};

constexpr std::int64_t batch_rows = 16;  // of 2,048 tokens

data::Loader benchmark_loader(data::Packing packing, int deflate) {
    return data::Loader({.corpora = {{BenchmarkCorpus::path(deflate)}}, .sequence_length = 2048, .packing = packing, .seed = 1});
}

// A whole epoch, in which every chunk's checksum is compared once.
void read_first_epoch(benchmark::State& state, data::Packing packing, int deflate) {
    BenchmarkCorpus::path(deflate);
    std::int64_t tokens = 0;
    for (auto _ : state) {
        const data::Loader loader = benchmark_loader(packing, deflate);
        for (std::int64_t row = 0; row < loader.rows_per_epoch(); row += batch_rows) tokens += loader.read(row, batch_rows).valid_targets;
    }
    state.counters["tokens_per_s"] = benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsRate);
}

// Batches after that.
void read_batches(benchmark::State& state, data::Packing packing, int deflate) {
    static std::map<std::pair<data::Packing, int>, data::Loader> loaders;  // that have read their first epoch
    auto found = loaders.find({packing, deflate});
    if (found == loaders.end()) {
        found = loaders.emplace(std::pair(packing, deflate), benchmark_loader(packing, deflate)).first;
        for (std::int64_t row = 0; row < found->second.rows_per_epoch(); row += batch_rows)
            benchmark::DoNotOptimize(found->second.read(row, batch_rows));
    }
    const data::Loader& loader = found->second;
    std::int64_t row = loader.rows_per_epoch(), tokens = 0;
    for (auto _ : state) {
        tokens += loader.read(row, batch_rows).valid_targets;
        row += batch_rows;
    }
    state.counters["tokens_per_s"] = benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsRate);
    state.counters["fill"] = loader.fill();
}

// What a run does before its first batch.
void open_corpus(benchmark::State& state, data::Packing packing) {
    BenchmarkCorpus::path(0);
    for (auto _ : state) {
        const data::Loader loader = benchmark_loader(packing, 0);
        benchmark::DoNotOptimize(loader.rows_per_epoch());
    }
}

void register_reading() {
    using data::Packing;
    struct Mode {
        std::string name;
        Packing packing;
        int deflate;
    };
    for (const Mode& mode : {Mode{"stream", Packing::stream, 0}, Mode{"masked_stream", Packing::masked_stream, 0},
                             Mode{"documents", Packing::documents, 0}, Mode{"stream_deflated", Packing::stream, 6}}) {
        benchmark::RegisterBenchmark(("read_first_epoch/" + mode.name).c_str(), read_first_epoch, mode.packing, mode.deflate)
            ->UseRealTime()->Iterations(1)->Unit(benchmark::kMillisecond);
        benchmark::RegisterBenchmark(("read_batches/" + mode.name).c_str(), read_batches, mode.packing, mode.deflate)
            ->UseRealTime()->Unit(benchmark::kMicrosecond);
    }
    benchmark::RegisterBenchmark("open_corpus/stream", open_corpus, Packing::stream)->UseRealTime()->Unit(benchmark::kMillisecond);
    benchmark::RegisterBenchmark("open_corpus/documents", open_corpus, Packing::documents)->UseRealTime()->Unit(benchmark::kMillisecond);
}

}  // namespace

int main(int argc, char** argv) {
    fenwick::kernels::cpu::use_fast_blas(argv);
    fenwick::keep_freed_memory();
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
    register_training_steps();
    register_reading();
    benchmark::RunSpecifiedBenchmarks();
}
