#include "train/batch_feed.h"

#include <csignal>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <thread>

#include "base/staging.h"

namespace fenwick::train {
namespace {

Tensor data_tensor(const Shape& shape, Device device) {
    const MemoryKindScope scope(MemoryKind::data);
    return Tensor::empty(shape, DType::int32, device);
}

// A micro-batch and the host memory that it comes from. Members go in reverse: no copy is under way when the tensors go.
struct Slot {
    Slot(Device device, const Shape& shape)
        : batch{.inputs = data_tensor(shape, device), .targets = data_tensor(shape, device)},
          inputs(device, batch.inputs.bytes()), targets(device, batch.targets.bytes()) {}

    void fill(data::Batch&& read, std::int64_t step_targets) {
        for (const auto& [staging, values, tensor] :
             {std::tuple(&inputs, &read.inputs, &batch.inputs), std::tuple(&targets, &read.targets, &batch.targets)}) {
            staging->wait_until_free();
            std::memcpy(staging->host(), values->data(), staging->bytes());
            staging->upload(tensor->data());
        }
        batch.layout = SequenceLayout::packed(std::move(read.offsets));
        batch.valid_targets = read.valid_targets;
        batch.step_targets = step_targets;
    }
    void acquire() {
        inputs.acquire();
        targets.acquire();
    }
    void release() {
        inputs.release();
        targets.release();
    }

    MicroBatch batch;
    StagingBuffer inputs, targets;
};

}  // namespace

struct BatchFeed::Implementation {
    const data::Loader& loader;
    BatchFeedOptions options;

    // Of whoever prepares: where it stands.
    std::int64_t step_row, done = 0, step_targets = 0;  // first row of the global batch, rows of the share, its targets

    std::list<Slot> slots;
    Slot* current = nullptr;  // that next() gave out

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Slot*> free, ready;
    std::exception_ptr error;
    bool stop = false;
    std::thread thread;

    Implementation(const data::Loader& from, const BatchFeedOptions& given, std::int64_t row)
        : loader(from), options(given), step_row(row) {
        FENWICK_CHECK(options.micro_rows >= 1 && options.share >= options.micro_rows && options.share % options.micro_rows == 0 &&
                          options.first >= 0 && options.first + options.share <= options.batch_rows,
                      "[batch feed] rows [{}, {}) of {} in portions of {}", options.first, options.first + options.share,
                      options.batch_rows, options.micro_rows);
        for (std::int64_t i = 0; i <= options.prefetch; ++i)
            free.push_back(&slots.emplace_back(options.device, Shape{options.micro_rows, loader.sequence_length()}));
        if (options.prefetch == 0) return;
        // Signals are the main thread's: they interrupt nothing here.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            thread = std::thread([this] { run(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~Implementation() {
        if (!thread.joinable()) return;
        {
            const std::lock_guard lock(mutex);
            stop = true;
        }
        changed.notify_all();
        thread.join();
    }

    void prepare(Slot& slot) {
        if (done == 0) step_targets = loader.valid_targets(step_row, options.batch_rows);
        slot.fill(loader.read(step_row + options.first + done, options.micro_rows), step_targets);
        done += options.micro_rows;
        if (done < options.share) return;
        done = 0;
        step_row += options.batch_rows;
    }

    void run() {
        try {
            for (;;) {
                Slot* slot = nullptr;
                {
                    std::unique_lock lock(mutex);
                    changed.wait(lock, [&] { return stop || !free.empty(); });
                    if (stop) return;
                    slot = free.front();
                    free.pop_front();
                }
                prepare(*slot);
                {
                    const std::lock_guard lock(mutex);
                    ready.push_back(slot);
                }
                changed.notify_all();
            }
        } catch (...) {
            {
                const std::lock_guard lock(mutex);
                error = std::current_exception();
            }
            changed.notify_all();
        }
    }

    const MicroBatch& next() {
        if (current != nullptr) current->release();
        if (options.prefetch == 0) {
            current = free.front();
            prepare(*current);
        } else {
            std::unique_lock lock(mutex);
            if (current != nullptr) free.push_back(current);
            current = nullptr;
            changed.notify_all();
            changed.wait(lock, [&] { return error || !ready.empty(); });
            if (ready.empty()) std::rethrow_exception(error);  // batches from before it come first
            current = ready.front();
            ready.pop_front();
        }
        current->acquire();
        return current->batch;
    }
};

BatchFeed::BatchFeed(const data::Loader& loader, const BatchFeedOptions& options, std::int64_t row)
    : implementation_(std::make_unique<Implementation>(loader, options, row)) {}
BatchFeed::~BatchFeed() = default;
const MicroBatch& BatchFeed::next() { return implementation_->next(); }

}  // namespace fenwick::train
