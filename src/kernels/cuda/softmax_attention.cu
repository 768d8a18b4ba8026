// Causal softmax attention on CUDA.
//
// bfloat16, head widths up to 128: tiles on the tensor cores (wgmma), sums in float32.
//   forward   a block takes 128 queries of a head; two warpgroups of 64 rows; keys and values stream through two stages.
//   backward  two kernels, so that nothing is added atomically: dk and dv by blocks of 128 keys that walk the queries (and
//             the heads of their group), dq by blocks of 128 queries that walk the keys. Scores are computed in both (seven
//             products instead of five) in the orientation whose results feed the next product from registers.
// Everything else (float32, wider heads): the *_simple kernels, a warp a row, which are also the slow twin.
//
// Source: Dao, "FlashAttention-2" (arXiv 2307.08691) for the running maximum and the recomputing backward.
#include "kernels/softmax_attention.h"

#include <limits>
#include <vector>

#include "kernels/cuda/sequences.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace fenwick::kernels::cuda {
namespace {

constexpr float log2_e = 1.4426950408889634f;

// ---- tiles of documents ----------------------------------------------------------------------------------------------------

// Every document cut into tiles of `size` tokens; tile i of all is found by the device without a table where documents are
// equal, else by a search in the running count of tiles.
struct Tiles {
    std::int64_t count = 0;
    std::int64_t per_document = 0;               // of equal documents
    const std::int64_t* first_tile = nullptr;    // [documents + 1], else

