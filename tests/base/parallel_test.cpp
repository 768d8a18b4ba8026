#include "base/parallel.h"

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/error.h"

namespace fenwick {
namespace {

class Parallel : public testing::TestWithParam<int> {
protected:
    Parallel() { set_num_threads(GetParam()); }
    ~Parallel() override { set_num_threads(before_); }
    int before_ = num_threads();
};
INSTANTIATE_TEST_SUITE_P(, Parallel, testing::Values(1, 2, 3, 8));

TEST_P(Parallel, EveryIndexOnceInFixedBlocks) {
    EXPECT_EQ(num_threads(), GetParam());
    for (const std::int64_t size : {0, 1, 2, 63, 64, 65, 1000})
        for (const std::int64_t grain : {0, 1, 7, 64, 5000}) {
            const std::int64_t begin = -5, end = begin + size, step = std::max<std::int64_t>(grain, 1);
            std::vector<std::atomic<int>> seen(static_cast<std::size_t>(size));
            std::atomic<int> wrong_blocks = 0;
            parallel_for(begin, end, grain, [&](std::int64_t first, std::int64_t last) {
                wrong_blocks += (first - begin) % step != 0 || last != std::min(first + step, end);
                for (std::int64_t i = first; i < last; ++i) ++seen[static_cast<std::size_t>(i - begin)];
            });
            EXPECT_EQ(wrong_blocks, 0);
            for (const auto& count : seen) ASSERT_EQ(count, 1) << "size " << size << ", grain " << grain;
        }
}

TEST_P(Parallel, ExceptionsReachTheCaller) {
    for (int round = 0; round < 20; ++round) {
        EXPECT_THROW(parallel_for(0, 100, 1, [](std::int64_t first, std::int64_t) {
            if (first == 37) throw std::runtime_error("37");
        }), std::runtime_error);
        std::atomic<int> count = 0;
        parallel_for(0, 100, 1, [&](std::int64_t, std::int64_t) { ++count; });
        EXPECT_EQ(count, 100) << "the pool works on after an exception";
    }
}

TEST_P(Parallel, NestedLoopsRunOnTheirThread) {
    std::vector<std::atomic<int>> seen(100);
    std::atomic<int> elsewhere = 0;
    parallel_for(0, 10, 1, [&](std::int64_t outer, std::int64_t) {
        const auto here = std::this_thread::get_id();
        parallel_for(0, 10, 1, [&](std::int64_t inner, std::int64_t) {
            elsewhere += std::this_thread::get_id() != here;
            ++seen[static_cast<std::size_t>(10 * outer + inner)];
        });
    });
    EXPECT_EQ(elsewhere, 0);
    for (const auto& count : seen) EXPECT_EQ(count, 1);
}

TEST_P(Parallel, LoopsFromSeveralThreads) {
    std::vector<std::int64_t> sums(4, 0);
    std::vector<std::thread> callers;
    for (std::size_t c = 0; c < 4; ++c)
        callers.emplace_back([&sums, c] {
            for (int round = 0; round < 50; ++round) {
                std::atomic<std::int64_t> sum = 0;
                parallel_for(0, 100, 3, [&](std::int64_t first, std::int64_t last) {
                    for (std::int64_t i = first; i < last; ++i) sum += i;
                });
                sums[c] += sum;
            }
        });
    for (auto& caller : callers) caller.join();
    for (const auto sum : sums) EXPECT_EQ(sum, 50 * 4950);
}

// Not under the address sanitizer, which needs the address space that the test takes away.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(ParallelThreads, TooManyAreRefusedAndTheStartedOnesEnd) {
    const int before = num_threads();
    std::int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit previous{};
    getrlimit(RLIMIT_AS, &previous);
    rlimit limited = previous;
    limited.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (rlim_t{64} << 20);  // a few stacks
    std::string message;
    setrlimit(RLIMIT_AS, &limited);
    try {
        set_num_threads(4000);
    } catch (const Error& error) {
        message = error.what();
    }
    setrlimit(RLIMIT_AS, &previous);
    EXPECT_NE(message.find("4000 threads are asked for"), std::string::npos) << message;
    EXPECT_NE(message.find("lower --threads"), std::string::npos) << message;
    std::atomic<int> count = 0;
    parallel_for(0, 100, 1, [&](std::int64_t, std::int64_t) { ++count; });
    EXPECT_EQ(count, 100) << "the pool works on";
    set_num_threads(before);
}
#endif

TEST(ParallelReduction, SameBitsWithAnyNumberOfThreads) {
    const int before = num_threads();
    const auto sum_with = [](int threads) {
        set_num_threads(threads);
        std::vector<float> partial(100);
        parallel_for(0, 10000, 100, [&](std::int64_t first, std::int64_t last) {
            float sum = 0;
            for (std::int64_t i = first; i < last; ++i) sum += std::sin(static_cast<float>(i));
            partial[static_cast<std::size_t>(first / 100)] = sum;
        });
        float total = 0;
        for (const float each : partial) total += each;
        return total;
    };
    const float expected = sum_with(1);
    for (const int threads : {2, 3, 8}) EXPECT_EQ(sum_with(threads), expected);
    set_num_threads(before);
    EXPECT_THROW(set_num_threads(0), Error);
}

}  // namespace
}  // namespace fenwick
