// One line of progress that rewrites itself on a terminal, and plain lines, seldom, elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fenwick::tools {

class Progress {
public:
    // quiet: shows nothing
    explicit Progress(bool quiet);
    ~Progress();  // ends the line

    // Shows `text` if the last showing is long enough ago (a fifth of a second on a terminal, ten seconds elsewhere),
    // or if `now`.
    void show(const std::string& text, bool now = false);
    void clear();  // takes the line away, so that something else can be printed
    bool terminal() const { return terminal_; }
    double seconds() const;  // since construction

private:
    bool quiet_, terminal_, shown_ = false;
    std::chrono::steady_clock::time_point start_, last_;
};

// "3.2 s", "4 min 05 s", "2 h 07 min"
std::string duration_text(double seconds);
// "12.3 MB" (1000s), "950", "1.2M"
std::string bytes_text(double bytes);
std::string count_text(double count);

}  // namespace fenwick::tools
