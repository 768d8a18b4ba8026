// What becomes of the columns of a product of decoding (DecodeColumns), one at a time.
#pragma once

#include "kernels/cuda/common.cuh"
#include "kernels/decode.h"

namespace fenwick::kernels::cuda {

// The part that a column is in; `column` becomes its number there.
__device__ __forceinline__ const DecodeColumns& part_of(const DecodeProjection& a, std::int64_t& column) {
    int p = 0;
    while (column >= a.part[p].columns) column -= a.part[p++].columns;
    return a.part[p];
}

// What finish() needs besides y. None of it is written by the launch before, so that it can be read ahead.
struct Operands {
    float a[4] = {}, b[4] = {};
};
constexpr int usual_width = 4;  // of a convolution; others are read when they are needed
__device__ __forceinline__ Operands load_operands(const DecodeProjection& a, std::int64_t column, std::int64_t row) {
    const DecodeColumns& part = part_of(a, column);
    Operands x;
    switch (part.kind) {
        case DecodeOutput::add:
            x.a[0] = part.out[row * part.columns + column];
            break;
        case DecodeOutput::convolution:
            if (part.width != usual_width) break;
#pragma unroll
            for (int i = 0; i < usual_width; ++i) x.a[i] = part.taps[column * usual_width + i];
#pragma unroll
            for (int i = 0; i + 1 < usual_width; ++i)
                x.b[i] = part.tail[(row * (usual_width - 1) + i) * part.columns + column];
            x.b[usual_width - 1] = part.bias != nullptr ? part.bias[column] : 0.0f;
            break;
        case DecodeOutput::decay:
            x.a[0] = part.step_bias[column];
            x.a[1] = part.a_log[column];
            break;
        case DecodeOutput::level_scales:
            x.a[0] = part.level_weight[column];
            break;
        default:
            break;
    }
    return x;
}

__device__ __forceinline__ float convolve(const DecodeColumns& part, std::int64_t column, std::int64_t row, float y,
                                          const Operands& x) {
    const int kept = static_cast<int>(part.width) - 1;
    float* const tail = part.tail + row * kept * part.columns + column;
    float sum;
    if (part.width == usual_width) {
        sum = x.b[usual_width - 1];
#pragma unroll
        for (int i = 0; i + 1 < usual_width; ++i) {
            sum += x.a[i] * x.b[i];
            tail[i * part.columns] = i + 2 < usual_width ? x.b[i + 1] : y;
        }
        sum += x.a[usual_width - 1] * y;
    } else {
        const float* const taps = part.taps + column * part.width;
        sum = part.bias != nullptr ? part.bias[column] : 0.0f;
        for (int i = 0; i < kept; ++i) {
            sum += taps[i] * tail[i * part.columns];
            if (i > 0) tail[(i - 1) * part.columns] = tail[i * part.columns];
        }
        if (kept > 0) tail[(kept - 1) * part.columns] = y;
        sum += taps[kept] * y;
    }
    return silu_of(sum);
}

// put(where, value) for what column `column` of the product, y, becomes.
template <class Put>
__device__ __forceinline__ void finish(const DecodeProjection& a, std::int64_t column, std::int64_t row, float y,
                                       const Operands& x, Put&& put) {
    const DecodeColumns& part = part_of(a, column);
    const std::int64_t at = row * part.columns + column;
    switch (part.kind) {
        case DecodeOutput::store:
            put(part.out + at, y);
            break;
        case DecodeOutput::add:
            put(part.out + at, x.a[0] + y);
            break;
        case DecodeOutput::swiglu:
            break;  // two columns together: the caller's
        case DecodeOutput::convolution:
            put(part.out + at, convolve(part, column, row, y, x));
            break;
        case DecodeOutput::decay: {
            const float step = softplus_of(y + x.a[0]);
            put(part.out + at, step);
            put(part.log_decay + at, -expf(x.a[1]) * step);
            break;
        }
        case DecodeOutput::level_scales:
            put(part.out + at, softplus_of(x.a[0] * y));
            break;
        case DecodeOutput::sigmoid:
            put(part.out + at, sigmoid_of(y));
            break;
    }
}

}  // namespace fenwick::kernels::cuda
