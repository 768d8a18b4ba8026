// Sequence operators whose tensors (activations, states) have more than 2^31 elements: the same document many times over.
// Every copy must give the bits of the first, and the first what it gives alone. And documents that are long. Skipped where
// there is no GPU or where its memory does not suffice.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <cstring>
#include <functional>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "base/memory_cuda.h"
#include "support/random_tensor.h"

namespace fenwick::test {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::int64_t two_to_31 = std::int64_t{1} << 31;

// One document's [length, columns] `copies` times.
Tensor repeated(const Tensor& document, std::int64_t copies) {
    const std::int64_t length = document.rows(), rows = length * copies;
    Tensor result = Tensor::empty({rows, document.columns()}, document.dtype(), gpu);
    result.narrow_rows(0, length).copy_from(document.to(gpu));
    for (std::int64_t done = length; done < rows; done += std::min(done, rows - done))
        result.narrow_rows(done, done + std::min(done, rows - done))
            .copy_from(result.narrow_rows(0, std::min(done, rows - done)));
    return result;
}

using Operator = std::function<Variable(const std::vector<Variable>&, const SequenceLayout&)>;

// The output and the gradients of all inputs: the first and the last copy's rows.
struct Ends {
    std::vector<Tensor> first, last;
};
// Of `copies` documents, or of one that long.
Ends run(const Operator& op, const std::vector<Tensor>& document, const Tensor& seed, std::int64_t copies,
         bool in_one_document = false) {
    const std::int64_t length = seed.rows();
    std::vector<Variable> inputs;
    for (const auto& input : document) inputs.emplace_back(repeated(input, copies), true);
    Ends ends;
    const auto keep = [&](const Tensor& tensor) {
        const Tensor rows = tensor.view({length * copies, -1});
        ends.first.push_back(rows.narrow_rows(0, length).to(cpu_device));
        ends.last.push_back(rows.narrow_rows(length * (copies - 1), length * copies).to(cpu_device));
    };
    Tape tape;
    Variable output;
    {
        Recording recording(tape);
        output = op(inputs,
                    in_one_document ? SequenceLayout::uniform(1, length * copies) : SequenceLayout::uniform(copies, length));
    }
    keep(output.value());
    tape.backward(output, repeated(seed, copies));
    for (const auto& input : inputs) keep(input.grad());
    return ends;
}

class CudaLargeSequences : public testing::Test {
protected:
    void SetUp() override {
        if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU here";
    }
    static void check(const Operator& op, const std::vector<Tensor>& document, const Tensor& seed, std::int64_t copies) {
        Ends large;
        try {
            large = run(op, document, seed, copies);
        } catch (const Error& error) {
            if (std::strstr(error.what(), "out of memory") != nullptr) GTEST_SKIP() << error.what();
            throw;
        }
        const Ends alone = run(op, document, seed, 1);
        for (std::size_t i = 0; i < large.first.size(); ++i) {
            SCOPED_TRACE(i == 0 ? "output" : "gradient of input " + std::to_string(i - 1));
            EXPECT_EQ(large.first[i].to_vector<float>(), large.last[i].to_vector<float>());
            // Sums over heads are cut by the size of the whole problem: equal but for rounding.
            EXPECT_LT(rms_ratio(large.first[i], alone.first[i]), 5e-3);
        }
    }
    static Tensor gates(std::int64_t length, std::int64_t columns, std::uint64_t seed, double mean, double deviation) {
        return random_tensor({length, columns}, seed, DType::float32, deviation, mean);
    }
    static constexpr DType bf16 = DType::bfloat16;
};

TEST_F(CudaLargeSequences, Ssd) {
    constexpr std::int64_t H = 48, K = 128, V = 64, length = 257, levels = 10, copies = 2850;
    static_assert(length * copies * H * V > two_to_31 && 2 * copies * H * K * V > two_to_31);  // v; chunk states
    const std::vector<Tensor> document{random_tensor({length, K}, 1, bf16, 0.1), random_tensor({length, K}, 2, bf16),
                                       random_tensor({length, H * V}, 3, bf16), gates(length, H, 4, -0.05, 0.0),
                                       gates(length, H * levels, 5, 1.0, 0.2)};
    check(
        [](const std::vector<Variable>& in, const SequenceLayout& layout) {
            return ops::ssd(in[0], in[1], in[2], in[3], in[4], {.heads = H, .groups = 1}, layout);
        },
        document, random_tensor({length, H * V}, 6, bf16), copies);
}

TEST_F(CudaLargeSequences, GatedDeltaRule) {
    constexpr std::int64_t H = 6, K = 192, V = 384, length = 515, copies = 1820;
    static_assert(length * copies * H * V > two_to_31);
    for (const std::int64_t levels : {0, 11}) {
        SCOPED_TRACE(levels);
        std::vector<Tensor> document{random_tensor({length, H * K}, 1, bf16, 0.07),
                                     random_tensor({length, H * K}, 2, bf16, 0.07), random_tensor({length, H * V}, 3, bf16),
                                     gates(length, H, 4, -0.05, 0.0), gates(length, H, 5, 0.5, 0.0)};
        if (levels > 0) document.push_back(gates(length, H * levels, 6, 1.0, 0.2));
        check(
            [levels](const std::vector<Variable>& in, const SequenceLayout& layout) {
                return ops::gated_delta_rule(in[0], in[1], in[2], in[3], in[4], levels > 0 ? in[5] : Variable(),
                                             {.heads = H}, layout);
            },
            document, random_tensor({length, H * V}, 7, bf16), copies);
    }
}

// A document whose states take several rounds: every head must give the bits it gives alone, where all states fit at once.
TEST_F(CudaLargeSequences, GatedDeltaRuleOfOneDocument) {
    constexpr std::int64_t H = 6, K = 192, V = 384, length = 500, copies = 563;
    for (const std::int64_t levels : {0, 12, 20}) {
        SCOPED_TRACE(levels);
        const auto op = [levels](std::int64_t heads) {
            return [levels, heads](const std::vector<Variable>& in, const SequenceLayout& layout) {
                return ops::gated_delta_rule(in[0], in[1], in[2], in[3], in[4], levels > 0 ? in[5] : Variable(),
                                             {.heads = heads}, layout);
            };
        };
        // Columns of a head in each input, in the output and its gradient
        std::vector<std::int64_t> widths{K, K, V, 1, 1};
        std::vector<Tensor> document{random_tensor({length, H * K}, 1, bf16, 0.07),
                                     random_tensor({length, H * K}, 2, bf16, 0.07), random_tensor({length, H * V}, 3, bf16),
                                     gates(length, H, 4, -0.05, 0.02), gates(length, H, 5, 0.5, 0.1)};
        if (levels > 0) {
            widths.push_back(levels);
            document.push_back(gates(length, H * levels, 6, 1.0, 0.2));
        }
        const Tensor seed = random_tensor({length, H * V}, 7, bf16);
        const auto head_of = [](const Tensor& all, std::int64_t head, std::int64_t width) {
            const auto values = all.to_vector<float>();
            std::vector<float> part;
            for (std::int64_t row = 0; row < length; ++row) {
                const auto begin = values.begin() + row * H * width + head * width;
                part.insert(part.end(), begin, begin + width);
            }
            return Tensor::from(part, {length, width}, cpu_device).to(all.dtype());
        };
        const Ends all = run(op(H), document, seed, copies, true);
        for (const std::int64_t head : {0, 5}) {
            std::vector<Tensor> inputs;
            for (std::size_t i = 0; i < document.size(); ++i) inputs.push_back(head_of(document[i], head, widths[i]));
            const Ends alone = run(op(1), inputs, head_of(seed, head, V), copies, true);
            for (std::size_t i = 0; i < alone.first.size(); ++i) {
                SCOPED_TRACE(
                    fmt::format("head {}, {}", head, i == 0 ? "output" : fmt::format("gradient of input {}", i - 1)));
                const std::int64_t width = i == 0 ? V : widths[i - 1];
                EXPECT_EQ(head_of(all.first[i], head, width).to_vector<float>(), alone.first[i].to_vector<float>());
                EXPECT_EQ(head_of(all.last[i], head, width).to_vector<float>(), alone.last[i].to_vector<float>());
            }
        }
    }
}

TEST_F(CudaLargeSequences, SoftmaxAttention) {
    constexpr std::int64_t H = 16, width = 96, length = 1025, copies = 1370;
    static_assert(length * copies * H * width > two_to_31);
    std::vector<Tensor> document;
    for (std::uint64_t seed : {1, 2, 3}) document.push_back(random_tensor({length, H * width}, seed, bf16));
    check([](const std::vector<Variable>& in,
             const SequenceLayout& layout) { return ops::softmax_attention(in[0], in[1], in[2], H, H, layout); },
          document, random_tensor({length, H * width}, 4, bf16), copies);
}

}  // namespace
}  // namespace fenwick::test
