// Work beside the stream: what is queued on a branch may run at the same time as what is queued on exec's stream from there
// on.
#pragma once

#include <array>
#include <mutex>

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {

// Begins behind all that is queued on exec's stream; join() makes that stream wait for it. Memory that both use must outlive
// the join. A GPU has one stream for all branches, which orders them among themselves.
class Branch {
public:
    explicit Branch(const Exec& exec) : exec_(exec), lane_(lane_of(exec)) { order(stream_of(exec_), lane_.stream); }
    ~Branch() {
        try {
            join();
        } catch (...) {  // another error is on its way
        }
    }
    Branch(const Branch&) = delete;
    Branch& operator=(const Branch&) = delete;

    Exec exec() const { return {exec_.device, lane_.stream}; }
    void join() {
        if (!joined_) order(lane_.stream, stream_of(exec_));
        joined_ = true;
    }

private:
    struct Lane {
        std::mutex mutex;
        cudaStream_t stream = nullptr;
        cudaEvent_t event = nullptr;
    };
    static Lane& lane_of(const Exec& exec) {
        // Never destroyed: at process exit the CUDA runtime may be gone before static objects.
        static auto& lanes = *new std::array<Lane, 64>;
        Lane& lane = lanes.at(static_cast<std::size_t>(exec.device.index));
        const std::lock_guard lock(lane.mutex);
        if (lane.stream == nullptr) {
            FENWICK_CUDA_CHECK(cudaEventCreateWithFlags(&lane.event, cudaEventDisableTiming));
            FENWICK_CUDA_CHECK(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking));
        }
        return lane;
    }
    // What is queued on `to` from here on begins when what is queued on `from` is done.
    void order(cudaStream_t from, cudaStream_t to) {
        const std::lock_guard lock(lane_.mutex);
        FENWICK_CUDA_CHECK(cudaEventRecord(lane_.event, from));
        FENWICK_CUDA_CHECK(cudaStreamWaitEvent(to, lane_.event, 0));
    }

    Exec exec_;
    Lane& lane_;
    bool joined_ = false;
};

}  // namespace fenwick::kernels::cuda
