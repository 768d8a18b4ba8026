#include "train/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/crc32.h"
#include "base/files.h"
#include "base/hdf5.h"
#include "base/log.h"
#include "base/sha256.h"

namespace fenwick::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view format = "fenwick-checkpoint";
constexpr std::int64_t version = 1;
constexpr const char* definition_name = "tokenizer/definition";

std::string weight_name(const std::string& parameter) { return "weights/" + parameter; }
std::string first_moment_name(const std::string& parameter) { return "optimizer/first_moment/" + parameter; }
std::string second_moment_name(const std::string& parameter) { return "optimizer/second_moment/" + parameter; }

// Of everything in the header, so that a flipped bit in an attribute is found too.
std::string header_checksum(const CheckpointHeader& header) {
    std::string text = fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}", header.step, header.tokens, header.loader.epoch,
                                   header.loader.row, header.config, header.tokenizer.kind, header.tokenizer.identity,
                                   sha256_hex(header.tokenizer.definition));
    if (!header.loader.data.empty()) text += "\n" + header.loader.data;  // older checkpoints have none
    return sha256_hex(text);
}

void write_tensor(hdf5::File& file, const std::string& name, const Tensor& tensor) {
    const Tensor host = tensor.to(cpu_device).contiguous();
    dispatch_cpu_float("save_checkpoint", host.dtype(), [&](auto tag) {
        using T = typename decltype(tag)::type;
        file.write(name, host.as<T>(), host.shape());
    });
    file.set_attribute(name, "crc32", std::int64_t{crc32_of(host.data(), host.bytes())});
}

// Reads a dataset of floats with its checksum compared.
template <class T>
void read_checked(const hdf5::File& file, const std::string& name, T* out, std::int64_t count) {
    file.read_into(name, out, count);
    FENWICK_CHECK(file.attribute_int(name, "crc32") == crc32_of(out, static_cast<std::size_t>(count) * sizeof(T)),
                  "{}: '{}' is damaged (its checksum does not fit)", file.path(), name);
}

void read_tensor(const hdf5::File& file, const std::string& name, Tensor tensor) {
    FENWICK_CHECK(file.is_dataset(name), "{}: checkpoint of another model: tensor '{}' is missing", file.path(), name);
    const auto info = file.info(name);
    FENWICK_CHECK(info.shape == tensor.shape(), "{}: checkpoint of another model: tensor '{}' is {} there, {} here", file.path(),
                  name, to_string(info.shape), to_string(tensor.shape()));
    const bool is_double = info.type == hdf5::ElementType::float64;
    FENWICK_CHECK(is_double || info.type == hdf5::ElementType::float32, "{}: tensor '{}' is neither float32 nor float64",
                  file.path(), name);
    dispatch_cpu_float("load_checkpoint", is_double ? DType::float64 : DType::float32, [&](auto tag) {
        using T = typename decltype(tag)::type;
        MemoryKindScope scope(MemoryKind::workspace);
        const Tensor host = Tensor::empty(tensor.shape(), dtype_of<T>);
        read_checked(file, name, host.as<T>(), host.count());
        tensor.copy_from(host.to(tensor.dtype()));
    });
}

hdf5::File open_checkpoint(const std::string& path) {
    hdf5::File file = hdf5::File::open(path);
    FENWICK_CHECK(file.has_attribute("/", "format") && file.attribute_string("/", "format") == format,
                  "{}: an HDF5 file, but not a checkpoint of fenwick", path);
    FENWICK_CHECK(file.attribute_int("/", "version") == version, "{}: checkpoint version {}; this program reads version {}", path,
                  file.attribute_int("/", "version"), version);
    FENWICK_CHECK(file.has_attribute("/", "complete"), "{}: the checkpoint is not complete (writing it was interrupted)", path);
    return file;
}

