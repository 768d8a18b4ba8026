// Memory on GPUs: the stream-ordered allocator of the CUDA runtime. Freed blocks stay in the device's pool, so that a
// training step of fixed shape asks the driver for nothing after the first step.
#include "base/memory_cuda.h"

#include <array>
#include <limits>
#include <mutex>

#include "base/cuda_check.h"

namespace fenwick {
namespace {

constexpr int max_devices = 64;

struct DeviceState {
    std::once_flag once;
    cudaStream_t stream = nullptr;
};

// Makes `device` the calling thread's current one and returns its stream, made at first use and never destroyed:
// static Buffers may be released after main.
cudaStream_t enter(int device) {
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
    });
    return state.stream;
}

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
    const auto kind = to_device.is_cuda() ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    FENWICK_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, stream));
    FENWICK_CUDA_CHECK(cudaStreamSynchronize(stream));
}

}  // namespace detail
}  // namespace fenwick
