#include "model/hf_layout.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files.h"
#include "model/parameters.h"

namespace fenwick::model {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::int64_t levels_of_reference = 15;  // flash-linear-attention's log-linear Mamba-2: a constant, for 16384 tokens

// One config.json, with errors that name the file and the key. An absent or null key reads as its default.
class Keys {
public:
    Keys(std::string_view text, const std::string& path) : path_(path) {
        try {
            root_ = json::parse(text.begin(), text.end(), [&](int depth, json::parse_event_t, json&) {
                FENWICK_CHECK(depth <= 32, "{}: nests deeper than 32 levels", path_);  // comparing and printing recurse
                return true;
            });
        } catch (const json::exception&) {
            fail("{}: is not JSON", path_);
        }
        FENWICK_CHECK(root_.is_object(), "{}: must be a JSON object", path_);
    }

    bool has(const char* key) const { return root_.contains(key) && !root_[key].is_null(); }
    std::int64_t whole(const char* key, std::int64_t otherwise) const {
        if (!has(key)) return otherwise;
        const json& value = root_[key];
        // A number such as 2.0 is whole too; beyond 2^53 a double is not.
        if (value.is_number_float() && std::abs(value.get<double>()) < 9e15 && value.get<double>() == std::floor(value.get<double>()))
            return static_cast<std::int64_t>(value.get<double>());
        FENWICK_CHECK(value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() < (1ull << 62)),
                      "{}: {} is {}; a whole number is needed", path_, key, shown(value));
        return value.get<std::int64_t>();
    }
    std::int64_t needed(const char* key) const {
        FENWICK_CHECK(has(key), "{}: {} is missing", path_, key);
        return whole(key, 0);
    }
    double number(const char* key, double otherwise) const {
        if (!has(key)) return otherwise;
        FENWICK_CHECK(root_[key].is_number(), "{}: {} is {}; a number is needed", path_, key, shown(root_[key]));
        return root_[key].get<double>();
    }
    bool flag(const char* key, bool otherwise) const {
        if (!has(key)) return otherwise;
        FENWICK_CHECK(root_[key].is_boolean(), "{}: {} is {}; true or false is needed", path_, key, shown(root_[key]));
        return root_[key].get<bool>();
    }
    std::string text(const char* key) const {
        FENWICK_CHECK(has(key) && root_[key].is_string(), "{}: {} is missing or not a text", path_, key);
        return root_[key].get<std::string>();
    }
    // Refuses a model that computes something else than ours does.
    void only(const char* key, const json& supported) const {
        FENWICK_CHECK(!has(key) || root_[key] == supported, "{}: {} is {}; only {} is supported", path_, key, shown(root_[key]),
                      shown(supported));
    }
    void absent(const char* key) const {
        FENWICK_CHECK(!has(key), "{}: {} is {}; models with it are not supported", path_, key, shown(root_[key]));
    }
    void silu(const char* key) const {
        FENWICK_CHECK(!has(key) || root_[key] == "silu" || root_[key] == "swish", "{}: {} is {}; only silu is supported", path_, key,
                      shown(root_[key]));
    }
    const json* object(const char* key) const { return has(key) && root_[key].is_object() ? &root_[key] : nullptr; }

private:
    static std::string shown(const json& value) { return value.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 60); }
    json root_;
    std::string path_;
};

void read_rotary(const Keys& keys, ModelConfig& config, const std::string& path) {
    config.rope_theta = keys.number("rope_theta", 10000.0);
    for (const char* key : {"rope_scaling", "rope_parameters"})
        if (const json* rope = keys.object(key)) {
            const std::string type = rope->contains("rope_type") && (*rope)["rope_type"].is_string() ? (*rope)["rope_type"]
                                     : rope->contains("type") && (*rope)["type"].is_string()         ? (*rope)["type"]
                                                                                                     : json("default");
            FENWICK_CHECK(type == "default", "{}: {} is of type {}; only unscaled rotary positions are supported", path, key, type);
            if (rope->contains("rope_theta") && (*rope)["rope_theta"].is_number()) config.rope_theta = (*rope)["rope_theta"];
        }
}

// Parameter names in the file, given ours.
std::string llama_name(std::string name) {
    for (const auto& [ours, theirs] : {std::pair<std::string_view, std::string_view>{"model.embeddings.", "model.embed_tokens."},
                                       {".attn_norm.", ".input_layernorm."},
                                       {".mlp_norm.", ".post_attention_layernorm."},
                                       {".attn.", ".self_attn."}})
        if (const auto at = name.find(ours); at != std::string::npos) name.replace(at, ours.size(), theirs);
    return name;
}

