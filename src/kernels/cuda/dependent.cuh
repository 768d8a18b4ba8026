// Programmatic dependent launches: a kernel may begin while the one queued before it still runs.
//
// Such a kernel prefetches what no kernel near it writes (weights, states of the last token), then waits for its
// predecessor; after that everything queued before is done and visible, since the predecessor waited in its turn. Right
// behind the wait it lets its successor begin.
#pragma once

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda::dependent {

inline int attribute_of(const Exec& exec, cudaDeviceAttr attribute) {
    int value = 0;
    FENWICK_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, exec.device.index));
    return value;
}
inline int multiprocessors(const Exec& exec) { return attribute_of(exec, cudaDevAttrMultiProcessorCount); }
inline bool has_early_launches(const Exec& exec) { return attribute_of(exec, cudaDevAttrComputeCapabilityMajor) >= 9; }

template <class... Parameters, class... Arguments>
void launch_with(const cudaLaunchAttribute* attribute, const char* op, const Exec& exec, void (*kernel)(Parameters...),
                 dim3 grid, dim3 block, std::size_t shared_bytes, Arguments&&... arguments) {
    if (shared_bytes > 48 * 1024)
        FENWICK_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(shared_bytes)));
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_of(exec);
    config.attrs = const_cast<cudaLaunchAttribute*>(attribute);
    config.numAttrs = attribute != nullptr ? 1 : 0;
    const cudaError_t status = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
    if (status != cudaSuccess) [[unlikely]] {
        (void)cudaGetLastError();
        fail("[{}] launching {} x {} blocks of {} threads, {} bytes of shared memory failed: {}", op, grid.x, grid.y,
             block.x, shared_bytes, cudaGetErrorString(status));
    }
}
// May begin before what is queued ahead of it has ended.
template <class... Parameters, class... Arguments>
void launch(const char* op, const Exec& exec, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            Arguments&&... arguments) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    launch_with(has_early_launches(exec) ? &early : nullptr, op, exec, kernel, grid, block, shared_bytes,
                std::forward<Arguments>(arguments)...);
}
// All blocks run at the same time, so that they may wait for each other.
template <class... Parameters, class... Arguments>
void launch_together(const char* op, const Exec& exec, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                     std::size_t shared_bytes, Arguments&&... arguments) {
    cudaLaunchAttribute together{};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    launch_with(&together, op, exec, kernel, grid, block, shared_bytes, std::forward<Arguments>(arguments)...);
}

// Waits for the kernels queued before this one, then lets the next one begin. Before Hopper launches follow each other
// anyway.
__device__ __forceinline__ void wait_for_predecessor() {
#if !defined(FENWICK_CUDA_EMULATION) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Asks for the line in the L2 cache.
__device__ __forceinline__ void prefetch(const void* address) {
#if !defined(FENWICK_CUDA_EMULATION)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#else
    (void)address;
#endif
}
// Sums N values over the lanes of a warp whose numbers differ in the bits below 32 and not below `lowest`: every such lane
// gets the sum of value number transposed_index<N>(lane). N is a power of two, at most 32 / lowest.
template <int N>
__device__ __forceinline__ float transposed_sum(float (&values)[N], int lane, int lowest = 1) {
    int bit = 16;
#pragma unroll
    for (int half = N / 2; half >= 1; half /= 2, bit /= 2) {
        const bool upper = (lane & bit) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? values[i + half] : values[i], given = upper ? values[i] : values[i + half];
            values[i] = kept + __shfl_xor_sync(0xffffffffu, given, bit);
        }
    }
    for (; bit >= lowest; bit /= 2) values[0] += __shfl_xor_sync(0xffffffffu, values[0], bit);
    return values[0];
}
template <int N>
__device__ __forceinline__ int transposed_index(int lane) {
    int index = 0, bit = 16;
#pragma unroll
    for (int half = N / 2; half >= 1; half /= 2, bit /= 2)
        if ((lane & bit) != 0) index += half;
    return index;
}

}  // namespace fenwick::kernels::cuda::dependent
