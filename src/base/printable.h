// Text for a terminal or a log.
#pragma once

#include <string>
#include <string_view>

namespace fenwick {

// The text on one line that a terminal only shows: control characters as \n, \t, \r or \xNN (\u00NN for those past ASCII),
// bytes that are not UTF-8 as \xNN. Names of files and values of configs may hold any. All else stays, backslashes too.
std::string printable(std::string_view text);

}  // namespace fenwick
