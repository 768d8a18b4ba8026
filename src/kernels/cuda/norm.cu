#include "kernels/norm.h"

#include "kernels/cuda/common.cuh"

namespace fenwick::kernels::cuda {
namespace {

// A team of threads takes one slice (row, group): up to one warp for slices of at most narrow_limit elements (several
// teams a block), a whole block of 256 threads for wider ones.
constexpr int block_threads = 256;
constexpr std::int64_t narrow_limit = 1024;

struct Teams {
    int lanes;       // threads of a team
    int team, lane;  // which team of the block, which thread of the team
    int teams;       // teams of a block
    float* scratch;  // 32 floats, where a team is a block

    __device__ Teams(int team_lanes, float* block_scratch)
        : lanes(team_lanes),
          team(threadIdx.x / team_lanes),
          lane(threadIdx.x % team_lanes),
          teams(blockDim.x / team_lanes),
          scratch(block_scratch) {}
    // Every thread of the block must call it equally often.
    __device__ float sum(float value) const { return lanes <= 32 ? team_sum(value, lanes) : block_sum(value, scratch); }
};

int team_lanes(std::int64_t slice_width, int vector) {
    return slice_width <= narrow_limit ? next_power_of_two(ceil_div(slice_width, vector), 32) : block_threads;
}

// ---- rms_norm --------------------------------------------------------------------------------------------------------
// S is the type of u: T, or that of a residual stream.

// h = u, or u * silu(z) with the gate before the norm.
template <int V>
__device__ __forceinline__ void gate_before(float (&u)[V], const float (&z)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) u[i] *= silu_of(z[i]);
}

template <class T, class S, int V>
__global__ void __launch_bounds__(block_threads) rms_norm_forward_kernel(RmsNorm args, int lanes) {
    __shared__ float scratch[32];
    const Teams teams(lanes, scratch);
    const std::int64_t slice = args.width / args.groups, slices = args.rows * args.groups;
    const auto* x = static_cast<const T*>(args.x);
    const auto* residual = static_cast<const S*>(args.residual);
    const auto* z = static_cast<const T*>(args.z);
    const auto* weight = static_cast<const float*>(args.weight);
    auto* sum = static_cast<S*>(args.sum);
    // What has been stored as u, or is u.
    const auto* stream = x != nullptr ? sum : residual;
    auto* y = static_cast<T*>(args.y);
    auto* rstd = static_cast<float*>(args.rstd);
    for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * teams.teams; first < slices;
         first += static_cast<std::int64_t>(gridDim.x) * teams.teams) {
        const std::int64_t index = first + teams.team;
        const bool active = index < slices;
        const std::int64_t row = active ? index / args.groups : 0, offset = active ? (index - row * args.groups) * slice : 0;
        float squares = 0;
        if (active) {
            for (std::int64_t column = teams.lane * V; column < slice; column += lanes * V) {
                float u[V] = {};
                if (x != nullptr) load(u, x + row * args.x_stride + offset + column);
                if (residual != nullptr) {
                    float r[V];
                    load(r, residual + row * args.width + offset + column);
#pragma unroll
                    for (int i = 0; i < V; ++i) u[i] += r[i];
                    if (x != nullptr) store(sum + row * args.width + offset + column, u);
                }
                if (args.gate == NormGate::before) {
                    float gate[V];
                    load(gate, z + row * args.z_stride + offset + column);
                    gate_before(u, gate);
                }
#pragma unroll
                for (int i = 0; i < V; ++i) squares += u[i] * u[i];
            }
        }
        squares = teams.sum(squares);
        if (!active) continue;  // only teams inside a warp are ever inactive: no thread waits for them at a barrier
        const float scale = rsqrtf(squares / static_cast<float>(slice) + static_cast<float>(args.eps));
        if (teams.lane == 0) rstd[index] = scale;
        // Each thread reads again what it read (or wrote) above: the caches have it.
        for (std::int64_t column = teams.lane * V; column < slice; column += lanes * V) {
            float u[V], w[V];
            if (residual != nullptr)
                load(u, stream + row * args.width + offset + column);
            else
                load(u, x + row * args.x_stride + offset + column);
            load(w, weight + offset + column);
            float gate[V];
            if (args.gate != NormGate::none) load(gate, z + row * args.z_stride + offset + column);
            if (args.gate == NormGate::before) gate_before(u, gate);
#pragma unroll
            for (int i = 0; i < V; ++i) u[i] *= scale * w[i];
            if (args.gate == NormGate::after) gate_before(u, gate);
            store(y + row * args.width + offset + column, u);
        }
    }
}

