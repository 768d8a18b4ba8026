// The CUDA scan against the CPU's in float64. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <string>

#include "base/memory.h"
#include "base/memory_cuda.h"
#include "base/random.h"
#include "kernels/ssd.h"
#include "support/accuracy.h"
#include "support/random_tensor.h"
#include "support/sampling.h"

namespace fenwick {
namespace {

using kernels::Exec;

constexpr Device gpu{DeviceType::cuda, 0};

float round_to_bfloat16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}
double rounded(double x, DType dtype) {
    const auto single = static_cast<float>(x);
    return dtype == DType::bfloat16 ? round_to_bfloat16(single) : single;
}

Buffer to_gpu(const std::vector<double>& values, DType dtype) {
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

std::vector<unsigned char> bytes_of(const Buffer& buffer, std::size_t bytes) {
    std::vector<unsigned char> host(bytes);
    copy_bytes(cpu_device, host.data(), gpu, buffer.data(), bytes);
    return host;
}

std::vector<double> to_host(const Buffer& buffer, std::size_t count, DType dtype) {
    const auto bytes = bytes_of(buffer, count * size_of(dtype));
    std::vector<double> values(count);
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

struct Case {
    std::vector<std::int64_t> offsets;
    std::int64_t heads = 2, groups = 1, key_width = 16, value_width = 8;
    std::int64_t levels = 0;   // 0: linear
    std::int64_t padding = 0;  // columns behind each row of q, k, v and their gradients
    std::int64_t shift = 0;    // elements before the first of q, k, v and their gradients: an odd one breaks alignment
    double decay = 0.1;        // g is uniform in [-decay, 0]
    double strong = 0;         // share of tokens with g = -80

    std::string text() const {
        return fmt::format(
            "documents {}, tokens {}, H {}, G {}, K {}, V {}, levels {}, padding {}, shift {}, decay {}, strong {}",
            offsets.size() - 1, offsets.back(), heads, groups, key_width, value_width, levels, padding, shift, decay,
            strong);
    }
};

struct Arrays {
    std::vector<double> q, k, v, g, level_scales, d_o;
    std::int64_t key_stride = 0, value_stride = 0;
};

Arrays random_arrays(const Case& c, DType dtype, std::uint64_t seed) {
    Random random(seed, 7);
    const std::int64_t tokens = c.offsets.back();
    Arrays a;
    a.key_stride = c.groups * c.key_width + c.padding;
    a.value_stride = c.heads * c.value_width + c.padding;
    const auto normals = [&](std::int64_t count, double scale) {
        std::vector<double> values(static_cast<std::size_t>(count));
        for (auto& x : values) x = rounded(scale * random.normal(), dtype);
        return values;
    };
    a.q = normals(tokens * a.key_stride, 1 / std::sqrt(static_cast<double>(c.key_width)));
    a.k = normals(tokens * a.key_stride, 1);
    a.v = normals(tokens * a.value_stride, 1);
    a.d_o = normals(tokens * c.heads * c.value_width, 1);
    a.g.resize(static_cast<std::size_t>(tokens * c.heads));
    for (auto& x : a.g) x = random.uniform() < c.strong ? -80.0 : rounded(-c.decay * random.uniform(), DType::float32);
    a.level_scales.resize(static_cast<std::size_t>(tokens * c.heads * c.levels));
    for (auto& x : a.level_scales) x = rounded(0.2 + random.uniform(), DType::float32);
    return a;
}

template <class Args>
void set_sizes(Args& args, const Case& c, const Arrays& a, DType dtype) {
    args.dtype = dtype;
    args.heads = c.heads;
    args.groups = c.groups;
    args.key_width = c.key_width;
    args.value_width = c.value_width;
    args.levels = c.levels;
    args.q_stride = args.k_stride = a.key_stride;
    args.v_stride = a.value_stride;
}

struct Results {
    std::vector<double> o, dq, dk, dv, dg, dlevel_scales;
    std::vector<unsigned char> bytes;  // of all of them, to compare repeats
};

// The columns that belong to the operator.
std::vector<double> without_padding(const std::vector<double>& values, std::int64_t stride, std::int64_t width) {
    std::vector<double> out;
    for (std::size_t row = 0; row * static_cast<std::size_t>(stride) < values.size(); ++row)
        for (std::int64_t i = 0; i < width; ++i)
            out.push_back(values[row * static_cast<std::size_t>(stride) + static_cast<std::size_t>(i)]);
    return out;
}

Results on_cpu(const Case& c, const Arrays& a) {
    Results r;
    r.o.resize(a.d_o.size());
    r.dq.resize(a.q.size());
    r.dk.resize(a.k.size());
    r.dv.resize(a.v.size());
    r.dg.resize(a.g.size());
    r.dlevel_scales.resize(a.level_scales.size());
    const kernels::Sequences sequences{static_cast<std::int64_t>(c.offsets.size()) - 1, c.offsets.data()};
    const auto scales = [&](auto& values) { return c.levels > 0 ? values.data() : nullptr; };
    kernels::Ssd forward{};
    set_sizes(forward, c, a, DType::float64);
    forward.sequences = sequences;
    forward.q = a.q.data();
    forward.k = a.k.data();
    forward.v = a.v.data();
    forward.g = a.g.data();
    forward.level_scales = scales(a.level_scales);
    forward.o = r.o.data();
    kernels::ssd_forward(Exec{cpu_device}, forward);
    kernels::SsdBackward backward{};
    set_sizes(backward, c, a, DType::float64);
    backward.sequences = sequences;
    backward.dq_stride = backward.dk_stride = a.key_stride;
    backward.dv_stride = a.value_stride;
    backward.q = a.q.data();
    backward.k = a.k.data();
    backward.v = a.v.data();
    backward.g = a.g.data();
    backward.level_scales = scales(a.level_scales);
    backward.d_o = a.d_o.data();
    backward.dq = r.dq.data();
    backward.dk = r.dk.data();
    backward.dv = r.dv.data();
    backward.dg = r.dg.data();
    backward.dlevel_scales = scales(r.dlevel_scales);
    kernels::ssd_backward(Exec{cpu_device}, backward);
    return r;
}

// `keep`: backward takes the states that forward has kept.
Results on_gpu(const Case& c, const Arrays& a, DType dtype, bool keep = false) {
    const Exec exec{gpu, detail::cuda_stream(0)};
    const auto shifted = [&](std::vector<double> values) {
        values.insert(values.begin(), static_cast<std::size_t>(c.shift), std::numeric_limits<double>::quiet_NaN());
        return to_gpu(values, dtype);
    };
    const auto first = [&](const Buffer& buffer) {
        return buffer.as<unsigned char>() + c.shift * static_cast<std::int64_t>(size_of(dtype));
    };
    const auto q = shifted(a.q), k = shifted(a.k), v = shifted(a.v), d_o = to_gpu(a.d_o, dtype);
    const auto g = to_gpu(a.g, DType::float32), level_scales = to_gpu(a.level_scales, DType::float32);
    const auto output = [](const std::vector<double>& like, DType type) {
        return to_gpu(std::vector<double>(like.size(), std::numeric_limits<double>::quiet_NaN()), type);
    };
    const auto nothing = [](const std::vector<double>& like) {
        return std::vector<double>(like.size(), std::numeric_limits<double>::quiet_NaN());
    };
    const auto o = output(a.d_o, dtype), dq = shifted(nothing(a.q)), dk = shifted(nothing(a.k)), dv = shifted(nothing(a.v));
    const auto dg = output(a.g, DType::float32), dlevel_scales = output(a.level_scales, DType::float32);
    const kernels::Sequences sequences{static_cast<std::int64_t>(c.offsets.size()) - 1, c.offsets.data()};
    const auto scales = [&](const Buffer& buffer) { return c.levels > 0 ? buffer.data() : nullptr; };
    kernels::Ssd forward{};
    set_sizes(forward, c, a, dtype);
    forward.sequences = sequences;
    forward.q = first(q);
    forward.k = first(k);
    forward.v = first(v);
    forward.g = g.data();
    forward.level_scales = scales(level_scales);
    forward.o = o.data();
    Buffer kept;
    if (keep) forward.kept = &kept;
    kernels::ssd_forward(exec, forward);
    kernels::SsdBackward backward{};
    set_sizes(backward, c, a, dtype);
    backward.sequences = sequences;
    backward.dq_stride = backward.dk_stride = a.key_stride;
    backward.dv_stride = a.value_stride;
    backward.q = first(q);
    backward.k = first(k);
    backward.v = first(v);
    backward.g = g.data();
    backward.level_scales = scales(level_scales);
    backward.d_o = d_o.data();
    backward.kept = &kept;
    backward.dq = first(dq);
    backward.dk = first(dk);
    backward.dv = first(dv);
    backward.dg = dg.data();
    backward.dlevel_scales = scales(dlevel_scales);
    kernels::ssd_backward(exec, backward);
    const auto from_shifted = [&](const Buffer& buffer, std::size_t count) {
        auto values = to_host(buffer, count + static_cast<std::size_t>(c.shift), dtype);
        values.erase(values.begin(), values.begin() + c.shift);
        return values;
    };
    Results r;
    r.o = to_host(o, a.d_o.size(), dtype);
    r.dq = from_shifted(dq, a.q.size());
    r.dk = from_shifted(dk, a.k.size());
    r.dv = from_shifted(dv, a.v.size());
    r.dg = to_host(dg, a.g.size(), DType::float32);
    r.dlevel_scales = to_host(dlevel_scales, a.level_scales.size(), DType::float32);
    const auto append = [&](const Buffer& buffer, std::size_t bytes) {
        const auto part = bytes_of(buffer, bytes);
        r.bytes.insert(r.bytes.end(), part.begin(), part.end());
    };
    append(o, a.d_o.size() * size_of(dtype));
    append(dq, (a.q.size() + static_cast<std::size_t>(c.shift)) * size_of(dtype));
    append(dk, (a.k.size() + static_cast<std::size_t>(c.shift)) * size_of(dtype));
    append(dv, (a.v.size() + static_cast<std::size_t>(c.shift)) * size_of(dtype));
    append(dg, a.g.size() * 4);
    append(dlevel_scales, a.level_scales.size() * 4);
    return r;
}

void compare(const Case& c, DType dtype, std::uint64_t seed) {
    if (!test::sampled()) return;
    SCOPED_TRACE(fmt::format("{}, {}", name_of(dtype), c.text()));
    const Arrays a = random_arrays(c, dtype, seed);
    const Results expected = on_cpu(c, a), actual = on_gpu(c, a, dtype);
    const double output_bound = dtype == DType::float32 ? 1e-4 : 0.01,
                 gradient_bound = dtype == DType::float32 ? 1e-4 : 0.02;
    const std::int64_t key_columns = c.groups * c.key_width, value_columns = c.heads * c.value_width;
    const auto ratio = [](const std::vector<double>& x, const std::vector<double>& y, std::int64_t stride,
                          std::int64_t width) {
        return test::rms_ratio(without_padding(x, stride, width), without_padding(y, stride, width));
    };
    EXPECT_LT(test::rms_ratio(actual.o, expected.o), output_bound);
    EXPECT_LT(ratio(actual.dq, expected.dq, a.key_stride, key_columns), gradient_bound);
    EXPECT_LT(ratio(actual.dk, expected.dk, a.key_stride, key_columns), gradient_bound);
    EXPECT_LT(ratio(actual.dv, expected.dv, a.value_stride, value_columns), gradient_bound);
    EXPECT_LT(test::rms_ratio(actual.dlevel_scales, expected.dlevel_scales), gradient_bound);
    EXPECT_LT(test::rms_ratio(actual.dg, expected.dg), gradient_bound);
    // Padding belongs to others.
    for (std::size_t row = 0; c.padding > 0 && row < static_cast<std::size_t>(c.offsets.back()); ++row)
        ASSERT_TRUE(std::isnan(actual.dv[(row + 1) * static_cast<std::size_t>(a.value_stride) - 1]));
}

std::vector<std::int64_t> packed(std::initializer_list<std::int64_t> lengths) {
    std::vector<std::int64_t> offsets{0};
    for (auto length : lengths) offsets.push_back(offsets.back() + length);
    return offsets;
}
std::int64_t levels_of(std::int64_t length) { return kernels::levels_needed(static_cast<std::uint64_t>(length)); }

class CudaSsd : public testing::Test {
protected:
    void SetUp() override {
        if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    }
};

TEST_F(CudaSsd, MatchesTheCpuForAnyLength) {
    std::uint64_t seed = 100;
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t length : {1, 2, 3, 63, 64, 65, 127, 128, 129, 193, 256, 257, 511, 513, 769}) {
            compare({.offsets = packed({length}), .levels = levels_of(length)}, dtype, ++seed);
            compare({.offsets = packed({length})}, dtype, ++seed);
        }
}

TEST_F(CudaSsd, MatchesTheCpuOnLongSequences) {
    for (auto dtype : {DType::float32, DType::bfloat16}) {
        compare({.offsets = packed({4100}), .heads = 2, .key_width = 32, .value_width = 16, .levels = 13, .decay = 0.01},
                dtype, 1);
        compare(
            {.offsets = packed({2048, 2048}), .heads = 3, .key_width = 128, .value_width = 64, .levels = 12, .decay = 0.02},
            dtype, 2);
        compare({.offsets = packed({2100}), .heads = 2, .key_width = 64, .value_width = 64, .decay = 0.01}, dtype, 3);
    }
}

// Chunks that read more buckets than any ring of copies has stages.
TEST_F(CudaSsd, MatchesTheCpuWithManyBucketsAChunk) {
    const std::int64_t length = (std::int64_t{1} << 15) - 300;
    compare({.offsets = packed({length}), .heads = 2, .key_width = 16, .value_width = 8, .levels = 16, .decay = 0.001},
            DType::bfloat16, 4);
    compare({.offsets = packed({length}), .heads = 2, .key_width = 72, .value_width = 8, .levels = 16, .decay = 0.001},
            DType::bfloat16, 5);
}

// Blocks that pass through many heads: a chunk of each document makes blocks, of which many need fewer slices of the heads.
TEST_F(CudaSsd, MatchesTheCpuWithManyHeadsABlock) {
    std::vector<std::int64_t> lengths(400, 2);
    lengths.insert(lengths.begin() + 200, 1100);
    std::vector<std::int64_t> offsets{0};
    for (auto length : lengths) offsets.push_back(offsets.back() + length);
    for (std::int64_t levels : {0, 12})
        compare({.offsets = offsets, .heads = 24, .key_width = 128, .value_width = 64, .levels = levels, .decay = 0.02},
                DType::bfloat16, 10);
}

TEST_F(CudaSsd, MatchesTheCpuForAnyWidth) {
    std::uint64_t seed = 200;
    const std::pair<std::int64_t, std::int64_t> widths[] = {{16, 8},  {32, 32},   {64, 64},   {128, 64},
                                                            {24, 40}, {192, 136}, {256, 256}, {7, 5}};
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (const auto& [key_width, value_width] : widths)
            for (std::int64_t levels : {0, 10})
                compare({.offsets = packed({530}),
                         .heads = 2,
                         .key_width = key_width,
                         .value_width = value_width,
                         .levels = levels},
                        dtype, ++seed);
}

TEST_F(CudaSsd, MatchesTheCpuOnPackedDocuments) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {0, 10}) {
            compare({.offsets = packed({1, 1, 70, 1, 64, 300, 700, 1}), .heads = 4, .groups = 2, .levels = levels}, dtype,
                    300);
            compare({.offsets = packed({1, 1, 1, 1}), .levels = levels}, dtype, 301);
        }
}

