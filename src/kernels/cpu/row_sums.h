// Sums over rows (gradients of weights) with the same bits for any number of threads, and the block sizes of row loops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/parallel.h"

namespace fenwick::kernels::cpu {

// Rows in a block of a parallel loop that does the same work for each element.
inline std::int64_t rows_per_block(std::int64_t columns, std::int64_t elements = 16384) {
    return std::max<std::int64_t>(1, elements / std::max<std::int64_t>(columns, 1));
}

// Calls body(begin, end, sums) for blocks of rows, in parallel; each block has zeroed sums [columns] of its own. Returns
// their total, added in the order of the blocks. There are at most 128 blocks, so that this addition stays small, and none
// (but the last) has fewer than `least_rows` rows.
template <class T, class Body>
std::vector<T> sum_over_rows(std::int64_t rows, std::int64_t columns, Body&& body, std::int64_t least_rows = 1) {
    const std::int64_t grain = std::max({(rows + 127) / 128, rows_per_block(columns, 4096), least_rows});
    const std::int64_t blocks = (rows + grain - 1) / grain;
    std::vector<T> partial(static_cast<std::size_t>(std::max<std::int64_t>(blocks, 1) * columns), T{0});
    parallel_for(0, rows, grain, [&](std::int64_t begin, std::int64_t end) {
        body(begin, end, partial.data() + begin / grain * columns);
    });
    parallel_for(0, columns, 1024, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t block = 1; block < blocks; ++block)
            for (std::int64_t c = begin; c < end; ++c) partial[c] += partial[block * columns + c];
    });
    partial.resize(static_cast<std::size_t>(columns));
    return partial;
}

// out (+)= sums
template <class T>
void store_sums(const T* sums, std::int64_t count, void* out, bool accumulate) {
    auto* to = static_cast<T*>(out);
    for (std::int64_t c = 0; c < count; ++c) to[c] = sums[c] + (accumulate ? to[c] : T{0});
}

}  // namespace fenwick::kernels::cpu