CheckpointHeader read_header(const hdf5::File& file) {
    CheckpointHeader header;
    header.step = file.attribute_int("/", "step");
    header.tokens = file.attribute_int("/", "tokens");
    header.loader.epoch = file.attribute_int("/", "loader_epoch");
    header.loader.row = file.attribute_int("/", "loader_row");
    if (file.has_attribute("/", "loader_data")) header.loader.data = file.attribute_string("/", "loader_data");
    header.config = file.attribute_string("/", "config");
    header.tokenizer.kind = file.attribute_string("/", "tokenizer_kind");
    header.tokenizer.identity = file.attribute_string("/", "tokenizer_identity");
    if (file.exists(definition_name)) {
        const auto bytes = file.read<std::uint8_t>(definition_name);
        header.tokenizer.definition.assign(bytes.begin(), bytes.end());
    }
    FENWICK_CHECK(file.attribute_string("/", "header_sha256") == header_checksum(header),
                  "{}: the checkpoint's header is damaged (its checksum does not fit)", file.path());
    return header;
}

}  // namespace

void save_checkpoint(const std::string& path, const CheckpointHeader& header, const Optimizer& optimizer) {
    const std::string temporary = path + ".tmp";
    try {
        if (const fs::path parent = fs::path(path).parent_path(); !parent.empty()) fs::create_directories(parent);
        {
            hdf5::File file = hdf5::File::create(temporary);
            file.set_attribute("/", "format", format);
            file.set_attribute("/", "version", version);
            file.set_attribute("/", "step", header.step);
            file.set_attribute("/", "tokens", header.tokens);
            file.set_attribute("/", "loader_epoch", header.loader.epoch);
            file.set_attribute("/", "loader_row", header.loader.row);
            if (!header.loader.data.empty()) file.set_attribute("/", "loader_data", std::string_view(header.loader.data));
            file.set_attribute("/", "config", std::string_view(header.config));
            file.set_attribute("/", "tokenizer_kind", std::string_view(header.tokenizer.kind));
            file.set_attribute("/", "tokenizer_identity", std::string_view(header.tokenizer.identity));
            file.set_attribute("/", "header_sha256", std::string_view(header_checksum(header)));
            const std::string& definition = header.tokenizer.definition;
            if (!definition.empty())
                file.write(definition_name, reinterpret_cast<const std::uint8_t*>(definition.data()),
                           {static_cast<std::int64_t>(definition.size())});
            const auto& parameters = optimizer.parameters();
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                write_tensor(file, weight_name(parameters[i].name), parameters[i].variable.value());
                write_tensor(file, first_moment_name(parameters[i].name), optimizer.first_moment(i));
                write_tensor(file, second_moment_name(parameters[i].name), optimizer.second_moment(i));
            }
            file.flush();  // all data has been taken before the mark says so
            file.set_attribute("/", "complete", std::int64_t{1});
            file.close();
        }
        publish_file(temporary, path);
    } catch (const std::exception& error) {
        std::error_code ignored;
        fs::remove(temporary, ignored);
        fail("{}: the checkpoint of step {} could not be written ({}); earlier checkpoints are untouched", path, header.step,
             error.what());
    }
}

CheckpointHeader read_checkpoint_header(const std::string& path) { return read_header(open_checkpoint(path)); }

void load_checkpoint(const std::string& path, Optimizer& optimizer) {
    const hdf5::File file = open_checkpoint(path);
    const auto& parameters = optimizer.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        read_tensor(file, weight_name(parameters[i].name), parameters[i].variable.value());
        read_tensor(file, first_moment_name(parameters[i].name), optimizer.first_moment(i));
        read_tensor(file, second_moment_name(parameters[i].name), optimizer.second_moment(i));
    }
    const auto stored = file.list("weights").size();
    FENWICK_CHECK(stored == parameters.size(), "{}: checkpoint of another model: it has {} tensors, this model {}", path, stored,
                  parameters.size());
}

