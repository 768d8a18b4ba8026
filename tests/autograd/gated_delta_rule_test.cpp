#include <cmath>

#include "support/golden.h"
#include "support/operator_check.h"
#include "support/reference_gated_delta_rule.h"

namespace fenwick {
namespace {

using test::check_operator;
using test::outputs_and_gradients;
using test::random_tensor;
using test::ReferenceGatedDeltaRule;
using test::rms_ratio;
using test::with_slices;

// q, k, v, g, beta and, with levels, level_scales: [batch, length, heads * width]
std::vector<Tensor> inputs_of(const ReferenceGatedDeltaRule& x, std::int64_t batch) {
    const std::int64_t length = x.tokens() / batch, H = x.heads;
    std::vector<Tensor> inputs = {Tensor::from(x.q, {batch, length, H * x.key_width}),
                                  Tensor::from(x.k, {batch, length, H * x.key_width}),
                                  Tensor::from(x.v, {batch, length, H * x.value_width}),
                                  Tensor::from(x.g, {batch, length, H}), Tensor::from(x.beta, {batch, length, H})};
    if (x.levels > 0) inputs.push_back(Tensor::from(x.level_scales, {batch, length, H * x.levels}));
    return inputs;
}

test::Function apply(const ReferenceGatedDeltaRule& x, std::int64_t chunk_size) {
    const ops::GatedDeltaRuleOptions options{.heads = x.heads, .chunk_size = chunk_size};
    const auto layout = SequenceLayout::packed(x.offsets);
    return [=](const std::vector<Variable>& in) {
        const Variable level_scales = in.size() > 5 ? in[5] : Variable();
        return std::vector{ops::gated_delta_rule(in[0], in[1], in[2], in[3], in[4], level_scales, options, layout)};
    };
}

TEST(GatedDeltaRuleOp, GradientsAndDtypesAndThreads) {
    for (std::int64_t levels : {0, 3, 6}) {
        const auto x = ReferenceGatedDeltaRule::random({0, 1, 20, 38}, 2, 4, 3, levels, 1);
        check_operator(apply(x, 4), inputs_of(x, 2));
        check_operator(apply(x, 64), inputs_of(x, 1));
    }
}

TEST(GatedDeltaRuleOp, FollowsTheDefinition) {
    for (std::int64_t levels : {0, 8}) {
        auto x = ReferenceGatedDeltaRule::random({0, 65, 130}, 3, 8, 12, levels, 2);
        const auto inputs = inputs_of(x, 2);
        const auto results = outputs_and_gradients(apply(x, 16), inputs, DType::float64);
        x.backward(random_tensor(inputs[2].shape(), 1000).to_vector<double>());
        const std::vector<std::vector<double>> expected = {x.o, x.dq, x.dk, x.dv, x.dg, x.dbeta, x.dlevel_scales};
        for (std::size_t i = 0; i < results.size(); ++i)
            EXPECT_LT(rms_ratio(results[i].to_vector<double>(), expected[i]), 1e-11) << i;
        EXPECT_EQ(results[0].shape(), inputs[2].shape());
    }
}

// In float32, the decays' gradients are as near as all others where strong decays leave them small, while what a token gives to
// itself, which has no decay, is large.
TEST(GatedDeltaRuleOp, DecayGradientsInFloat32) {
    for (std::int64_t levels : {0, 8}) {
        auto x = ReferenceGatedDeltaRule::random({0, 1, 200}, 2, 16, 24, levels, 4);
        for (auto& g : x.g) g -= 8;
        std::vector<Tensor> inputs;
        for (const auto& input : inputs_of(x, 1)) inputs.push_back(input.to(DType::float32).to(DType::float64));
        const auto exact = outputs_and_gradients(apply(x, 64), inputs, DType::float64);
        const auto single = outputs_and_gradients(apply(x, 64), inputs, DType::float32);
        for (std::size_t i = 0; i < exact.size(); ++i) EXPECT_LT(rms_ratio(single[i], exact[i]), 1e-6) << i;
    }
}

TEST(GatedDeltaRuleOp, SlicesOfWiderProjections) {
    auto x = ReferenceGatedDeltaRule::random({0, 30}, 2, 4, 3, 6, 3);
    auto inputs = inputs_of(x, 1);
    const auto widened = [](const Tensor& t, std::uint64_t seed) {
        Tensor wide = random_tensor({t.size(0), t.size(1), t.size(2) + 5}, seed);
        wide.narrow_columns(2, t.size(2)).copy_from(t);
        return wide;
    };
    const auto plain = apply(x, 8)({inputs.begin(), inputs.end()})[0].value();
    for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = widened(inputs[i], i);
    const auto sliced = with_slices(apply(x, 8), {0, 1, 2, 3, 4, 5});
    EXPECT_EQ(sliced({inputs.begin(), inputs.end()})[0].value().to_vector<double>(), plain.to_vector<double>());
    EXPECT_LT(gradcheck(sliced, inputs, {.max_elements = 60}), 1e-7);
}

TEST(GatedDeltaRuleOp, OneVariableForSeveralInputsAndConstants) {
    const auto x = ReferenceGatedDeltaRule::random({0, 21}, 2, 4, 4, 5, 4);
    const auto inputs = inputs_of(x, 1);
    const ops::GatedDeltaRuleOptions options{.heads = 2, .chunk_size = 8};
    const auto layout = SequenceLayout::uniform(1, 21);
    const auto shared = [&](const std::vector<Variable>& in) {
        return std::vector{ops::gated_delta_rule(in[0], in[0], in[0], inputs[3], inputs[4], in[1], options, layout)};
    };
    EXPECT_LT(gradcheck(shared, {inputs[1], inputs[5]}), 1e-7);
    EXPECT_FALSE(apply(x, 8)({inputs.begin(), inputs.end()})[0].requires_grad());
}

TEST(GatedDeltaRuleOp, GoldenCases) {
    auto cases = test::golden_cases("gated_delta_rule");
    for (auto& path : test::golden_cases("log_linear_gated_delta_rule")) cases.push_back(std::move(path));
    if (cases.empty()) GTEST_SKIP() << "no golden cases beside the source tree";
    for (const auto& path : cases) {
        const test::GoldenCase golden(path);
        std::vector<std::string> names = {"q", "k", "v", "g", "beta"};
        if (golden.has("in/lam")) names.emplace_back("lam");
        const ops::GatedDeltaRuleOptions options{.heads = golden.tensor("in/q").size(2), .chunk_size = 32};
        for (auto [dtype, tolerance] : {std::pair{DType::float64, 1e-12}, {DType::float32, 2e-5}}) {
            std::vector<Variable> x;
            for (const auto& name : names) x.emplace_back(golden.merged("in/" + name).to(dtype), true);
            const auto layout = golden.has("in/cu_seqlens") ? SequenceLayout::packed(golden.integers("in/cu_seqlens"))
                                                            : SequenceLayout::uniform(x[0].size(0), x[0].size(1));
            Tape tape;
            Variable o;
            {
                Recording recording(tape);
                o = ops::gated_delta_rule(x[0], x[1], x[2], x[3], x[4], x.size() > 5 ? x[5] : Variable(), options, layout);
            }
            tape.backward(o, golden.merged("grad_out/o").to(dtype));
            EXPECT_LT(rms_ratio(o.value(), golden.merged("out/o")), tolerance) << golden.name;
            for (std::size_t i = 0; i < names.size(); ++i)
                EXPECT_LT(rms_ratio(x[i].grad(), golden.merged("grad_in/" + names[i])), tolerance)
                    << golden.name << ", d" << names[i] << ' ' << name_of(dtype);
        }
    }
}

std::string error_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

TEST(GatedDeltaRuleOp, ErrorsSayWhatIsWrong) {
    const auto zeros = [](std::int64_t columns, DType dtype = DType::float32) {
        return Variable(Tensor::zeros({1, 300, columns}, dtype));
    };
    const auto layout = SequenceLayout::uniform(1, 300);
    const Variable q = zeros(8), k = zeros(8), v = zeros(6), g = zeros(2), beta = zeros(2), scales = zeros(14);
    ops::GatedDeltaRuleOptions options{.heads = 2, .chunk_size = 64};
    const auto call = [&](const Variable& queries, const Variable& keys, const Variable& values, const Variable& decays,
                          const Variable& betas, const Variable& level_scales, const SequenceLayout& documents) {
        return error_of([&] {
            ops::gated_delta_rule(queries, keys, values, decays, betas, level_scales, options, documents);
        });
    };
    EXPECT_EQ(call(q, k, v, g, beta, scales, layout), "no error");
    EXPECT_EQ(call(q, zeros(6), v, g, beta, scales, layout),
              "[gated_delta_rule] k has shape [1, 300, 6], expected [1, 300, 8]");
    EXPECT_EQ(call(q, k, zeros(7), g, beta, scales, layout),
              "[gated_delta_rule] v has shape [1, 300, 7], its last dimension must be a multiple of 2 heads");
    EXPECT_EQ(call(q, k, v, zeros(3), beta, scales, layout),
              "[gated_delta_rule] g has shape [1, 300, 3], expected [1, 300, 2]");
    EXPECT_EQ(call(q, k, v, g, {}, scales, layout), "[gated_delta_rule] beta is missing");
    EXPECT_EQ(call(q, k, v, g, beta, zeros(3), layout),
              "[gated_delta_rule] level_scales has shape [1, 300, 3], its last dimension must be a multiple of 2 heads");
    EXPECT_EQ(call(q, k, v, g, zeros(2, DType::float64), scales, layout),
              "[gated_delta_rule] beta is float64, expected float32");
    EXPECT_NE(call(q, k, v, g, beta, scales, SequenceLayout::uniform(1, 299)), "no error");
    options.level_overflow = ops::LevelOverflow::error;
    EXPECT_EQ(call(q, k, v, g, beta, scales, layout),
              "[gated_delta_rule] level_scales has 7 levels, a document of 300 tokens needs 10; raise num_levels or "
              "allow clamping");
    EXPECT_EQ(call(q, k, v, g, beta, zeros(20), layout), "no error");
    EXPECT_EQ(call(q, k, v, g, beta, scales, SequenceLayout::packed({0, 64, 128, 192, 256, 300})), "no error");
    options.chunk_size = 48;
    EXPECT_EQ(call(q, k, v, g, beta, scales, layout), "[gated_delta_rule] chunk_size is 48, expected a power of two");
}

}  // namespace
}  // namespace fenwick