    struct Place {
        std::int64_t start;   // first token of the document
        std::int64_t length;  // of the document
        std::int64_t tile;    // within the document
    };
    __device__ Place place(const DeviceSequences& sequences, std::int64_t i) const {
        std::int64_t document, tile;
        if (per_document > 0) {
            document = i / per_document;
            tile = i % per_document;
        } else {
            std::int64_t low = 0, high = sequences.count;
            while (high - low > 1) {
                const std::int64_t middle = (low + high) / 2;
                (first_tile[middle] <= i ? low : high) = middle;
            }
            document = low;
            tile = i - first_tile[low];
        }
        const std::int64_t start = sequences.start_of(document);
        return {start, sequences.end_of(document) - start, tile};
    }
};

class TilesOnDevice {
public:
    TilesOnDevice(const Exec& exec, const Sequences& sequences, const DeviceSequences& view, std::int64_t size) {
        if (view.length > 0) {
            tiles_.per_document = ceil_div(view.length, size);
            tiles_.count = tiles_.per_document * sequences.count;
            return;
        }
        std::vector<std::int64_t> first(static_cast<std::size_t>(sequences.count) + 1, 0);
        for (std::int64_t i = 0; i < sequences.count; ++i)
            first[static_cast<std::size_t>(i) + 1] = first[static_cast<std::size_t>(i)] + ceil_div(sequences.length(i), size);
        tiles_.count = first.back();
        first_ = table_on_device(exec, first);
        tiles_.first_tile = first_->data;
    }
    const Tiles& view() const { return tiles_; }

private:
    std::shared_ptr<const DeviceTable> first_;
    Tiles tiles_;
};

// ---- bfloat16 on the tensor cores ------------------------------------------------------------------------------------------

constexpr int warpgroups = 2, block_threads = warpgroups * 128, block_rows = warpgroups * 64;

struct ForwardParameters {
    DeviceSequences sequences;
    Tiles tiles;
    std::int64_t heads, groups, q_stride, k_stride, v_stride;
    int width;
    const Bfloat16 *q, *k, *v;
    Bfloat16* o;
    float* lse;
};

// Scores of 64 rows against a tile of N: S = A B', both tiles [.. x D] in shared memory; queued, not awaited.
template <int D, int N>
__device__ __forceinline__ void multiply_scores(float (&s)[N / 2], std::uint32_t a_tile, int a_rows, int a_row,
                                                std::uint32_t b_tile) {
#pragma unroll
    for (int k = 0; k < D; k += 16)
        Wgmma<N>::template shared_a<false>(s, descriptor_along_columns(a_tile, a_rows, a_row, k),
                                           descriptor_along_columns(b_tile, N, 0, k), k > 0);
}

// O += P B with P [64 x N] in registers and tile B [N x D]; queued, not awaited.
template <int D, int N>
__device__ __forceinline__ void multiply_accumulate(float (&o)[D / 2], const float (&p)[N / 2], std::uint32_t b_tile,
                                                    std::uint32_t (&fragments)[N / 16][4]) {
#pragma unroll
    for (int k = 0; k < N / 16; ++k) to_a_fragment(fragments[k], p, k);
    hold_registers(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < N / 16; ++k)
        Wgmma<D>::template register_a<true>(o, fragments[k], descriptor_along_rows(b_tile, N, 16 * k, 0), true);
    wgmma_commit();
}

template <int D>
__global__ void __launch_bounds__(block_threads, 1) attention_forward_kernel(const ForwardParameters p) {
    constexpr int keys = 128;
    extern __shared__ __align__(1024) unsigned char shared[];
    const std::uint32_t q_tile = (shared_address(shared) + 1023) / 1024 * 1024;
    const std::uint32_t kv_tiles = q_tile + block_rows * D * 2;  // stage s: K at 2s, V at 2s + 1, each [keys x D]
    constexpr std::uint32_t kv_bytes = keys * D * 2;

    // Long rows first: their blocks start while there is other work to fill the card's end with.
    const auto place = p.tiles.place(p.sequences, p.tiles.count - 1 - static_cast<std::int64_t>(blockIdx.x));
    const std::int64_t head = blockIdx.y, group = head / (p.heads / p.groups);
    const std::int64_t first_query = place.tile * block_rows;
    const int thread = threadIdx.x, warpgroup = thread / 128, lane = thread % 32;

    const Bfloat16* q = p.q + (place.start + first_query) * p.q_stride + head * p.width;
    const Bfloat16* k = p.k + place.start * p.k_stride + group * p.width;
    const Bfloat16* v = p.v + place.start * p.v_stride + group * p.width;
    const auto rows_left = [&](std::int64_t first, int rows) {
        return static_cast<int>(min(place.length - first, static_cast<std::int64_t>(rows)));
    };
    const auto load_kv = [&](std::int64_t tile, int stage) {
        const std::int64_t first = tile * keys;
        const std::uint32_t to = kv_tiles + static_cast<std::uint32_t>(2 * stage) * kv_bytes;
        load_tile_async<keys, D>(to, k + first * p.k_stride, p.k_stride, p.width, rows_left(first, keys), thread, block_threads);
        load_tile_async<keys, D>(to + kv_bytes, v + first * p.v_stride, p.v_stride, p.width, rows_left(first, keys), thread,
                                 block_threads);
        copy_async_commit();
    };

    load_tile_async<block_rows, D>(q_tile, q, p.q_stride, p.width, rows_left(first_query, block_rows), thread, block_threads);
    const std::int64_t tile_count = (min(first_query + block_rows, place.length) + keys - 1) / keys;
    load_kv(0, 0);

    const float scale = rsqrtf(static_cast<float>(p.width)) * log2_e;  // scores in units of log 2
    const std::int64_t row0 = first_query + warpgroup * 64 + thread % 128 / 32 * 16 + lane / 4;  // and row0 + 8
    float o[D / 2], highest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
    for (float& value : o) value = 0;

    for (std::int64_t tile = 0; tile < tile_count; ++tile) {
        const int stage = static_cast<int>(tile & 1);
        copy_async_wait<0>();
        fence_shared_for_wgmma();
        __syncthreads();  // this stage is there; nobody reads the other one any more
        if (tile + 1 < tile_count) load_kv(tile + 1, stage ^ 1);
        const std::uint32_t k_tile = kv_tiles + static_cast<std::uint32_t>(2 * stage) * kv_bytes;

        float s[keys / 2];
        hold_registers(s);
        wgmma_fence();
        multiply_scores<D, keys>(s, q_tile, block_rows, warpgroup * 64, k_tile);
        wgmma_commit();
        wgmma_wait<0>();
        hold_registers(s);

        const std::int64_t first_key = tile * keys;
        if (first_key + keys > first_query + warpgroup * 64) {  // the diagonal is near; keys past the end are past it too
#pragma unroll
            for (int i = 0; i < keys / 2; ++i) {
                const std::int64_t key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2, row = row0 + (i % 4 / 2) * 8;
                if (key > row) s[i] = -INFINITY;
            }
        }
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = highest[half];
#pragma unroll
            for (int i = 0; i < keys / 2; ++i)
                if (i % 4 / 2 == half) largest = fmaxf(largest, s[i]);
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            // A whole tile right of the diagonal (first warpgroup, last tile) leaves the maximum as it was; it is finite
            // from the first tile on, since key 0 is visible to every row.
            factor[half] = exp2f((highest[half] - largest) * scale);
            highest[half] = largest;
            float total = 0;
#pragma unroll
            for (int i = 0; i < keys / 2; ++i)
                if (i % 4 / 2 == half) {
                    s[i] = exp2f(s[i] * scale - largest * scale);
                    total += s[i];
                }
            sum[half] = sum[half] * factor[half] + total;
        }
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] *= factor[i % 4 / 2];
        std::uint32_t fragments[keys / 16][4];
        multiply_accumulate<D, keys>(o, s, k_tile + kv_bytes, fragments);
        wgmma_wait<0>();
        hold_registers(o);
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = sum[half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const std::int64_t row = row0 + half * 8;
        if (row >= place.length) continue;
        const float inverse = 1.0f / total;
        Bfloat16* out = p.o + ((place.start + row) * p.heads + head) * p.width;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            if (column < p.width)
                *reinterpret_cast<std::uint32_t*>(out + column) =
                    pack_bf16(o[4 * j + 2 * half] * inverse, o[4 * j + 2 * half + 1] * inverse);
        }
        if (lane % 4 == 0)
            p.lse[(place.start + row) * p.heads + head] = highest[half] * scale / log2_e + logf(total);
    }
}

struct BackwardParameters {
    DeviceSequences sequences;
    Tiles tiles;
    std::int64_t heads, groups, q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride;
    int width;
    const Bfloat16 *q, *k, *v, *d_o;
    const float *lse, *delta;  // [tokens, heads]; delta = o . do
    Bfloat16 *dq, *dk, *dv;
};

// Writes 64 x D of a warpgroup; thread's rows row0 and row0 + 8 of `valid_rows`.
template <int D>
__device__ __forceinline__ void store_rows(Bfloat16* to, std::int64_t stride, const float (&values)[D / 2], float factor, int width,
                                           std::int64_t row0, std::int64_t valid_rows, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const std::int64_t row = row0 + half * 8;
        if (row >= valid_rows) continue;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            if (column < width)
                *reinterpret_cast<std::uint32_t*>(to + row * stride + column) =
                    pack_bf16(values[4 * j + 2 * half] * factor, values[4 * j + 2 * half + 1] * factor);
        }
    }
}

