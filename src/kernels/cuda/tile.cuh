// Tile-level primitives for the scans and attention: 64 x 64 tiles in shared memory, one product, one loader.
//
// A block of 128 threads (4 warps as 2 x 2 quadrants of 32 x 32) computes C[64, 64] += A[64, 64] B[64, 64]. C lives in
// registers (Accumulator), A and B in shared memory. Everything is written once for T = bfloat16 (tensor cores,
// mma.sync m16n8k16, float32 sums) and T = float (FFMA, no tf32); the layout of C over the threads is the same, so a kernel
// written over these primitives serves both.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#if defined(FENWICK_CUDA_EMULATION)
#include "cuda_emulation.h"
#endif

namespace fenwick::kernels::cuda::tile {

inline constexpr int edge = 64;
inline constexpr int area = edge * edge;
inline constexpr int threads = 128;

using bf16 = __nv_bfloat16;

// ---- instructions ----------------------------------------------------------------------------------------------------
#if defined(FENWICK_CUDA_EMULATION)
using emulation::commit_async;
using emulation::copy_async;
using emulation::copy_async_16;
using emulation::exp2_fast;
using emulation::load_matrices;
using emulation::mma_16x8x16;
using emulation::prefetch;
using emulation::shared_memory;
using emulation::store_16;
using emulation::thread_index;
using emulation::wait_async;
#else
// threadIdx.x, read anew at every call: address arithmetic that hangs on it is then done where it is used instead of being
// kept in registers across a whole kernel, where the accumulators need them.
__device__ __forceinline__ int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// The block's dynamic shared memory. Tiles start at multiples of 1024 bytes: wgmma's 128-byte swizzle repeats there.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char fenwick_dynamic_shared[];
    return fenwick_dynamic_shared;
}

// 16 bytes global -> shared, or 16 zero bytes when !valid (the source is then not read).
__device__ __forceinline__ void copy_async_16(void* to, const void* from, bool valid) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// The same with 4 or 8 bytes.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(Bytes),
                 "r"(valid ? Bytes : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of this thread's copies but the last `Pending` groups.
template <int Pending>
__device__ __forceinline__ void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// 2^x, about 2 units in the last place; 0 for results below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// 16 bytes to global memory. (What the compiler makes of an assignment may be four stores of 4 bytes.)
__device__ __forceinline__ void store_16(void* to, const std::uint32_t* x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Asks for the line of `at` in the L2 cache.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Four 8 x 8 matrices of 16-bit values; lane 8m + r gives the address of row r of matrix m. Thread t receives of each
// matrix the elements (t / 4, 2 (t % 4)) and (t / 4, 2 (t % 4) + 1), of its transpose when Transpose.
// (Volatile keeps it between the barriers around it.)
template <bool Transpose>
__device__ __forceinline__ void load_matrices(std::uint32_t (&out)[4], const bf16* row) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
    if constexpr (Transpose) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(address));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(address));
    }
}

// c[16, 8] += a[16, 16] b[16, 8]
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// The thread's place in its team of 128: blocks may hold several warpgroups.
__device__ __forceinline__ int team_index() {
    return static_cast<int>(static_cast<unsigned>(thread_index()) % static_cast<unsigned>(threads));
}

