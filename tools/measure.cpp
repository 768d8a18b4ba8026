#include "tools/measure.h"

#include <algorithm>

#include "autograd/tensor.h"
#include "base/timer.h"

namespace fenwick::tools {

Seconds measure(Device device, const std::vector<std::function<void()>>& bodies, double budget, std::int64_t repetitions) {
    for (const auto& body : bodies) body();
    synchronize(device);
    const TimeMark begin(device);
    bodies.front()();
    const TimeMark end(device);
    const double once = std::max(seconds_between(begin, end), 1e-7);
    if (repetitions == 0) repetitions = std::clamp<std::int64_t>(static_cast<std::int64_t>(budget / once), 5, 500);
    std::vector<TimeMark> marks;
    marks.reserve(static_cast<std::size_t>(repetitions) + 1);
    marks.emplace_back(device);
    for (std::size_t i = 0; i < static_cast<std::size_t>(repetitions); ++i) {
        bodies[i % bodies.size()]();
        marks.emplace_back(device);
    }
    synchronize(device);
    std::vector<double> times;
    for (std::size_t i = 0; i + 1 < marks.size(); ++i) times.push_back(seconds_between(marks[i], marks[i + 1]));
    std::sort(times.begin(), times.end());
    return {times[times.size() / 2], times.front(), repetitions};
}

double measure_copy(Device device, double budget, std::int64_t repetitions) {
    const std::int64_t count = std::int64_t{1} << (device.is_cpu() ? 25 : 29);
    const Tensor from = Tensor::zeros({count}, DType::float32, device);
    Tensor to = Tensor::zeros({count}, DType::float32, device);
    const Seconds time = measure(device, {[&] { to.copy_from(from); }}, budget, repetitions);
    return 8 * static_cast<double>(count) / time.median;
}

}  // namespace fenwick::tools
