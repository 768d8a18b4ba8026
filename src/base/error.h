// Errors: every failure a user can cause or mend is a fenwick::Error with one line that says where, what,
// and what would be right. Library code throws; only the command line turns errors into exit codes.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace fenwick {

// A failure the user can mend (bad config, bad file, full disk, missing device). The command line prints
// what() on one line and exits with code 2. Anything else that escapes is a defect and exits with code 1.
class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
    throw Error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fenwick

// Throws fenwick::Error with a formatted message unless `condition` holds. The message is built only on failure.
#define FENWICK_CHECK(condition, ...)         \
    do {                                      \
        if (!(condition)) [[unlikely]]        \
            ::fenwick::fail(__VA_ARGS__);     \
    } while (false)
