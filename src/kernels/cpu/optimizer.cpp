#include "kernels/optimizer.h"

#include <cmath>
#include <vector>

#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/vector_math.h"

namespace fenwick::kernels::cpu {
namespace {

constexpr std::int64_t block_elements = 16384;

struct Block {
    std::int64_t tensor, begin, end;
};

// All tensors cut into blocks of at most block_elements.
template <class Count>
std::vector<Block> blocks_of(std::int64_t tensor_count, Count&& count) {
    std::vector<Block> blocks;
    for (std::int64_t tensor = 0; tensor < tensor_count; ++tensor)
        for (std::int64_t begin = 0; begin < count(tensor); begin += block_elements)
            blocks.push_back({tensor, begin, std::min(begin + block_elements, count(tensor))});
    return blocks;
}

template <class T>
struct Constants {
    T beta1, rest1, beta2, rest2;  // rest = 1 - beta
    T step_size, eps;              // learning rate / (1 - beta1^step)
    T inverse2, scale;             // 1 / (1 - beta2^step), of the gradient
};

// Constants come by value: behind a reference, the stores could change them and the loop would not vectorise.
template <class T>
void update(std::int64_t count, T* __restrict parameter, const T* __restrict gradient, T* __restrict first_moment,
            T* __restrict second_moment, T keep, Constants<T> constants) {
    const auto [beta1, rest1, beta2, rest2, step_size, eps, inverse2, scale] = constants;
    for (std::int64_t i = 0; i < count; ++i) {
        const T g = gradient[i] * scale;
        const T m = beta1 * first_moment[i] + rest1 * g, v = beta2 * second_moment[i] + rest2 * g * g;
        first_moment[i] = m;
        second_moment[i] = v;
        parameter[i] = parameter[i] * keep - step_size * m / (std::sqrt(v * inverse2) + eps);
    }
}

}  // namespace

void adamw(const Exec&, const AdamW& args) {
    const auto blocks = blocks_of(args.tensor_count, [&](std::int64_t i) { return args.tensors[i].count; });
    const double correction1 = 1.0 - std::pow(args.beta1, static_cast<double>(args.step));
    const double correction2 = 1.0 - std::pow(args.beta2, static_cast<double>(args.step));
    dispatch_cpu_float("adamw", args.dtype, [&]<class T>(TypeTag<T>) {
        const Constants<T> constants{
            .beta1 = static_cast<T>(args.beta1),
            .rest1 = static_cast<T>(1.0 - args.beta1),
            .beta2 = static_cast<T>(args.beta2),
            .rest2 = static_cast<T>(1.0 - args.beta2),
            .step_size = static_cast<T>(args.learning_rate / correction1),
            .eps = static_cast<T>(args.eps),
            .inverse2 = static_cast<T>(1.0 / correction2),
            .scale = static_cast<T>(args.gradient_scale),
        };
        parallel_for(0, static_cast<std::int64_t>(blocks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                const Block& block = blocks[static_cast<std::size_t>(i)];
                const AdamWTensor& tensor = args.tensors[block.tensor];
                const T keep = static_cast<T>(1.0 - args.learning_rate * tensor.weight_decay);
                update(block.end - block.begin, static_cast<T*>(tensor.parameter) + block.begin,
                       static_cast<const T*>(tensor.gradient) + block.begin, static_cast<T*>(tensor.first_moment) + block.begin,
                       static_cast<T*>(tensor.second_moment) + block.begin, keep, constants);
            }
        });
    });
}

void sum_squares(const Exec&, const SumSquares& args) {
    const auto blocks = blocks_of(args.tensor_count, [&](std::int64_t i) { return args.counts[i]; });
    std::vector<double> partial(blocks.size(), 0.0);
    dispatch_cpu_float("sum_squares", args.dtype, [&]<class T>(TypeTag<T>) {
        parallel_for(0, static_cast<std::int64_t>(blocks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                const Block& block = blocks[static_cast<std::size_t>(i)];
                const T* values = static_cast<const T*>(args.tensors[block.tensor]) + block.begin;
                partial[static_cast<std::size_t>(i)] = lane_sum<double>(block.end - block.begin, [values](std::int64_t c) {
                    const auto value = static_cast<double>(values[c]);
                    return value * value;
                });
            }
        });
    });
    double total = 0;
    for (double value : partial) total += value;
    *args.total = total;
}

}  // namespace fenwick::kernels::cpu
