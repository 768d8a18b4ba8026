// The NCCL half of communicator.h, in a build with NCCL.
#pragma once

#include "train/communicator.h"

namespace fenwick::train {

// `start` for CPU tensors, NCCL for tensors of a GPU (a GPU of its own for every process).
std::unique_ptr<Communicator> with_nccl(std::unique_ptr<Communicator> start);

}  // namespace fenwick::train
