// The asynchronous instructions of kernels/cuda/asynchronous.cuh, emulated. Products are done as late as they may be, when
// they are waited for: operands that change too early, and results that are read too early, show.
#pragma once

#include <deque>

#include "cuda_emulation.h"

namespace emulation {

struct Product {
    float* d;
    const std::uint32_t* a;         // fragments, or null:
    const unsigned char* shared_a;  // the warp's rows in shared memory
    const unsigned char* b;
    bool along_rows, add;
};
struct ProductQueue {
    std::vector<Product> open;
    std::deque<std::vector<Product>> groups;
};
inline ProductQueue& product_queue() {
    static std::vector<ProductQueue> queues(1024);
    return queues[static_cast<std::size_t>(thread)];
}

template <bool AlongRows>
void multiply(float (&d)[8][4], const std::uint32_t (&a)[4], const __nv_bfloat16* b, int offset = 0, bool add = true) {
    product_queue().open.push_back(
        {&d[0][0], a, nullptr, reinterpret_cast<const unsigned char*>(b + offset), AlongRows, add});
}
template <bool AlongRows>
void multiply(float (&d)[8][4], const __nv_bfloat16* a, const __nv_bfloat16* b, int a_offset = 0, int offset = 0,
              bool add = true) {
    product_queue().open.push_back({&d[0][0], nullptr,
                                    reinterpret_cast<const unsigned char*>(a + a_offset + thread % 128 / 32 * 16 * 64),
                                    reinterpret_cast<const unsigned char*>(b + offset), AlongRows, add});
}
inline void commit() {
    ProductQueue& queue = product_queue();
    queue.groups.push_back(std::move(queue.open));
    queue.open.clear();
}

// One product of a warp's 16 rows.
inline void do_products(void* const* all) {
    const auto product = [&](int lane) -> const Product& { return *static_cast<const Product*>(all[lane]); };
    const Product& first = product(0);
    float a[16][16], b[16][64];
    // The element `offset` bytes behind `at`; bytes of shared memory are swizzled.
    const auto element = [](const unsigned char* at, int offset) {
        auto place = at - shared_memory() + offset;
        place ^= (place >> 7 & 7) << 4;
        __nv_bfloat16 value;
        std::memcpy(&value, shared_memory() + place, 2);
        return __bfloat162float(value);
    };
    if (first.shared_a != nullptr) {
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < 16; ++k) a[row][k] = element(first.shared_a, row * 128 + k * 2);
    } else {
        for (int t = 0; t < 32; ++t)
            for (int part = 0; part < 4; ++part)
                for (int e = 0; e < 2; ++e) {
                    const std::uint32_t pair = product(t).a[part];
                    a[t / 4 + part % 2 * 8][2 * (t % 4) + part / 2 * 8 + e] =
                        __uint_as_float(e != 0 ? pair & 0xffff0000u : pair << 16);
                }
    }
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 64; ++n) b[k][n] = element(first.b, first.along_rows ? k * 128 + n * 2 : n * 128 + k * 2);
    for (int t = 0; t < 32; ++t)
        for (int i = 0; i < 32; ++i) {
            const int row = t / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * (t % 4) + i % 2;
            float sum = first.add ? product(t).d[i] : 0.0f;
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            product(t).d[i] = sum;
        }
}
template <int Pending>
void wait_products() {
    ProductQueue& queue = product_queue();
    while (queue.groups.size() > Pending) {
        for (Product& product : queue.groups.front()) collective(do_products, &product);
        queue.groups.pop_front();
    }
    collective([](void* const*) {}, nullptr);
}

inline void fence_barriers() {}
inline void copy_bulk_once(void* to, const void* from, int bytes, Barrier* barrier) { copy_bulk(to, from, bytes, barrier); }
inline void fence_written() {}
template <int>
void claim_registers() {}
template <int>
void release_registers() {}
template <bool Transpose>
void store_matrices(__nv_bfloat16* row, const std::uint32_t (&x)[4]) {
    struct Argument {
        __nv_bfloat16* row;
        const std::uint32_t* x;
    } argument{row, x};
    if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) stop("stmatrix to an address that is no multiple of 16");
    collective(
        [](void* const* all) {
            for (int m = 0; m < 4; ++m)
                for (int t = 0; t < 32; ++t)
                    for (int e = 0; e < 2; ++e) {
                        const int line = Transpose ? 2 * (t % 4) + e : t / 4, column = Transpose ? t / 4 : 2 * (t % 4) + e;
                        static_cast<Argument*>(all[8 * m + line])->row[column].bits =
                            static_cast<std::uint16_t>(static_cast<Argument*>(all[t])->x[m] >> (16 * e));
                    }
        },
        &argument);
}

}  // namespace emulation
