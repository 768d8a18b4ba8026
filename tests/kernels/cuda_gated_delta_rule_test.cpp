// The CUDA gated delta rule against the CPU's in float64. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>

#include "base/memory.h"
#include "base/memory_cuda.h"
#include "kernels/gated_delta_rule.h"
#include "support/accuracy.h"
#include "support/random_tensor.h"
#include "support/reference_gated_delta_rule.h"
#include "support/sampling.h"

namespace fenwick {
namespace {

using kernels::Exec;
using Problem = test::ReferenceGatedDeltaRule;
using Doubles = std::vector<double>;

constexpr Device gpu{DeviceType::cuda, 0};

float round_to_bfloat16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

Buffer to_gpu(const Doubles& values, DType dtype) {
    std::vector<unsigned char> bytes(values.size() * size_of(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
        const auto single = static_cast<float>(values[i]);
        if (dtype == DType::bfloat16) {
            const auto half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(round_to_bfloat16(single)) >> 16);
            std::memcpy(bytes.data() + i * 2, &half, 2);
        } else {
            std::memcpy(bytes.data() + i * 4, &single, 4);
        }
    }
    Buffer buffer(gpu, std::max<std::size_t>(bytes.size(), 1));
    copy_bytes(gpu, buffer.data(), cpu_device, bytes.data(), bytes.size());
    return buffer;
}
Buffer unwritten(std::size_t count, DType dtype) {
    return to_gpu(Doubles(count, std::numeric_limits<double>::quiet_NaN()), dtype);
}

std::vector<unsigned char> bytes_of(const Buffer& buffer, std::size_t bytes) {
    std::vector<unsigned char> host(bytes);
    copy_bytes(cpu_device, host.data(), gpu, buffer.data(), bytes);
    return host;
}

Doubles to_host(const Buffer& buffer, std::size_t count, DType dtype) {
    const auto bytes = bytes_of(buffer, count * size_of(dtype));
    Doubles values(count);
    for (std::size_t i = 0; i < count; ++i) {
        if (dtype == DType::bfloat16) {
            std::uint16_t half;
            std::memcpy(&half, bytes.data() + i * 2, 2);
            values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
        } else {
            float single;
            std::memcpy(&single, bytes.data() + i * 4, 4);
            values[i] = single;
        }
    }
    return values;
}

void round_inputs(Problem& x, DType dtype) {
    for (auto* values : {&x.q, &x.k, &x.v})
        for (auto& value : *values) {
            const auto single = static_cast<float>(value);
            value = dtype == DType::bfloat16 ? round_to_bfloat16(single) : single;
        }
    for (auto* values : {&x.g, &x.beta, &x.level_scales})
        for (auto& value : *values) value = static_cast<float>(value);
}
Doubles random_gradient(const Problem& x) {
    Random numbers(5, 3);
    Doubles values(x.v.size());
    for (auto& value : values) value = round_to_bfloat16(static_cast<float>(numbers.normal()));
    return values;
}

struct Results {
    Doubles o, dq, dk, dv, dg, dbeta, dlevel_scales;
    std::vector<std::vector<unsigned char>> bytes;  // of each of them, to compare repeats
};
constexpr std::pair<const char*, Doubles Results::*> gradients[] = {
    {"dq", &Results::dq}, {"dk", &Results::dk},       {"dv", &Results::dv},
    {"dg", &Results::dg}, {"dbeta", &Results::dbeta}, {"dlevel_scales", &Results::dlevel_scales}};

template <class Args>
void set_sizes(Args& args, const Problem& x, DType dtype, std::int64_t padding) {
    args.dtype = dtype;
    args.heads = x.heads;
    args.key_width = x.key_width;
    args.value_width = x.value_width;
    args.levels = x.levels;
    args.q_stride = args.k_stride = x.heads * x.key_width + padding;
    args.v_stride = x.heads * x.value_width + padding;
}
template <class Args>
void set_backward(Args& args, const Problem& x, std::int64_t padding) {
    args.dq_stride = args.dk_stride = x.heads * x.key_width + padding;
    args.dv_stride = x.heads * x.value_width + padding;
}

Results on_cpu(const Problem& x, const Doubles& d_o) {
    Results r{Doubles(x.v.size()),
              Doubles(x.q.size()),
              Doubles(x.k.size()),
              Doubles(x.v.size()),
              Doubles(x.g.size()),
              Doubles(x.g.size()),
              Doubles(x.level_scales.size()),
              {}};
    const kernels::Sequences sequences{static_cast<std::int64_t>(x.offsets.size()) - 1, x.offsets.data()};
    const auto scales = [&](auto& values) { return x.levels > 0 ? values.data() : nullptr; };
    const auto set_inputs = [&](auto& args) {
        set_sizes(args, x, DType::float64, 0);
        args.sequences = sequences;
        args.q = x.q.data();
        args.k = x.k.data();
        args.v = x.v.data();
        args.g = x.g.data();
        args.beta = x.beta.data();
        args.level_scales = scales(x.level_scales);
    };
    kernels::GatedDeltaRule forward{};
    set_inputs(forward);
    forward.o = r.o.data();
    kernels::gated_delta_rule_forward(Exec{cpu_device}, forward);
    kernels::GatedDeltaRuleBackward backward{};
    set_inputs(backward);
    set_backward(backward, x, 0);
    backward.d_o = d_o.data();
    backward.dq = r.dq.data();
    backward.dk = r.dk.data();
    backward.dv = r.dv.data();
    backward.dg = r.dg.data();
    backward.dbeta = r.dbeta.data();
    backward.dlevel_scales = scales(r.dlevel_scales);
    kernels::gated_delta_rule_backward(Exec{cpu_device}, backward);
    return r;
}

// Rows of `width` values, `padding` more behind each.
Doubles padded(const Doubles& values, std::int64_t width, std::int64_t padding) {
    Doubles out;
    for (std::size_t i = 0; i < values.size(); ++i) {
        out.push_back(values[i]);
        if ((i + 1) % static_cast<std::size_t>(width) == 0) out.insert(out.end(), static_cast<std::size_t>(padding), 7.0);
    }
    return out;
}
// Removes the padding, which must be as it was.
Doubles unpadded(const Doubles& values, std::int64_t width, std::int64_t padding) {
    Doubles out;
    const auto stride = static_cast<std::size_t>(width + padding);
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (i % stride < static_cast<std::size_t>(width)) {
            out.push_back(values[i]);
        } else {
            EXPECT_TRUE(std::isnan(values[i]));
        }
    }
    return out;
}

Results on_gpu(const Problem& x, const Doubles& d_out, DType dtype, std::int64_t padding = 0) {
    const Exec exec{gpu, detail::cuda_stream(0)};
    const std::int64_t keys = x.heads * x.key_width, values = x.heads * x.value_width;
    const auto q = to_gpu(padded(x.q, keys, padding), dtype), k = to_gpu(padded(x.k, keys, padding), dtype);
    const auto v = to_gpu(padded(x.v, values, padding), dtype), d_o = to_gpu(d_out, dtype);
    const auto g = to_gpu(x.g, DType::float32), beta = to_gpu(x.beta, DType::float32);
    const auto level_scales = to_gpu(x.level_scales, DType::float32);
    const auto tokens = static_cast<std::size_t>(x.tokens());
    const std::size_t key_count = tokens * static_cast<std::size_t>(keys + padding),
                      value_count = tokens * static_cast<std::size_t>(values + padding);
    const auto o = unwritten(x.v.size(), dtype), dq = unwritten(key_count, dtype), dk = unwritten(key_count, dtype);
    const auto dv = unwritten(value_count, dtype), dg = unwritten(x.g.size(), DType::float32);
    const auto dbeta = unwritten(x.g.size(), DType::float32),
               dlevel_scales = unwritten(x.level_scales.size(), DType::float32);
    const auto scales = [&](const Buffer& buffer) { return x.levels > 0 ? buffer.data() : nullptr; };
    const auto set_inputs = [&](auto& args) {
        set_sizes(args, x, dtype, padding);
        args.sequences = {static_cast<std::int64_t>(x.offsets.size()) - 1, x.offsets.data()};
        args.q = q.data();
        args.k = k.data();
        args.v = v.data();
        args.g = g.data();
        args.beta = beta.data();
        args.level_scales = scales(level_scales);
    };
    kernels::GatedDeltaRule forward{};
    set_inputs(forward);
    forward.o = o.data();
    kernels::gated_delta_rule_forward(exec, forward);
    kernels::GatedDeltaRuleBackward backward{};
    set_inputs(backward);
    set_backward(backward, x, padding);
    backward.d_o = d_o.data();
    backward.dq = dq.data();
    backward.dk = dk.data();
    backward.dv = dv.data();
    backward.dg = dg.data();
    backward.dbeta = dbeta.data();
    backward.dlevel_scales = scales(dlevel_scales);
    kernels::gated_delta_rule_backward(exec, backward);
    Results r;
    r.o = to_host(o, x.v.size(), dtype);
    r.dq = unpadded(to_host(dq, key_count, dtype), keys, padding);
    r.dk = unpadded(to_host(dk, key_count, dtype), keys, padding);
    r.dv = unpadded(to_host(dv, value_count, dtype), values, padding);
    r.dg = to_host(dg, x.g.size(), DType::float32);
    r.dbeta = to_host(dbeta, x.g.size(), DType::float32);
    r.dlevel_scales = to_host(dlevel_scales, x.level_scales.size(), DType::float32);
    for (const auto& [buffer, bytes] :
         {std::pair{&o, x.v.size() * size_of(dtype)}, std::pair{&dq, key_count * size_of(dtype)},
          std::pair{&dk, key_count * size_of(dtype)}, std::pair{&dv, value_count * size_of(dtype)},
          std::pair{&dg, x.g.size() * sizeof(float)}, std::pair{&dbeta, x.g.size() * sizeof(float)},
          std::pair{&dlevel_scales, x.level_scales.size() * sizeof(float)}})
        r.bytes.push_back(bytes_of(*buffer, bytes));
    return r;
}

void compare(Problem x, DType dtype, std::int64_t padding = 0) {
    if (!test::sampled()) return;
    SCOPED_TRACE(fmt::format("{}, documents {}, tokens {}, H {}, K {}, V {}, levels {}, padding {}", name_of(dtype),
                             x.offsets.size() - 1, x.tokens(), x.heads, x.key_width, x.value_width, x.levels, padding));
    round_inputs(x, dtype);
    const auto d_o = random_gradient(x);
    const Results expected = on_cpu(x, d_o), actual = on_gpu(x, d_o, dtype, padding);
    EXPECT_LT(test::rms_ratio(actual.o, expected.o), dtype == DType::float32 ? 1e-4 : 0.01);
    for (const auto& [name, field] : gradients)
        EXPECT_LT(test::rms_ratio(actual.*field, expected.*field), dtype == DType::float32 ? 1e-4 : 0.02) << name;
    for (std::size_t d = 0; d + 1 < x.offsets.size(); ++d)  // a document's first decay meets no state
        for (std::int64_t h = 0; h < x.heads; ++h)
            EXPECT_EQ(actual.dg[static_cast<std::size_t>(x.offsets[d] * x.heads + h)], 0);
}

void expect_same_bits(const Results& actual, const Results& expected) {
    constexpr const char* names[] = {"o", "dq", "dk", "dv", "dg", "dbeta", "dlevel_scales"};
    for (std::size_t i = 0; i < std::size(names); ++i) {
        const auto &a = actual.bytes[i], &b = expected.bytes[i];
        ASSERT_EQ(a.size(), b.size());
        std::size_t different = 0, first = a.size();
        for (std::size_t n = a.size(); n-- > 0;)
            if (a[n] != b[n]) ++different, first = n;
        EXPECT_EQ(different, 0u) << names[i] << ": bytes of " << a.size() << ", the first one at " << first;
    }
}

std::vector<std::int64_t> packed(std::initializer_list<std::int64_t> lengths) {
    std::vector<std::int64_t> offsets{0};
    for (auto length : lengths) offsets.push_back(offsets.back() + length);
    return offsets;
}
std::int64_t levels_of(std::int64_t length) { return kernels::levels_needed(static_cast<std::uint64_t>(length)); }

class CudaGatedDeltaRule : public testing::Test {
protected:
    void SetUp() override {
        if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    }
};

TEST_F(CudaGatedDeltaRule, MatchesTheCpuForAnyLength) {
    std::uint64_t seed = 100;
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t length : {1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 193, 257, 511, 769}) {
            compare(Problem::random(packed({length}), 2, 16, 8, levels_of(length), ++seed), dtype);
            compare(Problem::random(packed({length}), 2, 16, 8, 0, ++seed), dtype);
        }
}

