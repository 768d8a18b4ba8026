#include "autograd/gradcheck.h"

#include <algorithm>
#include <cmath>

#include "base/random.h"

namespace fenwick {

double gradcheck(const std::function<std::vector<Variable>(const std::vector<Variable>&)>& fn, const std::vector<Tensor>& inputs,
                 const GradcheckOptions& options) {
    std::vector<Variable> leaves;
    for (const auto& input : inputs) {
        FENWICK_CHECK(input.dtype() == DType::float64, "[gradcheck] inputs must be float64, got {}", name_of(input.dtype()));
        leaves.emplace_back(input.clone(), true);
    }
    Random random(options.seed);
    Tape tape;
    std::vector<std::pair<Variable, Tensor>> seeds;
    std::vector<std::vector<double>> weights;
    {
        Recording recording(tape);
        for (const auto& output : fn(leaves)) {
            std::vector<double> weight(static_cast<std::size_t>(output.value().count()));
            for (auto& w : weight) w = random.normal();
            Tensor seed = Tensor::from(weight, output.shape()).to(output.dtype());
            weights.push_back(std::move(weight));
            if (output.requires_grad()) seeds.emplace_back(output, seed);
        }
    }
    tape.backward(seeds);

    const auto objective = [&] {
        double sum = 0;
        const auto outputs = fn(leaves);
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            const auto values = outputs[i].value().to_vector<double>();
            for (std::size_t j = 0; j < values.size(); ++j) sum += weights[i][j] * values[j];
        }
        return sum;
    };
    double worst = 0;
    for (const auto& leaf : leaves) {
        const auto analytic = leaf.gradient()->or_zeros().to_vector<double>();
        double* values = leaf.value().as<double>();
        const std::int64_t count = leaf.value().count();
        const Permutation order(static_cast<std::uint64_t>(std::max<std::int64_t>(count, 1)), options.seed, 7);
        double error = 0, norm = 0;
        for (std::int64_t n = 0; n < std::min(count, options.max_elements); ++n) {
            const auto i = static_cast<std::int64_t>(order(static_cast<std::uint64_t>(n)));
            const double original = values[i], step = options.step * std::max(1.0, std::abs(original));
            values[i] = original + step;
            const double above = objective();
            values[i] = original - step;
            const double below = objective();
            values[i] = original;
            const double numeric = (above - below) / (2 * step);
            error += (numeric - analytic[static_cast<std::size_t>(i)]) * (numeric - analytic[static_cast<std::size_t>(i)]);
            norm += numeric * numeric;
        }
        worst = std::max(worst, std::sqrt(error) / std::max(std::sqrt(norm), 1e-8));
    }
    return worst;
}

}  // namespace fenwick
