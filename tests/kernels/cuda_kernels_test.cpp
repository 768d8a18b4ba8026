// Every CUDA kernel against the CPU's in float64, on the same arguments: float32 and bfloat16 activations, odd shapes,
// slices of wider matrices, packed documents, accumulation; twice, to the bit. Skipped where there is no GPU.
// CudaLarge: tensors of more than 2^31 elements. Under compute-sanitizer leave them out: --gtest_filter=-CudaLarge*
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "base/memory_cuda.h"
#include "kernels/causal_conv1d.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/gates.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"
#include "support/random_layout.h"
#include "support/random_tensor.h"
#include "support/sampling.h"

namespace fenwick::test {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};

struct Place {
    std::int64_t pad = 0;     // columns by which the matrix around it is wider
    bool accumulate = false;  // holds random values that the kernel adds to (or overwrites in place)
    bool gradient = false;    // held to the tolerance of gradients
};

// One execution of a test's body: makes the tensors it asks for, the same values in the same order in every run, and
// remembers what it writes.
class Trial {
public:
    // Values are rounded to `rounding` first, so that runs in different dtypes start from the same numbers.
    Trial(Device device, DType dtype, DType rounding) : device_(device), dtype_(dtype), rounding_(rounding) {}

    kernels::Exec exec() const { return exec_of(device_); }
    DType dtype() const { return dtype_; }
    DType gate() const { return gate_dtype(dtype_); }

    // Activations, and what is kept in gate dtype.
    Tensor input(Shape shape, std::int64_t pad = 0) { return fill(nan_tensor(std::move(shape), dtype_, pad), rounding_); }
    Tensor gates(Shape shape, double deviation = 1.0, double mean = 0.0) {
        return fill(nan_tensor(std::move(shape), gate(), 0), DType::float32, deviation, mean);
    }
    Tensor ids(std::int64_t count, std::int64_t below) {
        Random random(++seed_, 5);
        std::vector<std::int32_t> values(static_cast<std::size_t>(count));
        for (auto& value : values) value = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(below)));
        return Tensor::from(values, {count}, device_);
    }
    Tensor output(std::string name, Shape shape, Place place = {}) {
        return make_output(std::move(name), std::move(shape), dtype_, rounding_, place);
    }
    Tensor gate_output(std::string name, Shape shape, Place place = {}) {
        return make_output(std::move(name), std::move(shape), gate(), DType::float32, place);
    }
    Tensor total_output(std::string name, Place place = {}) {
        return make_output(std::move(name), {1}, DType::float64, DType::float64, place);
    }

    struct Output {
        std::string name;
        Tensor whole, tensor;
        Place place;
    };
    const std::vector<Output>& outputs() const { return outputs_; }

private:
    Tensor make_output(std::string name, Shape shape, DType dtype, DType rounding, Place place) {
        const std::int64_t width = shape.back();
        const Tensor whole = nan_tensor(std::move(shape), dtype, place.pad, true);
        Tensor tensor = whole.narrow_columns(place.pad / 2, width);
        if (place.accumulate) tensor = fill(tensor, rounding);
        outputs_.push_back({std::move(name), whole, tensor, place});
        return tensor;
    }
    // Every element 0xff.. (NaN), also around the slice; the slice alone unless `whole`.
    Tensor nan_tensor(Shape shape, DType dtype, std::int64_t pad, bool whole = false) const {
        const std::int64_t width = shape.back();
        shape.back() += pad;
        const Tensor tensor = Tensor::empty(std::move(shape), dtype, device_);
        fill_bytes(device_, tensor.data(), 0xff, tensor.bytes());
        return whole ? tensor : tensor.narrow_columns(pad / 2, width);
    }
    Tensor fill(Tensor tensor, DType rounding, double deviation = 1.0, double mean = 0.0) {
        const Tensor values = random_tensor(tensor.shape(), ++seed_, DType::float64, deviation, mean);
        tensor.copy_from(values.to(rounding).to(tensor.dtype()).to(device_));
        return tensor;
    }

    Device device_;
    DType dtype_, rounding_;
    std::uint64_t seed_ = 0;
    std::vector<Output> outputs_;
};

using Body = std::function<void(Trial&)>;

void compare(const std::string& what, const Body& body, double float32_tolerance = 2e-5) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
        if (!test::sampled()) continue;
        Trial expected(cpu_device, DType::float64, dtype), first(gpu, dtype, dtype), second(gpu, dtype, dtype);
        body(expected);
        body(first);
        body(second);
        ASSERT_EQ(first.outputs().size(), expected.outputs().size());
        for (std::size_t i = 0; i < expected.outputs().size(); ++i) {
            const auto& output = first.outputs()[i];
            SCOPED_TRACE(what + ", " + std::string(name_of(dtype)) + ", " + output.name + " " +
                         to_string(output.tensor.shape()));
            const double tolerance = dtype == DType::float32 ? float32_tolerance : output.place.gradient ? 0.02 : 0.01;
            const auto values = output.tensor.to_vector<double>();
            EXPECT_LT(rms_ratio(values, expected.outputs()[i].tensor.to_vector<double>()), tolerance);
            EXPECT_TRUE(values == second.outputs()[i].tensor.to_vector<double>()) << "a second run gave other bits";
            if (output.place.pad > 0) {
                const std::int64_t left = output.place.pad / 2, right = output.place.pad - left,
                                   all = output.whole.columns();
                for (const auto& border :
                     {output.whole.narrow_columns(0, left), output.whole.narrow_columns(all - right, right)})
                    for (double value : border.to_vector<double>())
                        ASSERT_TRUE(std::isnan(value)) << "written beside the slice";
            }
        }
    }
}

class CudaKernels : public testing::Test {
protected:
    void SetUp() override {
        if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
    }
};

struct Size {
    std::int64_t rows, columns, pad;
};
// Rows of whole 16-byte vectors and rows that are not; aligned and odd slices.
const std::vector<Size> sizes = {{1, 1, 0},    {3, 7, 0},   {5, 7, 3},      {33, 64, 0},
                                 {17, 72, 16}, {65, 72, 5}, {130, 264, 32}, {2, 1032, 8}};

std::string text(const Size& size) { return fmt::format("{}x{} pad {}", size.rows, size.columns, size.pad); }

// ---- memory ----------------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, CopiesBetweenHostAndDevice) {
    const Tensor host = random_tensor({37, 21}, 1, DType::float32);
    const Tensor device = host.to(gpu);
    EXPECT_EQ(device.to_vector<float>(), host.to_vector<float>());
    EXPECT_EQ(device.clone().to_vector<float>(), host.to_vector<float>());
    // Slices in both directions.
    EXPECT_EQ(device.narrow_columns(3, 5).to(cpu_device).to_vector<float>(), host.narrow_columns(3, 5).to_vector<float>());
    Tensor target = Tensor::zeros({37, 30}, DType::float32, gpu).narrow_columns(4, 21);
    target.copy_from(host);
    EXPECT_EQ(target.to_vector<float>(), host.to_vector<float>());
    for (DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::int32, DType::int64, DType::uint8})
        EXPECT_EQ(Tensor::full({1027}, 5, dtype, gpu).to_vector<double>(), std::vector<double>(1027, 5.0)) << name_of(dtype);
}

TEST_F(CudaKernels, CountsDeviceMemory) {
    const auto before = memory_stats(DeviceType::cuda).bytes[static_cast<std::size_t>(MemoryKind::data)];
    {
        const Buffer buffer(gpu, 1 << 20, MemoryKind::data);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0U);
        EXPECT_EQ(memory_stats(DeviceType::cuda).bytes[static_cast<std::size_t>(MemoryKind::data)], before + (1 << 20));
    }
    EXPECT_EQ(memory_stats(DeviceType::cuda).bytes[static_cast<std::size_t>(MemoryKind::data)], before);
    EXPECT_THROW(Buffer(gpu, std::size_t{1} << 50), Error);
    EXPECT_EQ(Tensor::full({3}, 2, DType::float32, gpu).to_vector<float>(), (std::vector<float>{2, 2, 2}));  // still works
}