void verify_checkpoint(const std::string& path) {
    const hdf5::File file = open_checkpoint(path);
    read_header(file);
    for (const std::string group : {"weights", "optimizer"})
        for (const auto& dataset : file.all_datasets(group)) {
            const std::string name = group + "/" + dataset;
            const auto info = file.info(name);
            dispatch_cpu_float("verify_checkpoint",
                               info.type == hdf5::ElementType::float64 ? DType::float64 : DType::float32, [&](auto tag) {
                                   std::vector<typename decltype(tag)::type> values(static_cast<std::size_t>(info.count()));
                                   read_checked(file, name, values.data(), info.count());
                               });
        }
}

void check_same_model(const std::string& path, const CheckpointHeader& header, const RunConfig& config) {
    for (const auto& difference : differences(parse_config(header.config, path), config, "model"))
        FENWICK_CHECK(difference.key == "model.chunk_size",  // speed only
                      "{}: checkpoint of another model: {} is {} there, {} here", path, difference.key, difference.theirs,
                      difference.ours);
}

std::string checkpoint_path(const std::string& folder, std::int64_t step) { return fmt::format("{}/step_{}.h5", folder, step); }

std::vector<std::int64_t> checkpoint_steps(const std::string& folder) {
    std::vector<std::int64_t> steps;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
        const std::string name = entry.path().filename().string();
        if (!name.starts_with("step_") || !name.ends_with(".h5")) continue;
        const std::string digits = name.substr(5, name.size() - 8);
        if (!digits.empty() && digits.size() < 19 && digits.find_first_not_of("0123456789") == std::string::npos)
            steps.push_back(std::stoll(digits));
    }
    std::sort(steps.begin(), steps.end());
    return steps;
}

std::optional<std::string> latest_complete(const std::string& folder) {
    auto steps = checkpoint_steps(folder);
    std::reverse(steps.begin(), steps.end());
    for (const auto step : steps) {
        const std::string path = checkpoint_path(folder, step);
        try {
            verify_checkpoint(path);
            const std::int64_t held = read_checkpoint_header(path).step;
            FENWICK_CHECK(held == step, "{} holds step {}", path, held);
            return path;
        } catch (const Error& error) {
            spdlog::warn("{}; trying the one before", error.what());
        }
    }
    return std::nullopt;
}

void rotate_checkpoints(const std::string& folder, std::int64_t newest, std::int64_t keep) {
    const auto steps = checkpoint_steps(folder);
    const auto later = std::upper_bound(steps.begin(), steps.end(), newest);
    const auto kept = later - std::min<std::ptrdiff_t>(later - steps.begin(), std::max<std::int64_t>(keep, 1));
    std::error_code ignored;
    for (auto step = steps.begin(); step != steps.end(); ++step)
        if (step < kept || step >= later) fs::remove(checkpoint_path(folder, *step), ignored);
}

std::string find_checkpoint(const std::string& path) {
    if (!fs::is_directory(path)) return path;
    const auto newest = latest_complete((fs::path(path) / "checkpoints").string());
    FENWICK_CHECK(newest.has_value(), "{} holds no complete checkpoint (checkpoints/step_N.h5)", path);
    return *newest;
}

void load_weights(const std::string& path, const model::LanguageModel& model) {
    const hdf5::File file = open_checkpoint(find_checkpoint(path));
    for (const auto& parameter : model.parameters())
        read_tensor(file, weight_name(parameter.name), parameter.variable.value());
}

LoadedModel load_model(const std::string& path, Device device, std::optional<DType> compute_dtype) {
    const std::string file_path = find_checkpoint(path);
    const hdf5::File file = open_checkpoint(file_path);
    CheckpointHeader header = read_header(file);
    RunConfig config = parse_config(header.config, file_path);
    const bool as_trained = device.is_cuda() && config.train.dtype == DType::bfloat16;
    const DType dtype = compute_dtype.value_or(as_trained ? DType::bfloat16 : DType::float32);
    model::LanguageModel model(config.model, device, gate_dtype(dtype), dtype);
    for (const auto& parameter : model.parameters())
        read_tensor(file, weight_name(parameter.name), parameter.variable.value());
    return {.config = std::move(config), .model = std::move(model), .tokenizer = std::move(header.tokenizer),
            .step = header.step};
}

}  // namespace fenwick::train
