#include "data/loader.h"

#include <algorithm>

#include "base/error.h"
#include "base/random.h"
#include "data/token_file.h"

namespace fenwick::data {
namespace {

constexpr std::int32_t ignored_target = -100;
// Streams of random numbers for shuffling: this and the epoch, so that no other use of the seed draws the same.
constexpr std::uint64_t shuffle_stream = std::uint64_t{0x73687566} << 32;  // "shuf"

}  // namespace

struct Loader::Implementation {
    LoaderOptions options;
    std::vector<TokenFile> files;
    std::vector<std::int64_t> starts;  // of each file in the stream of all tokens, and the stream's end
    std::int64_t rows = 0;             // of an epoch
    LoaderState state;

    explicit Implementation(const LoaderOptions& given) : options(given) {
        FENWICK_CHECK(!options.files.empty(), "[loader] no token files are given");
        FENWICK_CHECK(options.sequence_length >= 1 && options.rows >= 1,
                      "[loader] sequence length {} and {} rows are asked for; both must be at least 1", options.sequence_length,
                      options.rows);
        starts.push_back(0);
        for (const std::string& path : options.files) {
            files.emplace_back(path);
            const auto &first = files.front().info(), &last = files.back().info();
            FENWICK_CHECK(first.tokenizer_identity == last.tokenizer_identity,
                          "{} and {} were made with different tokenizers ({} {:.8} and {} {:.8})", first.path, last.path,
                          first.tokenizer_kind, first.tokenizer_identity, last.tokenizer_kind, last.tokenizer_identity);
            starts.push_back(starts.back() + last.num_tokens);
        }
        FENWICK_CHECK(starts.back() >= 2, "{}: the token files hold {} token; at least 2 are needed", options.files.front(),
                      starts.back());
        rows = (targets() + options.sequence_length - 1) / options.sequence_length;
    }

    std::int64_t targets() const { return starts.back() - 1; }

    // The row that is `position`-th from the beginning of the state's epoch; positions go on into later epochs.
    std::int64_t row_at(std::int64_t position) const {
        const std::int64_t epoch = state.epoch + position / rows, place = position % rows;
        if (!options.shuffle) return place;
        const Permutation order(static_cast<std::uint64_t>(rows), options.seed, shuffle_stream | static_cast<std::uint64_t>(epoch));
        return static_cast<std::int64_t>(order(static_cast<std::uint64_t>(place)));
    }

    // Targets that are tokens; all but the last row of an epoch are full.
    std::int64_t valid_in(std::int64_t row) const {
        return std::min(options.sequence_length, targets() - row * options.sequence_length);
    }

    void read(std::int64_t offset, std::int64_t count, std::int32_t* out) const {
        auto file = static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), offset) - starts.begin()) - 1;
        for (; count > 0; ++file) {
            const std::int64_t step = std::min(count, starts[file + 1] - offset);
            files[file].read(offset - starts[file], step, out);
            offset += step;
            count -= step;
            out += step;
        }
    }
};

Loader::Loader(const LoaderOptions& options) : implementation_(std::make_unique<Implementation>(options)) {}
Loader::~Loader() = default;

std::int64_t Loader::rows_per_epoch() const { return implementation_->rows; }
std::int64_t Loader::tokens_per_epoch() const { return implementation_->targets(); }
std::int64_t Loader::vocab_size() const { return implementation_->files.front().info().vocab_size; }
std::string Loader::tokenizer_identity() const { return implementation_->files.front().info().tokenizer_identity; }
const LoaderState& Loader::state() const { return implementation_->state; }

void Loader::seek(const LoaderState& state) {
    FENWICK_CHECK(state.epoch >= 0 && state.row >= 0 && state.row < implementation_->rows,
                  "[loader] epoch {}, row {} is no place in this data: an epoch has {} rows", state.epoch, state.row,
                  implementation_->rows);
    implementation_->state = state;
}

Batch Loader::peek(std::int64_t first, std::int64_t count) {
    const Implementation& self = *implementation_;
    FENWICK_CHECK(first >= 0 && count >= 0 && first + count <= self.options.rows,
                  "[loader] rows [{}, {}) of a global batch of {} are asked for", first, first + count, self.options.rows);
    const std::int64_t length = self.options.sequence_length;
    Batch batch;
    batch.rows = count;
    batch.length = length;
    batch.inputs.resize(static_cast<std::size_t>(count * length));
    batch.targets.resize(static_cast<std::size_t>(count * length));
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(length + 1));
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t row = self.row_at(self.state.row + first + i), valid = self.valid_in(row);
        self.read(row * length, valid + 1, tokens.data());
        // Past the end of the stream any id of the vocabulary will do: nothing valid comes after it.
        std::fill(tokens.begin() + valid + 1, tokens.end(), self.files.front().info().end_of_document);
        std::copy_n(tokens.begin(), length, batch.inputs.begin() + i * length);
        const auto targets = batch.targets.begin() + i * length;
        std::copy_n(tokens.begin() + 1, valid, targets);
        std::fill(targets + valid, targets + length, ignored_target);
        batch.valid_targets += valid;
    }
    return batch;
}

std::int64_t Loader::valid_targets() {
    const Implementation& self = *implementation_;
    std::int64_t valid = 0;
    for (std::int64_t i = 0; i < self.options.rows; ++i) valid += self.valid_in(self.row_at(self.state.row + i));
    return valid;
}

void Loader::advance() {
    Implementation& self = *implementation_;
    const std::int64_t next = self.state.row + self.options.rows;
    self.state = {self.state.epoch + next / self.rows, next % self.rows};
}

}  // namespace fenwick::data
