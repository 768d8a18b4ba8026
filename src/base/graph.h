// Work that is queued again and again: on CUDA one graph, so that the host queues a single thing; on the CPU the calls.
#pragma once

#include <functional>

#include "base/device.h"

namespace fenwick {

class DeviceGraph {
public:
    DeviceGraph() = default;
    // On CUDA, captures what `work` queues on the device's stream, which must not wait for the host nor be the first use
    // of its kernels; memory that it reads and writes must outlive the graph. On the CPU keeps `work`.
    DeviceGraph(Device device, std::function<void()> work);
    ~DeviceGraph();
    DeviceGraph(DeviceGraph&& other) noexcept;
    DeviceGraph& operator=(DeviceGraph&& other) noexcept;

    explicit operator bool() const { return executable_ != nullptr || work_ != nullptr; }
    void launch() const;  // queues it

private:
    Device device_{};
    std::function<void()> work_;
    void* executable_ = nullptr;
};

}  // namespace fenwick
