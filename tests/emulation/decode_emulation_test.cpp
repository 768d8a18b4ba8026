// The CUDA kernels of decoding, run thread by thread on the CPU, against kernels/cpu/decode.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "base/random.h"
#include "cuda_emulation.h"
#include "kernels/decode.h"

namespace fenwick {
namespace {

using kernels::DecodeInput;
using kernels::DecodeOutput;
using Floats = std::vector<float>;

Floats random_floats(std::int64_t count, std::uint64_t seed, double deviation = 1, double mean = 0) {
    Random random(seed);
    Floats values(static_cast<std::size_t>(count));
    for (float& x : values) x = static_cast<float>(mean + deviation * random.normal());
    return values;
}
// 16-byte aligned, as device memory is.
template <class T>
struct Aligned {
    explicit Aligned(std::size_t count) : memory(count * sizeof(T) + 16) {}
    T* data() { return reinterpret_cast<T*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 15) / 16 * 16); }
    std::vector<unsigned char> memory;
};
struct Array : Aligned<float> {
    explicit Array(const Floats& values) : Aligned(values.size()), count(values.size()) {
        std::copy(values.begin(), values.end(), data());
    }
    Floats values() { return Floats(data(), data() + count); }
    std::size_t count;
};
void expect_near(const Floats& found, const Floats& expected, double bound, const char* what) {
    ASSERT_EQ(found.size(), expected.size());
    double scale = 0;
    for (const float x : expected) scale = std::max(scale, std::abs(static_cast<double>(x)));
    for (std::size_t i = 0; i < found.size(); ++i)
        ASSERT_LE(std::abs(found[i] - expected[i]), bound * (1 + scale)) << what << " " << i;
}

struct ProjectionCase {
    DType dtype;
    std::int64_t rows, in, groups;
    DecodeInput input;
    bool pairs;
};

void check_projection(const ProjectionCase& c) {
    SCOPED_TRACE(testing::Message() << name_of(c.dtype) << " rows " << c.rows << " in " << c.in << " groups " << c.groups
                                    << " input " << static_cast<int>(c.input) << " pairs " << c.pairs);
    const std::int64_t widths[] = {37, 20, 6, 18, 6, 5};
    std::int64_t columns = 0;
    for (const auto width : widths) columns += width;
    if (c.pairs) columns = 74;
    const std::int64_t norm_width = c.input == DecodeInput::gate_after ? c.in / c.groups : c.in;
    Floats weight = random_floats(columns * c.in, 1, 0.1);
    Aligned<std::uint16_t> rounded(weight.size());
    for (std::size_t i = 0; i < weight.size(); ++i) {
        if (c.dtype != DType::bfloat16) continue;
        rounded.data()[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(weight[i]) >> 16);
        weight[i] = std::bit_cast<float>(static_cast<std::uint32_t>(rounded.data()[i]) << 16);
    }
    Array matrix(weight), x(random_floats(c.rows * c.in, 2)), gate(random_floats(c.rows * c.in, 3)),
        norm(random_floats(norm_width, 4, 0.2, 1));
    Array taps(random_floats(20 * 4, 5)), bias(random_floats(20, 6)), step_bias(random_floats(6, 7)),
        a_log(random_floats(6, 8)), level(random_floats(18, 9));
    std::vector<Floats> results[2];
    for (const bool emulated : {false, true}) {
        Array out(random_floats(c.rows * columns, 10)), tail(random_floats(c.rows * 3 * 20, 11)),
            log_decay(Floats(static_cast<std::size_t>(c.rows * 6)));
        kernels::DecodeProjection args{.dtype = c.dtype,
                                       .rows = c.rows,
                                       .in = c.in,
                                       .weight = matrix.data(),
                                       .input_kind = c.input,
                                       .groups = c.groups,
                                       .norm_width = norm_width,
                                       .input = x.data(),
                                       .gate = gate.data(),
                                       .norm_weight = norm.data()};
        float* to = out.data();
        const auto part = [&](kernels::DecodeColumns columns_of_part) {
            columns_of_part.out = to;
            to += columns_of_part.columns * c.rows;
            args.part[args.parts++] = columns_of_part;
        };
        if (c.pairs) {
            part({.kind = DecodeOutput::swiglu, .columns = 74});
        } else {
            part({.columns = 37});
            part({.kind = DecodeOutput::convolution,
                  .columns = 20,
                  .width = 4,
                  .taps = taps.data(),
                  .bias = bias.data(),
                  .tail = tail.data()});
            part({.kind = DecodeOutput::decay,
                  .columns = 6,
                  .step_bias = step_bias.data(),
                  .a_log = a_log.data(),
                  .log_decay = log_decay.data()});
            part({.kind = DecodeOutput::level_scales, .columns = 18, .level_weight = level.data()});
            part({.kind = DecodeOutput::sigmoid, .columns = 6});
            part({.kind = DecodeOutput::add, .columns = 5});
        }
        if (emulated) {
            if (c.dtype == DType::bfloat16) args.weight = rounded.data();
            kernels::cuda::decode_projection({}, args);
        } else {
            args.dtype = DType::float32;
            kernels::cpu::decode_projection({}, args);
        }
        results[emulated] = {out.values(), tail.values(), log_decay.values()};
    }
    for (std::size_t i = 0; i < 3; ++i) expect_near(results[1][i], results[0][i], 3e-6, "result");
}

