// What a GPU can do at most, from its maker's data sheets: what speeds are compared with.
#pragma once

#include <optional>
#include <string_view>

namespace fenwick {

struct DevicePeaks {
    double bfloat16_flops = 0;  // a second, dense matrix products
    double bandwidth = 0;       // bytes a second, device memory
};

// By the name that the driver gives ("NVIDIA H200"); nothing for a card that is not in the table.
std::optional<DevicePeaks> peaks_of(std::string_view device_name);

}  // namespace fenwick
