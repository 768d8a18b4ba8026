// Timing on a device, for the commands that print figures.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/device.h"

namespace fenwick::tools {

struct Seconds {
    double median = 0, lowest = 0;
    std::int64_t repetitions = 0;
};

// Calls the bodies in turn, so that none finds its data in a cache, after a warm-up: for about `budget` seconds, or exactly
// `repetitions` times if that is above 0. On a GPU all calls are queued at once, and the marks between them are in the
// queue: what the host does between calls does not count while the GPU has work.
Seconds measure(Device device, const std::vector<std::function<void()>>& bodies, double budget, std::int64_t repetitions);

// Bytes a second that a large copy within the device's memory reads and writes, both counted.
double measure_copy(Device device, double budget, std::int64_t repetitions);

}  // namespace fenwick::tools
