// Memory on GPUs: the stream-ordered allocator of the CUDA runtime. Freed blocks stay in the device's pool, so that a
// training step of fixed shape asks the driver for nothing after the first step.
#include "base/memory_cuda.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <mutex>

#include "base/cuda_check.h"

namespace fenwick {
namespace {

constexpr int max_devices = 64;

struct DeviceState {
    std::once_flag once;
    cudaStream_t stream = nullptr;   // of all work
    cudaStream_t uploads = nullptr;  // of copies from page-locked memory that run beside it
};

// Makes `device` the calling thread's current one and returns its streams, made at first use and never destroyed:
// static Buffers may be released after main.
const DeviceState& enter_state(int device) {
    static auto* states = new std::array<DeviceState, max_devices>;
    FENWICK_CHECK(device >= 0 && device < cuda_device_count() && device < max_devices,
                  "[cuda] there is no device cuda:{}; this process sees {}", device, cuda_device_count());
    FENWICK_CUDA_CHECK(cudaSetDevice(device));
    DeviceState& state = (*states)[static_cast<std::size_t>(device)];
    std::call_once(state.once, [&] {
        int pools = 0;
        FENWICK_CUDA_CHECK(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device));
        FENWICK_CHECK(pools != 0,
                      "[cuda] cuda:{} has no stream-ordered allocator (cudaMallocAsync); a newer driver is needed", device);
        cudaMemPool_t pool = nullptr;
        FENWICK_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, device));
        std::uint64_t threshold = std::numeric_limits<std::uint64_t>::max();
        FENWICK_CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
        FENWICK_CUDA_CHECK(cudaStreamCreateWithFlags(&state.stream, cudaStreamNonBlocking));
        FENWICK_CUDA_CHECK(cudaStreamCreateWithFlags(&state.uploads, cudaStreamNonBlocking));
    });
    return state;
}
cudaStream_t enter(int device) { return enter_state(device).stream; }

// Small uploads go through pinned memory, slot after slot, so that the host neither waits for the GPU nor has to keep its
// buffer: a training step queues its batches without a stop. A slot is taken again when its last copy is done.
class UploadRing {
public:
    static constexpr std::size_t slot_bytes = std::size_t{1} << 20;

    void upload(cudaStream_t stream, void* to, const void* from, std::size_t bytes) {
        std::lock_guard lock(mutex_);
        Slot& slot = slots_[next_];
        next_ = (next_ + 1) % slots_.size();
        if (slot.memory == nullptr) {
            FENWICK_CUDA_CHECK(cudaHostAlloc(&slot.memory, slot_bytes, cudaHostAllocPortable));
            FENWICK_CUDA_CHECK(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming));
        } else {
            FENWICK_CUDA_CHECK(cudaEventSynchronize(slot.done));
        }
        std::memcpy(slot.memory, from, bytes);
        FENWICK_CUDA_CHECK(cudaMemcpyAsync(to, slot.memory, bytes, cudaMemcpyHostToDevice, stream));
        FENWICK_CUDA_CHECK(cudaEventRecord(slot.done, stream));
    }

private:
    struct Slot {
        void* memory = nullptr;
        cudaEvent_t done = nullptr;
    };
    std::mutex mutex_;
    std::array<Slot, 8> slots_;
    std::size_t next_ = 0;
};

}  // namespace

int cuda_device_count() {
    static const int count = [] {
        int found = 0;
        if (cudaGetDeviceCount(&found) == cudaSuccess) return found;
        (void)cudaGetLastError();
        return 0;
    }();
    return count;
}

std::string cuda_device_name(int device) {
    cudaDeviceProp properties{};
    FENWICK_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    return properties.name;
}

namespace detail {

void* cuda_stream(int device) { return enter(device); }

void* cuda_allocate(int device, std::size_t bytes) {
    const cudaStream_t stream = enter(device);
    void* data = nullptr;
    cudaError_t status = cudaMallocAsync(&data, bytes, stream);
    if (status == cudaErrorMemoryAllocation) {
        // The pool may hold free blocks in pieces that do not fit: give them back to the driver and try once more.
        (void)cudaGetLastError();
        FENWICK_CUDA_CHECK(cudaStreamSynchronize(stream));
        cudaMemPool_t pool = nullptr;
        FENWICK_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, device));
        FENWICK_CUDA_CHECK(cudaMemPoolTrimTo(pool, 0));
        status = cudaMallocAsync(&data, bytes, stream);
        if (status == cudaErrorMemoryAllocation) {
            (void)cudaGetLastError();
            return nullptr;
        }
    }
    FENWICK_CUDA_CHECK(status);
    return data;
}

void cuda_release(int device, void* data) noexcept {
    // Errors cannot be reported here: at process exit the runtime may be gone, and an earlier kernel's failure is
    // reported by the next checked call.
    try {
        (void)cudaFreeAsync(data, enter(device));
    } catch (...) {
    }
}