TEST_F(CudaGatedDeltaRule, MatchesTheCpuOnLongSequences) {
    for (auto dtype : {DType::float32, DType::bfloat16}) {
        compare(Problem::random(packed({4100}), 2, 32, 16, 13, 1, 0.01), dtype);
        compare(Problem::random(packed({1100, 1100}), 2, 192, 136, 12, 2, 0.02), dtype);
        compare(Problem::random(packed({1100}), 1, 256, 512, 0, 3, 0.01), dtype);
    }
}

// The sizes of the paper's models, in enough documents that a multiprocessor takes several units of work and two warpgroups
// share a block.
TEST_F(CudaGatedDeltaRule, MatchesTheCpuOnMoreWorkThanFits) {
    for (std::int64_t levels : {0, 11})
        compare(Problem::random(packed({65, 65, 65, 65, 65, 65, 65, 600}), 6, 192, 384, levels, 400, 0.01), DType::bfloat16);
}

TEST_F(CudaGatedDeltaRule, MatchesTheCpuForAnyWidth) {
    std::uint64_t seed = 200;
    const std::pair<std::int64_t, std::int64_t> widths[] = {{32, 32},   {64, 64},   {128, 64}, {24, 40},
                                                            {192, 136}, {256, 256}, {320, 24}, {7, 5}};
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (const auto& [key_width, value_width] : widths)
            for (std::int64_t levels : {0, 9})
                compare(Problem::random(packed({330}), 1, key_width, value_width, levels, ++seed), dtype);
}

