#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fenwick::train {
namespace {

// How far `step` has come from `begin` (0) to `end` (1).
double progress(std::int64_t step, std::int64_t begin, std::int64_t end) {
    if (end <= begin) return step > begin ? 1.0 : 0.0;
    return std::clamp(static_cast<double>(step - begin) / static_cast<double>(end - begin), 0.0, 1.0);
}

}  // namespace

double learning_rate(const ScheduleConfig& schedule, double peak, std::int64_t step, std::int64_t steps) {
    const std::int64_t warmup = schedule.warmup_steps;
    if (step < warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
    double remaining = 1.0;  // of the way from the final rate up to the peak
    switch (schedule.type) {
        case ScheduleType::constant: return peak;
        case ScheduleType::cosine:
            remaining = 0.5 * (1.0 + std::cos(std::numbers::pi * progress(step, warmup, steps)));
            break;
        case ScheduleType::linear: remaining = 1.0 - progress(step, warmup, steps); break;
        case ScheduleType::wsd: {
            const double done = progress(step, steps - schedule.decay_steps, steps);
            remaining = 1.0 - (schedule.decay_shape == DecayShape::sqrt ? std::sqrt(done) : done);
            break;
        }
    }
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * remaining);
}

}  // namespace fenwick::train
