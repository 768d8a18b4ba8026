#include "kernels/elementwise.h"

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {
namespace {

// ---- axpby, add, fill ------------------------------------------------------------------------------------------------

// axpby alone also takes float64, so that tensors of any floating type can be copied and converted on the device.
template <class F>
void dispatch_storage(std::string_view op, DType dtype, F&& fn) {
    switch (dtype) {
        case DType::float32:
            return fn(TypeTag<float>{});
        case DType::float64:
            return fn(TypeTag<double>{});
        case DType::bfloat16:
            return fn(TypeTag<Bfloat16>{});
        default:
            fail("[{}] dtype {} is not a floating type", op, name_of(dtype));
    }
}

template <class X, class Y, int V>
__global__ void axpby_kernel(Axpby args) {
    using Compute = std::conditional_t<std::is_same_v<X, double> || std::is_same_v<Y, double>, double, float>;
    const auto* x = static_cast<const X*>(args.x);
    auto* y = static_cast<Y*>(args.y);
    const auto a = static_cast<Compute>(args.a), b = static_cast<Compute>(args.b);
    const bool reads_y = args.b != 0.0;
    for_each_cell<V>(args.rows, args.columns, [&](std::int64_t row, std::int64_t column) {
        Compute values[V];
        load<V, Compute>(values, x + row * args.x_stride + column);
        Y* place = y + row * args.y_stride + column;
#pragma unroll
        for (int i = 0; i < V; ++i) values[i] *= a;
        if (reads_y) {
            Compute before[V];
            load<V, Compute>(before, place);
#pragma unroll
            for (int i = 0; i < V; ++i) values[i] += b * before[i];
        }
        store(place, values);
    });
}

template <class T, int V>
__global__ void add_kernel(Add args, std::int64_t count) {
    const auto* x = static_cast<const T*>(args.x);
    const auto* y = static_cast<const T*>(args.y);
    auto* out = static_cast<T*>(args.out);
    for_each_cell<V>(1, count, [&](std::int64_t, std::int64_t i) {
        float a[V], b[V];
        load(a, x + i);
        load(b, y + i);
#pragma unroll
        for (int j = 0; j < V; ++j) a[j] += b[j];
        store(out + i, a);
    });
}

template <class T>
__global__ void fill_kernel(T* values, std::int64_t count, T value) {
    for_each_cell<1>(1, count, [&](std::int64_t, std::int64_t i) { values[i] = value; });
}

template <class T, int V>
__global__ void scale_by_kernel(T* values, std::int64_t count, const float* factor) {
    const float scale = *factor;
    if (scale == 1.0f) return;
    for_each_cell<V>(1, count, [&](std::int64_t, std::int64_t i) {
        float x[V];
        load(x, values + i);
#pragma unroll
        for (int j = 0; j < V; ++j) x[j] *= scale;
        store(values + i, x);
    });
}

}  // namespace

void axpby(const Exec& exec, const Axpby& given) {
    const OperatorScope scope("axpby", exec);
    Axpby args = given;
    // A dense matrix is one long row.
    if (args.rows > 1 && args.x_stride == args.columns && args.y_stride == args.columns) {
        args.columns *= args.rows;
        args.rows = 1;
    }
    if (args.rows <= 1) args.x_stride = args.y_stride = args.columns;
    dispatch_storage("axpby", args.x_dtype, [&]<class X>(TypeTag<X>) {
        dispatch_storage("axpby", args.y_dtype, [&]<class Y>(TypeTag<Y>) {
            const auto run = [&](auto v) {
                const auto [grid, block] = cell_grid(args.rows, args.columns, v);
                launch("axpby", exec, axpby_kernel<X, Y, v()>, grid, block, 0, args);
            };
            if (args.rows == 1 && args.columns % wide != 0 && args.columns > wide && can_use_wide({}, {args.x, args.y})) {
                // Whole vectors first, then the few elements that remain.
                const std::int64_t rest = args.columns % wide, whole = args.columns - rest;
                args.columns = whole;
                run(std::integral_constant<int, wide>{});
                args.columns = rest;
                args.x = static_cast<const X*>(args.x) + whole;
                args.y = static_cast<Y*>(args.y) + whole;
                run(std::integral_constant<int, 1>{});
                return;
            }
            dispatch_width(can_use_wide({args.columns, args.x_stride, args.y_stride}, {args.x, args.y}), run);
        });
    });
}

void add(const Exec& exec, const Add& args) {
    const OperatorScope scope("add", exec);
    dispatch("add", args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t whole = can_use_wide({}, {args.x, args.y, args.out}) ? args.count / wide * wide : 0;
        if (whole > 0) {
            const auto [grid, block] = cell_grid(1, whole, wide);
            launch("add", exec, add_kernel<T, wide>, grid, block, 0, args, whole);
        }
        if (whole < args.count) {
            Add rest = args;
            rest.x = static_cast<const T*>(args.x) + whole;
            rest.y = static_cast<const T*>(args.y) + whole;
            rest.out = static_cast<T*>(args.out) + whole;
            const auto [grid, block] = cell_grid(1, args.count - whole, 1);
            launch("add", exec, add_kernel<T, 1>, grid, block, 0, rest, args.count - whole);
        }
    });
}

