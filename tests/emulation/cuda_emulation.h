// Runs CUDA kernels on the CPU, so that their index arithmetic, barriers and shared memory can be tested without a GPU.
//
// A kernel's .cu file is compiled as C++ with FENWICK_CUDA_EMULATION defined and this folder before all others on the
// include path, which replaces cuda_runtime.h and cuda_bf16.h. Every thread of a block is a fiber; blocks run one after
// another; warps advance in random order, so that a missing barrier shows. Shared memory starts as NaN and is guarded
// against overruns; an asynchronous copy makes its target NaN at once and fills it when the thread waits for it, or before
// it arrives at an mbarrier. Emulated: what kernels/cuda/common.cuh and tile.cuh need, blocks of one dimension, whole warps.
// x86-64 only.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

// ---- the runtime -----------------------------------------------------------------------------------------------------
using cudaError_t = int;
using cudaStream_t = void*;
using cudaEvent_t = void*;
inline constexpr int cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 0, cudaMemcpyHostToDevice = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "error"; }
inline const char* cudaGetErrorName(cudaError_t) { return "error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
namespace emulation {
inline int compute_capability = 9;  // its major number: kernels that need a newer GPU are not chosen
}
using cudaDeviceAttr = int;
inline constexpr int cudaDevAttrComputeCapabilityMajor = 0, cudaDevAttrMultiProcessorCount = 1;
inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
    // So few multiprocessors that blocks which stay take several units of work.
    *value = attribute == cudaDevAttrMultiProcessorCount ? 3 : emulation::compute_capability;
    return cudaSuccess;
}
// The limit of a Hopper GPU.
inline cudaError_t cudaFuncSetAttribute(const void*, int, int bytes) { return bytes > 227 * 1024; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, cudaStream_t) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
// Work is done at once, whatever the stream.
inline constexpr unsigned cudaStreamNonBlocking = 0, cudaEventDisableTiming = 0;
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------
struct __nv_bfloat16 {
    std::uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline float __uint_as_float(std::uint32_t x) { return std::bit_cast<float>(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    if (std::isnan(x)) return {0x7fff};
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(int x) { return std::popcount(static_cast<unsigned>(x)); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline void sincospif(float x, float* sine, float* cosine) {
    *sine = static_cast<float>(std::sin(3.14159265358979323846 * static_cast<double>(x)));
    *cosine = static_cast<float>(std::cos(3.14159265358979323846 * static_cast<double>(x)));
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// ---- threads ---------------------------------------------------------------------------------------------------------
namespace emulation {

using Operation = void (*)(void* const* arguments);  // of a warp's 32 threads

extern int thread;  // of its block, the one that runs
extern dim3 grid_size, block_size, block_position;

[[noreturn]] inline void stop(const char* what) {
    std::fprintf(stderr, "[cuda emulation] block (%u, %u, %u), thread %d: %s\n", block_position.x, block_position.y,
                 block_position.z, thread, what);
    std::abort();
}

void run(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& body);
void barrier();
// Waits until all 32 threads of the warp are here, then does operation(their arguments) once.
void collective(Operation operation, void* argument);

unsigned char* shared_memory();
inline int thread_index() { return thread; }
void copy_async(void* to, const void* from, std::size_t bytes, bool valid);
inline void copy_async_16(void* to, const void* from, bool valid) { copy_async(to, from, 16, valid); }
template <int Bytes>
void copy_async(void* to, const void* from, bool valid) {
    copy_async(to, from, Bytes, valid);
}
void commit_async();
inline void prefetch(const void*) {}
inline void store_16(void* to, const std::uint32_t* x) {
    if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0) stop("16 bytes to an address that is no multiple of 16");
    std::memcpy(to, x, 16);
}
void finish_copies(int pending_groups);
template <int Pending>
void wait_async() {
    finish_copies(Pending);
}

inline float exp2_fast(float x) { return std::exp2(x); }

// mbarrier as pipeline.cuh names it. Copies that arrive by themselves complete at a random time after the call.
struct Barrier {
    std::uint16_t arrivals, missing;
    std::uint32_t phase;
};
void initialize(Barrier* barrier, int arrivals);
void arrive(Barrier* barrier);
void arrive_after_copies(Barrier* barrier);
void wait(const Barrier* barrier, int parity);
bool has_ended(const Barrier* barrier, int parity);
// Bytes that bulk copies bring count as an arrival for each 16.
void arrive_expecting(Barrier* barrier, int bytes);
void copy_bulk(void* to, const void* from, int bytes, Barrier* barrier);
// Waits for the other threads of the team of 128.
void synchronize_team(int id);

enum class Shuffle { exclusive_or, up, down, from };
template <Shuffle kind, class T>
T shuffle(T value, int lanes) {
    struct Argument {
        T value, result;
        int lanes;
    } argument{value, value, lanes};
    collective(
        [](void* const* all) {
            for (int t = 0; t < 32; ++t) {
                auto* mine = static_cast<Argument*>(all[t]);
                const int from = kind == Shuffle::exclusive_or ? t ^ mine->lanes
                                 : kind == Shuffle::up         ? t - mine->lanes
                                 : kind == Shuffle::down       ? t + mine->lanes
                                                               : mine->lanes;
                if (from >= 0 && from < 32) mine->result = static_cast<Argument*>(all[from])->value;
            }
        },
        &argument);
    return argument.result;
}

// ldmatrix.x4 and mma.m16n8k16 as tile.cuh names them.
template <bool Transpose>
void load_matrices(std::uint32_t (&out)[4], const __nv_bfloat16* row) {
    struct Argument {
        std::uint32_t* out;
        const __nv_bfloat16* row;
    } argument{out, row};
    if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) stop("ldmatrix from an address that is no multiple of 16");
    collective(
        [](void* const* all) {
            for (int m = 0; m < 4; ++m)
                for (int t = 0; t < 32; ++t) {
                    std::uint32_t bits[2];
                    for (int e = 0; e < 2; ++e) {
                        const int line = Transpose ? 2 * (t % 4) + e : t / 4, column = Transpose ? t / 4 : 2 * (t % 4) + e;
                        bits[e] = static_cast<Argument*>(all[8 * m + line])->row[column].bits;
                    }
                    static_cast<Argument*>(all[t])->out[m] = bits[0] | bits[1] << 16;
                }
        },
        &argument);
}
void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

struct ThreadIndex {
    struct {
        operator unsigned() const { return static_cast<unsigned>(thread); }
    } x;
    unsigned y = 0, z = 0;
};

}  // namespace emulation

inline const emulation::ThreadIndex threadIdx{};
inline dim3 &blockIdx = emulation::block_position, &blockDim = emulation::block_size, &gridDim = emulation::grid_size;
inline void __syncthreads() { emulation::barrier(); }
inline void __syncwarp() {
    emulation::collective([](void* const*) {}, nullptr);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
    return emulation::shuffle<emulation::Shuffle::exclusive_or>(value, lanes);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int lanes) {
    return emulation::shuffle<emulation::Shuffle::up>(value, lanes);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int lanes) {
    return emulation::shuffle<emulation::Shuffle::down>(value, lanes);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulation::shuffle<emulation::Shuffle::from>(value, lane);
}

inline void __threadfence() {}
inline int atomicAdd(int* to, int value) { return std::exchange(*to, *to + value); }

// Attributes change when a kernel starts, not what it does.
inline constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 0, cudaLaunchAttributeCooperative = 1;
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed, cooperative;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    std::size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
    const cudaLaunchAttribute* attrs = nullptr;
    unsigned numAttrs = 0;
};
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
    emulation::run(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                   [&] { kernel(static_cast<Parameters>(arguments)...); });
    return cudaSuccess;
}
