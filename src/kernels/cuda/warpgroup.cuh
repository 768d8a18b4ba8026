// The product of tile.cuh with wgmma (sm_90a): the same tiles in shared memory (their layout is the 128-byte swizzle),
// another layout of the accumulator. On other architectures, and emulated, mma.sync computes the same fragments; T = float
// has FFMA.
#pragma once

#include "kernels/cuda/tile.cuh"

namespace fenwick::kernels::cuda::warpgroup {

using tile::area;
using tile::bf16;
using tile::edge;
using tile::load_matrices;
using tile::load_pair;
using tile::mma_16x8x16;
using tile::offset;
using tile::pack;
using tile::store_pair;
using tile::team_index;
using tile::unpack;
using tile::Unscaled;

// ---- instructions ----------------------------------------------------------------------------------------------------
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FENWICK_TILE_WGMMA
// Descriptor of a bfloat16 tile (128-byte swizzle: rows of 128 bytes, 8 rows a pattern), from this element on. A step of 16
// along the columns moves it 32 bytes, one along the rows 2048.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate", matrix descriptor.
// `units` of 16 bytes further on: its low word takes the sum.
__device__ __forceinline__ std::uint64_t wgmma_descriptor(const bf16* at, std::uint32_t units = 0) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
    const std::uint32_t low = ((address & 0x3ffff) >> 4 | std::uint32_t{1} << 16) + units;
    return static_cast<std::uint64_t>(std::uint32_t{1} << 30 | 1024 >> 4) << 32 | low;
}
__device__ __forceinline__ void wgmma_begin(float (&d)[8][4]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Waits for the products of this warpgroup.
__device__ __forceinline__ void wgmma_end(float (&d)[8][4]) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
// d[64, 64] (+)= a[64, 16] b[16, 64]; b's rows run along its tile's rows (AlongRows) or columns.
template <bool AlongRows>
__device__ __forceinline__ void wgmma_64(float (&d)[8][4], std::uint64_t a, std::uint64_t b, bool add = true) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 0, %35;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
          "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
          "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(AlongRows)));
}
template <bool AlongRows>
__device__ __forceinline__ void wgmma_64(float (&d)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool add = true) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
          "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
          "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(AlongRows)));
}
#endif
// Makes this thread's copies and writes to shared memory visible to wgmma, behind the barrier that must follow.
__device__ __forceinline__ void fence_tiles() {
#if defined(FENWICK_TILE_WGMMA)
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Barrier behind writes to tiles that a product reads.
__device__ __forceinline__ void synchronize_tiles() {
    fence_tiles();
    __syncthreads();
}
__device__ __forceinline__ void wait_for_tiles() {
    tile::wait_async<0>();
    synchronize_tiles();
}

// ---- the accumulator -------------------------------------------------------------------------------------------------
// C[64, 64] over 128 threads: the fragment of wgmma m64n64. Thread (warp, lane) holds rows 16 warp + lane / 4 + {0, 8}
// ("local rows" 0 and 1) and columns 2 (lane % 4) + {0, 1} + {0, 8, .. 56}.
struct Accumulator {
    static constexpr int local_rows = 2;
    float x[8][4];  // [8 columns][row, row + 8][column, column + 1]

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
    }
    // f(row, col, value(row, col), value(row, col + 1), local row), the values by reference.
    template <class F>
    __device__ __forceinline__ void for_pairs(F&& f) {
        const int thread = team_index(), lane = thread % 32;
        const int row = thread / 32 * 16 + lane / 4, col = lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < 8; ++n) f(row + half * 8, col + n * 8, x[n][2 * half], x[n][2 * half + 1], half);
    }
    // The same with the values of another accumulator at the same place behind them.
    template <class F>
    __device__ __forceinline__ void for_pairs_with(Accumulator& other, F&& f) {
        const int thread = team_index(), lane = thread % 32;
        const int row = thread / 32 * 16 + lane / 4, col = lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < 8; ++n)
                f(row + half * 8, col + n * 8, x[n][2 * half], x[n][2 * half + 1], half, other.x[n][2 * half],
                  other.x[n][2 * half + 1]);
    }
    template <class T>
    __device__ __forceinline__ void store(T* to) {
        for_pairs([&](int row, int col, float& a, float& b, int) { store_pair(to + offset<T>(row, col), a, b); });
    }
    // Sums of the warp's 16 rows by column: 64 values at `to` (8-byte aligned). Destroys the values.
    __device__ __forceinline__ void store_column_sums(float* to) {
        float sum[16];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            sum[2 * n] = x[n][0] + x[n][2];
            sum[2 * n + 1] = x[n][1] + x[n][3];
        }
        // Each step halves the columns a lane keeps and the lanes that share them.
        const int lane = team_index() % 32;