// Block (block.x, block.y = group): rows block.x * rows_per_block and following, dealt to the block's teams. Every team sums
// its share of dweight in shared memory [teams, slice], where each thread owns its columns; partial [row blocks, width].
template <class T, class S, int V>
__global__ void __launch_bounds__(block_threads)
    rms_norm_backward_kernel(RmsNormBackward args, int lanes, std::int64_t rows_per_block, float* partial) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float scratch[32];
    const Teams teams(lanes, scratch);
    const std::int64_t slice = args.width / args.groups, group = blockIdx.y, offset = group * slice;
    const auto* u_all = static_cast<const S*>(args.u);
    const auto* z_all = static_cast<const T*>(args.z);
    const auto* weight = static_cast<const float*>(args.weight) + offset;
    const auto* rstd = static_cast<const float*>(args.rstd);
    const auto* dy_all = static_cast<const T*>(args.dy);
    const auto* dsum_all = static_cast<const S*>(args.dsum);
    auto* du_all = static_cast<T*>(args.du);
    auto* dresidual_all = static_cast<S*>(args.dresidual);
    auto* dz_all = static_cast<T*>(args.dz);
    const bool before = args.gate == NormGate::before, after = args.gate == NormGate::after;

    float* dweight = shared + teams.team * slice;
    for (std::int64_t column = teams.lane * V; column < slice; column += lanes * V)
#pragma unroll
        for (int i = 0; i < V; ++i) dweight[column + i] = 0;

    const std::int64_t begin = blockIdx.x * rows_per_block;
    const std::int64_t end = begin + rows_per_block < args.rows ? begin + rows_per_block : args.rows;
    for (std::int64_t first = begin; first < end; first += teams.teams) {
        const bool active = first + teams.team < end;
        const std::int64_t row = active ? first + teams.team : begin;
        const S* u_row = u_all + row * args.u_stride + offset;
        const T* z_row = z_all + row * args.z_stride + offset;  // not read without a gate
        const T* dy_row = dy_all + row * args.width + offset;
        const float scale = rstd[row * args.groups + group];
        float dot = 0;  // sum of (gradient of the normalised value) * (normalised value)
        if (active) {
            for (std::int64_t column = teams.lane * V; column < slice; column += lanes * V) {
                float h[V], d[V], w[V];
                load(h, u_row + column);
                load(d, dy_row + column);
                load(w, weight + column);
                if (before || after) {
                    float gate[V];
                    load(gate, z_row + column);
                    if (before)
                        gate_before(h, gate);
                    else
                        gate_before(d, gate);
                }
#pragma unroll
                for (int i = 0; i < V; ++i) {
                    const float normal = h[i] * scale;
                    dot += d[i] * w[i] * normal;
                    dweight[column + i] += d[i] * normal;
                }
            }
        }
        dot = teams.sum(dot);
        if (!active) continue;
        const float mean = dot / static_cast<float>(slice);
        for (std::int64_t column = teams.lane * V; column < slice; column += lanes * V) {
            float u[V], d[V], w[V], gate[V];
            load(u, u_row + column);
            load(d, dy_row + column);
            load(w, weight + column);
            if (before || after) load(gate, z_row + column);
            float du[V], dz[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
                if (before) {
                    const float s = sigmoid_of(gate[i]), silu = gate[i] * s;
                    const float dh = scale * (d[i] * w[i] - u[i] * silu * scale * mean);
                    du[i] = dh * silu;
                    dz[i] = dh * u[i] * s * (1.0f + gate[i] * (1.0f - s));
                } else if (after) {
                    const float s = sigmoid_of(gate[i]), silu = gate[i] * s, normal = u[i] * scale;
                    du[i] = scale * (d[i] * w[i] * silu - normal * mean);
                    dz[i] = d[i] * w[i] * normal * s * (1.0f + gate[i] * (1.0f - s));
                } else {
                    du[i] = scale * (d[i] * w[i] - u[i] * scale * mean);
                }
            }
            if (dsum_all != nullptr) {
                float later[V];
                load(later, dsum_all + row * args.width + offset + column);
#pragma unroll
                for (int i = 0; i < V; ++i) du[i] += later[i];
            }
            if (du_all != nullptr) store(du_all + row * args.du_stride + offset + column, du, args.accumulate_du);
            if (dresidual_all != nullptr)
                store(dresidual_all + row * args.dresidual_stride + offset + column, du, args.accumulate_dresidual);
            if (before || after) store(dz_all + row * args.dz_stride + offset + column, dz, args.accumulate_dz);
        }
    }
    __syncthreads();
    for (std::int64_t column = threadIdx.x; column < slice; column += blockDim.x) {
        float total = 0;
        for (int team = 0; team < teams.teams; ++team) total += shared[team * slice + column];
        partial[blockIdx.x * args.width + offset + column] = total;
    }
}

