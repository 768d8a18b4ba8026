// fenwick bench: how long operators, training steps and the device itself take.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/device_peaks.h"
#include "base/files.h"
#include "base/memory_cuda.h"
#include "base/random.h"
#include "base/timer.h"
#include "data/corpus.h"
#include "kernels/gemm.h"
#include "model/costs.h"
#include "model/decoder.h"
#include "tools/command.h"
#include "tools/device_option.h"
#include "tools/measure.h"
#include "tools/operator_case.h"
#include "tools/progress.h"
#include "train/batch_feed.h"
#include "train/optimizer.h"
#include "train/trainer.h"

namespace fenwick::tools {
namespace {

using nlohmann::ordered_json;

void print(const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
}

std::string device_text(Device device) { return device.is_cpu() ? "CPU" : cuda_device_name(device.index); }
std::optional<DevicePeaks> peaks_of_device(Device device) {
    return device.is_cpu() ? std::nullopt : peaks_of(cuda_device_name(device.index));
}

void write_json(const std::string& path, const ordered_json& json) {
    if (!path.empty()) write_file_atomically(path, json.dump(2) + "\n");
}

// ---- options of measuring --------------------------------------------------------------------------------------------------

struct MeasureOptions {
    std::string device = "auto", dtype, json;
    std::int64_t repetitions = 0;
    double budget = 1.0;

