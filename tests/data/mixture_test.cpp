#include "data/mixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "base/random.h"
#include "support/temporary_folder.h"

namespace fenwick::data {
namespace {

using test::error_of;
using testing::HasSubstr;

const std::vector<std::vector<double>> cases{{1}, {1, 1}, {3, 1}, {0.7, 0.2, 0.1}, {1e-6, 1}, {1, 1e-6}, {5, 1, 1, 1, 1, 1, 1},
                                             {1e9, 3e8, 4}};

TEST(Mixture, EveryPrefixHasItsShares) {
    for (const auto& rates : cases) {
        const Mixture mixture(rates);
        const double sum = std::accumulate(rates.begin(), rates.end(), 0.0);
        std::vector<std::int64_t> counts(rates.size(), 0);
        for (std::int64_t row = 0; row < 5000; ++row) {
            EXPECT_EQ(mixture.counts(row), counts);
            const auto place = mixture.at(row);
            EXPECT_EQ(place.row, counts[place.source]++);
            for (std::size_t i = 0; i < rates.size(); ++i)
                ASSERT_LT(std::abs(static_cast<double>(counts[i]) - rates[i] / sum * static_cast<double>(row + 1)), 2.0)
                    << "source " << i << " of " << testing::PrintToString(rates) << " after row " << row;
        }
    }
}

// Far out nothing is lost to rounding: a row belongs to one source, and counts go on from row to row.
TEST(Mixture, IsExactAtAnyDistance) {
    Random random(3);
    for (const auto& rates : cases) {
        const Mixture mixture(rates);
        for (const int bits : {33, 45, 55, 61}) {
            std::int64_t row = static_cast<std::int64_t>(random.below(std::uint64_t{1} << bits));
            auto counts = mixture.counts(row);
            EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), row);
            for (int i = 0; i < 100; ++i, ++row) {
                const auto place = mixture.at(row);
                EXPECT_EQ(place.row, counts[place.source]++);
                EXPECT_EQ(mixture.counts(row + 1), counts);
            }
        }
    }
}

TEST(Mixture, RefusesRatesThatAreNone) {
    EXPECT_THAT(error_of([] { Mixture({}); }), HasSubstr("no sources"));
    for (const double rate : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()})
        EXPECT_THAT(error_of([&] { Mixture({1, rate}); }), HasSubstr("numbers above 0 are needed"));
    EXPECT_THAT(error_of([] { Mixture({1, 1e-10}); }), HasSubstr("less than 1e-09"));
}

}  // namespace
}  // namespace fenwick::data
