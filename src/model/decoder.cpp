#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <optional>
#include <unordered_map>
#include <variant>

#include "base/graph.h"
#include "base/staging.h"
#include "base/timer.h"
#include "kernels/embedding.h"
#include "model/parameters.h"
#include "model/state.h"

namespace fenwick::model {
namespace {

using kernels::DecodeColumns;
using kernels::DecodeInput;
using kernels::DecodeOutput;
using kernels::DecodeProjection;

struct Launch {
    const char* kind;
    kernels::DecodeOperator args;
};

void queue(const kernels::Exec& exec, const DecodeProjection& args) { kernels::decode_projection(exec, args); }
void queue(const kernels::Exec& exec, const kernels::DecodeSsd& args) { kernels::decode_ssd(exec, args); }
void queue(const kernels::Exec& exec, const kernels::DecodeGatedDeltaRule& args) {
    kernels::decode_gated_delta_rule(exec, args);
}
void queue(const kernels::Exec& exec, const kernels::DecodeAttention& args) { kernels::decode_attention(exec, args); }

// A layer's matrices, the rows of each product together.
struct LayerWeights {
    Tensor in, out, gate_up, down;
};
// A layer's state as the kernels keep it (kernels/decode.h).
struct LayerState {
    std::vector<Tensor> tails;
    Tensor levels, factors, last_k, last_v;
    Tensor keys, values;
};

}  // namespace

struct Decoder::Implementation {
    Implementation(const LanguageModel& source, const DecodeState& decode_state, const DecoderOptions& given)
        : model(source), config(source.config()), device(source.device()), options(given) {
        const auto* state = dynamic_cast<const State*>(&decode_state);
        FENWICK_CHECK(state != nullptr && static_cast<std::int64_t>(state->layers.size()) == config.num_layers,
                      "[decoder] the decoding state is not of this model; make it with new_state()");
        FENWICK_CHECK(options.weights == DType::float32 || (options.weights == DType::bfloat16 && device.is_cuda()),
                      "[decoder] weights in {} are not available on {}; use float32", name_of(options.weights),
                      name_of(device));
        FENWICK_CHECK(options.temperature >= 0, "[sample] temperature is {}; 0 or more is needed", options.temperature);
        FENWICK_CHECK(options.top_k >= 0, "[sample] top_k is {}; 0 or more is needed", options.top_k);
        FENWICK_CHECK(options.top_p > 0 && options.top_p <= 1, "[sample] top_p is {}; it must be above 0 and at most 1",
                      options.top_p);
        for (const auto& parameter : model.parameters()) {
            FENWICK_CHECK(parameter.variable.dtype() == DType::float32,
                          "[decoder] the model is {}; a float32 model is needed", name_of(parameter.variable.dtype()));
            by_name.emplace(parameter.name, parameter.variable.value());
        }
        batch = state->batch;
        first_position = queued_position = state->seen;
        FENWICK_CHECK(options.vocabulary >= 0 && options.vocabulary <= config.vocab_size,
                      "[decoder] the vocabulary of {} is larger than the model's, {}", options.vocabulary,
                      config.vocab_size);

        MemoryKindScope scope(MemoryKind::weights);
        const std::string prefix(name_prefix(config.type));
        const std::string mixer = is_mamba2(config.type) ? "mixer." : "attn.";
        for (std::int64_t i = 0; i < config.num_layers; ++i) {
            const std::string layer = fmt::format("{}layers.{}.", prefix, i), own = layer + mixer;
            LayerWeights& matrices = weights.emplace_back();
            if (is_mamba2(config.type)) {
                matrices.in = packed({own + "in_proj.weight"});
                matrices.out = packed({own + "out_proj.weight"});
            } else if (is_gated_deltanet(config.type)) {
                std::vector<std::string> names{own + "q_proj.weight", own + "k_proj.weight", own + "v_proj.weight",
                                               own + "a_proj.weight", own + "b_proj.weight", own + "g_proj.weight"};
                if (has_levels(config.type)) names.push_back(own + "l_proj.weight");
                matrices.in = packed(names);
                matrices.out = packed({own + "o_proj.weight"});
            } else {
                matrices.in = packed({own + "q_proj.weight", own + "k_proj.weight", own + "v_proj.weight"});
                matrices.out = packed({own + "o_proj.weight"});
            }
            matrices.gate_up = interleaved(layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight");
            matrices.down = packed({layer + "mlp.down_proj.weight"});
        }
        embedding = parameter(prefix + "embeddings.weight");
        head = packed({config.tie_embeddings ? prefix + "embeddings.weight" : "lm_head.weight"});

        choose_launches();

        MemoryKindScope state_scope(MemoryKind::activations);
        for (const MixerState& layer : state->layers) states.push_back(converted(layer));
        position = Tensor::from(std::vector<std::int64_t>{first_position}, {1}, device);
        ids = Tensor::from(std::vector<std::int32_t>(static_cast<std::size_t>(batch), 0), {batch}, device);
        drawn_ids.emplace(device, static_cast<std::size_t>(history * batch) * sizeof(std::int32_t));
        marks.reserve(static_cast<std::size_t>(history));
        for (std::int64_t i = 0; i < history; ++i) marks.emplace_back(device);
        make_scratch();
        reserve(first_position + std::max<std::int64_t>(options.reserve, 1));
    }

    // Whether a token is one launch; then the matrices are packed for it.
    void choose_launches() {
        if (!options.one_launch || !device.is_cuda() || batch != 1 || options.weights != DType::bfloat16 ||
            config.type == ModelType::transformer)
            return;
        layout = kernels::cuda::decode_token_layout(
            exec_of(device), {.hidden = config.hidden_size,
                              .mixed = config.num_heads * config.value_width(),
                              .mlp = config.mlp_width(),
                              .heads = config.num_heads,
                              .key_width = config.key_width(),
                              .value_width = config.value_width(),
                              .norm_groups = is_mamba2(config.type) ? config.n_groups : config.num_heads});
        if (!layout.possible) return;
        for (LayerWeights& layer : weights) {
            layer.in = in_units(layer.in, config.hidden_size, layout.slices);
            layer.out = in_units(layer.out, config.num_heads * config.value_width(), layout.added_slices);
            layer.gate_up = in_units(layer.gate_up, config.hidden_size, layout.slices);
            layer.down = in_units(layer.down, config.mlp_width(), layout.added_slices);
        }
        head = in_units(head, config.hidden_size, layout.slices);
    }
    Tensor in_units(const Tensor& matrix, std::int64_t in, int slices) const {
        kernels::DecodeTokenMatrix args{.columns = matrix.count() / in, .in = in, .slices = slices, .weight = matrix.data()};
        const Tensor all = Tensor::empty({args.packed_columns() * in}, DType::bfloat16, device);
        args.packed = all.data();
        kernels::cuda::decode_token_pack(exec_of(device), args);
        return all;
    }
    Tensor blocked(const Tensor& levels) const {
        const Tensor all = Tensor::empty(levels.shape(), DType::float32, device);
        const std::int64_t K = config.key_width(), V = config.value_width();
        kernels::cuda::decode_token_block(exec_of(device), {.count = levels.count() / (K * V),
                                                            .key_width = K,
                                                            .value_width = V,
                                                            .states = levels.as<float>(),
                                                            .blocked = all.as<float>()});
        return all;
    }

    const Tensor& parameter(const std::string& name) const {
        const auto found = by_name.find(name);
        FENWICK_CHECK(found != by_name.end(), "[decoder] there is no parameter '{}'", name);
        return found->second;
    }
    const float* values(const std::string& name) const { return parameter(name).as<float>(); }

    // The matrices one below the other; a single one that is stored as wanted is not copied.
    Tensor packed(const std::vector<std::string>& names) const {
        if (names.size() == 1) return parameter(names.front()).to(options.weights);
        std::int64_t rows = 0;
        for (const auto& name : names) rows += parameter(name).size(0);
        const Tensor all = Tensor::empty({rows, parameter(names.front()).size(1)}, options.weights, device);
        rows = 0;
        for (const auto& name : names) {
            const Tensor& matrix = parameter(name);
            all.narrow_rows(rows, rows + matrix.size(0)).copy_from(matrix);
            rows += matrix.size(0);
        }
        return all;
    }
    Tensor interleaved(const std::string& even, const std::string& odd) const {
        const Tensor &first = parameter(even), &second = parameter(odd);
        const std::int64_t width = first.size(1);
        const Tensor all = Tensor::empty({first.size(0), 2 * width}, options.weights, device);
        all.narrow_columns(0, width).copy_from(first);
        all.narrow_columns(width, width).copy_from(second);
        return all;
    }

    LayerState converted(const MixerState& from) const {
        const auto zeros = [&](Shape shape) { return Tensor::zeros(std::move(shape), DType::float32, device); };
        LayerState to;
        for (const Tensor& tail : from.convolutions) to.tails.push_back(copy_of(tail, DType::float32));
        if (config.type == ModelType::transformer) {
            to.keys = copy_of(from.keys, options.weights);
            to.values = copy_of(from.values, options.weights);
            return to;
        }
        to.levels = layout.possible ? blocked(from.levels) : from.levels.clone();
        if (!has_levels(config.type)) return to;
        const std::int64_t H = config.num_heads, keys = config.key_width() * (is_mamba2(config.type) ? config.n_groups : H);
        to.last_k = zeros({2, batch, keys});
        to.last_v = zeros({2, batch, H * config.value_width()});
        if (is_mamba2(config.type)) {
            // Full: level 0, and level l where bit l - 1 of the last position is set.
            constexpr std::int64_t most = kernels::decode_most_levels;
            std::vector<float> factors(static_cast<std::size_t>(2 * most * batch * H));
            if (first_position > 0)
                for (std::int64_t level = 0; level < from.levels.size(0); ++level)
                    if (level == 0 || ((first_position - 1) >> (level - 1) & 1) != 0)
                        std::fill_n(factors.begin() + ((first_position & 1) * most + level) * batch * H, batch * H, 1.0f);
            to.factors = Tensor::from(factors, {2, most, batch, H}, device);
        }
        return to;
    }
    static Tensor copy_of(const Tensor& from, DType dtype) { return from.dtype() == dtype ? from.clone() : from.to(dtype); }

    Tensor scratch(std::int64_t columns) const { return Tensor::zeros({batch, columns}, DType::float32, device); }
    void make_scratch() {
        stream = scratch(config.hidden_size);
        logits = scratch(config.vocab_size);
        make_layer_scratch();
        if (config.type != ModelType::transformer) return;
        const std::int64_t H = config.num_heads, V = config.value_width();
        attention_parts = scratch(H * kernels::decode_attention_parts * (V + 2));
        arrived = Tensor::from(std::vector<std::int32_t>(static_cast<std::size_t>(batch * H), 0), {batch, H}, device);
        std::vector<double> turns;
        for (std::int64_t i = 0; i < V / 2; ++i)
            turns.push_back(std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(V)) /
                            (2 * std::numbers::pi));
        turns_a_token = Tensor::from(turns, {V / 2}, device);
    }
    // What a layer's operators give to each other.
    void make_layer_scratch() {
        const std::int64_t H = config.num_heads, K = config.key_width(), V = config.value_width();
        hidden = scratch(config.mlp_width());
        o = scratch(H * V);
        if (is_mamba2(config.type)) {
            gate = scratch(H * V);
            mixed = scratch(H * V + 2 * config.n_groups * K);
        } else if (is_gated_deltanet(config.type)) {
            gate = scratch(H * V);
            q = scratch(H * K);
            k = scratch(H * K);
            v = scratch(H * V);
            beta = scratch(H);
        } else {
            q = scratch(H * V);
            k = scratch(config.kv_heads() * V);
            v = scratch(config.kv_heads() * V);
        }
        step = scratch(H);
        log_decay = scratch(H);
        if (level_count() > 0) level_scales = scratch(H * level_count());
    }