#pragma unroll
        for (int step = 16; step >= 4; step /= 2) {
            const bool upper = (lane & step) != 0;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                if (n >= step / 2) continue;
                const float keep = upper ? sum[n + step / 2] : sum[n], give = upper ? sum[n] : sum[n + step / 2];
                sum[n] = keep + __shfl_xor_sync(0xffffffffu, give, step);
            }
        }
        store_pair(to + lane / 4 * 8 + lane % 4 * 2, sum[0], sum[1]);
    }
};

// This thread's first row of an Accumulator.
__device__ __forceinline__ int first_row() { return team_index() / 32 * 16 + team_index() % 32 / 4; }

// Sums local-row values over the four threads that share the rows; all four receive the sum of all 64 columns.
__device__ __forceinline__ void sum_over_columns(float (&rows)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows[r] += __shfl_xor_sync(0xffffffffu, rows[r], 1);
        rows[r] += __shfl_xor_sync(0xffffffffu, rows[r], 2);
    }
}

// The A fragment of this warp's 16 rows at columns k .. k + 15, scaled.
template <bool ATransposed, class Scale>
__device__ __forceinline__ void load_a(std::uint32_t (&af)[4], const bf16* a, const Scale& scale, int k) {
    const int thread = team_index(), lane = thread % 32, base = thread / 32 * 16;
    const int matrix = lane / 8, line = lane % 8;
    if constexpr (ATransposed) {
        load_matrices<true>(af, a + offset<bf16>(k + matrix / 2 * 8 + line, base + matrix % 2 * 8));
    } else {
        load_matrices<false>(af, a + offset<bf16>(base + matrix % 2 * 8 + line, k + matrix / 2 * 8));
    }
    if constexpr (!std::is_same_v<Scale, Unscaled>) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 value = scale(base + lane / 4 + e % 2 * 8, k + lane % 4 * 2 + e / 2 * 8, unpack(af[e]));
            af[e] = pack(value.x, value.y);
        }
    }
}

// c += scale(A) B over k in [k_begin, k_end), multiples of 16, the same for the threads of a warp.
// A is stored [row][k], or [k][row] when ATransposed; B is stored [k][col], or [col][k] when BTransposed.
// `scale` is Unscaled{} or a function float2(row, k, {A(row, k), A(row, k + 1)}), applied in float32.
template <bool ATransposed, bool BTransposed, class T, class Scale>
__device__ __forceinline__ void multiply(Accumulator& c, const T* a, const T* b, Scale scale, int k_begin = 0,
                                         int k_end = edge) {
    if constexpr (std::is_same_v<T, float>) {
        const int thread = team_index(), lane = thread % 32;
        const int row = thread / 32 * 16 + lane / 4, col = lane % 4 * 2;
        for (int k = k_begin; k < k_end; k += 2) {
            float2 av[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int m = row + r * 8;
                if constexpr (ATransposed) {
                    av[r] = make_float2(a[offset<T>(k, m)], a[offset<T>(k + 1, m)]);
                } else {
                    av[r] = load_pair(a + offset<T>(m, k));
                }
                if constexpr (!std::is_same_v<Scale, Unscaled>) av[r] = scale(m, k, av[r]);
            }
#pragma unroll
            for (int n = 0; n < 8; ++n) {
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
                for (int r = 0; r < 2; ++r) {
                    float* x = c.x[n] + r * 2;
                    x[0] += av[r].x * b0.x + av[r].y * b0.y;
                    x[1] += av[r].x * b1.x + av[r].y * b1.y;
                }
            }
        }
    } else {
#if defined(FENWICK_TILE_WGMMA)
        // All four warps take part in every step; a warp whose rows end earlier adds zeros.
        if constexpr (!ATransposed && std::is_same_v<Scale, Unscaled>) {
            wgmma_begin(c.x);
#pragma unroll
            for (int k = 0; k < edge; k += 16)
                wgmma_64<!BTransposed>(c.x, wgmma_descriptor(a + k), wgmma_descriptor(b + (BTransposed ? k : k * edge)));
            wgmma_end(c.x);
        } else {
            std::uint32_t af[edge / 16][4];
#pragma unroll
            for (int k = 0; k < edge; k += 16) {
                if (k < k_begin || k >= k_end) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) af[k / 16][e] = 0;
                } else {
                    load_a<ATransposed>(af[k / 16], a, scale, k);
                }
            }
            wgmma_begin(c.x);
#pragma unroll
            for (int k = 0; k < edge; k += 16)
                wgmma_64<!BTransposed>(c.x, af[k / 16], wgmma_descriptor(b + (BTransposed ? k : k * edge)));
            wgmma_end(c.x);
        }
