// One token of each row, in few launches: what a model's decoding step is made of (model/decoder.h).
//
// Nothing here depends on the host from token to token: the position is read from the device, so that one CUDA graph
// serves every token. Activations are float32 whatever the weights are; they are so few that their bytes do not count.
// On CUDA a launch may begin before the one queued before it has ended (programmatic dependent launch), to load weights
// and states ahead; it touches what that one writes only once it has ended. Ahead it also reads what a column's output needs
// besides y (the stream that it adds to, tails, constants), so the launch right before must not write these.
#pragma once

#include <cstddef>
#include <variant>
#include <vector>

#include "kernels/kernel.h"
#include "kernels/levels.h"

namespace fenwick::kernels {

// ---- projections -----------------------------------------------------------------------------------------------------
// columns = weight x', and what becomes of them, for x [rows, in] made from the input by a norm or none.
enum class DecodeInput : std::uint8_t {
    plain,        // x = input
    norm,         // x = norm(input) * norm_weight
    gate_before,  // x = norm(input * silu(gate)) * norm_weight   (Mamba-2)
    gate_after,   // x = norm(input) * norm_weight * silu(gate)   (Gated DeltaNet)
};
enum class DecodeOutput : std::uint8_t {
    store,         // out = y
    add,           // out += y: the residual stream
    swiglu,        // out[n] = silu(y[2n]) * y[2n + 1]: gate and up rows in turn, out has half the columns
    convolution,   // out = silu(bias + taps . (tail, y)), and tail moves on by y
    decay,         // out = step = softplus(y + step_bias), log_decay = -exp(a_log) * step
    level_scales,  // out = softplus(level_weight * y)
    sigmoid,       // out = sigmoid(y)
};

// Consecutive columns with one kind of output. Arrays of outputs are dense, [rows, columns] but for swiglu.
struct DecodeColumns {
    DecodeOutput kind = DecodeOutput::store;
    std::int64_t columns = 0;
    float* out = nullptr;
    std::int64_t width = 0;               // convolution: taps a channel
    const float* taps = nullptr;          // convolution: [columns, width]
    const float* bias = nullptr;          // convolution: [columns] or null
    float* tail = nullptr;                // convolution: [rows, width - 1, columns], the last inputs, oldest first
    const float* step_bias = nullptr;     // decay: [columns]
    const float* a_log = nullptr;         // decay: [columns]
    float* log_decay = nullptr;           // decay: [rows, columns]
    const float* level_weight = nullptr;  // level_scales: [columns]
};

struct DecodeProjection {
    static constexpr int max_parts = 8;
    DType dtype;  // of the weights
    std::int64_t rows = 0, in = 0;
    const void* weight = nullptr;  // [sum of the parts' columns, in]
    int parts = 0;
    DecodeColumns part[max_parts];
    DecodeInput input_kind = DecodeInput::plain;
    std::int64_t groups = 1;      // the norm is over each of so many equal slices of `in`
    std::int64_t norm_width = 0;  // length of norm_weight, which repeats: `in`, or in / groups
    double eps = 1e-5;
    const float* input = nullptr;        // [rows, in]
    const float* gate = nullptr;         // [rows, in]
    const float* norm_weight = nullptr;  // [norm_width]

