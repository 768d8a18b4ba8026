// The operators that `fenwick bench` times, each with random inputs of given sizes.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "autograd/ops.h"

namespace fenwick::tools {

// Sizes by name ("heads"); tokens and length are among them.
using OperatorSizes = std::map<std::string, std::int64_t>;

// One call of an operator on inputs of its own.
struct OperatorCall {
    std::vector<Variable> inputs;                 // leaves
    std::function<std::vector<Variable>()> call;  // records where a tape does
    double flops = 0;                             // of forward; 0: bound by memory
    bool differentiable = true;
};

struct OperatorCase {
    std::string name, description;
    OperatorSizes sizes;  // defaults: those of the paper's models at 16,384 tokens
    std::function<OperatorCall(const OperatorSizes& sizes, DType dtype, Device device, std::uint64_t seed)> make;
};

const std::vector<OperatorCase>& operator_cases();

}  // namespace fenwick::tools
