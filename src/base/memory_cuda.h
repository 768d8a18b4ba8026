// The CUDA half of base/memory.h, of timer.h and graph.h: defined in memory_cuda.cpp, or, in a build without CUDA, in memory_stub.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include <string>

#include "base/device.h"

namespace fenwick {

// Number of GPUs this process can use; 0 in a build without CUDA or without a driver. Never throws.
int cuda_device_count();
// "NVIDIA H200". Throws Error if there is no such GPU.
std::string cuda_device_name(int device);

namespace detail {
void* cuda_allocate(int device, std::size_t bytes);  // nullptr when out of memory
void cuda_release(int device, void* data) noexcept;
void cuda_fill(int device, void* data, std::uint8_t value, std::size_t bytes);
void* cuda_stream(int device);  // the stream that work on this GPU is ordered on (a cudaStream_t)
void cuda_copy(Device to_device, void* to, Device from_device, const void* from, std::size_t bytes);
// Events: marks in the stream's order, between which time can be read.
void* cuda_event_create(int device);
void cuda_event_destroy(void* event) noexcept;
void cuda_event_record(int device, void* event);
double cuda_event_seconds(void* from, void* to);  // waits for `to`
void cuda_event_wait(void* event);                // until what was queued before its last record is done; at once if none
void cuda_event_wait_noexcept(void* event) noexcept;
void cuda_synchronize(int device);                // waits for all work queued on this GPU's stream
// Page-locked host memory, and copies from it on a second stream: after `begin` (an event) has come; `done` marks their end.
void* cuda_allocate_host(int device, std::size_t bytes);
void cuda_release_host(void* data) noexcept;
void cuda_upload(int device, void* to, const void* from, std::size_t bytes, void* begin, void* done);
void cuda_stream_wait(int device, void* event);   // work queued on this GPU's stream from here on begins after `event`
// Graphs: what this thread queues on the GPU's stream between begin and end is recorded, not done. The executable graph is
// destroyed when the work queued so far is done.
void cuda_capture_begin(int device);
void* cuda_capture_end(int device);
void cuda_capture_abandon(int device) noexcept;
void cuda_graph_launch(int device, void* executable);
void cuda_graph_destroy(int device, void* executable) noexcept;
}  // namespace detail

}  // namespace fenwick
