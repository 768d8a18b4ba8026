#include "kernels/rope.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"

namespace fenwick::kernels::cpu {

void rope(const Exec&, const Rope& args) {
    dispatch_cpu_float("rope", args.dtype, [&]<class T>(TypeTag<T>) {
        const auto* x = static_cast<const T*>(args.x);
        auto* y = static_cast<T*>(args.y);
        const std::int64_t heads = args.heads, width = args.width, half = width / 2;
        // Angles are formed in double: a float32 product loses whole turns' digits at long positions.
        std::vector<double> frequencies(static_cast<std::size_t>(half));
        for (std::int64_t i = 0; i < half; ++i)
            frequencies[static_cast<std::size_t>(i)] =
                std::pow(args.theta, -2.0 * static_cast<double>(i) / static_cast<double>(width));
        const std::int64_t* offsets = args.sequences.offsets;
        const std::int64_t grain = std::max<std::int64_t>(1, 8192 / (heads * width));
        parallel_for(0, args.sequences.num_tokens(), grain, [&](std::int64_t begin, std::int64_t end) {
            std::vector<T> rotation(static_cast<std::size_t>(width));  // cosines, then sines
            T* const cosine = rotation.data();
            T* const sine = cosine + half;
            const std::int64_t* next = std::upper_bound(offsets, offsets + args.sequences.count + 1, begin);
            for (std::int64_t t = begin; t < end; ++t) {
                if (t == *next) ++next;
                const auto position = static_cast<double>(t - *(next - 1) + args.position);
                for (std::int64_t i = 0; i < half; ++i) {
                    const double angle = position * frequencies[static_cast<std::size_t>(i)];
                    cosine[i] = static_cast<T>(std::cos(angle));
                    sine[i] = static_cast<T>(args.inverse ? -std::sin(angle) : std::sin(angle));
                }
                for (std::int64_t h = 0; h < heads; ++h) {
                    const T* xr = x + t * args.x_stride + h * width;
                    T* yr = y + t * args.y_stride + h * width;
                    for (std::int64_t i = 0; i < half; ++i) {
                        const T a = xr[i], b = xr[i + half];
                        yr[i] = a * cosine[i] - b * sine[i];
                        yr[i + half] = b * cosine[i] + a * sine[i];
                    }
                }
            }
        });
    });
}

}  // namespace fenwick::kernels::cpu
