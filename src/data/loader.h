// From token files to batches: a run's rows, each a pure function of its number.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fenwick::data {

class TokenCorpus;

// What a run draws from, and how much of it.
struct WeightedCorpus {
    std::string path;   // token file, or folder of shards
    double weight = 0;  // share of the tokens drawn, relative to the others' weights; 0: no weight was given
    friend bool operator==(const WeightedCorpus&, const WeightedCorpus&) = default;
};

// How tokens become rows of T.
enum class Packing : std::uint8_t {
    stream,         // all documents one after another, cut every T tokens; a row is one sequence
    masked_stream,  // the same rows; each document in a row is a sequence of its own
    documents,      // whole documents packed into rows (document_packing.h), each a sequence of its own
};

struct LoaderOptions {
    // One tokenizer for all. Without weights they are read as one corpus; with weights (all or none have one) as many.
    std::vector<WeightedCorpus> corpora;
    std::int64_t sequence_length = 0;  // T
    Packing packing = Packing::stream;
    std::uint64_t seed = 0;
    bool shuffle = true;  // rows of an epoch in an order drawn from (seed, epoch)
};

// Where a run stands in its data; all it needs to continue exactly.
struct LoaderState {
    std::int64_t epoch = 0;
    std::int64_t row = 0;  // rows of this epoch already given out
    std::string data;      // Loader::data_identity(); "" where it is not known
    friend bool operator==(const LoaderState&, const LoaderState&) = default;
};

// `rows` rows of `length` tokens with their next tokens. targets[r, t] is the token after inputs[r, t]; -100 where there
// is none. Sequences (cu_seqlens) are tokens [offsets[i], offsets[i + 1]) of the flattened inputs; the first input of a
// document is the end-of-document token before it.
struct Batch {
    std::int64_t rows = 0, length = 0;
    std::vector<std::int32_t> inputs, targets;  // [rows, length]
    std::vector<std::int64_t> offsets;          // [sequences + 1], rising from 0 to rows * length
    std::int64_t valid_targets = 0;             // that are not -100
};

// An endless sequence of rows. Row n, for n = 0, 1, ..., depends on the options and the files alone: not on who reads it, in
// which order, or in what portions, so that processes and threads share a run by sharing out row numbers, and the state of a
// run is how many rows it has had.
//
// stream, masked_stream: the stream of all tokens is cut into rows of T + 1 overlapping by one, so that every token is a
// target once an epoch (the first excepted); the last row of an epoch is filled up with ignored targets.
// documents: every token is a target once an epoch; the first of a document is predicted from an end-of-document token, as
// evaluation does it; space that no document fits is a sequence of ignored targets.
//
// Without weights an epoch is every row of the corpus once, and the next row after an epoch is the first of the next one.
// With weights, the rows of all corpora are interleaved evenly so that each has its share of the tokens, and every corpus
// goes through epochs of its own.
//
// Thread-safe.
class Loader {
public:
    // Throws Error: a bad file, files of different tokenizers, too few tokens, weights that are not all given or all absent.
    explicit Loader(const LoaderOptions& options);
    ~Loader();
    Loader(Loader&&) noexcept;

    std::int64_t sequence_length() const;
    std::int64_t rows_per_epoch() const;    // with weights: rows of all corpora together
    std::int64_t tokens_per_epoch() const;  // targets in them
    double fill() const;                    // share of an epoch's targets that are tokens
    double mean_sequence_length() const;    // that a target is in: of a long sequence, many are
    const TokenCorpus& first_corpus() const;
    std::int64_t vocab_size() const;
    std::string tokenizer_identity() const;
    // SHA-256 over the corpora's identities: another one where a corpus was made anew from other text, or is cut into other
    // shards.
    std::string data_identity() const;

    // Rows [first, first + count) of the run.
    Batch read(std::int64_t first, std::int64_t count) const;
    std::int64_t valid_targets(std::int64_t first, std::int64_t count) const;  // in these rows, without reading tokens

    // What a checkpoint stores for a run that has had `rows` rows, and back. Throws Error when the epoch has no such row;
    // which data the state is of is the caller's to compare.
    LoaderState state_after(std::int64_t rows) const;
    std::int64_t rows_before(const LoaderState& state) const;
    // Epochs of each weighted corpus (of all as one, without weights) that so many rows are.
    std::vector<double> epochs_after(std::int64_t rows) const;

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace fenwick::data