TEST_F(CudaGatedDeltaRule, MatchesTheCpuOnPackedDocuments) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {0, 10}) {
            compare(Problem::random(packed({1, 1, 70, 1, 64, 300, 700, 1}), 3, 16, 24, levels, 300), dtype);
            compare(Problem::random(packed({1, 1, 1, 1}), 2, 16, 8, levels, 301), dtype);
        }
}

TEST_F(CudaGatedDeltaRule, ClampsLevels) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {1, 4, 6, 7, 8, 9, 10, 14})
            compare(Problem::random(packed({900}), 2, 16, 8, levels, 500, 0.02), dtype);
}

TEST_F(CudaGatedDeltaRule, SurvivesStrongAndNoDecay) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {0, 9}) {
            auto x = Problem::random(packed({400}), 2, 16, 8, levels, 600);
            for (std::size_t i = 0; i < x.g.size(); i += 7) x.g[i] = -80;
            compare(x, dtype);
            for (auto& g : x.g) g = 0;
            // Without decay the state carries everything on; steps beyond 1 would amplify roundings, too.
            for (auto& beta : x.beta) beta = std::min(beta, 1.0);
            compare(x, dtype);
        }
}

TEST_F(CudaGatedDeltaRule, ReadsAndWritesSlices) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t padding : {8, 3}) compare(Problem::random(packed({150}), 2, 16, 16, 9, 700), dtype, padding);
}