TEST_F(CudaSsd, MatchesTheCpuForAnyGroups) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t groups : {1, 2, 3, 6})
            compare(
                {.offsets = packed({400}), .heads = 6, .groups = groups, .key_width = 32, .value_width = 16, .levels = 9},
                dtype, 400);
}

TEST_F(CudaSsd, ClampsLevels) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {1, 4, 7, 8, 9, 10, 14})
            compare({.offsets = packed({1300}), .levels = levels, .decay = 0.02}, dtype, 500);
}

TEST_F(CudaSsd, SurvivesStrongDecay) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {0, 10}) {
            compare({.offsets = packed({600}), .levels = levels, .strong = 1.0}, dtype, 600);
            compare({.offsets = packed({600}), .levels = levels, .strong = 0.1}, dtype, 601);
            compare({.offsets = packed({600}), .levels = levels, .decay = 0}, dtype, 602);
        }
}

TEST_F(CudaSsd, ReadsAndWritesSlices) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t padding : {8, 3})
            for (std::int64_t shift : {0, 1, 2})
                compare({.offsets = packed({300}),
                         .key_width = 16,
                         .value_width = 16,
                         .levels = 9,
                         .padding = padding,
                         .shift = shift},
                        dtype, 700);
}

TEST_F(CudaSsd, RepeatsBitForBit) {
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {0, 12}) {
            const Case c{
                .offsets = packed({1500, 1, 700}), .heads = 8, .key_width = 128, .value_width = 64, .levels = levels};
            const Arrays a = random_arrays(c, dtype, 800);
            const auto first = on_gpu(c, a, dtype).bytes;
            for (int repeat = 0; repeat < 3; ++repeat) EXPECT_TRUE(first == on_gpu(c, a, dtype).bytes);
            EXPECT_TRUE(first == on_gpu(c, a, dtype, true).bytes) << "with the states that forward has kept";
        }
}