    void add_to(CLI::App* command) {
        add_device_option(command, device);
        command->add_option("--dtype", dtype, "float32 or bfloat16 (default: bfloat16 on a GPU)")
            ->check(CLI::IsMember({"float32", "bfloat16"}));
        command->add_option("--repetitions", repetitions, "Calls to time (default: as many as fit into --seconds)")
            ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
        command->add_option("--seconds", budget, "Time for each figure, about")->check(number_from_to(1e-3, 1e4))->capture_default_str();
        command->add_option("--json", json, "Also write the results to this file");
    }
    DType type(Device where) const {
        if (dtype.empty()) return where.is_cpu() ? DType::float32 : DType::bfloat16;
        FENWICK_CHECK(dtype == "float32" || where.is_cuda(), "--dtype bfloat16 needs a GPU; use float32");
        return dtype == "float32" ? DType::float32 : DType::bfloat16;
    }
};

// ---- operators -----------------------------------------------------------------------------------------------------------

double bytes_of(const std::vector<Variable>& variables) {
    double total = 0;
    for (const auto& variable : variables) total += static_cast<double>(variable.value().bytes());
    return total;
}

std::vector<Tensor> seeds_like(const std::vector<Variable>& outputs) {
    std::vector<Tensor> seeds;
    for (const auto& output : outputs) seeds.push_back(Tensor::full(output.shape(), 1.0, output.dtype(), output.device()));
    return seeds;
}

void run_backward(const OperatorCall& call, const std::vector<Tensor>& seeds) {
    Tape tape;
    std::vector<std::pair<Variable, Tensor>> outputs;
    {
        Recording recording(tape);
        const auto results = call.call();
        for (std::size_t i = 0; i < results.size(); ++i) outputs.emplace_back(results[i], seeds[i]);
    }
    tape.backward(outputs);
    for (const auto& input : call.inputs)
        if (input.requires_grad()) input.gradient()->clear();
}

struct OperatorCommand {
    OperatorSizes sizes;
    MeasureOptions measure;
};

void print_operator_header() {
    print(fmt::format("{:<28}{:<20}{:>12}{:>12}{:>12}{:>9}{:>10}{:>9}", "operator", "pass", "median ms", "ns a token", "TFLOP/s",
                      "of peak", "GB/s", "of peak"));
}

// Measures one row a pass.
ordered_json operator_rows(const OperatorCase& op, const OperatorSizes& sizes, const MeasureOptions& options) {
    const Device device = device_chosen(options.device);
    const DType dtype = options.type(device);

    std::vector<OperatorCall> calls;
    calls.push_back(op.make(sizes, dtype, device, 1));
    const double input_bytes = bytes_of(calls.front().inputs);
    // Sets of inputs: more than a GPU's cache holds, but no more than 16 and no more than 4 GB.
    const double wanted = std::clamp(512e6 / std::max(input_bytes, 1.0), 1.0, 16.0);
    const auto sets = static_cast<std::size_t>(std::clamp(wanted + 1, 1.0, std::max(1.0, 4e9 / input_bytes)));
    for (std::size_t i = 1; i < sets; ++i) calls.push_back(op.make(sizes, dtype, device, 1 + 100 * i));

    std::vector<Variable> outputs = calls.front().call();
    const double output_bytes = bytes_of(outputs);
    const std::vector<Tensor> seeds = calls.front().differentiable ? seeds_like(outputs) : std::vector<Tensor>();
    outputs.clear();

    ordered_json rows = ordered_json::array();
    // `own`: bytes of the pass's results, which are there at its peak.
    const auto row = [&](const char* pass, const std::vector<std::function<void()>>& bodies, double flops, double bytes, double own) {
        reset_peak_memory(device.type);
        const auto before = static_cast<double>(memory_stats(device.type).total_peak_bytes);
        const Seconds time = measure(device, bodies, options.budget, options.repetitions);
        ordered_json json = {{"operator", op.name}, {"pass", pass}, {"device", device_text(device)}, {"dtype", std::string(name_of(dtype))}};
        for (const auto& [name, size] : sizes) json[name] = size;
        json["median_s"] = time.median;
        json["lowest_s"] = time.lowest;
        json["repetitions"] = time.repetitions;
        json["flops"] = flops;
        json["bytes"] = bytes;
        json["beyond_bytes"] = std::max(0.0, static_cast<double>(memory_stats(device.type).total_peak_bytes) - before - own);
        rows.push_back(std::move(json));
    };
    std::vector<std::function<void()>> forward, both;
    for (const auto& call : calls) {
        forward.push_back([&call] { (void)call.call(); });
        both.push_back([&call, &seeds] { run_backward(call, seeds); });
    }
    // Bytes that must move: inputs are read and outputs written; backward reads the inputs and the gradient of the outputs
    // and writes the gradients of the inputs.
    row("forward", forward, calls.front().flops, input_bytes + output_bytes, output_bytes);
    if (calls.front().differentiable)
        row("forward + backward", both, 3 * calls.front().flops, 3 * input_bytes + 2 * output_bytes, input_bytes + output_bytes);
    return rows;
}

// The same, printed beside the data sheet's peaks.
ordered_json bench_operator(const OperatorCase& op, const OperatorSizes& sizes, const MeasureOptions& options) {
    const Device device = device_chosen(options.device);
    const auto peaks = peaks_of_device(device);
    ordered_json rows = operator_rows(op, sizes, options);
    for (const auto& row : rows) {
        const double seconds = row["median_s"], flops = row["flops"], bytes = row["bytes"];
        const bool matrix = flops > 0 && peaks && options.type(device) == DType::bfloat16;
        print(fmt::format("{:<28}{:<20}{:>12.4f}{:>12.2f}{:>12}{:>9}{:>10.0f}{:>9}", op.name, row["pass"].get<std::string>(),
                          1e3 * seconds, 1e9 * seconds / static_cast<double>(sizes.at("tokens")),
                          flops > 0 ? fmt::format("{:.2f}", 1e-12 * flops / seconds) : "",
                          matrix ? fmt::format("{:.1f}%", 100 * flops / seconds / peaks->bfloat16_flops) : "", 1e-9 * bytes / seconds,
                          peaks ? fmt::format("{:.1f}%", 100 * bytes / seconds / peaks->bandwidth) : ""));
    }
    return rows;
}

// Limits under which no product of an operator's sizes leaves 64 bits: a size that is too large is refused, or memory is.
std::int64_t largest_size(const std::string& name) {
    if (name == "tokens" || name == "length") return std::int64_t{1} << 28;
    if (name == "parameters") return std::int64_t{1} << 36;
    return name == "vocab" ? 1 << 24 : name == "levels" ? 48 : 1 << 16;
}

void add_operators(CLI::App& bench) {
    for (const OperatorCase& op : operator_cases()) {
        auto options = std::make_shared<OperatorCommand>();
        options->sizes = op.sizes;
        CLI::App* command = add_command(bench, op.name.c_str(), op.description.c_str(),
                                        ("fenwick bench " + op.name + " --tokens 65536 --length 16384").c_str(), options,
                                        [&op](const OperatorCommand& given) {
                                            print_operator_header();
                                            write_json(given.measure.json, bench_operator(op, given.sizes, given.measure));
                                        });
        command->group("Operators");
        for (auto& [name, size] : options->sizes) {
            const bool may_be_zero = name == "levels";
            command->add_option("--" + name, size, name == "tokens"   ? "Tokens in all"
                                                   : name == "length" ? "Tokens of a sequence"
                                                   : may_be_zero      ? "Level scales a head; 0: as many as the length needs"
                                                                      : "Size")
                ->check(CLI::Range(std::int64_t{may_be_zero ? 0 : 1}, largest_size(name)))
                ->capture_default_str();
        }
        options->measure.add_to(command);
    }
    struct All {
        std::int64_t tokens = 16384, length = 16384;
        MeasureOptions measure;
    };
    auto options = std::make_shared<All>();
    CLI::App* command = add_command(
        bench, "operators", "Time every operator at the paper's sizes", "fenwick bench operators --length 4096 --json ops.json",
        options, [](const All& given) {
            FENWICK_CHECK(given.tokens % given.length == 0, "--tokens {} is not a multiple of --length {}", given.tokens,
                          given.length);
            print_operator_header();
            ordered_json rows = ordered_json::array();
            std::vector<std::string> failed;
            for (const OperatorCase& op : operator_cases()) {
                OperatorSizes sizes = op.sizes;
                sizes["tokens"] = given.tokens;
                sizes["length"] = given.length;
                try {
                    for (auto& row : bench_operator(op, sizes, given.measure)) rows.push_back(std::move(row));
                } catch (const Error& error) {  // an operator that the device lacks
                    print(fmt::format("{:<28}{}", op.name, error.what()));
                    failed.push_back(op.name);
                }
            }
            write_json(given.measure.json, rows);
            FENWICK_CHECK(failed.empty(), "{} of {} operators could not be timed: {}", failed.size(), operator_cases().size(),
                          fmt::join(failed, ", "));
        });
    command->add_option("--tokens", options->tokens, "Tokens in all")
        ->check(CLI::Range(std::int64_t{1}, largest_size("tokens")))
        ->capture_default_str();
    command->add_option("--length", options->length, "Tokens of a sequence")
        ->check(CLI::Range(std::int64_t{1}, largest_size("length")))
        ->capture_default_str();
    options->measure.add_to(command);
}

// ---- a training step -------------------------------------------------------------------------------------------------------

struct StepCommand {
    std::string config, json;
    std::vector<std::string> overrides;
    std::int64_t steps = 10;
    bool operators = false, data = false;
};

data::LoaderOptions loader_options(const train::RunConfig& config) {
    return {.corpora = config.data.train,
            .sequence_length = config.data.sequence_length,
            .packing = config.data.packing,
            .seed = static_cast<std::uint64_t>(config.train.seed)};
}

// Random tokens: the speed does not depend on them.
data::Batch random_batch(std::int64_t rows, std::int64_t length, std::int64_t vocab_size) {
    data::Batch batch{.rows = rows, .length = length, .offsets = {0}, .valid_targets = rows * length};
    Random random(5);
    for (std::int64_t i = 0; i < rows * length; ++i)
        batch.inputs.push_back(static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(vocab_size))));
    batch.targets = batch.inputs;
    for (std::int64_t row = 1; row <= rows; ++row) batch.offsets.push_back(row * length);
    return batch;
}

