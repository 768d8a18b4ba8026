#include "model/language_model.h"

#include <algorithm>
#include <tuple>

#include "base/random.h"
#include "model/mixer.h"
#include "model/mlp.h"
#include "model/parameters.h"
#include "model/state.h"

namespace fenwick::model {
namespace {

struct Layer {
    Variable mixer_norm, mlp_norm;
    std::unique_ptr<Mixer> mixer;
    Mlp mlp;
};

}  // namespace

struct LanguageModel::Implementation {
    Implementation(const ModelConfig& model_config, Device where, DType dtype, DType compute)
        : config(model_config), device(where), compute_dtype(compute) {
        config.validate();
        FENWICK_CHECK(dtype == gate_dtype(dtype), "[model] parameters are float32 (float64 in tests), not {}", name_of(dtype));
        FENWICK_CHECK(gate_dtype(compute) == dtype, "[model] activations in {} need parameters in {}, not {}", name_of(compute),
                      name_of(gate_dtype(compute)), name_of(dtype));
        shapes = parameter_shapes(config);
        MemoryKindScope scope(MemoryKind::weights);
        for (const auto& shape : shapes) {
            Variable variable(Tensor::empty(shape.shape, dtype, device), true);
            variable.gradient()->set_memory_kind(MemoryKind::gradients);
            by_name.add(shape.name, variable);
            parameters.push_back({shape.name, std::move(variable), shape.weight_decay});
        }
        const std::string prefix(name_prefix(config.type));
        const std::string mixer = is_mamba2(config.type) ? "mixer" : "attn";
        embedding = by_name.get(prefix + "embeddings.weight");
        for (std::int64_t i = 0; i < config.num_layers; ++i) {
            const std::string layer = fmt::format("{}layers.{}.", prefix, i);
            layers.push_back({by_name.get(layer + mixer + "_norm.weight"), by_name.get(layer + "mlp_norm.weight"),
                              make_mixer(config, layer + mixer + ".", by_name), Mlp(layer + "mlp.", by_name)});
        }
        final_norm = by_name.get(prefix + (is_mamba2(config.type) ? "norm_f.weight" : "norm.weight"));
        head = config.tie_embeddings ? embedding : by_name.get("lm_head.weight");
    }

    // Every layer's input norm is fused with the addition of the branch before it: `mix(layer number, normed)`.
    template <class Mix>
    Variable run(const Tensor& ids, Mix&& mix) const {
        Variable stream = ops::embedding(ids, embedding, gate_dtype(compute_dtype));  // [B, T, E], the residual stream
        Variable normed = ops::stream_rms_norm(stream, layers.front().mixer_norm, config.norm_eps, compute_dtype);
        for (std::size_t i = 0; i < layers.size(); ++i) {
            std::tie(normed, stream) = ops::add_rms_norm(mix(i, normed), stream, layers[i].mlp_norm, config.norm_eps);
            const Variable& next = i + 1 < layers.size() ? layers[i + 1].mixer_norm : final_norm;
            std::tie(normed, stream) = ops::add_rms_norm(layers[i].mlp.forward(normed), stream, next, config.norm_eps);
        }
        return normed;
    }

    // The same where only the stream between blocks is kept. A checkpoint has one output, so the block's last addition
    // stands alone.
    Variable run_recomputing_blocks(const Tensor& ids, const SequenceLayout& layout) const {
        Variable stream = ops::embedding(ids, embedding, gate_dtype(compute_dtype));
        for (const Layer& layer : layers) {
            const auto block = [this, &layer, layout](const std::vector<Variable>& x) {
                const auto normed = ops::stream_rms_norm(x[0], layer.mixer_norm, config.norm_eps, compute_dtype);
                const auto branch = layer.mixer->forward(normed, layout);
                const auto sum = ops::add_rms_norm(branch, x[0], layer.mlp_norm, config.norm_eps);
                return ops::add(layer.mlp.forward(sum.first), sum.second);
            };
            stream = ops::checkpoint(block, {stream});
        }
        return ops::stream_rms_norm(stream, final_norm, config.norm_eps, compute_dtype);
    }

    Variable hidden(const Tensor& ids, const SequenceLayout& layout) const {
        FENWICK_CHECK(ids.defined() && ids.dim() == 2, "[model] ids must be [B, T]");
        layout.check("model", ids.count());
        if (recompute == Recompute::block && Tape::current() != nullptr) return run_recomputing_blocks(ids, layout);
        return run(ids, [&](std::size_t i, const Variable& x) {
            const Mixer* mixer = layers[i].mixer.get();
            if (recompute == Recompute::none) return mixer->forward(x, layout);
            return ops::checkpoint(
                [mixer, layout](const std::vector<Variable>& inputs) { return mixer->forward(inputs[0], layout); }, {x});
        });
    }