void cuda_fill(int device, void* data, std::uint8_t value, std::size_t bytes) {
    const cudaStream_t stream = enter(device);
    FENWICK_CUDA_CHECK(cudaMemsetAsync(data, value, bytes, stream));
}

void cuda_copy(Device to_device, void* to, Device from_device, const void* from, std::size_t bytes) {
    if (to_device.is_cuda() && from_device.is_cuda() && to_device != from_device) {
        // The destination may still be in use by its own stream; the copy runs on the source's.
        FENWICK_CUDA_CHECK(cudaStreamSynchronize(enter(to_device.index)));
        const cudaStream_t stream = enter(from_device.index);
        FENWICK_CUDA_CHECK(cudaMemcpyPeerAsync(to, to_device.index, from, from_device.index, bytes, stream));
        FENWICK_CUDA_CHECK(cudaStreamSynchronize(stream));
        return;
    }
    const cudaStream_t stream = enter(to_device.is_cuda() ? to_device.index : from_device.index);
    if (to_device.is_cuda() && from_device.is_cuda()) {
        FENWICK_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
        return;
    }
    if (to_device.is_cuda() && bytes <= UploadRing::slot_bytes) {
        static auto* rings = new std::array<UploadRing, max_devices>;  // an event belongs to its GPU
        (*rings)[static_cast<std::size_t>(to_device.index)].upload(stream, to, from, bytes);
        return;
    }
    const auto kind = to_device.is_cuda() ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    FENWICK_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, stream));
    FENWICK_CUDA_CHECK(cudaStreamSynchronize(stream));
}

void* cuda_event_create(int device) {
    (void)enter(device);
    cudaEvent_t event = nullptr;
    FENWICK_CUDA_CHECK(cudaEventCreate(&event));
    return event;
}

void cuda_event_destroy(void* event) noexcept { (void)cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void cuda_event_record(int device, void* event) {
    const cudaStream_t stream = enter(device);
    FENWICK_CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event), stream));
}

double cuda_event_seconds(void* from, void* to) {
    FENWICK_CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(to)));
    float milliseconds = 0;
    FENWICK_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to)));
    return 1e-3 * static_cast<double>(milliseconds);
}

void cuda_event_wait(void* event) { FENWICK_CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(event))); }
void cuda_event_wait_noexcept(void* event) noexcept { (void)cudaEventSynchronize(static_cast<cudaEvent_t>(event)); }

void* cuda_allocate_host(int device, std::size_t bytes) {
    (void)enter(device);
    void* data = nullptr;
    if (cudaHostAlloc(&data, std::max<std::size_t>(bytes, 1), cudaHostAllocPortable) != cudaSuccess) {
        (void)cudaGetLastError();
        fail("[cuda] {} bytes of page-locked host memory cannot be had; lower data.prefetch", bytes);
    }
    return data;
}

void cuda_release_host(void* data) noexcept { (void)cudaFreeHost(data); }

void cuda_upload(int device, void* to, const void* from, std::size_t bytes, void* begin, void* done) {
    const cudaStream_t uploads = enter_state(device).uploads;
    FENWICK_CUDA_CHECK(cudaStreamWaitEvent(uploads, static_cast<cudaEvent_t>(begin)));
    FENWICK_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, uploads));
    FENWICK_CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(done), uploads));
}

void cuda_stream_wait(int device, void* event) {
    const cudaStream_t stream = enter(device);
    FENWICK_CUDA_CHECK(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(event)));
}

void cuda_synchronize(int device) {
    const cudaStream_t stream = enter(device);
    FENWICK_CUDA_CHECK(cudaStreamSynchronize(stream));
}

void cuda_capture_begin(int device) {
    const cudaStream_t stream = enter(device);
    FENWICK_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

void* cuda_capture_end(int device) {
    const cudaStream_t stream = enter(device);
    cudaGraph_t graph = nullptr;
    FENWICK_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
    (void)cudaGraphDestroy(graph);
    FENWICK_CUDA_CHECK(status);
    return executable;
}

void cuda_capture_abandon(int device) noexcept {
    try {
        cudaGraph_t graph = nullptr;
        if (cudaStreamEndCapture(enter(device), &graph) == cudaSuccess) (void)cudaGraphDestroy(graph);
        (void)cudaGetLastError();
    } catch (...) {
    }
}

void cuda_graph_launch(int device, void* executable) {
    const cudaStream_t stream = enter(device);
    FENWICK_CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable), stream));
}

void cuda_graph_destroy(int device, void* executable) noexcept {
    try {
        (void)cudaStreamSynchronize(enter(device));
        (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable));
    } catch (...) {
    }
}

}  // namespace detail
}  // namespace fenwick