TEST_F(CudaKernels, RefusesFloat64ByName) {
    const Tensor x = Tensor::zeros({4}, DType::float64, gpu);
    try {
        kernels::add(exec_of(x), {.dtype = DType::float64, .count = 4, .x = x.data(), .y = x.data(), .out = x.data()});
        FAIL();
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("[add] dtype float64"), std::string::npos) << error.what();
    }
}

// ---- element-wise ----------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, AxpbyOfEveryPairOfTypes) {
    for (DType x_dtype : {DType::float32, DType::float64, DType::bfloat16})
        for (DType y_dtype : {DType::float32, DType::float64, DType::bfloat16})
            for (const Size& size : {Size{1, 1, 0}, Size{3, 7, 2}, Size{19, 64, 8}, Size{9, 24, 0}, Size{7, 13, 0}})
                for (double b : {0.0, -0.75}) {
                    const Shape whole{size.rows, size.columns + size.pad};
                    const Tensor x = random_tensor(whole, 1, x_dtype).narrow_columns(size.pad / 2, size.columns);
                    const Tensor y = random_tensor(whole, 2, y_dtype);
                    const Tensor x_gpu = random_tensor(whole, 1, x_dtype).to(gpu).narrow_columns(size.pad / 2, size.columns);
                    const Tensor y_gpu = y.to(gpu);
                    for (const auto& [from, whole_to] : {std::pair{x, y}, std::pair{x_gpu, y_gpu}}) {
                        const Tensor to = whole_to.narrow_columns(size.pad / 2, size.columns);
                        kernels::axpby(exec_of(to), {.x_dtype = x_dtype,
                                                     .y_dtype = y_dtype,
                                                     .rows = size.rows,
                                                     .columns = size.columns,
                                                     .x_stride = from.row_stride(),
                                                     .y_stride = to.row_stride(),
                                                     .a = 1.5,
                                                     .b = b,
                                                     .x = from.data(),
                                                     .y = to.data()});
                    }
                    const double tolerance = y_dtype == DType::bfloat16                        ? 3e-3
                                             : x_dtype == DType::float64 && y_dtype == x_dtype ? 1e-15
                                                                                               : 1e-6;
                    EXPECT_LT(rms_ratio(y_gpu, y), tolerance)
                        << name_of(x_dtype) << " to " << name_of(y_dtype) << ", " << text(size) << ", b " << b;
                }
}

TEST_F(CudaKernels, Add) {
    for (std::int64_t count : {1, 7, 8, 1000, 4099})
        compare(fmt::format("{}", count), [=](Trial& trial) {
            const Tensor x = trial.input({count}), y = trial.input({count}), out = trial.output("out", {count});
            kernels::add(trial.exec(),
                         {.dtype = trial.dtype(), .count = count, .x = x.data(), .y = y.data(), .out = out.data()});
        });
}

TEST_F(CudaKernels, ScaleBy) {
    for (std::int64_t count : {1, 7, 8, 1000, 4099})
        for (const double factor : {1.0, -0.75})
            compare(fmt::format("{} times {}", count, factor), [=](Trial& trial) {
                const Tensor values = trial.output("values", {count}, {.accumulate = true});
                const Tensor scale = Tensor::full({1}, factor, trial.gate(), values.device());
                kernels::scale_by(trial.exec(), {.dtype = trial.dtype(), .count = count, .factor = scale.data(),
                                                 .values = values.data()});
            });
}

TEST_F(CudaKernels, ScaleHeadsAndHeadSkip) {
    struct Heads {
        std::int64_t tokens, heads, width, pad;
    };
    for (const auto& [tokens, heads, width, pad] : {Heads{1, 1, 1, 0}, Heads{5, 3, 7, 2}, Heads{67, 4, 64, 0},
                                                    Heads{9, 2, 136, 16}, Heads{3000, 2, 8, 8}, Heads{4, 5, 16, 3}})
        for (bool accumulate : {false, true})
            compare(fmt::format("{} tokens, {} heads of {}, pad {}", tokens, heads, width, pad), [=, t = tokens, h = heads,
                                                                                                  w = width,
                                                                                                  p = pad](Trial& trial) {
                const Tensor x = trial.input({t, h * w}, p), scale = trial.gates({t, h}), dy = trial.input({t, h * w});
                const Tensor skip = trial.gates({h}), o = trial.input({t, h * w});
                const std::int64_t x_stride = x.row_stride();
                const Tensor y = trial.output("y", {t, h * w}), skipped = trial.output("skipped", {t, h * w});
                kernels::scale_heads_forward(trial.exec(), {.dtype = trial.dtype(),
                                                            .tokens = t,
                                                            .heads = h,
                                                            .width = w,
                                                            .x_stride = x_stride,
                                                            .x = x.data(),
                                                            .scale = scale.data(),
                                                            .y = y.data()});
                kernels::head_skip_forward(trial.exec(), {.dtype = trial.dtype(),
                                                          .tokens = t,
                                                          .heads = h,
                                                          .width = w,
                                                          .x_stride = x_stride,
                                                          .o = o.data(),
                                                          .x = x.data(),
                                                          .skip = skip.data(),
                                                          .y = skipped.data()});
                const Place place{.pad = p, .accumulate = accumulate, .gradient = true};
                const Tensor dx = trial.output("dx", {t, h * w}, place), dx2 = trial.output("dx of skip", {t, h * w}, place);
                const Tensor dscale = trial.gate_output("dscale", {t, h}, {.gradient = true});
                const Tensor dskip = trial.gate_output("dskip", {h}, {.accumulate = accumulate, .gradient = true});
                kernels::scale_heads_backward(trial.exec(), {.dtype = trial.dtype(),
                                                             .tokens = t,
                                                             .heads = h,
                                                             .width = w,
                                                             .x_stride = x_stride,
                                                             .dx_stride = dx.row_stride(),
                                                             .x = x.data(),
                                                             .scale = scale.data(),
                                                             .dy = dy.data(),
                                                             .dx = dx.data(),
                                                             .dscale = dscale.data(),
                                                             .accumulate_dx = accumulate});
                kernels::head_skip_backward(trial.exec(), {.dtype = trial.dtype(),
                                                           .tokens = t,
                                                           .heads = h,
                                                           .width = w,
                                                           .x_stride = x_stride,
                                                           .dx_stride = dx2.row_stride(),
                                                           .x = x.data(),
                                                           .skip = skip.data(),
                                                           .dy = dy.data(),
                                                           .dx = dx2.data(),
                                                           .dskip = dskip.data(),
                                                           .accumulate_dx = accumulate,
                                                           .accumulate_dskip = accumulate});
            });
}

TEST_F(CudaKernels, Swiglu) {
    for (const Size& size : sizes)
        for (bool accumulate : {false, true})
            compare(text(size), [=](Trial& trial) {
                const Shape shape{size.rows, size.columns};
                const Tensor gate = trial.input(shape, size.pad), up = trial.input(shape, size.pad),
                             dout = trial.input(shape);
                const Tensor out = trial.output("out", shape);
                const Place place{.pad = size.pad, .accumulate = accumulate, .gradient = true};
                const Tensor dgate = trial.output("dgate", shape, place), dup = trial.output("dup", shape, place);
                kernels::swiglu_forward(trial.exec(), {.dtype = trial.dtype(),
                                                       .rows = size.rows,
                                                       .width = size.columns,
                                                       .gate_stride = gate.row_stride(),
                                                       .up_stride = up.row_stride(),
                                                       .gate = gate.data(),
                                                       .up = up.data(),
                                                       .out = out.data()});
                kernels::swiglu_backward(trial.exec(), {.dtype = trial.dtype(),
                                                        .rows = size.rows,
                                                        .width = size.columns,
                                                        .gate_stride = gate.row_stride(),
                                                        .up_stride = up.row_stride(),
                                                        .dgate_stride = dgate.row_stride(),
                                                        .dup_stride = dup.row_stride(),
                                                        .gate = gate.data(),
                                                        .up = up.data(),
                                                        .dout = dout.data(),
                                                        .dgate = dgate.data(),
                                                        .dup = dup.data(),
                                                        .accumulate_dgate = accumulate,
                                                        .accumulate_dup = accumulate});
            });
}

