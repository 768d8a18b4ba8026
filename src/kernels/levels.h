// The Fenwick partition of the past (Guo et al., arXiv 2506.04761), as bit arithmetic: no table is ever needed.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define FENWICK_HOST_DEVICE __host__ __device__
#else
#define FENWICK_HOST_DEVICE
#endif

namespace fenwick::kernels {

// Number of bits of x: bit_width(0) = 0, bit_width(1) = 1, bit_width(5) = 3.
FENWICK_HOST_DEVICE constexpr int bit_width64(std::uint64_t x) {
#if defined(__CUDA_ARCH__)
    return 64 - __clzll(static_cast<long long>(x));
#else
    return static_cast<int>(std::bit_width(x));
#endif
}

// The bucket in which token t sees token s <= t (both from the document's start): 0 on the diagonal, level l >= 1 is the
// bucket of 2^(l-1) tokens below the highest bit in which t and s differ.
FENWICK_HOST_DEVICE constexpr int level_of(std::uint64_t t, std::uint64_t s) { return bit_width64(t ^ s); }

// How many levels a document of `length` >= 1 tokens uses. Level scales of fewer levels are clamped: every further level
// uses the last one, index min(level, levels - 1).
FENWICK_HOST_DEVICE constexpr int levels_needed(std::uint64_t length) { return bit_width64(length - 1) + 1; }

}  // namespace fenwick::kernels
