// What the CUDA kernels share: the operator scope, checked launches, dtype dispatch, 16-byte accesses, reductions in a
// fixed order. Nothing here uses atomics: the same inputs give the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FENWICK_HAVE_NVTX 1
#endif

#include "base/cuda_check.h"
#include "base/memory.h"
#include "kernels/kernel.h"

namespace fenwick::kernels::cuda {

using Bfloat16 = __nv_bfloat16;

// ---- host side -------------------------------------------------------------------------------------------------------

// One call of an operator: an NVTX range with its name, and exec's GPU made current for the calling thread.
class OperatorScope {
public:
    OperatorScope(const char* name, const Exec& exec) {
        FENWICK_CUDA_CHECK(cudaSetDevice(exec.device.index));
#ifdef FENWICK_HAVE_NVTX
        nvtxRangePushA(name);
#else
        (void)name;
#endif
    }
    ~OperatorScope() {
#ifdef FENWICK_HAVE_NVTX
        nvtxRangePop();
#endif
    }
    OperatorScope(const OperatorScope&) = delete;
    OperatorScope& operator=(const OperatorScope&) = delete;
};

inline cudaStream_t stream_of(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }
// The least power of two that is not less than x, or `most` (one itself) where that is less.
constexpr int next_power_of_two(std::int64_t x, int most) {
    int power = 1;
    while (power < x && power < most) power *= 2;
    return power;
}
static_assert(next_power_of_two(3, 32) == 4 && next_power_of_two(std::int64_t{3} << 30, 256) == 256);

// Queues kernel(arguments...) on exec's stream, with leave for as much shared memory; an empty grid is no work. `op` names
// the operator in errors.
template <class... Parameters, class... Arguments>
void launch(const char* op, const Exec& exec, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            Arguments&&... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    if (shared_bytes > 40 * 1024)  // with the kernel's own arrays, 48 KiB need no leave
        FENWICK_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(shared_bytes)));
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_of(exec);
    const cudaError_t status = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
    if (status != cudaSuccess) [[unlikely]] {
        (void)cudaGetLastError();
        fail("[{}] launching grid ({}, {}, {}), block ({}, {}, {}), {} bytes of shared memory failed: {}", op, grid.x,
             grid.y, grid.z, block.x, block.y, block.z, shared_bytes, cudaGetErrorString(status));
    }
}

// Calls fn(TypeTag<T>{}) with T = float or Bfloat16.
template <class F>
void dispatch(std::string_view op, DType dtype, F&& fn) {
    switch (dtype) {
        case DType::float32:
            return fn(TypeTag<float>{});
        case DType::bfloat16:
            return fn(TypeTag<Bfloat16>{});
        default:
            fail("[{}] dtype {} is not available on CUDA; use float32 or bfloat16", op, name_of(dtype));
    }
}

// Whether exec's GPU is a Hopper: wgmma, 227 KB of shared memory a block.
inline bool is_hopper(const Exec& exec) {
    int major = 0;
    FENWICK_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, exec.device.index));
    return major == 9;
}

// Vector kernels move `wide` elements a thread (16 bytes of bfloat16, 2 x 16 of float32).
inline constexpr int wide = 8;
// Whether every row of all arrays starts on a 16-byte boundary and holds whole vectors. Give every row length and stride
// to `multiples`, every pointer to `pointers`; null pointers are fine.
inline bool can_use_wide(std::initializer_list<std::int64_t> multiples, std::initializer_list<const void*> pointers) {
    for (auto value : multiples)
        if (value % wide != 0) return false;
    for (auto pointer : pointers)
        if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return false;
    return true;
}
// Whether rows, whose lengths and strides in elements of `size` bytes are `multiples`, start at multiples of 16 bytes.
inline bool is_wide(std::size_t size, const void* pointer, std::initializer_list<std::int64_t> multiples) {
    for (auto value : multiples)
        if (value * static_cast<std::int64_t>(size) % 16 != 0) return false;
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}
// Calls fn(std::integral_constant<int, wide>) or fn(std::integral_constant<int, 1>).
template <class F>
void dispatch_width(bool use_wide, F&& fn) {
    if (use_wide)
        fn(std::integral_constant<int, wide>{});
    else
        fn(std::integral_constant<int, 1>{});
}

// Device memory that lives until the work queued so far is done (release is ordered on the stream).
inline Buffer workspace(const Exec& exec, std::int64_t bytes) {
    return Buffer(exec.device, static_cast<std::size_t>(bytes), MemoryKind::workspace);
}

// out[c] (+)= sum over rows of values[r, c], in float64, in an order that depends on the shape alone. Defined in reduce.cu.
void column_sums(const Exec& exec, const float* values, std::int64_t rows, std::int64_t columns, float* out,
                 bool accumulate);