std::string shard_name(std::size_t number, std::size_t count) {
    return count == 1 ? "model.safetensors" : fmt::format("model-{:05d}-of-{:05d}.safetensors", number + 1, count);
}

// The files of a model: one, or those that the index names.
std::vector<std::string> weight_files(const fs::path& folder) {
    const fs::path index = folder / "model.safetensors.index.json";
    if (!fs::exists(index)) {
        FENWICK_CHECK(fs::exists(folder / "model.safetensors"), "{}: neither model.safetensors nor model.safetensors.index.json is there",
                      folder.string());
        return {(folder / "model.safetensors").string()};
    }
    json parsed;
    try {
        parsed = json::parse(read_file(index.string()));
    } catch (const json::exception&) {
        fail("{}: is not JSON", index.string());
    }
    FENWICK_CHECK(parsed.is_object() && parsed.contains("weight_map") && parsed["weight_map"].is_object(),
                  "{}: weight_map is missing", index.string());
    std::set<std::string> names;
    for (const auto& [tensor, file] : parsed["weight_map"].items()) {
        FENWICK_CHECK(file.is_string(), "{}: the file of '{}' is not a name", index.string(), tensor);
        const std::string name = file;
        FENWICK_CHECK(!name.empty() && fs::path(name).filename() == name && name != "." && name != "..",
                      "{}: the file '{}' of '{}' is not a plain name in the same folder", index.string(), name, tensor);
        names.insert(name);
    }
    std::vector<std::string> paths;
    for (const auto& name : names) paths.push_back((folder / name).string());
    return paths;
}

}  // namespace

ModelConfig config_from_hf(std::string_view text, const std::string& path) {
    const Keys keys(text, path);
    const std::string type = keys.text("model_type");
    const bool llama = type == "llama";
    ModelConfig config;
    if (llama) {
        config.type = ModelType::transformer;
    } else {
        try {
            config.type = model_type_from(type);
        } catch (const Error&) {
            fail("{}: model_type is '{}'; transformer, mamba2, log_linear_mamba2, gated_deltanet, log_linear_gated_deltanet and llama "
                 "can be read",
                 path, type.substr(0, 60));
        }
    }
    config.vocab_size = keys.needed("vocab_size");
    config.hidden_size = keys.needed("hidden_size");
    config.num_layers = keys.needed("num_hidden_layers");
    config.initializer_range = keys.number("initializer_range", 0.02);
    config.tie_embeddings = keys.flag("tie_word_embeddings", false);
    config.norm_eps = llama ? keys.number("rms_norm_eps", 1e-6) : keys.number("norm_eps", is_mamba2(config.type) ? 1e-5 : 1e-6);
    config.intermediate_size = keys.whole("intermediate_size", 0);
    if (config.intermediate_size == 0 && keys.number("hidden_ratio", 4) != 4) {
        const auto width = static_cast<std::int64_t>(
            std::clamp(keys.number("hidden_ratio", 4) * 2 / 3 * static_cast<double>(config.hidden_size), 0.0, 1e9));
        config.intermediate_size = 256 * ((width + 255) / 256);
    }
    keys.silu("hidden_act");

    if (config.type == ModelType::transformer) {
        config.num_heads = keys.needed(llama ? "num_attention_heads" : "num_heads");
        config.num_kv_heads = keys.whole(llama ? "num_key_value_heads" : "num_kv_heads", 0);
        config.head_dim = keys.whole("head_dim", 0);
        read_rotary(keys, config, path);
        keys.only("attention_bias", false);
        keys.only("mlp_bias", false);
        keys.only("qkv_bias", false);
        keys.only("qk_norm", false);
        keys.absent("window_size");
    } else if (is_mamba2(config.type)) {
        config.head_dim = keys.whole("head_dim", 64);
        const double expand = keys.number("expand", 2);
        const double inner = expand * static_cast<double>(config.hidden_size);
        FENWICK_CHECK(config.head_dim >= 1 && inner >= 1 && inner < 1e12 && inner == std::floor(inner) &&
                          static_cast<std::int64_t>(inner) % config.head_dim == 0,
                      "{}: expand {} times hidden_size {} is not a whole number of heads of head_dim {}", path, expand,
                      config.hidden_size, config.head_dim);
        const std::int64_t heads = static_cast<std::int64_t>(inner) / config.head_dim;
        config.num_heads = keys.whole("num_heads", heads);
        FENWICK_CHECK(config.num_heads == heads, "{}: num_heads is {}, but expand {} times hidden_size {} over head_dim {} is {}", path,
                      config.num_heads, expand, config.hidden_size, config.head_dim, heads);
        config.state_size = keys.whole("state_size", 128);
        config.n_groups = keys.whole("n_groups", 1);
        config.conv_width = keys.whole("conv_kernel", 4);
        keys.only("use_bias", false);
        keys.only("use_conv_bias", true);
        keys.only("rms_norm", true);
        keys.only("rmsnorm", true);
        keys.only("norm_before_gate", false);
        keys.only("D_has_hdim", false);
    } else {
        config.num_heads = keys.needed("num_heads");
        config.head_dim = keys.whole("head_dim", 256);
        config.expand_v = keys.number("expand_v", 2.0);
        config.conv_width = keys.whole("conv_size", 4);
        keys.only("use_gate", true);
        keys.only("use_short_conv", true);
        keys.only("allow_neg_eigval", false);
        keys.only("num_v_heads", config.num_heads);
        keys.absent("attn");
    }
    if (has_levels(config.type)) config.num_levels = keys.whole("num_levels", levels_of_reference);
    // The chunk is our own choice: the reference's does not change the result.
    try {
        config.validate();
    } catch (const Error& error) {
        fail("{}: {}", path, error.what());
    }
    return config;
}

