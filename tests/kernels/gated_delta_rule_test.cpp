#include "kernels/gated_delta_rule.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/parallel.h"
#include "support/random_tensor.h"
#include "support/reference_gated_delta_rule.h"

namespace fenwick {
namespace {

using test::ReferenceGatedDeltaRule;
using test::rms_ratio;
using Doubles = std::vector<double>;

template <class T>
std::vector<T> converted(const Doubles& values) {
    return {values.begin(), values.end()};
}
template <class T>
Doubles doubles(const std::vector<T>& values) {
    return {values.begin(), values.end()};
}

// Outputs and gradients by name, in double.
struct Results {
    Doubles o, dq, dk, dv, dg, dbeta, dlevel_scales;
};
constexpr std::pair<const char*, Doubles Results::*> all_results[] = {
    {"o", &Results::o}, {"dq", &Results::dq}, {"dk", &Results::dk}, {"dv", &Results::dv},
    {"dg", &Results::dg}, {"dbeta", &Results::dbeta}, {"dlevel_scales", &Results::dlevel_scales}};

// Forward and (with d_o) backward of the kernel. Outputs begin as NaN.
template <class T>
Results run_kernel(const ReferenceGatedDeltaRule& x, const Doubles& d_o, std::int64_t chunk_size) {
    const auto q = converted<T>(x.q), k = converted<T>(x.k), v = converted<T>(x.v), g = converted<T>(x.g);
    const auto beta = converted<T>(x.beta), scales = converted<T>(x.level_scales), d_out = converted<T>(d_o);
    const auto unwritten = [](const std::vector<T>& like) {
        return std::vector<T>(like.size(), std::numeric_limits<T>::quiet_NaN());
    };
    auto o = unwritten(v), dq = unwritten(q), dk = unwritten(k), dv = unwritten(v), dg = unwritten(g);
    auto dbeta = unwritten(beta), dscales = unwritten(scales);
    const std::int64_t keys = x.heads * x.key_width, values = x.heads * x.value_width;
    const kernels::Sequences sequences{static_cast<std::int64_t>(x.offsets.size()) - 1, x.offsets.data()};
    kernels::gated_delta_rule_forward(
        {cpu_device}, {.dtype = dtype_of<T>, .sequences = sequences, .heads = x.heads, .key_width = x.key_width,
                       .value_width = x.value_width, .levels = x.levels, .chunk_size = chunk_size,
                       .q_stride = keys, .k_stride = keys, .v_stride = values, .q = q.data(), .k = k.data(), .v = v.data(),
                       .g = g.data(), .beta = beta.data(), .level_scales = x.levels > 0 ? scales.data() : nullptr,
                       .o = o.data()});
    if (d_o.empty()) return {.o = doubles(o), .dq = {}, .dk = {}, .dv = {}, .dg = {}, .dbeta = {}, .dlevel_scales = {}};
    kernels::gated_delta_rule_backward(
        {cpu_device}, {.dtype = dtype_of<T>, .sequences = sequences, .heads = x.heads, .key_width = x.key_width,
                       .value_width = x.value_width, .levels = x.levels, .chunk_size = chunk_size,
                       .q_stride = keys, .k_stride = keys, .v_stride = values,
                       .dq_stride = keys, .dk_stride = keys, .dv_stride = values,
                       .q = q.data(), .k = k.data(), .v = v.data(), .g = g.data(), .beta = beta.data(),
                       .level_scales = x.levels > 0 ? scales.data() : nullptr, .d_o = d_out.data(),
                       .dq = dq.data(), .dk = dk.data(), .dv = dv.data(), .dg = dg.data(), .dbeta = dbeta.data(),
                       .dlevel_scales = x.levels > 0 ? dscales.data() : nullptr});
    return {doubles(o), doubles(dq), doubles(dk), doubles(dv), doubles(dg), doubles(dbeta), doubles(dscales)};
}

Doubles random_like(const Doubles& like, std::uint64_t seed) {
    return test::random_tensor({static_cast<std::int64_t>(like.size())}, seed).to_vector<double>();
}

Results run_reference(ReferenceGatedDeltaRule x, const Doubles& d_o) {
    x.backward(d_o);
    return {x.o, x.dq, x.dk, x.dv, x.dg, x.dbeta, x.dlevel_scales};
}

// rms(actual - expected) <= tolerance * (rms(expected) + floor). The floor is for gradients that vanish exactly or nearly
// (dg of a one-token document), where differences of larger numbers leave rounding.
void expect_near(const Results& actual, const Results& expected, double tolerance, double floor = 1e-3) {
    for (const auto& [name, member] : all_results) {
        const Doubles &a = actual.*member, &e = expected.*member;
        ASSERT_EQ(a.size(), e.size()) << name;
        if (a.empty()) continue;
        double error = 0, norm = 0;
        for (std::size_t i = 0; i < a.size(); ++i) error += (a[i] - e[i]) * (a[i] - e[i]), norm += e[i] * e[i];
        const auto count = static_cast<double>(a.size());
        EXPECT_LT(std::sqrt(error / count), tolerance * (std::sqrt(norm / count) + floor)) << name;
    }
}

void expect_follows_definition(const ReferenceGatedDeltaRule& x, std::int64_t chunk_size, bool single = true) {
    const Doubles d_o = random_like(x.v, 5);
    const Results expected = run_reference(x, d_o);
    expect_near(run_kernel<double>(x, d_o, chunk_size), expected, 1e-11);
    if (single) expect_near(run_kernel<float>(x, d_o, chunk_size), expected, 2e-5, 0.1);
}

TEST(GatedDeltaRule, ReferenceGradientsAreThoseOfItsOutput) {
    auto x = ReferenceGatedDeltaRule::random({0, 9, 10}, 2, 3, 2, 3, 1, 0.3);
    const Doubles d_o = random_like(x.v, 2);
    x.backward(d_o);
    const auto objective = [&] {
        x.forward();
        double sum = 0;
        for (std::size_t i = 0; i < d_o.size(); ++i) sum += x.o[i] * d_o[i];
        return sum;
    };
    using Reference = ReferenceGatedDeltaRule;
    const std::pair<Doubles Reference::*, Doubles Reference::*> pairs[] = {
        {&Reference::q, &Reference::dq}, {&Reference::k, &Reference::dk}, {&Reference::v, &Reference::dv},
        {&Reference::g, &Reference::dg}, {&Reference::beta, &Reference::dbeta},
        {&Reference::level_scales, &Reference::dlevel_scales}};
    for (const auto& [value, gradient] : pairs)
        for (std::size_t i = 0; i < (x.*value).size(); ++i) {
            const double kept = (x.*value)[i], step = 1e-5;
            (x.*value)[i] = kept + step;
            const double above = objective();
            (x.*value)[i] = kept - step;
            const double below = objective();
            (x.*value)[i] = kept;
            EXPECT_NEAR((x.*gradient)[i], (above - below) / (2 * step), 1e-7);
        }
}

// By hand: two tokens, one column.
TEST(GatedDeltaRule, TwoTokensByHand) {
    ReferenceGatedDeltaRule x;
    x.levels = 2, x.offsets = {0, 2};
    x.q = {2, 3}, x.k = {0.5, 1}, x.v = {4, 5}, x.g = {-7, std::log(0.5)}, x.beta = {1, 0.25};
    x.level_scales = {10, 99, 100, 1000};
    // S_1 = 0.5 * 4 = 2, o_1 = 10 * 2 * 2. Then 2 becomes level 1 and decays to 0.5 (1 - 0.25) 2 = 0.75; level 0 is 1.25.
    const Doubles expected = {40, 3 * (100 * 1.25 + 1000 * 0.75)};
    EXPECT_LT(rms_ratio(run_kernel<double>(x, {}, 64).o, expected), 1e-14);
    EXPECT_LT(rms_ratio(run_kernel<double>(x, {}, 1).o, expected), 1e-14);
    x.forward();
    EXPECT_LT(rms_ratio(x.o, expected), 1e-14);
}

TEST(GatedDeltaRule, FollowsTheDefinitionAtAllLengths) {
    std::uint64_t seed = 10;
    for (std::int64_t length : {1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129}) {
        SCOPED_TRACE(length);
        for (bool log_linear : {false, true}) {
            const std::int64_t levels = log_linear ? kernels::levels_needed(static_cast<std::uint64_t>(length)) : 0;
            const auto x = ReferenceGatedDeltaRule::random({0, length}, 2, 5, 3, levels, ++seed);
            expect_follows_definition(x, 8);
            expect_follows_definition(x, 64, false);
        }
    }
}

TEST(GatedDeltaRule, FollowsTheDefinitionOverRandomShapes) {
    Random numbers(3, 1);
    const auto between = [&](std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(numbers.uniform() * static_cast<double>(high - low + 1));
    };
    for (std::uint64_t i = 0; i < 40; ++i) {
        const std::int64_t length = between(1, 150), heads = between(1, 3);
        const std::int64_t key_width = between(1, 20), value_width = between(1, 80);
        const std::int64_t levels = between(0, 9), chunk_size = std::int64_t{1} << between(0, 6);
        const double decay = i % 4 == 0 ? 0.0 : i % 4 == 1 ? 3.0 : 0.05;
        SCOPED_TRACE(fmt::format("{} tokens, {} heads, widths {} and {}, {} levels, chunks of {}, decay {}", length, heads,
                                 key_width, value_width, levels, chunk_size, decay));
        expect_follows_definition(
            ReferenceGatedDeltaRule::random({0, length}, heads, key_width, value_width, levels, 100 + i, decay), chunk_size);
    }
}

// 1 token, and documents of several segments: chunks of 4 tokens make 17 and more chunks.
TEST(GatedDeltaRule, PackedDocumentsAreDocumentsByThemselves) {
    for (std::int64_t levels : {0, 9, 4}) {
        const auto x = ReferenceGatedDeltaRule::random({0, 1, 2, 67, 70, 71, 140, 371, 372}, 2, 6, 4, levels, 21);
        for (std::int64_t chunk_size : {4, 16, 64}) expect_follows_definition(x, chunk_size);
    }
}

TEST(GatedDeltaRule, ManySegmentsOfChunks) {
    // 300 chunks of 2 tokens: segments of 32 chunks.
    for (std::int64_t levels : {0, 3, 11})
        expect_follows_definition(ReferenceGatedDeltaRule::random({0, 599}, 1, 4, 3, levels, 31, 0.01), 2);
}

TEST(GatedDeltaRule, ChunkSizeDoesNotMatter) {
    const auto x = ReferenceGatedDeltaRule::random({0, 401, 701}, 2, 24, 40, 10, 41, 0.02);
    const Doubles d_o = random_like(x.v, 5);
    const Results one = run_kernel<double>(x, d_o, 256);
    for (std::int64_t chunk_size : {1, 2, 16, 32, 64, 128, 512}) {
        SCOPED_TRACE(chunk_size);
        expect_near(run_kernel<double>(x, d_o, chunk_size), one, 1e-11);
    }
}

TEST(GatedDeltaRule, StrongDecayStaysFinite) {
    for (double decay : {5.0, 30.0, 80.0}) {
        SCOPED_TRACE(decay);
        auto x = ReferenceGatedDeltaRule::random({0, 150}, 2, 8, 6, 9, 51, decay);
        expect_follows_definition(x, 32);
        for (std::size_t i = 0; i < x.g.size(); ++i) x.g[i] = i % 7 == 0 ? -decay : -1e-3;  // long memories between jumps
        expect_follows_definition(x, 32);
    }
    // Long keys grow the undecayed recurrence without bound; the decay keeps the true one small.
    auto x = ReferenceGatedDeltaRule::random({0, 150}, 1, 8, 6, 9, 52, 20.0);
    for (auto& key : x.k) key *= 10;
    for (auto& g : x.g) g = std::min(g, -6.0);
    expect_follows_definition(x, 64);
}

TEST(GatedDeltaRule, ScalesOfOneGiveTheLinearOperator) {
    auto x = ReferenceGatedDeltaRule::random({0, 333}, 2, 16, 8, 10, 61);
    std::fill(x.level_scales.begin(), x.level_scales.end(), 1.0);
    const Doubles d_o = random_like(x.v, 5);
    Results log_linear = run_kernel<double>(x, d_o, 16);
    log_linear.dlevel_scales.clear();
    x.levels = 0, x.level_scales.clear();
    expect_near(log_linear, run_kernel<double>(x, d_o, 16), 1e-12);
}

TEST(GatedDeltaRule, NoDecayIsTheDeltaRule) {
    const auto x = ReferenceGatedDeltaRule::random({0, 90}, 1, 6, 5, 0, 71, 0.0);
    Doubles state(30, 0.0), o;
    for (std::size_t t = 0; t < 90; ++t) {
        for (std::size_t j = 0; j < 5; ++j) {
            double held = 0, read = 0;
            for (std::size_t i = 0; i < 6; ++i) held += state[i * 5 + j] * x.k[t * 6 + i];
            for (std::size_t i = 0; i < 6; ++i) {
                state[i * 5 + j] += x.beta[t] * (x.v[t * 5 + j] - held) * x.k[t * 6 + i];
                read += state[i * 5 + j] * x.q[t * 6 + i];
            }
            o.push_back(read);
        }
    }
    EXPECT_LT(rms_ratio(run_kernel<double>(x, {}, 16).o, o), 1e-12);
}

TEST(GatedDeltaRule, ScalesTimesTheirGradientsAreOutputTimesItsGradient) {
    const auto x = ReferenceGatedDeltaRule::random({0, 77, 500}, 2, 12, 9, 6, 81);  // clamped
    const Doubles d_o = random_like(x.v, 5);
    const Results result = run_kernel<double>(x, d_o, 16);
    for (std::size_t row = 0; row < x.g.size(); ++row) {
        double scales = 0, output = 0;
        for (std::size_t l = 0; l < 6; ++l) scales += x.level_scales[row * 6 + l] * result.dlevel_scales[row * 6 + l];
        for (std::size_t j = 0; j < 9; ++j) output += result.o[row * 9 + j] * d_o[row * 9 + j];
        EXPECT_NEAR(scales, output, 1e-10);
    }
    // The second document's token 4 sees levels 0 and 3.
    for (std::size_t l : {1u, 2u, 4u, 5u}) EXPECT_EQ(result.dlevel_scales[(77 + 4) * 2 * 6 + l], 0.0);
}

TEST(GatedDeltaRule, ThreadsDoNotMatter) {
    const auto x = ReferenceGatedDeltaRule::random({0, 1, 300, 900}, 2, 16, 70, 8, 91);
    const Doubles d_o = random_like(x.v, 5);
    const int threads = num_threads();
    set_num_threads(1);
    const Results one = run_kernel<float>(x, d_o, 16);
    for (int count : {2, 5}) {
        set_num_threads(count);
        const Results many = run_kernel<float>(x, d_o, 16);
        for (const auto& [name, member] : all_results) EXPECT_EQ(many.*member, one.*member) << name;
    }
    set_num_threads(threads);
}

// Feeds `batch` equal-length rows to the recurrent kernel in calls of the given lengths.
template <class T>
Doubles run_recurrent(const ReferenceGatedDeltaRule& x, std::int64_t batch, const std::vector<std::int64_t>& calls) {
    const std::int64_t H = x.heads, K = x.key_width, V = x.value_width, L = x.levels, length = x.tokens() / batch;
    const std::int64_t capacity = L == 0 ? 1 : kernels::levels_needed(static_cast<std::uint64_t>(length));
    std::vector<T> state(static_cast<std::size_t>(capacity * batch * H * K * V), T{0});
    Doubles o(x.v.size());
    std::int64_t position = 0;
    for (std::int64_t count : calls) {
        const auto cut = [&](const Doubles& values, std::int64_t width) {  // tokens position .. of every row
            std::vector<T> part;
            for (std::int64_t b = 0; b < batch; ++b) {
                const auto begin = values.begin() + (b * length + position) * width;
                part.insert(part.end(), begin, begin + count * width);
            }
            return part;
        };
        const auto q = cut(x.q, H * K), k = cut(x.k, H * K), v = cut(x.v, H * V), g = cut(x.g, H), beta = cut(x.beta, H);
        const auto scales = cut(x.level_scales, H * L);
        std::vector<T> out(v.size(), std::numeric_limits<T>::quiet_NaN());
        kernels::gated_delta_rule_recurrent(
            {cpu_device}, {.dtype = dtype_of<T>, .batch = batch, .length = count, .position = position, .heads = H,
                           .key_width = K, .value_width = V, .levels = L, .level_capacity = capacity,
                           .q_stride = H * K, .k_stride = H * K, .v_stride = H * V,
                           .q = q.data(), .k = k.data(), .v = v.data(), .g = g.data(), .beta = beta.data(),
                           .level_scales = L > 0 ? scales.data() : nullptr, .o = out.data(), .state = state.data()});
        for (std::int64_t b = 0; b < batch; ++b)
            std::copy_n(out.begin() + b * count * H * V, count * H * V, o.begin() + (b * length + position) * H * V);
        position += count;
    }
    EXPECT_EQ(position, length);
    return o;
}

TEST(GatedDeltaRule, RecurrentFormInAnySplit) {
    for (std::int64_t levels : {0, 3, 8})
        for (std::int64_t batch : {1, 3}) {
            std::vector<std::int64_t> offsets;
            for (std::int64_t b = 0; b <= batch; ++b) offsets.push_back(b * 130);
            auto x = ReferenceGatedDeltaRule::random(offsets, 2, 6, 67, levels, 101);
            x.forward();
            const auto full = run_recurrent<double>(x, batch, {130});
            EXPECT_LT(rms_ratio(full, x.o), 1e-12);
            EXPECT_LT(rms_ratio(run_kernel<double>(x, {}, 16).o, x.o), 1e-12);
            EXPECT_EQ(run_recurrent<double>(x, batch, std::vector<std::int64_t>(130, 1)), full);
            EXPECT_EQ(run_recurrent<double>(x, batch, {1, 2, 1, 4, 55, 1, 64, 1, 1}), full);  // ends at 63, 64, 128, 129
            EXPECT_LT(rms_ratio(run_recurrent<float>(x, batch, {64, 64, 2}), x.o), 1e-5);
        }
}

}  // namespace
}  // namespace fenwick
