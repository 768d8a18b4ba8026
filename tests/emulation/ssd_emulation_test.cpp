// The CUDA scan's own source, run thread by thread on the CPU, against the definition. What a GPU adds (speed, its
// arithmetic, its scheduling) is tested in kernels/cuda_ssd_test.cpp.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/memory.h"
#include "base/random.h"
#include "cuda_emulation.h"
#include "kernels/ssd.h"
#include "support/reference_ssd.h"

namespace fenwick {
namespace {

using test::SsdProblem;
using test::SsdSolution;

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

// `strong`: the share of tokens whose g is -80.
void check_on(int compute_capability, SsdProblem problem, double decay, DType dtype, double strong) {
    SCOPED_TRACE(fmt::format("{} tokens, {}, K {}, V {}, levels {}, compute capability {}", problem.num_tokens(),
                             name_of(dtype), problem.key_width, problem.value_width, problem.levels, compute_capability));
    emulation::compute_capability = compute_capability;
    Random random(17, 3);
    const auto fill = [&](std::vector<double>& values, std::int64_t columns, double scale) {
        values.resize(static_cast<std::size_t>(problem.num_tokens() * columns));
        for (auto& x : values) {
            const auto single = static_cast<float>(scale * random.normal());
            x = dtype == DType::bfloat16 ? round_to_bfloat16(single) : single;
        }
    };
    fill(problem.q, problem.groups * problem.key_width, 1 / std::sqrt(static_cast<double>(problem.key_width)));
    fill(problem.k, problem.groups * problem.key_width, 1);
    fill(problem.v, problem.heads * problem.value_width, 1);
    fill(problem.d_o, problem.heads * problem.value_width, 1);
    problem.g.resize(static_cast<std::size_t>(problem.num_tokens() * problem.heads));
    for (auto& x : problem.g) x = random.uniform() < strong ? -80.0f : static_cast<float>(-decay * random.uniform());
    problem.level_scales.resize(static_cast<std::size_t>(problem.num_tokens() * problem.heads * problem.levels));
    for (auto& x : problem.level_scales) x = static_cast<float>(0.2 + random.uniform());
    const SsdSolution expected = test::reference_ssd(problem);

    const Array q(dtype, problem.q), k(dtype, problem.k), v(dtype, problem.v), d_o(dtype, problem.d_o);
    const Array g(DType::float32, problem.g), level_scales(DType::float32, problem.level_scales);
    const Array o(dtype, expected.o.size()), dq(dtype, expected.dq.size()), dk(dtype, expected.dk.size());
    const Array dv(dtype, expected.dv.size()), dg(DType::float32, expected.dg.size());
    const Array dlevel_scales(DType::float32, expected.dlevel_scales.size());
    const auto set_sizes = [&](auto& args) {
        args.dtype = dtype;
        args.sequences = {static_cast<std::int64_t>(problem.offsets.size()) - 1, problem.offsets.data()};
        args.heads = problem.heads;
        args.groups = problem.groups;
        args.key_width = problem.key_width;
        args.value_width = problem.value_width;
        args.levels = problem.levels;
        args.q_stride = args.k_stride = problem.groups * problem.key_width;
        args.v_stride = problem.heads * problem.value_width;
        args.q = q.data();
        args.k = k.data();
        args.v = v.data();
        args.g = g.data();
        args.level_scales = level_scales.data();
    };
    kernels::Ssd forward{};
    set_sizes(forward);
    forward.o = o.data();
    Buffer kept;
    forward.kept = &kept;
    kernels::cuda::ssd_forward({}, forward);
    kernels::SsdBackward backward{};
    set_sizes(backward);
    backward.dq_stride = backward.dk_stride = forward.q_stride;
    backward.dv_stride = forward.v_stride;
    backward.d_o = d_o.data();
    backward.dq = dq.data();
    backward.dk = dk.data();
    backward.dv = dv.data();
    backward.dg = dg.data();
    backward.dlevel_scales = dlevel_scales.data();
    kernels::cuda::ssd_backward({}, backward);
    // The states that forward has kept are those that backward would compute.
    const auto gradients = [&] {
        std::vector<std::vector<double>> all;
        for (const Array* x : {&dq, &dk, &dv, &dg, &dlevel_scales}) all.push_back(x->values());
        return all;
    };
    const auto computed = gradients();
    if (kept.bytes() > 0) {
        backward.kept = &kept;
        kernels::cuda::ssd_backward({}, backward);
        EXPECT_TRUE(gradients() == computed);
    }

    // Strong decays make the running sums of g large, and their float32 differences less exact.
    const double single_bound = strong > 0 ? 1e-4 : 1e-5, output_bound = dtype == DType::float32 ? single_bound : 0.01,
                 gradient_bound = dtype == DType::float32 ? single_bound : 0.02;
    EXPECT_LT(rms_ratio(o.values(), expected.o), output_bound);
    EXPECT_LT(rms_ratio(dq.values(), expected.dq), gradient_bound);
    EXPECT_LT(rms_ratio(dk.values(), expected.dk), gradient_bound);
    EXPECT_LT(rms_ratio(dv.values(), expected.dv), gradient_bound);
    EXPECT_LT(rms_ratio(dg.values(), expected.dg), gradient_bound);
    EXPECT_LT(rms_ratio(dlevel_scales.values(), expected.dlevel_scales), gradient_bound);
}

// On the GPUs that the kernels differ for.
void check(const SsdProblem& problem, double decay, DType dtype, double strong = 0) {
    check_on(9, problem, decay, dtype, strong);
    if (dtype == DType::bfloat16) check_on(8, problem, decay, dtype, strong);
}

SsdProblem problem_of(std::vector<std::int64_t> offsets, std::int64_t key_width, std::int64_t value_width,
                      std::int64_t levels, std::int64_t heads = 1, std::int64_t groups = 1) {
    SsdProblem problem;
    problem.offsets = std::move(offsets);
    problem.heads = heads;
    problem.groups = groups;
    problem.key_width = key_width;
    problem.value_width = value_width;
    problem.levels = levels;
    return problem;
}

TEST(SsdEmulation, OneChunk) {
    for (auto dtype : {DType::float32, DType::bfloat16}) {
        check(problem_of({0, 65}, 16, 8, 8, 2), 0.1, dtype);
        check(problem_of({0, 130}, 24, 40, 0), 0.1, dtype);
    }
}

TEST(SsdEmulation, ManyChunks) {
    for (auto dtype : {DType::float32, DType::bfloat16}) {
        check(problem_of({0, 2060}, 8, 16, 13), 0.02, dtype);
        check(problem_of({0, 700}, 8, 16, 0), 0.02, dtype);
    }
}

TEST(SsdEmulation, PackedDocumentsGroupsAndClampedLevels) {
    for (auto dtype : {DType::float32, DType::bfloat16}) check(problem_of({0, 1, 71, 72, 600}, 16, 8, 6, 2, 2), 0.02, dtype);
}

TEST(SsdEmulation, SeveralTilesOfKeysAndValues) { check(problem_of({0, 270}, 72, 72, 10), 0.05, DType::bfloat16); }

TEST(SsdEmulation, WholeTiles) {
    for (auto dtype : {DType::float32, DType::bfloat16}) check(problem_of({0, 520}, 128, 64, 11, 2), 0.05, dtype);
}

// Blocks that pass through many heads: stages are reused many times, by heads with as little as one stage each.
TEST(SsdEmulation, ManyHeads) {
    for (std::int64_t levels : {0, 10}) {
        check_on(9, problem_of({0, 330, 350}, 16, 16, levels, 10), 0.05, DType::bfloat16, 0);
        check_on(9, problem_of({0, 280}, 128, 64, levels, 10, 2), 0.05, DType::bfloat16, 0);
    }
    check(problem_of({0, 280}, 16, 16, 9, 8), 0.05, DType::float32);
}

// Nothing cancels in the decays' gradient: little is carried on, but what is must be right.
TEST(SsdEmulation, StrongDecay) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {0, 10})
            for (double strong : {0.0, 0.1, 1.0}) check(problem_of({0, 330}, 8, 8, levels), 0.1, dtype, strong);
}

// Odd widths and strides: no 16-byte copies.
TEST(SsdEmulation, OddWidths) { check(problem_of({0, 260}, 7, 5, 10), 0.05, DType::bfloat16); }

}  // namespace
}  // namespace fenwick