void fill(const Exec& exec, const Fill& args) {
    const OperatorScope scope("fill", exec);
    const auto fill_as = [&](auto value) {
        using T = decltype(value);
        const auto [grid, block] = cell_grid(1, args.count, 1);
        launch("fill", exec, fill_kernel<T>, grid, block, 0, static_cast<T*>(args.values), args.count, value);
    };
    switch (args.dtype) {
        case DType::float32:
            return fill_as(static_cast<float>(args.value));
        case DType::float64:
            return fill_as(args.value);
        case DType::bfloat16:
            return fill_as(__float2bfloat16_rn(static_cast<float>(args.value)));
        case DType::int32:
            return fill_as(static_cast<std::int32_t>(args.value));
        case DType::int64:
            return fill_as(static_cast<std::int64_t>(args.value));
        case DType::uint8:
            return fill_as(static_cast<std::uint8_t>(args.value));
    }
}

void scale_by(const Exec& exec, const ScaleBy& args) {
    const OperatorScope scope("scale_by", exec);
    dispatch("scale_by", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({args.count}, {args.values}), [&](auto v) {
            const auto [grid, block] = cell_grid(1, args.count, v);
            launch("scale_by", exec, scale_by_kernel<T, v()>, grid, block, 0, static_cast<T*>(args.values), args.count,
                   static_cast<const float*>(args.factor));
        });
    });
}

// ---- scale_heads, head_skip ------------------------------------------------------------------------------------------

