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

// Cuts the stream of all tokens (the files one after the other) into rows of T + 1 overlapping by one, so that every
// token of an epoch is a target exactly once (the first excepted); the last row of an epoch is filled with ignored targets.
// A global batch that reaches the end of an epoch goes on with the first rows of the next: no row is left out. Which rows
// a batch holds depends on the state, the seed and options.rows alone. For one thread at a time.
class Loader {
public:
    // Throws Error: a bad file, files of different tokenizers, fewer than 2 tokens in all.
    explicit Loader(const LoaderOptions& options);
    ~Loader();

    std::int64_t rows_per_epoch() const;
    std::int64_t tokens_per_epoch() const;  // targets of an epoch: all tokens but the first
    std::int64_t vocab_size() const;
    std::string tokenizer_identity() const;

    const LoaderState& state() const;
    void seek(const LoaderState& state);  // throws Error when the epoch has no such row

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