// Steps on the constant batch and on data as training reads it, in turn. `steps` of each.
void compare_with_data(Device device, const std::function<void()>& constant_step, const std::function<void()>& data_step,
                       std::int64_t steps, ordered_json& json) {
    std::vector<double> constant, data;
    for (std::int64_t i = -1; i < steps; ++i) {  // the first of each is a warm-up
        synchronize(device);
        const TimeMark begin(device);
        constant_step();
        const TimeMark between(device);
        data_step();
        const TimeMark end(device);
        const double on_constant = seconds_between(begin, between), on_data = seconds_between(between, end);
        if (i < 0) continue;
        constant.push_back(on_constant);
        data.push_back(on_data);
    }
    const auto median = [](std::vector<double> values) {
        std::sort(values.begin(), values.end());
        return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
    };
    json["constant_s"] = constant;
    json["data_s"] = data;
    json["data_over_constant"] = median(data) / median(constant);
    print(fmt::format("  {:<26}{:>14.4f} s", "step, constant batch", median(constant)));
    print(fmt::format("  {:<26}{:>14.4f} s", "step, batches of data", median(data)));
    print(fmt::format("  {:<26}{:>14.4f} (medians of {} steps each, in turn)", "data over constant", median(data) / median(constant), steps));
}

void run_step(const StepCommand& command) {
    if (!command.json.empty()) check_output(command.json, {command.config});
    train::RunConfig config = train::load_config(command.config, command.overrides);
    if (config.model.vocab_size == 0 && std::filesystem::exists(config.data.train.front().path))
        config.model.vocab_size = data::TokenCorpus(config.data.train.front().path).info().vocab_size;
    FENWICK_CHECK(config.model.vocab_size > 0,
                  "{} leaves the vocabulary to {}, which is not there; --set model.vocab_size=32000 would do", command.config,
                  config.data.train.front().path);
    train::resolve_for_processes(config, 1);
    const Device device = train::device_for(config.train, 0);
    const std::int64_t length = config.data.sequence_length, micro = config.train.micro_batch;
    model::LanguageModel model(config.model, device, config.weight_dtype(), config.train.dtype);
    model.initialize(static_cast<std::uint64_t>(config.train.seed));
    model.set_recompute(config.train.recompute);
    train::Optimizer optimizer(model.parameters(), config.optimizer);

    std::optional<data::Loader> loader;
    std::optional<train::BatchFeed> feed;
    if (command.data) {
        loader.emplace(loader_options(config));
        FENWICK_CHECK(loader->vocab_size() <= config.model.vocab_size, "model.vocab_size is {}, but {} has token ids up to {}",
                      config.model.vocab_size, config.data.train.front().path, loader->vocab_size() - 1);
        feed.emplace(*loader, train::BatchFeedOptions{.device = device, .batch_rows = config.train.batch_size, .first = 0,
                                                      .share = config.train.batch_size, .micro_rows = micro,
                                                      .prefetch = config.data.prefetch}, 0);
    }
    const data::Batch one = loader ? loader->read(0, micro) : random_batch(micro, length, config.model.vocab_size);
    const train::MicroBatch constant{.inputs = Tensor::from(one.inputs, {micro, length}, device),
                                     .targets = Tensor::from(one.targets, {micro, length}, device),
                                     .layout = SequenceLayout::packed(one.offsets), .valid_targets = one.valid_targets,
                                     .step_targets = one.valid_targets * (config.train.batch_size / micro)};
    const double targets = static_cast<double>(constant.step_targets);
    std::int64_t step = 0;
    double loss = 0;
    const auto update = [&](train::BatchFeed* from) {
        optimizer.zero_gradients();
        lap("zero gradients");
        Tensor last;
        for (std::int64_t row = 0; row < config.train.batch_size; row += micro) {
            const train::MicroBatch& batch = from != nullptr ? from->next() : constant;
            Tape tape;
            Variable sum;
            {
                Recording recording(tape);
                sum = model.loss(batch.inputs, batch.targets, batch.layout, static_cast<double>(batch.step_targets)).loss;
            }
            tape.backward(sum);
            last = sum.value();
        }
        const double norm = optimizer.gradient_norm();
        lap("gradient norm");
        loss = last.item() * static_cast<double>(config.train.batch_size / micro);
        optimizer.update(++step, config.optimizer.learning_rate * 0.01, norm);
    };
    const auto constant_step = [&] { update(nullptr); };
    print(fmt::format("{}, {} parameters, {}, {}; {} rows of {} tokens a step, {} at a time", model::name_of(config.model.type),
                      count_text(static_cast<double>(model.parameter_count())), device_text(device), name_of(config.train.dtype),
                      config.train.batch_size, length, micro));
    reset_peak_memory(device.type);
    const Seconds time = measure(device, {constant_step}, 0, command.steps);
    const double speed = targets / time.median;
    const double flops = model::training_flops_per_token(config.model, length);
    const auto peaks = peaks_of_device(device);
    const MemoryStats memory = memory_stats(device.type);
    print(fmt::format("  {:<26}{:>14.3f} s (lowest {:.3f} s)", "step, median", time.median, time.lowest));
    print(fmt::format("  {:<26}{:>14.0f}", "tokens/s", speed));
    print(fmt::format("  {:<26}{:>14}", "FLOPs a token", count_text(flops)));
    print(fmt::format("  {:<26}{:>14.2f}", "model TFLOP/s", 1e-12 * flops * speed));
    if (peaks) print(fmt::format("  {:<26}{:>13.1f}%", "MFU (bfloat16 peak)", 100 * flops * speed / peaks->bfloat16_flops));
    print(fmt::format("  {:<26}{:>14.4f}", "loss", loss));
    print(fmt::format("  {:<26}{:>14}", "peak memory", bytes_text(static_cast<double>(memory.total_peak_bytes))));
    for (std::size_t kind = 0; kind < memory_kind_count; ++kind)
        if (memory.peak_bytes[kind] > 0)
            print(fmt::format("    {:<24}{:>14}", name_of(static_cast<MemoryKind>(kind)),
                              bytes_text(static_cast<double>(memory.peak_bytes[kind]))));
    ordered_json json = {{"config", command.config}, {"model", std::string(model::name_of(config.model.type))}, {"device", device_text(device)},
                         {"dtype", std::string(name_of(config.train.dtype))}, {"batch_size", config.train.batch_size},
                         {"micro_batch", micro}, {"length", length}, {"median_s", time.median}, {"lowest_s", time.lowest},
                         {"tokens_per_s", speed}, {"flops_per_token", flops}, {"peak_bytes", memory.total_peak_bytes}};
    if (peaks) json["mfu"] = flops * speed / peaks->bfloat16_flops;
    if (feed) compare_with_data(device, constant_step, [&] { update(&*feed); }, command.steps, json);
    if (command.operators) {
        synchronize(device);
        start_profile(device);
        constant_step();
        lap("optimizer");
        const auto times = stop_profile();
        double total = 0;
        for (const auto& [name, entry] : times) total += entry.seconds;
        std::vector<std::pair<std::string, OperatorTime>> sorted(times.begin(), times.end());
        std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
        print(fmt::format("  {:<32}{:>8}{:>12}{:>9}", "time by operator", "calls", "ms", "share"));
        for (const auto& [name, entry] : sorted) {
            print(fmt::format("  {:<32}{:>8}{:>12.3f}{:>8.1f}%", name, entry.calls, 1e3 * entry.seconds,
                              100 * entry.seconds / total));
            json["operators"][name] = {{"calls", entry.calls}, {"seconds", entry.seconds}};
        }
    }
    write_json(command.json, json);
}

