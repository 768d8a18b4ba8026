#include "base/random.h"

#include <bit>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace fenwick {

double Random::normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));  // 1 - u is in (0, 1]
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

std::uint64_t Random::below(std::uint64_t bound) {
    FENWICK_CHECK(bound >= 1, "[Random::below] bound is 0; at least 1 is needed");
    const std::uint64_t limit = max() - max() % bound;  // values at or above it would favour small results
    std::uint64_t value = (*this)();
    while (value >= limit) value = (*this)();
    return value % bound;
}

Permutation::Permutation(std::uint64_t count, std::uint64_t seed, std::uint64_t stream)
    : count_(count), seed_(seed), stream_(stream) {
    const int bits = count > 1 ? std::bit_width(count - 1) : 1;
    half_bits_ = (bits + 1) / 2;
}

std::uint64_t Permutation::operator()(std::uint64_t position) const {
    FENWICK_CHECK(position < count_, "[Permutation] position {} is outside [0, {})", position, count_);
    const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
    std::uint64_t value = position;
    do {
        std::uint64_t left = value >> half_bits_, right = value & mask;
        for (std::uint64_t round = 0; round < 6; ++round) {
            const std::uint64_t mixed = Random::bits(seed_, stream_, (round << 60) | right) & mask;
            const std::uint64_t next = left ^ mixed;
            left = right;
            right = next;
        }
        value = (left << half_bits_) | right;
    } while (value >= count_);
    return value;
}

}  // namespace fenwick