template <int D>
__global__ void __launch_bounds__(block_threads, 1) attention_dkv_kernel(const BackwardParameters p) {
    constexpr int queries = 64;
    extern __shared__ __align__(1024) unsigned char shared[];
    const std::uint32_t k_tile = (shared_address(shared) + 1023) / 1024 * 1024;
    const std::uint32_t v_tile = k_tile + block_rows * D * 2;
    const std::uint32_t stages = v_tile + block_rows * D * 2;  // stage s: Q at 2s, dO at 2s + 1, each [queries x D]
    constexpr std::uint32_t tile_bytes = queries * D * 2;
    __shared__ float lse_tile[2][queries], delta_tile[2][queries];

    // The first keys of a document are seen by the most queries: their blocks come first.
    const auto place = p.tiles.place(p.sequences, blockIdx.x);
    const std::int64_t group = blockIdx.y, heads_a_group = p.heads / p.groups;
    const std::int64_t first_key = place.tile * block_rows;
    const int thread = threadIdx.x, warpgroup = thread / 128, lane = thread % 32;

    const auto rows_left = [&](std::int64_t first, int rows) {
        return static_cast<int>(min(place.length - first, static_cast<std::int64_t>(rows)));
    };
    load_tile_async<block_rows, D>(k_tile, p.k + (place.start + first_key) * p.k_stride + group * p.width, p.k_stride, p.width,
                                   rows_left(first_key, block_rows), thread, block_threads);
    load_tile_async<block_rows, D>(v_tile, p.v + (place.start + first_key) * p.v_stride + group * p.width, p.v_stride, p.width,
                                   rows_left(first_key, block_rows), thread, block_threads);
    const std::int64_t first_tile = first_key / queries, tiles_a_head = ceil_div(place.length, queries) - first_tile;
    const std::int64_t tile_count = tiles_a_head * heads_a_group;  // heads one after another
    const auto load_stage = [&](std::int64_t i, int stage) {
        const std::int64_t head = group * heads_a_group + i / tiles_a_head, first = (first_tile + i % tiles_a_head) * queries;
        const std::uint32_t to = stages + static_cast<std::uint32_t>(2 * stage) * tile_bytes;
        const int rows = rows_left(first, queries);
        load_tile_async<queries, D>(to, p.q + (place.start + first) * p.q_stride + head * p.width, p.q_stride, p.width, rows,
                                    thread, block_threads);
        load_tile_async<queries, D>(to + tile_bytes, p.d_o + ((place.start + first) * p.heads + head) * p.width,
                                    p.heads * p.width, p.width, rows, thread, block_threads);
        if (thread < queries) {
            const std::int64_t at = (place.start + first + thread) * p.heads + head;
            lse_tile[stage][thread] = thread < rows ? p.lse[at] * log2_e : INFINITY;  // infinity: probability 0
            delta_tile[stage][thread] = thread < rows ? p.delta[at] : 0.0f;
        }
        copy_async_commit();
    };
    load_stage(0, 0);

    const float scale = rsqrtf(static_cast<float>(p.width)), score_scale = scale * log2_e;
    const std::int64_t key0 = first_key + warpgroup * 64 + thread % 128 / 32 * 16 + lane / 4;  // and key0 + 8
    float dk[D / 2], dv[D / 2];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;

    for (std::int64_t tile = 0; tile < tile_count; ++tile) {
        const int stage = static_cast<int>(tile & 1);
        copy_async_wait<0>();
        fence_shared_for_wgmma();
        __syncthreads();
        if (tile + 1 < tile_count) load_stage(tile + 1, stage ^ 1);
        const std::uint32_t q_tile = stages + static_cast<std::uint32_t>(2 * stage) * tile_bytes, do_tile = q_tile + tile_bytes;

        float s[queries / 2], dp[queries / 2];  // transposed: rows are keys
        hold_registers(s);
        hold_registers(dp);
        wgmma_fence();
        multiply_scores<D, queries>(s, k_tile, block_rows, warpgroup * 64, q_tile);
        wgmma_commit();
        multiply_scores<D, queries>(dp, v_tile, block_rows, warpgroup * 64, do_tile);
        wgmma_commit();
        wgmma_wait<1>();
        hold_registers(s);

        const std::int64_t first_query = (first_tile + tile % tiles_a_head) * queries;
        const bool diagonal = first_query < first_key + warpgroup * 64 + 64;
#pragma unroll
        for (int i = 0; i < queries / 2; ++i) {
            const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            s[i] = exp2f(s[i] * score_scale - lse_tile[stage][column]);
            if (diagonal && key0 + (i % 4 / 2) * 8 > first_query + column) s[i] = 0;
        }
        std::uint32_t fragments[queries / 16][4];
        wgmma_wait<0>();
        hold_registers(dp);
        multiply_accumulate<D, queries>(dv, s, do_tile, fragments);
#pragma unroll
        for (int i = 0; i < queries / 2; ++i) dp[i] = s[i] * (dp[i] - delta_tile[stage][i / 4 * 8 + lane % 4 * 2 + i % 2]);
        std::uint32_t more_fragments[queries / 16][4];
        multiply_accumulate<D, queries>(dk, dp, q_tile, more_fragments);
        wgmma_wait<0>();
        hold_registers(dv);
        hold_registers(dk);
    }
    store_rows<D>(p.dk + place.start * p.dk_stride + group * p.width, p.dk_stride, dk, scale, p.width, key0, place.length, lane);
    store_rows<D>(p.dv + place.start * p.dv_stride + group * p.width, p.dv_stride, dv, 1.0f, p.width, key0, place.length, lane);
}

