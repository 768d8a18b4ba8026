#include "tools/device_option.h"

#include "base/memory_cuda.h"

namespace fenwick::tools {

void add_device_option(CLI::App* command, std::string& choice) {
    command->add_option("--device", choice, "auto (a GPU where there is one), cpu or cuda")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
        ->capture_default_str();
}

Device device_chosen(const std::string& choice) {
    if (choice == "cpu") return cpu_device;
    const bool found = cuda_device_count() > 0;
    FENWICK_CHECK(found || choice != "cuda", "--device cuda: this program sees no GPU (or was built without CUDA); use cpu or auto");
    return found ? Device{DeviceType::cuda, 0} : cpu_device;
}

}  // namespace fenwick::tools
