// A ring of shared-memory stages between a producer warpgroup, which only copies, and consumer warpgroups, which only
// compute. Two mbarriers a stage say "filled" and "free"; nobody waits for the whole block.
//
// Copies are cp.async and complete on the mbarrier by themselves: the producer runs ahead as far as there are free stages.
#pragma once

#include "kernels/cuda/warpgroup.cuh"

namespace fenwick::kernels::cuda::pipeline {

#if defined(FENWICK_CUDA_EMULATION)
using emulation::arrive;
using emulation::arrive_after_copies;
using emulation::Barrier;
using emulation::initialize;
using emulation::wait;
#else
using Barrier = std::uint64_t;

__device__ __forceinline__ std::uint32_t address_of(const Barrier* barrier) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(barrier));
}
// A phase of the barrier ends with its `arrivals`-th arrival. One thread; then the block must synchronize.
__device__ __forceinline__ void initialize(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(Barrier* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(address_of(barrier)) : "memory");
}
// Arrives when all copies that this thread has started so far are complete.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address_of(barrier)) : "memory");
}
// Waits for the end of the phase with this parity; the phase before the first has parity 1.
__device__ __forceinline__ void wait(const Barrier* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
        "@!done bra again;\n}" ::"r"(address_of(barrier)),
        "r"(parity)
        : "memory");
}
#endif

// Where in a ring of `Stages` stages a role is. `turn` flips with every round.
template <int Stages>
struct Position {
    int stage = 0, turn = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            turn ^= 1;
        }
    }
};

// The barriers of a ring. Producer: acquire, copy, commit. Consumer: wait, read, release (a warp at a time, all of its
// threads together).
template <int Stages>
struct Ring {
    Barrier filled[Stages], free[Stages];

    // By one thread; then the block must synchronize. `consumers`: warps that release every stage.
    __device__ __forceinline__ void initialize(int consumers) {
        for (int i = 0; i < Stages; ++i) {
            pipeline::initialize(filled + i, tile::threads);
            pipeline::initialize(free + i, consumers);
        }
    }
    __device__ __forceinline__ void acquire(const Position<Stages>& at) { pipeline::wait(free + at.stage, at.turn ^ 1); }
    __device__ __forceinline__ void commit(Position<Stages>& at) {
        arrive_after_copies(filled + at.stage);
        at.advance();
    }
    // Also makes the copies visible to wgmma.
    __device__ __forceinline__ void wait(const Position<Stages>& at) {
        pipeline::wait(filled + at.stage, at.turn);
        warpgroup::fence_tiles();
    }
    __device__ __forceinline__ void release(Position<Stages>& at) {
        __syncwarp();
        if (tile::thread_index() % 32 == 0) arrive(free + at.stage);
        at.advance();
    }
};

}  // namespace fenwick::kernels::cuda::pipeline
