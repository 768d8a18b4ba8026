#include <cmath>

#include "support/operator_check.h"

namespace fenwick {
namespace {

using test::check_operator;
using test::random_tensor;
using test::with_slices;

std::vector<Variable> swiglu(const std::vector<Variable>& in) { return {ops::swiglu(in[0], in[1])}; }

TEST(Swiglu, FollowsTheDefinition) {
    for (std::int64_t width : {1, 3, 64, 1025}) {
        const Tensor gate = random_tensor({2, 3, width}, 1, DType::float64, 3.0), up = random_tensor({2, 3, width}, 2);
        const auto a = gate.to_vector<double>(), b = up.to_vector<double>();
        std::vector<double> expected(a.size());
        for (std::size_t i = 0; i < a.size(); ++i) expected[i] = a[i] / (1 + std::exp(-a[i])) * b[i];
        EXPECT_LT(test::rms_ratio(ops::swiglu(gate, up).value().to_vector<double>(), expected), 1e-15);
    }
}

TEST(Swiglu, Gradients) {
    check_operator(swiglu, {random_tensor({1, 1}, 1), random_tensor({1, 1}, 2)});
    check_operator(swiglu, {random_tensor({2, 1300}, 1), random_tensor({2, 1300}, 2)});
    check_operator(swiglu, {random_tensor({600, 40}, 1), random_tensor({600, 40}, 2)});
    check_operator(with_slices(swiglu, {0, 1}), {random_tensor({3, 22}, 1), random_tensor({3, 22}, 2)});
    check_operator([](const auto& in) { return swiglu({in[0], in[0]}); }, {random_tensor({4, 9}, 1)});
}

TEST(Swiglu, RefusesDifferentShapes) {
    EXPECT_THROW(ops::swiglu(Variable(random_tensor({2, 3}, 1)), Variable(random_tensor({2, 4}, 1))), Error);
}

}  // namespace
}  // namespace fenwick