// The pipelined kernels against the general ones, which are those that take rows without 16-byte alignment.
TEST_F(CudaSsd, PipelinedKernelsAreAsExactAsTheGeneralOnes) {
    if (!test::is_hopper(cuda_device_name(0))) GTEST_SKIP() << "this GPU has the general kernels alone";
    const std::pair<const char*, Case> cases[] = {
        {"1000 tokens", {.offsets = packed({1000}), .decay = 0.02}},
        {"2048 tokens", {.offsets = packed({2048}), .decay = 0.02}},
        {"packed", {.offsets = packed({1, 300, 63, 700, 512, 130}), .decay = 0.02}},
        {"strong decay", {.offsets = packed({1000}), .decay = 0.1, .strong = 0.1}},
    };
    for (std::int64_t levels : {std::int64_t{0}, levels_of(2048)}) {
        test::AccuracyTable table(levels > 0 ? "log_linear_ssd" : "ssd");
        for (const auto& [name, base] : cases) {
            Case c = base;
            c.heads = 24, c.key_width = 128, c.value_width = 64, c.levels = levels;
            const Arrays a = random_arrays(c, DType::bfloat16, 1000);
            const Results exact = on_cpu(c, a), fast = on_gpu(c, a, DType::bfloat16);
            c.shift = 1;
            const Results slow = on_gpu(c, a, DType::bfloat16);
            table.add(name, "o", fast.o, slow.o, exact.o);
            table.add(name, "dq", fast.dq, slow.dq, exact.dq);
            table.add(name, "dk", fast.dk, slow.dk, exact.dk);
            table.add(name, "dv", fast.dv, slow.dv, exact.dv);
            table.add(name, "dg", fast.dg, slow.dg, exact.dg);
            if (levels > 0) table.add(name, "dlevel_scales", fast.dlevel_scales, slow.dlevel_scales, exact.dlevel_scales);
        }
        table.check();
    }
}