// ---- norms -----------------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, RmsNorm) {
    struct Norm {
        std::int64_t rows, groups, width, pad;
    };
    for (const auto& norm : {Norm{1, 1, 3, 0}, Norm{3, 1, 7, 2}, Norm{70, 2, 128, 8}, Norm{9, 3, 72, 0}, Norm{5, 1, 1536, 0},
                             Norm{5, 2, 2500, 3}, Norm{4, 1, 1000, 8}, Norm{2100, 1, 16, 0}, Norm{3, 1, 4104, 16}})
        for (const auto gate : {kernels::NormGate::none, kernels::NormGate::after, kernels::NormGate::before})
            for (bool accumulate : {false, true})
                compare(
                    fmt::format("{}x{}, {} groups, pad {}, gate {}", norm.rows, norm.width, norm.groups, norm.pad,
                                static_cast<int>(gate)),
                    [=](Trial& trial) {
                        const bool gated = gate != kernels::NormGate::none;
                        const Shape shape{norm.rows, norm.width};
                        const Tensor x = trial.input(shape, norm.pad), weight = trial.gates({norm.width}, 0.3, 1.0);
                        Tensor z, dz;
                        if (gated) z = trial.input(shape, norm.pad);
                        const Tensor y = trial.output("y", shape),
                                     rstd = trial.gate_output("rstd", {norm.rows, norm.groups});
                        kernels::rms_norm_forward(trial.exec(), {.dtype = trial.dtype(),
                                                                 .gate = gate,
                                                                 .rows = norm.rows,
                                                                 .groups = norm.groups,
                                                                 .width = norm.width,
                                                                 .eps = 1e-5,
                                                                 .x_stride = x.row_stride(),
                                                                 .z_stride = gated ? z.row_stride() : 0,
                                                                 .x = x.data(),
                                                                 .z = z.data(),
                                                                 .weight = weight.data(),
                                                                 .y = y.data(),
                                                                 .rstd = rstd.data()});
                        const Tensor dy = trial.input(shape);
                        const Place place{.pad = norm.pad, .accumulate = accumulate, .gradient = true};
                        const Tensor du = trial.output("du", shape, place);
                        if (gated) dz = trial.output("dz", shape, place);
                        const Tensor dweight =
                            trial.gate_output("dweight", {norm.width}, {.accumulate = accumulate, .gradient = true});
                        kernels::rms_norm_backward(trial.exec(), {.dtype = trial.dtype(),
                                                                  .gate = gate,
                                                                  .rows = norm.rows,
                                                                  .groups = norm.groups,
                                                                  .width = norm.width,
                                                                  .u_stride = x.row_stride(),
                                                                  .z_stride = gated ? z.row_stride() : 0,
                                                                  .du_stride = du.row_stride(),
                                                                  .dz_stride = gated ? dz.row_stride() : 0,
                                                                  .u = x.data(),
                                                                  .z = z.data(),
                                                                  .weight = weight.data(),
                                                                  .rstd = rstd.data(),
                                                                  .dy = dy.data(),
                                                                  .du = du.data(),
                                                                  .dz = dz.data(),
                                                                  .dweight = dweight.data(),
                                                                  .accumulate_du = accumulate,
                                                                  .accumulate_dz = accumulate,
                                                                  .accumulate_dweight = accumulate});
                    },
                    1e-4);
}

// The residual stream: float32 also where activations are bfloat16. `form`: 0 the stream alone, 1 with an addition, 2 with an
// addition and a gradient from later layers.
TEST_F(CudaKernels, RmsNormOfTheStream) {
    struct Norm {
        std::int64_t rows, width, pad;
    };
    for (const auto& norm : {Norm{1, 3, 0}, Norm{3, 7, 2}, Norm{70, 128, 8}, Norm{5, 1536, 0}, Norm{5, 2500, 3},
                             Norm{2100, 16, 0}, Norm{3, 4104, 16}})
        for (int form : {0, 1, 2})
            for (bool accumulate : {false, true})
                compare(fmt::format("{}x{}, pad {}, form {}", norm.rows, norm.width, norm.pad, form), [=](Trial& trial) {
                    const Shape shape{norm.rows, norm.width};
                    const Tensor weight = trial.gates({norm.width}, 0.3, 1.0), residual = trial.gates(shape, 1.0, 0.0);
                    Tensor x, sum, dsum, du;
                    if (form > 0) {
                        x = trial.input(shape, norm.pad);
                        sum = trial.gate_output("sum", shape);
                    }
                    if (form == 2) dsum = trial.gates(shape, 1.0, 0.0);
                    const Tensor y = trial.output("y", shape), rstd = trial.gate_output("rstd", {norm.rows, 1});
                    kernels::rms_norm_forward(trial.exec(), {.dtype = trial.dtype(),
                                                             .rows = norm.rows,
                                                             .width = norm.width,
                                                             .eps = 1e-5,
                                                             .x_stride = x.defined() ? x.row_stride() : 0,
                                                             .x = x.data(),
                                                             .residual = residual.data(),
                                                             .weight = weight.data(),
                                                             .sum = sum.data(),
                                                             .y = y.data(),
                                                             .rstd = rstd.data()});
                    const Tensor dy = trial.input(shape);
                    const Place place{.accumulate = accumulate, .gradient = true};
                    if (form > 0) du = trial.output("du", shape, {.pad = norm.pad, .accumulate = accumulate, .gradient = true});
                    const Tensor dresidual = trial.gate_output("dresidual", shape, place);
                    const Tensor dweight = trial.gate_output("dweight", {norm.width}, place);
                    kernels::rms_norm_backward(trial.exec(), {.dtype = trial.dtype(),
                                                              .stream = true,
                                                              .rows = norm.rows,
                                                              .width = norm.width,
                                                              .u_stride = norm.width,
                                                              .du_stride = du.defined() ? du.row_stride() : 0,
                                                              .dresidual_stride = norm.width,
                                                              .u = form > 0 ? sum.data() : residual.data(),
                                                              .weight = weight.data(),
                                                              .rstd = rstd.data(),
                                                              .dy = dy.data(),
                                                              .dsum = dsum.data(),
                                                              .du = du.data(),
                                                              .dresidual = dresidual.data(),
                                                              .dweight = dweight.data(),
                                                              .accumulate_du = accumulate,
                                                              .accumulate_dresidual = accumulate,
                                                              .accumulate_dweight = accumulate});
                }, 1e-4);
}

TEST_F(CudaKernels, L2Norm) {
    struct Heads {
        std::int64_t tokens, heads, width, pad;
    };
    for (const auto& size :
         {Heads{1, 1, 2, 0}, Heads{5, 3, 7, 2}, Heads{67, 4, 64, 0}, Heads{9, 2, 136, 16}, Heads{13, 2, 384, 8}})
        for (bool accumulate : {false, true})
            compare(fmt::format("{} tokens, {} heads of {}", size.tokens, size.heads, size.width), [=](Trial& trial) {
                const Shape shape{size.tokens, size.heads * size.width};
                const Tensor x = trial.input(shape, size.pad), dy = trial.input(shape), y = trial.output("y", shape);
                const Tensor rstd = trial.gate_output("rstd", {size.tokens, size.heads});
                const Tensor dx = trial.output("dx", shape, {.pad = size.pad, .accumulate = accumulate, .gradient = true});
                kernels::l2norm_forward(trial.exec(), {.dtype = trial.dtype(),
                                                       .tokens = size.tokens,
                                                       .heads = size.heads,
                                                       .width = size.width,
                                                       .x_stride = x.row_stride(),
                                                       .x = x.data(),
                                                       .y = y.data(),
                                                       .rstd = rstd.data()});
                kernels::l2norm_backward(trial.exec(), {.dtype = trial.dtype(),
                                                        .tokens = size.tokens,
                                                        .heads = size.heads,
                                                        .width = size.width,
                                                        .x_stride = x.row_stride(),
                                                        .dx_stride = dx.row_stride(),
                                                        .x = x.data(),
                                                        .rstd = rstd.data(),
                                                        .dy = dy.data(),
                                                        .dx = dx.data(),
                                                        .accumulate_dx = accumulate});
            });
}

