// Sums over GPUs through NCCL. Compiled where NCCL was found.
#include <nccl.h>

#include <cstdlib>
#include <exception>
#include <vector>

#include "base/cuda_check.h"
#include "base/memory_cuda.h"
#include "train/communicator_nccl.h"

namespace fenwick::train {
namespace {

void check(ncclResult_t status, const char* call) {
    if (status == ncclSuccess || status == ncclInProgress) return;
    fail("[nccl] {}: {} ({})", call, ncclGetErrorString(status), ncclGetLastError(nullptr));
}

ncclDataType_t type_of(DType dtype) { return dtype == DType::float64 ? ncclDouble : ncclFloat; }

// `start` carries CPU tensors and the first message; NCCL carries tensors of a GPU. Its communicator is made when the first
// of those comes, for that GPU.
class Nccl final : public Communicator {
public:
    explicit Nccl(std::unique_ptr<Communicator> start) : start_(std::move(start)) {}
    // Another process may have failed: waiting for it in an orderly end could last for ever.
    ~Nccl() override {
        if (communicator_ == nullptr) return;
        (void)(std::uncaught_exceptions() > 0 ? ncclCommAbort(communicator_) : ncclCommDestroy(communicator_));
    }

    int rank() const override { return start_->rank(); }
    int size() const override { return start_->size(); }
    int local_rank() const override { return start_->local_rank(); }
    void barrier() override { start_->barrier(); }

    void all_reduce_sum(const Tensor& values) override {
        if (values.device().is_cpu()) return start_->all_reduce_sum(values);
        const auto stream = begin(values);
        check(ncclAllReduce(values.data(), values.data(), static_cast<std::size_t>(values.count()), type_of(values.dtype()),
                            ncclSum, communicator_, stream), "ncclAllReduce");
    }

    void broadcast(const Tensor& values, int root) override {
        if (values.device().is_cpu()) return start_->broadcast(values, root);
        const auto stream = begin(values);
        check(ncclBroadcast(values.data(), values.data(), static_cast<std::size_t>(values.count()), type_of(values.dtype()),
                            root, communicator_, stream), "ncclBroadcast");
    }

private:
    cudaStream_t begin(const Tensor& values) {
        FENWICK_CHECK(values.is_contiguous() && (values.dtype() == DType::float32 || values.dtype() == DType::float64),
                      "[Communicator] a contiguous float32 or float64 tensor is needed, not {} {}", name_of(values.dtype()),
                      to_string(values.shape()));
        const auto stream = static_cast<cudaStream_t>(detail::cuda_stream(values.device().index));
        if (communicator_ == nullptr) connect(values.device());
        FENWICK_CHECK(values.device() == device_, "[nccl] a tensor on {}; this process communicates for {}",
                      name_of(values.device()), name_of(device_));
        return stream;
    }

    void connect(Device device) {
        // Rings add in an order that the topology alone decides, so that sums repeat bit for bit.
        setenv("NCCL_ALGO", "Ring", 0);
        ncclUniqueId id{};
        if (is_root()) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
        std::vector<float> bytes(std::begin(id.internal), std::end(id.internal));
        const Tensor message = Tensor::from(bytes, {NCCL_UNIQUE_ID_BYTES});
        start_->broadcast(message, 0);
        for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; ++i) id.internal[i] = static_cast<char>(message.as<float>()[i]);
        FENWICK_CUDA_CHECK(cudaSetDevice(device.index));
        check(ncclCommInitRank(&communicator_, size(), id, rank()), "ncclCommInitRank");
        device_ = device;
    }

    std::unique_ptr<Communicator> start_;
    ncclComm_t communicator_ = nullptr;
    Device device_{};
};

}  // namespace

std::unique_ptr<Communicator> with_nccl(std::unique_ptr<Communicator> start) {
    return std::make_unique<Nccl>(std::move(start));
}

}  // namespace fenwick::train
