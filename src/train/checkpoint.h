// Checkpoints: everything a run needs to continue exactly, in one HDF5 file. Format: docs/file-formats.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/loader.h"
#include "model/language_model.h"
#include "train/config.h"
#include "train/optimizer.h"

namespace fenwick::train {

// What decodes the tokens that a model was trained on.
struct TokenizerInfo {
    std::string kind, identity, definition;
};

// All of a checkpoint but its tensors.
struct CheckpointHeader {
    std::int64_t step = 0;    // updates done
    std::int64_t tokens = 0;  // targets trained on
    data::LoaderState loader;
    std::string config;       // resolved YAML
    TokenizerInfo tokenizer;
};

// Writes weights, moments and header to `path`: first under a temporary name, then synced, then renamed. On failure
// (a full disk) the temporary is removed, what stood there before stays, and an Error says why.
void save_checkpoint(const std::string& path, const CheckpointHeader& header, const Optimizer& optimizer);

// Reads the header. Throws Error if this is no checkpoint, not a complete one, or its header is damaged.
CheckpointHeader read_checkpoint_header(const std::string& path);

// Fills weights and moments. Throws Error that names the first tensor that is missing, has another shape, or is damaged.
void load_checkpoint(const std::string& path, Optimizer& optimizer);

// Reads everything and compares every checksum. Throws Error.
void verify_checkpoint(const std::string& path);

// Throws Error naming the first key of `model` in which the checkpoint's model is another one.
void check_same_model(const std::string& path, const CheckpointHeader& header, const RunConfig& config);

// ---- a folder of checkpoints -------------------------------------------------------------------------------------------
std::string checkpoint_path(const std::string& folder, std::int64_t step);  // FOLDER/step_N.h5
std::vector<std::int64_t> checkpoint_steps(const std::string& folder);      // that stand there, lowest first
// The newest one that is complete and undamaged; others are passed over with a warning in the log.
std::optional<std::string> latest_complete(const std::string& folder);
// After the checkpoint of step `newest` was written: keeps it and those before it, `keep` in all. Older ones go, and so do
// those of later steps: the run was resumed from before them because they are damaged, and it will write them again.
void rotate_checkpoints(const std::string& folder, std::int64_t newest, std::int64_t keep);
// `path` itself, or, where it is a run folder, its newest complete checkpoint. Throws Error if there is none.
std::string find_checkpoint(const std::string& path);

// ---- weights alone, for evaluation and generation -------------------------------------------------------------------------
struct LoadedModel {
    RunConfig config;
    model::LanguageModel model;
    TokenizerInfo tokenizer;
    std::int64_t step = 0;
};
// Fills a model's weights from a checkpoint, or from the newest complete one of a run folder. Throws Error that names the
// first tensor that is missing, has another shape, or is damaged.
void load_weights(const std::string& path, const model::LanguageModel& model);
// `path`: a checkpoint, or a run folder (its newest complete checkpoint). Activations have `compute_dtype`; if it is not
// given, float32 on the CPU and the dtype of the training on a GPU.
LoadedModel load_model(const std::string& path, Device device = cpu_device, std::optional<DType> compute_dtype = {});

}  // namespace fenwick::train
