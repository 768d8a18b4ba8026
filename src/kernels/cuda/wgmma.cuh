// Hopper's warpgroup matrix products (wgmma, sm_90a) on bfloat16 tiles: shared-memory layout, descriptors, fragments.
//
// Shared tiles are [rows x columns], columns a multiple of 32, kept as columns/32 slabs of [rows x 32]: a slab's row is
// 64 bytes, and its four 16-byte pieces are permuted by the 64-byte swizzle (piece p of row r stands at p ^ (r/2 % 4)). The
// same tile serves a product that contracts over its columns (operand rows = M or N: "K-major") and one that contracts over
// its rows ("transposed"), so a tile is loaded once whatever it is multiplied with. 64-byte rows fit every head width that is a
// multiple of 32, 96 included, which the 128-byte swizzle does not, and have no bank conflicts either.
//
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate": matrix descriptor, register fragments.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

// Code for other architectures is compiled too, so that one kernel source serves all; it is never launched there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define FENWICK_WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define FENWICK_WGMMA(...) __trap()
#endif

namespace fenwick::kernels::cuda {

inline constexpr int slab_columns = 32;

// Byte offset of element (row, column) of a tile with `rows` rows; column a multiple of 8 (one 16-byte piece).
__device__ __forceinline__ std::uint32_t tile_offset(int rows, int row, int column) {
    return static_cast<std::uint32_t>((column / slab_columns) * rows * 64 + row * 64 +
                                      (((column % slab_columns) / 8) ^ ((row >> 1) & 3)) * 16);
}

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory in the background, or writes zeros where !valid.
__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}
// Makes this thread's writes to shared memory visible to wgmma; then a barrier must follow.
__device__ __forceinline__ void fence_shared_for_wgmma() { FENWICK_WGMMA("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Queues the load of tile [rows x columns] from global memory (row r at from + r * stride elements, `width` columns valid,
// the rest zeros; rows from `valid_rows` on zeros) by `threads` threads. from, stride and width are multiples of 8 elements.
template <int rows, int columns>
__device__ __forceinline__ void load_tile_async(std::uint32_t tile, const __nv_bfloat16* from, std::int64_t stride, int width,
                                                int valid_rows, int thread, int threads) {
    constexpr int pieces = columns / 8;
    for (int i = thread; i < rows * pieces; i += threads) {
        const int row = i / pieces, column = i % pieces * 8;
        const bool valid = row < valid_rows && column < width;
        copy_async_16(tile + tile_offset(rows, row, column), valid ? from + row * stride + column : from, valid);
    }
}

// Descriptor of the 16-deep slice of a tile that starts at (row, column), for an operand whose contraction runs along the
// columns: M or N are the rows. row a multiple of 8, column of 16.
__device__ __forceinline__ std::uint64_t descriptor_along_columns(std::uint32_t tile, int rows, int row, int column) {
    const std::uint32_t start = tile + static_cast<std::uint32_t>((column / slab_columns) * rows * 64 + row * 64 + column % slab_columns * 2);
    return static_cast<std::uint64_t>((start & 0x3ffff) >> 4) | (std::uint64_t{1} << 16) | (std::uint64_t{512 >> 4} << 32) |
           (std::uint64_t{2} << 62);
}
// The same for a contraction along the rows (N are the columns, from `column` on; a multiple of 32). row a multiple of 16.
__device__ __forceinline__ std::uint64_t descriptor_along_rows(std::uint32_t tile, int rows, int row, int column) {
    const std::uint32_t start = tile + static_cast<std::uint32_t>((column / slab_columns) * rows * 64 + row * 64);
    return static_cast<std::uint64_t>((start & 0x3ffff) >> 4) | (static_cast<std::uint64_t>(rows * 64 >> 4) << 16) |
           (std::uint64_t{512 >> 4} << 32) | (std::uint64_t{2} << 62);
}

// Accumulator fragment of [64 x N]: thread t of the warpgroup holds, for each block j of 8 columns, elements
// d[4j + 0..3] = (r, c), (r, c+1), (r+8, c), (r+8, c+1) with r = 16 (t/32) + (t%32)/4, c = 8j + 2 (t%4).
__device__ __forceinline__ void wgmma_fence() { FENWICK_WGMMA("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { FENWICK_WGMMA("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    FENWICK_WGMMA("wgmma.wait_group.sync.aligned %0;\n" ::"n"(pending) : "memory");
}
// Keeps the compiler from moving reads or writes of an accumulator across an asynchronous product.
template <int count>
__device__ __forceinline__ void hold_registers(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// Columns [16 k, 16 k + 16) of an accumulator as the A fragment of the next product.
template <int count>
__device__ __forceinline__ void to_a_fragment(std::uint32_t (&a)[4], const float (&d)[count], int k) {
    a[0] = pack_bf16(d[8 * k + 0], d[8 * k + 1]);
    a[1] = pack_bf16(d[8 * k + 2], d[8 * k + 3]);
    a[2] = pack_bf16(d[8 * k + 4], d[8 * k + 5]);
    a[3] = pack_bf16(d[8 * k + 6], d[8 * k + 7]);
}

// The m64 x N x k16 product; B's contraction along its tile's rows with transpose_b.
template <int N>
struct Wgmma;

template <>
struct Wgmma<64> {
    // D (+)= A B, A and B in shared memory
    template <bool transpose_b>
    static __device__ __forceinline__ void shared_a(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add) {
        FENWICK_WGMMA(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "%32, %33, p, 1, 1, 0, %35;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(transpose_b)));
    }
    // D (+)= A B, A in registers
    template <bool transpose_b>
    static __device__ __forceinline__ void register_a(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
        FENWICK_WGMMA(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(transpose_b)));
    }
};

template <>
struct Wgmma<96> {
    // D (+)= A B, A and B in shared memory
    template <bool transpose_b>
    static __device__ __forceinline__ void shared_a(float (&d)[48], std::uint64_t a, std::uint64_t b, bool add) {
        FENWICK_WGMMA(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
            "%48, %49, p, 1, 1, 0, %51;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
            : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(transpose_b)));
    }
    // D (+)= A B, A in registers
    template <bool transpose_b>
    static __device__ __forceinline__ void register_a(float (&d)[48], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
        FENWICK_WGMMA(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
            "{%48, %49, %50, %51}, %52, p, 1, 1, %54;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(transpose_b)));
    }
};

template <>
struct Wgmma<128> {
    // D (+)= A B, A and B in shared memory
    template <bool transpose_b>
    static __device__ __forceinline__ void shared_a(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add) {
        FENWICK_WGMMA(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "%64, %65, p, 1, 1, 0, %67;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
            : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(transpose_b)));
    }
    // D (+)= A B, A in registers
    template <bool transpose_b>
    static __device__ __forceinline__ void register_a(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
        FENWICK_WGMMA(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(transpose_b)));
    }
};
}  // namespace fenwick::kernels::cuda
