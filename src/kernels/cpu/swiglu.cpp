#include "kernels/swiglu.h"

#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {

void swiglu_forward(const Exec&, const Swiglu& args) {
    dispatch_cpu_float("swiglu", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t width = args.width;
        parallel_for(0, args.rows, rows_per_block(width), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t row = begin; row < end; ++row) {
                const T* gate = static_cast<const T*>(args.gate) + row * args.gate_stride;
                const T* up = static_cast<const T*>(args.up) + row * args.up_stride;
                T* out = static_cast<T*>(args.out) + row * width;
                assign(out, width, false, [=](std::int64_t c) { return silu_of(gate[c]) * up[c]; });
            }
        });
    });
}

void swiglu_backward(const Exec&, const SwigluBackward& args) {
    dispatch_cpu_float("swiglu", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t width = args.width;
        constexpr std::int64_t tile = 1024;
        parallel_for(0, args.rows, rows_per_block(width), [&](std::int64_t begin, std::int64_t end) {
            T sigmoid[tile];
            for (std::int64_t row = begin; row < end; ++row)
                for (std::int64_t first = 0; first < width; first += tile) {
                    const std::int64_t count = std::min(tile, width - first);
                    const T* gate = static_cast<const T*>(args.gate) + row * args.gate_stride + first;
                    const T* up = static_cast<const T*>(args.up) + row * args.up_stride + first;
                    const T* dout = static_cast<const T*>(args.dout) + row * width + first;
                    T* dgate = static_cast<T*>(args.dgate) + row * args.dgate_stride + first;
                    T* dup = static_cast<T*>(args.dup) + row * args.dup_stride + first;
                    const T* s = sigmoid;
                    assign(sigmoid, count, false, [=](std::int64_t c) { return sigmoid_of(gate[c]); });
                    assign(dup, count, args.accumulate_dup, [=](std::int64_t c) { return dout[c] * gate[c] * s[c]; });
                    assign(dgate, count, args.accumulate_dgate,
                           [=](std::int64_t c) { return dout[c] * up[c] * silu_slope(gate[c], s[c]); });
                }
        });
    });
}

}  // namespace fenwick::kernels::cpu