TEST(DecodeEmulation, Projections) {
    for (const DType dtype : {DType::float32, DType::bfloat16})
        for (const bool pairs : {false, true}) {
            check_projection({dtype, 1, 256, 1, DecodeInput::norm, pairs});
            check_projection({dtype, 5, 512, 4, DecodeInput::gate_after, pairs});
            check_projection({dtype, 2, 2048, 1, DecodeInput::gate_before, pairs});
            check_projection({dtype, 3, 96, 1, DecodeInput::plain, pairs});
            check_projection({dtype, 11, 64, 2, DecodeInput::gate_before, pairs});
            check_projection({dtype, 2, 144, 3, DecodeInput::gate_after, pairs});
            check_projection({dtype, 1, 4096, 1, DecodeInput::norm, pairs});
            check_projection({dtype, 2, 51, 3, DecodeInput::gate_after, pairs});  // no whole vectors
            check_projection({dtype, 1, 52, 1, DecodeInput::gate_before, pairs});
        }
}

// Tokens one after another on both, from an empty state or a full one.
void check_ssd(std::int64_t K, std::int64_t V, std::int64_t levels, std::int64_t first, std::int64_t tokens) {
    SCOPED_TRACE(testing::Message() << "K " << K << " V " << V << " levels " << levels << " first " << first);
    const std::int64_t rows = 2, heads = 4, groups = 2, capacity = levels > 0 ? 8 : 1, most = kernels::decode_most_levels;
    const std::int64_t stride = heads * V + 2 * groups * K;
    Floats factors(static_cast<std::size_t>(2 * most * rows * heads));
    if (first > 0)
        for (std::int64_t l = 0; l < capacity; ++l)
            if (l == 0 || ((first - 1) >> (l - 1) & 1) != 0)
                std::fill_n(factors.begin() + ((first & 1) * most + l) * rows * heads, rows * heads, 1.0f);
    Array states[2] = {Array(random_floats(capacity * rows * heads * K * V, 1)),
                       Array(random_floats(capacity * rows * heads * K * V, 1))};
    Array all_factors[2] = {Array(factors), Array(factors)};
    Array last_k[2] = {Array(Floats(2 * rows * groups * K)), Array(Floats(2 * rows * groups * K))};
    Array last_v[2] = {Array(Floats(2 * rows * heads * V)), Array(Floats(2 * rows * heads * V))};
    Array skip(random_floats(heads, 2));
    for (std::int64_t t = first; t < first + tokens; ++t) {
        Array mixed(random_floats(rows * stride, 10 + t)), step(random_floats(rows * heads, 11 + t)),
            scales(random_floats(rows * heads * std::max<std::int64_t>(levels, 1), 12 + t));
        Array log_decay(random_floats(rows * heads, 13 + t, 0.1, -0.5));
        Array o[2] = {Array(Floats(rows * heads * V, NAN)), Array(Floats(rows * heads * V, NAN))};
        for (const int emulated : {0, 1}) {
            const kernels::DecodeSsd args{.rows = rows,
                                          .heads = heads,
                                          .groups = groups,
                                          .key_width = K,
                                          .value_width = V,
                                          .levels = levels,
                                          .level_capacity = capacity,
                                          .position = &t,
                                          .stride = stride,
                                          .u = mixed.data(),
                                          .k = mixed.data() + heads * V,
                                          .q = mixed.data() + heads * V + groups * K,
                                          .step = step.data(),
                                          .log_decay = log_decay.data(),
                                          .level_scales = levels > 0 ? scales.data() : nullptr,
                                          .skip = skip.data(),
                                          .state = states[emulated].data(),
                                          .factors = all_factors[emulated].data(),
                                          .last_k = last_k[emulated].data(),
                                          .last_v = last_v[emulated].data(),
                                          .o = o[emulated].data()};
            emulated ? kernels::cuda::decode_ssd({}, args) : kernels::cpu::decode_ssd({}, args);
        }
        expect_near(o[1].values(), o[0].values(), 3e-6, "o");
        expect_near(all_factors[1].values(), all_factors[0].values(), 1e-6, "factors");
        expect_near(last_k[1].values(), last_k[0].values(), 1e-6, "last_k");
        expect_near(last_v[1].values(), last_v[0].values(), 1e-6, "last_v");
    }
    expect_near(states[1].values(), states[0].values(), 3e-6, "state");
}