// Geometry of kernels that walk [rows, columns] with for_each_cell: threads of a block side by side along the columns first.
struct CellGrid {
    dim3 grid, block;
};
inline CellGrid cell_grid(std::int64_t rows, std::int64_t columns, int vector) {
    constexpr int threads = 256;
    const std::int64_t vectors = ceil_div(columns, vector);
    const int x = next_power_of_two(vectors, threads), y = threads / x;
    const std::int64_t across = std::min<std::int64_t>(ceil_div(vectors, x), 8192);
    const std::int64_t down =
        std::min<std::int64_t>(ceil_div(rows, y), std::max<std::int64_t>(16384 / std::max<std::int64_t>(across, 1), 1));
    return {dim3(static_cast<unsigned>(down), static_cast<unsigned>(across)),
            dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}

// ---- device side -----------------------------------------------------------------------------------------------------

// Calls body(row, first_column) for every group of V columns; columns % V == 0.
template <int V, class Body>
__device__ __forceinline__ void for_each_cell(std::int64_t rows, std::int64_t columns, Body&& body) {
    const std::int64_t row_step = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
    const std::int64_t column_step = static_cast<std::int64_t>(gridDim.y) * blockDim.x * V;
    for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += row_step)
        for (std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * V; column < columns;
             column += column_step)
            body(row, column);
}

template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
    T values[V];
};

template <class To, class From>
__device__ __forceinline__ To convert(From value) {
    if constexpr (std::is_same_v<To, From>)
        return value;
    else if constexpr (std::is_same_v<From, Bfloat16>)
        return static_cast<To>(__bfloat162float(value));
    else if constexpr (std::is_same_v<To, Bfloat16>)
        return __float2bfloat16_rn(static_cast<float>(value));
    else
        return static_cast<To>(value);
}

// V values of an array: as they are, for what is loaded ahead of its use; and as Compute (float unless said otherwise).
template <int V, class T>
__device__ __forceinline__ Pack<T, V> fetch(const T* from) {
    return *reinterpret_cast<const Pack<T, V>*>(from);
}
template <int V, class Compute, class T>
__device__ __forceinline__ void unpack(Compute (&to)[V], const Pack<T, V>& pack) {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = convert<Compute>(pack.values[i]);
}
template <int V, class Compute = float, class T>
__device__ __forceinline__ void load(Compute (&to)[V], const T* from) {
    unpack(to, fetch<V>(from));
}
template <int V, class Compute, class T>
__device__ __forceinline__ void store(T* to, const Compute (&from)[V]) {
    if constexpr (std::is_same_v<T, Bfloat16> && V == 4) {
        // As one value: of four, the compiler may make as many stores.
        const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(from[0], from[1]), __floats2bfloat162_rn(from[2], from[3])};
        std::uint64_t bits;
        memcpy(&bits, pairs, sizeof(bits));
        *reinterpret_cast<std::uint64_t*>(to) = bits;
    } else {
        Pack<T, V> pack;
#pragma unroll
        for (int i = 0; i < V; ++i) pack.values[i] = convert<T>(from[i]);
        *reinterpret_cast<Pack<T, V>*>(to) = pack;
    }
}
// to = from, or to += from
template <int V, class T>
__device__ __forceinline__ void store(T* to, const float (&from)[V], bool accumulate) {
    float sum[V];
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = from[i];
    if (accumulate) {
        float before[V];
        load(before, to);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += before[i];
    }
    store(to, sum);
}

// Within a few units in the last place, from the fast exponential and division: gates in norms are not bound by arithmetic
// then. (x < -87: the divisor passes 2^126, and the quotient is 0.)
__device__ __forceinline__ float sigmoid_of(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float silu_of(float x) { return x * sigmoid_of(x); }
// d silu(x) / dx, given s = sigmoid(x)
__device__ __forceinline__ float silu_slope(float x, float s) { return s * (1.0f + x * (1.0f - s)); }
__device__ __forceinline__ float softplus_of(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Bits of x without leading zeros.
__device__ __forceinline__ int bits_of(int x) { return 32 - __clz(x); }

// Sum over a team: `lanes` neighbouring lanes of a warp, a power of two. Every lane of the warp must call it; every lane
// gets the sum.
template <class T>
__device__ __forceinline__ T team_sum(T value, int lanes = 32) {
    for (int offset = lanes >> 1; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
    for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// Sum over the threads of a block (blockDim.x a multiple of 32, at most 1024, other dimensions 1). Every thread must call
// it; every thread gets the sum. `scratch` holds 32 values.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = team_sum(value);
    __syncthreads();  // scratch may still be read from the call before
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return team_sum(lane < warps ? scratch[lane] : T{0});
}

}  // namespace fenwick::kernels::cuda