// ---- embedding -------------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, Embedding) {
    struct Look {
        std::int64_t rows, width, vocab;
    };
    for (const auto& look : {Look{1, 1, 1}, Look{9, 7, 5}, Look{300, 64, 11}, Look{1000, 264, 700}, Look{33, 1032, 3}})
        for (bool accumulate : {false, true})
            for (bool master : {false, true})  // the table in float32
                compare(fmt::format("{} rows of {}, vocabulary {}", look.rows, look.width, look.vocab), [=](Trial& trial) {
                    const DType table_dtype = master ? trial.gate() : trial.dtype();
                    const Tensor ids = trial.ids(look.rows, look.vocab);
                    const Tensor table =
                        master ? trial.gates({look.vocab, look.width}) : trial.input({look.vocab, look.width});
                    const Tensor dy = trial.input({look.rows, look.width}), y = trial.output("y", {look.rows, look.width});
                    const Place place{.accumulate = accumulate, .gradient = true};
                    const Tensor dtable = master ? trial.gate_output("dtable", {look.vocab, look.width}, place)
                                                 : trial.output("dtable", {look.vocab, look.width}, place);
                    kernels::embedding_forward(trial.exec(), {.dtype = trial.dtype(),
                                                              .table_dtype = table_dtype,
                                                              .rows = look.rows,
                                                              .width = look.width,
                                                              .ids = ids.as<std::int32_t>(),
                                                              .table = table.data(),
                                                              .y = y.data()});
                    kernels::embedding_backward(trial.exec(), {.dtype = trial.dtype(),
                                                               .table_dtype = table_dtype,
                                                               .rows = look.rows,
                                                               .width = look.width,
                                                               .vocab = look.vocab,
                                                               .ids = ids.as<std::int32_t>(),
                                                               .dy = dy.data(),
                                                               .dtable = dtable.data(),
                                                               .accumulate_dtable = accumulate});
                });
}

// ---- convolution -----------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, CausalConv1d) {
    struct Conv {
        std::int64_t channels, width, pad;
    };
    std::vector<SequenceLayout> layouts = {SequenceLayout::uniform(1, 1),  SequenceLayout::uniform(2, 3),
                                           SequenceLayout::uniform(3, 70), SequenceLayout::uniform(1, 700),
                                           SequenceLayout::uniform(5, 1),  random_layout(200, 3),
                                           random_layout(1100, 4)};
    for (const auto& layout : layouts)
        for (const auto& conv :
             {Conv{1, 4, 0}, Conv{7, 1, 2}, Conv{10, 3, 0}, Conv{264, 4, 8}, Conv{16, 8, 0}, Conv{9, 6, 3}, Conv{72, 2, 16}})
            for (bool more : {false, true})  // bias, state and accumulation
                compare(fmt::format("{} documents, {} tokens, {} channels, width {}, {}", layout.count(),
                                    layout.num_tokens(), conv.channels, conv.width, more),
                        [&, more](Trial& trial) {
                            const std::int64_t tokens = layout.num_tokens();
                            const Shape shape{tokens, conv.channels};
                            const Tensor x = trial.input(shape, conv.pad), weight = trial.gates({conv.channels, conv.width});
                            Tensor bias, state, dbias;
                            if (more) {
                                bias = trial.gates({conv.channels});
                                if (conv.width > 1)
                                    state = trial.output("state", {layout.count() * (conv.width - 1), conv.channels},
                                                         {.accumulate = true});
                            }
                            const Tensor y = trial.output("y", shape, {.pad = conv.pad});
                            kernels::causal_conv1d_forward(trial.exec(), {.dtype = trial.dtype(),
                                                                          .sequences = layout.sequences(),
                                                                          .channels = conv.channels,
                                                                          .width = conv.width,
                                                                          .x_stride = x.row_stride(),
                                                                          .y_stride = y.row_stride(),
                                                                          .x = x.data(),
                                                                          .weight = weight.data(),
                                                                          .bias = bias.data(),
                                                                          .y = y.data(),
                                                                          .state = state.data()});
                            const Tensor dy = trial.input(shape, conv.pad);
                            const Tensor dx =
                                trial.output("dx", shape, {.pad = conv.pad, .accumulate = more, .gradient = true});
                            const Tensor dweight = trial.gate_output("dweight", {conv.channels, conv.width},
                                                                     {.accumulate = more, .gradient = true});
                            if (more)
                                dbias = trial.gate_output("dbias", {conv.channels}, {.accumulate = more, .gradient = true});
                            kernels::causal_conv1d_backward(trial.exec(), {.dtype = trial.dtype(),
                                                                           .sequences = layout.sequences(),
                                                                           .channels = conv.channels,
                                                                           .width = conv.width,
                                                                           .x_stride = x.row_stride(),
                                                                           .dy_stride = dy.row_stride(),
                                                                           .dx_stride = dx.row_stride(),
                                                                           .x = x.data(),
                                                                           .weight = weight.data(),
                                                                           .bias = bias.data(),
                                                                           .dy = dy.data(),
                                                                           .dx = dx.data(),
                                                                           .dweight = dweight.data(),
                                                                           .dbias = dbias.data(),
                                                                           .accumulate_dx = more,
                                                                           .accumulate_dweight = more,
                                                                           .accumulate_dbias = more});
                        });
}

// ---- gates -----------------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, DecayGate) {
    for (const Size& size : {Size{1, 1, 0}, Size{5, 3, 2}, Size{67, 48, 0}, Size{9000, 6, 4}, Size{40, 40, 7}})
        for (int form : {0, 1, 2, 3}) {  // which gradients come in; the last one accumulates
            compare(text(size), [=](Trial& trial) {
                const Shape shape{size.rows, size.columns};
                const Tensor raw = trial.input(shape, size.pad), bias = trial.gates({size.columns}),
                             a_log = trial.gates({size.columns});
                const Tensor step = trial.gate_output("step", shape), g = trial.gate_output("g", shape);
                kernels::decay_gate_forward(trial.exec(), {.dtype = trial.dtype(),
                                                           .tokens = size.rows,
                                                           .heads = size.columns,
                                                           .raw_stride = raw.row_stride(),
                                                           .raw = raw.data(),
                                                           .step_bias = bias.data(),
                                                           .a_log = a_log.data(),
                                                           .step = step.data(),
                                                           .g = g.data()});
                Tensor dstep, dg;
                if (form != 1) dstep = trial.gates(shape);
                if (form != 2) dg = trial.gates(shape);
                const bool accumulate = form == 3;
                const Tensor draw =
                    trial.output("draw", shape, {.pad = size.pad, .accumulate = accumulate, .gradient = true});
                const Place place{.accumulate = accumulate, .gradient = true};
                const Tensor dbias = trial.gate_output("dstep_bias", {size.columns}, place);
                const Tensor da_log = trial.gate_output("da_log", {size.columns}, place);
                kernels::decay_gate_backward(trial.exec(), {.dtype = trial.dtype(),
                                                            .tokens = size.rows,
                                                            .heads = size.columns,
                                                            .raw_stride = raw.row_stride(),
                                                            .draw_stride = draw.row_stride(),
                                                            .raw = raw.data(),
                                                            .step_bias = bias.data(),
                                                            .a_log = a_log.data(),
                                                            .dstep = dstep.data(),
                                                            .dg = dg.data(),
                                                            .draw = draw.data(),
                                                            .dstep_bias = dbias.data(),
                                                            .da_log = da_log.data(),
                                                            .accumulate_draw = accumulate,
                                                            .accumulate_dstep_bias = accumulate,
                                                            .accumulate_da_log = accumulate});
            });
        }
}

