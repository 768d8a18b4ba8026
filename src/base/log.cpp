#include "base/log.h"

#include "base/error.h"

namespace fenwick {

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