// ---- rms_norm of wide slices: a thread for every vector of the row ------------------------------------------------------
// Everything stays in registers between the sum and its use, the next row is on its way meanwhile, and each thread sums
// dweight of its own columns.

constexpr int most_row_threads = 512;  // more would leave too few registers
constexpr std::int64_t widest_row = most_row_threads * wide;
// Rows are dealt to so many blocks, whatever the card: the order of dweight's sums is a matter of the shape.
constexpr std::int64_t row_blocks = 1024;

inline bool takes_row_kernels(std::int64_t slice, int vector) {
    return vector == wide && slice > narrow_limit && slice <= widest_row;
}
inline int row_threads(std::int64_t slice) { return static_cast<int>(round_up(slice / wide, 32)); }

// Sum over the block. One barrier: calls alternate between the halves of `scratch` (2 * 32 values).
__device__ __forceinline__ float row_sum(float value, float* scratch, int turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = team_sum(value);
    if (lane == 0) scratch[turn * 32 + warp] = value;
    __syncthreads();
    return team_sum(lane < warps ? scratch[turn * 32 + lane] : 0.0f);
}

template <class T>
using RowVector = Pack<T, wide>;

template <class T, class S, NormGate gate>
__global__ void __launch_bounds__(most_row_threads) rms_norm_forward_row_kernel(RmsNorm args) {
    __shared__ float scratch[2 * 32];
    const std::int64_t slice = args.width / args.groups, group = blockIdx.y, column = threadIdx.x * wide;
    const std::int64_t offset = group * slice + column;
    const bool owns = column < slice;
    const auto* x = static_cast<const T*>(args.x);
    const auto* residual = static_cast<const S*>(args.residual);
    const auto* z = static_cast<const T*>(args.z) + offset;  // not read without a gate
    float w[wide] = {};
    if (owns) load(w, static_cast<const float*>(args.weight) + offset);
    RowVector<T> next_x{}, next_z{};
    RowVector<S> next_residual{};
    const auto fetch_row = [&](std::int64_t row) {
        if (!owns || row >= args.rows) return;
        if (x != nullptr) next_x = fetch<wide>(x + row * args.x_stride + offset);
        if (residual != nullptr) next_residual = fetch<wide>(residual + row * args.width + offset);
        if constexpr (gate != NormGate::none) next_z = fetch<wide>(z + row * args.z_stride);
    };
    fetch_row(blockIdx.x);
    int turn = 0;
    for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
        float u[wide], r[wide], activation[wide];
        unpack(u, next_x);
        unpack(r, next_residual);
        unpack(activation, next_z);
        fetch_row(row + gridDim.x);
        if (residual != nullptr && owns) {
#pragma unroll
            for (int i = 0; i < wide; ++i) u[i] += r[i];
            if (x != nullptr) store(static_cast<S*>(args.sum) + row * args.width + offset, u);
        }
        if constexpr (gate == NormGate::before) gate_before(u, activation);
        float squares = 0;
        if (owns) {
#pragma unroll
            for (int i = 0; i < wide; ++i) squares += u[i] * u[i];
        }
        squares = row_sum(squares, scratch, turn);
        const float scale = rsqrtf(squares / static_cast<float>(slice) + static_cast<float>(args.eps));
        if (threadIdx.x == 0) static_cast<float*>(args.rstd)[row * args.groups + group] = scale;
        if (!owns) continue;
#pragma unroll
        for (int i = 0; i < wide; ++i) u[i] *= scale * w[i];
        if constexpr (gate == NormGate::after) gate_before(u, activation);
        store(static_cast<T*>(args.y) + row * args.width + offset, u);
    }
}

