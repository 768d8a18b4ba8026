#include "data/loader.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/random.h"
#include "base/sha256.h"
#include "data/corpus.h"
#include "data/document_packing.h"
#include "data/mixture.h"

namespace fenwick::data {
namespace {

constexpr std::int32_t ignored_target = -100;

// Streams of random numbers for shuffling: this plus the source's number, and the epoch, so that no other use of the seed
// draws the same.
std::uint64_t shuffle_stream(std::size_t source, std::int64_t epoch) {
    return (std::uint64_t{0x73687566} + source) << 32 | static_cast<std::uint64_t>(epoch);  // "shuf"
}

struct Range {
    std::int64_t begin, end;  // tokens
};

// Corpora read as one, and how their tokens become rows.
class Source {
public:
    Source(const std::vector<std::string>& paths, Packing packing, std::int64_t length, std::size_t most_open)
        : packing_(packing), length_(length) {
        for (const std::string& path : paths) {
            corpora_.emplace_back(path, most_open);
            starts_.push_back(starts_.back() + corpora_.back().info().num_tokens);
            documents_.push_back(documents_.back() + corpora_.back().info().num_documents);
        }
        if (packing == Packing::documents) packed_.emplace(length);
        if (packing != Packing::stream)
            for_each_document([&](Range document) {
                if (packed_) packed_->add(document.begin, document.end);
                // Sequences end with their row: after T tokens from the beginning of a document, or from that of the stream's targets.
                const std::int64_t begin = packed_ ? document.begin : std::max<std::int64_t>(document.begin, 1);
                const std::int64_t phase = packed_ ? 0 : (begin - 1) % length;
                const std::int64_t first = std::min(document.end - begin, length - phase), rest = document.end - begin - first;
                squares_ += square(first) + static_cast<double>(rest / length) * square(length) + square(rest % length);
            });
        if (packed_) packed_->finish();
        FENWICK_CHECK(targets() >= 1, "{}: the token files hold {} token; at least 2 are needed", paths.front(), starts_.back());
    }

    const std::vector<TokenCorpus>& corpora() const { return corpora_; }
    std::int64_t targets() const { return packed_ ? starts_.back() : starts_.back() - 1; }
    std::int64_t rows() const { return packed_ ? packed_->rows() : (targets() + length_ - 1) / length_; }
    std::int64_t targets_in(std::int64_t row) const {
        return packed_ ? packed_->row(row).tokens : std::min(length_, targets() - row * length_);
    }

    // Sum over the targets of an epoch of the length of the sequence that each is in.
    double sequence_lengths() const {
        return packing_ == Packing::stream ? static_cast<double>(targets()) * static_cast<double>(length_) : squares_;
    }

    // Fills T inputs and as many targets as the row has, and appends where sequences end, counted from `first`, the row's
    // first token.
    void read(std::int64_t row, std::int64_t first, std::int32_t* inputs, std::int32_t* targets,
              std::vector<std::int64_t>& offsets) const {
        std::int64_t filled = 0;
        const auto piece = [&](Range range) {
            read_piece(range, inputs + filled, targets + filled);
            filled += range.end - range.begin;
        };
        if (!packed_) {
            const Range range{row * length_ + 1, row * length_ + 1 + targets_in(row)};
            piece(range);
            if (packing_ == Packing::masked_stream) append_boundaries(range, first, offsets);
        } else if (const auto packed = packed_->row(row); packed.documents.empty()) {
            piece({packed.begin, packed.begin + length_});
        } else {
            for (const std::uint32_t document : packed.documents) {
                const Range whole = bounds(document);
                piece({whole.end - (whole.end - whole.begin) % length_, whole.end});
                if (filled < length_) offsets.push_back(first + filled);
            }
        }
        // Past the last target any id of the vocabulary will do: nothing valid comes after it in its sequence.
        std::fill(inputs + filled, inputs + length_, end_of_document());
        offsets.push_back(first + length_);
    }

private:
    static double square(std::int64_t x) { return static_cast<double>(x) * static_cast<double>(x); }

    // In order.
    template <class Body>
    void for_each_document(Body&& body) const {
        for (std::size_t i = 0; i < corpora_.size(); ++i)
            for (std::int64_t shard = 0; shard < corpora_[i].num_shards(); ++shard) {
                const std::int64_t start = starts_[i] + corpora_[i].first_token(shard);
                const auto file = corpora_[i].shard(shard);
                const auto& offsets = file->document_offsets();
                for (std::size_t d = 0; d + 1 < offsets.size(); ++d) body({start + offsets[d], start + offsets[d + 1]});
            }
    }

    std::int32_t end_of_document() const { return corpora_.front().info().end_of_document; }

