// Logging through spdlog: one logger to standard error. Metrics and results go to standard output or files, never here.
#pragma once

#include <spdlog/spdlog.h>

#include <string_view>

namespace fenwick {

// level: "trace", "debug", "info", "warn", "error" or "off"; anything else throws Error with this list.
void set_log_level(std::string_view level);

}  // namespace fenwick
