#include "model/hf_layout.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "model/parameters.h"
#include "small_models.h"
#include "support/temporary_folder.h"

namespace fenwick::model {
namespace {

using test::random_ids;
using test::small_config;
using test::TemporaryFolder;

LanguageModel small_model(const ModelConfig& config) {
    LanguageModel model(config, cpu_device, DType::float32, DType::float32);
    model.initialize(1);
    test::perturb(model);
    return model;
}

std::string failure(const std::function<void()>& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

class HfLayout : public testing::TestWithParam<ModelType> {};
INSTANTIATE_TEST_SUITE_P(Types, HfLayout, testing::ValuesIn(test::all_types), test::type_name);

TEST_P(HfLayout, ExportAndImportAreBitExact) {
    for (const bool tied : {false, true})
        for (const std::int64_t shard : {std::int64_t{5'000'000'000}, std::int64_t{20'000}}) {
            const TemporaryFolder folder;
            ModelConfig config = small_config(GetParam());
            config.tie_embeddings = tied;
            config.norm_eps = 3e-6;
            config.chunk_size = 64;  // what an imported model gets: the order of additions depends on it
            const LanguageModel model = small_model(config);
            ExportOptions options;
            options.max_shard_bytes = shard;
            export_hf(model, folder.path() + "/model", options);
            EXPECT_EQ(std::filesystem::exists(folder.path() + "/model/model.safetensors"), shard > 1'000'000);
            const LanguageModel back = import_hf(folder.path() + "/model", cpu_device, DType::float32);
            ASSERT_EQ(back.parameters().size(), model.parameters().size());
            for (std::size_t i = 0; i < back.parameters().size(); ++i)
                EXPECT_EQ(back.parameters()[i].variable.value().to_vector<float>(),
                          model.parameters()[i].variable.value().to_vector<float>());
            const Tensor ids = random_ids(1, 30, 61, 1);
            const auto layout = SequenceLayout::uniform(1, 30);
            EXPECT_EQ(back.logits(ids, layout).value().to_vector<float>(), model.logits(ids, layout).value().to_vector<float>());
        }
}

TEST_P(HfLayout, ConfigurationsRoundTrip) {
    ModelConfig config = small_config(GetParam());
    config.num_levels = has_levels(config.type) ? 12 : 0;
    config.rope_theta = 500000;
    config.expand_v = 1.5;
    config.initializer_range = 0.006;
    const ModelConfig back = config_from_hf(config_to_hf(config, {}), "config.json");
    EXPECT_EQ(config_to_hf(back, {}), config_to_hf(config, {}));
    const auto a = parameter_shapes(back), b = parameter_shapes(config);
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].shape, b[i].shape) << a[i].name;
    EXPECT_EQ(back.num_levels, config.num_levels);
}

TEST(HfLayout, ReadsLlama) {
    const TemporaryFolder folder;
    ModelConfig config = small_config(ModelType::transformer);
    const LanguageModel model = small_model(config);
    ExportOptions options;
    options.llama_names = true;
    export_hf(model, folder.path(), options);
    const auto file = safetensors::File::open(folder.path() + "/model.safetensors");
    std::vector<std::string> names;
    for (const auto& entry : file.entries()) names.push_back(entry.name);
    for (const char* name : {"model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight",
                             "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight",
                             "lm_head.weight"})
        EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
    const LanguageModel back = import_hf(folder.path(), cpu_device, DType::float32);
    const Tensor ids = random_ids(1, 30, 61, 1);
    const auto layout = SequenceLayout::uniform(1, 30);
    EXPECT_EQ(back.logits(ids, layout).value().to_vector<float>(), model.logits(ids, layout).value().to_vector<float>());
    EXPECT_NE(failure([&] { export_hf(small_model(small_config(ModelType::mamba2)), folder.path(), options); }), "");
}

TEST(HfLayout, ReadsReferenceConfigurations) {
    const ModelConfig llama = config_from_hf(
        R"({"model_type":"llama","vocab_size":32000,"hidden_size":2048,"intermediate_size":5632,"num_hidden_layers":22,
            "num_attention_heads":32,"num_key_value_heads":4,"rms_norm_eps":1e-05,"rope_theta":10000.0,"rope_scaling":null,
            "hidden_act":"silu","attention_bias":false,"tie_word_embeddings":false})", "c");
    EXPECT_EQ(parameter_count(llama), 1100048384);  // TinyLlama's
    const ModelConfig mamba = config_from_hf(
        R"({"model_type":"log_linear_mamba2","vocab_size":32000,"hidden_size":1536,"num_hidden_layers":21,"head_dim":64,
            "state_size":128,"expand":2,"n_groups":1,"conv_kernel":4,"use_bias":false,"chunk_size":64,"norm_eps":1e-5})", "c");
    EXPECT_EQ(mamba.num_heads, 48);
    EXPECT_EQ(mamba.num_levels, 15);
    EXPECT_EQ(mamba.mlp_width(), 4096);
}