// partial [gridDim.x, width]
template <class T, class S, NormGate gate>
__global__ void __launch_bounds__(most_row_threads) rms_norm_backward_row_kernel(RmsNormBackward args, float* partial) {
    __shared__ float scratch[2 * 32];
    const std::int64_t slice = args.width / args.groups, group = blockIdx.y, column = threadIdx.x * wide;
    const std::int64_t offset = group * slice + column;
    const bool owns = column < slice;
    const auto* u_all = static_cast<const S*>(args.u) + offset;
    const auto* z_all = static_cast<const T*>(args.z) + offset;  // not read without a gate
    const auto* dy_all = static_cast<const T*>(args.dy) + offset;
    const auto* dsum_all = static_cast<const S*>(args.dsum);
    const auto* rstd = static_cast<const float*>(args.rstd) + group;
    float w[wide] = {}, dweight[wide] = {};
    if (owns) load(w, static_cast<const float*>(args.weight) + offset);
    RowVector<S> next_u{}, next_dsum{};
    RowVector<T> next_dy{}, next_z{};
    const auto fetch_row = [&](std::int64_t row) {
        if (!owns || row >= args.rows) return;
        next_u = fetch<wide>(u_all + row * args.u_stride);
        next_dy = fetch<wide>(dy_all + row * args.width);
        if constexpr (gate != NormGate::none) next_z = fetch<wide>(z_all + row * args.z_stride);
        if (dsum_all != nullptr) next_dsum = fetch<wide>(dsum_all + row * args.width + offset);
    };
    fetch_row(blockIdx.x);
    int turn = 0;
    for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
        const float scale = rstd[row * args.groups];
        float u[wide], d[wide], activation[wide], later[wide], slope[wide];
        unpack(u, next_u);
        unpack(d, next_dy);
        unpack(activation, next_z);
        unpack(later, next_dsum);
        fetch_row(row + gridDim.x);
        // activation becomes silu(z), slope its derivative
        if constexpr (gate != NormGate::none) {
#pragma unroll
            for (int i = 0; i < wide; ++i) {
                const float s = sigmoid_of(activation[i]);
                slope[i] = silu_slope(activation[i], s);
                activation[i] *= s;
            }
        }
        // h: the normalised value, e: the gradient that reaches it
        float dot = 0;
        if (owns) {
#pragma unroll
            for (int i = 0; i < wide; ++i) {
                const float h = (gate == NormGate::before ? u[i] * activation[i] : u[i]) * scale;
                const float e = gate == NormGate::after ? d[i] * activation[i] : d[i];
                dot += e * w[i] * h;
                dweight[i] += e * h;
            }
        }
        const float mean = row_sum(dot, scratch, turn) / static_cast<float>(slice);
        if (!owns) continue;
        float du[wide], dz[wide];
#pragma unroll
        for (int i = 0; i < wide; ++i) {
            if constexpr (gate == NormGate::before) {
                const float dh = scale * (d[i] * w[i] - u[i] * activation[i] * scale * mean);
                du[i] = dh * activation[i];
                dz[i] = dh * u[i] * slope[i];
            } else if constexpr (gate == NormGate::after) {
                const float normal = u[i] * scale;
                du[i] = scale * (d[i] * w[i] * activation[i] - normal * mean);
                dz[i] = d[i] * w[i] * normal * slope[i];
            } else {
                du[i] = scale * (d[i] * w[i] - u[i] * scale * mean);
            }
        }
        if (dsum_all != nullptr) {
#pragma unroll
            for (int i = 0; i < wide; ++i) du[i] += later[i];
        }
        if (args.du != nullptr) store(static_cast<T*>(args.du) + row * args.du_stride + offset, du, args.accumulate_du);
        if (args.dresidual != nullptr)
            store(static_cast<S*>(args.dresidual) + row * args.dresidual_stride + offset, du, args.accumulate_dresidual);
        if constexpr (gate != NormGate::none)
            store(static_cast<T*>(args.dz) + row * args.dz_stride + offset, dz, args.accumulate_dz);
    }
    if (owns) store(partial + static_cast<std::int64_t>(blockIdx.x) * args.width + offset, dweight);
}

// Calls fn(type of u, std::integral_constant gate). A stream is float32 and has no gate.
template <class T, class F>
void dispatch_form(NormGate gate, bool stream, F&& fn) {
    if (stream) return fn(TypeTag<float>{}, std::integral_constant<NormGate, NormGate::none>{});
    switch (gate) {
        case NormGate::none: return fn(TypeTag<T>{}, std::integral_constant<NormGate, NormGate::none>{});
        case NormGate::before: return fn(TypeTag<T>{}, std::integral_constant<NormGate, NormGate::before>{});
        case NormGate::after: return fn(TypeTag<T>{}, std::integral_constant<NormGate, NormGate::after>{});
    }
}

// ---- l2norm ----------------------------------------------------------------------------------------------------------

