#include "train/metrics.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"

namespace fenwick::train {

std::string metrics_line(const StepReport& report) {
    nlohmann::ordered_json line;  // a value that is not finite becomes null
    line["step"] = report.step;
    line["tokens"] = report.tokens;
    line["loss"] = report.loss;
    line["learning_rate"] = report.learning_rate;
    line["grad_norm"] = report.grad_norm;
    if (report.skipped) line["skipped"] = true;
    if (report.valid_loss) line["valid_loss"] = *report.valid_loss;
    line["time_s"] = std::round(report.time_s * 1e3) / 1e3;
    line["tokens_per_s"] = std::round(report.tokens_per_s * 10) / 10;
    if (report.mfu) line["mfu"] = std::round(*report.mfu * 1e4) / 1e4;
    return line.dump();
}

MetricsFile::MetricsFile(std::string path, std::int64_t last_step) : path_(std::move(path)) {
    if (std::filesystem::exists(path_)) {
        const std::string text = read_file(path_);
        std::size_t kept = 0;
        while (kept < text.size()) {
            const std::size_t end = text.find('\n', kept);
            if (end == std::string::npos) break;
            const auto line = nlohmann::json::parse(text.substr(kept, end - kept), nullptr, false);
            if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer() ||
                line["step"].get<std::int64_t>() > last_step)
                break;
            kept = end + 1;
        }
        if (kept < text.size()) write_file_atomically(path_, std::string_view(text).substr(0, kept));
    }
    file_.open(path_, std::ios::app | std::ios::binary);
    FENWICK_CHECK(file_.good(), "{}: cannot be opened for writing", path_);
}

void MetricsFile::write(const StepReport& report) {
    file_ << metrics_line(report) << '\n' << std::flush;
    FENWICK_CHECK(file_.good(), "{}: a line could not be written (is the disk full?)", path_);
}

}  // namespace fenwick::train
