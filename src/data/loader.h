// From token files to batches. The whole state is a few numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fenwick::data {

struct LoaderOptions {
    std::vector<std::string> files;         // token files with one tokenizer
    std::int64_t sequence_length = 0;       // T
    std::int64_t rows = 0;                  // rows of a global batch (all processes, all accumulation steps)
    std::uint64_t seed = 0;
    bool shuffle = true;                    // rows of an epoch in an order drawn from (seed, epoch)
};

// Where the loader stands; all it needs to continue exactly.
struct LoaderState {
    std::int64_t epoch = 0;
    std::int64_t row = 0;  // rows of this epoch already given out
    friend bool operator==(const LoaderState&, const LoaderState&) = default;
};

// `rows` rows of `length` tokens with their next tokens. targets[r, t] is the token after inputs[r, t]; -100 where there
// is none (the tail of an epoch).
struct Batch {
    std::int64_t rows = 0, length = 0;
    std::vector<std::int32_t> inputs, targets;  // [rows, length]
    std::int64_t valid_targets = 0;             // of these rows
};

// Cuts the stream of all tokens into rows of T + 1 overlapping by one, so that every token of an epoch is a target
// exactly once (the first excepted); the last row of an epoch is filled with ignored targets.
class Loader {
public:
    explicit Loader(const LoaderOptions& options);
    ~Loader();

    std::int64_t rows_per_epoch() const;
    std::int64_t tokens_per_epoch() const;
    std::int64_t vocab_size() const;
    std::string tokenizer_identity() const;

    const LoaderState& state() const;
    void seek(const LoaderState& state);

    // Rows [first, first + count) of the next global batch (of options.rows rows), which several processes or
    // accumulation steps share; does not move the state.
    Batch peek(std::int64_t first, std::int64_t count);
    // Valid targets of the whole next global batch: what a mean loss is normalised by.
    std::int64_t valid_targets();
    void advance();  // to the next global batch

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace fenwick::data