    // Room for `tokens` tokens in all; the launches then name the new memory.
    void reserve(std::int64_t tokens) {
        if (tokens <= capacity) return;
        FENWICK_CHECK(kernels::levels_needed(static_cast<std::uint64_t>(tokens)) <= kernels::decode_most_levels,
                      "[decoder] {} tokens are more than can be decoded", tokens);
        graph = DeviceGraph();
        for (LayerState& layer : states) {
            if (layer.levels.defined()) reserve_levels(layer.levels, has_levels(config.type), tokens);
            if (layer.keys.defined())
                for (Tensor* cache : {&layer.keys, &layer.values}) reserve_cache(*cache, queued_position, tokens);
        }
        capacity = tokens;
        if (has_levels(config.type)) {
            // What the last level takes in.
            const int levels = kernels::levels_needed(static_cast<std::uint64_t>(tokens));
            capacity = std::max(capacity, std::int64_t{1} << std::min(levels - 1, 61));
        } else {
            capacity = config.type == ModelType::transformer ? states.front().keys.size(1)
                                                             : std::numeric_limits<std::int64_t>::max();
        }
        compile();
    }

    void compile() {
        launches.clear();
        scratch_of_layers.clear();
        const std::string prefix(name_prefix(config.type));
        for (std::int64_t i = 0; i < config.num_layers; ++i) {
            const std::string layer = fmt::format("{}layers.{}.", prefix, i);
            if (layout.possible) {  // every layer writes arrays of its own
                make_layer_scratch();
                for (const Tensor& x : {hidden, gate, mixed, q, k, v, o, step, log_decay, beta, level_scales})
                    scratch_of_layers.push_back(x);
            }
            const LayerWeights& matrices = weights[static_cast<std::size_t>(i)];
            LayerState& state = states[static_cast<std::size_t>(i)];
            if (is_mamba2(config.type))
                add_mamba2(layer, matrices, state);
            else if (is_gated_deltanet(config.type))
                add_gated_deltanet(layer, matrices, state);
            else
                add_attention(layer, matrices, state);
            add_normed("gate and up", layer + "mlp_norm.weight", matrices.gate_up,
                       {{.kind = DecodeOutput::swiglu, .columns = 2 * config.mlp_width(), .out = hidden.as<float>()}});
            add_to_stream("down", matrices.down, {.input = hidden.as<float>()});
        }
        add_normed("head", prefix + (is_mamba2(config.type) ? "norm_f.weight" : "norm.weight"), head,
                   {{.columns = config.vocab_size, .out = logits.as<float>()}});
        if (!layout.possible) return;
        std::vector<kernels::DecodeOperator> operators;
        for (const Launch& launch : launches) operators.push_back(launch.args);
        const kernels::Exec exec = exec_of(device);
        const auto make = [&](float* scratch) {
            return kernels::cuda::decode_token_steps(exec, layout, operators, scratch);
        };
        token_scratch = Tensor::zeros({make(nullptr).scratch}, DType::float32, device);
        const kernels::DecodeTokenSteps steps = make(token_scratch.as<float>());
        token_steps =
            Tensor::from(std::span(reinterpret_cast<const std::int32_t*>(steps.steps.data()), steps.steps.size() / 4),
                         {static_cast<std::int64_t>(steps.steps.size() / 4)}, device);
        token = {.steps = token_steps.data(),
                 .count = steps.count,
                 .most_keys = steps.most_keys,
                 .position = position.as<std::int64_t>(),
                 .ids = ids.as<std::int32_t>(),
                 .embedding = embedding.as<float>(),
                 .hidden = config.hidden_size,
                 .first_position = first_position,
                 .scaled = has_levels(config.type) ? 1 : 0};
    }