    // The corpus that holds position `at` of a list of running counts.
    static std::size_t holder(const std::vector<std::int64_t>& counts, std::int64_t at) {
        return static_cast<std::size_t>(std::upper_bound(counts.begin(), counts.end(), at) - counts.begin()) - 1;
    }

    Range bounds(std::int64_t document) const {
        const std::size_t i = holder(documents_, document);
        document -= documents_[i];
        return {starts_[i] + corpora_[i].document_offset(document), starts_[i] + corpora_[i].document_offset(document + 1)};
    }

    // Tokens as targets, and the token before each as its input.
    void read_piece(Range range, std::int32_t* inputs, std::int32_t* targets) const {
        if (range.begin == 0)
            inputs[0] = end_of_document();
        else
            read_tokens({range.begin - 1, range.begin}, inputs);
        read_tokens(range, targets);
        std::copy(targets, targets + (range.end - range.begin - 1), inputs + 1);
    }

    void read_tokens(Range range, std::int32_t* out) const {
        for (std::size_t i = holder(starts_, range.begin); range.begin < range.end; ++i) {
            const std::int64_t step = std::min(range.end, starts_[i + 1]) - range.begin;
            corpora_[i].read(range.begin - starts_[i], step, out);
            range.begin += step;
            out += step;
        }
    }

    // A document that begins at one of `targets`, but for the first, begins a sequence at that target's input.
    void append_boundaries(Range targets, std::int64_t first, std::vector<std::int64_t>& offsets) const {
        for (std::size_t i = holder(starts_, targets.begin); i < corpora_.size() && starts_[i] < targets.end; ++i) {
            const TokenCorpus& corpus = corpora_[i];
            std::int64_t document = corpus.document_at(std::max<std::int64_t>(targets.begin - starts_[i], 0));
            for (; document < corpus.info().num_documents; ++document) {
                const std::int64_t begin = starts_[i] + corpus.document_offset(document);
                if (begin >= targets.end) break;
                if (begin > targets.begin) offsets.push_back(first + begin - targets.begin);
            }
        }
    }

    Packing packing_;
    std::int64_t length_;
    std::vector<TokenCorpus> corpora_;
    std::vector<std::int64_t> starts_{0}, documents_{0};  // tokens and documents before each corpus, and in all
    std::optional<DocumentPacking> packed_;
    double squares_ = 0;  // of the lengths of all sequences, where these are not rows
};

}  // namespace

struct Loader::Implementation {
    LoaderOptions options;
    std::vector<Source> sources;
    std::optional<Mixture> mixture;  // of several sources

    explicit Implementation(const LoaderOptions& given) : options(given) {
        FENWICK_CHECK(!options.corpora.empty(), "[loader] no token files are given");
        FENWICK_CHECK(options.sequence_length >= 1, "[loader] sequence length {} is asked for; it must be at least 1",
                      options.sequence_length);
        const std::size_t most_open = most_open_shards() / options.corpora.size();
        std::vector<std::string> paths;
        std::vector<double> rates;
        for (const auto& corpus : options.corpora) {
            FENWICK_CHECK((corpus.weight > 0) == (options.corpora.front().weight > 0),
                          "[loader] {} has {} weight and {} has {}; give each corpus a weight above 0, or none",
                          options.corpora.front().path, options.corpora.front().weight > 0 ? "a" : "no", corpus.path,
                          corpus.weight > 0 ? "one" : "none");
            paths.push_back(corpus.path);
            if (corpus.weight == 0) continue;
            sources.emplace_back(paths, options.packing, options.sequence_length, most_open);
            paths.clear();
            // Rows at such a rate that tokens have the weight asked for: packed rows of one corpus may be fuller.
            rates.push_back(corpus.weight * static_cast<double>(sources.back().rows()) / static_cast<double>(sources.back().targets()));
        }
        if (!paths.empty()) sources.emplace_back(paths, options.packing, options.sequence_length, most_open);
        if (sources.size() > 1) {
            const double sum = std::accumulate(rates.begin(), rates.end(), 0.0);
            for (std::size_t i = 0; i < rates.size(); ++i)
                FENWICK_CHECK(rates[i] >= Mixture::least_rate * sum,
                              "data.train: the weight of {}, {}, gives it less than {} of the rows; give it more, or leave it out",
                              options.corpora[i].path, options.corpora[i].weight, Mixture::least_rate);
            mixture.emplace(rates);
        }
        const auto& first = front();
        for (const auto& source : sources)
            for (const auto& corpus : source.corpora()) {
                FENWICK_CHECK(corpus.info().tokenizer_identity == first.tokenizer_identity,
                              "{} and {} were made with different tokenizers ({} {:.8} and {} {:.8})", first.path,
                              corpus.info().path, first.tokenizer_kind, first.tokenizer_identity, corpus.info().tokenizer_kind,
                              corpus.info().tokenizer_identity);
                FENWICK_CHECK(corpus.info().vocab_size == first.vocab_size,
                              "{} has a vocabulary of {} and {} one of {}, by the same tokenizer: one of them is damaged",
                              first.path, first.vocab_size, corpus.info().path, corpus.info().vocab_size);
            }
    }

