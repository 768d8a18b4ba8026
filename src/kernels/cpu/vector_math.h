// Functions that CPU loops call on every element, written so that the compiler vectorises the loop around them: float
// versions are branch-free polynomials, double versions call <cmath>. Also sums that run in independent lanes.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace fenwick::kernels::cpu {

// exp(x), at most 2 units in the last place from the true value (denormal results included); 0 for x below -103.98,
// infinity above 88.73, NaN for NaN. x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial is a minimax fit of
// (exp(r) - 1 - r) / r^2.
inline float fast_exp(float x) {
    x = x < -105.0f ? -105.0f : x;
    x = x > 105.0f ? 105.0f : x;
    constexpr float round_to_int = 12582912.0f;  // 1.5 * 2^23: adding it leaves n in the low bits
    const float shifted = x * 1.44269504f + round_to_int;
    const float n = shifted - round_to_int;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first product is exact
    float p = 1.3814320554956794e-3f;
    p = p * r + 8.36885068565607e-3f;
    p = p * r + 4.1668400168418884e-2f;
    p = p * r + 0.1666651964187622f;
    p = p * r + 0.4999999403953552f;
    p = (p * r) * r + r + 1.0f;
    // 2^n in two factors, so that neither leaves the range of normal numbers (unsigned: NaN may put anything in n).
    const std::uint32_t whole = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(round_to_int);
    const std::uint32_t half = static_cast<std::uint32_t>(static_cast<std::int32_t>(whole) >> 1);
    return p * std::bit_cast<float>((half + 127u) << 23) * std::bit_cast<float>((whole - half + 127u) << 23);
}
inline double fast_exp(double x) { return std::exp(x); }

// log(1 + e) for 0 <= e <= 1, a few units in the last place relative to the result, also for tiny e.
// log(1 + e) = 2 atanh(s), s = e / (2 + e) <= 1/3; the polynomial in s^2 is a minimax fit.
inline float fast_log1p(float e) {
    const float s = e / (2.0f + e), s2 = s * s;
    float p = 0.28011987f;
    p = p * s2 + 0.28001806f;
    p = p * s2 + 0.40021527f;
    p = p * s2 + 0.6666642f;
    return s * (p * s2 + 2.0f);
}
inline double fast_log1p(double e) { return std::log1p(e); }

template <class T>
inline T sigmoid_of(T x) {
    return T{1} / (T{1} + fast_exp(-x));
}
template <class T>
inline T silu_of(T x) {
    return x * sigmoid_of(x);
}
// d silu / dx, given s = sigmoid(x)
template <class T>
inline T silu_slope(T x, T s) {
    return s * (T{1} + x * (T{1} - s));
}
// log(1 + exp(x))
template <class T>
inline T softplus_of(T x) {
    const T magnitude = x < T{0} ? -x : x;
    return (x > T{0} ? x : T{0}) + fast_log1p(fast_exp(-magnitude));
}

// out[i] (+)= term(i), i < count. `out` must not overlap what term reads, other than at the same i.
template <class T, class Term>
inline void assign(T* __restrict out, std::int64_t count, bool accumulate, Term&& term) {
    if (accumulate)
        for (std::int64_t i = 0; i < count; ++i) out[i] += term(i);
    else
        for (std::int64_t i = 0; i < count; ++i) out[i] = term(i);
}

// Sum of term(i), i < count, in 16 lanes that are added at the end: the order is fixed, and the loop vectorises although
// floating-point addition may not be reordered.
template <class T, class Term>
inline T lane_sum(std::int64_t count, Term&& term) {
    constexpr std::int64_t lanes = 16;
    const std::int64_t whole = count / lanes * lanes, rest = count % lanes;
    T sums[lanes] = {};
    for (std::int64_t i = 0; i < whole; i += lanes)
        for (std::int64_t lane = 0; lane < lanes; ++lane) sums[lane] += term(i + lane);
    for (std::int64_t lane = 0; lane < rest; ++lane) sums[lane] += term(whole + lane);
    for (std::int64_t half = lanes / 2; half > 0; half /= 2)
        for (std::int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    return sums[0];
}
template <class T>
inline T lane_max(std::int64_t count, const T* x) {  // count >= 1
    constexpr std::int64_t lanes = 16;
    const std::int64_t whole = count / lanes * lanes, rest = count % lanes;
    T largest[lanes];
    for (auto& value : largest) value = x[0];
    for (std::int64_t i = 0; i < whole; i += lanes)
        for (std::int64_t lane = 0; lane < lanes; ++lane)
            largest[lane] = x[i + lane] > largest[lane] ? x[i + lane] : largest[lane];
    for (std::int64_t lane = 0; lane < rest; ++lane)
        largest[lane] = x[whole + lane] > largest[lane] ? x[whole + lane] : largest[lane];
    for (auto value : largest) largest[0] = value > largest[0] ? value : largest[0];
    return largest[0];
}

}  // namespace fenwick::kernels::cpu
