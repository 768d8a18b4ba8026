#include <cmath>

#include "support/operator_check.h"

namespace fenwick {
namespace {

using test::check_operator;
using test::random_tensor;
using test::rms_ratio;
using test::with_slices;

double silu(double x) { return x / (1 + std::exp(-x)); }

enum class Form { plain, gate_after, gate_before };

// The definition, element by element.
std::vector<double> reference(Form form, const Tensor& x, const Tensor& z, const Tensor& weight, double eps, std::int64_t groups) {
    const auto xs = x.to_vector<double>(), ws = weight.to_vector<double>();
    const auto zs = z.defined() ? z.to_vector<double>() : std::vector<double>(xs.size(), 0.0);
    const auto width = static_cast<std::size_t>(x.columns()), slice = width / static_cast<std::size_t>(groups);
    std::vector<double> y(xs.size());
    for (std::size_t first = 0; first < xs.size(); first += slice) {
        double squares = 0;
        for (std::size_t i = first; i < first + slice; ++i) {
            const double u = form == Form::gate_before ? xs[i] * silu(zs[i]) : xs[i];
            squares += u * u;
        }
        for (std::size_t i = first; i < first + slice; ++i) {
            const double u = form == Form::gate_before ? xs[i] * silu(zs[i]) : xs[i];
            y[i] = u / std::sqrt(squares / static_cast<double>(slice) + eps) * ws[i % width];
            if (form == Form::gate_after) y[i] *= silu(zs[i]);
        }
    }
    return y;
}

Variable apply(Form form, const Variable& x, const Variable& z, const Variable& weight, double eps, std::int64_t groups) {
    switch (form) {
        case Form::plain: return ops::rms_norm(x, weight, eps, groups);
        case Form::gate_after: return ops::rms_norm_gated(x, z, weight, eps, groups);
        default: return ops::gated_rms_norm(x, z, weight, eps, groups);
    }
}

class RmsNormForms : public testing::TestWithParam<Form> {};
INSTANTIATE_TEST_SUITE_P(All, RmsNormForms, testing::Values(Form::plain, Form::gate_after, Form::gate_before));

TEST_P(RmsNormForms, FollowsTheDefinition) {
    std::uint64_t seed = 1;
    for (std::int64_t rows : {1, 3, 65})
        for (std::int64_t width : {1, 2, 17, 64, 130})
            for (std::int64_t groups : {1, 2}) {
                if (width % groups != 0) continue;
                const Tensor x = random_tensor({rows, width}, ++seed), z = random_tensor({rows, width}, ++seed);
                const Tensor weight = random_tensor({width}, ++seed);
                const auto y = apply(GetParam(), x, z, weight, 1e-3, groups).value();
                EXPECT_LT(rms_ratio(y.to_vector<double>(), reference(GetParam(), x, z, weight, 1e-3, groups)), 1e-14)
                    << rows << " rows of " << width << ", " << groups << " groups";
            }
}

TEST_P(RmsNormForms, Gradients) {
    const auto fn = [form = GetParam()](std::int64_t groups) {
        return [=](const std::vector<Variable>& in) { return std::vector{apply(form, in[0], in[1], in[2], 1e-5, groups)}; };
    };
    check_operator(fn(1), {random_tensor({1, 7}, 1), random_tensor({1, 7}, 2), random_tensor({7}, 3)});
    check_operator(fn(3), {random_tensor({2, 5, 48}, 1), random_tensor({2, 5, 48}, 2), random_tensor({48}, 3)});
    check_operator(fn(2), {random_tensor({300, 34}, 1), random_tensor({300, 34}, 2), random_tensor({34}, 3)});
    check_operator(with_slices(fn(2), {0, 1}), {random_tensor({3, 23}, 1), random_tensor({3, 23}, 2), random_tensor({18}, 3)});
    check_operator([&](const auto& in) { return fn(1)({in[0], in[0], in[1]}); }, {random_tensor({3, 8}, 1), random_tensor({8}, 2)});
}

TEST(RmsNorm, ResidualFormIsAddThenNorm) {
    const Tensor x = random_tensor({4, 33}, 1), residual = random_tensor({4, 33}, 2), weight = random_tensor({33}, 3);
    const auto [y, sum] = ops::add_rms_norm(x, residual, weight, 1e-5);
    const Variable expected = ops::add(x, residual);
    EXPECT_EQ(sum.value().to_vector<double>(), expected.value().to_vector<double>());
    EXPECT_LT(rms_ratio(y.value(), ops::rms_norm(expected, weight, 1e-5).value()), 1e-15);
}

TEST(RmsNorm, ResidualFormGradients) {
    const auto both = [](const std::vector<Variable>& in) {
        auto [y, sum] = ops::add_rms_norm(in[0], in[1], in[2], 1e-5);
        return std::vector{y, sum};
    };
    const auto only = [](bool norm) {
        return [=](const std::vector<Variable>& in) {
            auto [y, sum] = ops::add_rms_norm(in[0], in[1], in[2], 1e-5);
            return std::vector{norm ? y : sum};
        };
    };
    const std::vector<Tensor> inputs{random_tensor({3, 20}, 1), random_tensor({3, 20}, 2), random_tensor({20}, 3)};
    check_operator(both, inputs);
    check_operator(only(true), inputs);
    check_operator(only(false), inputs);
    check_operator(with_slices(both, {0, 1}), {random_tensor({3, 25}, 1), random_tensor({3, 25}, 2), random_tensor({20}, 3)});
    // One variable as both inputs: its gradient gathers twice, in buffers that must not be the same.
    check_operator([&](const auto& in) { return both({in[0], in[0], in[1]}); }, {inputs[0], inputs[2]});
}

TEST(RmsNorm, StreamForm) {
    const Tensor stream = random_tensor({2, 3, 20}, 1), weight = random_tensor({20}, 2);
    const auto fn = [](const std::vector<Variable>& in) {
        return std::vector{ops::stream_rms_norm(in[0], in[1], 1e-5, in[0].dtype())};
    };
    EXPECT_EQ(fn({stream, weight})[0].value().to_vector<double>(), ops::rms_norm(stream, weight, 1e-5).value().to_vector<double>());
    check_operator(fn, {stream, weight});
    check_operator(with_slices(fn, {0}), {random_tensor({3, 25}, 1), weight});
    // Its gradient arrives where the next addition's already is.
    check_operator([](const std::vector<Variable>& in) {
        auto [y, sum] = ops::add_rms_norm(in[1], in[0], in[2], 1e-5);
        return std::vector{ops::stream_rms_norm(in[0], in[2], 1e-5, in[0].dtype()), y, sum};
    }, {random_tensor({4, 20}, 3), random_tensor({4, 20}, 4), weight});
    const Variable narrow(stream.to(DType::float32)), wide(stream);
    EXPECT_THROW(ops::stream_rms_norm(narrow, weight, 1e-5, DType::float64), Error);
    EXPECT_THROW(ops::add_rms_norm(wide, narrow, weight, 1e-5), Error);
}

TEST(RmsNorm, ConstantWeightAndConstantInput) {
    const Tensor x = random_tensor({3, 8}, 1), z = random_tensor({3, 8}, 2), weight = random_tensor({8}, 3);
    const auto constant = [](const Tensor& value, const Variable& like) { return Variable(value.to(like.dtype())); };
    check_operator([&](const auto& in) {
        return std::vector{ops::rms_norm_gated(in[0], constant(z, in[0]), constant(weight, in[0]), 1e-5)};
    }, {x});
    check_operator([&](const auto& in) {
        return std::vector{ops::gated_rms_norm(constant(x, in[0]), in[0], constant(weight, in[0]), 1e-5)};
    }, {z});
    check_operator([&](const auto& in) { return std::vector{ops::rms_norm(constant(x, in[0]), in[0], 1e-5)}; }, {weight});
}

TEST(RmsNorm, RefusesWrongShapes) {
    const Variable x(random_tensor({3, 8}, 1)), weight(random_tensor({8}, 2)), narrow(random_tensor({7}, 3));
    EXPECT_THROW(ops::rms_norm(x, narrow, 1e-5), Error);
    EXPECT_THROW(ops::rms_norm(x, weight, 1e-5, 3), Error);
    EXPECT_THROW(ops::gated_rms_norm(x, Variable(random_tensor({3, 7}, 1)), weight, 1e-5), Error);
    EXPECT_THROW(ops::rms_norm(x, Variable(random_tensor({8}, 2, DType::float32)), 1e-5), Error);
    EXPECT_THROW(ops::l2norm(x, 3), Error);
}

TEST(L2Norm, FollowsTheDefinition) {
    for (std::int64_t heads : {1, 3}) {
        const std::int64_t width = 19;
        const Tensor x = random_tensor({2, 5, heads * width}, 1);
        auto expected = x.to_vector<double>();
        for (std::size_t first = 0; first < expected.size(); first += 19) {
            double squares = 0;
            for (std::size_t i = first; i < first + 19; ++i) squares += expected[i] * expected[i];
            for (std::size_t i = first; i < first + 19; ++i) expected[i] /= std::sqrt(squares + 1e-6);
        }
        EXPECT_LT(rms_ratio(ops::l2norm(x, heads).value().to_vector<double>(), expected), 1e-14);
    }
}

TEST(L2Norm, Gradients) {
    const auto fn = [](std::int64_t heads) {
        return [=](const std::vector<Variable>& in) { return std::vector{ops::l2norm(in[0], heads)}; };
    };
    check_operator(fn(1), {random_tensor({1, 3}, 1)});
    check_operator(fn(4), {random_tensor({70, 64}, 1)});
    check_operator(with_slices(fn(2), {0}), {random_tensor({3, 39}, 1)});
}

}  // namespace
}  // namespace fenwick
