// Lines for a person, on standard output or error.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

#include "base/printable.h"

namespace fenwick::tools {

// One line, whatever the names in it hold.
template <class... Args>
void print_line(std::FILE* stream, fmt::format_string<Args...> format, Args&&... args) {
    const std::string line = printable(fmt::format(format, std::forward<Args>(args)...)) + "\n";
    std::fwrite(line.data(), 1, line.size(), stream);
}

}  // namespace fenwick::tools