    // The norm of the stream goes into a product.
    void add_normed(const char* kind, const std::string& norm, const Tensor& matrix,
                    const std::vector<DecodeColumns>& parts) {
        DecodeProjection args{.dtype = options.weights,
                              .rows = batch,
                              .in = config.hidden_size,
                              .weight = matrix.data(),
                              .input_kind = DecodeInput::norm,
                              .norm_width = config.hidden_size,
                              .eps = config.norm_eps,
                              .input = stream.as<float>(),
                              .norm_weight = values(norm)};
        for (const DecodeColumns& part : parts) args.part[args.parts++] = part;
        launches.push_back({kind, args});
    }
    // A product is added to the stream; `input` says how its input is made.
    void add_to_stream(const char* kind, const Tensor& matrix, DecodeProjection input) {
        input.dtype = options.weights;
        input.rows = batch;
        input.in = matrix.count() / config.hidden_size;
        input.weight = matrix.data();
        input.eps = config.norm_eps;
        input.parts = 1;
        input.part[0] = {.kind = DecodeOutput::add, .columns = config.hidden_size, .out = stream.as<float>()};
        launches.push_back({kind, input});
    }
    DecodeColumns convolution(std::int64_t columns, const Tensor& out, const std::string& name, const Tensor& tail) const {
        const auto bias = by_name.find(name + ".bias");
        return {.kind = DecodeOutput::convolution,
                .columns = columns,
                .out = out.as<float>(),
                .width = config.conv_width,
                .taps = values(name + ".weight"),
                .bias = bias != by_name.end() ? bias->second.as<float>() : nullptr,
                .tail = tail.as<float>()};
    }
    DecodeColumns decay(const std::string& own) const {
        return {.kind = DecodeOutput::decay,
                .columns = config.num_heads,
                .out = step.as<float>(),
                .step_bias = values(own + "dt_bias"),
                .a_log = values(own + "A_log"),
                .log_decay = log_decay.as<float>()};
    }
    DecodeColumns scales(const std::string& own) const {
        return {.kind = DecodeOutput::level_scales,
                .columns = config.num_heads * config.num_levels,
                .out = level_scales.as<float>(),
                .level_weight = values(own + "L")};
    }
    std::int64_t level_count() const { return has_levels(config.type) ? config.num_levels : 0; }

