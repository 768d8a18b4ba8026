// Matrix-vector products of decoding. Every weight is read once, and nothing else counts: a block takes consecutive rows of
// the matrix, and asks for the first of them before it waits for x.
//
// In bfloat16, tensor cores multiply: x is cut into three bfloat16 numbers, whose sum is the float32 number, and they are
// three columns of the other operand. The products are exact in float32, as they would be one by one, but take a tenth of
// the instructions, which otherwise hold the loads back. In float32 a thread has the same 16 or 32 bytes of every row, so
// that its part of x stays in registers.
#include "kernels/cuda/decode_columns.cuh"
#include "kernels/cuda/dependent.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/decode.h"

namespace fenwick::kernels::cuda {
namespace {

constexpr int most_threads = 512;
constexpr int kept_rows = 64;  // of the matrix: whose sums wait in shared memory
constexpr int widest_input = 49152;

template <class T>
constexpr int vector = 16 / static_cast<int>(sizeof(T));

struct Words {
    std::uint32_t word[4];
};
// 16 bytes that are read once.
__device__ __forceinline__ Words load_once(const void* from) {
    Words to;
#if defined(FENWICK_CUDA_EMULATION)
    to = *static_cast<const Words*>(from);
#else
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
                 : "l"(from));
#endif
    return to;
}
// weights . x for one vector of T.
template <class T>
__device__ __forceinline__ float dot(float sum, const Words& weights, const float (&x)[vector<T>]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (std::is_same_v<T, float>) {
            sum += __uint_as_float(weights.word[i]) * x[i];
        } else {
            sum += __uint_as_float(weights.word[i] << 16) * x[2 * i];
            sum += __uint_as_float(weights.word[i] & 0xffff0000u) * x[2 * i + 1];
        }
    }
    return sum;
}

// x of the rows first .. first + count - 1, in shared memory: put(row, column, x) for every element, with `x` [in] for what
// comes between. V floats of a row at a time.
template <int V, class Put>
__device__ void make_input(const DecodeProjection& a, std::int64_t first, int count, float* x, float* scale, float* scratch,
                           Put&& put) {
    const int in = static_cast<int>(a.in), groups = static_cast<int>(a.groups), slice = in / groups;
    const int threads = static_cast<int>(blockDim.x), thread = tile::thread_index();
    for (int b = 0; b < count; ++b) {
        const float* const input = a.input + (first + b) * a.in;
        const float* const gate = a.gate + (first + b) * a.in;
        float squares = 0;
        for (int i = thread * V; i < in; i += threads * V) {
            float u[V];
            load(u, input + i);
            if (a.input_kind == DecodeInput::gate_before) {
                float z[V];
                load(z, gate + i);
#pragma unroll
                for (int j = 0; j < V; ++j) u[j] *= silu_of(z[j]);
            }
#pragma unroll
            for (int j = 0; j < V; ++j) squares += u[j] * u[j];
            if (a.input_kind != DecodeInput::plain) {
                store(x + i, u);
                continue;
            }
#pragma unroll
            for (int j = 0; j < V; ++j) put(b, i + j, u[j]);
        }
        if (a.input_kind == DecodeInput::plain) continue;
        if (groups == 1) {
            squares = block_sum(squares, scratch);
            if (thread == 0) scale[0] = rsqrtf(squares / static_cast<float>(in) + static_cast<float>(a.eps));
        } else {
            __syncthreads();
            const int lane = thread % 32;
            for (int group = thread / 32; group < groups; group += threads / 32) {
                float sum = 0;
                for (int i = lane; i < slice; i += 32) sum += x[group * slice + i] * x[group * slice + i];
                sum = team_sum(sum);
                if (lane == 0) scale[group] = rsqrtf(sum / static_cast<float>(slice) + static_cast<float>(a.eps));
            }
        }
        __syncthreads();
        const int period = static_cast<int>(a.norm_width);
        for (int i = thread; i < in; i += threads) {
            float u = x[i] * scale[groups == 1 ? 0 : i / slice] * a.norm_weight[period == in ? i : i % period];
            if (a.input_kind == DecodeInput::gate_after) u *= silu_of(gate[i]);
            put(b, i, u);
        }
        __syncthreads();
    }
    __syncthreads();
}

