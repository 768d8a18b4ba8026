#include "base/graph.h"

#include <utility>

#include "base/memory_cuda.h"

namespace fenwick {

DeviceGraph::DeviceGraph(Device device, std::function<void()> work) : device_(device) {
    if (device.is_cpu()) {
        work_ = std::move(work);
        return;
    }
    detail::cuda_capture_begin(device.index);
    try {
        work();
    } catch (...) {
        detail::cuda_capture_abandon(device.index);
        throw;
    }
    executable_ = detail::cuda_capture_end(device.index);
}
DeviceGraph::~DeviceGraph() {
    if (executable_ != nullptr) detail::cuda_graph_destroy(device_.index, executable_);
}
DeviceGraph::DeviceGraph(DeviceGraph&& other) noexcept
    : device_(other.device_), work_(std::move(other.work_)), executable_(std::exchange(other.executable_, nullptr)) {}
DeviceGraph& DeviceGraph::operator=(DeviceGraph&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(work_, other.work_);
    std::swap(executable_, other.executable_);
    return *this;
}

void DeviceGraph::launch() const {
    if (device_.is_cpu())
        work_();
    else
        detail::cuda_graph_launch(device_.index, executable_);
}

}  // namespace fenwick
