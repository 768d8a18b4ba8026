// Attention on the GPU against the CPU in float64, in float32 and bfloat16.
#include <gtest/gtest.h>

#include "base/memory_cuda.h"
#include "kernels/softmax_attention.h"
#include "support/random_tensor.h"
#include "support/sampling.h"

namespace fenwick {
namespace {

using test::random_tensor;
using test::rms_ratio;

constexpr Device gpu{DeviceType::cuda, 0};

struct Case {
    std::vector<std::int64_t> offsets;
    std::int64_t heads, groups, width;
    std::int64_t gap = 0;  // unused columns between tokens: strided inputs and gradients
};

struct Results {
    Tensor o, lse, dq, dk, dv;
};

Results run(const Case& c, DType dtype, Device device, const std::vector<Tensor>& inputs) {
    const std::int64_t tokens = c.offsets.back();
    // q, k, v and d_o rounded to `dtype` as the GPU sees them, then in the arithmetic asked for
    const auto place = [&](const Tensor& x, std::int64_t gap) {
        Tensor wide = Tensor::full({tokens, x.columns() + gap}, 0.0, dtype, device).narrow_columns(0, x.columns());
        wide.copy_from(x.to(dtype).to(device));
        return wide;
    };
    const Tensor q = place(inputs[0], c.gap), k = place(inputs[1], c.gap), v = place(inputs[2], c.gap), d_o = place(inputs[3], 0);
    const auto empty = [&](const Tensor& like) {
        return Tensor::full({tokens, like.row_stride()}, NAN, dtype, device).narrow_columns(0, like.columns());
    };
    Results r{Tensor::full({tokens, c.heads * c.width}, NAN, dtype, device),
              Tensor::full({tokens, c.heads}, NAN, gate_dtype(dtype), device), empty(q), empty(k), empty(v)};
    const kernels::Sequences sequences{static_cast<std::int64_t>(c.offsets.size()) - 1, c.offsets.data()};
    kernels::softmax_attention_forward(exec_of(device), {.dtype = dtype, .sequences = sequences, .heads = c.heads, .groups = c.groups,
                                                         .width = c.width, .q_stride = q.row_stride(), .k_stride = k.row_stride(),
                                                         .v_stride = v.row_stride(), .q = q.data(), .k = k.data(), .v = v.data(),
                                                         .o = r.o.data(), .lse = r.lse.data()});
    kernels::softmax_attention_backward(
        exec_of(device), {.dtype = dtype, .sequences = sequences, .heads = c.heads, .groups = c.groups, .width = c.width,
                          .q_stride = q.row_stride(), .k_stride = k.row_stride(), .v_stride = v.row_stride(),
                          .dq_stride = r.dq.row_stride(), .dk_stride = r.dk.row_stride(), .dv_stride = r.dv.row_stride(),
                          .q = q.data(), .k = k.data(), .v = v.data(), .o = r.o.data(), .lse = r.lse.data(), .d_o = d_o.data(),
                          .dq = r.dq.data(), .dk = r.dk.data(), .dv = r.dv.data()});
    return r;
}

// RMS error over the RMS of the truth; the RMS error itself where the truth is 0 but for rounding (dq and dk of a document
// of one token). Inputs have deviation 1.
double error_of(const Tensor& actual, const Tensor& truth) {
    const auto a = actual.to_vector<double>(), b = truth.to_vector<double>();
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < b.size(); ++i) {
        error += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    const double count = static_cast<double>(b.size());
    if (std::isnan(error)) return INFINITY;
    return norm / count < 1e-20 ? std::sqrt(error / count) : std::sqrt(error / norm);
}

void compare(const Case& c, DType dtype, double output_limit, double gradient_limit) {
    if (!test::sampled()) return;
    const std::int64_t tokens = c.offsets.back();
    std::vector<Tensor> inputs;
    for (auto columns : {c.heads * c.width, c.groups * c.width, c.groups * c.width, c.heads * c.width})
        inputs.push_back(random_tensor({tokens, columns}, inputs.size() + 1).to(dtype).to(DType::float64));
    const Results truth = run(c, DType::float64, cpu_device, inputs), first = run(c, dtype, gpu, inputs),
                  second = run(c, dtype, gpu, inputs);
    SCOPED_TRACE(fmt::format("{} heads {} groups {} width {} offsets {} gap {}", name_of(dtype), c.heads, c.groups, c.width,
                             to_string(c.offsets), c.gap));
    EXPECT_LT(error_of(first.o, truth.o), output_limit);
    EXPECT_LT(error_of(first.lse, truth.lse), output_limit);
    EXPECT_LT(error_of(first.dq, truth.dq), gradient_limit);
    EXPECT_LT(error_of(first.dk, truth.dk), gradient_limit);
    EXPECT_LT(error_of(first.dv, truth.dv), gradient_limit);
    for (const auto member : {&Results::o, &Results::lse, &Results::dq, &Results::dk, &Results::dv})
        EXPECT_EQ((first.*member).to_vector<double>(), (second.*member).to_vector<double>()) << "two runs differ";
}

const std::vector<Case> cases = {
    {{0, 1}, 1, 1, 64},
    {{0, 2}, 2, 1, 64},
    {{0, 63}, 2, 2, 64},
    {{0, 64, 128}, 2, 1, 96},
    {{0, 65}, 1, 1, 128},
    {{0, 127}, 1, 1, 128},
    {{0, 128}, 2, 2, 96},
    {{0, 129}, 4, 2, 128, 8},
    {{0, 300}, 4, 1, 64, 16},
    {{0, 385, 770}, 2, 2, 128},
    {{0, 1, 2, 130, 131, 400, 401}, 4, 2, 96, 8},
    {{0, 200}, 2, 1, 8},
    {{0, 77}, 3, 3, 40},
    {{0, 150}, 2, 2, 72, 8},
    {{0, 33, 100}, 2, 1, 24, 3},   // rows not aligned to 16 bytes: the simple kernels in every dtype
    {{0, 90}, 1, 1, 160},          // wider than the tensor-core kernels
};

class CudaSoftmaxAttention : public testing::Test {
protected:
    void SetUp() override {
        if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU here";
    }
};

TEST_F(CudaSoftmaxAttention, Float32MatchesTheCpu) {
    for (const auto& c : cases) compare(c, DType::float32, 1e-5, 1e-4);
}

TEST_F(CudaSoftmaxAttention, Bfloat16MatchesTheCpu) {
    for (const auto& c : cases) compare(c, DType::bfloat16, 0.01, 0.02);
}

TEST_F(CudaSoftmaxAttention, CachedMatchesTheLastRows) {
    const Case c{{0, 100}, 4, 2, 64};
    std::vector<Tensor> inputs;
    for (auto columns : {c.heads * c.width, c.groups * c.width, c.groups * c.width, c.heads * c.width})
        inputs.push_back(random_tensor({100, columns}, inputs.size() + 1));
    const Tensor truth = run(c, DType::float64, cpu_device, inputs).o;
    const Tensor q = inputs[0].to(DType::float32).to(gpu).narrow_rows(97, 100), k = inputs[1].to(DType::float32).to(gpu),
                 v = inputs[2].to(DType::float32).to(gpu);
    Tensor o = Tensor::full({3, c.heads * c.width}, NAN, DType::float32, gpu);
    kernels::softmax_attention_cached(exec_of(gpu), {.dtype = DType::float32, .batch = 1, .length = 3, .position = 97, .capacity = 100,
                                                     .heads = c.heads, .groups = c.groups, .width = c.width,
                                                     .q_stride = q.row_stride(), .q = q.data(), .k_cache = k.data(),
                                                     .v_cache = v.data(), .o = o.data()});
    EXPECT_LT(rms_ratio(o, truth.narrow_rows(97, 100)), 1e-5);
}

}  // namespace
}  // namespace fenwick
