// metrics.jsonl: one JSON object a line.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace fenwick::train {

// One optimizer step, as metrics.jsonl and observers see it.
struct StepReport {
    std::int64_t step = 0, total_steps = 0;
    std::int64_t tokens = 0;  // targets trained on since the run began
    double loss = 0;          // mean over the global batch, natural logarithm
    double learning_rate = 0;
    double grad_norm = 0;     // before clipping
    bool skipped = false;     // loss or gradient was not finite and train.on_nan is skip
    std::optional<double> valid_loss;
    double time_s = 0;        // since this process began the run or resumed it
    double tokens_per_s = 0;  // of this step, over all processes
    std::optional<double> mfu;  // model FLOPs (model/costs.h) over the GPUs' dense bfloat16 peak, where that is known
};

// The line of a report, without the newline. Times come last, so that the rest can be compared byte for byte:
// two exact runs agree in everything before ',"time_s"'.
std::string metrics_line(const StepReport& report);

class MetricsFile {
public:
    // Appends to `path`. Lines of steps after `last_step`, which a resumed run will write again, are cut off first, and
    // so is half a line at the end.
    MetricsFile(std::string path, std::int64_t last_step);
    void write(const StepReport& report);  // throws Error if the line could not be written

private:
    std::string path_;
    std::ofstream file_;
};

}  // namespace fenwick::train
