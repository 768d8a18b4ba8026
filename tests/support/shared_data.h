// Data that is not in the repository: a folder beside it, or the one that FENWICK_SHARED_DIR names.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace fenwick::test {

// The path of a file in the shared folder, "" where it is absent: the test is then skipped.
inline std::string shared_file(const std::string& name) {
    const char* folder = std::getenv("FENWICK_SHARED_DIR");
    const std::filesystem::path source = FENWICK_SOURCE_DIR;
    const auto path = (folder != nullptr ? std::filesystem::path(folder) : source.parent_path() / "shared") / name;
    std::error_code error;
    return std::filesystem::is_regular_file(path, error) ? path.string() : "";
}

}  // namespace fenwick::test