    std::int64_t columns() const {
        std::int64_t sum = 0;
        for (int i = 0; i < parts; ++i) sum += part[i].columns;
        return sum;
    }
};
FENWICK_KERNEL(decode_projection, DecodeProjection)

// ---- states ------------------------------------------------------------------------------------------------------------
// Two things make a token touch less than the states of all its levels, read and written:
// - Level 0 is the outer product of the last key and value, which are kept in its place.
// - Where a level only decays (ssd), its state stays as written, and a factor beside it decays.
// What a token reads and the next one replaces has two copies, used in turn by the parity of the position, since blocks run
// in any order.

inline constexpr std::int64_t decode_most_levels = 64;

// kernels/ssd.h's recurrent form with Mamba-2's gates: v = step u, o = scan(q, k, v) + skip u.
struct DecodeSsd {
    std::int64_t rows = 0, heads = 0, groups = 0, key_width = 0, value_width = 0;
    std::int64_t levels = 0;                 // columns of level_scales; 0: the linear form, one state a head
    std::int64_t level_capacity = 1;         // >= levels_needed(position + 1)
    const std::int64_t* position = nullptr;  // [1]: tokens that every row has seen
    std::int64_t stride = 0;                 // between rows of u, k and q
    const float* u = nullptr;                // [rows, heads, value_width]
    const float* k = nullptr;                // [rows, groups, key_width]
    const float* q = nullptr;                // [rows, groups, key_width]
    const float* step = nullptr;             // [rows, heads]
    const float* log_decay = nullptr;        // [rows, heads]
    const float* level_scales = nullptr;     // [rows, heads, levels]
    const float* skip = nullptr;             // [heads]
    float* state = nullptr;                  // [level_capacity, rows, heads, key_width, value_width]
    float* factors = nullptr;                // [2, decode_most_levels, rows, heads]: of the states; 0: empty
    float* last_k = nullptr;                 // [2, rows, groups, key_width]
    float* last_v = nullptr;                 // [2, rows, heads, value_width]
    float* o = nullptr;                      // [rows, heads, value_width]
};
FENWICK_KERNEL(decode_ssd, DecodeSsd)

// kernels/gated_delta_rule.h's recurrent form; q and k are divided by their lengths here, and q is scaled.
struct DecodeGatedDeltaRule {
    std::int64_t rows = 0, heads = 0, key_width = 0, value_width = 0;
    std::int64_t levels = 0;
    std::int64_t level_capacity = 1;
    std::int64_t first_position = 0;         // at this position the matrix of level 0 counts; later, last_k last_u' does
    const std::int64_t* position = nullptr;  // [1]
    double q_scale = 1.0, eps = 1e-6;        // eps: of the lengths (L2Norm)
    const float* q = nullptr;                // [rows, heads, key_width]
    const float* k = nullptr;
    const float* v = nullptr;             // [rows, heads, value_width]
    const float* log_decay = nullptr;     // [rows, heads]
    const float* beta = nullptr;          // [rows, heads]
    const float* level_scales = nullptr;  // [rows, heads, levels]
    float* state = nullptr;               // [level_capacity, rows, heads, key_width, value_width]
    float* last_k = nullptr;              // [2, rows, heads, key_width]
    float* last_u = nullptr;              // [2, rows, heads, value_width]: beta v
    float* o = nullptr;                   // [rows, heads, value_width]
};
FENWICK_KERNEL(decode_gated_delta_rule, DecodeGatedDeltaRule)

// Rotates q and k (kernels/rope.h), writes k and v into the cache, and attends to it (kernels/softmax_attention.h).
struct DecodeAttention {
    DType dtype;  // of the cache
    std::int64_t rows = 0, heads = 0, groups = 0, width = 0;
    std::int64_t capacity = 0;               // > position
    const std::int64_t* position = nullptr;  // [1]
    const double* turns = nullptr;           // [width / 2]: what a token turns pair i by, theta^(-2i/width) / 2 pi
    const float* q = nullptr;                // [rows, heads, width]
    const float* k = nullptr;                // [rows, groups, width]
    const float* v = nullptr;
    void* k_cache = nullptr;  // [rows, capacity, groups, width]
    void* v_cache = nullptr;
    float* o = nullptr;  // [rows, heads, width]
    // The cache is read in parts, whose results are joined by whoever ends last.
    float* parts = nullptr;  // [rows, heads, decode_attention_parts, width + 2]
    int* arrived = nullptr;  // [rows, heads], zeros before and after
};
inline constexpr std::int64_t decode_attention_parts = 64;
FENWICK_KERNEL(decode_attention, DecodeAttention)

// ---- sampling ------------------------------------------------------------------------------------------------------------
// Draws an id a row from logits [rows, vocab]. Temperature, then top-k, then top-p; ties go to the lower id. Row b's draw
// number n, n = position - first_position, takes random number n * rows + b of (seed, stream).
// Both devices draw the same but where the random number falls within rounding of a boundary between two tokens, or where
// tokens are within rounding of top_p: the CPU's probabilities are float64, CUDA's float32.
struct Sample {
    std::int64_t rows = 0, vocab = 0;
    std::int64_t vocabulary = 0;  // draws ids below this alone
    double temperature = 1.0;     // 0: the likeliest
    std::int64_t top_k = 0;       // 0: all
    double top_p = 1.0;
    std::uint64_t seed = 0, stream = 0;
    std::int64_t first_position = 0;
    const float* logits = nullptr;
    std::int64_t* position = nullptr;  // [1], becomes one more
    std::int32_t* ids = nullptr;       // [rows]: the next token's input; 0 where the logits are not finite
    std::int32_t* drawn = nullptr;     // [history, rows]: draw number n is row n % history; -1 where they are not finite
    std::int64_t history = 1;          // On CUDA `drawn` is page-locked host memory
};
FENWICK_KERNEL(sample, Sample)

// ---- a token as one launch -------------------------------------------------------------------------------------------
// On Hopper, one row's token in bfloat16 can be a single launch whose blocks stay: each streams its share of all matrices
// and states into shared memory, ahead of the operators that need it, and never stops at an operator's end. Operators follow
// each other without a barrier: a value that one block hands to others says by its two lowest bits of which token it is, so
// that whoever waits for it reads it and knows. For that every operator writes arrays of its own (zeros before the first
// token), and each exactly once a token. Products work on x cut into two bfloat16 numbers (16 bits).
using DecodeOperator = std::variant<DecodeProjection, DecodeSsd, DecodeGatedDeltaRule, DecodeAttention>;

// Of a model: what all its layers have in common.
struct DecodeTokenShape {
    std::int64_t hidden = 0, mixed = 0, mlp = 0;  // inputs of: products behind a norm; "mixer out"; "down"
    std::int64_t heads = 0, key_width = 0, value_width = 0;
    std::int64_t norm_groups = 1;  // of the norm before "mixer out"
};
// How matrices are cut: a unit of 16 / slices rows, each in so many slices, one below the other, is a tensor core's operand.
struct DecodeTokenLayout {
    bool possible = false;
    int slices = 0, added_slices = 0;  // of products behind a norm; of those added to the stream
};
struct DecodeTokenMatrix {
    std::int64_t columns = 0, in = 0;
    int slices = 0;
    const void* weight = nullptr;  // [columns, in] bfloat16
    void* packed = nullptr;        // [packed_columns(), in]: 512 bytes that a warp reads at once lie together
    std::int64_t packed_columns() const { return (columns + 16 / slices - 1) / (16 / slices) * (16 / slices); }
};
// Level states [count, key_width, value_width] as [count, value_width / 4, key_width, 4].
struct DecodeTokenStates {
    std::int64_t count = 0, key_width = 0, value_width = 0;
    const float* states = nullptr;
    float* blocked = nullptr;
};
struct DecodeTokenSteps {
    std::vector<std::byte> steps;  // for the device
    int count = 0;
    std::int64_t scratch = 0;    // floats, zeros before the first token
    std::int64_t most_keys = 0;  // widest input
};
struct DecodeToken {
    const void* steps = nullptr;  // on the device
    int count = 0;
    std::int64_t most_keys = 0;
    const std::int64_t* position = nullptr;
    const std::int32_t* ids = nullptr;  // [1]
    const float* embedding = nullptr;   // [vocab, hidden]
    std::int64_t hidden = 0;
    std::int64_t first_position = 0;
    int scaled = 0;  // states of levels, not one state
};
namespace cuda {  // there is no other
DecodeTokenLayout decode_token_layout(const Exec& exec, const DecodeTokenShape& shape);
void decode_token_pack(const Exec& exec, const DecodeTokenMatrix& args);
void decode_token_block(const Exec& exec, const DecodeTokenStates& args);
// The operators of all layers in their order, the head last; matrices and states packed. With scratch = null only to ask
// for its size.
DecodeTokenSteps decode_token_steps(const Exec& exec, const DecodeTokenLayout& layout,
                                    const std::vector<DecodeOperator>& operators, float* scratch);
void decode_token(const Exec& exec, const DecodeToken& args);
}  // namespace cuda

}  // namespace fenwick::kernels
