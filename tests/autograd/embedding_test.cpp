#include "support/operator_check.h"

namespace fenwick {
namespace {

using test::check_operator;
using test::random_tensor;

Tensor ids_below(std::int64_t vocab, Shape shape, std::uint64_t seed) {
    Random random(seed);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(count_of(shape)));
    for (auto& id : ids) id = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(vocab)));
    return Tensor::from(ids, std::move(shape));
}

TEST(Embedding, TakesRows) {
    const Tensor table = Tensor::from(std::vector<double>{1, 2, 10, 20, 100, 200}, {3, 2});
    const Tensor ids = Tensor::from(std::vector<std::int32_t>{2, 0, 0, 1}, {2, 2});
    const Variable y = ops::embedding(ids, table, DType::float32);
    EXPECT_EQ(y.shape(), (Shape{2, 2, 2}));
    EXPECT_EQ(y.dtype(), DType::float32);
    EXPECT_EQ(y.value().to_vector<double>(), (std::vector<double>{100, 200, 1, 2, 1, 2, 10, 20}));
}

TEST(Embedding, GradientsGatherByIdAndUnusedRowsAreZero) {
    const Variable table(random_tensor({3, 2}, 1), true);
    const Tensor ids = Tensor::from(std::vector<std::int32_t>{2, 0, 2}, {3});
    for (double factor : {1.0, 2.0}) {  // the second time adds to what is there
        Tape tape;
        Variable y;
        {
            Recording recording(tape);
            y = ops::embedding(ids, table, DType::float64);
        }
        tape.backward(y, Tensor::from(std::vector<double>{1, 2, 3, 4, 5, 6}, {3, 2}));
        EXPECT_EQ(table.grad().to_vector<double>(),
                  (std::vector<double>{3 * factor, 4 * factor, 0, 0, 6 * factor, 8 * factor}));
    }
}

TEST(Embedding, Gradients) {
    for (std::int64_t tokens : {1, 2, 65, 300}) {
        const Tensor ids = ids_below(11, {tokens}, 5);
        check_operator([&](const auto& in) { return std::vector{ops::embedding(ids, in[0], in[0].dtype())}; },
                       {random_tensor({11, 7}, 1)});
    }
}

TEST(Embedding, NamesTheBadId) {
    const Variable table(random_tensor({3, 2}, 1));
    for (std::int32_t bad : {3, -1}) {
        try {
            ops::embedding(Tensor::from(std::vector<std::int32_t>{0, bad}, {2}), table, DType::float64);
            FAIL() << "accepted id " << bad;
        } catch (const Error& error) {
            EXPECT_EQ(std::string(error.what()),
                      "[embedding] token id " + std::to_string(bad) + " at position 1 is outside the vocabulary of 3");
        }
    }
    EXPECT_THROW(ops::embedding(random_tensor({2}, 1), table, DType::float64), Error);
}

}  // namespace
}  // namespace fenwick
