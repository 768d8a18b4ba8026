// Element types, and the one typed dispatcher that kernels use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"

namespace fenwick {

enum class DType : std::uint8_t { float32, float64, bfloat16, int32, int64, uint8 };

constexpr std::size_t size_of(DType dtype) {
    switch (dtype) {
        case DType::float64:
        case DType::int64: return 8;
        case DType::float32:
        case DType::int32: return 4;
        case DType::bfloat16: return 2;
        case DType::uint8: return 1;
    }
    return 0;
}

constexpr std::string_view name_of(DType dtype) {
    switch (dtype) {
        case DType::float32: return "float32";
        case DType::float64: return "float64";
        case DType::bfloat16: return "bfloat16";
        case DType::int32: return "int32";
        case DType::int64: return "int64";
        case DType::uint8: return "uint8";
    }
    return "?";
}

constexpr bool is_floating(DType dtype) {
    return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::bfloat16;
}

// The type that decays, gates, level scales, norms' weights and sums are kept in beside activations of `dtype`:
// float32 for bfloat16 and float32, float64 for float64.
constexpr DType gate_dtype(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
    static constexpr DType value = DType::float32;
};
template <>
struct DTypeOf<double> {
    static constexpr DType value = DType::float64;
};
template <>
struct DTypeOf<std::int32_t> {
    static constexpr DType value = DType::int32;
};
template <>
struct DTypeOf<std::int64_t> {
    static constexpr DType value = DType::int64;
};
template <>
struct DTypeOf<std::uint8_t> {
    static constexpr DType value = DType::uint8;
};
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

template <class T>
struct TypeTag {
    using type = T;
};

// Calls fn(TypeTag<T>{}) with T = float or double: the types the CPU kernels are instantiated for.
// `op` names the caller in the error for any other dtype.
template <class F>
decltype(auto) dispatch_cpu_float(std::string_view op, DType dtype, F&& fn) {
    switch (dtype) {
        case DType::float32: return fn(TypeTag<float>{});
        case DType::float64: return fn(TypeTag<double>{});
        default: fail("[{}] dtype {} is not available on the CPU; use float32 or float64", op, name_of(dtype));
    }
}

}  // namespace fenwick