TEST_F(CudaGatedDeltaRule, RepeatsBitForBit) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {0, 11}) {
            const auto x = Problem::random(packed({900, 1, 500}), 3, 128, 64, levels, 800);
            const auto d_o = random_gradient(x);
            const auto first = on_gpu(x, d_o, dtype);
            for (int repeat = 0; repeat < 6; ++repeat) {
                SCOPED_TRACE(fmt::format("{}, levels {}, repeat {}", name_of(dtype), levels, repeat));
                expect_same_bits(on_gpu(x, d_o, dtype), first);
            }
        }
}

// The walks of Hopper against the general kernels, which are those that take rows without 16-byte alignment.
TEST_F(CudaGatedDeltaRule, WalksAreAsExactAsTheGeneralKernels) {
    if (!test::is_hopper(cuda_device_name(0))) GTEST_SKIP() << "this GPU has the general kernels alone";
    const std::tuple<const char*, std::vector<std::int64_t>, bool> cases[] = {
        {"1000 tokens", packed({1000}), false},
        {"2048 tokens", packed({2048}), false},
        {"packed", packed({1, 300, 63, 700, 512, 130}), false},
        {"strong decay", packed({1000}), true},
    };
    for (std::int64_t levels : {std::int64_t{0}, levels_of(2048)}) {
        test::AccuracyTable table(levels > 0 ? "log_linear_gated_delta_rule" : "gated_delta_rule");
        for (const auto& [name, offsets, strong] : cases) {
            auto x = Problem::random(offsets, 4, 192, 384, levels, 1, 0.02);
            for (std::size_t i = 0; strong && i < x.g.size(); i += 7) x.g[i] = -80;
            round_inputs(x, DType::bfloat16);
            const auto d_o = random_gradient(x);
            const Results exact = on_cpu(x, d_o), fast = on_gpu(x, d_o, DType::bfloat16),
                          slow = on_gpu(x, d_o, DType::bfloat16, 3);
            table.add(name, "o", fast.o, slow.o, exact.o);
            for (const auto& [result, field] : gradients)
                if (!(exact.*field).empty()) table.add(name, result, fast.*field, slow.*field, exact.*field);
        }
        table.check();
    }
}

