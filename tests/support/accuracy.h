// The errors of a fast version of an operator beside those of the slow version that it replaces, in a table.
#pragma once

#include <gtest/gtest.h>

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "support/random_tensor.h"

namespace fenwick::test {

// Both versions round intermediate results to bfloat16, but not at the same places or in the same order, so their errors are
// two draws of like size. Where every element has errors of its own, the ratio of their RMS varies by less than 1 %. The
// gradient of g, however, adds up the errors of a chunk, and a few hundred chunks and heads are all it has: over other
// random inputs the ratio over all cases has a standard deviation of 1.5 %, that of one case 5 %. The bounds are three of
// those; one more rounding of an operand shows as 10 % and more.
constexpr double noise_of_all = 1.05, noise_of_a_case = 1.15;

// Whether this GPU has both versions: the fast ones are Hopper's. For the name that the driver gives.
inline bool is_hopper(std::string_view name) { return name.find("H100") != name.npos || name.find("H200") != name.npos; }

class AccuracyTable {
public:
    explicit AccuracyTable(std::string op) : op_(std::move(op)) {
        fmt::print("| {} | | fast | slow | ratio |\n|---|---|---|---|---|\n", op_);
    }

    // Errors of one result by RMS, relative to `exact`.
    void add(const std::string& name, const std::string& result, const std::vector<double>& fast,
             const std::vector<double>& slow, const std::vector<double>& exact) {
        const double fast_error = rms_ratio(fast, exact), slow_error = rms_ratio(slow, exact);
        line(name, result, fast_error, slow_error);
        EXPECT_LE(fast_error, noise_of_a_case * slow_error) << op_ << ", " << name << ", " << result;
        differ_ = differ_ || fast != slow;
        Squares& sums = all_[result];
        sums.fast += fast_error * fast_error;
        sums.slow += slow_error * slow_error;
        sums.count += 1;
    }

    // Over all cases, each with the same weight.
    void check() const {
        EXPECT_TRUE(differ_) << op_ << ": the same version twice";
        for (const auto& [result, sums] : all_) {
            const double fast_error = std::sqrt(sums.fast / sums.count), slow_error = std::sqrt(sums.slow / sums.count);
            line("all", result, fast_error, slow_error);
            EXPECT_LE(fast_error, noise_of_all * slow_error) << op_ << ", " << result;
        }
    }

private:
    struct Squares {
        double fast = 0, slow = 0, count = 0;
    };
    static void line(const std::string& name, const std::string& result, double fast, double slow) {
        fmt::print("| {} | {} | {:.3e} | {:.3e} | {:.3f} |\n", name, result, fast, slow, fast / slow);
    }

    std::string op_;
    std::map<std::string, Squares> all_;
    bool differ_ = false;
};

}  // namespace fenwick::test
