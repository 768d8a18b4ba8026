// Checks that every differentiable operator passes: gradients in float64, float32 against float64, any thread count.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "base/parallel.h"
#include "support/random_tensor.h"

namespace fenwick::test {

using Function = std::function<std::vector<Variable>(const std::vector<Variable>&)>;

// Outputs, then gradients of all inputs for random output gradients, with inputs converted to `dtype`.
inline std::vector<Tensor> outputs_and_gradients(const Function& fn, const std::vector<Tensor>& inputs, DType dtype) {
    std::vector<Variable> leaves;
    for (const auto& input : inputs) leaves.emplace_back(input.to(dtype).clone(), true);
    Tape tape;
    std::vector<Variable> outputs;
    {
        Recording recording(tape);
        outputs = fn(leaves);
    }
    std::vector<Tensor> results;
    std::vector<std::pair<Variable, Tensor>> seeds;
    for (const auto& output : outputs) {
        results.push_back(output.value());
        seeds.emplace_back(output, random_tensor(output.shape(), 1000 + seeds.size(), output.dtype()));
    }
    tape.backward(seeds);
    for (const auto& leaf : leaves) results.push_back(leaf.gradient()->or_zeros());
    return results;
}

// `inputs` are float64. The operator must be smooth there.
inline void check_operator(const Function& fn, const std::vector<Tensor>& inputs, double tolerance = 1e-7) {
    EXPECT_LT(gradcheck(fn, inputs, {.max_elements = 60}), tolerance);
    const auto exact = outputs_and_gradients(fn, inputs, DType::float64);
    const auto single = outputs_and_gradients(fn, inputs, DType::float32);
    ASSERT_EQ(exact.size(), single.size());
    for (std::size_t i = 0; i < exact.size(); ++i)
        EXPECT_LT(rms_ratio(single[i], exact[i]), 1e-5) << "float32 result " << i;
    const int threads = num_threads();
    for (int count : {1, 3}) {
        set_num_threads(count);
        const auto again = outputs_and_gradients(fn, inputs, DType::float32);
        for (std::size_t i = 0; i < single.size(); ++i)
            EXPECT_EQ(again[i].to_vector<float>(), single[i].to_vector<float>()) << "result " << i << ", " << count << " threads";
    }
    set_num_threads(threads);
}

// fn with the inputs `which` cut out of projections that are 5 columns wider, and applied twice: their gradients are written,
// then added to, in strided slices.
inline Function with_slices(Function fn, std::vector<std::size_t> which) {
    return [fn = std::move(fn), which = std::move(which)](const std::vector<Variable>& inputs) {
        std::vector<Variable> cut = inputs;
        for (auto i : which) cut[i] = ops::split_columns(inputs[i], {2, inputs[i].size(-1) - 5, 3})[1];
        std::vector<Variable> outputs = fn(cut);
        for (auto& output : fn(cut)) outputs.push_back(std::move(output));
        return outputs;
    };
}

}  // namespace fenwick::test
