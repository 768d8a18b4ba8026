#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>

#include "base/error.h"

namespace fenwick {
namespace {

// Standard output holds results: text that was generated, tables.
[[maybe_unused]] const bool goes_to_standard_error = [] {
    auto logger = spdlog::stderr_logger_mt("fenwick");
    logger->set_pattern("fenwick: %l: %v");
    spdlog::set_default_logger(std::move(logger));
    return true;
}();

}  // namespace

void set_log_level(std::string_view level) {
    for (const auto known : {spdlog::level::trace, spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
                             spdlog::level::err, spdlog::level::off}) {
        const std::string_view name =
            known == spdlog::level::warn ? "warn" : known == spdlog::level::err ? "error"
                                                  : std::string_view(spdlog::level::to_string_view(known).data());
        if (level == name) {
            spdlog::set_level(known);
            return;
        }
    }
    fail("log level '{}' is unknown; use trace, debug, info, warn, error or off", level);
}

}  // namespace fenwick
