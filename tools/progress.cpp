#include "tools/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "tools/print.h"

namespace fenwick::tools {

Progress::Progress(bool quiet)
    : quiet_(quiet), terminal_(isatty(STDERR_FILENO) != 0), start_(std::chrono::steady_clock::now()), last_(start_) {}

Progress::~Progress() {
    if (terminal_ && shown_) std::fputc('\n', stderr);
}

double Progress::seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

void Progress::show(const std::string& text, bool now) {
    if (quiet_) return;
    const auto time = std::chrono::steady_clock::now();
    const double since = std::chrono::duration<double>(time - last_).count();
    if (!now && shown_ && since < (terminal_ ? 0.2 : 10.0)) return;
    last_ = time;
    shown_ = true;
    if (terminal_)
        std::fprintf(stderr, "\r\033[K%s", printable(text).c_str());
    else
        print_line(stderr, "{}", text);
    std::fflush(stderr);
}

void Progress::clear() {
    if (terminal_ && shown_) std::fputs("\r\033[K", stderr);
    shown_ = false;
}

std::string duration_text(double seconds) {
    if (!(seconds >= 0) || seconds > 1e9) return "?";
    const auto whole = static_cast<std::int64_t>(std::llround(seconds));
    if (whole >= 3600) return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
    if (whole >= 60) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
    return fmt::format("{:.1f} s", seconds);
}

namespace {
std::string with_prefix(double value, const char* unit) {
    static constexpr const char* prefixes[] = {"", "k", "M", "G", "T"};
    int prefix = 0;
    while (std::abs(value) >= 999.5 && prefix < 4) {
        value /= 1000;
        ++prefix;
    }
    const char* space = *unit != '\0' ? " " : "";
    return prefix == 0 ? fmt::format("{:.0f}{}{}", value, space, unit)
                       : fmt::format("{:.{}f}{}{}{}", value, value < 100 ? 1 : 0, space, prefixes[prefix], unit);
}
}  // namespace

std::string bytes_text(double bytes) { return with_prefix(bytes, "B"); }
std::string count_text(double count) { return with_prefix(count, ""); }

}  // namespace fenwick::tools
