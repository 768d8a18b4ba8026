// Finite-difference check of an operator's backward, for tests.
#pragma once

#include <functional>
#include <vector>

#include "autograd/tape.h"

namespace fenwick {

struct GradcheckOptions {
    double step = 1e-5;                // central differences
    std::int64_t max_elements = 400;   // checked per input; beyond that a random choice
    std::uint64_t seed = 1;
};

// Runs fn on float64 leaves made of `inputs`, weights every output element at random, and compares each input's gradient
// with central differences. Returns the largest over inputs of rms(analytic - numeric) / rms(numeric) (with a floor of
// 1e-8 on the denominator); expect below 1e-7 for smooth operators. Non-floating inputs are constants of fn itself.
double gradcheck(const std::function<std::vector<Variable>(const std::vector<Variable>&)>& fn, const std::vector<Tensor>& inputs,
                 const GradcheckOptions& options = {});

}  // namespace fenwick
