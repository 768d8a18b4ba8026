// A chain of Bresenham lines: the first source takes its rows out of the sequence at even distances, the next one takes its
// own out of what is left, and so on. A line is integer arithmetic, so that every count is exact at any distance.
#include "data/mixture.h"

#include <cmath>

#include "base/error.h"

namespace fenwick::data {
namespace {

constexpr int fraction_bits = 32;
constexpr std::uint64_t one = std::uint64_t{1} << fraction_bits;

// round(rows * rate); grows by 0 or 1 a row because rate <= 1.
std::int64_t taken(std::int64_t rows, std::uint64_t rate) {
    const auto n = static_cast<std::uint64_t>(rows);
    return static_cast<std::int64_t>((n >> fraction_bits) * rate + (((n & (one - 1)) * rate + one / 2) >> fraction_bits));
}

}  // namespace

Mixture::Mixture(const std::vector<double>& rates) {
    FENWICK_CHECK(!rates.empty(), "[mixture] no sources are given");
    double sum = 0;
    for (const double rate : rates) {
        FENWICK_CHECK(std::isfinite(rate) && rate > 0, "[mixture] a rate is {}; numbers above 0 are needed", rate);
        sum += rate;
    }
    for (const double rate : rates)
        FENWICK_CHECK(rate >= least_rate * sum, "[mixture] a rate is {} of {} in all, less than {}", rate, sum, least_rate);
    double left = sum;
    for (std::size_t i = 0; i < rates.size(); ++i) {
        const double share = i + 1 == rates.size() ? 1.0 : std::fmin(rates[i] / left, 1.0);
        rates_.push_back(static_cast<std::uint64_t>(std::llround(share * static_cast<double>(one))));
        left -= rates[i];
    }
}

Mixture::Place Mixture::at(std::int64_t row) const {
    for (std::size_t i = 0; i + 1 < rates_.size(); ++i) {
        const std::int64_t before = taken(row, rates_[i]);
        if (taken(row + 1, rates_[i]) > before) return {i, before};
        row -= before;
    }
    return {rates_.size() - 1, row};
}

std::vector<std::int64_t> Mixture::counts(std::int64_t rows) const {
    std::vector<std::int64_t> found;
    for (const std::uint64_t rate : rates_) {
        found.push_back(taken(rows, rate));
        rows -= found.back();
    }
    return found;
}

}  // namespace fenwick::data
