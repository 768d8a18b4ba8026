// AdamW over a model's parameters.
#pragma once

#include <string>
#include <vector>

#include "model/language_model.h"
#include "train/config.h"

namespace fenwick::train {

// Owns the moments, and the buffer in which all gradients gather: one array, each parameter's gradient a slice of it,
// so that zeroing, the norm and the reduction over processes are each one pass over contiguous memory.
class Optimizer {
public:
    // Lays the parameters' gradients into the buffer and zeroes everything. All parameters have one dtype.
    Optimizer(std::vector<model::Parameter> parameters, const OptimizerConfig& config);

    const std::vector<model::Parameter>& parameters() const { return parameters_; }
    const Tensor& gradients() const { return gradients_; }  // [padded count], padding is zero
    // Views with the parameter's shape.
    Tensor first_moment(std::size_t parameter) const { return slice(first_moments_, parameter); }
    Tensor second_moment(std::size_t parameter) const { return slice(second_moments_, parameter); }

    void zero_gradients();
    // Sum of squares of all gradients, float64 [1], on their device, which the host need not wait for yet.
    Tensor gradient_squares() const;
    double gradient_norm() const;  // its root; not finite if any gradient is not
    // Update number `step` (from 1) at `learning_rate`, with gradients clipped to the configured norm.
    void update(std::int64_t step, double learning_rate, double gradient_norm);

    // "weights of X" or "gradient of X" for the first tensor that is not finite, "" if all are. Gradients are searched in
    // the order in which backward computed them (last layer first), so that the name is where it began.
    std::string first_not_finite() const;

private:
    Tensor slice(const Tensor& flat, std::size_t parameter) const;

    std::vector<model::Parameter> parameters_;
    OptimizerConfig config_;
    std::vector<std::int64_t> offsets_;  // of each parameter in the flat arrays
    Tensor gradients_, first_moments_, second_moments_;
};

}  // namespace fenwick::train
