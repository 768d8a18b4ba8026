// Time on a device: the wall clock on the CPU, events in the stream on a GPU, where a call returns before its work is done.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/device.h"

namespace fenwick {

// A moment in the order of the device's work.
class TimeMark {
public:
    explicit TimeMark(Device device);  // now; on CUDA: when everything queued before is done
    ~TimeMark();
    TimeMark(TimeMark&& other) noexcept;
    TimeMark& operator=(TimeMark&& other) noexcept;
    void wait() const;  // until it has come

private:
    friend double seconds_between(const TimeMark& from, const TimeMark& to);
    std::chrono::steady_clock::time_point time_;
    void* event_ = nullptr;
};
double seconds_between(const TimeMark& from, const TimeMark& to);  // waits until `to` has come

// Waits for the work queued on a GPU; nothing to do on the CPU.
void synchronize(Device device);

// ---- time by operator --------------------------------------------------------------------------------------------------
// While this thread profiles, the tape calls lap() behind every operator's forward and backward: the time since the lap
// before it belongs to the operator. Work outside the tape laps by itself, or counts to what comes next.
struct OperatorTime {
    std::int64_t calls = 0;
    double seconds = 0;
};
void start_profile(Device device);
bool profiling();
void lap(std::string_view name, std::string_view pass = "");           // pass: "forward", "backward"
std::map<std::string, OperatorTime> stop_profile();                     // by "name pass"; waits for the work

}  // namespace fenwick
