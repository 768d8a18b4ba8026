#include "kernels/norm.h"

#include <cmath>
#include <vector>

#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {

void rms_norm_forward(const Exec&, const RmsNorm& args) {
    dispatch_cpu_float("rms_norm", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* weight = static_cast<const T*>(args.weight);
        const std::int64_t width = args.width, slice = width / args.groups;
        parallel_for(0, args.rows, rows_per_block(width), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t row = begin; row < end; ++row) {
                const T* u = static_cast<const T*>(args.x) + (args.x == nullptr ? 0 : row * args.x_stride);
                const T* z = static_cast<const T*>(args.z) + (args.z == nullptr ? 0 : row * args.z_stride);
                T* y = static_cast<T*>(args.y) + row * width;
                if (args.residual != nullptr) {
                    const T* residual = static_cast<const T*>(args.residual) + row * width;
                    if (args.x != nullptr) {
                        T* sum = static_cast<T*>(args.sum) + row * width;
                        for (std::int64_t c = 0; c < width; ++c) sum[c] = u[c] + residual[c];
                        u = sum;
                    } else {
                        u = residual;
                    }
                }
                if (args.gate == NormGate::before) {
                    for (std::int64_t c = 0; c < width; ++c) y[c] = u[c] * silu_of(z[c]);
                    u = y;
                }
                for (std::int64_t group = 0; group < args.groups; ++group) {
                    const std::int64_t first = group * slice;
                    const T* ug = u + first;
                    const T squares = lane_sum<T>(slice, [&](std::int64_t c) { return ug[c] * ug[c]; });
                    const T rstd = T{1} / std::sqrt(squares / static_cast<T>(slice) + static_cast<T>(args.eps));
                    static_cast<T*>(args.rstd)[row * args.groups + group] = rstd;
                    for (std::int64_t c = first; c < first + slice; ++c) y[c] = u[c] * rstd * weight[c];
                }
                if (args.gate == NormGate::after)
                    for (std::int64_t c = 0; c < width; ++c) y[c] *= silu_of(z[c]);
            }
        });
    });
}