    void add_mamba2(const std::string& layer, const LayerWeights& matrices, LayerState& state) {
        const std::string own = layer + "mixer.";
        const std::int64_t H = config.num_heads, inner = H * config.head_dim, keys = config.n_groups * config.state_size;
        const std::int64_t levels = level_count();
        std::vector<DecodeColumns> parts{{.columns = inner, .out = gate.as<float>()},
                                         convolution(inner + 2 * keys, mixed, own + "conv1d", state.tails[0]),
                                         decay(own)};
        if (levels > 0) parts.push_back(scales(own));
        add_normed("mixer in", layer + "mixer_norm.weight", matrices.in, parts);
        const float* const u = mixed.as<float>();
        launches.push_back({"states", kernels::DecodeSsd{.rows = batch,
                                                         .heads = H,
                                                         .groups = config.n_groups,
                                                         .key_width = config.state_size,
                                                         .value_width = config.head_dim,
                                                         .levels = levels,
                                                         .level_capacity = state.levels.size(0),
                                                         .position = position.as<std::int64_t>(),
                                                         .stride = inner + 2 * keys,
                                                         .u = u,
                                                         .k = u + inner,
                                                         .q = u + inner + keys,
                                                         .step = step.as<float>(),
                                                         .log_decay = log_decay.as<float>(),
                                                         .level_scales = levels > 0 ? level_scales.as<float>() : nullptr,
                                                         .skip = values(own + "D"),
                                                         .state = state.levels.as<float>(),
                                                         .factors = levels > 0 ? state.factors.as<float>() : nullptr,
                                                         .last_k = levels > 0 ? state.last_k.as<float>() : nullptr,
                                                         .last_v = levels > 0 ? state.last_v.as<float>() : nullptr,
                                                         .o = o.as<float>()}});
        add_to_stream("mixer out", matrices.out,
                      {.input_kind = DecodeInput::gate_before,
                       .groups = config.n_groups,
                       .norm_width = inner,
                       .input = o.as<float>(),
                       .gate = gate.as<float>(),
                       .norm_weight = values(own + "norm.weight")});
    }