template <int D>
__global__ void __launch_bounds__(block_threads, 1) attention_dq_kernel(const BackwardParameters p) {
    constexpr int keys = 64;
    extern __shared__ __align__(1024) unsigned char shared[];
    const std::uint32_t q_tile = (shared_address(shared) + 1023) / 1024 * 1024;
    const std::uint32_t do_tile = q_tile + block_rows * D * 2;
    const std::uint32_t stages = do_tile + block_rows * D * 2;  // stage s: K at 2s, V at 2s + 1, each [keys x D]
    constexpr std::uint32_t tile_bytes = keys * D * 2;

    const auto place = p.tiles.place(p.sequences, p.tiles.count - 1 - static_cast<std::int64_t>(blockIdx.x));
    const std::int64_t head = blockIdx.y, group = head / (p.heads / p.groups);
    const std::int64_t first_query = place.tile * block_rows;
    const int thread = threadIdx.x, warpgroup = thread / 128, lane = thread % 32;

    const auto rows_left = [&](std::int64_t first, int rows) {
        return static_cast<int>(min(place.length - first, static_cast<std::int64_t>(rows)));
    };
    load_tile_async<block_rows, D>(q_tile, p.q + (place.start + first_query) * p.q_stride + head * p.width, p.q_stride, p.width,
                                   rows_left(first_query, block_rows), thread, block_threads);
    load_tile_async<block_rows, D>(do_tile, p.d_o + ((place.start + first_query) * p.heads + head) * p.width, p.heads * p.width,
                                   p.width, rows_left(first_query, block_rows), thread, block_threads);
    const auto load_stage = [&](std::int64_t tile, int stage) {
        const std::int64_t first = tile * keys;
        const std::uint32_t to = stages + static_cast<std::uint32_t>(2 * stage) * tile_bytes;
        load_tile_async<keys, D>(to, p.k + (place.start + first) * p.k_stride + group * p.width, p.k_stride, p.width,
                                 rows_left(first, keys), thread, block_threads);
        load_tile_async<keys, D>(to + tile_bytes, p.v + (place.start + first) * p.v_stride + group * p.width, p.v_stride, p.width,
                                 rows_left(first, keys), thread, block_threads);
        copy_async_commit();
    };
    const std::int64_t tile_count = (min(first_query + block_rows, place.length) + keys - 1) / keys;
    load_stage(0, 0);

    const float scale = rsqrtf(static_cast<float>(p.width)), score_scale = scale * log2_e;
    const std::int64_t row0 = first_query + warpgroup * 64 + thread % 128 / 32 * 16 + lane / 4;  // and row0 + 8
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const std::int64_t row = row0 + half * 8, at = (place.start + row) * p.heads + head;
        lse[half] = row < place.length ? p.lse[at] * log2_e : INFINITY;
        delta[half] = row < place.length ? p.delta[at] : 0.0f;
    }
    float dq[D / 2];
#pragma unroll
    for (float& value : dq) value = 0;

    for (std::int64_t tile = 0; tile < tile_count; ++tile) {
        const int stage = static_cast<int>(tile & 1);
        copy_async_wait<0>();
        fence_shared_for_wgmma();
        __syncthreads();
        if (tile + 1 < tile_count) load_stage(tile + 1, stage ^ 1);
        const std::uint32_t k_tile = stages + static_cast<std::uint32_t>(2 * stage) * tile_bytes, v_tile = k_tile + tile_bytes;

        float s[keys / 2], dp[keys / 2];
        hold_registers(s);
        hold_registers(dp);
        wgmma_fence();
        multiply_scores<D, keys>(s, q_tile, block_rows, warpgroup * 64, k_tile);
        wgmma_commit();
        multiply_scores<D, keys>(dp, do_tile, block_rows, warpgroup * 64, v_tile);
        wgmma_commit();
        wgmma_wait<1>();
        hold_registers(s);
        const std::int64_t first_key = tile * keys;
        const bool diagonal = first_key + keys > first_query + warpgroup * 64;
#pragma unroll
        for (int i = 0; i < keys / 2; ++i) {
            s[i] = exp2f(s[i] * score_scale - lse[i % 4 / 2]);
            if (diagonal && first_key + i / 4 * 8 + lane % 4 * 2 + i % 2 > row0 + (i % 4 / 2) * 8) s[i] = 0;
        }
        wgmma_wait<0>();
        hold_registers(dp);
#pragma unroll
        for (int i = 0; i < keys / 2; ++i) dp[i] = s[i] * (dp[i] - delta[i % 4 / 2]);
        std::uint32_t fragments[keys / 16][4];
        multiply_accumulate<D, keys>(dq, dp, k_tile, fragments);
        wgmma_wait<0>();
        hold_registers(dq);
    }
    store_rows<D>(p.dq + place.start * p.dq_stride + head * p.width, p.dq_stride, dq, scale, p.width, row0, place.length, lane);
}

// ---- any width up to 256, any dtype: a warp a row -----------------------------------------------------------------------------

