#include "tools/operator_case.h"

#include <algorithm>
#include <cmath>

#include "base/random.h"
#include "kernels/levels.h"
#include "kernels/optimizer.h"
#include "model/costs.h"

namespace fenwick::tools {
namespace {

constexpr std::int64_t default_tokens = 16384, hidden = 1536;

// Makes the inputs of one call.
class Inputs {
public:
    Inputs(const OperatorSizes& sizes, DType dtype, Device device, std::uint64_t seed)
        : dtype(dtype), device(device), sizes_(sizes), seed_(seed),
          layout(SequenceLayout::uniform(size("tokens") / size("length"), size("length"))) {
        FENWICK_CHECK(size("tokens") % size("length") == 0, "--tokens {} is not a multiple of --length {}", size("tokens"),
                      size("length"));
    }

    std::int64_t size(const std::string& name) const { return sizes_.at(name); }

    // mean + deviation * normal. Large tensors repeat a block of random numbers.
    Tensor random(const Shape& shape, DType type, double deviation = 1.0, double mean = 0.0) {
        const std::int64_t count = count_of(shape), block = std::min<std::int64_t>(count, (std::int64_t{1} << 18) + 7);
        Random random(seed_++, 17);
        std::vector<float> values(static_cast<std::size_t>(block));
        for (auto& value : values) value = static_cast<float>(mean + deviation * random.normal());
        const Tensor source = Tensor::from(values, {block}, device).to(type);
        const Tensor target = Tensor::empty({count}, type, device);
        target.narrow_rows(0, block).copy_from(source);
        for (std::int64_t done = block; done < count;) {  // doubling: few copies, however large
            const std::int64_t part = std::min(done, count - done);
            target.narrow_rows(done, done + part).copy_from(target.narrow_rows(0, part));
            done += part;
        }
        return target.view(shape);
    }

    // Of shape [batch, length, width] in the activations' dtype, or in gate dtype.
    Variable activations(std::int64_t width, double deviation = 1.0) {
        return keep(random(rows(width), dtype, deviation));
    }
    Variable gates(std::int64_t width, double deviation, double mean) {
        return keep(random(rows(width), gate_dtype(dtype), deviation, mean));
    }
    Variable constant_gates(std::int64_t width, double value) {
        return keep(Tensor::full(rows(width), value, gate_dtype(dtype), device));
    }
    Variable weights(Shape shape, double deviation = 0.02, double mean = 0.0) {
        return keep(random(shape, gate_dtype(dtype), deviation, mean));
    }
    Tensor ids(std::int64_t vocab) {
        Random random(seed_++, 18);
        std::vector<std::int32_t> values(static_cast<std::size_t>(size("tokens")));
        for (auto& id : values) id = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(vocab)));
        return Tensor::from(values, {size("tokens") / size("length"), size("length")}, device);
    }
    std::vector<Variable> all() const { return all_; }

    const DType dtype;
    const Device device;

private:
    Shape rows(std::int64_t width) const { return {size("tokens") / size("length"), size("length"), width}; }
    Variable keep(Tensor tensor) { return all_.emplace_back(std::move(tensor), true); }

    const OperatorSizes& sizes_;
    std::uint64_t seed_;
    std::vector<Variable> all_;

public:
    const SequenceLayout layout;
};

// The arithmetic of the operators of `config`'s mixer whose names begin so (model/costs.h), for all tokens.
double mixer_flops(model::ModelConfig config, std::string_view prefix, const OperatorSizes& sizes) {
    config.vocab_size = config.hidden_size = config.num_layers = 1;
    double total = 0;
    for (const auto& entry : model::forward_flops(config, sizes.at("length")))
        if (entry.op.starts_with(prefix)) total += entry.flops;
    return total * static_cast<double>(sizes.at("tokens"));
}

std::int64_t levels_of(const Inputs& in) {
    const std::int64_t levels = in.size("levels");
    return levels > 0 ? levels : kernels::levels_needed(static_cast<std::uint64_t>(in.size("length")));
}