    void add_gated_deltanet(const std::string& layer, const LayerWeights& matrices, LayerState& state) {
        const std::string own = layer + "attn.";
        const std::int64_t H = config.num_heads, K = config.head_dim, V = config.value_width(), levels = level_count();
        std::vector<DecodeColumns> parts{convolution(H * K, q, own + "q_conv1d", state.tails[0]),
                                         convolution(H * K, k, own + "k_conv1d", state.tails[1]),
                                         convolution(H * V, v, own + "v_conv1d", state.tails[2]),
                                         decay(own),
                                         {.kind = DecodeOutput::sigmoid, .columns = H, .out = beta.as<float>()},
                                         {.columns = H * V, .out = gate.as<float>()}};
        if (levels > 0) parts.push_back(scales(own));
        add_normed("mixer in", layer + "attn_norm.weight", matrices.in, parts);
        launches.push_back(
            {"states", kernels::DecodeGatedDeltaRule{.rows = batch,
                                                     .heads = H,
                                                     .key_width = K,
                                                     .value_width = V,
                                                     .levels = levels,
                                                     .level_capacity = state.levels.size(0),
                                                     .first_position = first_position,
                                                     .position = position.as<std::int64_t>(),
                                                     .q_scale = levels > 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(K)),
                                                     .q = q.as<float>(),
                                                     .k = k.as<float>(),
                                                     .v = v.as<float>(),
                                                     .log_decay = log_decay.as<float>(),
                                                     .beta = beta.as<float>(),
                                                     .level_scales = levels > 0 ? level_scales.as<float>() : nullptr,
                                                     .state = state.levels.as<float>(),
                                                     .last_k = levels > 0 ? state.last_k.as<float>() : nullptr,
                                                     .last_u = levels > 0 ? state.last_v.as<float>() : nullptr,
                                                     .o = o.as<float>()}});
        add_to_stream("mixer out", matrices.out,
                      {.input_kind = DecodeInput::gate_after,
                       .groups = H,
                       .norm_width = V,
                       .input = o.as<float>(),
                       .gate = gate.as<float>(),
                       .norm_weight = values(own + "o_norm.weight")});
    }

