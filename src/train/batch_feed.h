// The batches of one process of a run, on its device, prepared ahead by a thread of their own.
#pragma once

#include <cstdint>
#include <memory>

#include "autograd/sequence_layout.h"
#include "autograd/tensor.h"
#include "data/loader.h"

namespace fenwick::train {

// What one forward and backward takes.
struct MicroBatch {
    Tensor inputs, targets;          // int32 [rows, T]
    SequenceLayout layout;           // over rows * T tokens
    std::int64_t valid_targets = 0;  // of these rows
    std::int64_t step_targets = 0;   // of the whole global batch that they are from: what a mean loss is over
};

struct BatchFeedOptions {
    Device device;
    std::int64_t batch_rows = 0;        // of a global batch
    std::int64_t first = 0, share = 0;  // this process's rows of it
    std::int64_t micro_rows = 0;        // of a micro-batch; divides share
    std::int64_t prefetch = 0;          // micro-batches that are prepared while another is used; 0: no thread
};

// Micro-batch after micro-batch, global batch after global batch, from row `row` of the run on. Which rows these are does
// not depend on `prefetch`. The loader must outlive the feed.
class BatchFeed {
public:
    BatchFeed(const data::Loader& loader, const BatchFeedOptions& options, std::int64_t row);
    ~BatchFeed();  // ends the thread

    // Valid until the next call; on a GPU: for work that is queued before it. Throws what preparing this batch threw.
    const MicroBatch& next();

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace fenwick::train
