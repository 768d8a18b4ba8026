// Stands in for memory_cuda.cpp in a build without CUDA.
#include "base/memory_cuda.h"

namespace fenwick {
namespace {
[[noreturn]] void no_cuda() {
    fail("this program was built without CUDA; set device: cpu, or build with the CUDA Toolkit (cmake --preset cuda)");
}
}  // namespace

int cuda_device_count() { return 0; }
std::string cuda_device_name(int) { no_cuda(); }

namespace detail {
void* cuda_allocate(int, std::size_t) { no_cuda(); }
void cuda_release(int, void*) noexcept {}
void cuda_fill(int, void*, std::uint8_t, std::size_t) { no_cuda(); }
void* cuda_stream(int) { no_cuda(); }
void cuda_copy(Device, void*, Device, const void*, std::size_t) { no_cuda(); }
void* cuda_event_create(int) { no_cuda(); }
void cuda_event_destroy(void*) noexcept {}
void cuda_event_record(int, void*) { no_cuda(); }
double cuda_event_seconds(void*, void*) { no_cuda(); }
void cuda_event_wait(void*) { no_cuda(); }
void cuda_event_wait_noexcept(void*) noexcept {}
void cuda_synchronize(int) { no_cuda(); }
void* cuda_allocate_host(int, std::size_t) { no_cuda(); }
void cuda_release_host(void*) noexcept {}
void cuda_upload(int, void*, const void*, std::size_t, void*, void*) { no_cuda(); }
void cuda_stream_wait(int, void*) { no_cuda(); }
void cuda_capture_begin(int) { no_cuda(); }
void* cuda_capture_end(int) { no_cuda(); }
void cuda_capture_abandon(int) noexcept {}
void cuda_graph_launch(int, void*) { no_cuda(); }
void cuda_graph_destroy(int, void*) noexcept {}
}  // namespace detail

}  // namespace fenwick
