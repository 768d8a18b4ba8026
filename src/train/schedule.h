// The learning rate as a pure function of the step.
#pragma once

#include "train/config.h"

namespace fenwick::train {

// Learning rate of update `step` (counted from 1) of `steps`. Linear warm-up reaches `peak` at step warmup_steps; then
//   cosine    half a cosine from peak to peak * min_ratio at the last step
//   linear    a straight line to the same
//   wsd       peak until the last decay_steps, then down to peak * min_ratio linearly or as 1 - sqrt(progress)
//   constant  peak
// Steps past the last keep its rate.
double learning_rate(const ScheduleConfig& schedule, double peak, std::int64_t step, std::int64_t steps);

}  // namespace fenwick::train
