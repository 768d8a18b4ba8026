#include "kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {

void cross_entropy(const Exec&, const CrossEntropy& args) {
    dispatch_cpu_float("cross_entropy", args.dtype, [&]<class T>(TypeTag<T>) {
        constexpr std::int64_t tile = 1024;
        parallel_for(0, args.rows, rows_per_block(args.vocab), [&](std::int64_t begin, std::int64_t end) {
            T scratch[tile];
            for (std::int64_t row = begin; row < end; ++row) {
                T* logits = static_cast<T*>(args.logits) + row * args.stride;
                T& loss = static_cast<T*>(args.loss)[row];
                const std::int32_t target = args.targets[row];
                if (target == ignore_index) {
                    loss = T{0};
                    if (args.gradient) std::fill(logits, logits + args.vocab, T{0});
                    continue;
                }
                const T target_logit = logits[target], largest = lane_max(args.vocab, logits);
                double sum = 0;  // of exp(logit - largest)
                for (std::int64_t first = 0; first < args.vocab; first += tile) {
                    const std::int64_t count = std::min(tile, args.vocab - first);
                    T* to = args.gradient ? logits + first : scratch;  // with a gradient, the exponentials stay in place
                    const T* from = logits + first;
                    for (std::int64_t c = 0; c < count; ++c) to[c] = fast_exp(from[c] - largest);
                    sum += static_cast<double>(lane_sum<T>(count, [to](std::int64_t c) { return to[c]; }));
                }
                loss = static_cast<T>(std::log(sum) + static_cast<double>(largest - target_logit));
                if (!args.gradient) continue;
                const T factor = static_cast<T>(args.gradient_scale / sum);
                for (std::int64_t c = 0; c < args.vocab; ++c) logits[c] *= factor;
                logits[target] -= static_cast<T>(args.gradient_scale);
            }
        });
    });
}

void sum(const Exec&, const Sum& args) {
    dispatch_cpu_float("sum", args.dtype, [&]<class T>(TypeTag<T>) {
        constexpr std::int64_t block = 16384;
        std::vector<double> partial(static_cast<std::size_t>((args.count + block - 1) / block), 0.0);
        parallel_for(0, args.count, block, [&](std::int64_t begin, std::int64_t end) {
            const T* values = static_cast<const T*>(args.values) + begin;
            partial[static_cast<std::size_t>(begin / block)] =
                lane_sum<double>(end - begin, [values](std::int64_t i) { return static_cast<double>(values[i]); });
        });
        double total = args.accumulate_total ? *args.total : 0.0;
        for (double value : partial) total += value;
        *args.total = total;
    });
}

}  // namespace fenwick::kernels::cpu
