#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "support/random_tensor.h"
#include "support/reference_ssd.h"

namespace fenwick {
namespace {

using test::random_tensor;
using test::rms_ratio;

// Decays of mild size, <= 0.
Tensor random_decay(Shape shape, std::uint64_t seed, DType dtype = DType::float64) {
    auto values = random_tensor(shape, seed).to_vector<double>();
    for (auto& value : values) value = -0.2 * std::abs(value);
    return Tensor::from(values, std::move(shape)).to(dtype);
}

TEST(SsdOperator, Gradcheck) {
    // Two rows of 11 tokens, 4 heads in 2 groups, key width 3, value width 2, 5 levels.
    const auto layout = SequenceLayout::uniform(2, 11);
    const std::vector<Tensor> inputs = {random_tensor({2, 11, 6}, 1), random_tensor({2, 11, 6}, 2),
                                        random_tensor({2, 11, 8}, 3), random_decay({2, 11, 4}, 4),
                                        random_tensor({2, 11, 20}, 5)};
    const ops::SsdOptions options{.heads = 4, .groups = 2, .chunk_size = 4};
    EXPECT_LT(gradcheck([&](const auto& x) { return std::vector{ops::ssd(x[0], x[1], x[2], x[3], x[4], options, layout)}; },
                        inputs), 1e-7);
    EXPECT_LT(gradcheck([&](const auto& x) { return std::vector{ops::ssd(x[0], x[1], x[2], x[3], {}, options, layout)}; },
                        {inputs.begin(), inputs.begin() + 4}), 1e-7);
    const auto packed = SequenceLayout::packed({0, 1, 14, 15, 22});
    EXPECT_LT(gradcheck([&](const auto& x) { return std::vector{ops::ssd(x[0], x[1], x[2], x[3], x[4], options, packed)}; },
                        inputs), 1e-7);
}

TEST(SsdOperator, SlicesOfOneProjection) {
    const auto layout = SequenceLayout::uniform(1, 19);
    // q | k | v | g | level scales in one matrix, as the input projection gives them. Both q and k are used twice.
    const auto fn = [&](const std::vector<Variable>& x) {
        const auto parts = ops::split_columns(x[0], {3, 3, 4, 2, 8});
        const ops::SsdOptions options{.heads = 2, .groups = 1, .chunk_size = 4};
        return std::vector{ops::ssd(parts[0], parts[1], parts[2], parts[3], parts[4], options, layout),
                           ops::ssd(parts[1], parts[0], parts[2], parts[3], {}, options, layout)};
    };
    EXPECT_LT(gradcheck(fn, {random_tensor({1, 19, 20}, 1, DType::float64, 0.3)}), 1e-7);
    // The same variable as q and k.
    EXPECT_LT(gradcheck([&](const auto& x) {
                  return std::vector{ops::ssd(x[0], x[0], x[1], x[2], {}, {.heads = 2, .chunk_size = 8}, layout)};
              }, {random_tensor({1, 19, 3}, 1), random_tensor({1, 19, 4}, 2), random_decay({1, 19, 2}, 3)}), 1e-7);
}

TEST(SsdOperator, OnlyWhatRequiresAGradientGetsOne) {
    const auto layout = SequenceLayout::uniform(1, 9);
    const Variable q(random_tensor({1, 9, 3}, 1)), k(random_tensor({1, 9, 3}, 2), true), v(random_tensor({1, 9, 4}, 3));
    const Variable g(random_decay({1, 9, 2}, 4)), scales(random_tensor({1, 9, 10}, 5));
    const auto gradient_of_k = [&](const std::function<Variable()>& fn) {
        k.gradient()->clear();
        Tape tape;
        Variable o;
        {
            Recording recording(tape);
            o = fn();
        }
        tape.backward(o);
        return k.grad();
    };
    const ops::SsdOptions options{.heads = 2, .chunk_size = 4};
    const Tensor alone = gradient_of_k([&] { return ops::ssd(q, k, v, g, scales, options, layout); });
    const Variable v2(v.value(), true), g2(g.value(), true), scales2(scales.value(), true);
    EXPECT_EQ(alone.to_vector<double>(),
              gradient_of_k([&] { return ops::ssd(q, k, v2, g2, scales2, options, layout); }).to_vector<double>());
    EXPECT_FALSE(q.requires_grad());
}

TEST(SsdOperator, Float32FollowsFloat64) {
    const auto layout = SequenceLayout::packed({0, 70, 71, 200});
    const ops::SsdOptions options{.heads = 2, .chunk_size = 16};
    const auto solve = [&](DType dtype) {
        std::vector<Variable> x = {Variable(random_tensor({200, 8}, 1, dtype), true), Variable(random_tensor({200, 8}, 2, dtype), true),
                                   Variable(random_tensor({200, 12}, 3, dtype), true), Variable(random_decay({200, 2}, 4, dtype), true),
                                   Variable(random_tensor({200, 18}, 5, dtype), true)};
        Tape tape;
        Variable o;
        {
            Recording recording(tape);
            o = ops::ssd(x[0], x[1], x[2], x[3], x[4], options, layout);
        }
        tape.backward(o, random_tensor({200, 12}, 6, dtype));
        std::vector<Tensor> results = {o.value().to(DType::float64)};
        for (const auto& input : x) results.push_back(input.grad().to(DType::float64));
        return results;
    };
    const auto low = solve(DType::float32), high = solve(DType::float64);
    for (std::size_t i = 0; i < low.size(); ++i) EXPECT_LT(rms_ratio(low[i], high[i]), 1e-5) << "result " << i;
}

TEST(SsdOperator, ErrorsSayWhatWasFoundAndWhatIsRight) {
    const auto layout = SequenceLayout::uniform(1, 300);
    const auto message = [&](Shape q, Shape k, Shape v, Shape g, Shape scales, ops::SsdOptions options,
                             DType g_dtype = DType::float32) -> std::string {
        try {
            const auto zeros = [](const Shape& shape, DType dtype = DType::float32) { return Tensor::zeros(shape, dtype); };
            ops::ssd(zeros(q), zeros(k), zeros(v), zeros(g, g_dtype), scales.empty() ? Variable() : Variable(zeros(scales)),
                     options, layout);
        } catch (const Error& error) {
            return error.what();
        }
        return "no error";
    };
    const Shape q = {1, 300, 8}, v = {1, 300, 12}, g = {1, 300, 4};
    const ops::SsdOptions options{.heads = 4, .groups = 2};
    EXPECT_EQ(message(q, q, v, g, {}, options), "no error");
    EXPECT_EQ(message(q, q, v, g, {1, 300, 28}, options), "no error");
    EXPECT_EQ(message(q, q, v, g, {1, 300, 28}, {.heads = 4, .groups = 2, .level_overflow = ops::LevelOverflow::error}),
              "[ssd] level_scales has 7 levels, a document of 300 tokens needs 10; raise num_levels or allow clamping");
    EXPECT_EQ(message(q, {1, 300, 6}, v, g, {}, options), "[ssd] k has shape [1, 300, 6], expected [1, 300, 8]");
    EXPECT_EQ(message(q, q, {1, 299, 12}, g, {}, options), "[ssd] v has shape [1, 299, 12], expected [1, 300, 12]");
    EXPECT_EQ(message(q, q, v, {1, 300, 3}, {}, options), "[ssd] g has shape [1, 300, 3], expected [1, 300, 4]");
    EXPECT_EQ(message(q, q, {1, 300, 10}, g, {}, options),
              "[ssd] v has shape [1, 300, 10]; its last dimension must be a multiple of 4 heads");
    EXPECT_EQ(message({1, 300, 7}, q, v, g, {}, options),
              "[ssd] q has shape [1, 300, 7]; its last dimension must be a multiple of 2 groups");
    EXPECT_EQ(message(q, q, v, g, {1, 300, 30}, options),
              "[ssd] level_scales has shape [1, 300, 30]; its last dimension must be 4 heads times the number of levels");
    EXPECT_EQ(message(q, q, v, g, {}, {.heads = 4, .groups = 3}),
              "[ssd] 4 heads cannot be shared among 3 groups; heads must be a multiple of groups");
    EXPECT_EQ(message(q, q, v, g, {}, {.heads = 4, .chunk_size = 48}), "[ssd] chunk_size is 48; it must be a power of two");
    EXPECT_EQ(message(q, q, v, g, {}, options, DType::float64), "[ssd] g is float64, expected float32");
    const Shape longer = {1, 301, 8};
    EXPECT_THAT(message(longer, longer, {1, 301, 12}, {1, 301, 4}, {}, options), testing::HasSubstr("300 tokens"));
}

}  // namespace
}  // namespace fenwick