constexpr int simple_warps = 8, simple_tile = 32, simple_columns = 8;  // columns a lane: width <= 256

// A tile of 32 rows in float32, padded against bank conflicts: row r at tile + r * (width + 1).
template <class T>
__device__ void load_simple_tile(float* tile, const T* from, std::int64_t stride, int width, std::int64_t valid_rows) {
    for (int i = threadIdx.x; i < simple_tile * width; i += blockDim.x) {
        const int row = i / width, column = i % width;
        tile[row * (width + 1) + column] = row < valid_rows ? convert<float>(from[row * stride + column]) : 0.0f;
    }
}

__device__ __forceinline__ float dot_shared(const float* a, const float* b, int width) {
    float sum = 0;
    for (int i = 0; i < width; ++i) sum += a[i] * b[i];
    return sum;
}

template <class T>
struct SimpleParameters {
    DeviceSequences sequences;
    Tiles tiles;  // of simple_warps tokens
    std::int64_t heads, groups, q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride;
    int width;
    const T *q, *k, *v, *d_o;
    const float *lse_in, *delta;
    T *o, *dq, *dk, *dv;
    float* lse;
};

template <class T>
__global__ void attention_forward_simple(const SimpleParameters<T> p) {
    extern __shared__ float shared_floats[];
    float* k_tile = shared_floats;
    float* v_tile = k_tile + simple_tile * (p.width + 1);
    float* q_rows = v_tile + simple_tile * (p.width + 1);  // [warps, width]
    const auto place = p.tiles.place(p.sequences, p.tiles.count - 1 - static_cast<std::int64_t>(blockIdx.x));
    const std::int64_t head = blockIdx.y, group = head / (p.heads / p.groups);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const std::int64_t row = place.tile * simple_warps + warp;
    float* q = q_rows + warp * p.width;
    for (int c = lane; c < p.width; c += 32)
        q[c] = row < place.length ? convert<float>(p.q[(place.start + row) * p.q_stride + head * p.width + c]) : 0.0f;
    const float scale = rsqrtf(static_cast<float>(p.width));
    float o[simple_columns] = {}, highest = -INFINITY, sum = 0;
    const std::int64_t last = min((place.tile + 1) * simple_warps, place.length);
    for (std::int64_t first = 0; first < last; first += simple_tile) {
        __syncthreads();
        load_simple_tile(k_tile, p.k + (place.start + first) * p.k_stride + group * p.width, p.k_stride, p.width, place.length - first);
        load_simple_tile(v_tile, p.v + (place.start + first) * p.v_stride + group * p.width, p.v_stride, p.width, place.length - first);
        __syncthreads();
        if (row >= place.length || first > row) continue;
        const float score = first + lane <= row ? dot_shared(q, k_tile + lane * (p.width + 1), p.width) * scale : -INFINITY;
        const float largest = fmaxf(highest, warp_max(score));
        const float factor = expf(highest - largest), weight = expf(score - largest);
        sum = sum * factor + team_sum(weight);
        highest = largest;
#pragma unroll
        for (int i = 0; i < simple_columns; ++i) o[i] *= factor;
        for (int j = 0; j < simple_tile; ++j) {
            const float w = __shfl_sync(0xffffffffu, weight, j);
#pragma unroll
            for (int i = 0; i < simple_columns; ++i)
                if (i * 32 + lane < p.width) o[i] += w * v_tile[j * (p.width + 1) + i * 32 + lane];
        }
    }
    if (row >= place.length) return;
    const std::int64_t token = place.start + row;
#pragma unroll
    for (int i = 0; i < simple_columns; ++i)
        if (i * 32 + lane < p.width) p.o[(token * p.heads + head) * p.width + i * 32 + lane] = convert<T>(o[i] / sum);
    if (lane == 0) p.lse[token * p.heads + head] = highest + logf(sum);
}

template <class T>
__global__ void attention_dq_simple(const SimpleParameters<T> p) {
    extern __shared__ float shared_floats[];
    float* k_tile = shared_floats;
    float* v_tile = k_tile + simple_tile * (p.width + 1);
    float* q_rows = v_tile + simple_tile * (p.width + 1);
    float* do_rows = q_rows + simple_warps * p.width;
    const auto place = p.tiles.place(p.sequences, p.tiles.count - 1 - static_cast<std::int64_t>(blockIdx.x));
    const std::int64_t head = blockIdx.y, group = head / (p.heads / p.groups);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const std::int64_t row = place.tile * simple_warps + warp, token = place.start + row;
    const bool alive = row < place.length;
    float *q = q_rows + warp * p.width, *d_o = do_rows + warp * p.width;
    for (int c = lane; c < p.width; c += 32) {
        q[c] = alive ? convert<float>(p.q[token * p.q_stride + head * p.width + c]) : 0.0f;
        d_o[c] = alive ? convert<float>(p.d_o[(token * p.heads + head) * p.width + c]) : 0.0f;
    }
    const float lse = alive ? p.lse_in[token * p.heads + head] : 0.0f, delta = alive ? p.delta[token * p.heads + head] : 0.0f;
    const float scale = rsqrtf(static_cast<float>(p.width));
    float dq[simple_columns] = {};
    const std::int64_t last = min((place.tile + 1) * simple_warps, place.length);
    for (std::int64_t first = 0; first < last; first += simple_tile) {
        __syncthreads();
        load_simple_tile(k_tile, p.k + (place.start + first) * p.k_stride + group * p.width, p.k_stride, p.width, place.length - first);
        load_simple_tile(v_tile, p.v + (place.start + first) * p.v_stride + group * p.width, p.v_stride, p.width, place.length - first);
        __syncthreads();
        if (!alive || first > row) continue;
        float ds = 0;
        if (first + lane <= row) {
            const float probability = expf(dot_shared(q, k_tile + lane * (p.width + 1), p.width) * scale - lse);
            ds = probability * (dot_shared(d_o, v_tile + lane * (p.width + 1), p.width) - delta) * scale;
        }
        for (int j = 0; j < simple_tile; ++j) {
            const float w = __shfl_sync(0xffffffffu, ds, j);
#pragma unroll
            for (int i = 0; i < simple_columns; ++i)
                if (i * 32 + lane < p.width) dq[i] += w * k_tile[j * (p.width + 1) + i * 32 + lane];
        }
    }
    if (!alive) return;
#pragma unroll
    for (int i = 0; i < simple_columns; ++i)
        if (i * 32 + lane < p.width) p.dq[token * p.dq_stride + head * p.width + i * 32 + lane] = convert<T>(dq[i]);
}