std::string config_to_hf(const ModelConfig& config, const ExportOptions& options) {
    FENWICK_CHECK(!options.llama_names || config.type == ModelType::transformer,
                  "only the transformer can be exported with llama's names, this is a {}", name_of(config.type));
    nlohmann::ordered_json out;
    const char* architecture = nullptr;
    switch (config.type) {
        case ModelType::transformer: architecture = options.llama_names ? "LlamaForCausalLM" : "TransformerForCausalLM"; break;
        case ModelType::mamba2: architecture = "Mamba2ForCausalLM"; break;
        case ModelType::log_linear_mamba2: architecture = "LogLinearMamba2ForCausalLM"; break;
        case ModelType::gated_deltanet: architecture = "GatedDeltaNetForCausalLM"; break;
        case ModelType::log_linear_gated_deltanet: architecture = "LogLinearGatedDeltaNetForCausalLM"; break;
    }
    out["architectures"] = {architecture};
    out["model_type"] = options.llama_names ? "llama" : std::string(name_of(config.type));
    out["vocab_size"] = config.vocab_size;
    out["hidden_size"] = config.hidden_size;
    out["num_hidden_layers"] = config.num_layers;
    out["intermediate_size"] = config.mlp_width();
    out["hidden_act"] = options.llama_names || is_mamba2(config.type) ? "silu" : "swish";
    out[options.llama_names ? "rms_norm_eps" : "norm_eps"] = config.norm_eps;
    out["initializer_range"] = config.initializer_range;
    out["tie_word_embeddings"] = config.tie_embeddings;
    if (config.type == ModelType::transformer) {
        out[options.llama_names ? "num_attention_heads" : "num_heads"] = config.num_heads;
        out[options.llama_names ? "num_key_value_heads" : "num_kv_heads"] = config.kv_heads();
        out["head_dim"] = config.key_width();
        out["rope_theta"] = config.rope_theta;
        if (options.llama_names) {
            out["attention_bias"] = false;
            out["mlp_bias"] = false;
        } else {
            out["qkv_bias"] = false;
            out["qk_norm"] = false;
        }
    } else if (is_mamba2(config.type)) {
        out["num_heads"] = config.num_heads;
        out["head_dim"] = config.head_dim;
        out["state_size"] = config.state_size;
        const std::int64_t inner = config.num_heads * config.head_dim;
        if (inner % config.hidden_size == 0) out["expand"] = inner / config.hidden_size;
        else out["expand"] = static_cast<double>(inner) / static_cast<double>(config.hidden_size);
        out["n_groups"] = config.n_groups;
        out["conv_kernel"] = config.conv_width;
        out["use_bias"] = false;
        out["use_conv_bias"] = true;
        out["rms_norm"] = true;
        out["residual_in_fp32"] = false;
        out["chunk_size"] = 64;  // the only one that the reference's log-linear kernels accept
    } else {
        out["num_heads"] = config.num_heads;
        out["head_dim"] = config.head_dim;
        out["expand_v"] = config.expand_v;
        out["conv_size"] = config.conv_width;
        out["use_gate"] = true;
        out["use_short_conv"] = true;
    }
    if (has_levels(config.type)) out["num_levels"] = config.num_levels;
    if (options.bos_token_id >= 0) out["bos_token_id"] = options.bos_token_id;
    if (options.eos_token_id >= 0) out["eos_token_id"] = options.eos_token_id;
    out["torch_dtype"] = options.dtype == safetensors::Type::float32    ? "float32"
                         : options.dtype == safetensors::Type::bfloat16 ? "bfloat16"
                                                                        : "float16";
    return out.dump(2) + "\n";
}