OperatorCall ssd(Inputs in, const OperatorSizes& sizes, bool with_levels) {
    const std::int64_t H = in.size("heads"), G = in.size("groups"), K = in.size("key_width"), V = in.size("value_width");
    const double deviation = 1 / std::sqrt(static_cast<double>(K));
    const Variable q = in.activations(G * K, deviation), k = in.activations(G * K, deviation), v = in.activations(H * V);
    const Variable g = in.constant_gates(H, -0.05);
    const Variable scales = with_levels ? in.gates(H * levels_of(in), 0.2, 1.0) : Variable();
    const ops::SsdOptions options{.heads = H, .groups = G, .chunk_size = in.size("chunk_size")};
    model::ModelConfig config{.type = with_levels ? model::ModelType::log_linear_mamba2 : model::ModelType::mamba2};
    config.num_heads = H;
    config.head_dim = V;
    config.state_size = K;
    config.n_groups = G;
    config.chunk_size = options.chunk_size;
    config.num_levels = with_levels ? levels_of(in) : 0;
    return {in.all(), [=, layout = in.layout] { return std::vector{ops::ssd(q, k, v, g, scales, options, layout)}; },
            mixer_flops(config, "ssd", sizes)};
}

OperatorCall gated_delta_rule(Inputs in, const OperatorSizes& sizes, bool with_levels) {
    const std::int64_t H = in.size("heads"), K = in.size("key_width"), V = in.size("value_width");
    const double deviation = 1 / std::sqrt(static_cast<double>(K));  // keys of length about 1
    const Variable q = in.activations(H * K, deviation), k = in.activations(H * K, deviation), v = in.activations(H * V);
    const Variable g = in.constant_gates(H, -0.05), beta = in.constant_gates(H, 0.5);
    const Variable scales = with_levels ? in.gates(H * levels_of(in), 0.2, 1.0) : Variable();
    const ops::GatedDeltaRuleOptions options{.heads = H, .chunk_size = in.size("chunk_size")};
    model::ModelConfig config{.type = with_levels ? model::ModelType::log_linear_gated_deltanet : model::ModelType::gated_deltanet};
    config.num_heads = H;
    config.head_dim = K;
    config.expand_v = static_cast<double>(V) / static_cast<double>(K);
    config.chunk_size = options.chunk_size;
    config.num_levels = with_levels ? levels_of(in) : 0;
    return {in.all(),
            [=, layout = in.layout] { return std::vector{ops::gated_delta_rule(q, k, v, g, beta, scales, options, layout)}; },
            mixer_flops(config, "delta rule", sizes)};
}

OperatorCall attention(Inputs in, const OperatorSizes& sizes) {
    const std::int64_t H = in.size("heads"), G = in.size("groups"), D = in.size("width");
    const Variable q = in.activations(H * D), k = in.activations(G * D), v = in.activations(G * D);
    model::ModelConfig config{.type = model::ModelType::transformer};
    config.num_heads = H;
    config.num_kv_heads = G;
    config.head_dim = D;
    return {in.all(), [=, layout = in.layout] { return std::vector{ops::softmax_attention(q, k, v, H, G, layout)}; },
            mixer_flops(config, "softmax_attention", sizes)};
}

OperatorCall adamw(Inputs in) {
    const std::int64_t count = in.size("parameters");
    const auto tensor = [&](double deviation) { return in.random({count}, DType::float32, deviation); };
    const Tensor parameter = tensor(0.02), gradient = tensor(0.01), first = tensor(0.001);
    const Tensor second = Tensor::full({count}, 1e-4, DType::float32, in.device);
    const auto leaves = std::vector<Variable>{parameter, gradient, first, second};
    return {leaves,
            [=] {
                const kernels::AdamWTensor all{.count = count, .parameter = parameter.data(), .gradient = gradient.data(),
                                               .first_moment = first.data(), .second_moment = second.data(),
                                               .weight_decay = 0.1};
                kernels::adamw(exec_of(parameter), {.dtype = DType::float32, .tensor_count = 1, .tensors = &all,
                                                    .step = 1000, .learning_rate = 1e-6});
                return std::vector<Variable>{parameter, first, second};  // that are written
            },
            0, false};
}

}  // namespace

