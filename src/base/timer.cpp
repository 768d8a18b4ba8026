#include "base/timer.h"

#include <utility>

#include "base/memory_cuda.h"

namespace fenwick {

TimeMark::TimeMark(Device device) {
    if (device.is_cpu()) {
        time_ = std::chrono::steady_clock::now();
    } else {
        event_ = detail::cuda_event_create(device.index);
        detail::cuda_event_record(device.index, event_);
    }
}
TimeMark::~TimeMark() {
    if (event_ != nullptr) detail::cuda_event_destroy(event_);
}
TimeMark::TimeMark(TimeMark&& other) noexcept : time_(other.time_), event_(std::exchange(other.event_, nullptr)) {}
TimeMark& TimeMark::operator=(TimeMark&& other) noexcept {
    std::swap(time_, other.time_);
    std::swap(event_, other.event_);
    return *this;
}

void TimeMark::wait() const {
    if (event_ != nullptr) detail::cuda_event_wait(event_);
}

double seconds_between(const TimeMark& from, const TimeMark& to) {
    if (from.event_ != nullptr) return detail::cuda_event_seconds(from.event_, to.event_);
    return std::chrono::duration<double>(to.time_ - from.time_).count();
}

void synchronize(Device device) {
    if (device.is_cuda()) detail::cuda_synchronize(device.index);
}

// ---- time by operator --------------------------------------------------------------------------------------------------

namespace {

struct Lap {
    std::string name;
    TimeMark end;
};
struct Profile {
    Device device{};
    bool running = false;
    std::vector<Lap> laps;  // the first is the start
};
thread_local Profile profile;

}  // namespace

void start_profile(Device device) {
    profile.device = device;
    profile.running = true;
    profile.laps.clear();
    lap("start");
}

bool profiling() { return profile.running; }

void lap(std::string_view name, std::string_view pass) {
    if (!profile.running) return;
    profile.laps.push_back({fmt::format("{}{}{}", name, pass.empty() ? "" : " ", pass), TimeMark(profile.device)});
}

std::map<std::string, OperatorTime> stop_profile() {
    std::map<std::string, OperatorTime> times;
    for (std::size_t i = 1; i < profile.laps.size(); ++i) {
        auto& time = times[profile.laps[i].name];
        ++time.calls;
        time.seconds += seconds_between(profile.laps[i - 1].end, profile.laps[i].end);
    }
    profile.running = false;
    profile.laps.clear();
    return times;
}

}  // namespace fenwick