TEST(HfLayout, RefusesWhatItCannotCompute) {
    const auto message = [](const std::string& text) { return failure([&] { config_from_hf(text, "c"); }); };
    const std::string llama = R"({"model_type":"llama","vocab_size":10,"hidden_size":8,"num_hidden_layers":1,"num_attention_heads":2,)";
    EXPECT_EQ(message(llama + R"("attention_bias":true})"), "c: attention_bias is true; only false is supported");
    EXPECT_EQ(message(llama + R"("rope_scaling":{"rope_type":"llama3","factor":8}})"),
              "c: rope_scaling is of type llama3; only unscaled rotary positions are supported");
    EXPECT_EQ(message(llama + R"("hidden_act":"gelu"})"), "c: hidden_act is \"gelu\"; only silu is supported");
    EXPECT_EQ(message(llama + R"("intermediate_size":"big"})"), "c: intermediate_size is \"big\"; a whole number is needed");
    EXPECT_NE(message(llama + R"("num_key_value_heads":3})").find("num_kv_heads"), std::string::npos);
    EXPECT_EQ(message(R"({"model_type":"gpt2"})"), "c: model_type is 'gpt2'; transformer, mamba2, log_linear_mamba2, gated_deltanet, "
                                                   "log_linear_gated_deltanet and llama can be read");
    EXPECT_EQ(message(R"({"model_type":"llama"})"), "c: vocab_size is missing");
    EXPECT_EQ(message("{"), "c: is not JSON");
    EXPECT_EQ(message("[]"), "c: must be a JSON object");
    EXPECT_NE(message("{\"model_type\":" + std::string(1000, '[')).find("nests deeper"), std::string::npos);
}

TEST(HfLayout, NamesMissingExtraAndMisshapenTensors) {
    const TemporaryFolder folder;
    const ModelConfig config = small_config(ModelType::mamba2);
    const LanguageModel model = small_model(config);
    export_hf(model, folder.path(), {});
    const std::string path = folder.path() + "/model.safetensors";
    std::vector<safetensors::NamedTensor> tensors;
    for (const auto& parameter : model.parameters()) tensors.push_back({parameter.name, parameter.variable.value()});
    const auto import = [&] { return failure([&] { import_hf(folder.path(), cpu_device, DType::float32); }); };
    EXPECT_EQ(import(), "");

    auto changed = tensors;
    changed.erase(changed.begin() + 3);
    safetensors::write(path, changed, safetensors::Type::float32);
    EXPECT_EQ(import(), folder.path() + ": tensor '" + tensors[3].name + "' is missing");

    changed = tensors;
    changed.push_back({"backbone.extra", Tensor::zeros({2}, DType::float32)});
    safetensors::write(path, changed, safetensors::Type::float32);
    EXPECT_EQ(import(), folder.path() + ": tensor 'backbone.extra' is not part of the model of config.json");

    changed = tensors;
    changed[0].value = Tensor::zeros({60, 32}, DType::float32);
    safetensors::write(path, changed, safetensors::Type::float32);
    EXPECT_EQ(import(), folder.path() + ": tensor 'backbone.embeddings.weight' has shape [60, 32], the model of config.json needs [61, 32]");

    std::ofstream(folder.path() + "/model.safetensors.index.json") << R"({"weight_map":{"a":"../model.safetensors"}})";
    EXPECT_NE(import().find("is not a plain name in the same folder"), std::string::npos);
    std::filesystem::remove(folder.path() + "/model.safetensors.index.json");
    std::filesystem::remove(path);
    EXPECT_NE(import().find("neither model.safetensors nor"), std::string::npos);
}

}  // namespace
}  // namespace fenwick::model
