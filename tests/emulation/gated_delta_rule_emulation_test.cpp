// The CUDA gated delta rule's own source, run thread by thread on the CPU, against the definition. What a GPU adds (speed,
// its arithmetic, its scheduling) is tested in kernels/cuda_gated_delta_rule_test.cpp.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/memory.h"
#include "cuda_emulation.h"
#include "kernels/gated_delta_rule.h"
#include "support/reference_gated_delta_rule.h"

namespace fenwick {
namespace {

using Problem = test::ReferenceGatedDeltaRule;

float round_to_bfloat16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// An array of float32 or bfloat16.
class Array {
public:
    Array(DType dtype, const std::vector<double>& values)
        : dtype_(dtype), count_(values.size()), buffer_(cpu_device, std::max<std::size_t>(count_ * size_of(dtype), 1)) {
        for (std::size_t i = 0; i < count_; ++i) {
            const auto single = static_cast<float>(values[i]);
            if (dtype == DType::float32) {
                std::memcpy(bytes() + i * 4, &single, 4);
            } else {
                const auto half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(single) >> 16);
                std::memcpy(bytes() + i * 2, &half, 2);
            }
        }
    }
    Array(DType dtype, std::size_t count)
        : Array(dtype, std::vector<double>(count, std::numeric_limits<double>::quiet_NaN())) {}

    void* data() const { return count_ > 0 ? buffer_.data() : nullptr; }
    std::vector<double> values() const {
        std::vector<double> out(count_);
        for (std::size_t i = 0; i < count_; ++i) {
            if (dtype_ == DType::float32) {
                float single;
                std::memcpy(&single, bytes() + i * 4, 4);
                out[i] = single;
            } else {
                std::uint16_t half;
                std::memcpy(&half, bytes() + i * 2, 2);
                out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
            }
        }
        return out;
    }

private:
    unsigned char* bytes() const { return buffer_.as<unsigned char>(); }

