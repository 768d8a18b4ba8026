#include <cmath>

#include "kernels/softmax_attention.h"
#include "support/operator_check.h"

namespace fenwick {
namespace {

using test::check_operator;
using test::random_tensor;
using test::rms_ratio;
using test::with_slices;

// The definition: one score after the other.
std::vector<double> reference(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t heads, std::int64_t groups,
                              const SequenceLayout& layout) {
    const auto qs = q.to_vector<double>(), ks = k.to_vector<double>(), vs = v.to_vector<double>();
    const std::int64_t width = q.columns() / heads;
    std::vector<double> out(qs.size(), 0.0);
    const auto at = [width](std::int64_t token, std::int64_t count, std::int64_t head) {
        return static_cast<std::size_t>((token * count + head) * width);
    };
    for (std::int64_t d = 0; d < layout.count(); ++d) {
        const std::int64_t begin = layout.offsets()[static_cast<std::size_t>(d)];
        for (std::int64_t t = begin; t < layout.offsets()[static_cast<std::size_t>(d) + 1]; ++t)
            for (std::int64_t h = 0; h < heads; ++h) {
                const std::int64_t group = h / (heads / groups);
                std::vector<double> scores;
                for (std::int64_t s = begin; s <= t; ++s) {
                    double dot = 0;
                    for (std::int64_t c = 0; c < width; ++c)
                        dot += qs[at(t, heads, h) + static_cast<std::size_t>(c)] * ks[at(s, groups, group) + static_cast<std::size_t>(c)];
                    scores.push_back(dot / std::sqrt(static_cast<double>(width)));
                }
                const double top = *std::max_element(scores.begin(), scores.end());
                double total = 0;
                for (auto& score : scores) total += score = std::exp(score - top);
                for (std::int64_t s = begin; s <= t; ++s)
                    for (std::int64_t c = 0; c < width; ++c)
                        out[at(t, heads, h) + static_cast<std::size_t>(c)] +=
                            scores[static_cast<std::size_t>(s - begin)] / total *
                            vs[at(s, groups, group) + static_cast<std::size_t>(c)];
            }
    }
    return out;
}

TEST(SoftmaxAttention, FollowsTheDefinition) {
    std::uint64_t seed = 0;
    for (std::int64_t length : {1, 2, 3, 63, 64, 65, 127, 128, 129, 300})
        for (std::int64_t groups : {1, 2, 4}) {
            const std::int64_t width = 5 + static_cast<std::int64_t>(seed % 13);
            const auto layout = SequenceLayout::uniform(2, length);
            const Tensor q = random_tensor({2, length, 4 * width}, ++seed), k = random_tensor({2, length, groups * width}, ++seed);
            const Tensor v = random_tensor({2, length, groups * width}, ++seed);
            const auto expected = reference(q, k, v, 4, groups, layout);
            const auto o = ops::softmax_attention(q, k, v, 4, groups, layout).value();
            EXPECT_LT(rms_ratio(o.to_vector<double>(), expected), 1e-13) << length << " tokens, " << groups << " groups";
            const auto single = ops::softmax_attention(q.to(DType::float32), k.to(DType::float32), v.to(DType::float32), 4, groups,
                                                       layout).value();
            EXPECT_LT(rms_ratio(single.to_vector<double>(), expected), 1e-5) << length << " tokens, " << groups << " groups";
        }
}

TEST(SoftmaxAttention, KeepsPackedDocumentsApart) {
    const auto layout = SequenceLayout::packed({0, 1, 2, 131, 132, 400, 401});
    const Tensor q = random_tensor({401, 24}, 1), k = random_tensor({401, 12}, 2), v = random_tensor({401, 12}, 3);
    const auto o = ops::softmax_attention(q, k, v, 2, 1, layout).value();
    EXPECT_LT(rms_ratio(o.to_vector<double>(), reference(q, k, v, 2, 1, layout)), 1e-13);
    // A document of one token returns its value.
    EXPECT_EQ(o.narrow_rows(400, 401).narrow_columns(0, 12).to_vector<double>(), v.narrow_rows(400, 401).to_vector<double>());
}

TEST(SoftmaxAttention, Gradients) {
    const auto attend = [](std::int64_t heads, std::int64_t groups, SequenceLayout layout) {
        return [=](const std::vector<Variable>& x) {
            return std::vector{ops::softmax_attention(x[0], x[1], x[2], heads, groups, layout)};
        };
    };
    check_operator(attend(2, 2, SequenceLayout::uniform(2, 9)),
                   {random_tensor({2, 9, 6}, 1), random_tensor({2, 9, 6}, 2), random_tensor({2, 9, 6}, 3)});
    check_operator(attend(4, 2, SequenceLayout::packed({0, 1, 2, 12, 150})),
                   {random_tensor({150, 12}, 4), random_tensor({150, 6}, 5), random_tensor({150, 6}, 6)});
    check_operator(with_slices(attend(4, 1, SequenceLayout::uniform(1, 140)), {0, 1, 2}),
                   {random_tensor({140, 17}, 7), random_tensor({140, 8}, 8), random_tensor({140, 8}, 9)});
    // One variable as query, key and value.
    check_operator([](const auto& x) { return std::vector{ops::softmax_attention(x[0], x[0], x[0], 2, 2, SequenceLayout::uniform(1, 7))}; },
                   {random_tensor({7, 6}, 10)});
}

TEST(SoftmaxAttention, LargeScoresDoNotOverflow) {
    const auto layout = SequenceLayout::uniform(1, 200);
    const Tensor q = random_tensor({200, 8}, 1, DType::float32, 300.0), k = random_tensor({200, 8}, 2, DType::float32, 300.0);
    const Tensor v = random_tensor({200, 8}, 3, DType::float32);
    const Variable a(q, true), b(k, true), c(v, true);
    Tape tape;
    Variable o;
    {
        Recording recording(tape);
        o = ops::softmax_attention(a, b, c, 1, 1, layout);
    }
    EXPECT_LT(rms_ratio(o.value().to_vector<double>(), reference(q, k, v, 1, 1, layout)), 1e-3);
    tape.backward(o);
    for (const auto& x : {a, b, c})
        for (const double value : x.grad().to_vector<double>()) ASSERT_TRUE(std::isfinite(value));
}

TEST(SoftmaxAttention, AConstantAddedToAllScoresOfAQueryChangesNothing) {
    // All keys get the same large component, so every score of a query moves by the same amount.
    const auto layout = SequenceLayout::uniform(1, 150);
    const Tensor q = random_tensor({150, 8}, 1), k = random_tensor({150, 8}, 2), v = random_tensor({150, 8}, 3);
    auto shifted = k.to_vector<double>();
    for (std::size_t i = 0; i < shifted.size(); i += 8) shifted[i] += 1000.0;
    EXPECT_LT(rms_ratio(ops::softmax_attention(q, Tensor::from(shifted, k.shape()), v, 1, 1, layout).value(),
                        ops::softmax_attention(q, k, v, 1, 1, layout).value()), 1e-10);
}

TEST(SoftmaxAttention, CachedFormContinuesAnySplit) {
    const std::int64_t batch = 2, length = 290, heads = 4, groups = 2, width = 6, capacity = 301;
    const Tensor q = random_tensor({batch, length, heads * width}, 1), k = random_tensor({batch, length, groups * width}, 2);
    const Tensor v = random_tensor({batch, length, groups * width}, 3);
    const auto expected = ops::softmax_attention(q, k, v, heads, groups, SequenceLayout::uniform(batch, length)).value();
    const Tensor k_cache = Tensor::empty({batch * capacity, groups * width}, DType::float64);  // NaN where nothing was written
    const Tensor v_cache = Tensor::empty({batch * capacity, groups * width}, DType::float64);
    const auto rows = [](const Tensor& x, std::int64_t per_row, std::int64_t row, std::int64_t begin, std::int64_t end) {
        return x.view({-1, x.columns()}).narrow_rows(row * per_row + begin, row * per_row + end);
    };
    std::int64_t position = 0;
    for (const std::int64_t n : {1, 1, 3, 128, 1, 130, 26}) {
        Tensor part = Tensor::empty({batch, n, heads * width}, DType::float64);
        Tensor o = Tensor::empty({batch, n, heads * width}, DType::float64);
        for (std::int64_t b = 0; b < batch; ++b) {
            rows(part, n, b, 0, n).copy_from(rows(q, length, b, position, position + n));
            rows(k_cache, capacity, b, position, position + n).copy_from(rows(k, length, b, position, position + n));
            rows(v_cache, capacity, b, position, position + n).copy_from(rows(v, length, b, position, position + n));
        }
        kernels::softmax_attention_cached(exec_of(o), {.dtype = DType::float64, .batch = batch, .length = n, .position = position,
                                                       .capacity = capacity, .heads = heads, .groups = groups, .width = width,
                                                       .q_stride = heads * width, .q = part.data(), .k_cache = k_cache.data(),
                                                       .v_cache = v_cache.data(), .o = o.data()});
        for (std::int64_t b = 0; b < batch; ++b)
            EXPECT_LT(rms_ratio(rows(o, n, b, 0, n), rows(expected, length, b, position, position + n)), 1e-13)
                << n << " tokens at " << position;
        position += n;
    }
    EXPECT_EQ(position, length);
}

TEST(SoftmaxAttention, RefusesShapesThatDoNotFit) {
    const auto layout = SequenceLayout::uniform(1, 4);
    const Tensor q = random_tensor({4, 12}, 1), k = random_tensor({4, 6}, 2);
    EXPECT_THROW(ops::softmax_attention(q, k, k, 3, 2, layout), Error);
    EXPECT_THROW(ops::softmax_attention(q, k, q, 4, 2, layout), Error);
    EXPECT_THROW(ops::softmax_attention(q, k, k, 4, 2, SequenceLayout::uniform(1, 5)), Error);
    EXPECT_THROW(ops::softmax_attention(q.to(DType::float32), k, k, 4, 2, layout), Error);
}

}  // namespace
}  // namespace fenwick
