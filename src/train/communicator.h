// What several processes of one training run say to each other.
#pragma once

#include <functional>
#include <memory>

#include "autograd/tensor.h"
#include "base/error.h"

namespace fenwick::train {

// Collective calls: every process makes the same calls in the same order. Tensors are contiguous float32 or float64, on
// the CPU or a GPU. Sums repeat bit for bit, and all ranks get the same bits: on the CPU they are taken in the order of the
// ranks; NCCL's order on GPUs depends on how these are connected. On a GPU the calls are ordered on its stream and may return
// before they are done.
class Communicator {
public:
    virtual ~Communicator() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    virtual int local_rank() const { return rank(); }  // among the processes of this machine: which GPU to take
    virtual void all_reduce_sum(const Tensor& values) = 0;     // in place
    virtual void broadcast(const Tensor& values, int root) = 0;  // in place
    virtual void barrier() = 0;

    bool is_root() const { return rank() == 0; }
};

// What `together` throws on every process when one of several failed. No process waits for another then.
struct SharedError : Error {
    SharedError(const std::string& message, bool tells) : Error(message), speaks(tells) {}
    bool speaks;  // the others fail for the same reason, or because of this process, and need not say so again
};

// Runs `body`, which makes no collective calls, on every process; if it throws Error on any of them, SharedError is thrown
// on all. Rank 0 speaks if it failed, else each that did. A single process throws what `body` throws.
void together(Communicator& communicator, const std::function<void()>& body);

std::unique_ptr<Communicator> single_process();

// MPI where the program was started by mpirun (or srun with PMI), else a single process. Throws Error where mpirun
// started several processes of a program that was built without MPI. One at a time may live.
// In a build with NCCL, tensors of GPUs go through NCCL where every process has a GPU of its own; else through MPI and host
// memory. The environment variable FENWICK_NCCL=0 turns that off, FENWICK_NCCL=1 turns it on for one process too.
std::unique_ptr<Communicator> make_communicator();

}  // namespace fenwick::train
