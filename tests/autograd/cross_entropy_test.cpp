#include <cmath>

#include "base/memory_cuda.h"
#include "support/operator_check.h"

namespace fenwick {
namespace {

using test::check_operator;
using test::random_tensor;
using test::rms_ratio;

constexpr std::int32_t ignored = -100;

Tensor targets_below(std::int64_t vocab, std::int64_t count, std::uint64_t seed, bool some_ignored = true) {
    Random random(seed);
    std::vector<std::int32_t> targets;
    for (std::int64_t i = 0; i < count; ++i)
        targets.push_back(some_ignored && i % 4 == 1 ? ignored : static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(vocab))));
    return Tensor::from(targets, {count});
}

// -log softmax(logits)[target] of each row
std::vector<double> reference(const Tensor& logits, const Tensor& targets) {
    const auto values = logits.to_vector<double>();
    const auto ids = targets.to_vector<std::int32_t>();
    const auto vocab = static_cast<std::size_t>(logits.columns());
    std::vector<double> losses;
    for (std::size_t row = 0; row < ids.size(); ++row) {
        long double sum = 0;
        for (std::size_t c = 0; c < vocab; ++c) sum += std::exp(static_cast<long double>(values[row * vocab + c]));
        losses.push_back(ids[row] == ignored ? 0.0 : static_cast<double>(std::log(sum)) - values[row * vocab + static_cast<std::size_t>(ids[row])]);
    }
    return losses;
}

double mean_of_valid(const std::vector<double>& losses, const Tensor& targets) {
    double sum = 0, valid = 0;
    for (double loss : losses) sum += loss;
    for (auto target : targets.to_vector<std::int32_t>()) valid += target != ignored;
    return valid > 0 ? sum / valid : 0;
}

TEST(CrossEntropy, FollowsTheDefinition) {
    for (std::int64_t rows : {1, 2, 7})
        for (std::int64_t vocab : {1, 2, 33, 1024, 2500}) {
            const Tensor logits = random_tensor({rows, vocab}, 1, DType::float64, 6.0), targets = targets_below(vocab, rows, 2);
            const double expected = mean_of_valid(reference(logits, targets), targets);
            EXPECT_NEAR(ops::cross_entropy(logits, targets).value().item(), expected, 1e-13 * (1 + expected));
            EXPECT_NEAR(ops::cross_entropy(logits.to(DType::float32), targets).value().item(), expected, 1e-5 * (1 + expected));
        }
}

TEST(CrossEntropy, LargeLogitsDoNotOverflow) {
    const Tensor logits = Tensor::from(std::vector<float>{1e4f, 1e4f, -1e4f}, {1, 3});
    EXPECT_NEAR(ops::cross_entropy(logits, Tensor::from(std::vector<std::int32_t>{0}, {1})).value().item(), std::log(2.0), 1e-6);
    EXPECT_NEAR(ops::cross_entropy(logits, Tensor::from(std::vector<std::int32_t>{2}, {1})).value().item(), 2e4 + std::log(2.0), 1e-2);
}

TEST(CrossEntropy, Gradients) {
    for (std::int64_t vocab : {2, 33, 1100}) {
        const Tensor targets = targets_below(vocab, 6, 3);
        check_operator([&](const auto& in) { return std::vector{ops::cross_entropy(in[0], targets)}; },
                       {random_tensor({2, 3, vocab}, 1)}, 1e-6);
    }
}

TEST(CrossEntropy, AllIgnored) {
    const Variable logits(random_tensor({2, 3}, 1), true);
    const Tensor targets = Tensor::from(std::vector<std::int32_t>{ignored, ignored}, {2});
    Tape tape;
    Variable loss;
    {
        Recording recording(tape);
        loss = ops::cross_entropy(logits, targets);
    }
    tape.backward(loss);
    EXPECT_EQ(loss.value().item(), 0.0);
    EXPECT_EQ(logits.grad().to_vector<double>(), std::vector<double>(6, 0.0));
}

TEST(LinearCrossEntropy, IsTheLossOfTheProduct) {
    for (std::int64_t rows : {1, 5, 513, 1100})  // blocks are 512 rows
        for (double normalizer : {1.0, 7.5}) {
            const Tensor x = random_tensor({rows, 6}, 1), weight = random_tensor({11, 6}, 2), targets = targets_below(11, rows, 3);
            const auto result = ops::linear_cross_entropy(x, weight, targets, normalizer);
            const auto losses = reference(ops::linear(x, weight).value(), targets);
            double sum = 0;
            for (double loss : losses) sum += loss;
            EXPECT_LT(rms_ratio(result.token_nll.to_vector<double>(), losses), 1e-14);
            EXPECT_NEAR(result.loss.value().item(), sum / normalizer, 1e-12 * sum);
            EXPECT_EQ(result.token_nll.shape(), (Shape{rows}));
        }
}