void add_step(CLI::App& bench) {
    auto options = std::make_shared<StepCommand>();
    CLI::App* command = add_command(bench, "step", "Time a whole training step of a config, on random tokens",
                                    "fenwick bench step configs/paper/log_linear_mamba2.yaml --set train.batch_size=4 --operators",
                                    options, run_step);
    command->add_option("config", options->config, "YAML file; the data files it names are needed for --data alone")->required();
    command->add_flag("--data", options->data, "A constant batch of the config's data, and then beside it steps that read on as training does");
    command->add_option("--set", options->overrides, "Override a key (may be repeated)")->allow_extra_args(false)->take_all();
    command->add_option("--steps", options->steps, "Steps to time")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
        ->capture_default_str();
    command->add_flag("--operators", options->operators, "Then the time of one step by operator");
    command->add_option("--json", options->json, "Also write the result to this file");
}

// ---- decoding ----------------------------------------------------------------------------------------------------------------

// Weights of usual size, drawn once and repeated: a model of a billion would take long to draw.
void fill_randomly(const Tensor& tensor) {
    Random random(1);
    std::vector<float> values(std::size_t{1} << 16);
    for (auto& value : values) value = static_cast<float>(0.02 * random.normal());
    const Tensor pattern = Tensor::from(values, {static_cast<std::int64_t>(values.size())}, tensor.device());
    const Tensor flat = tensor.view({-1});
    for (std::int64_t begin = 0; begin < flat.count(); begin += pattern.count()) {
        const std::int64_t end = std::min(flat.count(), begin + pattern.count());
        flat.narrow_rows(begin, end).copy_from(pattern.narrow_rows(0, end - begin));
    }
}