// ---- elements --------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else {
        return __float2bfloat16(x);
    }
}
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    std::uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}
__device__ __forceinline__ float2 unpack(std::uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
// Two neighbours in memory. `aligned`: the pair may be accessed as one word (even index, even row length).
template <class T>
__device__ __forceinline__ float2 load_pair(const T* from) {
    if constexpr (std::is_same_v<T, float>) {
        return *reinterpret_cast<const float2*>(from);
    } else {
        return unpack(*reinterpret_cast<const std::uint32_t*>(from));
    }
}
template <class T>
__device__ __forceinline__ void store_pair(T* to, float a, float b) {
    if constexpr (std::is_same_v<T, float>) {
        *reinterpret_cast<float2*>(to) = make_float2(a, b);
    } else {
        *reinterpret_cast<std::uint32_t*>(to) = pack(a, b);
    }
}

// ---- tiles in shared memory ------------------------------------------------------------------------------------------
// Position of element (row, col). 16-byte units of a row are permuted by the row's low bits, so that the eight rows an
// ldmatrix or a column access touches lie in different banks.
template <class T>
__device__ __forceinline__ int offset(int row, int col) {
    constexpr int unit = 16 / sizeof(T);
    return row * edge + (((col / unit) ^ (row & 7)) * unit) + col % unit;
}

// Starts copying rows x cols elements (clipped to 64 x 64; the rest becomes 0) from `from`, rows `stride` elements apart.
// `vector`: base, stride and cols are multiples of 16 bytes; otherwise elements are copied one by one, at once.
// Complete after commit_async, wait_async and a barrier.
template <class T>
__device__ __forceinline__ void load(T* to, const T* from, std::int64_t stride, int rows, int cols, bool vector) {
    constexpr int unit = 16 / sizeof(T);
    constexpr int units = edge / unit;
    const int thread = team_index();
    if (vector) {
#pragma unroll
        for (int n = 0; n < edge * units / threads; ++n) {
            const int index = n * threads + thread;
            const int row = index / units, col = index % units * unit;
            const bool valid = row < rows && col < cols;
            copy_async_16(to + offset<T>(row, col), valid ? from + row * stride + col : from, valid);
        }
    } else {
        for (int index = thread; index < area; index += threads) {
            const int row = index / edge, col = index % edge;
            to[offset<T>(row, col)] = row < rows && col < cols ? from[row * stride + col] : from_float<T>(0.0f);
        }
    }
}

// ---- the accumulator -------------------------------------------------------------------------------------------------
// C[64, 64] over 128 threads. Thread (warp, lane) holds rows 32 (warp % 2) + lane / 4 + {0, 8, 16, 24} ("local rows" 0..3)
// and columns 32 (warp / 2) + 2 (lane % 4) + {0, 1} + {0, 8, 16, 24}.
struct Accumulator {
    float x[2][4][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[m][n][e] = 0.0f;
    }
    // f(row, col, value(row, col), value(row, col + 1), local row), the values by reference.
    template <class F>
    __device__ __forceinline__ void for_pairs(F&& f) {
        const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
        const int row = warp % 2 * 32 + lane / 4, col = warp / 2 * 32 + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    f(row + m * 16 + half * 8, col + n * 8, x[m][n][2 * half], x[m][n][2 * half + 1], 2 * m + half);
    }
    template <class T>
    __device__ __forceinline__ void store(T* to) {
        for_pairs([&](int row, int col, float& a, float& b, int) { store_pair(to + offset<T>(row, col), a, b); });
    }
};

// Writes an accumulator, of this kind or a warpgroup's, into rows x cols elements of a row-major matrix.
template <class T, class A>
__device__ __forceinline__ void store_clipped(A& acc, T* to, std::int64_t stride, int rows, int cols, bool aligned) {
    acc.for_pairs([&](int row, int col, float& a, float& b, int) {
        if (row >= rows || col >= cols) return;
        T* at = to + row * stride + col;
        if (aligned) {
            store_pair(at, a, b);
        } else {
            at[0] = from_float<T>(a);
            if (col + 1 < cols) at[1] = from_float<T>(b);
        }
    });
}

// This thread's first row of an Accumulator, and which half of the columns its warp holds.
__device__ __forceinline__ int first_row() { return threadIdx.x / 32 % 2 * 32 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int column_half() { return threadIdx.x / 64; }

// Sums local-row values over the four threads that share the rows; all four receive the sum of their warp's 32 columns.
__device__ __forceinline__ void sum_over_columns(float (&rows)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        rows[r] += __shfl_xor_sync(0xffffffffu, rows[r], 1);
        rows[r] += __shfl_xor_sync(0xffffffffu, rows[r], 2);
    }
}

struct Unscaled {};

// c += scale(A) B over k in [k_begin, k_end), multiples of 16.
// A is stored [row][k], or [k][row] when ATransposed; B is stored [k][col], or [col][k] when BTransposed.
// `scale` is Unscaled{} or a function float2(row, k, {A(row, k), A(row, k + 1)}), applied in float32.
template <bool ATransposed, bool BTransposed, class T, class Scale>
__device__ __forceinline__ void multiply(Accumulator& c, const T* a, const T* b, Scale scale, int k_begin = 0,
                                         int k_end = edge) {
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
    const int row0 = warp % 2 * 32, col0 = warp / 2 * 32;
    if constexpr (std::is_same_v<T, float>) {
        const int row = row0 + lane / 4, col = col0 + lane % 4 * 2;
        for (int k = k_begin; k < k_end; k += 2) {
            float2 av[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int m = row + r * 8;
                if constexpr (ATransposed) {
                    av[r] = make_float2(a[offset<T>(k, m)], a[offset<T>(k + 1, m)]);
                } else {
                    av[r] = load_pair(a + offset<T>(m, k));
                }
                if constexpr (!std::is_same_v<Scale, Unscaled>) av[r] = scale(m, k, av[r]);
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float2 b0, b1;  // column col + 8n at k, k + 1; the next column
                if constexpr (BTransposed) {
                    b0 = load_pair(b + offset<T>(col + n * 8, k));
                    b1 = load_pair(b + offset<T>(col + n * 8 + 1, k));
                } else {
                    const float2 low = load_pair(b + offset<T>(k, col + n * 8));
                    const float2 high = load_pair(b + offset<T>(k + 1, col + n * 8));
                    b0 = make_float2(low.x, high.x);
                    b1 = make_float2(low.y, high.y);
                }
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    float* x = c.x[r / 2][n] + r % 2 * 2;
                    x[0] += av[r].x * b0.x + av[r].y * b0.y;
                    x[1] += av[r].x * b1.x + av[r].y * b1.y;
                }
            }
        }
    } else {
        const int matrix = lane / 8, line = lane % 8;
#pragma unroll
        for (int k = 0; k < edge; k += 16) {
            if (k < k_begin || k >= k_end) continue;
            std::uint32_t af[2][4], bf[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const int base = row0 + m * 16;
                if constexpr (ATransposed) {
                    load_matrices<true>(af[m], a + offset<T>(k + matrix / 2 * 8 + line, base + matrix % 2 * 8));
                } else {
                    load_matrices<false>(af[m], a + offset<T>(base + matrix % 2 * 8 + line, k + matrix / 2 * 8));
                }
                if constexpr (!std::is_same_v<Scale, Unscaled>) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float2 value =
                            scale(base + lane / 4 + e % 2 * 8, k + lane % 4 * 2 + e / 2 * 8, unpack(af[m][e]));
                        af[m][e] = pack(value.x, value.y);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int base = col0 + n * 16;
                if constexpr (BTransposed) {
                    load_matrices<false>(bf[n], b + offset<T>(base + matrix / 2 * 8 + line, k + matrix % 2 * 8));
                } else {
                    load_matrices<true>(bf[n], b + offset<T>(k + matrix % 2 * 8 + line, base + matrix / 2 * 8));
                }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 4; ++n) mma_16x8x16(c.x[m][n], af[m], bf[n / 2][n % 2 * 2], bf[n / 2][n % 2 * 2 + 1]);
        }
    }
}

}  // namespace fenwick::kernels::cuda::tile