// The first element that a thread finishes of a block: its operands, to be loaded ahead.
__device__ __forceinline__ Operands first_operands(const DecodeProjection& a, std::int64_t first_column, int columns,
                                                   std::int64_t first_row, int count) {
    const int e = tile::thread_index();
    if (a.part[0].kind == DecodeOutput::swiglu || e >= columns * count) return {};
    return load_operands(a, first_column + e / count, first_row + e % count);
}

// sums [columns, pieces, B]: the columns first_column .. + columns - 1 of the rows first_row .. + count - 1 are done with.
template <int B>
__device__ void finish_block(const DecodeProjection& a, const float* sums, int pieces, std::int64_t first_column,
                             int columns, std::int64_t first_row, int count, Operands operands) {
    const auto total = [&](int column, int b) {
        float y = 0;
        for (int i = 0; i < pieces; ++i) y += sums[(column * pieces + i) * B + b];
        return y;
    };
    const int threads = static_cast<int>(blockDim.x);
    if (a.part[0].kind == DecodeOutput::swiglu) {
        for (int e = tile::thread_index(); e < columns / 2 * count; e += threads) {
            const int b = e % count, pair = e / count;
            a.part[0].out[(first_row + b) * (a.part[0].columns / 2) + first_column / 2 + pair] =
                silu_of(total(2 * pair, b)) * total(2 * pair + 1, b);
        }
        return;
    }
    for (int e = tile::thread_index(); e < columns * count; e += threads) {
        const std::int64_t column = first_column + e / count, row = first_row + e % count;
        if (e >= threads) operands = load_operands(a, column, row);
        finish(a, column, row, total(e / count, e % count), operands, [](float* at, float value) { *at = value; });
    }
}

// The columns of this block: whole pairs, where pairs belong together.
struct Share {
    std::int64_t begin, end;
};
__device__ __forceinline__ Share share_of_block(const DecodeProjection& a, std::int64_t columns) {
    const std::int64_t unit = a.part[0].kind == DecodeOutput::swiglu ? 2 : 1, units = columns / unit;
    return {units * blockIdx.x / gridDim.x * unit, units * (blockIdx.x + 1) / gridDim.x * unit};
}

// B: rows of x, at least `count`. C: vectors of a matrix row that a thread has.
template <class T, int B, int C>
__global__ void __launch_bounds__(most_threads)
    projection_kernel(const DecodeProjection a, std::int64_t columns, std::int64_t first_row, int count) {
    constexpr int V = vector<T>, R = (B >= 4 ? 4 : 8) / C;
    __shared__ float scratch[32];
    auto* const x_shared = reinterpret_cast<float*>(tile::shared_memory());  // [B, in]
    const int threads = static_cast<int>(blockDim.x), thread = tile::thread_index(), warps = threads / 32;
    const int lane = thread % 32, warp = thread / 32, vectors = static_cast<int>(a.in) / V;
    float* const scale = x_shared + (B + 1) * a.in;     // [groups], behind make_input's [in]
    float* const sums = scale + round_up(a.groups, 4);  // [kept_rows, warps, B]
    const Share share = share_of_block(a, columns);
    const int rows = static_cast<int>(share.end - share.begin);
    const auto* const weight = static_cast<const Words*>(a.weight) + share.begin * vectors;

    Words next[R][C];
    const auto fetch = [&](int row) {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c)
                next[r][c] = row + r < rows && c * threads + thread < vectors
                                 ? load_once(weight + static_cast<std::int64_t>(row + r) * vectors + c * threads + thread)
                                 : Words{};
    };
    fetch(0);
    Operands operands = first_operands(a, share.begin, min(rows, kept_rows), first_row, count);
    for (int i = thread * 32; i < a.norm_width; i += threads * 32) dependent::prefetch(a.norm_weight + i);
    dependent::wait_for_predecessor();

    make_input<4>(a, first_row, count, x_shared + B * a.in, scale, scratch,
                  [&](int row, int column, float value) { x_shared[row * a.in + column] = value; });
    float x[B][C][V];