struct DecodeCommand {
    std::vector<std::string> configs, overrides;
    std::vector<std::int64_t> histories{1024, 131072};
    std::int64_t tokens = 64, batch = 1;
    bool no_graph = false, plain = false, separate = false, operators = false;
    MeasureOptions measure;
};

// Tokens around each length of history, half of them before it and half behind, since a log-linear state is fullest right
// before a power of two and emptiest behind it. States are random numbers; the speed does not depend on them.
void run_decode(const DecodeCommand& command) {
    const Device device = device_chosen(command.measure.device);
    const DType dtype = command.measure.type(device);
    constexpr std::int64_t warm_up = 4;
    for (const auto history : command.histories)
        FENWICK_CHECK(history > command.tokens / 2 + warm_up, "--history {} with --tokens {}: at least {} is needed", history,
                      command.tokens, command.tokens / 2 + warm_up + 1);
    const double copy = measure_copy(device, command.measure.budget, 0);
    print(fmt::format("{}, {}, batch {}; a copy reads and writes {:.1f} GB/s", device_text(device), name_of(dtype), command.batch, 1e-9 * copy));
    print(fmt::format("{:<28}{:>8}{:>9}{:>9}{:>11}{:>11}{:>11}{:>11}{:>11}{:>9}", "model", "weights", "history", "launches", "us a token", "tokens/s",
                      "weights GB", "state GB", "GB/s", "of copy"));
    ordered_json rows = ordered_json::array();
    for (const std::string& path : command.configs) {
        train::RunConfig config = train::load_config(path, command.overrides);
        if (config.model.vocab_size == 0) config.model.vocab_size = 32000;
        if (model::has_levels(config.model.type) && config.model.num_levels == 0) config.model.num_levels = 15;
        model::LanguageModel model(config.model, device, DType::float32, dtype);
        for (const auto& parameter : model.parameters()) fill_randomly(parameter.variable.value());
        const auto weights = static_cast<double>(model::decode_weight_bytes(config.model, dtype));
        for (const std::int64_t history : command.histories) {
            const std::int64_t first = history - command.tokens / 2;
            auto state = model.random_state(command.batch, first - warm_up, 2);
            const std::vector<std::int32_t> ids(static_cast<std::size_t>(command.batch), 1);
            std::optional<model::Decoder> decoder;
            const Tensor input = Tensor::from(ids, {command.batch, 1}, device);
            std::function<void()> token = [&] { (void)model.step(input, *state); };
            std::string launches = "-";
            if (!command.plain) {
                decoder.emplace(model, *state, model::DecoderOptions{.weights = dtype, .graph = !command.no_graph,
                                                                     .one_launch = !command.separate && !command.operators,
                                                                     .reserve = command.tokens + warm_up, .temperature = 0});
                state.reset();
                token = [&] { decoder->advance(); };
                launches = fmt::to_string(decoder->launches());
            }
            for (std::int64_t i = 0; i < warm_up; ++i) token();
            synchronize(device);
            const TimeMark begin(device);
            for (std::int64_t i = 0; i < command.tokens; ++i) token();
            const TimeMark end(device);
            const double seconds = seconds_between(begin, end) / static_cast<double>(command.tokens);
            double states = 0;
            for (std::int64_t i = 0; i < command.tokens; ++i)
                states += static_cast<double>(model::decode_state_traffic(config.model, first + i, command.batch, dtype)) /
                          static_cast<double>(command.tokens);
            const double rate = (weights + states) / seconds;
            print(fmt::format("{:<28}{:>8}{:>9}{:>9}{:>11.1f}{:>11.1f}{:>11.3f}{:>11.3f}{:>11.1f}{:>8.1f}%", model::name_of(config.model.type),
                              count_text(static_cast<double>(model.parameter_count())), history, launches, 1e6 * seconds,
                              static_cast<double>(command.batch) / seconds, 1e-9 * weights, 1e-9 * states, 1e-9 * rate, 100 * rate / copy));
            rows.push_back({{"config", path}, {"model", std::string(model::name_of(config.model.type))}, {"device", device_text(device)},
                            {"dtype", std::string(name_of(dtype))}, {"batch", command.batch}, {"history", history},
                            {"seconds_per_token", seconds}, {"weight_bytes", weights}, {"state_bytes", states}, {"copy_bytes_per_s", copy}});
            if (!command.operators || !decoder) continue;
            for (const auto& [kind, time] : decoder->time_by_kind()) {
                print(fmt::format("  {:<26}{:>28.1f}", kind, 1e6 * time));
                rows.back()["kinds"][kind] = time;
            }
        }
    }
    write_json(command.measure.json, rows);
}