// Tokens one, two, or many a call, with carried state, against the whole sequence at once.
TEST_F(CudaSsd, RecurrentMatchesTheWhole) {
    constexpr std::int64_t batch = 2, length = 70;
    for (auto dtype : {DType::float32, DType::bfloat16})
        for (std::int64_t levels : {0, 3, 8}) {
            SCOPED_TRACE(fmt::format("{}, levels {}", name_of(dtype), levels));
            const Case c{.offsets = packed({length, length}),
                         .heads = 4,
                         .groups = 2,
                         .key_width = 24,
                         .value_width = 40,
                         .levels = levels};
            const Arrays a = random_arrays(c, dtype, 900);
            const auto expected = on_cpu(c, a).o;
            const std::int64_t capacity = levels > 0 ? levels_of(length) : 1;
            const auto state = to_gpu(
                std::vector<double>(static_cast<std::size_t>(capacity * batch * c.heads * c.key_width * c.value_width)),
                DType::float32);
            std::vector<double> actual(expected.size());
            std::int64_t position = 0;
            for (std::int64_t count : {1, 1, 2, 3, 1, 8, 17, 1, 31, 5}) {
                const auto cut = [&](const std::vector<double>& values, std::int64_t width) {
                    std::vector<double> out;
                    for (std::int64_t row = 0; row < batch; ++row) {
                        const auto begin = values.begin() + (row * length + position) * width;
                        out.insert(out.end(), begin, begin + count * width);
                    }
                    return out;
                };
                const auto q = to_gpu(cut(a.q, a.key_stride), dtype), k = to_gpu(cut(a.k, a.key_stride), dtype);
                const auto v = to_gpu(cut(a.v, a.value_stride), dtype);
                const auto g = to_gpu(cut(a.g, c.heads), DType::float32);
                const auto scales = to_gpu(cut(a.level_scales, c.heads * levels), DType::float32);
                const std::int64_t width = c.heads * c.value_width;
                const auto o = to_gpu(std::vector<double>(static_cast<std::size_t>(batch * count * width), NAN), dtype);
                kernels::SsdRecurrent args{};
                set_sizes(args, c, a, dtype);
                args.batch = batch;
                args.length = count;
                args.position = position;
                args.level_capacity = capacity;
                args.q = q.data();
                args.k = k.data();
                args.v = v.data();
                args.g = g.data();
                args.level_scales = levels > 0 ? scales.data() : nullptr;
                args.o = o.data();
                args.state = state.data();
                kernels::ssd_recurrent(Exec{gpu, detail::cuda_stream(0)}, args);
                const auto out = to_host(o, static_cast<std::size_t>(batch * count * width), dtype);
                for (std::int64_t row = 0; row < batch; ++row)
                    std::copy_n(out.begin() + row * count * width, count * width,
                                actual.begin() + (row * length + position) * width);
                position += count;
            }
            ASSERT_EQ(position, length);
            EXPECT_LT(test::rms_ratio(actual, expected), dtype == DType::float32 ? 1e-5 : 0.01);
        }
}

}  // namespace
}  // namespace fenwick
