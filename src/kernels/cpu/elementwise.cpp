#include "kernels/elementwise.h"

#include <algorithm>
#include <bit>
#include <type_traits>
#include <vector>

#include "base/parallel.h"

namespace fenwick::kernels::cpu {
namespace {

constexpr std::int64_t grain_elements = 16384;

// bfloat16 on the CPU is storage only: converted on load and store (round to nearest even).
struct Bfloat16 {
    std::uint16_t bits;
    operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
    Bfloat16& operator=(float value) {
        const auto word = std::bit_cast<std::uint32_t>(value);
        if ((word & 0x7fffffffu) > 0x7f800000u)
            bits = static_cast<std::uint16_t>((word >> 16) | 0x40u);  // NaN stays NaN
        else
            bits = static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
        return *this;
    }
};

template <class F>
void dispatch_storage(std::string_view op, DType dtype, F&& fn) {
    switch (dtype) {
        case DType::float32: return fn(TypeTag<float>{});
        case DType::float64: return fn(TypeTag<double>{});
        case DType::bfloat16: return fn(TypeTag<Bfloat16>{});
        default: fail("[{}] dtype {} is not a floating type", op, name_of(dtype));
    }
}

std::int64_t rows_per_block(std::int64_t columns) {
    return std::max<std::int64_t>(1, grain_elements / std::max<std::int64_t>(columns, 1));
}

}  // namespace

void axpby(const Exec&, const Axpby& args) {
    dispatch_storage("axpby", args.x_dtype, [&]<class X>(TypeTag<X>) {
        dispatch_storage("axpby", args.y_dtype, [&]<class Y>(TypeTag<Y>) {
            using Compute = std::conditional_t<std::is_same_v<X, double> || std::is_same_v<Y, double>, double, float>;
            const auto* x = static_cast<const X*>(args.x);
            auto* y = static_cast<Y*>(args.y);
            // Bfloat16 stores float: a double result is narrowed to it first.
            using Stored = std::conditional_t<std::is_same_v<Y, double>, double, float>;
            const auto a = static_cast<Compute>(args.a), b = static_cast<Compute>(args.b);
            // One long dense row is cut into pieces, so that all threads have work.
            const bool dense = args.rows <= 1 || (args.x_stride == args.columns && args.y_stride == args.columns);
            const std::int64_t total = args.rows * args.columns;
            const std::int64_t rows = dense ? (total + grain_elements - 1) / grain_elements : args.rows;
            parallel_for(0, rows, dense ? 1 : rows_per_block(args.columns), [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t row = begin; row < end; ++row) {
                    const std::int64_t columns = dense ? std::min(grain_elements, total - row * grain_elements) : args.columns;
                    const X* xr = x + row * (dense ? grain_elements : args.x_stride);
                    Y* yr = y + row * (dense ? grain_elements : args.y_stride);
                    if (args.b == 0.0) {
                        for (std::int64_t c = 0; c < columns; ++c)
                            yr[c] = static_cast<Stored>(a * static_cast<Compute>(xr[c]));
                    } else {
                        for (std::int64_t c = 0; c < columns; ++c)
                            yr[c] = static_cast<Stored>(a * static_cast<Compute>(xr[c]) + b * static_cast<Compute>(yr[c]));
                    }
                }
            });
        });
    });
}

void add(const Exec&, const Add& args) {
    dispatch_cpu_float("add", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* x = static_cast<const T*>(args.x);
        const auto* y = static_cast<const T*>(args.y);
        auto* out = static_cast<T*>(args.out);
        parallel_for(0, args.count, grain_elements, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) out[i] = x[i] + y[i];
        });
    });
}

void fill(const Exec&, const Fill& args) {
    const auto fill_as = [&](auto* values, auto value) {
        parallel_for(0, args.count, grain_elements, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) values[i] = value;
        });
    };
    switch (args.dtype) {
        case DType::int32: return fill_as(static_cast<std::int32_t*>(args.values), static_cast<std::int32_t>(args.value));
        case DType::int64: return fill_as(static_cast<std::int64_t*>(args.values), static_cast<std::int64_t>(args.value));
        case DType::uint8: return fill_as(static_cast<std::uint8_t*>(args.values), static_cast<std::uint8_t>(args.value));
        default: break;
    }
    dispatch_storage("fill", args.dtype, [&]<class T>(TypeTag<T>) {
        using Stored = std::conditional_t<std::is_same_v<T, double>, double, float>;
        fill_as(static_cast<T*>(args.values), static_cast<Stored>(args.value));
    });
}

void scale_by(const Exec&, const ScaleBy& args) {
    dispatch_cpu_float("scale_by", args.dtype, [&]<class T>(TypeTag<T>) {
        const T factor = *static_cast<const T*>(args.factor);
        auto* values = static_cast<T*>(args.values);
        if (factor == T{1}) return;
        parallel_for(0, args.count, grain_elements, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) values[i] *= factor;
        });
    });
}

