#include "model/costs.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/levels.h"
#include "model/parameters.h"

namespace fenwick::model {
namespace {

double real(std::int64_t x) { return static_cast<double>(x); }

// Sizes that the formulas below share.
struct Sizes {
    explicit Sizes(const ModelConfig& config)
        : E(config.hidden_size), F(config.mlp_width()), H(config.num_heads), K(config.key_width()), V(config.value_width()),
          G(is_mamba2(config.type) ? config.n_groups : config.type == ModelType::transformer ? config.kv_heads() : config.num_heads),
          L(has_levels(config.type) ? config.num_levels : 0), W(config.conv_width) {
        if (is_mamba2(config.type)) channels = H * V + 2 * G * K;
        if (is_gated_deltanet(config.type)) channels = 2 * H * K + H * V;
    }
    std::int64_t E, F, H, K, V, G, L, W;
    std::int64_t channels = 0;  // that are convolved
};

std::string_view kind_of(const std::string& name) {
    const auto contains = [&](std::string_view part) { return name.find(part) != std::string::npos; };
    if (contains("embeddings.")) return "embedding";
    if (contains("lm_head.")) return "head";
    if (contains("conv1d.")) return "convolutions";
    if (contains("norm")) return "norms";
    if (contains(".mlp.")) return "mlp";
    if (contains("_proj.")) return "mixer projections";
    return "gates";
}

// Average number of set bits of a chunk's index: the level states that a chunk reads.
double mean_levels_read(std::int64_t chunks) {
    double bits = 0;
    for (std::int64_t bit = 1; bit < chunks; bit *= 2) {
        const std::int64_t whole = chunks / (2 * bit) * bit, rest = std::max<std::int64_t>(chunks % (2 * bit) - bit, 0);
        bits += real(whole + rest);
    }
    return bits / real(std::max<std::int64_t>(chunks, 1));
}

// Values kept for backward, a token of one layer: `activations` in the compute dtype, `gates` in gate dtype.
struct Kept {
    double activations = 0, gates = 0;
};

Kept mixer_keeps(const ModelConfig& config) {
    const Sizes s(config);
    if (config.type == ModelType::transformer)  // q, k rotated, v, o; lse
        return {real(2 * s.H * s.V + 2 * s.G * s.V), real(s.H)};
    if (is_mamba2(config.type))
        // in_proj's row (z, xBC, dt, dl), the convolution's, x dt, o, o + D x, the gated norm; step, g, level scales, rstd
        return {real(s.H * s.V + s.channels + s.H + s.H * s.L) + real(s.channels) + real(4 * s.H * s.V),
                real(2 * s.H + s.H * s.L + s.G)};
    // q, k, v projected and convolved, q and k normalised, a, b, l, gate, o, the gated norm; step, g, beta, scales, rstds
    return {real(2 * s.channels + 2 * s.H * s.K + 2 * s.H + s.H * s.L + 3 * s.H * s.V), real(6 * s.H + s.H * s.L)};
}

}  // namespace

std::vector<CountOf> parameters_by_kind(const ModelConfig& config) {
    std::vector<CountOf> counts;
    for (const char* kind : {"embedding", "head", "mixer projections", "convolutions", "gates", "norms", "mlp"})
        counts.push_back({kind, 0});
    for (const auto& parameter : parameter_shapes(config))
        for (auto& entry : counts)
            if (entry.kind == kind_of(parameter.name)) entry.count += count_of(parameter.shape);
    std::erase_if(counts, [](const CountOf& entry) { return entry.count == 0; });
    return counts;
}

std::vector<OperatorFlops> forward_flops(const ModelConfig& config, std::int64_t length) {
    const Sizes s(config);
    const double layers = real(config.num_layers), E = real(s.E), H = real(s.H), K = real(s.K), V = real(s.V), G = real(s.G);
    const double chunk = std::min(real(config.chunk_size), real(std::bit_ceil(static_cast<std::uint64_t>(length))));
    const double levels_read = mean_levels_read((length + config.chunk_size - 1) / config.chunk_size);
    std::vector<OperatorFlops> list;
    const auto add = [&](std::string op, double flops) { list.push_back({std::move(op), flops}); };

    double projections = 0;  // weights of the mixers' products, all layers
    for (const auto& entry : parameters_by_kind(config))
        if (entry.kind == "mixer projections") projections = real(entry.count);
    add("mixer projections", 2 * projections);  // 2 a weight
    if (s.channels > 0) add("causal_conv1d", layers * 2 * real(s.W * s.channels));  // 2 a tap

    if (config.type == ModelType::transformer) {
        // q k' and p v over (length + 1) / 2 keys on average: 2 * 2 * D a key and head
        add("softmax_attention", layers * 4 * H * V * (real(length) + 1) / 2);
    } else if (is_mamba2(config.type)) {
        // q k' of the chunk, the masked half, once a group: N C; its product with v: V C a head
        add("ssd within chunks", layers * (G * K * chunk + H * V * chunk));
        add("ssd chunk states", layers * 2 * H * K * V);  // k v'
        // linear: one state read; log-linear: one a set bit of the chunk's index, and a merge of two states a chunk
        add("ssd across chunks", layers * (s.L > 0 ? 2 * H * K * V * (levels_read + 1 / chunk) : 2 * H * K * V));
    } else {
        // halves of k k', q k', T^-1 (beta k), q k' T^-1 (K C each), T^-1 (beta v), scores v (V C each); the inverse C^2 / 3
        add("delta rule within chunks", layers * H * (4 * K * chunk + 2 * V * chunk + chunk * chunk / 3));
        add("delta rule chunk states", layers * 2 * H * K * V);  // k' u
        // a state that enters a chunk: q S, W S, and k' (W S) where it lives on; log-linear: one a set bit
        add("delta rule across chunks", layers * H * K * V * (s.L > 0 ? 6 * levels_read : 4.0));
    }
    add("mlp", layers * 6 * E * real(s.F));               // gate, up, down: 2 a weight
    add("head", 2 * E * real(config.vocab_size));         // 2 a weight
    return list;
}

double training_flops_per_token(const ModelConfig& config, std::int64_t length) {
    double forward = 0;
    for (const auto& entry : forward_flops(config, length)) forward += entry.flops;
    return 3 * forward;
}

MemoryEstimate training_memory(const ModelConfig& config, std::int64_t batch, std::int64_t length, DType compute_dtype,
                               Recompute recompute) {
    const Sizes s(config);
    const double layers = real(config.num_layers), tokens = real(batch) * real(length);
    const double width = real(static_cast<std::int64_t>(size_of(compute_dtype)));
    const double gate = real(static_cast<std::int64_t>(size_of(gate_dtype(compute_dtype))));
    const Kept kept = mixer_keeps(config);
    double mixer = kept.activations * width + kept.gates * gate;
    // Mamba-2's scan on a GPU keeps a state every 256 tokens, and the sums of the decays.
    if (is_mamba2(config.type) && compute_dtype == DType::bfloat16 && length > 256)
        mixer += real(s.H * s.K * s.V) / 256 * width + real(s.H) * gate;
    const double norms = 2 * real(s.E) * (gate + width) + 2 * gate;  // both norms: the stream and the normed value
    const double mlp = 3 * real(s.F) * width;               // gate, up, their product
    const double block = norms + mixer + mlp;
    // Backward frees a layer's MLP, then its mixer, as it passes; the gradients it makes meanwhile are as large as what it
    // reads. The peak is at the last layer: either in its MLP or, where the mixer has to be formed again, there.
    double a_token = 0;
    switch (recompute) {
        case Recompute::none: a_token = layers * block + mlp; break;
        case Recompute::mixer: a_token = layers * (norms + mlp) + std::max(mlp, 1.5 * mixer - mlp); break;
        case Recompute::block: a_token = layers * real(s.E) * gate + norms + std::max(mixer + 2 * mlp, 1.5 * mixer); break;
    }
    a_token += real(s.E) * (gate + 2 * width);  // embedding, final norm, gradient of the loss by it
    const std::int64_t parameters = parameter_count(config);
    MemoryEstimate estimate;
    const auto gate_bytes = static_cast<std::int64_t>(size_of(gate_dtype(compute_dtype)));
    estimate.weights = gate_bytes * parameters;
    estimate.gradients = gate_bytes * parameters;
    estimate.optimizer = 2 * gate_bytes * parameters;
    // In bfloat16 every product keeps its weight's rounded copy until its backward.
    const double copies = compute_dtype == DType::bfloat16 && recompute == Recompute::none ? 2 * real(parameters) : 0;
    estimate.activations = static_cast<std::int64_t>(std::llround(a_token * tokens + copies));
    return estimate;
}

std::int64_t decode_state_bytes(const ModelConfig& config, std::int64_t tokens, DType compute_dtype) {
    const Sizes s(config);
    const auto width = static_cast<std::int64_t>(size_of(compute_dtype));
    const auto gate = static_cast<std::int64_t>(size_of(gate_dtype(compute_dtype)));
    if (config.type == ModelType::transformer) return config.num_layers * 2 * tokens * s.G * s.V * width;
    const std::int64_t states = s.L > 0 && tokens > 0 ? kernels::levels_needed(static_cast<std::uint64_t>(tokens)) : 1;
    return config.num_layers * (states * s.H * s.K * s.V * gate + (s.W - 1) * s.channels * width);
}

std::int64_t decode_weight_bytes(const ModelConfig& config, DType dtype) {
    std::int64_t count = config.vocab_size * config.hidden_size;  // the head
    for (const auto& entry : parameters_by_kind(config))
        if (entry.kind == "mixer projections" || entry.kind == "mlp") count += entry.count;
    return count * static_cast<std::int64_t>(size_of(dtype));
}

std::int64_t decode_state_traffic(const ModelConfig& config, std::int64_t position, std::int64_t batch, DType cache_dtype) {
    const Sizes s(config);
    if (config.type == ModelType::transformer)
        return batch * config.num_layers * 2 * (position + 1) * s.G * s.V * static_cast<std::int64_t>(size_of(cache_dtype));
    // Level 0 is kept as a key and a value. Above it, level l is full after a token where bit l - 1 of its position is set;
    // the levels that empty are read, the one they empty into is written.
    const auto full = [](std::int64_t t) { return t > 0 ? static_cast<std::int64_t>(std::popcount(static_cast<std::uint64_t>(t))) : 0; };
    std::int64_t states = 2;
    if (has_levels(config.type)) {
        const std::int64_t read = full(position - 1);
        const std::int64_t written = is_mamba2(config.type) ? std::min<std::int64_t>(position, 1) : full(position);
        states = read + written;
    }
    return batch * config.num_layers * states * s.H * s.K * s.V * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace fenwick::model
