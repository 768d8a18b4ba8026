// Counter-based random numbers: a value is a pure function of (seed, stream, index), so any element can be drawn
// by any thread or process and the whole state is three integers.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32 with 10 rounds.
#pragma once

#include <array>
#include <cstdint>

namespace fenwick {

// Philox4x32-10: 4 random words of 32 bits for a 128-bit counter and a 64-bit key.
constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t product0 = std::uint64_t{0xD2511F53} * counter[0];
        const std::uint64_t product1 = std::uint64_t{0xCD9E8D57} * counter[2];
        counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
                   static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
        key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
    }
    return counter;
}

// A stream of random numbers. Satisfies UniformRandomBitGenerator (64 bits a call); copyable plain state.
class Random {
public:
    using result_type = std::uint64_t;

    explicit Random(std::uint64_t seed, std::uint64_t stream = 0) : seed_(seed), stream_(stream) {}

    static constexpr result_type min() { return 0; }
    static constexpr result_type max() { return ~std::uint64_t{0}; }
    result_type operator()() { return bits(seed_, stream_, index_++); }

    // 64 random bits as a pure function of its arguments.
    static constexpr std::uint64_t bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
        const auto words = philox({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                                   static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)},
                                  {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
        return (std::uint64_t{words[1]} << 32) | words[0];
    }

    double uniform() { return static_cast<double>((*this)() >> 11) * 0x1.0p-53; }  // [0, 1)
    double uniform(double low, double high) { return low + (high - low) * uniform(); }
    double normal();                            // mean 0, variance 1 (Box-Muller; takes two draws)
    std::uint64_t below(std::uint64_t bound);   // uniform in [0, bound), without bias; bound >= 1

    std::uint64_t seed() const { return seed_; }
    std::uint64_t stream() const { return stream_; }
    std::uint64_t index() const { return index_; }
    void seek(std::uint64_t index) { index_ = index; }

private:
    std::uint64_t seed_, stream_, index_ = 0;
};

// A pseudo-random permutation of [0, count) as a pure function: position -> element, without a table
// (a balanced Feistel network on the next even power of two, walking cycles until the value is in range).
// Used for shuffling epochs: key it by (seed, epoch).
class Permutation {
public:
    Permutation(std::uint64_t count, std::uint64_t seed, std::uint64_t stream);
    std::uint64_t operator()(std::uint64_t position) const;  // position < count
    std::uint64_t size() const { return count_; }

private:
    std::uint64_t count_, seed_, stream_;
    int half_bits_;
};

}  // namespace fenwick
