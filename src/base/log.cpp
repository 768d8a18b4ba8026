#include "base/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include "base/error.h"
#include "base/printable.h"

namespace fenwick {
namespace {

// The message on one line, whatever the names in it hold.
class PrintableMessage : public spdlog::custom_flag_formatter {
public:
    void format(const spdlog::details::log_msg& message, const std::tm&, spdlog::memory_buf_t& out) override {
        const std::string text = printable({message.payload.data(), message.payload.size()});
        out.append(text.data(), text.data() + text.size());
    }
    std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<PrintableMessage>(); }
};

// Standard output holds results: text that was generated, tables.
[[maybe_unused]] const bool goes_to_standard_error = [] {
    auto logger = spdlog::stderr_logger_mt("fenwick");
    auto formatter = std::make_unique<spdlog::pattern_formatter>();
    formatter->add_flag<PrintableMessage>('*').set_pattern("fenwick: %l: %*");
    logger->set_formatter(std::move(formatter));
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
