#include "kernels/gates.h"

#include <cmath>
#include <vector>

#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {

void decay_gate_forward(const Exec&, const DecayGate& args) {
    dispatch_cpu_float("decay_gate", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t heads = args.heads;
        const auto* bias = static_cast<const T*>(args.step_bias);
        std::vector<T> rates(static_cast<std::size_t>(heads));  // -exp(a_log)
        for (std::int64_t h = 0; h < heads; ++h) rates[h] = -std::exp(static_cast<const T*>(args.a_log)[h]);
        const T* rate = rates.data();
        parallel_for(0, args.tokens, rows_per_block(heads), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t token = begin; token < end; ++token) {
                const T* raw = static_cast<const T*>(args.raw) + token * args.raw_stride;
                T* step = static_cast<T*>(args.step) + token * heads;
                T* g = static_cast<T*>(args.g) + token * heads;
                assign(step, heads, false, [=](std::int64_t h) { return softplus_of(raw[h] + bias[h]); });
                assign(g, heads, false, [=](std::int64_t h) { return rate[h] * step[h]; });
            }
        });
    });
}

// d step = dstep - exp(a_log) dg, d raw = d step sigmoid(raw + step_bias), d a_log = dg g
void decay_gate_backward(const Exec&, const DecayGateBackward& args) {
    dispatch_cpu_float("decay_gate", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t heads = args.heads;
        const auto* bias = static_cast<const T*>(args.step_bias);
        std::vector<T> rates(static_cast<std::size_t>(heads));
        for (std::int64_t h = 0; h < heads; ++h) rates[h] = -std::exp(static_cast<const T*>(args.a_log)[h]);
        const T* rate = rates.data();
        const auto sums = sum_over_rows<T>(args.tokens, 2 * heads, [&](std::int64_t begin, std::int64_t end, T* partial) {
            std::vector<T> scratch(static_cast<std::size_t>(heads));
            T* dstep = scratch.data();  // the whole gradient of step, then of raw
            for (std::int64_t token = begin; token < end; ++token) {
                const T* raw = static_cast<const T*>(args.raw) + token * args.raw_stride;
                T* draw = static_cast<T*>(args.draw) + token * args.draw_stride;
                std::fill(dstep, dstep + heads, T{0});
                if (args.dstep != nullptr) {
                    const T* from = static_cast<const T*>(args.dstep) + token * heads;
                    assign(dstep, heads, false, [=](std::int64_t h) { return from[h]; });
                }
                if (args.dg != nullptr) {
                    const T* dg = static_cast<const T*>(args.dg) + token * heads;
                    assign(dstep, heads, true, [=](std::int64_t h) { return rate[h] * dg[h]; });
                    assign(partial + heads, heads, true,
                           [=](std::int64_t h) { return dg[h] * rate[h] * softplus_of(raw[h] + bias[h]); });
                }
                for (std::int64_t h = 0; h < heads; ++h) dstep[h] *= sigmoid_of(raw[h] + bias[h]);
                assign(partial, heads, true, [=](std::int64_t h) { return dstep[h]; });
                assign(draw, heads, args.accumulate_draw, [=](std::int64_t h) { return dstep[h]; });
            }
        });
        store_sums(sums.data(), heads, args.dstep_bias, args.accumulate_dstep_bias);
        store_sums(sums.data() + heads, heads, args.da_log, args.accumulate_da_log);
    });
}

void level_scales_forward(const Exec&, const LevelScales& args) {
    dispatch_cpu_float("level_scales", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t columns = args.heads * args.levels;
        const auto* weight = static_cast<const T*>(args.level_weight);
        parallel_for(0, args.tokens, rows_per_block(columns), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t token = begin; token < end; ++token) {
                const T* raw = static_cast<const T*>(args.raw) + token * args.raw_stride;
                assign(static_cast<T*>(args.level_scales) + token * columns, columns, false,
                       [=](std::int64_t c) { return softplus_of(weight[c] * raw[c]); });
            }
        });
    });
}

void level_scales_backward(const Exec&, const LevelScalesBackward& args) {
    dispatch_cpu_float("level_scales", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t columns = args.heads * args.levels;
        const auto* weight = static_cast<const T*>(args.level_weight);
        const auto sums = sum_over_rows<T>(args.tokens, columns, [&](std::int64_t begin, std::int64_t end, T* partial) {
            std::vector<T> scratch(static_cast<std::size_t>(columns));
            T* slope = scratch.data();  // gradient of weight * raw
            for (std::int64_t token = begin; token < end; ++token) {
                const T* raw = static_cast<const T*>(args.raw) + token * args.raw_stride;
                const T* dy = static_cast<const T*>(args.dlevel_scales) + token * columns;
                T* draw = static_cast<T*>(args.draw) + token * args.draw_stride;
                assign(slope, columns, false, [=](std::int64_t c) { return dy[c] * sigmoid_of(weight[c] * raw[c]); });
                assign(partial, columns, true, [=](std::int64_t c) { return slope[c] * raw[c]; });
                assign(draw, columns, args.accumulate_draw, [=](std::int64_t c) { return slope[c] * weight[c]; });
            }
        });
        store_sums(sums.data(), columns, args.dlevel_weight, args.accumulate_dlevel_weight);
    });
}

void sigmoid_forward(const Exec&, const Sigmoid& args) {
    dispatch_cpu_float("sigmoid", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* x = static_cast<const T*>(args.x);
        parallel_for(0, args.count, 16384, [&](std::int64_t begin, std::int64_t end) {
            const T* from = x + begin;
            assign(static_cast<T*>(args.y) + begin, end - begin, false, [=](std::int64_t i) { return sigmoid_of(from[i]); });
        });
    });
}

void sigmoid_backward(const Exec&, const SigmoidBackward& args) {
    dispatch_cpu_float("sigmoid", args.dtype, [&]<class T>(TypeTag<T>) {
        parallel_for(0, args.count, 16384, [&](std::int64_t begin, std::int64_t end) {
            const T* y = static_cast<const T*>(args.y) + begin;
            const T* dy = static_cast<const T*>(args.dy) + begin;
            assign(static_cast<T*>(args.dx) + begin, end - begin, args.accumulate_dx,
                   [=](std::int64_t i) { return dy[i] * y[i] * (T{1} - y[i]); });
        });
    });
}

}  // namespace fenwick::kernels::cpu
