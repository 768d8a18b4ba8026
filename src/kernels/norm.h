// RMS norm, its two gated forms, the residual-fused form, and the L2 norm of query and key.
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

enum class NormGate : std::uint8_t {
    none,    // y = norm(u) * weight                  rms_norm
    after,   // y = norm(u) * weight * silu(z)        rms_norm_gated  (Gated DeltaNet's output norm)
    before,  // y = norm(u * silu(z)) * weight        gated_rms_norm  (Mamba-2's output norm)
};

// norm(u) = u / sqrt(mean(u^2) + eps), the mean over each of `groups` equal slices of a row.
// u = x, or with a residual stream, and without a gate: u = x + residual, also written to `sum` (the new stream), or where x is
// null u = residual. The stream has gate_dtype(dtype): it is a sum over all layers, and bfloat16 would round it at each.
struct RmsNorm {
    DType dtype;  // of x, z, y
    NormGate gate = NormGate::none;
    std::int64_t rows = 0, groups = 1, width = 0;  // width of a whole row; width % groups == 0
    double eps = 1e-5;
    std::int64_t x_stride = 0, z_stride = 0;
    const void* x = nullptr;         // [rows, width], or null beside a residual
    const void* residual = nullptr;  // [rows, width] dense, gate dtype, or null
    const void* z = nullptr;         // [rows, width], null exactly when gate == none
    const void* weight = nullptr;    // [width], gate dtype
    void* sum = nullptr;             // [rows, width] dense, gate dtype; given exactly when x and residual are
    void* y = nullptr;               // [rows, width] dense
    void* rstd = nullptr;            // [rows, groups], gate dtype: 1/sqrt(mean + eps), kept for backward
};
FENWICK_KERNEL(rms_norm_forward, RmsNorm)

struct RmsNormBackward {
    DType dtype;
    NormGate gate = NormGate::none;
    bool stream = false;  // u is a residual stream
    std::int64_t rows = 0, groups = 1, width = 0;
    std::int64_t u_stride = 0, z_stride = 0, du_stride = 0, dresidual_stride = 0, dz_stride = 0;
    const void* u = nullptr;  // x, or of a stream: sum, or the residual alone; gate dtype then
    const void* z = nullptr;
    const void* weight = nullptr;
    const void* rstd = nullptr;
    const void* dy = nullptr;    // [rows, width] dense
    const void* dsum = nullptr;  // gradient that reaches sum from later layers, dense, gate dtype; may be null
    void* du = nullptr;          // [rows, width]: gradient of x; may be null for a stream
    void* dresidual = nullptr;   // [rows, width], gate dtype: of a stream's residual, the same values; may be null
    void* dz = nullptr;          // null exactly when gate == none
    void* dweight = nullptr;     // [width], gate dtype
    bool accumulate_du = false, accumulate_dresidual = false, accumulate_dz = false, accumulate_dweight = false;
};
FENWICK_KERNEL(rms_norm_backward, RmsNormBackward)

// y = x / sqrt(sum(x^2) + eps) over the last dimension; rows of `width` in heads of a strided token.
struct L2Norm {
    DType dtype;
    std::int64_t tokens = 0, heads = 0, width = 0;
    double eps = 1e-6;
    std::int64_t x_stride = 0;
    const void* x = nullptr;  // [tokens, heads, width]
    void* y = nullptr;        // dense
    void* rstd = nullptr;     // [tokens, heads], gate dtype
};
FENWICK_KERNEL(l2norm_forward, L2Norm)

struct L2NormBackward {
    DType dtype;
    std::int64_t tokens = 0, heads = 0, width = 0;
    std::int64_t x_stride = 0, dx_stride = 0;
    const void* x = nullptr;
    const void* rstd = nullptr;
    const void* dy = nullptr;  // dense
    void* dx = nullptr;
    bool accumulate_dx = false;
};
FENWICK_KERNEL(l2norm_backward, L2NormBackward)

}  // namespace fenwick::kernels