const std::vector<OperatorCase>& operator_cases() {
    const auto with = [](OperatorSizes sizes) {
        sizes["tokens"] = default_tokens;
        sizes["length"] = default_tokens;
        return sizes;
    };
    // An operator of one output from a function of its inputs.
    const auto simple = [](auto body) {
        return [body](const OperatorSizes& sizes, DType dtype, Device device, std::uint64_t seed) {
            Inputs in(sizes, dtype, device, seed);
            return body(in);
        };
    };
    static const std::vector<OperatorCase> cases = {
        {"ssd", "Linear attention with scalar decay (Mamba-2), in chunks",
         with({{"heads", 48}, {"groups", 1}, {"key_width", 128}, {"value_width", 64}, {"chunk_size", 64}}),
         [](const OperatorSizes& s, DType t, Device d, std::uint64_t seed) { return ssd(Inputs(s, t, d, seed), s, false); }},
        {"log_linear_ssd", "The same with a state a level (log-linear Mamba-2)",
         with({{"heads", 48}, {"groups", 1}, {"key_width", 128}, {"value_width", 64}, {"chunk_size", 64}, {"levels", 0}}),
         [](const OperatorSizes& s, DType t, Device d, std::uint64_t seed) { return ssd(Inputs(s, t, d, seed), s, true); }},
        {"gated_delta_rule", "Gated delta rule (Gated DeltaNet), in chunks",
         with({{"heads", 6}, {"key_width", 192}, {"value_width", 384}, {"chunk_size", 64}}),
         [](const OperatorSizes& s, DType t, Device d, std::uint64_t seed) {
             return gated_delta_rule(Inputs(s, t, d, seed), s, false);
         }},
        {"log_linear_gated_delta_rule", "The same with a state a level (log-linear Gated DeltaNet)",
         with({{"heads", 6}, {"key_width", 192}, {"value_width", 384}, {"chunk_size", 64}, {"levels", 0}}),
         [](const OperatorSizes& s, DType t, Device d, std::uint64_t seed) {
             return gated_delta_rule(Inputs(s, t, d, seed), s, true);
         }},
        {"softmax_attention", "Causal softmax attention, grouped queries",
         with({{"heads", 16}, {"groups", 16}, {"width", 96}}),
         [](const OperatorSizes& s, DType t, Device d, std::uint64_t seed) { return attention(Inputs(s, t, d, seed), s); }},
        {"rope", "Rotary position embedding",
         with({{"heads", 16}, {"width", 96}}), simple([](Inputs& in) {
             const std::int64_t H = in.size("heads");
             const Variable x = in.activations(H * in.size("width"));
             return OperatorCall{in.all(), [=, layout = in.layout] { return std::vector{ops::rope(x, H, 500000.0, layout)}; }};
         })},
        {"causal_conv1d", "Depthwise convolution over time, with SiLU",
         with({{"channels", 3328}, {"conv_width", 4}}), simple([](Inputs& in) {
             const std::int64_t channels = in.size("channels");
             const Variable x = in.activations(channels), weight = in.weights({channels, in.size("conv_width")}, 0.3);
             const Variable bias = in.weights({channels});
             return OperatorCall{in.all(),
                                 [=, layout = in.layout] { return std::vector{ops::causal_conv1d(x, weight, bias, layout)}; }};
         })},
        {"rms_norm", "RMS norm of rows",
         with({{"width", hidden}}), simple([](Inputs& in) {
             const Variable x = in.activations(in.size("width")), weight = in.weights({in.size("width")}, 0.1, 1.0);
             return OperatorCall{in.all(), [=] { return std::vector{ops::rms_norm(x, weight, 1e-5)}; }};
         })},
        {"add_rms_norm", "Sum with the residual, then RMS norm",
         with({{"width", hidden}}), simple([](Inputs& in) {
             const std::int64_t width = in.size("width");
             const Variable x = in.activations(width), residual = in.gates(width, 1.0, 0.0);
             const Variable weight = in.weights({width}, 0.1, 1.0);
             return OperatorCall{in.all(), [=] {
                 const auto [normed, sum] = ops::add_rms_norm(x, residual, weight, 1e-5);
                 return std::vector{normed, sum};
             }};
         })},
        {"gated_rms_norm", "RMS norm of rows gated by SiLU of others",
         with({{"width", 3072}, {"groups", 1}}), simple([](Inputs& in) {
             const std::int64_t width = in.size("width"), groups = in.size("groups");
             const Variable x = in.activations(width), z = in.activations(width), weight = in.weights({width}, 0.1, 1.0);
             return OperatorCall{in.all(), [=] { return std::vector{ops::gated_rms_norm(x, z, weight, 1e-5, groups)}; }};
         })},
        {"l2norm", "Rows of each head to unit length",
         with({{"heads", 6}, {"width", 192}}), simple([](Inputs& in) {
             const std::int64_t heads = in.size("heads");
             const Variable x = in.activations(heads * in.size("width"));
             return OperatorCall{in.all(), [=] { return std::vector{ops::l2norm(x, heads)}; }};
         })},
        {"swiglu", "SiLU of the gate times the other half",
         with({{"width", 4096}}), simple([](Inputs& in) {
             const Variable gate = in.activations(in.size("width")), up = in.activations(in.size("width"));
             return OperatorCall{in.all(), [=] { return std::vector{ops::swiglu(gate, up)}; }};
         })},
        {"decay_gate", "Step sizes and log decays of the heads",
         with({{"heads", 48}}), simple([](Inputs& in) {
             const std::int64_t heads = in.size("heads");
             const Variable raw = in.activations(heads), bias = in.weights({heads}), a_log = in.weights({heads});
             return OperatorCall{in.all(), [=] {
                 const auto gate = ops::decay_gate(raw, bias, a_log);
                 return std::vector{gate.step, gate.g};
             }};
         })},
        {"level_scales", "Level scales (lambda) from their projection",
         with({{"heads", 48}, {"levels", 0}}), simple([](Inputs& in) {
             const std::int64_t heads = in.size("heads"), levels = levels_of(in);
             const Variable raw = in.activations(heads * levels), weight = in.weights({heads, levels}, 0.1, 1.0);
             return OperatorCall{in.all(), [=] { return std::vector{ops::level_scales(raw, weight)}; }};
         })},
        {"scale_heads", "Each head times its scale",
         with({{"heads", 48}, {"width", 64}}), simple([](Inputs& in) {
             const std::int64_t heads = in.size("heads");
             const Variable x = in.activations(heads * in.size("width")), scale = in.gates(heads, 0.1, 1.0);
             return OperatorCall{in.all(), [=] { return std::vector{ops::scale_heads(x, scale)}; }};
         })},
        {"head_skip", "Skip connection of each head",
         with({{"heads", 48}, {"width", 64}}), simple([](Inputs& in) {
             const std::int64_t heads = in.size("heads"), columns = heads * in.size("width");
             const Variable o = in.activations(columns), x = in.activations(columns), skip = in.weights({heads}, 0.1, 1.0);
             return OperatorCall{in.all(), [=] { return std::vector{ops::head_skip(o, x, skip)}; }};
         })},
        {"embedding", "Rows of the embedding table",
         with({{"vocab", 32000}, {"width", hidden}}), simple([](Inputs& in) {
             const Variable table = in.weights({in.size("vocab"), in.size("width")});
             const Tensor ids = in.ids(in.size("vocab"));
             return OperatorCall{in.all(), [=, dtype = gate_dtype(in.dtype)] {
                 return std::vector{ops::embedding(ids, table, dtype)};
             }};
         })},
        {"linear", "Matrix product of a projection",
         with({{"in", hidden}, {"out", 4096}}), simple([](Inputs& in) {
             const std::int64_t from = in.size("in"), to = in.size("out");
             const Variable x = in.activations(from), weight = in.weights({to, from});
             return OperatorCall{in.all(), [=] { return std::vector{ops::linear(x, weight)}; },
                                 2.0 * static_cast<double>(in.size("tokens") * from) * static_cast<double>(to)};
         })},
        {"linear_cross_entropy", "Output projection and loss, logits never whole",
         with({{"width", hidden}, {"vocab", 32000}}), simple([](Inputs& in) {
             const std::int64_t width = in.size("width"), vocab = in.size("vocab"), count = in.size("tokens");
             const Variable x = in.activations(width), weight = in.weights({vocab, width});
             const Tensor targets = in.ids(vocab);
             return OperatorCall{in.all(),
                                 [=] {
                                     return std::vector{
                                         ops::linear_cross_entropy(x, weight, targets, static_cast<double>(count)).loss};
                                 },
                                 2.0 * static_cast<double>(count * width) * static_cast<double>(vocab)};
         })},
        {"adamw", "Optimizer update of float32 weights",
         with({{"parameters", std::int64_t{1} << 26}}), simple([](Inputs& in) { return adamw(std::move(in)); })},
    };
    return cases;
}

}  // namespace fenwick::tools