void add_decode(CLI::App& bench) {
    auto options = std::make_shared<DecodeCommand>();
    CLI::App* command = add_command(bench, "decode", "Time the generation of tokens behind a long history, with random weights",
                                    "fenwick bench decode configs/paper/log_linear_mamba2.yaml --history 1024 131072", options, run_decode);
    command->add_option("configs", options->configs, "YAML files; the data files they name are not needed")->required();
    command->add_option("--history", options->histories, "Tokens before")->check(CLI::Range(std::int64_t{2}, std::int64_t{1} << 40))->capture_default_str();
    command->add_option("--tokens", options->tokens, "Tokens to time, around each length of history")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
        ->capture_default_str();
    command->add_option("--batch", options->batch, "Rows that are generated together")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 16))
        ->capture_default_str();
    command->add_flag("--no-graph", options->no_graph, "Queue every kernel by itself");
    command->add_flag("--separate", options->separate, "A launch an operator, even where a token can be one launch");
    command->add_flag("--operators", options->operators, "With separate launches; then the time of each kind, by itself");
    command->add_flag("--plain", options->plain, "Decode through the operators of training")
        ->excludes("--no-graph", "--separate", "--operators");
    command->add_option("--set", options->overrides, "Override a key (may be repeated)")->allow_extra_args(false)->take_all();
    options->measure.add_to(command);
}