#pragma unroll
    for (int b = 0; b < B; ++b)
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int j = 0; j < V; ++j)
                x[b][c][j] =
                    b < count && c * threads + thread < vectors ? x_shared[b * a.in + (c * threads + thread) * V + j] : 0.0f;

    for (int done = 0; done < rows; done += kept_rows) {
        const int here = min(rows - done, kept_rows);
        for (int row = 0; row < here; row += R) {
            Words words[R][C];
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int c = 0; c < C; ++c) words[r][c] = next[r][c];
            fetch(done + row + R);
#pragma unroll
            for (int b = 0; b < B; ++b) {
                float y[R];
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    y[r] = 0;
#pragma unroll
                    for (int c = 0; c < C; ++c) y[r] = dot<T>(y[r], words[r][c], x[b][c]);
                }
                const float sum = dependent::transposed_sum(y, lane);
                const int r = row + dependent::transposed_index<R>(lane);
                if (lane % (32 / R) == 0 && r < here) sums[(r * warps + warp) * B + b] = sum;
            }
        }
        __syncthreads();
        finish_block<B>(a, sums, warps, share.begin + done, here, first_row, count, operands);
        __syncthreads();
        operands = first_operands(a, share.begin + done + here, min(rows - done - here, kept_rows), first_row, count);
    }
}

// ---- bfloat16 on tensor cores ------------------------------------------------------------------------------------------

constexpr int mma_threads = 256, mma_warps = mma_threads / 32;
constexpr int tile_rows = 16, block_keys = 32;  // of the matrix: what two products of a warp take, 32 bytes a lane
constexpr int batch_blocks = 2, stages = 5;     // blocks of keys that a warp asks for at once; how often it is ahead
constexpr int ring_bytes = stages * batch_blocks * 2 * mma_threads * 16;
constexpr int input_turns = 4, widest_mma = input_turns * mma_threads * 4;  // of x
constexpr int pieces = 3;                                                   // bfloat16 numbers that make a float32 number