    void add_attention(const std::string& layer, const LayerWeights& matrices, LayerState& state) {
        const std::int64_t H = config.num_heads, G = config.kv_heads(), D = config.value_width();
        add_normed("mixer in", layer + "attn_norm.weight", matrices.in,
                   {{.columns = H * D, .out = q.as<float>()},
                    {.columns = G * D, .out = k.as<float>()},
                    {.columns = G * D, .out = v.as<float>()}});
        launches.push_back({"states", kernels::DecodeAttention{.dtype = options.weights,
                                                               .rows = batch,
                                                               .heads = H,
                                                               .groups = G,
                                                               .width = D,
                                                               .capacity = state.keys.size(1),
                                                               .position = position.as<std::int64_t>(),
                                                               .turns = turns_a_token.as<double>(),
                                                               .q = q.as<float>(),
                                                               .k = k.as<float>(),
                                                               .v = v.as<float>(),
                                                               .k_cache = state.keys.data(),
                                                               .v_cache = state.values.data(),
                                                               .o = o.as<float>(),
                                                               .parts = attention_parts.as<float>(),
                                                               .arrived = arrived.as<std::int32_t>()}});
        add_to_stream("mixer out", matrices.out, {.input = o.as<float>()});
    }

    void queue_embedding(const kernels::Exec& exec) const {
        kernels::embedding_forward(exec, {.dtype = DType::float32,
                                          .table_dtype = DType::float32,
                                          .rows = batch,
                                          .width = config.hidden_size,
                                          .ids = ids.as<std::int32_t>(),
                                          .table = embedding.data(),
                                          .y = stream.data()});
    }
    void queue_sample(const kernels::Exec& exec) const {
        kernels::sample(exec, {.rows = batch,
                               .vocab = config.vocab_size,
                               .vocabulary = options.vocabulary > 0 ? options.vocabulary : config.vocab_size,
                               .temperature = options.temperature,
                               .top_k = options.top_k,
                               .top_p = options.top_p,
                               .seed = options.seed,
                               .stream = options.stream,
                               .first_position = first_position,
                               .logits = logits.as<float>(),
                               .position = position.as<std::int64_t>(),
                               .ids = ids.as<std::int32_t>(),
                               .drawn = static_cast<std::int32_t*>(drawn_ids->host()),
                               .history = history});
    }
    void queue_token() const {
        const kernels::Exec exec = exec_of(device);
        if (layout.possible) {
            kernels::cuda::decode_token(exec, token);
        } else {
            queue_embedding(exec);
            for (const Launch& launch : launches) std::visit([&](const auto& args) { queue(exec, args); }, launch.args);
        }
        queue_sample(exec);
    }

    void advance() {
        if (config.level_overflow == ops::LevelOverflow::error && has_levels(config.type))
            check_levels("decoder", config, queued_position + 1);
        if (queued_position + 1 > capacity) reserve(queued_position + 1);
        if (graph) {
            graph.launch();
        } else {
            queue_token();
            // Kernels must not be loaded during a capture: the first token went without.
            if (options.graph && warm) graph = DeviceGraph(device, [this] { queue_token(); });
            warm = true;
        }
        marks[static_cast<std::size_t>((queued_position - first_position) % history)] = TimeMark(device);
        ++queued_position;
    }