// Tokens one, two, or many a call, with carried state, against the whole sequence at once.
TEST_F(CudaGatedDeltaRule, RecurrentMatchesTheWhole) {
    constexpr std::int64_t batch = 2, length = 70;
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {0, 3, 8}) {
            SCOPED_TRACE(fmt::format("{}, levels {}", name_of(dtype), levels));
            auto x = Problem::random(packed({length, length}), 3, 24, 40, levels, 900);
            round_inputs(x, dtype);
            x.forward();
            const std::int64_t capacity = levels > 0 ? levels_of(length) : 1;
            const auto state = to_gpu(
                Doubles(static_cast<std::size_t>(capacity * batch * x.heads * x.key_width * x.value_width)), DType::float32);
            Doubles actual(x.o.size());
            std::int64_t position = 0;
            for (std::int64_t count : {1, 1, 2, 3, 1, 8, 17, 1, 31, 5}) {
                const auto cut = [&](const Doubles& values, std::int64_t width) {
                    Doubles out;
                    for (std::int64_t row = 0; row < batch; ++row) {
                        const auto begin = values.begin() + (row * length + position) * width;
                        out.insert(out.end(), begin, begin + count * width);
                    }
                    return out;
                };
                const std::int64_t width = x.heads * x.value_width;
                const auto q = to_gpu(cut(x.q, x.heads * x.key_width), dtype),
                           k = to_gpu(cut(x.k, x.heads * x.key_width), dtype);
                const auto v = to_gpu(cut(x.v, width), dtype);
                const auto g = to_gpu(cut(x.g, x.heads), DType::float32),
                           beta = to_gpu(cut(x.beta, x.heads), DType::float32);
                const auto scales = to_gpu(cut(x.level_scales, x.heads * levels), DType::float32);
                const auto o = unwritten(static_cast<std::size_t>(batch * count * width), dtype);
                kernels::GatedDeltaRuleRecurrent args{};
                set_sizes(args, x, dtype, 0);
                args.batch = batch;
                args.length = count;
                args.position = position;
                args.level_capacity = capacity;
                args.q = q.data();
                args.k = k.data();
                args.v = v.data();
                args.g = g.data();
                args.beta = beta.data();
                args.level_scales = levels > 0 ? scales.data() : nullptr;
                args.o = o.data();
                args.state = state.data();
                kernels::gated_delta_rule_recurrent(Exec{gpu, detail::cuda_stream(0)}, args);
                const auto out = to_host(o, static_cast<std::size_t>(batch * count * width), dtype);
                for (std::int64_t row = 0; row < batch; ++row)
                    std::copy_n(out.begin() + row * count * width, count * width,
                                actual.begin() + (row * length + position) * width);
                position += count;
            }
            ASSERT_EQ(position, length);
            EXPECT_LT(test::rms_ratio(actual, x.o), dtype == DType::float32 ? 1e-5 : 0.01);
        }
}

}  // namespace
}  // namespace fenwick