template <class T>
__global__ void attention_dkv_simple(const SimpleParameters<T> p) {
    extern __shared__ float shared_floats[];
    float* q_tile = shared_floats;
    float* do_tile = q_tile + simple_tile * (p.width + 1);
    float* k_rows = do_tile + simple_tile * (p.width + 1);
    float* v_rows = k_rows + simple_warps * p.width;
    const auto place = p.tiles.place(p.sequences, blockIdx.x);
    const std::int64_t group = blockIdx.y, heads_a_group = p.heads / p.groups;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const std::int64_t key = place.tile * simple_warps + warp, token = place.start + key;
    const bool alive = key < place.length;
    float *k = k_rows + warp * p.width, *v = v_rows + warp * p.width;
    for (int c = lane; c < p.width; c += 32) {
        k[c] = alive ? convert<float>(p.k[token * p.k_stride + group * p.width + c]) : 0.0f;
        v[c] = alive ? convert<float>(p.v[token * p.v_stride + group * p.width + c]) : 0.0f;
    }
    const float scale = rsqrtf(static_cast<float>(p.width));
    float dk[simple_columns] = {}, dv[simple_columns] = {};
    const std::int64_t begin = place.tile * simple_warps / simple_tile * simple_tile;
    for (std::int64_t head = group * heads_a_group; head < (group + 1) * heads_a_group; ++head)
        for (std::int64_t first = begin; first < place.length; first += simple_tile) {
            __syncthreads();
            load_simple_tile(q_tile, p.q + (place.start + first) * p.q_stride + head * p.width, p.q_stride, p.width,
                             place.length - first);
            load_simple_tile(do_tile, p.d_o + ((place.start + first) * p.heads + head) * p.width, p.heads * p.width, p.width,
                             place.length - first);
            __syncthreads();
            if (!alive) continue;
            float probability = 0, ds = 0;
            const std::int64_t query = first + lane;
            if (query >= key && query < place.length) {
                const std::int64_t at = (place.start + query) * p.heads + head;
                probability = expf(dot_shared(k, q_tile + lane * (p.width + 1), p.width) * scale - p.lse_in[at]);
                ds = probability * (dot_shared(v, do_tile + lane * (p.width + 1), p.width) - p.delta[at]) * scale;
            }
            for (int j = 0; j < simple_tile; ++j) {
                const float w = __shfl_sync(0xffffffffu, probability, j), u = __shfl_sync(0xffffffffu, ds, j);
#pragma unroll
                for (int i = 0; i < simple_columns; ++i)
                    if (i * 32 + lane < p.width) {
                        dv[i] += w * do_tile[j * (p.width + 1) + i * 32 + lane];
                        dk[i] += u * q_tile[j * (p.width + 1) + i * 32 + lane];
                    }
            }
        }
    if (!alive) return;
#pragma unroll
    for (int i = 0; i < simple_columns; ++i)
        if (i * 32 + lane < p.width) {
            p.dk[token * p.dk_stride + group * p.width + i * 32 + lane] = convert<T>(dk[i]);
            p.dv[token * p.dv_stride + group * p.width + i * 32 + lane] = convert<T>(dv[i]);
        }
}

// delta[token, head] = o . do, a warp a head of a token.
template <class T>
__global__ void attention_delta_kernel(std::int64_t count, int width, const T* o, const T* d_o, float* delta) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= count) return;
    float sum = 0;
    for (int c = threadIdx.x % 32; c < width; c += 32)
        sum += convert<float>(o[row * width + c]) * convert<float>(d_o[row * width + c]);
    sum = team_sum(sum);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}

// ---- decoding ------------------------------------------------------------------------------------------------------------------