    const LanguageModel& model;
    ModelConfig config;
    Device device;
    DecoderOptions options;
    std::int64_t batch = 0, first_position = 0, queued_position = 0, capacity = 0;
    std::unordered_map<std::string, Tensor> by_name;
    std::vector<LayerWeights> weights;
    std::vector<LayerState> states;
    Tensor embedding, head;
    Tensor position, ids;
    Tensor stream, hidden, logits, gate, mixed, q, k, v, o, step, log_decay, beta, level_scales;
    Tensor attention_parts, arrived, turns_a_token;
    std::optional<StagingBuffer> drawn_ids;  // page-locked: the device writes ids there
    std::vector<TimeMark> marks;
    std::vector<Launch> launches;
    // Of a token that is one launch
    kernels::DecodeTokenLayout layout;
    kernels::DecodeToken token;
    Tensor token_steps, token_scratch;
    std::vector<Tensor> scratch_of_layers;
    DeviceGraph graph;
    bool warm = false;
};

Decoder::Decoder(const LanguageModel& model, const DecodeState& state, const DecoderOptions& options)
    : implementation_(std::make_unique<Implementation>(model, state, options)) {}
Decoder::~Decoder() { synchronize(implementation_->device); }

void Decoder::feed(const std::vector<std::int32_t>& ids) {
    Implementation& self = *implementation_;
    FENWICK_CHECK(static_cast<std::int64_t>(ids.size()) == self.batch, "[decoder] {} ids for {} rows", ids.size(),
                  self.batch);
    for (const auto id : ids)
        FENWICK_CHECK(id >= 0 && id < self.config.vocab_size, "[decoder] token id {} is outside the vocabulary of {}", id,
                      self.config.vocab_size);
    self.ids.copy_from(Tensor::from(ids, {self.batch}));
}

void Decoder::advance() { implementation_->advance(); }

std::vector<std::int32_t> Decoder::drawn(std::int64_t n) {
    const Implementation& self = *implementation_;
    const std::int64_t queued = self.queued_position - self.first_position;
    FENWICK_CHECK(n >= 0 && n < queued && n >= queued - history, "[decoder] draw {} of {}; the last {} can be asked for", n,
                  queued, history);
    self.marks[static_cast<std::size_t>(n % history)].wait();
    const auto* from = static_cast<const std::int32_t*>(self.drawn_ids->host()) + n % history * self.batch;
    std::vector<std::int32_t> ids(from, from + self.batch);
    for (const auto id : ids) FENWICK_CHECK(id >= 0, "[sample] the logits are not finite");
    return ids;
}

std::vector<std::pair<std::string, double>> Decoder::time_by_kind() {
    const Implementation& self = *implementation_;
    FENWICK_CHECK(!self.layout.possible,
                  "[decoder] a token that is one launch has no kinds of launches; set one_launch = false");
    const kernels::Exec exec = exec_of(self.device);
    std::vector<std::pair<std::string, double>> times;
    const auto time = [&](const std::string& kind, const std::function<void()>& work) {
        constexpr int repetitions = 10;
        const DeviceGraph graph(self.device, work);
        graph.launch();
        const TimeMark begin(self.device);
        for (int i = 0; i < repetitions; ++i) graph.launch();
        const TimeMark end(self.device);
        times.emplace_back(kind, seconds_between(begin, end) / repetitions);
    };
    time("embedding", [&] { self.queue_embedding(exec); });
    std::vector<std::string> kinds;
    for (const Launch& launch : self.launches)
        if (std::find(kinds.begin(), kinds.end(), launch.kind) == kinds.end()) kinds.emplace_back(launch.kind);
    for (const auto& kind : kinds)
        time(kind, [&] {
            for (const Launch& launch : self.launches)
                if (kind == launch.kind) std::visit([&](const auto& args) { queue(exec, args); }, launch.args);
        });
    time("sample", [&] { self.queue_sample(exec); });
    return times;
}

std::int64_t Decoder::launches() const {
    const Implementation& self = *implementation_;
    return self.layout.possible ? 2 : static_cast<std::int64_t>(self.launches.size()) + 2;
}
Tensor Decoder::logits() const { return implementation_->logits; }
std::int64_t Decoder::position() const { return implementation_->queued_position; }

}  // namespace fenwick::model