// N: operands of 8 columns, each with P rows of x (1 or 2). A warp takes every mma_warps-th block of keys; lane l has of a
// tile's rows l / 4 and l / 4 + 8 the keys 8 (l % 4) .. + 7 of the block. Which key is which does not matter, so long as x
// agrees. Weights go through shared memory, where every lane reads what it asked for itself: far more can be under way than
// registers would hold, and two kernels' worth of it.
template <int N, int P>
__global__ void __launch_bounds__(mma_threads, 2)
    projection_mma_kernel(const DecodeProjection a, std::int64_t columns, std::int64_t first_row, int count) {
    constexpr int B = N * P, operand = P * pieces * block_keys;  // rows of x; elements of an operand for a block
    __shared__ float scratch[32];
    const int thread = tile::thread_index(), lane = thread % 32, warp = thread / 32, place = lane / 4, quarter = lane % 4;
    const int in = static_cast<int>(a.in), blocks = in / block_keys, vectors = in / 8;
    auto* const ring = reinterpret_cast<Words*>(tile::shared_memory()) + thread;  // [stages, batch_blocks, 2, threads]
    auto* const x_shared =
        reinterpret_cast<Bfloat16*>(tile::shared_memory() + ring_bytes);                // [blocks, N, P, pieces, block_keys]
    auto* const squares_shared = reinterpret_cast<float*>(x_shared + B * pieces * in);  // [in / 4]
    float* const scales = squares_shared + in / 4;                                      // [groups]
    float* const sums = scales + round_up(a.groups, 4);                                 // [kept_rows, warps, B]
    const Share share = share_of_block(a, columns);
    const int rows = static_cast<int>(share.end - share.begin);

    // Batches: for every tile of rows, this warp's blocks of keys.
    const int own = (blocks - warp + mma_warps - 1) / mma_warps, batches_a_tile = (own + batch_blocks - 1) / batch_blocks;
    constexpr int block_words = mma_warps * 4;  // between this warp's blocks
    int fetch_row = place, fetch_block = 0, fetch_stage = 0;
    const auto* from = static_cast<const Words*>(a.weight) + (share.begin + place) * vectors + warp * 4 + quarter;
    const auto fetch = [&] {
#pragma unroll
        for (int i = 0; i < batch_blocks; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                tile::copy_async_16(ring + ((fetch_stage * batch_blocks + i) * 2 + half) * mma_threads,
                                    from + half * 8 * vectors + i * block_words,
                                    fetch_row + 8 * half < rows && fetch_block + i < own);
        tile::commit_async();
        fetch_stage = (fetch_stage + 1) % stages;
        fetch_block += batch_blocks;
        from += batch_blocks * block_words;
        if (fetch_block >= own) {
            from += tile_rows * vectors - batches_a_tile * batch_blocks * block_words;
            fetch_block = 0;
            fetch_row += tile_rows;
        }
    };
    for (int i = 0; i < stages; ++i) fetch();
    Operands operands = first_operands(a, share.begin, min(rows, kept_rows), first_row, count);
    // Four neighbouring elements of x a thread and turn, in registers.
    const bool normed = a.input_kind != DecodeInput::plain,
               gated = a.input_kind == DecodeInput::gate_before || a.input_kind == DecodeInput::gate_after;
    const auto each = [&](auto&& body) {
#pragma unroll
        for (int i = 0; i < input_turns; ++i)
            if (const int at = (i * mma_threads + thread) * 4; at < in) body(i, at);
    };
    float norm[input_turns][4] = {};
    if (normed)
        each([&](int i, int at) {
            load(norm[i], a.norm_weight + (a.norm_width == a.in ? at : at % static_cast<int>(a.norm_width)));
        });
    dependent::wait_for_predecessor();

    for (int b = 0; b < count; ++b) {
        float u[input_turns][4] = {}, z[input_turns][4] = {};
        each([&](int i, int at) { load(u[i], a.input + (first_row + b) * a.in + at); });
        if (gated) each([&](int i, int at) { load(z[i], a.gate + (first_row + b) * a.in + at); });
        float squares = 0;
        const int slice = in / static_cast<int>(a.groups);
        if (gated)
            each([&](int i, int) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    z[i][j] = silu_of(z[i][j]);
                    if (a.input_kind == DecodeInput::gate_before) u[i][j] *= z[i][j];
                }
            });
        if (normed) {
            each([&](int i, int at) {
                float sum = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) sum += u[i][j] * u[i][j];
                if (a.groups > 1) squares_shared[at / 4] = sum;
                squares += sum;
            });
            const auto scale_of = [&](float sum) {
                return rsqrtf(sum / static_cast<float>(slice) + static_cast<float>(a.eps));
            };
            float scale = 0;
            if (a.groups == 1) {
                scale = scale_of(block_sum(squares, scratch));
            } else {
                __syncthreads();
                for (int group = warp; group < a.groups; group += mma_warps) {
                    float sum = 0;
                    for (int i = lane; i < slice / 4; i += 32) sum += squares_shared[group * slice / 4 + i];
                    sum = team_sum(sum);
                    if (lane == 0) scales[group] = scale_of(sum);
                }
                __syncthreads();
            }
            each([&](int i, int at) {
                const float factor = a.groups == 1 ? scale : scales[at / slice];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    u[i][j] *= factor * norm[i][j] * (a.input_kind == DecodeInput::gate_after ? z[i][j] : 1.0f);
            });
        }
        each([&](int i, int at) {
            Bfloat16* const to = x_shared + (at / block_keys * B + b) * pieces * block_keys + at % block_keys;
#pragma unroll
            for (int piece = 0; piece < pieces; ++piece) {
                Pack<Bfloat16, 4> values;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    values.values[j] = convert<Bfloat16>(u[i][j]);
                    u[i][j] -= convert<float>(values.values[j]);
                }
                *reinterpret_cast<Pack<Bfloat16, 4>*>(to + piece * block_keys) = values;
            }
        });
    }
    __syncthreads();

    // Columns 0 .. 2 of an operand are the pieces of one row of x, 4 .. 6 those of another; the lane's column is `place`.
    const bool filled = place % 4 < pieces && place / 4 < P;
    const int column_offset = (place / 4 * pieces + place % 4) * block_keys + quarter * 8;
    float c[N][2][4] = {};                        // of every other product: one need not wait for the other
    int block = 0, row = 0, done = 0, stage = 0;  // rows before `done` are finished
    const auto multiply = [&] {
#pragma unroll
        for (int i = 0; i < batch_blocks; ++i) {
            if (block + i >= own) break;
            const Words upper = ring[(stage * batch_blocks + i) * 2 * mma_threads],
                        lower = ring[((stage * batch_blocks + i) * 2 + 1) * mma_threads];
            const std::uint32_t first[4] = {upper.word[0], lower.word[0], upper.word[1], lower.word[1]};
            const std::uint32_t second[4] = {upper.word[2], lower.word[2], upper.word[3], lower.word[3]};
#pragma unroll
            for (int n = 0; n < N; ++n) {
                Words x{};
                if (filled && P * n + place / 4 < count)
                    x = *reinterpret_cast<const Words*>(x_shared + (((block + i) * mma_warps + warp) * N + n) * operand +
                                                        column_offset);
                tile::mma_16x8x16(c[n][0], first, x.word[0], x.word[1]);
                tile::mma_16x8x16(c[n][1], second, x.word[2], x.word[3]);
            }
        }
        stage = (stage + 1) % stages;
        block += batch_blocks;
        if (block < own) return;
        block = 0;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float upper = (c[n][0][0] + c[n][1][0]) + (c[n][0][1] + c[n][1][1]);
            float lower = (c[n][0][2] + c[n][1][2]) + (c[n][0][3] + c[n][1][3]);
            upper += __shfl_xor_sync(0xffffffffu, upper, 1);
            lower += __shfl_xor_sync(0xffffffffu, lower, 1);
            if (quarter % 2 == 0 && quarter / 2 < P) {
                const int b = P * n + quarter / 2;
                sums[((row - done + place) * mma_warps + warp) * B + b] = upper;
                sums[((row - done + place + 8) * mma_warps + warp) * B + b] = lower;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) c[n][i / 4][i % 4] = 0;
        }
        row += tile_rows;
    };
    while (done < rows) {
        const int here = min(rows - done, kept_rows);
        while (row < done + here) {
            tile::wait_async<stages - 1>();
            multiply();
            fetch();
        }
        __syncthreads();
        finish_block<B>(a, sums, mma_warps, share.begin + done, here, first_row, count, operands);
        __syncthreads();
        operands = first_operands(a, share.begin + done + here, min(rows - done - here, kept_rows), first_row, count);
        done += here;
    }
}

