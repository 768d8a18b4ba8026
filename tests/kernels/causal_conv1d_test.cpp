#include "kernels/causal_conv1d.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/random.h"

namespace fenwick::kernels {
namespace {

// Documents cut into calls of any length, the state carried between them, give the output of one call.
TEST(CausalConv1d, StateCarriesAcrossAnySplit) {
    constexpr std::int64_t documents = 2, length = 11, channels = 5;
    for (std::int64_t width : {1, 2, 4, 6}) {
        Random random(3);
        const auto draw = [&](std::int64_t count) {
            std::vector<double> values(static_cast<std::size_t>(count));
            for (auto& value : values) value = random.normal();
            return values;
        };
        const auto x = draw(documents * length * channels), weight = draw(channels * width), bias = draw(channels);
        std::vector<double> whole(x.size(), NAN);
        const std::int64_t offsets[] = {0, length, 2 * length};
        CausalConv1d args{.dtype = DType::float64, .sequences = {documents, offsets}, .channels = channels, .width = width,
                          .x_stride = channels, .y_stride = channels, .x = x.data(), .weight = weight.data(),
                          .bias = bias.data(), .y = whole.data()};
        causal_conv1d_forward({}, args);
        for (const auto& pieces : {std::vector<std::int64_t>(11, 1), {2, 9}, {5, 1, 1, 4}, {11}, {1, 10}}) {
            std::vector<double> state(static_cast<std::size_t>(documents * (width - 1) * channels) + 1, 0.0);
            std::int64_t done = 0;
            for (auto piece : pieces) {
                std::vector<double> in, out(static_cast<std::size_t>(documents * piece * channels), NAN);
                for (std::int64_t document = 0; document < documents; ++document) {
                    const auto from = x.begin() + (document * length + done) * channels;
                    in.insert(in.end(), from, from + piece * channels);
                }
                const std::int64_t cut[] = {0, piece, 2 * piece};
                args.sequences = {documents, cut};
                args.x = in.data();
                args.y = out.data();
                args.state = state.data();
                causal_conv1d_forward({}, args);
                for (std::int64_t document = 0; document < documents; ++document)
                    for (std::int64_t i = 0; i < piece * channels; ++i)
                        EXPECT_EQ(out[static_cast<std::size_t>(document * piece * channels + i)],
                                  whole[static_cast<std::size_t>((document * length + done) * channels + i)])
                            << "width " << width << ", piece of " << piece << " at " << done;
                done += piece;
            }
        }
    }
}

}  // namespace
}  // namespace fenwick::kernels
