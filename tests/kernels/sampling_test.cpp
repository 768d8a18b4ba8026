// Sampling on the CPU; model/decoder_test.cpp compares a GPU's draws with these.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "kernels/decode.h"

namespace fenwick {
namespace {

// Draw number n from logits of one row.
std::int32_t draw(const std::vector<float>& logits, kernels::Sample options, std::int64_t n = 0) {
    std::int32_t id = 0, drawn = 0;
    std::int64_t position = n;
    options.rows = 1;
    options.vocab = static_cast<std::int64_t>(logits.size());
    if (options.vocabulary == 0) options.vocabulary = options.vocab;
    options.logits = logits.data();
    options.position = &position;
    options.ids = &id;
    options.drawn = &drawn;
    kernels::sample({}, options);
    EXPECT_EQ(position, n + 1);
    EXPECT_EQ(id, std::max(drawn, 0));
    return drawn;
}

TEST(Sample, ZeroTemperatureTakesTheLikeliest) {
    EXPECT_EQ(draw({0.5f, 2.0f, 1.0f}, {.temperature = 0}), 1);
    EXPECT_EQ(draw({0.5f, 2.0f, 2.0f}, {.temperature = 0}), 1);
    EXPECT_EQ(draw({0.5f, 2.0f, 1.0f}, {.vocabulary = 1, .temperature = 0}), 0);
}

TEST(Sample, FollowsTheSoftmaxAtTheTemperature) {
    const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 2.0f};
    for (const double temperature : {0.5, 1.0, 2.0}) {
        double total = 0;
        for (float x : logits) total += std::exp(x / temperature);
        std::vector<int> counts(4);
        constexpr int draws = 40000;
        for (int i = 0; i < draws; ++i)
            ++counts[static_cast<std::size_t>(draw(logits, {.temperature = temperature, .seed = 7}, i))];
        for (std::size_t i = 0; i < 4; ++i) {
            const double p = std::exp(logits[i] / temperature) / total;
            EXPECT_NEAR(static_cast<double>(counts[i]) / draws, p, 5 * std::sqrt(p * (1 - p) / draws));
        }
    }
}

TEST(Sample, TopKAndTopPCutTheTail) {
    const std::vector<float> logits = {std::log(0.5f), std::log(0.1f), std::log(0.3f), std::log(0.1f)};
    std::map<std::int32_t, int> seen;
    for (int i = 0; i < 2000; ++i) ++seen[draw(logits, {.top_k = 2, .seed = 3}, i)];
    EXPECT_EQ(seen.size(), 2u);
    EXPECT_NEAR(seen[0] / 2000.0, 0.5 / 0.8, 0.06);
    seen.clear();
    for (int i = 0; i < 2000; ++i)
        ++seen[draw(logits, {.top_p = 0.85, .seed = 3}, i)];  // 0.5 + 0.3 < 0.85 <= 0.5 + 0.3 + 0.1
    EXPECT_EQ(seen.size(), 3u);
    EXPECT_EQ(seen.count(3), 0u) << "ties go to the lower id";
    seen.clear();
    for (int i = 0; i < 500; ++i) ++seen[draw(logits, {.top_p = 0.4, .seed = 3}, i)];
    EXPECT_EQ(seen.size(), 1u) << "at least one token stays";
}

TEST(Sample, RowsDrawApartAndSeedsDiffer) {
    const std::vector<float> logits(2 * 50);
    std::vector<std::int32_t> ids(2), drawn(2 * 3);
    std::map<std::uint64_t, std::vector<std::int32_t>> first;
    for (const std::uint64_t seed : {1u, 2u}) {
        std::int64_t position = 10;
        for (int n = 0; n < 3; ++n)
            kernels::sample({}, {.rows = 2,
                                 .vocab = 50,
                                 .vocabulary = 50,
                                 .seed = seed,
                                 .first_position = 10,
                                 .logits = logits.data(),
                                 .position = &position,
                                 .ids = ids.data(),
                                 .drawn = drawn.data(),
                                 .history = 3});
        EXPECT_EQ(position, 13);
        EXPECT_EQ(ids, (std::vector<std::int32_t>{drawn[4], drawn[5]}));
        first[seed] = drawn;
    }
    EXPECT_NE(first[1], first[2]);
    EXPECT_FALSE(first[1][0] == first[1][1] && first[1][2] == first[1][3] && first[1][4] == first[1][5]);
}

TEST(Sample, MarksLogitsThatAreNotFinite) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (const double temperature : {0.0, 1.0})
        for (const float bad : {NAN, infinity}) EXPECT_EQ(draw({bad, 1.0f}, {.temperature = temperature}), -1);
    EXPECT_EQ(draw({-infinity, 1.0f}, {}), 1);  // a token that cannot be
}

}  // namespace
}  // namespace fenwick
