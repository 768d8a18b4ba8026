// Sampling on the device, by one block: the host learns the id when it is long fed.
#include <cub/device/device_radix_sort.cuh>

#include "base/random.h"
#include "kernels/cuda/common.cuh"
#include "kernels/decode.h"

namespace fenwick::kernels::cuda {
namespace {

constexpr int threads = 1024;

// Inclusive sums over the threads of the block, in order; `total` is that of the last.
__device__ double running_sum(double value, double* scratch, double& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int offset = 1; offset < 32; offset *= 2) {
        const double below = __shfl_up_sync(0xffffffffu, value, offset);
        if (lane >= offset) value += below;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = value;
    __syncthreads();
    double before = 0;
    total = 0;
    for (int w = 0; w < threads / 32; ++w) {
        if (w == warp) before = total;
        total += scratch[w];
    }
    return before + value;
}

// logits, and ids unless they are in order, of one row: all of the vocabulary or, sorted, the likeliest first.
__global__ void __launch_bounds__(threads)
    sample_kernel(Sample a, std::int64_t row, const float* logits, const std::int32_t* ids) {
    __shared__ double scratch[threads / 32];
    __shared__ unsigned long long best;
    __shared__ int chosen;
    __shared__ float highest;
    __shared__ std::int64_t kept_shared;
    __shared__ double mass_shared;
    const int thread = static_cast<int>(threadIdx.x);
    const auto n = static_cast<std::uint64_t>(*a.position - a.first_position);
    const auto count = static_cast<int>(a.vocabulary);
    if (thread == 0) {
        best = 0;
        chosen = count;
        kept_shared = 0;
        mass_shared = 0;
    }
    __syncthreads();
    // The largest logit, the lower id among equals; what is not finite wins.
    unsigned long long mine = 0;
#pragma unroll 8
    for (int i = thread; i < count; i += threads) {
        const float x = logits[i];
        const std::uint32_t bits = __float_as_uint(x == 0 ? 0.0f : x);
        const std::uint32_t ordered = x != x || x == INFINITY ? 0xffffffffu
                                      : bits & 0x80000000u    ? ~bits
                                                              : bits | 0x80000000u;
        const unsigned long long key = static_cast<unsigned long long>(ordered) << 32 | static_cast<std::uint32_t>(~i);
        mine = key > mine ? key : mine;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        const unsigned long long other = __shfl_xor_sync(0xffffffffu, mine, offset);
        mine = other > mine ? other : mine;
    }
    if (thread % 32 == 0) atomicMax(&best, mine);
    __syncthreads();
    const bool finite = best >> 32 != 0xffffffffu;
    const int first = static_cast<int>(~static_cast<std::uint32_t>(best));
    if (thread == 0) highest = logits[first];
    __syncthreads();
    int position = first;  // of the chosen one in logits
    if (finite && a.temperature > 0) {
        std::int64_t kept = a.top_k > 0 && a.top_k < count ? a.top_k : count;
        // Consecutive ones to a thread, so that sums run in the order of the array.
        const int share = static_cast<int>((kept + threads - 1) / threads), begin = thread * share;
        const int end = begin + share < kept ? begin + share : static_cast<int>(kept);
        const auto inverse = static_cast<float>(1.0 / a.temperature);
        const auto weight = [&](int i) { return static_cast<double>(expf((logits[i] - highest) * inverse)); };
        double sum = 0;
#pragma unroll 8
        for (int i = begin; i < end; ++i) sum += weight(i);
        double total = 0;
        const double through = running_sum(sum, scratch, total), before = through - sum;
        if (a.top_p < 1) {  // the fewest that reach top_p of the mass
            const double wanted = a.top_p * total;
            if (begin < end && before < wanted && (wanted <= through || end == kept)) {
                double reached = before;
                int i = begin;
                while (i < end && reached < wanted) reached += weight(i++);
                kept_shared = i;
                mass_shared = reached;
            }
            __syncthreads();
            kept = kept_shared;
            total = mass_shared;
        }
        const std::uint64_t index = n * static_cast<std::uint64_t>(a.rows) + static_cast<std::uint64_t>(row);
        const double at =
            static_cast<double>(Random::bits(a.seed, a.stream, index) >> 11) * 0x1.0p-53 * total;  // Random::uniform
        if (begin < end && begin < kept && before <= at && at < through) {
            double reached = before;
            for (int i = begin; i < end && i < kept; ++i) {
                reached += weight(i);
                if (at < reached) {
                    atomicMin(&chosen, i);
                    break;
                }
            }
        }
        __syncthreads();
        position = chosen < count ? chosen : static_cast<int>(kept) - 1;  // rounding
    }
    if (thread != 0) return;
    const std::int32_t id = ids != nullptr ? ids[position] : position;
    a.ids[row] = finite ? id : 0;
    a.drawn[static_cast<std::int64_t>(n) % a.history * a.rows + row] = finite ? id : -1;
    if (row == a.rows - 1) ++*a.position;
}

__global__ void number_kernel(std::int32_t* ids, int count) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) ids[i] = i;
}

}  // namespace

void sample(const Exec& exec, const Sample& args) {
    constexpr const char* op = "sample";
    const OperatorScope scope(op, exec);
    const auto count = static_cast<int>(args.vocabulary);
    const bool sorted = args.temperature > 0 && ((args.top_k > 0 && args.top_k < args.vocabulary) || args.top_p < 1);
    for (std::int64_t row = 0; row < args.rows; ++row) {
        const float* const logits = args.logits + row * args.vocab;
        if (!sorted) {
            launch(op, exec, sample_kernel, dim3(1), dim3(threads), 0, args, row, logits,
                   static_cast<const std::int32_t*>(nullptr));
            continue;
        }
        // Stable, so that equal logits stay in the order of their ids.
        const Buffer numbers = workspace(exec, 4 * args.vocabulary), ids = workspace(exec, 4 * args.vocabulary),
                     values = workspace(exec, 4 * args.vocabulary);
        launch(op, exec, number_kernel, dim3(32), dim3(256), 0, numbers.as<std::int32_t>(), count);
        std::size_t bytes = 0;
        const auto sort = [&](void* scratch) {
            FENWICK_CUDA_CHECK(cub::DeviceRadixSort::SortPairsDescending(scratch, bytes, logits, values.as<float>(),
                                                                         numbers.as<std::int32_t>(), ids.as<std::int32_t>(),
                                                                         count, 0, 32, stream_of(exec)));
        };
        sort(nullptr);
        const Buffer scratch = workspace(exec, static_cast<std::int64_t>(bytes));
        sort(scratch.data());
        launch(op, exec, sample_kernel, dim3(1), dim3(threads), 0, args, row, values.as<float>(),
               static_cast<const std::int32_t*>(ids.as<std::int32_t>()));
    }
}

}  // namespace fenwick::kernels::cuda