    ModelConfig config;
    Device device;
    DType compute_dtype;
    Recompute recompute = Recompute::none;
    std::vector<ParameterShape> shapes;
    std::vector<Parameter> parameters;
    ParameterMap by_name;
    Variable embedding, final_norm, head;
    std::vector<Layer> layers;
};

LanguageModel::LanguageModel(const ModelConfig& config, Device device, DType dtype, DType compute_dtype)
    : implementation_(std::make_unique<Implementation>(config, device, dtype, compute_dtype)) {}
LanguageModel::~LanguageModel() = default;
LanguageModel::LanguageModel(LanguageModel&&) noexcept = default;

const ModelConfig& LanguageModel::config() const { return implementation_->config; }
Device LanguageModel::device() const { return implementation_->device; }
const std::vector<Parameter>& LanguageModel::parameters() const { return implementation_->parameters; }
std::int64_t LanguageModel::parameter_count() const { return model::parameter_count(implementation_->config); }
void LanguageModel::set_recompute(Recompute recompute) { implementation_->recompute = recompute; }

void LanguageModel::initialize(std::uint64_t seed) {
    const Implementation& self = *implementation_;
    for (std::size_t i = 0; i < self.shapes.size(); ++i) {
        const Tensor values = Tensor::from(initial_values(self.shapes[i], self.config, seed), self.shapes[i].shape);
        Tensor parameter = self.parameters[i].variable.value();  // a view of the same memory
        parameter.copy_from(values);
    }
}

Variable LanguageModel::hidden(const Tensor& ids, const SequenceLayout& layout) const {
    return implementation_->hidden(ids, layout);
}

Variable LanguageModel::logits(const Tensor& ids, const SequenceLayout& layout) const {
    return ops::linear(implementation_->hidden(ids, layout), implementation_->head);
}

ops::LinearCrossEntropy LanguageModel::loss(const Tensor& ids, const Tensor& targets, const SequenceLayout& layout,
                                            double normalizer) const {
    FENWICK_CHECK(targets.defined() && targets.shape() == ids.shape(), "[model] targets have shape {}, ids {}",
                  to_string(targets.shape()), to_string(ids.shape()));
    return ops::linear_cross_entropy(implementation_->hidden(ids, layout), implementation_->head, targets, normalizer);
}

std::unique_ptr<DecodeState> LanguageModel::new_state(std::int64_t batch) const {
    FENWICK_CHECK(batch >= 1, "[model] a decoding state of {} rows; at least 1 is needed", batch);
    const Implementation& self = *implementation_;
    auto state = std::make_unique<State>();
    state->batch = batch;
    for (const auto& layer : self.layers) state->layers.push_back(layer.mixer->new_state(batch, self.compute_dtype, self.device));
    return state;
}

std::unique_ptr<DecodeState> LanguageModel::random_state(std::int64_t batch, std::int64_t tokens, std::uint64_t seed) const {
    FENWICK_CHECK(tokens >= 1, "[model] a random state of {} tokens; at least 1 is needed", tokens);
    const Implementation& self = *implementation_;
    auto state = new_state(batch);
    auto& whole = static_cast<State&>(*state);
    whole.seen = tokens;
    Random random(seed);
    std::vector<float> values(std::size_t{1} << 20);
    for (auto& value : values) value = static_cast<float>(0.1 * random.normal());
    const Tensor pattern = Tensor::from(values, {static_cast<std::int64_t>(values.size())}, self.device);
    const auto fill = [&](const Tensor& tensor) {
        const Tensor flat = tensor.view({-1});
        for (std::int64_t begin = 0; begin < flat.count(); begin += pattern.count()) {
            const std::int64_t end = std::min(flat.count(), begin + pattern.count());
            flat.narrow_rows(begin, end).copy_from(pattern.narrow_rows(0, end - begin));
        }
    };
    for (std::size_t i = 0; i < self.layers.size(); ++i) {
        MixerState& layer = whole.layers[i];
        self.layers[i].mixer->reserve(layer, 0, tokens);
        for (const auto& tail : layer.convolutions) fill(tail);
        for (const Tensor* tensor : {&layer.levels, &layer.keys, &layer.values})
            if (tensor->defined()) fill(*tensor);
    }
    return state;
}

Tensor LanguageModel::step(const Tensor& ids, DecodeState& decode_state) const {
    const Implementation& self = *implementation_;
    auto* state = dynamic_cast<State*>(&decode_state);
    FENWICK_CHECK(state != nullptr && state->layers.size() == self.layers.size(),
                  "[model] the decoding state is not of this model; make it with new_state()");
    FENWICK_CHECK(ids.defined() && ids.dim() == 2 && ids.size(0) == state->batch && ids.size(1) >= 1,
                  "[model] ids have shape {}, expected [{}, n] with n >= 1", to_string(ids.shape()), state->batch);
    NoRecording no_recording;
    const Variable hidden = self.run(ids, [&](std::size_t i, const Variable& x) {
        return Variable(self.layers[i].mixer->step(x.value(), state->layers[i], state->seen));
    });
    state->seen += ids.size(1);
    return ops::linear(hidden, self.head).value();
}

}  // namespace fenwick::model