    const TokenFileInfo& front() const { return sources.front().corpora().front().info(); }

    template <class T>
    T total(T (Source::*count)() const) const {
        T sum = 0;
        for (const auto& source : sources) sum += (source.*count)();
        return sum;
    }

    // Row `row` of the run: the source and which of its rows.
    std::pair<const Source*, std::int64_t> find(std::int64_t row) const {
        const auto place = mixture ? mixture->at(row) : Mixture::Place{0, row};
        const Source& source = sources[place.source];
        const std::int64_t epoch = place.row / source.rows(), in_epoch = place.row % source.rows();
        if (!options.shuffle) return {&source, in_epoch};
        const Permutation order(static_cast<std::uint64_t>(source.rows()), options.seed, shuffle_stream(place.source, epoch));
        return {&source, static_cast<std::int64_t>(order(static_cast<std::uint64_t>(in_epoch)))};
    }
};

Loader::Loader(const LoaderOptions& options) : implementation_(std::make_unique<Implementation>(options)) {}
Loader::~Loader() = default;
Loader::Loader(Loader&&) noexcept = default;

std::int64_t Loader::sequence_length() const { return implementation_->options.sequence_length; }
std::int64_t Loader::rows_per_epoch() const { return implementation_->total(&Source::rows); }
std::int64_t Loader::tokens_per_epoch() const { return implementation_->total(&Source::targets); }
double Loader::fill() const {
    return static_cast<double>(tokens_per_epoch()) / static_cast<double>(rows_per_epoch()) /
           static_cast<double>(implementation_->options.sequence_length);
}
double Loader::mean_sequence_length() const {
    return implementation_->total(&Source::sequence_lengths) / static_cast<double>(tokens_per_epoch());
}
const TokenCorpus& Loader::first_corpus() const { return implementation_->sources.front().corpora().front(); }
std::int64_t Loader::vocab_size() const { return implementation_->front().vocab_size; }
std::string Loader::tokenizer_identity() const { return implementation_->front().tokenizer_identity; }

Batch Loader::read(std::int64_t first, std::int64_t count) const {
    FENWICK_CHECK(first >= 0 && count >= 0, "[loader] {} rows from row {} are asked for", count, first);
    const Implementation& self = *implementation_;
    const std::int64_t length = self.options.sequence_length;
    Batch batch;
    batch.rows = count;
    batch.length = length;
    batch.inputs.resize(static_cast<std::size_t>(count * length));
    batch.targets.assign(static_cast<std::size_t>(count * length), ignored_target);
    batch.offsets.push_back(0);
    for (std::int64_t i = 0; i < count; ++i) {
        const auto [source, row] = self.find(first + i);
        source->read(row, i * length, batch.inputs.data() + i * length, batch.targets.data() + i * length, batch.offsets);
        batch.valid_targets += source->targets_in(row);
    }
    return batch;
}

std::int64_t Loader::valid_targets(std::int64_t first, std::int64_t count) const {
    std::int64_t valid = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const auto [source, row] = implementation_->find(first + i);
        valid += source->targets_in(row);
    }
    return valid;
}

std::string Loader::data_identity() const {
    std::string identities;
    for (const auto& source : implementation_->sources)
        for (const auto& corpus : source.corpora()) identities += corpus.identity();
    return sha256_hex(identities);
}

LoaderState Loader::state_after(std::int64_t rows) const {
    return {rows / rows_per_epoch(), rows % rows_per_epoch(), data_identity()};
}

std::int64_t Loader::rows_before(const LoaderState& state) const {
    const std::int64_t rows = rows_per_epoch();
    FENWICK_CHECK(state.epoch >= 0 && state.row >= 0 && state.row < rows,
                  "[loader] epoch {}, row {} is no place in this data: an epoch has {} rows", state.epoch, state.row, rows);
    return state.epoch * rows + state.row;
}

std::vector<double> Loader::epochs_after(std::int64_t rows) const {
    const Implementation& self = *implementation_;
    const auto counts = self.mixture ? self.mixture->counts(rows) : std::vector<std::int64_t>{rows};
    std::vector<double> epochs;
    for (std::size_t i = 0; i < counts.size(); ++i)
        epochs.push_back(static_cast<double>(counts[i]) / static_cast<double>(self.sources[i].rows()));
    return epochs;
}

}  // namespace fenwick::data
