// What works in the background on Hopper (sm_90a): bulk copies that an mbarrier counts, and the products of a warpgroup, A
// in registers or in shared memory, which overlap with whatever does not touch their operands. Tiles are those of tile.cuh.
//
// An accumulator d[8][4] of [64, 64]: thread t of a warpgroup holds rows 16 (t / 32) + t % 32 / 4 + {0, 8} and columns
// 2 (t % 4) + {0, 1} of each block of 8, as d[block][2 (second row) + (second column)]. Rounded to bfloat16, two
// neighbouring blocks are the fragment of a product's A of 16 columns, so that one product's result is the next one's
// operand.
//
// Source: PTX ISA, "mbarrier", "cp.async.bulk", "wgmma", "stmatrix".
#pragma once

#include "kernels/cuda/pipeline.cuh"

#if defined(FENWICK_CUDA_EMULATION)
#include "wgmma_emulation.h"
#endif

namespace fenwick::kernels::cuda::asynchronous {

using pipeline::Barrier;
using tile::area;
using tile::bf16;
using tile::edge;

// ---- instructions ----------------------------------------------------------------------------------------------------
#if defined(FENWICK_CUDA_EMULATION)
using emulation::arrive_expecting;
using emulation::claim_registers;
using emulation::commit;
using emulation::copy_bulk;
using emulation::copy_bulk_once;
using emulation::fence_barriers;
using emulation::fence_written;
using emulation::multiply;
using emulation::release_registers;
using emulation::store_matrices;
using emulation::wait_products;
inline void fence_operands() {}
inline void fence_products(float (&)[8][4]) {}
inline void hold(float (&)[8][4]) {}
inline void hold_fragment(std::uint32_t&) {}
#else

// Code for other architectures is compiled too, so that one source serves all; it is never launched there.
#if defined(FENWICK_TILE_WGMMA) || !defined(__CUDA_ARCH__)
#define FENWICK_ASYNCHRONOUS(...) asm volatile(__VA_ARGS__)
#else
#define FENWICK_ASYNCHRONOUS(...) __trap()
#endif

__device__ __forceinline__ std::uint32_t shared_address(const void* at) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}
// Makes initialized barriers visible to bulk copies; the block must synchronize behind it.
__device__ __forceinline__ void fence_barriers() {
    FENWICK_ASYNCHRONOUS("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives as often as said.
__device__ __forceinline__ void arrive(Barrier* barrier, int times) {
    FENWICK_ASYNCHRONOUS(
        "{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0], %1;\n}" ::"r"(shared_address(barrier)), "r"(times)
        : "memory");
}
// Arrives; the phase also waits for this many bytes of bulk copies, which must be started behind it.
__device__ __forceinline__ void arrive_expecting(Barrier* barrier, int bytes) {
    FENWICK_ASYNCHRONOUS(
        "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}
// Copies a multiple of 16 bytes from global to shared memory; they count on `barrier`. By one thread.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, Barrier* barrier) {
    FENWICK_ASYNCHRONOUS(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
// The same of what is not read again: it leaves the L2 cache before anything else.
__device__ __forceinline__ void copy_bulk_once(void* to, const void* from, int bytes, Barrier* barrier) {
    FENWICK_ASYNCHRONOUS(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "policy;\n}" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
// Before a bulk copy of what the block's own threads have written; they must be known to have.
__device__ __forceinline__ void fence_written() { FENWICK_ASYNCHRONOUS("fence.proxy.async.global;" ::: "memory"); }
// This warpgroup's registers a thread from here on: fewer, or more once others have released theirs.
template <int Count>
__device__ __forceinline__ void release_registers() {
    FENWICK_ASYNCHRONOUS("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void claim_registers() {
    FENWICK_ASYNCHRONOUS("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
// Four 8 x 8 matrices of 16-bit values: thread t holds of each the elements (t / 4, 2 (t % 4) + {0, 1}); lane 8m + r gives the
// address of row r of matrix m, or of its transpose.
template <bool Transpose>
__device__ __forceinline__ void store_matrices(bf16* row, const std::uint32_t (&x)[4]) {
    if constexpr (Transpose) {
        FENWICK_ASYNCHRONOUS(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(x[0]),
            "r"(x[1]), "r"(x[2]), "r"(x[3])
            : "memory");
    } else {
        FENWICK_ASYNCHRONOUS("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                             "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                             : "memory");
    }
}
// Keeps the compiler from moving accesses of an accumulator across an asynchronous product.
__device__ __forceinline__ void hold(float (&d)[8][4]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
// Keeps the compiler from computing an element of a fragment behind the fence that must follow.
__device__ __forceinline__ void hold_fragment(std::uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }
// Where a fragment has been written since the last product, and no accumulator.
__device__ __forceinline__ void fence_operands() { FENWICK_ASYNCHRONOUS("wgmma.fence.sync.aligned;" ::: "memory"); }
// Before the first product into d, and where d or a fragment has been written since the last one.
__device__ __forceinline__ void fence_products(float (&d)[8][4]) {
    hold(d);
    fence_operands();
}
// Queues d[64, 64] (+)= a[64, 16] b[16, 64]: b's rows run along its tile's rows (AlongRows) or columns, from element b +
// offset on, a multiple of 8. (Of one b, an offset costs one addition.)
template <bool AlongRows>
__device__ __forceinline__ void multiply(float (&d)[8][4], const std::uint32_t (&a)[4], const bf16* b, int offset = 0,
                                         bool add = true) {
#if defined(FENWICK_TILE_WGMMA)
    warpgroup::wgmma_64<AlongRows>(d, a, warpgroup::wgmma_descriptor(b, static_cast<std::uint32_t>(offset) / 8), add);
#endif
}
// The same with a in shared memory, its rows along its tile's rows, from element a + a_offset on.
template <bool AlongRows>
__device__ __forceinline__ void multiply(float (&d)[8][4], const bf16* a, const bf16* b, int a_offset = 0, int offset = 0,
                                         bool add = true) {
#if defined(FENWICK_TILE_WGMMA)
    warpgroup::wgmma_64<AlongRows>(d, warpgroup::wgmma_descriptor(a, static_cast<std::uint32_t>(a_offset) / 8),
                                   warpgroup::wgmma_descriptor(b, static_cast<std::uint32_t>(offset) / 8), add);
#endif
}
__device__ __forceinline__ void commit() { FENWICK_ASYNCHRONOUS("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all of this warpgroup's products but the last `Pending` groups; hold() the accumulators behind it.
template <int Pending>
__device__ __forceinline__ void wait_products() {
    FENWICK_ASYNCHRONOUS("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
#endif

// ---- fragments -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void clear(float (&d)[8][4]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i / 4][i % 4] = 0.0f;
}
// Columns [16 k, 16 k + 16).
__device__ __forceinline__ void to_fragment(std::uint32_t (&a)[4], const float (&d)[8][4], int k) {
    a[0] = tile::pack(d[2 * k][0], d[2 * k][1]);
    a[1] = tile::pack(d[2 * k][2], d[2 * k][3]);
    a[2] = tile::pack(d[2 * k + 1][0], d[2 * k + 1][1]);
    a[3] = tile::pack(d[2 * k + 1][2], d[2 * k + 1][3]);
}
// Columns [16 k, 16 k + 16) of the transpose of a tile.
__device__ __forceinline__ void load_transposed(std::uint32_t (&a)[4], const bf16* from, int k) {
    const int thread = tile::team_index(), lane = thread % 32, matrix = lane / 8, line = lane % 8;
    tile::load_matrices<true>(a,
                              from + tile::offset<bf16>(k * 16 + matrix / 2 * 8 + line, thread / 32 * 16 + matrix % 2 * 8));
}
// Writes the transpose of columns [16 k, 16 k + 16) into rows [16 k, 16 k + 16) of a tile.
__device__ __forceinline__ void store_transposed(bf16* to, const std::uint32_t (&a)[4], int k) {
    const int thread = tile::team_index(), lane = thread % 32, matrix = lane / 8, line = lane % 8;
    store_matrices<true>(to + tile::offset<bf16>(k * 16 + matrix / 2 * 8 + line, thread / 32 * 16 + matrix % 2 * 8), a);
}

// Starts d (+)= A B as warpgroup::multiply_fragments computes it, as one group. Until that has been waited for, neither d nor
// the fragments may be touched.
template <bool BTransposed, int Steps>
__device__ __forceinline__ void start_product(float (&d)[8][4], warpgroup::Fragment (&a)[Steps], const bf16* b, bool add) {
    static_assert(!BTransposed || Steps <= edge / 16);
#pragma unroll
    for (int k = 0; k < Steps; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) hold_fragment(a[k].x[e]);
    fence_products(d);
    multiply<!BTransposed>(d, a[0].x, b, 0, add);
#pragma unroll
    for (int k = 1; k < Steps; ++k) multiply<!BTransposed>(d, a[k].x, b, BTransposed ? k * 16 : k * 16 * edge);
    commit();
}

// Starts d = A B with A in shared memory too: Tiles tiles side by side times as many one below the other.
template <int Tiles>
__device__ __forceinline__ void start_product_of_tiles(float (&d)[8][4], const bf16* a, const bf16* b) {
    fence_products(d);
#pragma unroll
    for (int k = 0; k < Tiles * edge; k += 16) multiply<true>(d, a, b, k / edge * area + k % edge, k * edge, k > 0);
    commit();
}

}  // namespace fenwick::kernels::cuda::asynchronous