namespace {

template <class T, int V>
__global__ void scale_heads_forward_kernel(ScaleHeads args) {
    const auto* x = static_cast<const T*>(args.x);
    const auto* scale = static_cast<const float*>(args.scale);
    auto* y = static_cast<T*>(args.y);
    const std::int64_t columns = args.heads * args.width;
    const auto width = static_cast<unsigned>(args.width);
    for_each_cell<V>(args.tokens, columns, [&](std::int64_t token, std::int64_t column) {
        const float factor = scale[token * args.heads + static_cast<unsigned>(column) / width];
        float values[V];
        load(values, x + token * args.x_stride + column);
#pragma unroll
        for (int i = 0; i < V; ++i) values[i] *= factor;
        store(y + token * columns + column, values);
    });
}

template <class T, int V>
__global__ void head_skip_forward_kernel(HeadSkip args) {
    const auto* o = static_cast<const T*>(args.o);
    const auto* x = static_cast<const T*>(args.x);
    const auto* skip = static_cast<const float*>(args.skip);
    auto* y = static_cast<T*>(args.y);
    const std::int64_t columns = args.heads * args.width;
    const auto width = static_cast<unsigned>(args.width);
    for_each_cell<V>(args.tokens, columns, [&](std::int64_t token, std::int64_t column) {
        const float factor = skip[static_cast<unsigned>(column) / width];
        float values[V], xs[V];
        load(values, o + token * columns + column);
        load(xs, x + token * args.x_stride + column);
#pragma unroll
        for (int i = 0; i < V; ++i) values[i] += factor * xs[i];
        store(y + token * columns + column, values);
    });
}

// dx (+)= dy * factor of the head; dots[token, head] = dy . x. The factor is scale[token, head] or skip[head]: factor_stride
// is its distance between tokens, `heads` or 0. A team of `lanes` lanes takes one (token, head).
template <class T, int V>
__global__ void head_backward_kernel(std::int64_t tokens, std::int64_t heads, std::int64_t width, int lanes, const T* x,
                                     std::int64_t x_stride, const float* factors, std::int64_t factor_stride, const T* dy,
                                     T* dx, std::int64_t dx_stride, bool accumulate_dx, float* dots) {
    const int lane = threadIdx.x % lanes;
    const std::int64_t count = tokens * heads, teams = blockDim.x / lanes;
    for (std::int64_t first = blockIdx.x * teams; first < count; first += gridDim.x * teams) {
        const std::int64_t index = first + threadIdx.x / lanes;
        const std::int64_t token = index / heads, head = index - token * heads;
        float dot = 0;
        if (index < count) {
            const float factor = factors[token * factor_stride + head];
            for (std::int64_t column = lane * V; column < width; column += lanes * V) {
                float xs[V], d[V];
                load(xs, x + token * x_stride + head * width + column);
                load(d, dy + index * width + column);
#pragma unroll
                for (int i = 0; i < V; ++i) {
                    dot += d[i] * xs[i];
                    d[i] *= factor;
                }
                store(dx + token * dx_stride + head * width + column, d, accumulate_dx);
            }
        }
        dot = team_sum(dot, lanes);
        if (lane == 0 && index < count) dots[index] = dot;
    }
}

template <class Args>
void head_backward(const char* op, const Exec& exec, const Args& args, const void* factors, std::int64_t factor_stride,
                   float* dots) {
    dispatch(op, args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({args.width, args.x_stride, args.dx_stride}, {args.x, args.dy, args.dx}), [&](auto v) {
            const int lanes = next_power_of_two(ceil_div(args.width, v), 32);
            const std::int64_t blocks = std::min<std::int64_t>(ceil_div(args.tokens * args.heads, 256 / lanes), 16384);
            launch(op, exec, head_backward_kernel<T, v()>, dim3(static_cast<unsigned>(blocks)), dim3(256), 0, args.tokens,
                   args.heads, args.width, lanes, static_cast<const T*>(args.x), args.x_stride,
                   static_cast<const float*>(factors), factor_stride, static_cast<const T*>(args.dy),
                   static_cast<T*>(args.dx), args.dx_stride, args.accumulate_dx, dots);
        });
    });
}

}  // namespace

void scale_heads_forward(const Exec& exec, const ScaleHeads& args) {
    const OperatorScope scope("scale_heads_forward", exec);
    dispatch("scale_heads", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({args.width, args.x_stride}, {args.x, args.y}), [&](auto v) {
            const auto [grid, block] = cell_grid(args.tokens, args.heads * args.width, v);
            launch("scale_heads_forward", exec, scale_heads_forward_kernel<T, v()>, grid, block, 0, args);
        });
    });
}

void scale_heads_backward(const Exec& exec, const ScaleHeadsBackward& args) {
    const OperatorScope scope("scale_heads_backward", exec);
    head_backward("scale_heads_backward", exec, args, args.scale, args.heads, static_cast<float*>(args.dscale));
}

void head_skip_forward(const Exec& exec, const HeadSkip& args) {
    const OperatorScope scope("head_skip_forward", exec);
    dispatch("head_skip", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({args.width, args.x_stride}, {args.o, args.x, args.y}), [&](auto v) {
            const auto [grid, block] = cell_grid(args.tokens, args.heads * args.width, v);
            launch("head_skip_forward", exec, head_skip_forward_kernel<T, v()>, grid, block, 0, args);
        });
    });
}

void head_skip_backward(const Exec& exec, const HeadSkipBackward& args) {
    const OperatorScope scope("head_skip_backward", exec);
    const Buffer dots = workspace(exec, args.tokens * args.heads * static_cast<std::int64_t>(sizeof(float)));
    head_backward("head_skip_backward", exec, args, args.skip, 0, dots.as<float>());
    column_sums(exec, dots.as<float>(), args.tokens, args.heads, static_cast<float*>(args.dskip), args.accumulate_dskip);
}

}  // namespace fenwick::kernels::cuda