// With x^ = norm(u), dn the gradient of x^ and the mean over the group's slice: du = rstd (dn - x^ mean(dn x^)).
// Gate after: dn = dy weight silu(z). Gate before: the same for u silu(z) in place of u, then the product rule.
void rms_norm_backward(const Exec&, const RmsNormBackward& args) {
    dispatch_cpu_float("rms_norm", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* weight = static_cast<const T*>(args.weight);
        const std::int64_t width = args.width, slice = width / args.groups;
        const auto sums = sum_over_rows<T>(args.rows, width, [&](std::int64_t begin, std::int64_t end, T* dweight) {
            std::vector<T> scratch(static_cast<std::size_t>(4 * width));
            T* silu = scratch.data();        // silu(z)
            T* slope = silu + width;         // its derivative
            T* normed = slope + width;       // x^
            T* stream = normed + width;      // the gradient of a stream
            for (std::int64_t row = begin; row < end; ++row) {
                const T* u = static_cast<const T*>(args.u) + row * args.u_stride;
                const T* dy = static_cast<const T*>(args.dy) + row * width;
                const T* rstd = static_cast<const T*>(args.rstd) + row * args.groups;
                T* du = args.stream ? stream : static_cast<T*>(args.du) + row * args.du_stride;
                const bool accumulate_du = args.accumulate_du && !args.stream;
                if (args.gate != NormGate::none) {
                    const T* z = static_cast<const T*>(args.z) + row * args.z_stride;
                    for (std::int64_t c = 0; c < width; ++c) {
                        const T s = sigmoid_of(z[c]);
                        silu[c] = z[c] * s;
                        slope[c] = silu_slope(z[c], s);
                    }
                }
                for (std::int64_t group = 0; group < args.groups; ++group) {
                    const std::int64_t first = group * slice;
                    const T r = rstd[group];
                    // The slice of this group in every array.
                    const T *us = u + first, *ws = weight + first, *dys = dy + first, *ss = silu + first;
                    T *ns = normed + first, *dus = du + first;
                    if (args.gate == NormGate::before)
                        assign(ns, slice, false, [=](std::int64_t c) { return us[c] * ss[c] * r; });
                    else
                        assign(ns, slice, false, [=](std::int64_t c) { return us[c] * r; });
                    if (args.gate == NormGate::after) {
                        T* dzs = static_cast<T*>(args.dz) + row * args.dz_stride + first;
                        T* slopes = slope + first;
                        assign(dzs, slice, args.accumulate_dz,
                               [=](std::int64_t c) { return dys[c] * ns[c] * ws[c] * slopes[c]; });
                        assign(slopes, slice, false, [=](std::int64_t c) { return dys[c] * ss[c]; });
                        dys = slopes;  // from here on, the gradient of x^ weight
                    }
                    const T mean = lane_sum<T>(slice, [=](std::int64_t c) { return dys[c] * ws[c] * ns[c]; }) /
                                   static_cast<T>(slice);
                    assign(dweight + first, slice, true, [=](std::int64_t c) { return dys[c] * ns[c]; });
                    if (args.gate == NormGate::before) {
                        T* dzs = static_cast<T*>(args.dz) + row * args.dz_stride + first;
                        const T* slopes = slope + first;
                        assign(ns, slice, false, [=](std::int64_t c) { return r * (dys[c] * ws[c] - ns[c] * mean); });
                        assign(dzs, slice, args.accumulate_dz, [=](std::int64_t c) { return ns[c] * us[c] * slopes[c]; });
                        assign(dus, slice, accumulate_du, [=](std::int64_t c) { return ns[c] * ss[c]; });
                    } else {
                        assign(dus, slice, accumulate_du,
                               [=](std::int64_t c) { return r * (dys[c] * ws[c] - ns[c] * mean); });
                    }
                }
                if (args.dsum != nullptr) {
                    const T* dsum = static_cast<const T*>(args.dsum) + row * width;
                    assign(du, width, true, [=](std::int64_t c) { return dsum[c]; });
                }
                if (args.stream && args.du != nullptr)
                    assign(static_cast<T*>(args.du) + row * args.du_stride, width, args.accumulate_du,
                           [=](std::int64_t c) { return du[c]; });
                if (args.stream && args.dresidual != nullptr)
                    assign(static_cast<T*>(args.dresidual) + row * args.dresidual_stride, width, args.accumulate_dresidual,
                           [=](std::int64_t c) { return du[c]; });
            }
        });
        store_sums(sums.data(), width, args.dweight, args.accumulate_dweight);
    });
}

void l2norm_forward(const Exec&, const L2Norm& args) {
    dispatch_cpu_float("l2norm", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t heads = args.heads, width = args.width;
        parallel_for(0, args.tokens, rows_per_block(heads * width), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t token = begin; token < end; ++token)
                for (std::int64_t head = 0; head < heads; ++head) {
                    const T* x = static_cast<const T*>(args.x) + token * args.x_stride + head * width;
                    T* y = static_cast<T*>(args.y) + (token * heads + head) * width;
                    const T squares = lane_sum<T>(width, [&](std::int64_t c) { return x[c] * x[c]; });
                    const T rstd = T{1} / std::sqrt(squares + static_cast<T>(args.eps));
                    static_cast<T*>(args.rstd)[token * heads + head] = rstd;
                    for (std::int64_t c = 0; c < width; ++c) y[c] = x[c] * rstd;
                }
        });
    });
}

// dx = rstd (dy - y (dy . y)), y = x rstd
void l2norm_backward(const Exec&, const L2NormBackward& args) {
    dispatch_cpu_float("l2norm", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t heads = args.heads, width = args.width;
        parallel_for(0, args.tokens, rows_per_block(heads * width), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t token = begin; token < end; ++token)
                for (std::int64_t head = 0; head < heads; ++head) {
                    const T* x = static_cast<const T*>(args.x) + token * args.x_stride + head * width;
                    const T* dy = static_cast<const T*>(args.dy) + (token * heads + head) * width;
                    T* dx = static_cast<T*>(args.dx) + token * args.dx_stride + head * width;
                    const T rstd = static_cast<const T*>(args.rstd)[token * heads + head];
                    const T dot = rstd * lane_sum<T>(width, [&](std::int64_t c) { return dy[c] * x[c]; });
                    for (std::int64_t c = 0; c < width; ++c)
                        dx[c] = rstd * (dy[c] - x[c] * rstd * dot) + (args.accumulate_dx ? dx[c] : T{0});
                }
        });
    });
}

}  // namespace fenwick::kernels::cpu