void scale_heads_forward(const Exec&, const ScaleHeads& args) {
    dispatch_cpu_float("scale_heads", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* x = static_cast<const T*>(args.x);
        const auto* scale = static_cast<const T*>(args.scale);
        auto* y = static_cast<T*>(args.y);
        const std::int64_t heads = args.heads, width = args.width;
        parallel_for(0, args.tokens, rows_per_block(heads * width), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t t = begin; t < end; ++t)
                for (std::int64_t h = 0; h < heads; ++h) {
                    const T factor = scale[t * heads + h];
                    const T* xr = x + t * args.x_stride + h * width;
                    T* yr = y + (t * heads + h) * width;
                    for (std::int64_t c = 0; c < width; ++c) yr[c] = xr[c] * factor;
                }
        });
    });
}

void scale_heads_backward(const Exec&, const ScaleHeadsBackward& args) {
    dispatch_cpu_float("scale_heads", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* x = static_cast<const T*>(args.x);
        const auto* scale = static_cast<const T*>(args.scale);
        const auto* dy = static_cast<const T*>(args.dy);
        auto* dx = static_cast<T*>(args.dx);
        auto* dscale = static_cast<T*>(args.dscale);
        const std::int64_t heads = args.heads, width = args.width;
        parallel_for(0, args.tokens, rows_per_block(heads * width), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t t = begin; t < end; ++t)
                for (std::int64_t h = 0; h < heads; ++h) {
                    const T factor = scale[t * heads + h];
                    const T* xr = x + t * args.x_stride + h * width;
                    const T* dyr = dy + (t * heads + h) * width;
                    T* dxr = dx + t * args.dx_stride + h * width;
                    T dot = 0;
                    for (std::int64_t c = 0; c < width; ++c) dot += dyr[c] * xr[c];
                    for (std::int64_t c = 0; c < width; ++c)
                        dxr[c] = dyr[c] * factor + (args.accumulate_dx ? dxr[c] : T{0});
                    dscale[t * heads + h] = dot;
                }
        });
    });
}

void head_skip_forward(const Exec&, const HeadSkip& args) {
    dispatch_cpu_float("head_skip", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* o = static_cast<const T*>(args.o);
        const auto* x = static_cast<const T*>(args.x);
        const auto* skip = static_cast<const T*>(args.skip);
        auto* y = static_cast<T*>(args.y);
        const std::int64_t heads = args.heads, width = args.width;
        parallel_for(0, args.tokens, rows_per_block(heads * width), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t t = begin; t < end; ++t)
                for (std::int64_t h = 0; h < heads; ++h) {
                    const std::int64_t dense = (t * heads + h) * width;
                    const T* xr = x + t * args.x_stride + h * width;
                    for (std::int64_t c = 0; c < width; ++c) y[dense + c] = o[dense + c] + skip[h] * xr[c];
                }
        });
    });
}

void head_skip_backward(const Exec&, const HeadSkipBackward& args) {
    dispatch_cpu_float("head_skip", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* x = static_cast<const T*>(args.x);
        const auto* skip = static_cast<const T*>(args.skip);
        const auto* dy = static_cast<const T*>(args.dy);
        auto* dx = static_cast<T*>(args.dx);
        auto* dskip = static_cast<T*>(args.dskip);
        const std::int64_t heads = args.heads, width = args.width;
        const std::int64_t grain = rows_per_block(heads * width);
        const std::int64_t blocks = (args.tokens + grain - 1) / grain;
        std::vector<T> partial(static_cast<std::size_t>(blocks * heads), T{0});
        parallel_for(0, args.tokens, grain, [&](std::int64_t begin, std::int64_t end) {
            T* sums = partial.data() + begin / grain * heads;
            for (std::int64_t t = begin; t < end; ++t)
                for (std::int64_t h = 0; h < heads; ++h) {
                    const T* xr = x + t * args.x_stride + h * width;
                    const T* dyr = dy + (t * heads + h) * width;
                    T* dxr = dx + t * args.dx_stride + h * width;
                    T dot = 0;
                    for (std::int64_t c = 0; c < width; ++c) dot += dyr[c] * xr[c];
                    for (std::int64_t c = 0; c < width; ++c)
                        dxr[c] = dyr[c] * skip[h] + (args.accumulate_dx ? dxr[c] : T{0});
                    sums[h] += dot;
                }
        });
        for (std::int64_t h = 0; h < heads; ++h) {
            T total = args.accumulate_dskip ? dskip[h] : T{0};
            for (std::int64_t block = 0; block < blocks; ++block) total += partial[static_cast<std::size_t>(block * heads + h)];
            dskip[h] = total;
        }
    });
}

}  // namespace fenwick::kernels::cpu
