#include "kernels/swiglu.h"

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {
namespace {

template <class T, int V>
__global__ void swiglu_forward_kernel(Swiglu args) {
    const auto* gate = static_cast<const T*>(args.gate);
    const auto* up = static_cast<const T*>(args.up);
    auto* out = static_cast<T*>(args.out);
    for_each_cell<V>(args.rows, args.width, [&](std::int64_t row, std::int64_t column) {
        float g[V], u[V];
        load(g, gate + row * args.gate_stride + column);
        load(u, up + row * args.up_stride + column);
#pragma unroll
        for (int i = 0; i < V; ++i) u[i] *= silu_of(g[i]);
        store(out + row * args.width + column, u);
    });
}

template <class T, int V>
__global__ void swiglu_backward_kernel(SwigluBackward args) {
    const auto* gate = static_cast<const T*>(args.gate);
    const auto* up = static_cast<const T*>(args.up);
    const auto* dout = static_cast<const T*>(args.dout);
    auto* dgate = static_cast<T*>(args.dgate);
    auto* dup = static_cast<T*>(args.dup);
    for_each_cell<V>(args.rows, args.width, [&](std::int64_t row, std::int64_t column) {
        float g[V], u[V], d[V];
        load(g, gate + row * args.gate_stride + column);
        load(u, up + row * args.up_stride + column);
        load(d, dout + row * args.width + column);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const float s = sigmoid_of(g[i]), silu = g[i] * s;
            g[i] = d[i] * u[i] * s * (1.0f + g[i] * (1.0f - s));
            u[i] = d[i] * silu;
        }
        store(dgate + row * args.dgate_stride + column, g, args.accumulate_dgate);
        store(dup + row * args.dup_stride + column, u, args.accumulate_dup);
    });
}

}  // namespace

void swiglu_forward(const Exec& exec, const Swiglu& args) {
    const OperatorScope scope("swiglu_forward", exec);
    dispatch("swiglu", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({args.width, args.gate_stride, args.up_stride}, {args.gate, args.up, args.out}),
                       [&](auto v) {
                           const auto [grid, block] = cell_grid(args.rows, args.width, v);
                           launch("swiglu_forward", exec, swiglu_forward_kernel<T, v()>, grid, block, 0, args);
                       });
    });
}

void swiglu_backward(const Exec& exec, const SwigluBackward& args) {
    const OperatorScope scope("swiglu_backward", exec);
    dispatch("swiglu", args.dtype, [&]<class T>(TypeTag<T>) {
        const bool use_wide =
            can_use_wide({args.width, args.gate_stride, args.up_stride, args.dgate_stride, args.dup_stride},
                         {args.gate, args.up, args.dout, args.dgate, args.dup});
        dispatch_width(use_wide, [&](auto v) {
            const auto [grid, block] = cell_grid(args.rows, args.width, v);
            launch("swiglu_backward", exec, swiglu_backward_kernel<T, v()>, grid, block, 0, args);
        });
    });
}

}  // namespace fenwick::kernels::cuda
