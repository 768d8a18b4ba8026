// Which of several sources each row of a run comes from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fenwick::data {

// Spreads an endless sequence of rows over sources at given rates, as evenly as whole rows can be spread: of the first n
// rows, every source has its share within a few rows, for every n. A pure function of the row's number, in O(sources).
class Mixture {
public:
    // Of the sum of all rates; what has less would never have its turn.
    static constexpr double least_rate = 1e-9;

    // Relative rates, each above 0. Throws Error for one below the least.
    explicit Mixture(const std::vector<double>& rates);

    struct Place {
        std::size_t source;
        std::int64_t row;  // rows of this source before
    };
    Place at(std::int64_t row) const;                         // row >= 0
    std::vector<std::int64_t> counts(std::int64_t rows) const;  // of each source among the first `rows`

private:
    std::vector<std::uint64_t> rates_;  // of each source among those that stand from it on, in units of 2^-32
};

}  // namespace fenwick::data