// A block a (row, new token, head): each warp takes every eighth key, lanes split the columns; the warps' running maxima and
// sums are merged at the end.
template <class T>
__global__ void attention_cached_kernel(const SoftmaxAttentionCached args) {
    constexpr int warps = 8;
    __shared__ float warp_highest[warps], warp_sum[warps];
    extern __shared__ float warp_o[];  // [warps, width]
    const std::int64_t head = blockIdx.y, group = head / (args.heads / args.groups);
    const std::int64_t token = blockIdx.x, row = token / args.length, last = args.position + token % args.length;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = static_cast<int>(args.width);
    const T* q_row = static_cast<const T*>(args.q) + token * args.q_stride + head * width;
    float q[simple_columns] = {}, o[simple_columns] = {}, highest = -INFINITY, sum = 0;
    const float scale = rsqrtf(static_cast<float>(width));
#pragma unroll
    for (int i = 0; i < simple_columns; ++i)
        if (i * 32 + lane < width) q[i] = convert<float>(q_row[i * 32 + lane]) * scale;
    const T* keys = static_cast<const T*>(args.k_cache);
    const T* values = static_cast<const T*>(args.v_cache);
    for (std::int64_t key = warp; key <= last; key += warps) {
        const std::int64_t at = ((row * args.capacity + key) * args.groups + group) * width;
        float score = 0;
#pragma unroll
        for (int i = 0; i < simple_columns; ++i)
            if (i * 32 + lane < width) score += q[i] * convert<float>(keys[at + i * 32 + lane]);
        score = team_sum(score);
        const float largest = fmaxf(highest, score), factor = expf(highest - largest), weight = expf(score - largest);
        highest = largest;
        sum = sum * factor + weight;
#pragma unroll
        for (int i = 0; i < simple_columns; ++i)
            if (i * 32 + lane < width) o[i] = o[i] * factor + weight * convert<float>(values[at + i * 32 + lane]);
    }
    if (lane == 0) {
        warp_highest[warp] = highest;
        warp_sum[warp] = sum;
    }
#pragma unroll
    for (int i = 0; i < simple_columns; ++i)
        if (i * 32 + lane < width) warp_o[warp * width + i * 32 + lane] = o[i];
    __syncthreads();
    float largest = -INFINITY, total = 0;
    for (int w = 0; w < warps; ++w) largest = fmaxf(largest, warp_highest[w]);
    for (int w = 0; w < warps; ++w) total += warp_sum[w] * expf(warp_highest[w] - largest);
    T* out = static_cast<T*>(args.o) + (token * args.heads + head) * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float value = 0;
        for (int w = 0; w < warps; ++w) value += warp_o[w * width + c] * expf(warp_highest[w] - largest);
        out[c] = convert<T>(value / total);
    }
}

// ---- launches ------------------------------------------------------------------------------------------------------------------

// Calls fn(std::integral_constant<int, D>) with the tile width for a head of `width`; false where the tensor-core kernels do
// not fit: another dtype or width, rows that are not aligned to 16 bytes, or a GPU without wgmma.
template <class F>
bool with_tile_width(const Exec& exec, DType dtype, std::int64_t width, std::initializer_list<std::int64_t> strides,
                     std::initializer_list<const void*> pointers, F&& fn) {
    if (dtype != DType::bfloat16 || width > 128 || width % 8 != 0 || !can_use_wide(strides, pointers) || !is_hopper(exec))
        return false;
    if (width <= 64)
        fn(std::integral_constant<int, 64>{});
    else if (width <= 96)
        fn(std::integral_constant<int, 96>{});
    else
        fn(std::integral_constant<int, 128>{});
    return true;
}

void check_width(std::int64_t width) {
    FENWICK_CHECK(width <= 32 * simple_columns, "[softmax_attention] head width {} is more than the {} that CUDA supports", width,
                  32 * simple_columns);
}

template <class T, class Args>
SimpleParameters<T> simple_parameters(const Args& args, const DeviceSequences& sequences, const Tiles& tiles) {
    SimpleParameters<T> p{};
    p.sequences = sequences;
    p.tiles = tiles;
    p.heads = args.heads;
    p.groups = args.groups;
    p.q_stride = args.q_stride;
    p.k_stride = args.k_stride;
    p.v_stride = args.v_stride;
    p.width = static_cast<int>(args.width);
    p.q = static_cast<const T*>(args.q);
    p.k = static_cast<const T*>(args.k);
    p.v = static_cast<const T*>(args.v);
    return p;
}

unsigned grid_x(std::int64_t count) {
    FENWICK_CHECK(count <= std::numeric_limits<int>::max(), "[softmax_attention] {} tiles are too many for one launch", count);
    return static_cast<unsigned>(count);
}

}  // namespace

void softmax_attention_forward(const Exec& exec, const SoftmaxAttention& args) {
    const OperatorScope scope("softmax_attention", exec);
    check_width(args.width);
    const SequencesOnDevice sequences(exec, args.sequences);
    const auto heads = static_cast<unsigned>(args.heads);
    const bool done = with_tile_width(
        exec, args.dtype, args.width, {args.width, args.q_stride, args.k_stride, args.v_stride}, {args.q, args.k, args.v, args.o},
        [&]<int D>(std::integral_constant<int, D>) {
            const TilesOnDevice tiles(exec, args.sequences, sequences.view(), block_rows);
            ForwardParameters p{};
            p.sequences = sequences.view();
            p.tiles = tiles.view();
            p.heads = args.heads;
            p.groups = args.groups;
            p.q_stride = args.q_stride;
            p.k_stride = args.k_stride;
            p.v_stride = args.v_stride;
            p.width = static_cast<int>(args.width);
            p.q = static_cast<const Bfloat16*>(args.q);
            p.k = static_cast<const Bfloat16*>(args.k);
            p.v = static_cast<const Bfloat16*>(args.v);
            p.o = static_cast<Bfloat16*>(args.o);
            p.lse = static_cast<float*>(args.lse);
            constexpr std::size_t bytes = 1024 + (block_rows + 4 * 128) * D * 2;
            launch("softmax_attention", exec, attention_forward_kernel<D>, dim3(grid_x(p.tiles.count), heads), block_threads, bytes, p);
        });
    if (done) return;
    dispatch("softmax_attention", args.dtype, [&]<class T>(TypeTag<T>) {
        const TilesOnDevice tiles(exec, args.sequences, sequences.view(), simple_warps);
        auto p = simple_parameters<T>(args, sequences.view(), tiles.view());
        p.o = static_cast<T*>(args.o);
        p.lse = static_cast<float*>(args.lse);
        const std::size_t bytes = static_cast<std::size_t>(2 * simple_tile * (p.width + 1) + simple_warps * p.width) * sizeof(float);
        launch("softmax_attention", exec, attention_forward_simple<T>, dim3(grid_x(p.tiles.count), heads), simple_warps * 32, bytes, p);
    });
}

