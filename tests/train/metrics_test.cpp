#include "train/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "base/files.h"

namespace fenwick::train {
namespace {

TEST(Metrics, LinesHaveTheirTimesLast) {
    StepReport report{.step = 3, .total_steps = 9, .tokens = 1536, .loss = 5.25, .learning_rate = 1e-3, .grad_norm = 0.5};
    report.time_s = 1.23456;
    report.tokens_per_s = 1000.06;
    EXPECT_EQ(metrics_line(report), R"({"step":3,"tokens":1536,"loss":5.25,"learning_rate":0.001,"grad_norm":0.5,)"
                                    R"("time_s":1.235,"tokens_per_s":1000.1})");
    report.valid_loss = 4.5;
    report.skipped = true;
    report.loss = NAN;
    EXPECT_EQ(metrics_line(report), R"({"step":3,"tokens":1536,"loss":null,"learning_rate":0.001,"grad_norm":0.5,)"
                                    R"("skipped":true,"valid_loss":4.5,"time_s":1.235,"tokens_per_s":1000.1})");
    report.mfu = 0.31415;
    EXPECT_TRUE(metrics_line(report).ends_with(R"("time_s":1.235,"tokens_per_s":1000.1,"mfu":0.3142})"));
}

TEST(Metrics, ResumingCutsOffLaterLines) {
    const std::string path = testing::TempDir() + "/fenwick_metrics_test.jsonl";
    const auto lines = [](int first, int last) {
        std::string text;
        for (int step = first; step <= last; ++step) text += metrics_line({.step = step}) + "\n";
        return text;
    };
    std::filesystem::remove(path);
    {
        MetricsFile file(path, 0);
        for (int step = 1; step <= 5; ++step) file.write({.step = step});
    }
    EXPECT_EQ(read_file(path), lines(1, 5));
    {
        MetricsFile file(path, 3);
        EXPECT_EQ(read_file(path), lines(1, 3));
        file.write({.step = 4});
    }
    EXPECT_EQ(read_file(path), lines(1, 4));
    for (const std::string tail : {"{\"step\":5,\"to", "garbage\n", "{\"step\":5,\"to\n{\"step\":6}\n"}) {
        write_file_atomically(path, lines(1, 4) + tail);
        MetricsFile file(path, 9);
        EXPECT_EQ(read_file(path), lines(1, 4));
    }
    MetricsFile file(path, 0);
    EXPECT_EQ(read_file(path), "");
    std::filesystem::remove(path);
    EXPECT_THROW(MetricsFile("/nonexistent/metrics.jsonl", 0), std::exception);
}

}  // namespace
}  // namespace fenwick::train