TEST(DecodeEmulation, Ssd) {
    check_ssd(16, 16, 8, 0, 20);
    check_ssd(128, 64, 8, 61, 5);
    check_ssd(16, 16, 3, 30, 6);  // clamped
    check_ssd(9, 10, 8, 3, 6);
    check_ssd(32, 20, 0, 5, 3);
}

void check_delta(std::int64_t K, std::int64_t V, std::int64_t levels, std::int64_t first, std::int64_t tokens) {
    SCOPED_TRACE(testing::Message() << "K " << K << " V " << V << " levels " << levels << " first " << first);
    const std::int64_t rows = 2, heads = 2, capacity = levels > 0 ? 8 : 1;
    Array states[2] = {Array(random_floats(capacity * rows * heads * K * V, 1)),
                       Array(random_floats(capacity * rows * heads * K * V, 1))};
    Array last_k[2] = {Array(Floats(2 * rows * heads * K)), Array(Floats(2 * rows * heads * K))};
    Array last_u[2] = {Array(Floats(2 * rows * heads * V)), Array(Floats(2 * rows * heads * V))};
    for (std::int64_t t = first; t < first + tokens; ++t) {
        Array q(random_floats(rows * heads * K, 10 + t)), k(random_floats(rows * heads * K, 11 + t)),
            v(random_floats(rows * heads * V, 12 + t));
        Array scales(random_floats(rows * heads * std::max<std::int64_t>(levels, 1), 13 + t)),
            log_decay(random_floats(rows * heads, 14 + t, 0.1, -0.5));
        Array beta(random_floats(rows * heads, 15 + t, 0.1, 0.7));
        Array o[2] = {Array(Floats(rows * heads * V, NAN)), Array(Floats(rows * heads * V, NAN))};
        for (const int emulated : {0, 1}) {
            const kernels::DecodeGatedDeltaRule args{.rows = rows,
                                                     .heads = heads,
                                                     .key_width = K,
                                                     .value_width = V,
                                                     .levels = levels,
                                                     .level_capacity = capacity,
                                                     .first_position = first,
                                                     .position = &t,
                                                     .q_scale = 0.3,
                                                     .q = q.data(),
                                                     .k = k.data(),
                                                     .v = v.data(),
                                                     .log_decay = log_decay.data(),
                                                     .beta = beta.data(),
                                                     .level_scales = levels > 0 ? scales.data() : nullptr,
                                                     .state = states[emulated].data(),
                                                     .last_k = last_k[emulated].data(),
                                                     .last_u = last_u[emulated].data(),
                                                     .o = o[emulated].data()};
            emulated ? kernels::cuda::decode_gated_delta_rule({}, args) : kernels::cpu::decode_gated_delta_rule({}, args);
        }
        expect_near(o[1].values(), o[0].values(), 3e-6, "o");
        expect_near(last_k[1].values(), last_k[0].values(), 1e-6, "last_k");
        expect_near(last_u[1].values(), last_u[0].values(), 1e-6, "last_u");
    }
    expect_near(states[1].values(), states[0].values(), 3e-6, "state");
}

