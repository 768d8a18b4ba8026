// A ring of shared-memory stages between a producer warpgroup, which only copies, and consumer warpgroups, which only
// compute. Two mbarriers a stage say "filled" and "free"; nobody waits for the whole block.
//
// Copies are cp.async; the producer runs ahead as far as there are free stages.
#pragma once

#include "kernels/cuda/warpgroup.cuh"

namespace fenwick::kernels::cuda::pipeline {

#if defined(FENWICK_CUDA_EMULATION)
using emulation::arrive;
using emulation::arrive_after_copies;
using emulation::Barrier;
using emulation::has_ended;
using emulation::initialize;
using emulation::synchronize_team;
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
// Whether the phase with this parity has ended.
__device__ __forceinline__ bool has_ended(const Barrier* barrier, int parity) {
    int ended;
    asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.b32 %0, 1, 0, done;\n}"
                 : "=r"(ended)
                 : "r"(address_of(barrier)), "r"(parity)
                 : "memory");
    return ended != 0;
}
// A barrier of the caller's team of 128 threads; `id` from 1 to 15, another one for each team.
__device__ __forceinline__ void synchronize_team(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(tile::threads) : "memory");
}
#endif

// A warp that is done with a stage arrives once, by its first lane, behind __syncwarp. compute-sanitizer's racecheck orders
// only the threads that arrive themselves and takes the other lanes' reads for hazards: for it every lane arrives.
#if defined(FENWICK_RACECHECK)
constexpr int arrivals_of_warp = 32;
#else
constexpr int arrivals_of_warp = 1;
#endif
__device__ __forceinline__ void arrive_as_warp(Barrier* barrier) {
    __syncwarp();
    if (arrivals_of_warp > 1 || threadIdx.x % 32 == 0) arrive(barrier);
}

// Lanes go on together: one that lags could miss a phase.
__device__ __forceinline__ void wait_as_warp(const Barrier* barrier, int parity) {
    wait(barrier, parity);
    __syncwarp();
}

// A value that is the same for all lanes of a warp, so that the compiler knows it: what hangs on it (the place in a ring,
// wgmma's descriptors) then lives in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

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

// The barriers of a ring. Producer: fill; and finish behind the last stage. Consumer: wait, read, release (a warp at a time,
// all of its threads together).
template <int Stages>
struct Ring {
    Barrier filled[Stages], free[Stages];

    // By one thread; then the block must synchronize. `consumers`: warps that release every stage; `producers`: threads that
    // arrive when their part of a stage is there.
    __device__ __forceinline__ void initialize(int consumers, int producers = tile::threads) {
        for (int i = 0; i < Stages; ++i) {
            pipeline::initialize(filled + i, producers);
            pipeline::initialize(free + i, consumers * arrivals_of_warp);
        }
    }
    __device__ __forceinline__ void acquire(const Position<Stages>& at) { pipeline::wait(free + at.stage, at.turn ^ 1); }
    // copy(stage) starts the copies of the next stage, which is read by ordinary loads: it reports itself.
    template <class Copy>
    __device__ __forceinline__ void fill(Position<Stages>& at, Copy&& copy) {
        acquire(at);
        copy(at.stage);
        arrive_after_copies(filled + at.stage);
        at.advance();
    }
    __device__ __forceinline__ void wait(const Position<Stages>& at) { pipeline::wait(filled + at.stage, at.turn); }
    __device__ __forceinline__ void release(Position<Stages>& at) {
        arrive_as_warp(free + at.stage);
        at.advance();
    }
};

// Stages that wgmma reads, whose copies must be fenced by the thread that made them, when they are complete: the producer
// reports a stage once it has started the `Ahead`-th one after it, or where it would have to wait for a free stage. (A fence
// by the consumers would wait for their own stores.)
template <int Stages, int Ahead>
struct TileRing : Ring<Stages> {
    static_assert(Ahead < Stages);
    struct Producer {
        Position<Stages> at;
        int pending = 0;  // stages that have been started but not reported
    };
    // copy(stage) starts the copies of the next stage.
    template <class Copy>
    __device__ __forceinline__ void fill(Producer& producer, Copy&& copy) {
        prepare_wait(producer, *this, producer.at);
        this->acquire(producer.at);
        copy(producer.at.stage);
        tile::commit_async();
        producer.at.advance();
        if (++producer.pending > Ahead) report<Ahead>(producer);
    }
    // Before the producer may have to wait for a stage of another ring.
    template <int Others>
    __device__ __forceinline__ void prepare_wait(Producer& producer, const Ring<Others>& other, const Position<Others>& at) {
        if (producer.pending > 0 && !has_ended(other.free + at.stage, at.turn ^ 1)) finish(producer);
    }
    // Reports all stages; others may follow.
    __device__ __forceinline__ void finish(Producer& producer) { finish_from<Ahead>(producer); }

private:
    // The stage that was started `Back` stages before the last one: the first that has not been reported.
    template <int Back>
    __device__ __forceinline__ void report(Producer& producer) {
        tile::wait_async<Back>();
        warpgroup::fence_tiles();
        int stage = producer.at.stage - 1 - Back;
        if (stage < 0) stage += Stages;
        arrive(this->filled + stage);
        --producer.pending;
    }
    template <int Most>
    __device__ __forceinline__ void finish_from(Producer& producer) {
        if constexpr (Most > 0) {
            if (producer.pending == Most) report<Most - 1>(producer);
            finish_from<Most - 1>(producer);
        }
    }
};

}  // namespace fenwick::kernels::cuda::pipeline