template <class T, int V>
__global__ void __launch_bounds__(block_threads) l2norm_forward_kernel(L2Norm args, int lanes) {
    const int lane = threadIdx.x % lanes;
    const std::int64_t count = args.tokens * args.heads, teams = blockDim.x / lanes;
    for (std::int64_t first = blockIdx.x * teams; first < count; first += gridDim.x * teams) {
        const std::int64_t index = first + threadIdx.x / lanes;
        const bool active = index < count;
        const std::int64_t token = active ? index / args.heads : 0, head = active ? index - token * args.heads : 0;
        const T* x = static_cast<const T*>(args.x) + token * args.x_stride + head * args.width;
        float squares = 0;
        if (active) {
            for (std::int64_t column = lane * V; column < args.width; column += lanes * V) {
                float values[V];
                load(values, x + column);
#pragma unroll
                for (int i = 0; i < V; ++i) squares += values[i] * values[i];
            }
        }
        const float scale = rsqrtf(team_sum(squares, lanes) + static_cast<float>(args.eps));
        if (!active) continue;
        if (lane == 0) static_cast<float*>(args.rstd)[index] = scale;
        for (std::int64_t column = lane * V; column < args.width; column += lanes * V) {
            float values[V];
            load(values, x + column);
#pragma unroll
            for (int i = 0; i < V; ++i) values[i] *= scale;
            store(static_cast<T*>(args.y) + index * args.width + column, values);
        }
    }
}

template <class T, int V>
__global__ void __launch_bounds__(block_threads) l2norm_backward_kernel(L2NormBackward args, int lanes) {
    const int lane = threadIdx.x % lanes;
    const std::int64_t count = args.tokens * args.heads, teams = blockDim.x / lanes;
    for (std::int64_t first = blockIdx.x * teams; first < count; first += gridDim.x * teams) {
        const std::int64_t index = first + threadIdx.x / lanes;
        const bool active = index < count;
        const std::int64_t token = active ? index / args.heads : 0, head = active ? index - token * args.heads : 0;
        const T* x = static_cast<const T*>(args.x) + token * args.x_stride + head * args.width;
        const T* dy = static_cast<const T*>(args.dy) + index * args.width;
        float dot = 0;
        if (active) {
            for (std::int64_t column = lane * V; column < args.width; column += lanes * V) {
                float xs[V], d[V];
                load(xs, x + column);
                load(d, dy + column);
#pragma unroll
                for (int i = 0; i < V; ++i) dot += xs[i] * d[i];
            }
        }
        dot = team_sum(dot, lanes);
        if (!active) continue;
        const float scale = static_cast<const float*>(args.rstd)[index];
        const float pull = dot * scale * scale;  // dx = rstd * (dy - x * rstd^2 * (x . dy))
        for (std::int64_t column = lane * V; column < args.width; column += lanes * V) {
            float xs[V], d[V];
            load(xs, x + column);
            load(d, dy + column);
#pragma unroll
            for (int i = 0; i < V; ++i) d[i] = scale * (d[i] - xs[i] * pull);
            store(static_cast<T*>(args.dx) + token * args.dx_stride + head * args.width + column, d, args.accumulate_dx);
        }
    }
}

dim3 blocks_for(std::int64_t teams, int lanes) {
    return dim3(static_cast<unsigned>(std::min<std::int64_t>(ceil_div(teams, block_threads / lanes), 32768)));
}

}  // namespace

void rms_norm_forward(const Exec& exec, const RmsNorm& args) {
    const OperatorScope scope("rms_norm_forward", exec);
    const std::int64_t slice = args.width / args.groups;
    dispatch("rms_norm", args.dtype, [&]<class T>(TypeTag<T>) {
        const bool use_wide = can_use_wide({slice, args.x_stride, args.z_stride},
                                           {args.x, args.residual, args.z, args.weight, args.sum, args.y});
        if (use_wide && takes_row_kernels(slice, wide) && args.groups <= 65535) {
            // Enough blocks to fill a card; each walks over several rows.
            const auto blocks = static_cast<unsigned>(std::min(args.rows, 2 * row_blocks));
            return dispatch_form<T>(args.gate, args.residual != nullptr, [&]<class S>(TypeTag<S>, auto gate) {
                launch("rms_norm_forward", exec, rms_norm_forward_row_kernel<T, S, gate()>,
                       dim3(blocks, static_cast<unsigned>(args.groups)), dim3(row_threads(slice)), 0, args);
            });
        }
        dispatch_width(use_wide, [&](auto v) {
            const int lanes = team_lanes(slice, v);
            const auto kernel =
                args.residual != nullptr ? rms_norm_forward_kernel<T, float, v()> : rms_norm_forward_kernel<T, T, v()>;
            launch("rms_norm_forward", exec, kernel, blocks_for(args.rows * args.groups, lanes), dim3(block_threads), 0, args,
                   lanes);
        });
    });
}

