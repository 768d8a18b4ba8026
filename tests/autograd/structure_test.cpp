#include <gtest/gtest.h>

#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "support/random_tensor.h"

namespace fenwick {
namespace {

using test::random_tensor;

TEST(Structure, GradientsOfEveryOperator) {
    EXPECT_LT(gradcheck([](const auto& x) { return std::vector{ops::add(x[0], x[1])}; },
                        {random_tensor({2, 3}, 1), random_tensor({2, 3}, 2)}), 1e-8);
    EXPECT_LT(gradcheck([](const auto& x) { return std::vector{ops::add(x[0], x[0])}; }, {random_tensor({2, 3}, 1)}), 1e-8);
    EXPECT_LT(gradcheck([](const auto& x) { return std::vector{ops::scale(ops::view(x[0], {3, -1}), -2.5)}; },
                        {random_tensor({2, 6}, 1)}), 1e-8);
    EXPECT_LT(gradcheck([](const auto& x) { return std::vector{ops::linear(x[0], x[1])}; },
                        {random_tensor({2, 3, 5}, 1), random_tensor({7, 5}, 2)}), 1e-8);
}

// bfloat16 added to a float32 stream: nothing of the stream is rounded, each gradient has its variable's dtype.
TEST(Structure, AddToAStream) {
    const Variable x(random_tensor({2, 3}, 1).to(DType::float32).to(DType::bfloat16), true);
    const Variable y(random_tensor({2, 3}, 2).to(DType::float32), true);
    Tape tape;
    Variable sum;
    {
        Recording recording(tape);
        sum = ops::add(x, y);
    }
    const auto a = x.value().to_vector<double>(), b = y.value().to_vector<double>(), c = sum.value().to_vector<double>();
    for (std::size_t i = 0; i < c.size(); ++i) EXPECT_EQ(c[i], static_cast<float>(a[i]) + static_cast<float>(b[i]));
    const Tensor seed = random_tensor({2, 3}, 3).to(DType::float32);
    tape.backward(sum, seed);
    EXPECT_EQ(y.grad().to_vector<double>(), seed.to_vector<double>());
    EXPECT_EQ(x.grad().dtype(), DType::bfloat16);
    EXPECT_EQ(x.grad().to_vector<double>(), seed.to(DType::bfloat16).to_vector<double>());
    EXPECT_THROW(ops::add(y, x), Error);
}

TEST(Structure, SplitColumnsGathersGradientsOfUsedAndUnusedSlices) {
    const auto fn = [](const std::vector<Variable>& x) {
        const auto parts = ops::split_columns(x[0], {2, 3, 4});
        // The middle slice is not used; the last one twice; x itself is used once more.
        return std::vector{ops::linear(parts[2], x[1]), ops::add(parts[2], parts[2]), ops::scale(parts[0], 3.0),
                           ops::scale(x[0], 0.5)};
    };
    EXPECT_LT(gradcheck(fn, {random_tensor({5, 9}, 1), random_tensor({3, 4}, 2)}), 1e-8);
}

TEST(Structure, CheckpointGivesTheGradientsOfTheBody) {
    const Variable weight(random_tensor({4, 4}, 3), true);
    const auto body = [&](const std::vector<Variable>& x) { return ops::linear(ops::linear(x[0], weight), x[1]); };
    EXPECT_LT(gradcheck([&](const auto& x) { return std::vector{ops::checkpoint(body, x)}; },
                        {random_tensor({3, 4}, 1), random_tensor({2, 4}, 2)}), 1e-8);

    const auto gradient_of_weight = [&](bool recompute) {
        const Variable x(random_tensor({3, 4}, 1)), y(random_tensor({2, 4}, 2));  // constants: only the body has a leaf
        weight.gradient()->clear();
        Tape tape;
        Variable out;
        {
            Recording recording(tape);
            out = recompute ? ops::checkpoint(body, {x, y}) : body({x, y});
        }
        tape.backward(out);
        return weight.grad().to_vector<double>();
    };
    EXPECT_EQ(gradient_of_weight(true), gradient_of_weight(false));
}

TEST(Tape, FreesWhatItSavedAndReportsWrongGradients) {
    const Variable x(random_tensor({2, 2}, 1), true);
    EXPECT_THROW(x.gradient()->add(random_tensor({2, 3}, 1)), Error);
    EXPECT_THROW(x.gradient()->add(Tensor::zeros({2, 2}, DType::float32)), Error);
    Tape tape;
    Variable y;
    {
        Recording recording(tape);
        y = ops::scale(x, 2.0);
    }
    EXPECT_EQ(tape.size(), 1u);
    tape.backward(y);
    EXPECT_EQ(tape.size(), 0u);
    EXPECT_EQ(x.grad().to_vector<double>(), std::vector<double>(4, 2.0));
    EXPECT_EQ(Tape::current(), nullptr);
}

}  // namespace
}  // namespace fenwick