// ---- what the device can do --------------------------------------------------------------------------------------------------

std::int64_t matrix_size(Device device) { return device.is_cpu() ? 2048 : 8192; }

// Bytes and operations a second, measured.
struct Ceilings {
    double copy = 0, bfloat16 = 0, float32 = 0;  // bfloat16: 0 on the CPU
};

Ceilings measure_ceilings(Device device, const MeasureOptions& options) {
    Ceilings ceilings;
    ceilings.copy = measure_copy(device, options.budget, options.repetitions);
    for (const DType dtype : {DType::bfloat16, DType::float32}) {
        if (device.is_cpu() && dtype == DType::bfloat16) continue;
        const std::int64_t size = matrix_size(device);
        Random random(1);
        std::vector<float> values(static_cast<std::size_t>(size * size));
        for (auto& value : values) value = static_cast<float>(random.normal());
        const Tensor a = Tensor::from(values, {size, size}, device).to(dtype), b = a.clone();
        const Tensor c = Tensor::empty({size, size}, dtype, device);
        const auto multiply = [&] {
            kernels::gemm(exec_of(c), {.dtype = dtype, .c_dtype = dtype, .transpose_b = true, .m = size, .n = size, .k = size,
                                       .a = a.data(), .b = b.data(), .c = c.data(), .lda = size, .ldb = size, .ldc = size});
        };
        const Seconds time = measure(device, {multiply}, options.budget, options.repetitions);
        const double edge = static_cast<double>(size);
        (dtype == DType::bfloat16 ? ceilings.bfloat16 : ceilings.float32) = 2 * edge * edge * edge / time.median;
    }
    return ceilings;
}

// Prints them, and the share of the data sheet's peaks.
ordered_json print_ceilings(Device device, const Ceilings& ceilings) {
    const auto peaks = peaks_of_device(device);
    print(device_text(device));
    ordered_json json = {{"device", device_text(device)}};
    const auto line = [&](const std::string& what, double rate, const char* unit, double peak) {
        if (rate == 0) return;
        print(fmt::format("  {:<34}{:>12.1f} {}{}", what, rate, unit,
                          peak > 0 ? fmt::format("  ({:.1f}% of {:.0f})", 100 * rate / peak, peak) : ""));
        json[what] = rate;
    };
    const std::int64_t size = matrix_size(device);
    line("copy, read and write", 1e-9 * ceilings.copy, "GB/s", peaks ? 1e-9 * peaks->bandwidth : 0);
    line(fmt::format("matrix product of {}, bfloat16", size), 1e-12 * ceilings.bfloat16, "TFLOP/s",
         peaks ? 1e-12 * peaks->bfloat16_flops : 0);
    line(fmt::format("matrix product of {}, float32", size), 1e-12 * ceilings.float32, "TFLOP/s", 0);
    return json;
}