TEST_F(CudaKernels, LevelScales) {
    struct Levels {
        std::int64_t tokens, heads, levels, pad;
    };
    for (const auto& size : {Levels{1, 1, 1, 0}, Levels{5, 3, 7, 2}, Levels{67, 4, 16, 8}, Levels{3000, 2, 15, 0}})
        for (bool accumulate : {false, true})
            compare(fmt::format("{} tokens, {} heads, {} levels", size.tokens, size.heads, size.levels), [=](Trial& trial) {
                const std::int64_t columns = size.heads * size.levels;
                const Tensor raw = trial.input({size.tokens, columns}, size.pad),
                             weight = trial.gates({size.heads, size.levels});
                const Tensor scales = trial.gate_output("level_scales", {size.tokens, columns});
                const Tensor dscales = trial.gates({size.tokens, columns});
                const Tensor draw = trial.output("draw", {size.tokens, columns},
                                                 {.pad = size.pad, .accumulate = accumulate, .gradient = true});
                const Tensor dweight = trial.gate_output("dlevel_weight", {size.heads, size.levels},
                                                         {.accumulate = accumulate, .gradient = true});
                kernels::level_scales_forward(trial.exec(), {.dtype = trial.dtype(),
                                                             .tokens = size.tokens,
                                                             .heads = size.heads,
                                                             .levels = size.levels,
                                                             .raw_stride = raw.row_stride(),
                                                             .raw = raw.data(),
                                                             .level_weight = weight.data(),
                                                             .level_scales = scales.data()});
                kernels::level_scales_backward(trial.exec(), {.dtype = trial.dtype(),
                                                              .tokens = size.tokens,
                                                              .heads = size.heads,
                                                              .levels = size.levels,
                                                              .raw_stride = raw.row_stride(),
                                                              .draw_stride = draw.row_stride(),
                                                              .raw = raw.data(),
                                                              .level_weight = weight.data(),
                                                              .dlevel_scales = dscales.data(),
                                                              .draw = draw.data(),
                                                              .dlevel_weight = dweight.data(),
                                                              .accumulate_draw = accumulate,
                                                              .accumulate_dlevel_weight = accumulate});
            });
}

TEST_F(CudaKernels, Sigmoid) {
    for (std::int64_t count : {1, 77, 1000})
        for (bool accumulate : {false, true})
            compare(fmt::format("{}", count), [=](Trial& trial) {
                const Tensor x = trial.input({count}), y = trial.gate_output("y", {count}), dy = trial.gates({count});
                const Tensor dx = trial.output("dx", {count}, {.accumulate = accumulate, .gradient = true});
                kernels::sigmoid_forward(trial.exec(),
                                         {.dtype = trial.dtype(), .count = count, .x = x.data(), .y = y.data()});
                kernels::sigmoid_backward(trial.exec(), {.dtype = trial.dtype(),
                                                         .count = count,
                                                         .y = y.data(),
                                                         .dy = dy.data(),
                                                         .dx = dx.data(),
                                                         .accumulate_dx = accumulate});
            });
}

// ---- loss ------------------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, CrossEntropy) {
    for (const Size& size : {Size{1, 1, 0}, Size{3, 7, 2}, Size{5, 64, 0}, Size{4, 1000, 8}, Size{3, 5000, 0},
                             Size{2, 4099, 1}, Size{7, 32000, 0}})
        for (bool gradient : {false, true})
            compare(text(size), [=](Trial& trial) {
                const Tensor logits = trial.output("logits", {size.rows, size.columns},
                                                   {.pad = size.pad, .accumulate = true, .gradient = gradient});
                const Tensor loss = trial.gate_output("loss", {size.rows});
                const Tensor targets = trial.ids(size.rows, size.columns);
                if (size.rows > 2)
                    targets.narrow_rows(1, 2).copy_from(Tensor::from(std::vector<std::int32_t>{kernels::ignore_index}, {1}));
                kernels::cross_entropy(trial.exec(), {.dtype = trial.dtype(),
                                                      .rows = size.rows,
                                                      .vocab = size.columns,
                                                      .stride = logits.row_stride(),
                                                      .targets = targets.as<std::int32_t>(),
                                                      .logits = logits.data(),
                                                      .loss = loss.data(),
                                                      .gradient = gradient,
                                                      .gradient_scale = 0.25});
            });
}

TEST_F(CudaKernels, CrossEntropyOfExtremeLogits) {
    const std::vector<float> values = {-INFINITY, 3e4f, 3e4f, -3e4f, -INFINITY, 0.0f, -INFINITY, -INFINITY, 1e4f};
    const Tensor logits = Tensor::from(values, {1, 9}, gpu), loss = Tensor::empty({1}, DType::float32, gpu);
    const Tensor targets = Tensor::from(std::vector<std::int32_t>{1}, {1}, gpu);
    kernels::cross_entropy(exec_of(gpu), {.dtype = DType::float32,
                                          .rows = 1,
                                          .vocab = 9,
                                          .stride = 9,
                                          .targets = targets.as<std::int32_t>(),
                                          .logits = logits.data(),
                                          .loss = loss.data(),
                                          .gradient = true});
    EXPECT_NEAR(loss.item(), std::log(2.0), 1e-2);
    EXPECT_EQ(logits.to_vector<float>(), (std::vector<float>{0, -0.5f, 0.5f, 0, 0, 0, 0, 0, 0}));
}

