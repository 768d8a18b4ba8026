// libFuzzer target: whatever the header of a safetensors file says, parsing it returns tensors that lie within the file and
// do not overlap, or throws Error. The first two bytes choose how many bytes of values follow the header.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace fenwick;
    if (size < 2) return 0;
    const std::uint64_t data_bytes = data[0] + 256u * data[1];
    try {
        std::uint64_t covered = 0;
        const std::string_view header(reinterpret_cast<const char*>(data) + 2, size - 2);
        for (const auto& entry : model::safetensors::parse_header(header, data_bytes, "fuzz")) {
            const auto bytes = static_cast<std::uint64_t>(count_of(entry.shape) * model::safetensors::size_of(entry.type));
            if (entry.begin != covered || entry.end - entry.begin != bytes) std::abort();
            covered = entry.end;
        }
        if (covered != data_bytes) std::abort();
    } catch (const Error&) {
    }
    return 0;
}
