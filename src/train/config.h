// The configuration of a training run: YAML in, typed structs out.
//
// One table (config.cpp) describes every key: name, type, default, allowed values, one line of documentation. Parsing,
// validation, the resolved YAML in the run folder, comparison of two configurations and docs/configuration.md all come
// from it, so a new key is one line in the struct and one in the table.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "data/loader.h"
#include "model/language_model.h"
#include "model/model_config.h"

namespace fenwick::train {

struct DataConfig {
    std::vector<data::WeightedCorpus> train;
    std::string valid;                 // token file or folder; "": no validation
    std::int64_t sequence_length = 0;  // T
    data::Packing packing = data::Packing::stream;
    std::int64_t prefetch = 2;         // micro-batches prepared ahead; 0: none
};

struct OptimizerConfig {
    double learning_rate = 1e-3;  // at its highest
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    double weight_decay = 0.1;
    double clip_norm = 1.0;  // 0: no clipping
};

enum class ScheduleType : std::uint8_t { cosine, wsd, linear, constant };
enum class DecayShape : std::uint8_t { linear, sqrt };

struct ScheduleConfig {
    ScheduleType type = ScheduleType::cosine;
    std::int64_t warmup_steps = 0;
    double min_ratio = 0.1;
    std::int64_t decay_steps = 0;  // wsd; 0: a tenth of the run
    DecayShape decay_shape = DecayShape::linear;
};

enum class DeviceChoice : std::uint8_t { automatic, cpu, cuda };
enum class NanPolicy : std::uint8_t { stop, skip };

struct TrainConfig {
    std::int64_t steps = 0;   // optimizer steps; 0: from tokens
    std::int64_t tokens = 0;  // 0: from steps
    std::int64_t batch_size = 8;   // rows of an optimizer step, over all processes
    std::int64_t micro_batch = 0;  // rows of one forward of one process; 0: no accumulation
    std::int64_t seed = 0;
    std::string init_from;  // checkpoint or run folder; "": initial weights are drawn from the seed
    std::int64_t validate_every = 0;    // steps; 0: only at the end
    std::int64_t validate_tokens = 0;   // 0: the whole file
    std::int64_t checkpoint_every = 0;  // steps; 0: only at the end
    std::int64_t keep_checkpoints = 2;
    std::int64_t log_every = 1;
    model::Recompute recompute = model::Recompute::none;
    DType dtype = DType::float32;  // of activations; weights are float32 (float64 with float64)
    bool tf32 = false;  // float32 products on a GPU may round their operands to tf32
    DeviceChoice device = DeviceChoice::automatic;
    std::int64_t num_threads = 0;  // 0: all cores
    NanPolicy on_nan = NanPolicy::stop;
};

struct RunConfig {
    std::string run_dir;
    model::ModelConfig model;
    DataConfig data;
    OptimizerConfig optimizer;
    ScheduleConfig schedule;
    TrainConfig train;

    DType weight_dtype() const { return gate_dtype(train.dtype); }
};

// Reads a YAML file, then applies overrides ("train.steps=100"). Throws Error with one line that names the file and line
// (or the override), the key, the value found and what is needed. Values that follow from others are filled in:
// train.steps from train.tokens, schedule.decay_steps, model.num_levels.
RunConfig load_config(const std::string& path, const std::vector<std::string>& overrides = {});
// The same for YAML text; `origin` stands for the file's name in messages.
RunConfig parse_config(std::string_view text, const std::string& origin, const std::vector<std::string>& overrides = {});

// Contradictions that show only when it is known how many processes there are. Fills in train.micro_batch.
void resolve_for_processes(RunConfig& config, int processes);

// A text as YAML reads it back, in quotes where it needs them.
std::string yaml_text(const std::string& text);

// Every key with its value; parse_config gives the same configuration back.
std::string to_yaml(const RunConfig& config);

// The keys of `section` ("model"; "": all of them) whose values differ, in the order of the table; values as YAML.
struct Difference {
    std::string key;             // "model.hidden_size"
    std::string theirs, ours;
};
std::vector<Difference> differences(const RunConfig& theirs, const RunConfig& ours, std::string_view section);

// The text of docs/configuration.md.
std::string configuration_markdown();

}  // namespace fenwick::train