void softmax_attention_backward(const Exec& exec, const SoftmaxAttentionBackward& args) {
    const OperatorScope scope("softmax_attention_backward", exec);
    check_width(args.width);
    const SequencesOnDevice sequences(exec, args.sequences);
    const std::int64_t rows = args.sequences.num_tokens() * args.heads;
    const Buffer delta = workspace(exec, rows * static_cast<std::int64_t>(sizeof(float)));
    dispatch("softmax_attention", args.dtype, [&]<class T>(TypeTag<T>) {
        launch("softmax_attention", exec, attention_delta_kernel<T>, dim3(grid_x(ceil_div(rows, 8))), 256, 0, rows,
               static_cast<int>(args.width), static_cast<const T*>(args.o), static_cast<const T*>(args.d_o), delta.as<float>());
    });
    const auto heads = static_cast<unsigned>(args.heads), groups = static_cast<unsigned>(args.groups);
    const bool done = with_tile_width(
        exec, args.dtype, args.width,
        {args.width, args.q_stride, args.k_stride, args.v_stride, args.dq_stride, args.dk_stride, args.dv_stride},
        {args.q, args.k, args.v, args.d_o, args.dq, args.dk, args.dv}, [&]<int D>(std::integral_constant<int, D>) {
            const TilesOnDevice tiles(exec, args.sequences, sequences.view(), block_rows);
            BackwardParameters p{};
            p.sequences = sequences.view();
            p.tiles = tiles.view();
            p.heads = args.heads;
            p.groups = args.groups;
            p.q_stride = args.q_stride;
            p.k_stride = args.k_stride;
            p.v_stride = args.v_stride;
            p.dq_stride = args.dq_stride;
            p.dk_stride = args.dk_stride;
            p.dv_stride = args.dv_stride;
            p.width = static_cast<int>(args.width);
            p.q = static_cast<const Bfloat16*>(args.q);
            p.k = static_cast<const Bfloat16*>(args.k);
            p.v = static_cast<const Bfloat16*>(args.v);
            p.d_o = static_cast<const Bfloat16*>(args.d_o);
            p.lse = static_cast<const float*>(args.lse);
            p.delta = delta.as<float>();
            p.dq = static_cast<Bfloat16*>(args.dq);
            p.dk = static_cast<Bfloat16*>(args.dk);
            p.dv = static_cast<Bfloat16*>(args.dv);
            constexpr std::size_t bytes = 1024 + (2 * block_rows + 4 * 64) * D * 2;
            launch("softmax_attention", exec, attention_dkv_kernel<D>, dim3(grid_x(p.tiles.count), groups), block_threads, bytes, p);
            launch("softmax_attention", exec, attention_dq_kernel<D>, dim3(grid_x(p.tiles.count), heads), block_threads, bytes, p);
        });
    if (done) return;
    dispatch("softmax_attention", args.dtype, [&]<class T>(TypeTag<T>) {
        const TilesOnDevice tiles(exec, args.sequences, sequences.view(), simple_warps);
        auto p = simple_parameters<T>(args, sequences.view(), tiles.view());
        p.dq_stride = args.dq_stride;
        p.dk_stride = args.dk_stride;
        p.dv_stride = args.dv_stride;
        p.d_o = static_cast<const T*>(args.d_o);
        p.lse_in = static_cast<const float*>(args.lse);
        p.delta = delta.as<float>();
        p.dq = static_cast<T*>(args.dq);
        p.dk = static_cast<T*>(args.dk);
        p.dv = static_cast<T*>(args.dv);
        const std::size_t bytes =
            static_cast<std::size_t>(2 * simple_tile * (p.width + 1) + 2 * simple_warps * p.width) * sizeof(float);
        launch("softmax_attention", exec, attention_dkv_simple<T>, dim3(grid_x(p.tiles.count), groups), simple_warps * 32, bytes, p);
        launch("softmax_attention", exec, attention_dq_simple<T>, dim3(grid_x(p.tiles.count), heads), simple_warps * 32, bytes, p);
    });
}

void softmax_attention_cached(const Exec& exec, const SoftmaxAttentionCached& args) {
    const OperatorScope scope("softmax_attention_cached", exec);
    check_width(args.width);
    dispatch("softmax_attention_cached", args.dtype, [&]<class T>(TypeTag<T>) {
        launch("softmax_attention_cached", exec, attention_cached_kernel<T>,
               dim3(grid_x(args.batch * args.length), static_cast<unsigned>(args.heads)), 256,
               static_cast<std::size_t>(8 * args.width) * sizeof(float), args);
    });
}

}  // namespace fenwick::kernels::cuda
