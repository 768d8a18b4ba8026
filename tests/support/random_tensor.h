// Random inputs and error measures that all tests share.
#pragma once

#include <cmath>
#include <vector>

#include "autograd/tensor.h"
#include "base/random.h"

namespace fenwick::test {

// Normal numbers, float64 unless asked otherwise.
inline Tensor random_tensor(Shape shape, std::uint64_t seed, DType dtype = DType::float64, double deviation = 1.0,
                            double mean = 0.0) {
    Random random(seed, 99);
    std::vector<double> values(static_cast<std::size_t>(count_of(shape)));
    for (auto& value : values) value = mean + deviation * random.normal();
    return Tensor::from(values, std::move(shape)).to(dtype);
}

// rms(actual - expected) / rms(expected); infinity where actual has a NaN. Two zero vectors have ratio 0.
inline double rms_ratio(const std::vector<double>& actual, const std::vector<double>& expected) {
    if (actual.size() != expected.size()) return INFINITY;
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < actual.size(); ++i) {
        error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    if (std::isnan(error)) return INFINITY;
    return error == 0 ? 0 : std::sqrt(error / std::max(norm, 1e-300));
}
inline double rms_ratio(const Tensor& actual, const Tensor& expected) {
    return actual.shape() == expected.shape() ? rms_ratio(actual.to_vector<double>(), expected.to_vector<double>()) : INFINITY;
}

}  // namespace fenwick::test
