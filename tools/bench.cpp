// CPU benchmarks (Google Benchmark): the operators at growing lengths, and a training step against what OpenBLAS alone takes
// for its matrix products. docs/benchmarks/ holds figures with machine and command.
#include <benchmark/benchmark.h>
#include <cblas.h>

#include <algorithm>
#include <vector>

#include "autograd/ops.h"
#include "base/parallel.h"
#include "base/random.h"
#include "kernels/cpu/blas.h"
#include "kernels/levels.h"
#include "model/language_model.h"
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
    state.counters["ns_per_token"] =
        benchmark::Counter(static_cast<double>(tokens) * 1e-9,
                           benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
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

// ---- training step of the quickstart model ------------------------------------------------------------------------------

constexpr std::int64_t quickstart_rows = 8, quickstart_length = 256;

// configs/quickstart/log_linear_mamba2.yaml
model::ModelConfig quickstart_config() {
    return {.vocab_size = 4096, .hidden_size = 192, .num_layers = 4, .num_heads = 6, .head_dim = 64, .state_size = 64, .num_levels = 9};
}

void training_step(benchmark::State& state) {
    model::LanguageModel model(quickstart_config(), cpu_device, DType::float32, DType::float32);
    model.initialize(1);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(quickstart_rows * quickstart_length));
    Random random(5);
    for (auto& id : ids) id = static_cast<std::int32_t>(random.below(4096));
    const Tensor tokens = Tensor::from(ids, {quickstart_rows, quickstart_length});
    const auto layout = SequenceLayout::uniform(quickstart_rows, quickstart_length);
    train::Optimizer optimizer(model.parameters(), {});
    std::int64_t step = 0;
    for (auto _ : state) {
        Tape tape;
        {
            Recording recording(tape);
            const auto loss = model.loss(tokens, tokens, layout, static_cast<double>(ids.size()));
            tape.backward(loss.loss);
        }
        optimizer.update(++step, 1e-6, optimizer.gradient_norm());
        optimizer.zero_gradients();
    }
    state.counters["tokens_per_s"] = benchmark::Counter(static_cast<double>(ids.size()), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(training_step)->UseRealTime()->Unit(benchmark::kMillisecond);

// The same step's matrix products of projections and head, forward and both gradients, by OpenBLAS alone with all threads.
void training_step_products(benchmark::State& state) {
    const auto config = quickstart_config();
    const std::int64_t rows = quickstart_rows * quickstart_length, width = config.hidden_size;
    const std::int64_t inner = config.num_heads * config.head_dim;
    const std::int64_t projected =
        2 * inner + 2 * config.n_groups * config.state_size + config.num_heads * (1 + config.num_levels);
    struct Product {
        std::int64_t in, out, times;
    };
    const std::vector<Product> products = {{width, projected, config.num_layers}, {inner, width, config.num_layers},
                                           {width, config.mlp_width(), 2 * config.num_layers},
                                           {config.mlp_width(), width, config.num_layers}, {width, config.vocab_size, 1}};
    const std::int64_t widest = std::max({projected, inner, config.mlp_width(), config.vocab_size});
    const Tensor x = normal({rows, widest}, 1.0, 1), w = normal({widest, widest}, 1.0, 2), y = normal({rows, widest}, 1.0, 3);
    openblas_set_num_threads(num_threads());
    double flops = 0;
    for (auto _ : state) {
        flops = 0;
        for (const auto& p : products)
            for (std::int64_t i = 0; i < p.times; ++i) {
                kernels::cpu::blas_gemm(false, true, rows, p.out, p.in, 1.f, x.as<float>(), p.in, w.as<float>(), p.in, 0.f, y.as<float>(), p.out);
                kernels::cpu::blas_gemm(false, false, rows, p.in, p.out, 1.f, y.as<float>(), p.out, w.as<float>(), p.in, 0.f, x.as<float>(), p.in);
                kernels::cpu::blas_gemm(true, false, p.out, p.in, rows, 1.f, y.as<float>(), p.out, x.as<float>(), p.in, 0.f, w.as<float>(), p.in);
                flops += 6.0 * static_cast<double>(rows * p.in * p.out);
            }
        benchmark::ClobberMemory();
    }
    openblas_set_num_threads(1);
    state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(training_step_products)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace

int main(int argc, char** argv) {
    fenwick::kernels::cpu::use_fast_blas(argv);
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
    benchmark::RunSpecifiedBenchmarks();
}
