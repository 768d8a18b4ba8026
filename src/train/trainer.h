// The training loop.
#pragma once

#include <string>

#include "base/memory.h"
#include "train/communicator.h"
#include "train/config.h"
#include "train/metrics.h"

namespace fenwick::train {

struct StartReport {
    const RunConfig& config;        // resolved
    std::int64_t first_step = 1;    // > 1 for a resumed run
    std::string resumed_from;       // checkpoint, or ""
    std::int64_t parameter_count = 0;
    std::int64_t tokens_per_epoch = 0;  // of all corpora together
    double fill = 1;                // share of the rows' targets that are tokens
    double flops_per_token = 0;     // forward and backward, in sequences as long as those of the data; with tokens/s the speed that MFU is a share of
    Device device;
    std::string device_name;        // "NVIDIA H200"; "" for the CPU
    double peak_flops = 0;          // of all processes' GPUs in dense bfloat16; 0: not known
    int processes = 1;
    MemoryStats memory;
};

struct EndReport {
    std::int64_t step = 0;
    std::int64_t total_steps = 0;
    int signal = 0;              // SIGINT or SIGTERM, if one ended the run before its last step
    bool nothing_left = false;   // the run had got as far before; nothing was trained or written
    std::string checkpoint;      // the last one; "" if none is written (train.keep_checkpoints: 0)
    double time_s = 0;
    MemoryStats memory;          // with the peaks
};

// What a command line or a test may look at. Called on rank 0 only, from the training thread; an exception thrown here
// ends the run at once, as a crash would.
class Observer {
public:
    virtual ~Observer() = default;
    virtual void on_start(const StartReport&) {}
    virtual void on_step(const StepReport&) {}                          // after every step, before its checkpoint
    virtual void on_validation(std::int64_t /*rows_done*/, std::int64_t /*rows*/) {}
    virtual void on_checkpoint(std::int64_t /*step*/, const std::string& /*path*/) {}
    virtual void on_end(const EndReport&) {}                            // alone, where nothing is left to train
};

enum class Resume : std::uint8_t {
    no,         // a run folder that already holds a run is refused
    automatic,  // from the newest complete checkpoint in the run folder; from the start if there is none
};

// Where a process trains that is number `local_rank` of those on its machine. Throws Error where there is no GPU and
// train.device or train.dtype needs one.
Device device_for(const TrainConfig& train, int local_rank);

// Trains as configured. Writes run_dir/config.yaml, metrics.jsonl, checkpoints/step_N.h5 (rank 0 alone). A run that was
// killed anywhere and resumed gives the bytes of an uninterrupted one, times aside.
// SIGINT and SIGTERM end it after the current step with a checkpoint (EndReport::signal); a second one kills. Data that turns
// out to be damaged ends it by Error, with a checkpoint of the last step done. While it trains, rank 0 holds a lock on
// run_dir/.lock; a second run in the folder is refused.
EndReport train(RunConfig config, Resume resume, Communicator& communicator, Observer& observer);

}  // namespace fenwick::train
