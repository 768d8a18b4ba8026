// Where memory lives and work runs.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"

namespace fenwick {

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
    DeviceType type = DeviceType::cpu;
    int index = 0;  // which GPU; 0 for the CPU

    bool is_cpu() const { return type == DeviceType::cpu; }
    bool is_cuda() const { return type == DeviceType::cuda; }
    friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr Device cpu_device{};

inline std::string name_of(Device device) {
    return device.is_cpu() ? "cpu" : fmt::format("cuda:{}", device.index);
}

}  // namespace fenwick