TEST_F(CudaKernels, Sum) {
    for (std::int64_t count : {1, 5, 1000, 100'003})
        for (bool accumulate : {false, true})
            compare(fmt::format("{}", count), [=](Trial& trial) {
                const Tensor values = trial.gates({count}, 1.0, 3.0);
                const Tensor total = trial.total_output("total", {.accumulate = accumulate});
                kernels::sum(trial.exec(), {.dtype = trial.gate(),
                                            .count = count,
                                            .values = values.data(),
                                            .total = total.as<double>(),
                                            .accumulate_total = accumulate});
            });
}

// ---- optimizer -------------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, AdamWAndSumOfSquares) {
    compare("70 tensors", [](Trial& trial) {
        std::vector<kernels::AdamWTensor> tensors;
        std::vector<const void*> gradients;
        std::vector<std::int64_t> counts;
        std::vector<Tensor> kept;
        for (std::int64_t i = 0; i < 70; ++i) {
            const std::int64_t count = i == 3 ? 40'000 : i == 5 ? 16'384 : i == 7 ? 0 : 1 + 13 * i;
            const std::int64_t skip = i % 3 == 2 ? 1 : 0;  // starts off the 16-byte grid
            const auto cut = [&](const Tensor& tensor) { return tensor.narrow_rows(skip, skip + count); };
            const Tensor parameter = cut(trial.gate_output("parameter", {count + skip}, {.accumulate = true}));
            const Tensor first = cut(trial.gate_output("first_moment", {count + skip}, {.accumulate = true}));
            const Tensor gradient = cut(trial.gates({count + skip})), second = trial.gates({count + skip}, 0.2, 2.0);
            kept.insert(kept.end(), {parameter, first, gradient, second});
            tensors.push_back({.count = count,
                               .parameter = parameter.data(),
                               .gradient = gradient.data(),
                               .first_moment = first.data(),
                               .second_moment = cut(second).data(),
                               .weight_decay = i % 2 == 0 ? 0.1 : 0.0});
            gradients.push_back(gradient.data());
            counts.push_back(count);
        }
        for (std::int64_t step = 1; step <= 3; ++step)
            kernels::adamw(trial.exec(), {.dtype = trial.gate(),
                                          .tensor_count = 70,
                                          .tensors = tensors.data(),
                                          .step = step,
                                          .learning_rate = 0.01,
                                          .gradient_scale = 0.5});
        const Tensor total = trial.total_output("total");
        kernels::sum_squares(trial.exec(), {.dtype = trial.gate(),
                                            .tensor_count = 70,
                                            .tensors = gradients.data(),
                                            .counts = counts.data(),
                                            .total = total.as<double>()});
    });
}

TEST_F(CudaKernels, SumOfSquaresOfNothing) {
    const Tensor total = Tensor::empty({1}, DType::float64, gpu);
    kernels::sum_squares(exec_of(gpu), {.dtype = DType::float32, .total = total.as<double>()});
    EXPECT_EQ(total.item(), 0.0);
}

// ---- rope ------------------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, Rope) {
    struct Heads {
        std::int64_t heads, width, pad;
    };
    for (const auto& layout : {SequenceLayout::uniform(1, 1), SequenceLayout::uniform(3, 67), random_layout(150, 9)})
        for (const auto& size : {Heads{1, 2, 0}, Heads{3, 14, 3}, Heads{4, 64, 0}, Heads{2, 96, 16}, Heads{2, 128, 8}})
            for (std::int64_t position : {0, 131'000})
                for (bool inverse : {false, true})
                    compare(fmt::format("{} heads of {}, position {}", size.heads, size.width, position),
                            [&, position, inverse](Trial& trial) {
                                const Shape shape{layout.num_tokens(), size.heads * size.width};
                                const Tensor x = trial.input(shape, size.pad),
                                             y = trial.output("y", shape, {.pad = size.pad});
                                const Tensor in_place = trial.output("in place", shape, {.accumulate = true});
                                kernels::Rope args{.dtype = trial.dtype(),
                                                   .sequences = layout.sequences(),
                                                   .heads = size.heads,
                                                   .width = size.width,
                                                   .theta = 10000.0,
                                                   .position = position,
                                                   .inverse = inverse,
                                                   .x_stride = x.row_stride(),
                                                   .y_stride = y.row_stride(),
                                                   .x = x.data(),
                                                   .y = y.data()};
                                kernels::rope(trial.exec(), args);
                                args.x_stride = args.y_stride = in_place.row_stride();
                                args.x = args.y = in_place.data();
                                kernels::rope(trial.exec(), args);
                            });
}

// ---- matrix product --------------------------------------------------------------------------------------------------

TEST_F(CudaKernels, Gemm) {
    struct Product {
        std::int64_t m, n, k, pad, batch;
    };
    for (const auto& p :
         {Product{1, 1, 1, 0, 1}, Product{3, 5, 7, 2, 1}, Product{64, 48, 32, 0, 1}, Product{1, 136, 64, 0, 1},
          Product{129, 65, 200, 8, 1}, Product{16, 24, 40, 0, 5}, Product{7, 9, 11, 1, 3}, Product{5, 6, 0, 1, 1}})
        for (int form = 0; form < 4; ++form)
            for (bool wide_result : {false, true})
                for (double beta : {0.0, 1.0, -0.5})
                    compare(fmt::format("{}x{}x{} pad {} batch {}, transposed {}, beta {}", p.m, p.n, p.k, p.pad, p.batch,
                                        form, beta),
                            [=](Trial& trial) {
                                const bool ta = (form & 1) != 0, tb = (form & 2) != 0;
                                const DType c_dtype = wide_result ? trial.gate() : trial.dtype();
                                const Shape a_shape{p.batch, ta ? p.k : p.m, ta ? p.m : p.k},
                                    b_shape{p.batch, tb ? p.n : p.k, tb ? p.k : p.n};
                                const Tensor a = trial.input(a_shape, p.pad), b = trial.input(b_shape, p.pad);
                                const Place place{.pad = p.pad, .accumulate = beta != 0.0};
                                const Tensor c = wide_result ? trial.gate_output("c", {p.batch, p.m, p.n}, place)
                                                             : trial.output("c", {p.batch, p.m, p.n}, place);
                                kernels::gemm(trial.exec(), {.dtype = trial.dtype(),
                                                             .c_dtype = c_dtype,
                                                             .transpose_a = ta,
                                                             .transpose_b = tb,
                                                             .m = p.m,
                                                             .n = p.n,
                                                             .k = p.k,
                                                             .alpha = 1.25,
                                                             .beta = beta,
                                                             .a = a.data(),
                                                             .b = b.data(),
                                                             .c = c.data(),
                                                             .lda = a.row_stride(),
                                                             .ldb = b.row_stride(),
                                                             .ldc = c.row_stride(),
                                                             .batch = p.batch,
                                                             .stride_a = a_shape[1] * a.row_stride(),
                                                             .stride_b = b_shape[1] * b.row_stride(),
                                                             .stride_c = p.m * c.row_stride()});
                            });
}

TEST_F(CudaKernels, Tf32OnlyWhenAllowed) {
    const std::int64_t n = 256;
    const Tensor a = random_tensor({n, n}, 1, DType::float32), b = random_tensor({n, n}, 2, DType::float32);
    const auto product = [&](const Tensor& x, const Tensor& y) {
        const Tensor c = Tensor::empty({n, n}, x.dtype(), x.device());
        kernels::gemm(exec_of(c), {.dtype = x.dtype(),
                                   .c_dtype = x.dtype(),
                                   .m = n,
                                   .n = n,
                                   .k = n,
                                   .a = x.data(),
                                   .b = y.data(),
                                   .c = c.data(),
                                   .lda = n,
                                   .ldb = n,
                                   .ldc = n});
        return c.to(cpu_device);
    };
    const Tensor exact = product(a.to(DType::float64), b.to(DType::float64));
    EXPECT_LT(rms_ratio(product(a.to(gpu), b.to(gpu)), exact), 2e-6);
    kernels::allow_tf32(true);
    const double loose = rms_ratio(product(a.to(gpu), b.to(gpu)), exact);
    kernels::allow_tf32(false);
    EXPECT_LT(loose, 2e-3);
}

// ---- more than 2^31 elements -----------------------------------------------------------------------------------------

constexpr std::int64_t large_rows = (std::int64_t{1} << 21) + 5, large_width = 1024, tail = 5;
static_assert((large_rows - tail) * large_width >= std::int64_t{1} << 31);

// A body's run over large_rows rows or over the last few of them alone. All rows but those hold zeros.
class LargeRun {
public:
    explicit LargeRun(bool large) : rows(large ? large_rows : tail) {}
    const std::int64_t rows;

    Tensor input(std::int64_t width = large_width, DType dtype = DType::bfloat16) {
        Tensor tensor = Tensor::zeros({rows, width}, dtype, gpu);
        tensor.narrow_rows(rows - tail, rows).copy_from(random_tensor({tail, width}, ++seed_, dtype));
        return tensor;
    }
    Tensor output(std::int64_t width = large_width, DType dtype = DType::bfloat16) {
        const Tensor tensor = Tensor::empty({rows, width}, dtype, gpu);
        tails.push_back(tensor.narrow_rows(rows - tail, rows));
        return tensor;
    }
    void also(const Tensor& result) { tails.push_back(result); }
    Tensor weights(std::int64_t count) { return random_tensor({count}, ++seed_, DType::float32).to(gpu); }
    // The last rows are a document of their own.
    SequenceLayout layout() const {
        return rows == tail ? SequenceLayout::packed({0, tail}) : SequenceLayout::packed({0, rows - tail, rows});
    }
    std::vector<Tensor> tails;

private:
    std::uint64_t seed_ = 0;
};

class CudaLarge : public CudaKernels {
protected:
    static void compare_tails(const std::function<void(LargeRun&)>& body, double tolerance = 1e-5) {
        std::vector<std::vector<double>> found;
        try {
            LargeRun large(true);
            body(large);
            for (const auto& result : large.tails) found.push_back(result.to_vector<double>());
        } catch (const Error& error) {
            if (std::strstr(error.what(), "out of memory") != nullptr) GTEST_SKIP() << error.what();
            throw;
        }
        LargeRun small(false);
        body(small);
        for (std::size_t i = 0; i < found.size(); ++i)
            EXPECT_LT(rms_ratio(found[i], small.tails[i].to_vector<double>()), tolerance) << "result " << i;
    }
    static constexpr DType bf16 = DType::bfloat16;
};

TEST_F(CudaLarge, Elementwise) {
    compare_tails([](LargeRun& trial) {
        const Tensor x = trial.input(), y = trial.input(), out = trial.output();
        kernels::add(exec_of(gpu), {.dtype = bf16, .count = x.count(), .x = x.data(), .y = y.data(), .out = out.data()});
        const Tensor scaled = trial.output();
        kernels::axpby(exec_of(gpu), {.x_dtype = bf16,
                                      .y_dtype = bf16,
                                      .rows = trial.rows,
                                      .columns = large_width,
                                      .x_stride = large_width,
                                      .y_stride = large_width,
                                      .a = 2.0,
                                      .x = x.data(),
                                      .y = scaled.data()});
        const Tensor narrow = trial.output();
        kernels::fill(exec_of(gpu), {.dtype = bf16, .count = narrow.count(), .value = 3.0, .values = narrow.data()});
        kernels::axpby(exec_of(gpu), {.x_dtype = bf16,
                                      .y_dtype = bf16,
                                      .rows = trial.rows,
                                      .columns = 1001,
                                      .x_stride = large_width,
                                      .y_stride = large_width,
                                      .a = 2.0,
                                      .b = 1.0,
                                      .x = x.data(),
                                      .y = narrow.data()});
        const Tensor scale = trial.input(8, DType::float32), headed = trial.output(),
                     dscale = trial.output(8, DType::float32);
        kernels::scale_heads_forward(exec_of(gpu), {.dtype = bf16,
                                                    .tokens = trial.rows,
                                                    .heads = 8,
                                                    .width = 128,
                                                    .x_stride = large_width,
                                                    .x = x.data(),
                                                    .scale = scale.data(),
                                                    .y = headed.data()});
        kernels::scale_heads_backward(exec_of(gpu), {.dtype = bf16,
                                                     .tokens = trial.rows,
                                                     .heads = 8,
                                                     .width = 128,
                                                     .x_stride = large_width,
                                                     .dx_stride = large_width,
                                                     .x = x.data(),
                                                     .scale = scale.data(),
                                                     .dy = y.data(),
                                                     .dx = out.data(),
                                                     .dscale = dscale.data()});
    });
}

TEST_F(CudaLarge, Swiglu) {
    compare_tails([](LargeRun& trial) {
        const Tensor gate = trial.input(), up = trial.input(), out = trial.output(), dgate = trial.output(),
                     dup = trial.output();
        kernels::swiglu_forward(exec_of(gpu), {.dtype = bf16,
                                               .rows = trial.rows,
                                               .width = large_width,
                                               .gate_stride = large_width,
                                               .up_stride = large_width,
                                               .gate = gate.data(),
                                               .up = up.data(),
                                               .out = out.data()});
        kernels::swiglu_backward(exec_of(gpu), {.dtype = bf16,
                                                .rows = trial.rows,
                                                .width = large_width,
                                                .gate_stride = large_width,
                                                .up_stride = large_width,
                                                .dgate_stride = large_width,
                                                .dup_stride = large_width,
                                                .gate = gate.data(),
                                                .up = up.data(),
                                                .dout = out.data(),
                                                .dgate = dgate.data(),
                                                .dup = dup.data()});
    });
}

TEST_F(CudaLarge, RmsNorm) {
    for (std::int64_t groups : {std::int64_t{1}, std::int64_t{8}})
        compare_tails([=](LargeRun& trial) {
            const Tensor x = trial.input(), z = trial.input(), weight = trial.weights(large_width), y = trial.output();
            const Tensor rstd = trial.output(groups, DType::float32), du = trial.output(), dz = trial.output();
            const Tensor dweight = Tensor::empty({large_width}, DType::float32, gpu);
            kernels::rms_norm_forward(exec_of(gpu), {.dtype = bf16,
                                                     .gate = kernels::NormGate::before,
                                                     .rows = trial.rows,
                                                     .groups = groups,
                                                     .width = large_width,
                                                     .x_stride = large_width,
                                                     .z_stride = large_width,
                                                     .x = x.data(),
                                                     .z = z.data(),
                                                     .weight = weight.data(),
                                                     .y = y.data(),
                                                     .rstd = rstd.data()});
            kernels::rms_norm_backward(exec_of(gpu), {.dtype = bf16,
                                                      .gate = kernels::NormGate::before,
                                                      .rows = trial.rows,
                                                      .groups = groups,
                                                      .width = large_width,
                                                      .u_stride = large_width,
                                                      .z_stride = large_width,
                                                      .du_stride = large_width,
                                                      .dz_stride = large_width,
                                                      .u = x.data(),
                                                      .z = z.data(),
                                                      .weight = weight.data(),
                                                      .rstd = rstd.data(),
                                                      .dy = y.data(),
                                                      .du = du.data(),
                                                      .dz = dz.data(),
                                                      .dweight = dweight.data()});
            trial.also(dweight);
        });
}

TEST_F(CudaLarge, L2NormAndRope) {
    compare_tails([](LargeRun& trial) {
        const Tensor x = trial.input(), y = trial.output(), rstd = trial.output(8, DType::float32), dx = trial.output();
        kernels::l2norm_forward(exec_of(gpu), {.dtype = bf16,
                                               .tokens = trial.rows,
                                               .heads = 8,
                                               .width = 128,
                                               .x_stride = large_width,
                                               .x = x.data(),
                                               .y = y.data(),
                                               .rstd = rstd.data()});
        kernels::l2norm_backward(exec_of(gpu), {.dtype = bf16,
                                                .tokens = trial.rows,
                                                .heads = 8,
                                                .width = 128,
                                                .x_stride = large_width,
                                                .dx_stride = large_width,
                                                .x = x.data(),
                                                .rstd = rstd.data(),
                                                .dy = x.data(),
                                                .dx = dx.data()});
        const SequenceLayout layout = trial.layout();
        const Tensor turned = trial.output();
        kernels::rope(exec_of(gpu), {.dtype = bf16,
                                     .sequences = layout.sequences(),
                                     .heads = 8,
                                     .width = 128,
                                     .x_stride = large_width,
                                     .y_stride = large_width,
                                     .x = x.data(),
                                     .y = turned.data()});
    });
}

TEST_F(CudaLarge, CausalConv1d) {
    compare_tails([](LargeRun& trial) {
        const SequenceLayout layout = trial.layout();
        const Tensor x = trial.input(), weight = trial.weights(large_width * 4), bias = trial.weights(large_width);
        const Tensor dy = trial.input(), y = trial.output(), dx = trial.output();
        const Tensor dweight = Tensor::empty({large_width * 4}, DType::float32, gpu);
        const Tensor dbias = Tensor::empty({large_width}, DType::float32, gpu);
        kernels::causal_conv1d_forward(exec_of(gpu), {.dtype = bf16,
                                                      .sequences = layout.sequences(),
                                                      .channels = large_width,
                                                      .width = 4,
                                                      .x_stride = large_width,
                                                      .y_stride = large_width,
                                                      .x = x.data(),
                                                      .weight = weight.data(),
                                                      .bias = bias.data(),
                                                      .y = y.data()});
        kernels::causal_conv1d_backward(exec_of(gpu), {.dtype = bf16,
                                                       .sequences = layout.sequences(),
                                                       .channels = large_width,
                                                       .width = 4,
                                                       .x_stride = large_width,
                                                       .dy_stride = large_width,
                                                       .dx_stride = large_width,
                                                       .x = x.data(),
                                                       .weight = weight.data(),
                                                       .bias = bias.data(),
                                                       .dy = dy.data(),
                                                       .dx = dx.data(),
                                                       .dweight = dweight.data(),
                                                       .dbias = dbias.data()});
        trial.also(dweight);
        trial.also(dbias);
    });
}

TEST_F(CudaLarge, Gates) {
    compare_tails([](LargeRun& trial) {
        const Tensor raw = trial.input(), bias = trial.weights(large_width), a_log = trial.weights(large_width);
        const Tensor step = trial.output(large_width, DType::float32), g = trial.output(large_width, DType::float32);
        kernels::decay_gate_forward(exec_of(gpu), {.dtype = bf16,
                                                   .tokens = trial.rows,
                                                   .heads = large_width,
                                                   .raw_stride = large_width,
                                                   .raw = raw.data(),
                                                   .step_bias = bias.data(),
                                                   .a_log = a_log.data(),
                                                   .step = step.data(),
                                                   .g = g.data()});
        const Tensor dg = trial.input(large_width, DType::float32), draw = trial.output();
        const Tensor dbias = Tensor::empty({large_width}, DType::float32, gpu), da_log = dbias.clone();
        kernels::decay_gate_backward(exec_of(gpu), {.dtype = bf16,
                                                    .tokens = trial.rows,
                                                    .heads = large_width,
                                                    .raw_stride = large_width,
                                                    .draw_stride = large_width,
                                                    .raw = raw.data(),
                                                    .step_bias = bias.data(),
                                                    .a_log = a_log.data(),
                                                    .dg = dg.data(),
                                                    .draw = draw.data(),
                                                    .dstep_bias = dbias.data(),
                                                    .da_log = da_log.data()});
        trial.also(dbias);
        trial.also(da_log);
        const Tensor weight = trial.weights(large_width), scales = trial.output(large_width, DType::float32);
        kernels::level_scales_forward(exec_of(gpu), {.dtype = bf16,
                                                     .tokens = trial.rows,
                                                     .heads = 64,
                                                     .levels = 16,
                                                     .raw_stride = large_width,
                                                     .raw = raw.data(),
                                                     .level_weight = weight.data(),
                                                     .level_scales = scales.data()});
        const Tensor draw2 = trial.output();
        kernels::level_scales_backward(exec_of(gpu), {.dtype = bf16,
                                                      .tokens = trial.rows,
                                                      .heads = 64,
                                                      .levels = 16,
                                                      .raw_stride = large_width,
                                                      .draw_stride = large_width,
                                                      .raw = raw.data(),
                                                      .level_weight = weight.data(),
                                                      .dlevel_scales = dg.data(),
                                                      .draw = draw2.data(),
                                                      .dlevel_weight = dbias.data()});
        kernels::sigmoid_forward(exec_of(gpu), {.dtype = bf16, .count = raw.count(), .x = raw.data(), .y = step.data()});
        kernels::sigmoid_backward(
            exec_of(gpu), {.dtype = bf16, .count = raw.count(), .y = step.data(), .dy = dg.data(), .dx = draw.data()});
    });
}

TEST_F(CudaLarge, EmbeddingAndLoss) {
    compare_tails([](LargeRun& trial) {
        std::vector<std::int32_t> values(static_cast<std::size_t>(trial.rows), 3);
        std::iota(values.end() - tail, values.end(), 7);
        const Tensor ids = Tensor::from(values, {trial.rows}, gpu),
                     table = random_tensor({20, large_width}, 90, DType::float32).to(gpu);
        const Tensor y = trial.output();
        kernels::embedding_forward(exec_of(gpu), {.dtype = bf16,
                                                  .table_dtype = DType::float32,
                                                  .rows = trial.rows,
                                                  .width = large_width,
                                                  .ids = ids.as<std::int32_t>(),
                                                  .table = table.data(),
                                                  .y = y.data()});
        const Tensor dy = trial.input(), dtable = Tensor::empty({20, large_width}, DType::float32, gpu);
        kernels::embedding_backward(exec_of(gpu), {.dtype = bf16,
                                                   .table_dtype = DType::float32,
                                                   .rows = trial.rows,
                                                   .width = large_width,
                                                   .vocab = 20,
                                                   .ids = ids.as<std::int32_t>(),
                                                   .dy = dy.data(),
                                                   .dtable = dtable.data()});
        trial.also(dtable);
        const Tensor loss = trial.output(1, DType::float32);
        trial.also(dy.narrow_rows(trial.rows - tail, trial.rows));
        kernels::cross_entropy(exec_of(gpu), {.dtype = bf16,
                                              .rows = trial.rows,
                                              .vocab = large_width,
                                              .stride = large_width,
                                              .targets = ids.as<std::int32_t>(),
                                              .logits = dy.data(),
                                              .loss = loss.data(),
                                              .gradient = true,
                                              .gradient_scale = 0.5});
    });
}

TEST_F(CudaLarge, OptimizerAndSums) {
    compare_tails([](LargeRun& trial) {
        const DType f32 = DType::float32;
        const Tensor gradient = trial.input(large_width, f32), total = Tensor::empty({1}, DType::float64, gpu),
                     squares = total.clone();
        kernels::sum(exec_of(gpu),
                     {.dtype = f32, .count = gradient.count(), .values = gradient.data(), .total = total.as<double>()});
        trial.also(total);
        const void* values = gradient.data();
        const std::int64_t count = gradient.count();
        kernels::sum_squares(
            exec_of(gpu),
            {.dtype = f32, .tensor_count = 1, .tensors = &values, .counts = &count, .total = squares.as<double>()});
        trial.also(squares);
        const Tensor parameter = trial.input(large_width, f32);
        const Tensor first = Tensor::zeros({trial.rows, large_width}, f32, gpu),
                     second = Tensor::zeros({trial.rows, large_width}, f32, gpu);
        const kernels::AdamWTensor tensor{.count = count,
                                          .parameter = parameter.data(),
                                          .gradient = values,
                                          .first_moment = first.data(),
                                          .second_moment = second.data(),
                                          .weight_decay = 0.1};
        kernels::adamw(exec_of(gpu), {.dtype = f32, .tensor_count = 1, .tensors = &tensor, .learning_rate = 0.1});
        for (const auto& result : {parameter, first, second}) trial.also(result.narrow_rows(trial.rows - tail, trial.rows));
    });
}

TEST_F(CudaLarge, Gemm) {
    compare_tails(
        [](LargeRun& trial) {
            const Tensor a = trial.input(64), b = random_tensor({64, large_width}, 91, bf16).to(gpu), c = trial.output();
            kernels::gemm(exec_of(gpu), {.dtype = bf16,
                                         .c_dtype = bf16,
                                         .m = trial.rows,
                                         .n = large_width,
                                         .k = 64,
                                         .a = a.data(),
                                         .b = b.data(),
                                         .c = c.data(),
                                         .lda = 64,
                                         .ldb = large_width,
                                         .ldc = large_width});
            const Tensor back = trial.output(64);
            kernels::gemm(exec_of(gpu), {.dtype = bf16,
                                         .c_dtype = bf16,
                                         .transpose_b = true,
                                         .m = trial.rows,
                                         .n = 64,
                                         .k = large_width,
                                         .a = c.data(),
                                         .b = b.data(),
                                         .c = back.data(),
                                         .lda = large_width,
                                         .ldb = large_width,
                                         .ldc = 64});
            const Tensor gradient = Tensor::empty({64, large_width}, DType::float32, gpu);
            kernels::gemm(exec_of(gpu), {.dtype = bf16,
                                         .c_dtype = DType::float32,
                                         .transpose_a = true,
                                         .m = 64,
                                         .n = large_width,
                                         .k = trial.rows,
                                         .a = a.data(),
                                         .b = c.data(),
                                         .c = gradient.data(),
                                         .lda = 64,
                                         .ldb = large_width,
                                         .ldc = large_width});
            trial.also(gradient);
        },
        0.01);
}

}  // namespace
}  // namespace fenwick::test
