// Every golden case against the operators and models: outputs and the gradients of all inputs.
//
// FENWICK_GOLDEN_DIR     folders of cases, separated by ':' (default: shared/golden beside the source tree)
// FENWICK_GOLDEN_DEVICE  cpu (float64 and float32, the default) or cuda (float32 and bfloat16)
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>

#include "autograd/ops.h"
#include "kernels/optimizer.h"
#include "model/language_model.h"
#include "support/golden.h"

namespace fenwick {
namespace {

using test::GoldenCase;

Device device_under_test() {
    const char* name = std::getenv("FENWICK_GOLDEN_DEVICE");
    if (name == nullptr || std::string_view(name) == "cpu") return cpu_device;
    FENWICK_CHECK(std::string_view(name) == "cuda", "FENWICK_GOLDEN_DEVICE is '{}'; it must be cpu or cuda", name);
    return {DeviceType::cuda, 0};
}

// Bounds on the ratio of RMS error to RMS of the expected values.
struct Precision {
    DType dtype;  // of activations
    double outputs, gradients;
};

std::vector<Precision> precisions(Device device) {
    const Precision single{DType::float32, 1e-4, 1e-4};
    if (device.is_cuda()) return {single, {DType::bfloat16, 0.01, 0.02}};
    return {{DType::float64, 1e-9, 1e-9}, single};
}

// RMS error by RMS. Where zeros are expected (the decay of a document's first token has no effect), the error itself.
double error_ratio(const std::string& what, const Tensor& actual, const Tensor& expected) {
    FENWICK_CHECK(actual.defined(), "{} was not computed", what);
    const auto a = actual.to_vector<double>(), b = expected.to_vector<double>();
    FENWICK_CHECK(a.size() == b.size(), "{} has shape {}, expected {}", what, to_string(actual.shape()), to_string(expected.shape()));
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        error += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    const auto count = static_cast<double>(std::max<std::size_t>(a.size(), 1));
    error = std::sqrt(error / count);
    norm = std::sqrt(norm / count);
    return norm < 1e-12 ? error : error / norm;
}

// The running case's worst ratios, by kind of result and precision: --gtest_output=json:FILE writes them down.
std::map<std::string, double> worst;

void expect_close(const std::string& what, const Tensor& actual, const Tensor& expected, const Precision& precision) {
    const bool gradient = what.starts_with("gradient");
    const double ratio = error_ratio(what, actual, expected);
    EXPECT_LT(ratio, gradient ? precision.gradients : precision.outputs) << what;  // false for NaN
    auto& largest = worst[fmt::format("{}_{}", gradient ? "gradients" : "outputs", name_of(precision.dtype))];
    if (!(ratio <= largest)) largest = ratio;
}

// ---- operators: inputs by name -> output "o" ---------------------------------------------------------------------------

using Inputs = std::map<std::string, Variable>;

Tensor integers(const GoldenCase& golden, const std::string& dataset, Device device) {
    const auto values = golden.integers(dataset);
    return Tensor::from(std::vector<std::int32_t>(values.begin(), values.end()), golden.tensor(dataset).shape()).to(device);
}

SequenceLayout layout_of(const GoldenCase& golden, const Variable& x) {
    return golden.has("in/cu_seqlens") ? SequenceLayout::packed(golden.integers("in/cu_seqlens"))
                                       : SequenceLayout::uniform(x.size(0), x.size(1));
}

// Heads of an input stored as [B, T, heads, ...].
std::int64_t heads_of(const GoldenCase& golden, const std::string& input) { return golden.tensor("in/" + input).size(2); }

Variable optional(const Inputs& in, const std::string& name) {
    const auto found = in.find(name);
    return found == in.end() ? Variable() : found->second;
}

Variable run_ssd(const GoldenCase& golden, const Inputs& in) {
    const ops::SsdOptions options{.heads = heads_of(golden, "v"), .groups = heads_of(golden, "k")};
    return ops::ssd(in.at("q"), in.at("k"), in.at("v"), in.at("g"), optional(in, "lam"), options, layout_of(golden, in.at("q")));
}

Variable run_gated_delta_rule(const GoldenCase& golden, const Inputs& in) {
    return ops::gated_delta_rule(in.at("q"), in.at("k"), in.at("v"), in.at("g"), in.at("beta"), optional(in, "lam"),
                                 {.heads = heads_of(golden, "v")}, layout_of(golden, in.at("q")));
}

using Operator = std::function<Variable(const GoldenCase&, const Inputs&)>;

const std::map<std::string, Operator>& operators() {
    static const std::map<std::string, Operator> table{
        {"rms_norm", [](const auto& c, const auto& in) { return ops::rms_norm(in.at("x"), in.at("w"), c.number("eps", 1e-5)); }},
        {"rms_norm_gated",
         [](const auto& c, const auto& in) { return ops::rms_norm_gated(in.at("x"), in.at("z"), in.at("w"), c.number("eps", 1e-5)); }},
        {"gated_rms_norm",
         [](const auto& c, const auto& in) { return ops::gated_rms_norm(in.at("x"), in.at("z"), in.at("w"), c.number("eps", 1e-5)); }},
        {"l2norm", [](const auto& c, const auto& in) { return ops::l2norm(in.at("x"), 1, c.number("eps", 1e-6)); }},
        {"swiglu", [](const auto&, const auto& in) { return ops::swiglu(in.at("gate"), in.at("up")); }},
        {"causal_conv1d",
         [](const auto& c, const auto& in) {
             return ops::causal_conv1d(in.at("x"), in.at("w"), optional(in, "bias"), layout_of(c, in.at("x")));
         }},
        {"cross_entropy",
         [](const auto& c, const auto& in) {
             return ops::cross_entropy(in.at("logits"), integers(c, "in/target", in.at("logits").device()));
         }},
        {"rope",
         [](const auto& c, const auto& in) {
             return ops::rope(in.at("x"), heads_of(c, "x"), c.number("theta", 10000), layout_of(c, in.at("x")));
         }},
        {"softmax_attention",
         [](const auto& c, const auto& in) {
             return ops::softmax_attention(in.at("q"), in.at("k"), in.at("v"), heads_of(c, "q"), heads_of(c, "k"),
                                           layout_of(c, in.at("q")));
         }},
        {"ssd", run_ssd},
        {"log_linear_ssd", run_ssd},
        {"gated_delta_rule", run_gated_delta_rule},
        {"log_linear_gated_delta_rule", run_gated_delta_rule},
    };
    return table;
}

void check_operator(const Operator& op, const GoldenCase& golden, Device device, const Precision& precision) {
    Inputs inputs;
    for (const auto& name : golden.datasets("in")) {
        if (name == "cu_seqlens" || name == "target") continue;
        const bool is_gate = name == "w" || name == "bias" || name == "g" || name == "beta" || name == "lam";
        Tensor value = golden.tensor("in/" + name);
        if (value.dim() == 4) value = golden.merged("in/" + name);
        inputs.emplace(name, Variable(value.to(is_gate ? gate_dtype(precision.dtype) : precision.dtype).to(device), true));
    }
    Tape tape;
    Variable output;
    {
        Recording recording(tape);
        output = op(golden, inputs);
    }
    expect_close("o", output.value(), golden.tensor("out/o"), precision);
    tape.backward(output, golden.tensor("grad_out/o").to(output.dtype()).to(device).view(output.shape()));
    for (const auto& name : golden.datasets("grad_in")) {
        ASSERT_TRUE(inputs.contains(name)) << "the case has a gradient of '" << name << "', which is no input";
        expect_close("gradient of " + name, inputs.at(name).gradient()->or_zeros(), golden.tensor("grad_in/" + name), precision);
    }
}

// ---- the optimizer -----------------------------------------------------------------------------------------------------

void check_adamw(const GoldenCase& golden, Device device, const Precision& precision) {
    if (precision.dtype == DType::bfloat16) return;  // master weights are never bfloat16
    const Tensor parameter = golden.tensor("in/param").to(precision.dtype).to(device).clone();
    const Tensor gradients = golden.tensor("in/grads").to(precision.dtype).to(device);  // [steps, count]
    const Tensor first = Tensor::zeros(parameter.shape(), parameter.dtype(), device);
    const Tensor second = Tensor::zeros(parameter.shape(), parameter.dtype(), device);
    for (std::int64_t step = 1; step <= gradients.size(0); ++step) {
        const Tensor gradient = gradients.narrow_rows(step - 1, step);
        const kernels::AdamWTensor tensor{parameter.count(), parameter.data(), gradient.data(), first.data(), second.data(),
                                          golden.number("weight_decay", 0)};
        kernels::adamw(exec_of(parameter), {.dtype = precision.dtype,
                                            .tensor_count = 1,
                                            .tensors = &tensor,
                                            .step = step,
                                            .learning_rate = golden.number("lr", 0),
                                            .beta1 = golden.number("beta1", 0),
                                            .beta2 = golden.number("beta2", 0),
                                            .eps = golden.number("eps", 0)});
    }
    expect_close("param", parameter, golden.tensor("out/param"), precision);
}

// ---- models ------------------------------------------------------------------------------------------------------------

model::ModelConfig model_config(const GoldenCase& golden) {
    const auto whole = [&](const char* key, double otherwise) { return static_cast<std::int64_t>(golden.number(key, otherwise)); };
    model::ModelConfig config;
    config.type = model::model_type_from(golden.text("model_type"));
    config.vocab_size = whole("vocab_size", 0);
    config.hidden_size = whole("hidden_size", 0);
    config.num_layers = whole("num_hidden_layers", 0);
    config.intermediate_size = whole("intermediate_size", 0);
    config.norm_eps = golden.number("norm_eps", 1e-5);
    config.tie_embeddings = golden.number("tie_word_embeddings", 0) != 0;
    config.num_heads = whole("num_heads", 0);
    config.head_dim = whole("head_dim", 0);
    config.num_kv_heads = whole("num_kv_heads", 0);
    config.rope_theta = golden.number("rope_theta", 10000);
    config.state_size = whole("state_size", 128);
    config.n_groups = whole("n_groups", 1);
    config.expand_v = golden.number("expand_v", 2);
    config.conv_width = whole(model::is_mamba2(config.type) ? "conv_kernel" : "conv_size", 4);
    config.num_levels = whole("num_levels", 0);
    return config;
}

struct ModelResults {
    Tensor logits, loss;
    std::map<std::string, Tensor> gradients;
};

// With `rounded_weights`, as if every matrix of a product were in bfloat16.
ModelResults run_model(const GoldenCase& golden, Device device, DType dtype, bool rounded_weights = false) {
    const DType master = gate_dtype(dtype);
    const model::LanguageModel model(model_config(golden), device, master, dtype);
    EXPECT_EQ(model.parameters().size(), golden.datasets("in/params").size());
    for (const auto& parameter : model.parameters()) {
        Tensor given = golden.tensor("in/params/" + parameter.name);
        if (rounded_weights && parameter.weight_decay && given.dim() == 2) given = given.to(DType::bfloat16);
        Tensor value = parameter.variable.value();  // a view of the same memory
        value.copy_from(given.to(master).to(device));
    }

    const Tensor ids = integers(golden, "in/input_ids", device);
    const auto layout = SequenceLayout::uniform(ids.size(0), ids.size(1));
    // targets[b, t] = ids[b, t + 1]; the last token of a row has none.
    const auto tokens = ids.to_vector<std::int32_t>();
    std::vector<std::int32_t> next(tokens.size(), -100);
    for (std::size_t i = 0; i + 1 < tokens.size(); ++i)
        if ((static_cast<std::int64_t>(i) + 1) % ids.size(1) != 0) next[i] = tokens[i + 1];
    const Tensor targets = Tensor::from(next, ids.shape()).to(device);

    ModelResults results{.logits = model.logits(ids, layout).value(), .loss = {}, .gradients = {}};
    Tape tape;
    Variable loss;
    {
        Recording recording(tape);
        loss = model.loss(ids, targets, layout, static_cast<double>(ids.size(0) * (ids.size(1) - 1))).loss;
    }
    results.loss = loss.value();
    tape.backward(loss);
    for (const auto& parameter : model.parameters()) results.gradients[parameter.name] = parameter.variable.gradient()->or_zeros();
    return results;
}

// The bounds of a model in bfloat16. Random models multiply the rounding of every product's factors (a head's output that all
// but cancels, then its norm), so how much is measured: by what rounding the weights alone does to the results in float32, which
// no program with bfloat16 products avoids. Rounding the activations too about doubles it; one tensor's share varies more.
Precision model_precision(const GoldenCase& golden, Device device, const Precision& precision) {
    if (precision.dtype != DType::bfloat16) return precision;
    const ModelResults rounded = run_model(golden, device, DType::float32, true);
    double gradients = 0;
    for (const auto& [name, gradient] : rounded.gradients)
        gradients = std::max(gradients, error_ratio(name, gradient, golden.tensor("grad_in/params/" + name)));
    const double outputs = error_ratio("logits", rounded.logits, golden.tensor("out/logits"));
    return {precision.dtype, std::max(precision.outputs, 2.5 * outputs), std::max(precision.gradients, 4 * gradients)};
}

void check_model(const GoldenCase& golden, Device device, const Precision& wanted) {
    const Precision precision = model_precision(golden, device, wanted);
    const ModelResults results = run_model(golden, device, precision.dtype);
    expect_close("logits", results.logits, golden.tensor("out/logits"), precision);
    expect_close("loss", results.loss, golden.tensor("out/loss"), precision);
    for (const auto& [name, gradient] : results.gradients)
        expect_close("gradient of " + name, gradient, golden.tensor("grad_in/params/" + name), precision);
}

// ---- one test a file ---------------------------------------------------------------------------------------------------

TEST(GoldenFolders, Exist) {
    for (const auto& folder : test::golden_folders())
        if (!std::filesystem::is_directory(folder))
            GTEST_SKIP() << "no golden cases: folder '" << folder.string() << "' is absent; FENWICK_GOLDEN_DIR names others";
    EXPECT_FALSE(test::golden_files().empty()) << "the folders hold no .h5 file";
}

class Golden : public testing::TestWithParam<std::filesystem::path> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Golden);
INSTANTIATE_TEST_SUITE_P(, Golden, testing::ValuesIn(test::golden_files()), [](const auto& info) {
    std::string name = info.param.stem().string();
    for (char& character : name)
        if (!std::isalnum(static_cast<unsigned char>(character))) character = '_';
    return fmt::format("{}_{}", name, info.index);  // several folders may hold the same name
});

// A file that cannot be read fails: nothing here catches its error.
TEST_P(Golden, OutputsAndGradients) {
    const GoldenCase golden(GetParam());
    const Device device = device_under_test();
    const std::string op = golden.op();
    const auto found = operators().find(op);
    if (found == operators().end() && op != "adamw" && op != "model")
        GTEST_SKIP() << GetParam().string() << ": operator '" << op << "' is not known here";
    worst.clear();
    RecordProperty("op", op == "model" ? golden.text("model_type") : op);
    for (const auto& precision : precisions(device)) {
        SCOPED_TRACE(std::string(name_of(precision.dtype)));
        if (op == "adamw")
            check_adamw(golden, device, precision);
        else if (op == "model")
            check_model(golden, device, precision);
        else
            check_operator(found->second, golden, device, precision);
    }
    for (const auto& [name, ratio] : worst) RecordProperty(name, fmt::format("{:.2e}", ratio));
}

}  // namespace
}  // namespace fenwick
