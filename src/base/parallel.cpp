#include "base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"

namespace fenwick {
namespace {

thread_local bool inside_parallel_region = false;

int default_thread_count() {
    if (const char* text = std::getenv("FENWICK_NUM_THREADS")) {
        char* end = nullptr;
        const long count = std::strtol(text, &end, 10);
        FENWICK_CHECK(end != text && *end == '\0' && count >= 1 && count <= 4096,
                      "FENWICK_NUM_THREADS is '{}'; a whole number from 1 to 4096 is needed", text);
        return static_cast<int>(count);
    }
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

class ThreadPool {
public:
    explicit ThreadPool(int count) {
        try {
            for (int i = 1; i < count; ++i) workers_.emplace_back([this] { work(); });
        } catch (const std::exception& error) {
            // The destructor does not run: the started ones must be gone before what they wait on is.
            const int started = size();
            stop();
            fail("{} threads are asked for, {} could be started ({}); lower --threads or FENWICK_NUM_THREADS", count, started,
                 error.what());
        }
    }

    ~ThreadPool() { stop(); }

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    void run(std::int64_t begin, std::int64_t end, std::int64_t grain, detail::BlockFunction function, void* context) {
        std::lock_guard one_loop_at_a_time(run_mutex_);
        {
            std::lock_guard lock(mutex_);
            begin_ = begin;
            end_ = end;
            grain_ = grain;
            function_ = function;
            context_ = context;
            next_block_.store(0, std::memory_order_relaxed);
            pending_ = static_cast<int>(workers_.size());
            error_ = nullptr;
            ++generation_;
        }
        wake_.notify_all();
        take_blocks();
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return pending_ == 0; });
        if (error_) std::rethrow_exception(error_);
    }

private:
    void stop() {
        {
            std::lock_guard lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    void work() {
        std::uint64_t seen = 0;
        while (true) {
            {
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
                if (stop_) return;
                seen = generation_;
            }
            take_blocks();
            std::lock_guard lock(mutex_);
            if (--pending_ == 0) done_.notify_one();
        }
    }

    void take_blocks() {
        inside_parallel_region = true;
        const std::int64_t blocks = (end_ - begin_ + grain_ - 1) / grain_;
        try {
            for (std::int64_t block = next_block_++; block < blocks; block = next_block_++) {
                const std::int64_t first = begin_ + block * grain_;
                function_(context_, first, std::min(first + grain_, end_));
            }
        } catch (...) {
            std::lock_guard lock(mutex_);
            if (!error_) error_ = std::current_exception();
            next_block_ = blocks;  // the others stop at their next block
        }
        inside_parallel_region = false;
    }

    std::vector<std::thread> workers_;
    std::mutex run_mutex_, mutex_;
    std::condition_variable wake_, done_;
    std::atomic<std::int64_t> next_block_{0};
    std::int64_t begin_ = 0, end_ = 0, grain_ = 1;
    detail::BlockFunction function_ = nullptr;
    void* context_ = nullptr;
    std::exception_ptr error_;
    std::uint64_t generation_ = 0;
    int pending_ = 0;
    bool stop_ = false;
};

std::mutex pool_mutex;
std::unique_ptr<ThreadPool> pool;

ThreadPool& current_pool() {
    std::lock_guard lock(pool_mutex);
    if (!pool) pool = std::make_unique<ThreadPool>(default_thread_count());
    return *pool;
}

}  // namespace

int num_threads() { return current_pool().size(); }

void set_num_threads(int count) {
    FENWICK_CHECK(count >= 1, "number of threads is {}; at least 1 is needed", count);
    std::lock_guard lock(pool_mutex);
    if (!pool || pool->size() != count) {
        pool.reset();
        pool = std::make_unique<ThreadPool>(count);
    }
}

void detail::parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, BlockFunction function,
                          void* context) {
    if (begin >= end) return;
    grain = std::max<std::int64_t>(grain, 1);
    if (!inside_parallel_region && end - begin > grain) {
        ThreadPool& threads = current_pool();
        if (threads.size() > 1) {
            threads.run(begin, end, grain, function, context);
            return;
        }
    }
    for (std::int64_t first = begin; first < end; first += grain)
        function(context, first, std::min(first + grain, end));
}

}  // namespace fenwick