    DType dtype_;
    std::size_t count_;
    Buffer buffer_;
};

double rms_ratio(const std::vector<double>& actual, const std::vector<double>& expected) {
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    if (std::isnan(error)) return INFINITY;
    return error == 0 ? 0 : std::sqrt(error / norm);
}

void round_inputs(Problem& problem, DType dtype) {
    for (auto* values : {&problem.q, &problem.k, &problem.v})
        for (auto& x : *values) {
            const auto single = static_cast<float>(x);
            x = dtype == DType::bfloat16 ? round_to_bfloat16(single) : single;
        }
    for (auto* values : {&problem.g, &problem.beta, &problem.level_scales})
        for (auto& x : *values) x = static_cast<float>(x);
}

// Returns every result, one after another.
std::vector<double> check_on(int compute_capability, Problem problem, DType dtype) {
    SCOPED_TRACE(fmt::format("{} tokens, {}, K {}, V {}, levels {}, compute capability {}", problem.tokens(), name_of(dtype),
                             problem.key_width, problem.value_width, problem.levels, compute_capability));
    emulation::compute_capability = compute_capability;
    round_inputs(problem, dtype);
    Random numbers(5, 3);
    std::vector<double> gradient(problem.v.size());
    for (auto& x : gradient) {
        const auto single = static_cast<float>(numbers.normal());
        x = dtype == DType::bfloat16 ? round_to_bfloat16(single) : single;
    }
    problem.backward(gradient);

    const Array q(dtype, problem.q), k(dtype, problem.k), v(dtype, problem.v), d_o(dtype, gradient);
    const Array g(DType::float32, problem.g), beta(DType::float32, problem.beta),
        level_scales(DType::float32, problem.level_scales);
    const Array o(dtype, problem.o.size()), dq(dtype, problem.dq.size()), dk(dtype, problem.dk.size());
    const Array dv(dtype, problem.dv.size()), dg(DType::float32, problem.dg.size()),
        dbeta(DType::float32, problem.dbeta.size());
    const Array dlevel_scales(DType::float32, problem.dlevel_scales.size());
    const auto set_sizes = [&](auto& args) {
        args.dtype = dtype;
        args.sequences = {static_cast<std::int64_t>(problem.offsets.size()) - 1, problem.offsets.data()};
        args.heads = problem.heads;
        args.key_width = problem.key_width;
        args.value_width = problem.value_width;
        args.levels = problem.levels;
        args.q_stride = args.k_stride = problem.heads * problem.key_width;
        args.v_stride = problem.heads * problem.value_width;
        args.q = q.data();
        args.k = k.data();
        args.v = v.data();
        args.g = g.data();
        args.beta = beta.data();
        args.level_scales = level_scales.data();
    };
    kernels::GatedDeltaRule forward{};
    set_sizes(forward);
    forward.o = o.data();
    kernels::cuda::gated_delta_rule_forward({}, forward);
    kernels::GatedDeltaRuleBackward backward{};
    set_sizes(backward);
    backward.dq_stride = backward.dk_stride = forward.q_stride;
    backward.dv_stride = forward.v_stride;
    backward.d_o = d_o.data();
    backward.dq = dq.data();
    backward.dk = dk.data();
    backward.dv = dv.data();
    backward.dg = dg.data();
    backward.dbeta = dbeta.data();
    backward.dlevel_scales = dlevel_scales.data();
    kernels::cuda::gated_delta_rule_backward({}, backward);

    const double output_bound = dtype == DType::float32 ? 1e-5 : 0.01,
                 gradient_bound = dtype == DType::float32 ? 2e-5 : 0.02;
    EXPECT_LT(rms_ratio(o.values(), problem.o), output_bound);
    EXPECT_LT(rms_ratio(dq.values(), problem.dq), gradient_bound);
    EXPECT_LT(rms_ratio(dk.values(), problem.dk), gradient_bound);
    EXPECT_LT(rms_ratio(dv.values(), problem.dv), gradient_bound);
    EXPECT_LT(rms_ratio(dg.values(), problem.dg), gradient_bound);
    EXPECT_LT(rms_ratio(dbeta.values(), problem.dbeta), gradient_bound);
    EXPECT_LT(rms_ratio(dlevel_scales.values(), problem.dlevel_scales), gradient_bound);
    std::vector<double> all;
    for (const Array* array : {&o, &dq, &dk, &dv, &dg, &dbeta, &dlevel_scales}) {
        const auto values = array->values();
        all.insert(all.end(), values.begin(), values.end());
    }
    return all;
}

// The walks of Hopper are for bfloat16.
void check(const Problem& problem, DType dtype) {
    check_on(8, problem, dtype);
    if (dtype == DType::bfloat16) check_on(9, problem, dtype);
}

TEST(GatedDeltaRuleEmulation, OneChunk) {
    check(Problem::random({0, 5}, 2, 16, 8, 4, 1), DType::float32);
    check(Problem::random({0, 64}, 1, 24, 40, 0, 2), DType::bfloat16);
}

// The states of these take two rounds in an emulated build.
TEST(GatedDeltaRuleEmulation, ManyChunks) {
    check(Problem::random({0, 300}, 1, 16, 8, 10, 3, 0.02), DType::float32);
    check(Problem::random({0, 300}, 1, 16, 8, 10, 3, 0.02), DType::bfloat16);
    check(Problem::random({0, 400}, 1, 16, 8, 0, 4, 0.02), DType::float32);
}

TEST(GatedDeltaRuleEmulation, PackedDocumentsAndClampedLevels) {
    check(Problem::random({0, 1, 71, 72, 300}, 2, 16, 8, 8, 5, 0.02), DType::bfloat16);
    check(Problem::random({0, 130, 131}, 1, 16, 8, 5, 6, 0.02), DType::float32);
}

// Trees deeper than a group of chunks, whole and cut off, and a chain of the last level behind them.
TEST(GatedDeltaRuleEmulation, LongTrees) {
    check_on(9, Problem::random({0, 1290}, 1, 16, 8, 13, 10, 0.01), DType::bfloat16);
    check_on(9, Problem::random({0, 1024, 1164}, 1, 16, 8, 13, 11, 0.01), DType::bfloat16);
    check_on(9, Problem::random({0, 1300}, 1, 16, 8, 10, 12, 0.01), DType::bfloat16);
    check_on(9, Problem::random({0, 1290}, 1, 16, 8, 12, 13, 0.01), DType::bfloat16);
}

// Documents in several rounds in an emulated build: levels above a round's own tree, several of which merge where the fourth
// ends; and a chain from round to round.
TEST(GatedDeltaRuleEmulation, RoundsOfOneDocument) {
    check_on(9, Problem::random({0, 2700}, 1, 16, 8, 14, 17, 0.01), DType::bfloat16);
    check_on(9, Problem::random({0, 1500}, 1, 16, 8, 0, 18, 0.01), DType::bfloat16);
}

TEST(GatedDeltaRuleEmulation, SeveralTilesOfKeysAndValues) {
    check(Problem::random({0, 200}, 1, 72, 72, 9, 7, 0.01), DType::bfloat16);
    check(Problem::random({0, 300}, 2, 192, 136, 10, 14, 0.01), DType::bfloat16);
    check(Problem::random({0, 200}, 1, 136, 192, 0, 15, 0.01), DType::bfloat16);
}

// The order in which warps advance and copies arrive is another one each time.
TEST(GatedDeltaRuleEmulation, RepeatsBitForBit) {
    for (std::int64_t levels : {0, 11}) {
        const auto problem = Problem::random({0, 330, 331, 420}, 1, 24, 24, levels, 16, 0.02);
        const auto first = check_on(9, problem, DType::bfloat16);
        for (int repeat = 0; repeat < 2; ++repeat) EXPECT_EQ(check_on(9, problem, DType::bfloat16), first);
    }
}

// Odd widths and strides: no 16-byte copies.
TEST(GatedDeltaRuleEmulation, OddWidths) { check(Problem::random({0, 130}, 2, 7, 5, 9, 8), DType::bfloat16); }

// So many keys that a chunk's operands do not fit in shared memory together.
TEST(GatedDeltaRuleEmulation, WideKeys) { check(Problem::random({0, 130}, 1, 256, 16, 9, 9), DType::float32); }

}  // namespace
}  // namespace fenwick
