// Multi-threading on the CPU: one pool, loops over fixed blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace fenwick {

// Number of threads that parallel_for uses, the calling thread included. Default: FENWICK_NUM_THREADS, else the
// cores this process may run on. Changing it does not change results: work is cut into blocks by `grain` alone.
int num_threads();
void set_num_threads(int count);

namespace detail {
using BlockFunction = void (*)(void* context, std::int64_t begin, std::int64_t end);
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, BlockFunction function, void* context);
}  // namespace detail

// Calls body(block_begin, block_end) for consecutive blocks of `grain` indices (the last may be shorter) that cover
// [begin, end), on all threads, each block once. Blocks never depend on the number of threads, so a reduction that
// keeps one partial result a block and adds them in order gives the same bits with any number of threads.
// Inside another parallel_for it runs on the calling thread. The first exception of a body is rethrown here.
template <class Body>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    detail::parallel_for(
        begin, end, grain,
        [](void* context, std::int64_t block_begin, std::int64_t block_end) {
            (*static_cast<Plain*>(context))(block_begin, block_end);
        },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace fenwick