TEST(DecodeEmulation, GatedDeltaRule) {
    check_delta(16, 16, 8, 0, 20);
    check_delta(192, 32, 8, 62, 3);  // three keys a thread
    check_delta(256, 8, 8, 59, 3);   // more: read twice
    check_delta(16, 16, 3, 30, 6);
    check_delta(10, 15, 8, 3, 6);
    check_delta(64, 24, 0, 5, 3);
}

TEST(DecodeEmulation, Attention) {
    for (const auto& [width, groups] : {std::pair<std::int64_t, std::int64_t>{96, 4}, {8, 2}, {10, 1}, {128, 2}}) {
        const std::int64_t rows = 2, heads = 4, capacity = 300;
        Floats cache = random_floats(rows * capacity * groups * width, 1),
               cached_values = random_floats(rows * capacity * groups * width, 2);
        Array keys[2] = {Array(cache), Array(cache)}, values[2] = {Array(cached_values), Array(cached_values)};
        std::vector<double> turns;
        for (std::int64_t i = 0; i < width / 2; ++i)
            turns.push_back(std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(width)) / 6.283185307179586);
        Floats parts(rows * heads * kernels::decode_attention_parts * (width + 2), NAN);
        std::vector<int> arrived(rows * heads);
        for (const std::int64_t t : {0, 1, 63, 64, 200, 299}) {
            Array q(random_floats(rows * heads * width, 10 + t)), k(random_floats(rows * groups * width, 11 + t)),
                v(random_floats(rows * groups * width, 12 + t));
            Array o[2] = {Array(Floats(rows * heads * width, NAN)), Array(Floats(rows * heads * width, NAN))};
            for (const int emulated : {0, 1}) {
                const kernels::DecodeAttention args{.dtype = DType::float32,
                                                    .rows = rows,
                                                    .heads = heads,
                                                    .groups = groups,
                                                    .width = width,
                                                    .capacity = capacity,
                                                    .position = &t,
                                                    .turns = turns.data(),
                                                    .q = q.data(),
                                                    .k = k.data(),
                                                    .v = v.data(),
                                                    .k_cache = keys[emulated].data(),
                                                    .v_cache = values[emulated].data(),
                                                    .o = o[emulated].data(),
                                                    .parts = parts.data(),
                                                    .arrived = arrived.data()};
                emulated ? kernels::cuda::decode_attention({}, args) : kernels::cpu::decode_attention({}, args);
            }
            expect_near(o[1].values(), o[0].values(), 3e-6, "o");
            expect_near(keys[1].values(), keys[0].values(), 1e-6, "keys");
            expect_near(values[1].values(), values[0].values(), 0, "values");
            EXPECT_EQ(arrived, std::vector<int>(rows * heads));
        }
    }
}

}  // namespace
}  // namespace fenwick