void run_peak(const MeasureOptions& options) {
    const Device device = device_chosen(options.device);
    write_json(options.json, print_ceilings(device, measure_ceilings(device, options)));
}

// ---- the sequence operators side by side ---------------------------------------------------------------------------------

struct ScanCommand {
    std::int64_t tokens = 65536;
    bool longest = false;
    MeasureOptions measure;
};

// Every sequence operator of the paper's models at growing lengths, beside the device's own ceilings. The floor of a row is
// what its compulsory bytes take at the speed of a copy, or its operations at that of a matrix product, whichever is longer.
void run_scans(const ScanCommand& command) {
    const Device device = device_chosen(command.measure.device);
    const Ceilings ceilings = measure_ceilings(device, command.measure);
    ordered_json json = print_ceilings(device, ceilings);
    const double products = command.measure.type(device) == DType::bfloat16 ? ceilings.bfloat16 : ceilings.float32;
    print(fmt::format("{:<28}{:>9} x {:<9}{:<20}{:>11}{:>11}{:>10}{:>13}", "operator", "rows", "length", "pass", "median ms",
                      "floor ms", "of floor", "memory"));
    json["rows"] = ordered_json::array();
    const auto time = [&](const std::string& name, std::int64_t rows, std::int64_t length) {
        const auto op = std::find_if(operator_cases().begin(), operator_cases().end(), [&](const auto& other) { return other.name == name; });
        OperatorSizes sizes = op->sizes;
        sizes["tokens"] = rows * length;
        sizes["length"] = length;
        for (auto& row : operator_rows(*op, sizes, command.measure)) {
            const double seconds = row["median_s"];
            const double floor = std::max(row["bytes"].get<double>() / ceilings.copy, row["flops"].get<double>() / products);
            print(fmt::format("{:<28}{:>9} x {:<9}{:<20}{:>11.3f}{:>11.3f}{:>9.1f}%{:>13}", name, rows, length,
                              row["pass"].get<std::string>(), 1e3 * seconds, 1e3 * floor, 100 * floor / seconds,
                              bytes_text(row["beyond_bytes"].get<double>())));
            row["floor_s"] = floor;
            json["rows"].push_back(std::move(row));
        }
    };
    for (const char* name : {"ssd", "log_linear_ssd", "gated_delta_rule", "log_linear_gated_delta_rule", "softmax_attention"}) {
        for (std::int64_t length = std::min<std::int64_t>(1024, command.tokens); length <= command.tokens; length *= 4)
            time(name, command.tokens / length, length);
        if (command.tokens >= 16384 * 2) time(name, 1, 16384);
        // Attention would take minutes.
        if (command.longest && std::string_view(name) != "softmax_attention") time(name, 1, std::int64_t{1} << 20);
    }
    write_json(command.measure.json, json);
}

void add_scans(CLI::App& bench) {
    auto options = std::make_shared<ScanCommand>();
    CLI::App* command = add_command(bench, "scans", "Time every sequence operator at growing lengths, beside the device's ceilings",
                                    "fenwick bench scans --longest --json scans.json", options, run_scans);
    command->add_option("--tokens", options->tokens, "Tokens in all, cut into rows")
        ->check(CLI::Range(std::int64_t{64}, std::int64_t{1} << 24))
        ->capture_default_str();
    command->add_flag("--longest", options->longest, "Also one row of 1,048,576 tokens");
    options->measure.add_to(command);
}

}  // namespace

void add_bench(CLI::App& app, const GlobalOptions&) {
    CLI::App* bench = app.add_subcommand("bench", "Time operators, training steps, the device");
    bench->require_subcommand(1);
    bench->footer(footer_text("fenwick bench operators\n  fenwick bench log_linear_ssd --tokens 65536\n"
                  "  fenwick bench step configs/paper/log_linear_mamba2.yaml --set train.batch_size=4"));
    add_step(*bench);
    auto options = std::make_shared<MeasureOptions>();
    CLI::App* peak = add_command(*bench, "peak", "What the device reaches in copies and matrix products", "fenwick bench peak",
                                 options, run_peak);
    options->add_to(peak);
    add_scans(*bench);
    add_decode(*bench);
    add_operators(*bench);
}

}  // namespace fenwick::tools
