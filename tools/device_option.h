// --device auto|cpu|cuda, for the commands that run a model.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

#include "base/device.h"

namespace fenwick::tools {

// Adds the option; `choice` holds its value once the line is parsed.
void add_device_option(CLI::App* command, std::string& choice);
// auto: the first GPU, where there is one. Throws Error for cuda without one.
Device device_chosen(const std::string& choice);

}  // namespace fenwick::tools