template <int N, int P>
void launch_mma(const Exec& exec, const DecodeProjection& args, std::int64_t first_row, int count) {
    const std::int64_t blocks = dependent::multiprocessors(exec);
    const std::int64_t shared =
        ring_bytes + N * P * pieces * args.in * 2 +
        (args.in / 4 + round_up(args.groups, 4) + kept_rows * mma_warps * N * P) * static_cast<std::int64_t>(sizeof(float));
    dependent::launch("decode_projection", exec, projection_mma_kernel<N, P>,
                      dim3(static_cast<unsigned>(std::min(blocks, ceil_div(args.columns(), 2)))), dim3(mma_threads),
                      static_cast<std::size_t>(shared), args, args.columns(), first_row, count);
}

// ---- the rest -----------------------------------------------------------------------------------------------------------

// Any width and alignment; slow.
template <class T>
__global__ void __launch_bounds__(256)
    projection_any_kernel(const DecodeProjection a, std::int64_t columns, std::int64_t row) {
    __shared__ float scratch[32], sums[kept_rows];
    auto* const x = reinterpret_cast<float*>(tile::shared_memory());  // [in]
    const int thread = tile::thread_index(), lane = thread % 32;
    const Share share = share_of_block(a, columns);
    dependent::wait_for_predecessor();
    make_input<1>(a, row, 1, x, x + a.in, scratch, [&](int, int column, float value) { x[column] = value; });
    for (std::int64_t done = share.begin; done < share.end; done += kept_rows) {
        const int here = static_cast<int>(share.end - done < kept_rows ? share.end - done : kept_rows);
        for (int r = thread / 32; r < here; r += static_cast<int>(blockDim.x) / 32) {
            const T* const weight = static_cast<const T*>(a.weight) + (done + r) * a.in;
            float sum = 0;
            for (int i = lane; i < a.in; i += 32) sum += convert<float>(weight[i]) * x[i];
            sum = team_sum(sum);
            if (lane == 0) sums[r] = sum;
        }
        __syncthreads();
        finish_block<1>(a, sums, 1, done, here, row, 1, first_operands(a, done, here, row, 1));
        __syncthreads();
    }
}