void export_hf(const LanguageModel& model, const std::string& folder, const ExportOptions& options) {
    const std::string config = config_to_hf(model.config(), options);
    FENWICK_CHECK(options.max_shard_bytes >= 1, "max_shard_bytes is {}; at least 1 is needed", options.max_shard_bytes);
    make_folder(folder);
    std::vector<std::vector<safetensors::NamedTensor>> shards(1);
    std::int64_t in_shard = 0, total = 0;
    for (const auto& parameter : model.parameters()) {
        const Tensor& value = parameter.variable.value();
        const std::int64_t bytes = value.count() * safetensors::size_of(options.dtype);
        if (!shards.back().empty() && in_shard + bytes > options.max_shard_bytes) {
            shards.emplace_back();
            in_shard = 0;
        }
        shards.back().push_back({options.llama_names ? llama_name(parameter.name) : parameter.name, value});
        in_shard += bytes;
        total += bytes;
    }
    nlohmann::ordered_json index;
    index["metadata"]["total_size"] = total;
    for (std::size_t i = 0; i < shards.size(); ++i) {
        const std::string name = shard_name(i, shards.size());
        safetensors::write((fs::path(folder) / name).string(), shards[i], options.dtype);
        for (const auto& tensor : shards[i]) index["weight_map"][tensor.name] = name;
    }
    // An older export of the other kind would be read instead.
    const fs::path index_path = fs::path(folder) / "model.safetensors.index.json";
    std::error_code ignored;
    fs::remove(shards.size() > 1 ? fs::path(folder) / "model.safetensors" : index_path, ignored);
    if (shards.size() > 1) write_file_atomically(index_path.string(), index.dump(2) + "\n");
    write_file_atomically((fs::path(folder) / "config.json").string(), config);
}

LanguageModel import_hf(const std::string& folder, Device device, DType compute_dtype) {
    FENWICK_CHECK(fs::is_directory(folder), "{}: is not a folder; one with config.json and model.safetensors is needed", folder);
    const std::string config_path = (fs::path(folder) / "config.json").string();
    const std::string text = read_file(config_path);
    const ModelConfig config = config_from_hf(text, config_path);
    const bool llama = Keys(text, config_path).text("model_type") == "llama";
    // All headers first: a folder that lacks something is refused before anything large is allocated.
    std::vector<safetensors::File> files;
    std::map<std::string, std::pair<std::size_t, const safetensors::Entry*>> found;
    for (const auto& path : weight_files(folder)) files.push_back(safetensors::File::open(path));
    for (std::size_t i = 0; i < files.size(); ++i)
        for (const auto& entry : files[i].entries())
            FENWICK_CHECK(found.emplace(entry.name, std::pair(i, &entry)).second, "{}: tensor '{}' is in two files", folder, entry.name);
    const auto name_in_file = [&](const std::string& name) { return llama ? llama_name(name) : name; };
    std::set<std::string> expected;
    for (const auto& parameter : parameter_shapes(config)) {
        const std::string name = name_in_file(parameter.name);
        const auto entry = found.find(name);
        FENWICK_CHECK(entry != found.end(), "{}: tensor '{}' is missing", folder, name);
        FENWICK_CHECK(entry->second.second->shape == parameter.shape, "{}: tensor '{}' has shape {}, the model of config.json needs {}",
                      folder, name, to_string(entry->second.second->shape), to_string(parameter.shape));
        expected.insert(name);
    }
    for (const auto& [name, place] : found) {
        // Left-overs that carry nothing: a copy of a tied head, and the rotary frequencies of old files.
        const bool ignorable = (config.tie_embeddings && name == "lm_head.weight") || name.ends_with(".rotary_emb.inv_freq");
        FENWICK_CHECK(expected.contains(name) || ignorable, "{}: tensor '{}' is not part of the model of config.json", folder, name);
    }
    LanguageModel model(config, device, gate_dtype(compute_dtype), compute_dtype);
    for (const auto& parameter : model.parameters()) {
        const auto& [file, entry] = found.at(name_in_file(parameter.name));
        Tensor value = parameter.variable.value();
        value.copy_from(files[file].read(*entry));
    }
    return model;
}

}  // namespace fenwick::model
