// Golden cases: float64 inputs, outputs and gradients made by an independent implementation, one HDF5 file a case.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/tensor.h"
#include "base/hdf5.h"

namespace fenwick::test {

// The folders that FENWICK_GOLDEN_DIR names (several separated by ':'), else shared/golden beside the source tree; whether or
// not they exist.
inline std::vector<std::filesystem::path> golden_folders() {
    const char* named = std::getenv("FENWICK_GOLDEN_DIR");
    if (named == nullptr || *named == '\0')
        return {(std::filesystem::path(FENWICK_SOURCE_DIR) / "../shared/golden").lexically_normal()};
    std::vector<std::filesystem::path> folders;
    const std::string text = named;
    for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
        end = text.find(':', begin);
        const std::string folder = text.substr(begin, end == std::string::npos ? end : end - begin);
        if (!folder.empty()) folders.emplace_back(folder);
    }
    return folders;
}

// All .h5 files of the folders that exist, sorted within each folder.
inline std::vector<std::filesystem::path> golden_files() {
    std::vector<std::filesystem::path> files;
    for (const auto& folder : golden_folders()) {
        if (!std::filesystem::is_directory(folder)) continue;
        const auto first = files.size();
        for (const auto& entry : std::filesystem::directory_iterator(folder))
            if (entry.path().extension() == ".h5") files.push_back(entry.path());
        std::sort(files.begin() + static_cast<std::ptrdiff_t>(first), files.end());
    }
    return files;
}

class GoldenCase {
public:
    explicit GoldenCase(const std::filesystem::path& path)
        : name(path.stem().string()), file_(hdf5::File::open(path.string())), params_(file_.attribute_string("/", "params")) {}

    std::string op() const { return file_.attribute_string("/", "op"); }
    bool has(const std::string& dataset) const { return file_.exists(dataset); }
    Tensor tensor(const std::string& dataset) const {
        return Tensor::from(file_.read<double>(dataset), file_.info(dataset).shape);
    }
    // A batch or packed tensor [B, T, ...] with everything after T merged: [B, T, heads * width].
    Tensor merged(const std::string& dataset) const {
        const Tensor x = tensor(dataset);
        return x.view({x.size(0), x.size(1), -1});
    }
    std::vector<std::int64_t> integers(const std::string& dataset) const { return file_.read<std::int64_t>(dataset); }
    std::vector<std::string> datasets(const std::string& group) const { return file_.all_datasets(group); }

    // Values of the flat JSON object "params"; `otherwise` where the key is missing or null.
    double number(std::string_view key, double otherwise) const {
        const std::string text = raw(key);
        if (text == "true") return 1;
        if (text == "false") return 0;
        return text.empty() || text == "null" ? otherwise : std::strtod(text.c_str(), nullptr);
    }
    std::string text(std::string_view key) const {
        const std::string quoted = raw(key);
        return quoted.size() >= 2 && quoted.front() == '"' ? quoted.substr(1, quoted.size() - 2) : quoted;
    }

    std::string name;

private:
    std::string raw(std::string_view key) const {
        const std::string quoted = fmt::format("\"{}\":", key);
        const auto found = params_.find(quoted);
        if (found == std::string::npos) return {};
        const auto begin = params_.find_first_not_of(' ', found + quoted.size());
        return params_.substr(begin, params_.find_first_of(",}", begin) - begin);
    }
    hdf5::File file_;
    std::string params_;
};

// All cases whose root attribute "op" is `op`.
inline std::vector<std::filesystem::path> golden_cases(std::string_view op) {
    std::vector<std::filesystem::path> paths;
    for (const auto& path : golden_files())
        if (hdf5::File::open(path.string()).attribute_string("/", "op") == op) paths.push_back(path);
    return paths;
}

}  // namespace fenwick::test
