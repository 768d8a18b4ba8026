// What every kernel's declaration needs.
//
// A kernel is a function of an Exec and a plain struct of arguments: pointers, sizes, strides, dtypes. It never sees a
// Tensor, a config or a model. kernels/<op>.h declares the struct and, with FENWICK_KERNEL, three functions:
//   kernels::cpu::<op>   defined in kernels/cpu/<op>.cpp (float32 and float64, multi-threaded)
//   kernels::cuda::<op>  defined in kernels/cuda/<op>.cu (float32 and bfloat16), or, without CUDA, in cuda/stub.cpp
//   kernels::<op>        calls the one that exec.device names
//
// Conventions, unless a declaration says otherwise:
// - Arrays are row-major and dense in their last dimensions; a field `<name>_stride` is the distance in elements between
//   consecutive tokens (rows), so slices of a wider projection are read and written in place.
// - `dtype` is the type of activations; gates, decays, level scales, norm weights, sums and the residual stream have
//   gate_dtype(dtype).
// - Pointers belong to exec.device, except Sequences::offsets and where "host" is said.
// - Outputs are overwritten; a field `accumulate_<name>` = true adds to what is there.
// - Results do not depend on the number of threads, and repeat bit for bit.
// - Shapes are checked by the caller (autograd); kernels assume them.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/device.h"
#include "base/dtype.h"

namespace fenwick::kernels {

// Where a kernel runs. On CUDA, work is queued on `stream` (a cudaStream_t) and the call returns at once.
struct Exec {
    Device device;
    void* stream = nullptr;
};

// Documents packed one after another along the token dimension: document i holds tokens offsets[i] .. offsets[i+1]-1.
// offsets is host memory, offsets[0] == 0, strictly increasing. A batch of B rows of T tokens is B documents of T.
// (This is cu_seqlens of the field, over the flattened [B * T] tokens.)
struct Sequences {
    std::int64_t count = 0;
    const std::int64_t* offsets = nullptr;

    std::int64_t num_tokens() const { return offsets[count]; }
    std::int64_t length(std::int64_t i) const { return offsets[i + 1] - offsets[i]; }
};

}  // namespace fenwick::kernels

#define FENWICK_KERNEL(name, Args)                               \
    namespace cpu {                                              \
    void name(const Exec& exec, const Args& args);               \
    }                                                            \
    namespace cuda {                                             \
    void name(const Exec& exec, const Args& args);               \
    }                                                            \
    inline void name(const Exec& exec, const Args& args) {       \
        exec.device.is_cpu() ? cpu::name(exec, args) : cuda::name(exec, args); \
    }