#else
        const int lane = team_index() % 32, matrix = lane / 8, line = lane % 8;
#pragma unroll
        for (int k = 0; k < edge; k += 16) {
            if (k < k_begin || k >= k_end) continue;
            std::uint32_t af[4];
            load_a<ATransposed>(af, a, scale, k);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                std::uint32_t bf[4];
                if constexpr (BTransposed) {
                    load_matrices<false>(bf, b + offset<T>(n * 16 + matrix / 2 * 8 + line, k + matrix % 2 * 8));
                } else {
                    load_matrices<true>(bf, b + offset<T>(k + matrix % 2 * 8 + line, n * 16 + matrix / 2 * 8));
                }
                mma_16x8x16(c.x[2 * n], af, bf[0], bf[1]);
                mma_16x8x16(c.x[2 * n + 1], af, bf[2], bf[3]);
            }
        }
#endif
    }
}

// ---- products with A in registers ------------------------------------------------------------------------------------
// A[64, 16] of a product as this thread holds it: element e covers row (e % 2) * 8 and columns (e / 2) * 8 + {0, 1} from
// the thread's first row and column 2 (lane % 4). Two neighbouring column blocks of an Accumulator have the same layout.
struct alignas(16) Fragment {
    std::uint32_t x[4];
};
// Columns 16 k .. 16 k + 15.
__device__ __forceinline__ Fragment fragment_of(const Accumulator& c, int k) {
    return {{pack(c.x[2 * k][0], c.x[2 * k][1]), pack(c.x[2 * k][2], c.x[2 * k][3]),
             pack(c.x[2 * k + 1][0], c.x[2 * k + 1][1]), pack(c.x[2 * k + 1][2], c.x[2 * k + 1][3])}};
}
template <bool ATransposed>
__device__ __forceinline__ Fragment load_fragment(const bf16* a, int k) {
    Fragment f;
    load_a<ATransposed>(f.x, a, Unscaled{}, k);
    return f;
}

// c (+)= A B, A in 16 Steps columns of fragments, B as of `multiply` (Steps > 4: tiles one below the other, not transposed).
template <bool BTransposed, bool Add, int Steps>
__device__ __forceinline__ void multiply_fragments(Accumulator& c, const Fragment (&a)[Steps], const bf16* b) {
    static_assert(!BTransposed || Steps <= edge / 16);
#if defined(FENWICK_TILE_WGMMA)
    wgmma_begin(c.x);
    wgmma_64<!BTransposed>(c.x, a[0].x, wgmma_descriptor(b), Add);
#pragma unroll
    for (int k = 1; k < Steps; ++k)
        wgmma_64<!BTransposed>(c.x, a[k].x, wgmma_descriptor(b, (BTransposed ? k * 16 : k * 16 * edge) / 8));
    wgmma_end(c.x);
#else
    if constexpr (!Add) c.clear();
    const int lane = team_index() % 32, matrix = lane / 8, line = lane % 8;
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            std::uint32_t bf[4];
            if constexpr (BTransposed) {
                load_matrices<false>(bf, b + offset<bf16>(n * 16 + matrix / 2 * 8 + line, k * 16 + matrix % 2 * 8));
            } else {
                load_matrices<true>(bf, b + offset<bf16>(k * 16 + matrix % 2 * 8 + line, n * 16 + matrix / 2 * 8));
            }
            mma_16x8x16(c.x[2 * n], a[k].x, bf[0], bf[1]);
            mma_16x8x16(c.x[2 * n + 1], a[k].x, bf[2], bf[3]);
        }
    }
#endif
}

}  // namespace fenwick::kernels::cuda::warpgroup