void rms_norm_backward(const Exec& exec, const RmsNormBackward& args) {
    const OperatorScope scope("rms_norm_backward", exec);
    const std::int64_t slice = args.width / args.groups;
    FENWICK_CHECK(args.groups <= 65535, "[rms_norm] {} groups are more than a CUDA grid holds (65535)", args.groups);
    dispatch("rms_norm", args.dtype, [&]<class T>(TypeTag<T>) {
        const bool use_wide =
            can_use_wide({slice, args.u_stride, args.z_stride, args.du_stride, args.dresidual_stride, args.dz_stride},
                         {args.u, args.z, args.weight, args.dy, args.dsum, args.du, args.dresidual, args.dz});
        if (use_wide && takes_row_kernels(slice, wide)) {
            const std::int64_t blocks = std::min(args.rows, row_blocks);
            const Buffer partial = workspace(exec, blocks * args.width * static_cast<std::int64_t>(sizeof(float)));
            dispatch_form<T>(args.gate, args.stream, [&]<class S>(TypeTag<S>, auto gate) {
                launch("rms_norm_backward", exec, rms_norm_backward_row_kernel<T, S, gate()>,
                       dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(args.groups)), dim3(row_threads(slice)), 0,
                       args, partial.as<float>());
            });
            return column_sums(exec, partial.as<float>(), blocks, args.width, static_cast<float*>(args.dweight),
                               args.accumulate_dweight);
        }
        dispatch_width(use_wide, [&](auto v) {
            const int lanes = team_lanes(slice, v), teams = block_threads / lanes;
            const std::int64_t shared_bytes = teams * slice * static_cast<std::int64_t>(sizeof(float));
            FENWICK_CHECK(shared_bytes <= 200 * 1024,
                          "[rms_norm] a group of {} elements is too wide for CUDA (at most 51200)", slice);
            const auto kernel = args.stream ? rms_norm_backward_kernel<T, float, v()> : rms_norm_backward_kernel<T, T, v()>;
            // The cut into row blocks depends on the shape alone, so that sums repeat on every card.
            const std::int64_t wanted = std::max<std::int64_t>(ceil_div(2048, args.groups), 64);
            const std::int64_t rows_per_block = round_up(std::max<std::int64_t>(ceil_div(args.rows, wanted), 1), teams);
            const std::int64_t blocks = ceil_div(args.rows, rows_per_block);
            const Buffer partial = workspace(exec, blocks * args.width * static_cast<std::int64_t>(sizeof(float)));
            launch("rms_norm_backward", exec, kernel,
                   dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(args.groups)), dim3(block_threads),
                   static_cast<std::size_t>(shared_bytes), args, lanes, rows_per_block, partial.as<float>());
            column_sums(exec, partial.as<float>(), blocks, args.width, static_cast<float*>(args.dweight),
                        args.accumulate_dweight);
        });
    });
}

void l2norm_forward(const Exec& exec, const L2Norm& args) {
    const OperatorScope scope("l2norm_forward", exec);
    dispatch("l2norm", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({args.width, args.x_stride}, {args.x, args.y}), [&](auto v) {
            const int lanes = next_power_of_two(ceil_div(args.width, v), 32);
            launch("l2norm_forward", exec, l2norm_forward_kernel<T, v()>, blocks_for(args.tokens * args.heads, lanes),
                   dim3(block_threads), 0, args, lanes);
        });
    });
}

void l2norm_backward(const Exec& exec, const L2NormBackward& args) {
    const OperatorScope scope("l2norm_backward", exec);
    dispatch("l2norm", args.dtype, [&]<class T>(TypeTag<T>) {
        dispatch_width(can_use_wide({args.width, args.x_stride, args.dx_stride}, {args.x, args.dy, args.dx}), [&](auto v) {
            const int lanes = next_power_of_two(ceil_div(args.width, v), 32);
            launch("l2norm_backward", exec, l2norm_backward_kernel<T, v()>, blocks_for(args.tokens * args.heads, lanes),
                   dim3(block_threads), 0, args, lanes);
        });
    });
}

}  // namespace fenwick::kernels::cuda