TEST(LinearCrossEntropy, Gradients) {
    const auto fn = [](const Tensor& targets) {
        return [=](const std::vector<Variable>& in) { return std::vector{ops::linear_cross_entropy(in[0], in[1], targets, 3.0).loss}; };
    };
    check_operator(fn(targets_below(11, 6, 3)), {random_tensor({2, 3, 5}, 1), random_tensor({11, 5}, 2)});
    check_operator(fn(targets_below(7, 600, 3)), {random_tensor({600, 4}, 1), random_tensor({7, 4}, 2)});
    check_operator(test::with_slices(fn(targets_below(11, 6, 3)), {0}), {random_tensor({6, 10}, 1), random_tensor({11, 5}, 2)});
    // Only one of the inputs has a gradient.
    const Tensor x = random_tensor({6, 5}, 1), weight = random_tensor({11, 5}, 2), targets = targets_below(11, 6, 3);
    check_operator([&](const auto& in) {
        return std::vector{ops::linear_cross_entropy(in[0], Variable(weight.to(in[0].dtype())), targets, 3.0).loss};
    }, {x});
    check_operator([&](const auto& in) {
        return std::vector{ops::linear_cross_entropy(Variable(x.to(in[0].dtype())), in[0], targets, 3.0).loss};
    }, {weight});
}

// The same numbers as the composition, gradients included, with nothing ignored and a block border inside.
TEST(LinearCrossEntropy, AgreesWithTheComposition) {
    const std::vector<Tensor> inputs{random_tensor({700, 8}, 1), random_tensor({40, 8}, 2)};
    const Tensor targets = targets_below(40, 700, 3, false);
    const auto fused = test::outputs_and_gradients(
        [&](const auto& in) { return std::vector{ops::linear_cross_entropy(in[0], in[1], targets, 700).loss}; }, inputs, DType::float64);
    const auto composed = test::outputs_and_gradients(
        [&](const auto& in) { return std::vector{ops::cross_entropy(ops::linear(in[0], in[1]), targets)}; }, inputs, DType::float64);
    for (std::size_t i = 0; i < fused.size(); ++i) EXPECT_LT(rms_ratio(fused[i], composed[i]), 1e-12) << i;
}

TEST(CrossEntropy, NamesTheBadTargetOnAGpu) {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    const Device gpu{DeviceType::cuda, 0};
    const Variable logits(random_tensor({2, 3}, 1).to(DType::float32).to(gpu));
    const Tensor targets = Tensor::from(std::vector<std::int32_t>{0, 3}, {2}).to(gpu);
    try {
        ops::cross_entropy(logits, targets);
        FAIL() << "accepted";
    } catch (const Error& error) {
        EXPECT_STREQ(error.what(),
                     "[cross_entropy] target 3 at position 1 is neither below the vocabulary of 3 nor -100 (ignored)");
    }
}

TEST(CrossEntropy, NamesTheBadTarget) {
    const Variable logits(random_tensor({2, 3}, 1)), x(random_tensor({2, 4}, 1)), weight(random_tensor({3, 4}, 1));
    for (std::int32_t bad : {3, -1}) {
        const Tensor targets = Tensor::from(std::vector<std::int32_t>{0, bad}, {2});
        const std::string expected = "target " + std::to_string(bad) + " at position 1 is neither below the vocabulary of 3 nor -100 (ignored)";
        for (bool fused : {false, true}) try {
                fused ? ops::linear_cross_entropy(x, weight, targets, 1).loss : ops::cross_entropy(logits, targets);
                FAIL() << "accepted target " << bad;
            } catch (const Error& error) {
                EXPECT_EQ(std::string(error.what()), (fused ? "[linear_cross_entropy] " : "[cross_entropy] ") + expected);
            }
    }
    const Tensor one = Tensor::from(std::vector<std::int32_t>{0}, {1});
    EXPECT_THROW(ops::cross_entropy(logits, one), Error);
    EXPECT_THROW(ops::linear_cross_entropy(x, weight, one, 1), Error);
    const Tensor two = Tensor::from(std::vector<std::int32_t>{0, 1}, {2});
    EXPECT_THROW(ops::linear_cross_entropy(x, weight, two, 0), Error);
    EXPECT_THROW(ops::linear_cross_entropy(x, logits, two, 1), Error);
}

}  // namespace
}  // namespace fenwick
