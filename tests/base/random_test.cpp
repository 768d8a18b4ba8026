#include "base/random.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/error.h"

namespace fenwick {
namespace {

using testing::ElementsAre;

// Known answers that come with the authors' Random123 library (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
    EXPECT_THAT(philox({0, 0, 0, 0}, {0, 0}), ElementsAre(0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u));
    EXPECT_THAT(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), ElementsAre(0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu));
    EXPECT_THAT(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
                ElementsAre(0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u));
}

TEST(Random, IsAPureFunctionOfSeedStreamAndIndex) {
    Random a(1, 2), b(1, 2), other_stream(1, 3), other_seed(2, 2);
    std::vector<std::uint64_t> first, second;
    for (int i = 0; i < 10; ++i) {
        first.push_back(a());
        second.push_back(b());
    }
    EXPECT_EQ(first, second);
    EXPECT_EQ(first[7], Random::bits(1, 2, 7));
    a.seek(7);
    EXPECT_EQ(a(), first[7]);
    EXPECT_EQ(a.index(), 8u);
    EXPECT_NE(other_stream(), first[0]);
    EXPECT_NE(other_seed(), first[0]);
}

TEST(Random, UniformAndNormalHaveTheirMoments) {
    Random random(3);
    const int count = 200000;
    double sum = 0, square = 0, normal_sum = 0, normal_square = 0, normal_fourth = 0;
    for (int i = 0; i < count; ++i) {
        const double u = random.uniform(), n = random.normal();
        ASSERT_GE(u, 0.0);
        ASSERT_LT(u, 1.0);
        sum += u;
        square += u * u;
        normal_sum += n;
        normal_square += n * n;
        normal_fourth += n * n * n * n;
    }
    EXPECT_NEAR(sum / count, 0.5, 0.003);          // 5 standard errors
    EXPECT_NEAR(square / count, 1.0 / 3, 0.004);
    EXPECT_NEAR(normal_sum / count, 0.0, 0.012);
    EXPECT_NEAR(normal_square / count, 1.0, 0.016);
    EXPECT_NEAR(normal_fourth / count, 3.0, 0.12);
    const double between = random.uniform(-3, -2);
    EXPECT_TRUE(between >= -3 && between < -2);
}

TEST(Random, BelowIsInRangeAndEven) {
    Random random(4);
    for (const std::uint64_t bound : {1u, 2u, 3u, 7u, 10u}) {
        std::vector<int> counts(bound, 0);
        for (int i = 0; i < 50000; ++i) ++counts.at(random.below(bound));
        for (const int count : counts) EXPECT_NEAR(count, 50000.0 / bound, 6 * std::sqrt(50000.0 / bound));
    }
    // With plain modulo the lower third of this range would come up twice as often as the rest.
    const std::uint64_t bound = std::uint64_t{3} << 62;
    int low = 0;
    for (int i = 0; i < 30000; ++i) {
        const auto value = random.below(bound);
        ASSERT_LT(value, bound);
        low += value < (std::uint64_t{1} << 62);
    }
    EXPECT_NEAR(low, 10000, 500);
    EXPECT_THROW(random.below(0), Error);
}

TEST(Permutation, IsABijectionOfAnySize) {
    for (const std::uint64_t size : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 15u, 16u, 17u, 63u, 64u, 65u, 100u, 255u, 256u, 257u, 1000u, 4095u, 4097u}) {
        for (std::uint64_t stream = 0; stream < 3; ++stream) {
            const Permutation permutation(size, 9, stream);
            EXPECT_EQ(permutation.size(), size);
            std::vector<char> seen(size, 0);
            for (std::uint64_t i = 0; i < size; ++i) {
                const auto element = permutation(i);
                ASSERT_LT(element, size);
                ASSERT_EQ(seen[element]++, 0) << "size " << size;
            }
            EXPECT_THROW(permutation(size), Error);
        }
    }
    const Permutation large(std::uint64_t{1} << 40, 1, 0);
    EXPECT_LT(large(12345), std::uint64_t{1} << 40);
}

TEST(Permutation, DependsOnSeedAndStreamAndLeavesFewInPlace) {
    const std::uint64_t size = 1000;
    const Permutation a(size, 1, 0), b(size, 1, 1), c(size, 2, 0);
    int same_ab = 0, same_ac = 0, fixed = 0, neighbours = 0;
    for (std::uint64_t i = 0; i < size; ++i) {
        same_ab += a(i) == b(i);
        same_ac += a(i) == c(i);
        fixed += a(i) == i;
        neighbours += i > 0 && a(i) == a(i - 1) + 1;
    }
    // Each is about 1 for permutations drawn evenly.
    EXPECT_LT(same_ab, 10);
    EXPECT_LT(same_ac, 10);
    EXPECT_LT(fixed, 10);
    EXPECT_LT(neighbours, 10);
}

}  // namespace
}  // namespace fenwick