template <class T, int B, int C>
void launch_rows(const Exec& exec, const DecodeProjection& args, std::int64_t first_row, int count) {
    const int vectors = static_cast<int>(args.in) / vector<T>;
    const int threads = static_cast<int>(round_up(ceil_div(vectors, C), 32));
    const std::int64_t blocks = dependent::multiprocessors(exec) * (threads <= 256 ? 2 : 1);
    const std::int64_t shared = ((B + 1) * args.in + round_up(args.groups, 4) + kept_rows * (threads / 32) * B) *
                                static_cast<std::int64_t>(sizeof(float));
    dependent::launch("decode_projection", exec, projection_kernel<T, B, C>,
                      dim3(static_cast<unsigned>(std::min(blocks, ceil_div(args.columns(), 2)))),
                      dim3(static_cast<unsigned>(threads)), static_cast<std::size_t>(shared), args, args.columns(),
                      first_row, count);
}

}  // namespace

void decode_projection(const Exec& exec, const DecodeProjection& args) {
    constexpr const char* op = "decode_projection";
    const OperatorScope scope(op, exec);
    dispatch(op, args.dtype, [&]<class T>(TypeTag<T>) {
        const std::int64_t vectors = args.in / vector<T>;
        const bool fast = args.in % (2 * vector<float>) == 0 && vectors <= 2 * most_threads && args.in <= 8192 &&
                          can_use_wide({}, {args.weight, args.input, args.gate});
        // A multiple of 256, so that no warp is without keys.
        const bool tensor_cores = std::is_same_v<T, Bfloat16> && args.in % (block_keys * mma_warps) == 0 &&
                                  args.in <= widest_mma && args.norm_width % 4 == 0 && args.in / args.groups % 4 == 0 &&
                                  can_use_wide({}, {args.weight, args.input, args.gate, args.norm_weight});
        for (std::int64_t row = 0; row < args.rows;) {
            if (tensor_cores) {
                const int count = static_cast<int>(std::min<std::int64_t>(args.rows - row, 4));
                count > 2   ? launch_mma<2, 2>(exec, args, row, count)
                : count > 1 ? launch_mma<1, 2>(exec, args, row, count)
                            : launch_mma<1, 1>(exec, args, row, count);
                row += count;
                continue;
            }
            const int count = fast ? static_cast<int>(std::min<std::int64_t>(args.rows - row, args.in <= 4096 ? 8 : 4)) : 1;
            if (!fast) {
                FENWICK_CHECK(args.in <= widest_input, "[{}] inputs of {} are wider than CUDA takes, {}", op, args.in,
                              widest_input);
                dependent::launch(op, exec, projection_any_kernel<T>,
                                  dim3(static_cast<unsigned>(std::min<std::int64_t>(ceil_div(args.columns(), 2), 1024))),
                                  dim3(256), static_cast<std::size_t>(args.in + args.groups) * sizeof(float), args,
                                  args.columns(), row);
            } else {
                const auto choose = [&]<int C>(std::integral_constant<int, C>) {
                    count > 4   ? launch_rows<T, 8, C>(exec, args, row, count)
                    : count > 2 ? launch_rows<T, 4, C>(exec, args, row, count)
                    : count > 1 ? launch_rows<T, 2, C>(exec, args, row, count)
                                : launch_rows<T, 1, C>(exec, args, row, count);
                };
                if (vectors <= most_threads)
                    choose(std::integral_constant<int, 1>{});
                else
                    choose(std::integral_constant<int, 2>{});
            }
            row += count;
        }
    });
}

}  // namespace fenwick::kernels::cuda
