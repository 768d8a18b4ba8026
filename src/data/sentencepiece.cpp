#include "data/sentencepiece.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <functional>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/utf8.h"
#include "data/text_files.h"

namespace fenwick::data {
namespace {

constexpr std::string_view space_mark = "\xE2\x96\x81";  // U+2581, how pieces write a space

std::uint64_t next_serial_number() {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
}

class SentencePieceTokenizer final : public Tokenizer {
public:
    SentencePieceTokenizer(const std::string& definition, const std::string& name) : definition_(definition) {
        // An empty or foreign message parses as a model without pieces.
        const auto status = processor_.LoadFromSerializedProto(definition_);
        FENWICK_CHECK(!definition.empty() && status.ok() && processor_.GetPieceSize() > 0,
                      "{} is not a SentencePiece model; \"bytes\", or the path of a SentencePiece model, a tokenizer.json, or a vocab.bpe beside its "
                      "encoder.json is needed", name);
        for (const int id : {processor_.eos_id(), processor_.bos_id(), processor_.unk_id()})
            if (end_of_document_ < 0 && id >= 0) end_of_document_ = id;
        FENWICK_CHECK(end_of_document_ >= 0, "{} has no end, begin or unknown piece to end documents with", name);
        find_pieces();
        lossless_ = newline_ >= 0 && gives_back("");
        puts_space_first_ = !lossless_ && splits_at_spaces_ && space_id_ >= 0 && gives_back(" ");
    }

    std::string kind() const override { return "sentencepiece"; }
    std::int64_t vocab_size() const override { return processor_.GetPieceSize(); }
    std::int32_t end_of_document() const override { return end_of_document_; }
    std::string definition() const override { return definition_; }
    bool lossless() const override { return lossless_; }

    // Lossless models are encoded newline by newline, and word by word where no piece reaches over a space; those that only
    // put a space first, word by word.
    std::size_t safe_cut(std::string_view text, std::size_t limit) const override {
        if (puts_space_first_) {
            for (std::size_t at = std::min(limit, text.empty() ? 0 : text.size() - 1); at > 0; --at)
                if (begins_word(text, at)) return at;
            return 0;
        }
        if (!lossless_) return 0;
        for (std::size_t at = limit; at > 0; --at) {
            if (text[at - 1] == '\n') return at;
            if (splits_at_spaces_ && at < text.size() && text[at] == ' ' && text[at - 1] != ' ') return at;
        }
        return 0;
    }

    void encode_continued(std::string_view text, std::vector<std::int32_t>& ids) const override {
        if (puts_space_first_ && text.starts_with(' '))
            append_words(text, ids);
        else
            encode(text, ids);
    }

    void encode(std::string_view text, std::vector<std::int32_t>& ids) const override {
        if (puts_space_first_) {
            std::size_t end = std::min<std::size_t>(text.size(), 1);
            while (end < text.size() && !begins_word(text, end)) ++end;
            append_encoded(text.substr(0, end), ids);  // with the space that it puts first
            append_words(text.substr(end), ids);
            return;
        }
        if (!lossless_) {
            append_encoded(text, ids);
            return;
        }
        // The library would replace invalid UTF-8, and read the mark of a space as a space: those go as bytes. Newlines
        // are cut out here, because its time and memory grow faster than the length of what it is given.
        std::size_t begin = 0, at = 0;
        const auto flush = [&](std::size_t end) { append_words(text.substr(begin, end - begin), ids); };
        while (at < text.size()) {
            const std::size_t length = utf8_length(text.substr(at, 4));
            const bool as_bytes = length == 0 || text.substr(at, length) == space_mark;
            if (text[at] != '\n' && !as_bytes) {
                at += length;
                continue;
            }
            flush(at);
            const std::size_t end = at + std::max<std::size_t>(length, 1);
            if (!as_bytes)
                ids.push_back(newline_);
            else
                for (std::size_t i = at; i < end; ++i) ids.push_back(byte_ids_[static_cast<unsigned char>(text[i])]);
            begin = at = end;
        }
        flush(at);
    }

    std::string decode(const std::int32_t* ids, std::int64_t count) const override {
        for (std::int64_t i = 0; i < count; ++i)
            FENWICK_CHECK(ids[i] >= 0 && ids[i] < vocab_size(), "[decode] token {} is outside the vocabulary of {}", ids[i],
                          vocab_size());
        std::string text;
        if (lossless_) {
            for (std::int64_t i = 0; i < count; ++i) text += text_of_[static_cast<std::size_t>(ids[i])];
            return text;
        }
        const auto status = processor_.Decode(std::vector<int>(ids, ids + count), &text);
        FENWICK_CHECK(status.ok(), "[decode] SentencePiece: {}", status.ToString());
        return text;
    }

private:
    // The ids of words met before, one store a thread. Words repeat so often that this is several times faster than the
    // library by itself.
    struct Words {
        struct Hash : std::hash<std::string_view> {
            using is_transparent = void;
        };
        std::uint64_t owner = 0;
        std::unordered_map<std::string, std::vector<std::int32_t>, Hash, std::equal_to<>> ids;
    };

    // A word starts at a space (or several) after something else: no piece of the model reaches over such a place.
    static bool begins_word(std::string_view text, std::size_t at) {
        return text[at] == ' ' && text[at - 1] != ' ' && !text.substr(0, at).ends_with(space_mark);
    }

    // Encodes word by word. A BPE model gives the ids of the whole line; a unigram model may part a word otherwise where two
    // ways score the same.
    void append_words(std::string_view text, std::vector<std::int32_t>& ids) const {
        if (text.empty()) return;
        if (!splits_at_spaces_) {
            append_encoded(text, ids);
            return;
        }
        constexpr std::size_t longest_word = 64, most_words = 1 << 15;
        thread_local Words words;
        if (words.owner != serial_number_ || words.ids.size() > most_words) {
            words.ids.clear();
            words.owner = serial_number_;
        }
        for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
            for (end = begin + 1; end < text.size() && !begins_word(text, end);) ++end;
            const std::string_view word = text.substr(begin, end - begin);
            auto found = words.ids.find(word);
            if (found == words.ids.end()) {
                std::vector<std::int32_t> encoded;
                append_word(word, encoded);
                if (word.size() > longest_word) {
                    ids.insert(ids.end(), encoded.begin(), encoded.end());
                    continue;
                }
                found = words.ids.emplace(word, std::move(encoded)).first;
            }
            ids.insert(ids.end(), found->second.begin(), found->second.end());
        }
    }

    // The space that a word begins with is the one that the library puts before the rest; before nothing it puts none.
    void append_word(std::string_view word, std::vector<std::int32_t>& ids) const {
        if (puts_space_first_) word.remove_prefix(1);
        if (word.empty())
            ids.push_back(space_id_);
        else
            append_encoded(word, ids);
    }

    void append_encoded(std::string_view text, std::vector<std::int32_t>& ids) const {
        std::vector<int> found;
        const auto status = processor_.Encode(text, &found);
        FENWICK_CHECK(status.ok(), "[encode] SentencePiece: {}", status.ToString());
        ids.insert(ids.end(), found.begin(), found.end());
    }

    void find_pieces() {
        byte_ids_.fill(-1);
        text_of_.resize(static_cast<std::size_t>(vocab_size()));
        for (int id = 0; id < processor_.GetPieceSize(); ++id) {
            const std::string& piece = processor_.IdToPiece(id);
            std::string& text = text_of_[static_cast<std::size_t>(id)];
            if (processor_.IsByte(id)) {  // "<0x0A>"
                const int value = std::stoi(piece.substr(1, piece.size() - 2), nullptr, 16);
                byte_ids_[static_cast<std::size_t>(value)] = id;
                text = static_cast<char>(value);
            } else if (processor_.IsUnknown(id)) {
                text = "\xE2\x81\x87";  // U+2047, double question mark
            } else if (!processor_.IsControl(id)) {
                text = piece;
                for (auto at = text.find(space_mark); at != std::string::npos; at = text.find(space_mark, at + 1))
                    text.replace(at, space_mark.size(), 1, ' ');
                if (piece == "\n") newline_ = id;
                if (piece == space_mark) space_id_ = id;
                for (std::size_t i = 1; i < text.size(); ++i)
                    if (text[i] == ' ' && text[i - 1] != ' ') splits_at_spaces_ = false;
            }
        }
    }

    // Whether the model does not normalise, and adds nothing but `first` before a text: nothing where train_sentencepiece
    // made it, a space in Llama's.
    bool gives_back(const std::string& first) const {
        if (std::count(byte_ids_.begin(), byte_ids_.end(), -1) > 0) return false;
        // Spaces of all kinds, a tab, a ligature, a letter with a combining accent, a full-width letter, a control
        // character: what the normalisers in use change.
        const std::string probe = "  a  b\t\r \xC2\xA0\xE3\x80\x80\xEF\xAC\x81 e\xCC\x81 \xEF\xBC\xA1\x01 ";
        for (const std::string& text : {std::string("a"), probe}) {
            std::vector<std::int32_t> ids;
            append_encoded(text, ids);
            std::string back;
            for (const auto id : ids) back += text_of_[static_cast<std::size_t>(id)];
            if (back != first + text) return false;
        }
        return true;
    }

    std::string definition_;
    sentencepiece::SentencePieceProcessor processor_;
    std::int32_t end_of_document_ = -1, newline_ = -1, space_id_ = -1;
    std::array<std::int32_t, 256> byte_ids_{};
    std::vector<std::string> text_of_;  // of each id
    bool lossless_ = false, puts_space_first_ = false, splits_at_spaces_ = true;
    std::uint64_t serial_number_ = next_serial_number();
};

// The lines of the training files, cut so that none is longer than the trainer takes.
class Lines final : public sentencepiece::SentenceIterator {
public:
    static constexpr std::size_t longest = 4000;  // bytes

    // Every `stride`-th piece of text is given.
    Lines(const std::vector<std::string>& files, std::int64_t stride) : files_(files), stride_(stride) { Next(); }

    bool done() const override { return done_; }
    const std::string& value() const override { return line_; }
    sentencepiece::util::Status status() const override { return {}; }
    void Next() override {
        for (std::int64_t skipped = 0; skipped < stride_; ++skipped)
            if (!next()) {
                done_ = true;
                return;
            }
    }

private:
    bool next() {
        line_.clear();
        while (line_.empty()) {
            if (position_ < block_.size() || read_block())
                take_line();
            else
                return false;
        }
        return true;
    }

    // Takes up to a newline, up to a space past half the longest, or up to a whole character at the longest.
    void take_line() {
        while (true) {
            const std::string_view rest = std::string_view(block_).substr(position_);
            const std::size_t length = rest.empty() ? 0 : std::max<std::size_t>(utf8_length(rest.substr(0, 4)), 1);
            if (length == 0 || rest[0] == '\n' || line_.size() + length > longest ||
                (rest[0] == ' ' && line_.size() > longest / 2 && line_.back() != ' ')) {
                if (!rest.empty() && rest[0] == '\n') ++position_;
                return;
            }
            line_.append(rest.substr(0, length));
            position_ += length;
        }
    }

    // Blocks end after a newline, or, where a line is longer than a block, after a whole character.
    bool read_block() {
        while (true) {
            if (!file_.is_open()) {
                if (next_file_ == files_.size()) return false;
                file_.open(files_[next_file_++], std::ios::binary);
            }
            block_ = std::exchange(carried_, {});
            const std::size_t kept = block_.size();
            block_.resize(kept + (1 << 20));
            file_.read(block_.data() + kept, 1 << 20);
            block_.resize(kept + static_cast<std::size_t>(file_.gcount()));
            position_ = 0;
            if (!file_) {
                file_.close();
                file_.clear();
            } else if (const auto newline = block_.rfind('\n'); newline != std::string::npos) {
                carried_ = block_.substr(newline + 1);
                block_.resize(newline + 1);
            } else {
                std::size_t end = block_.size();
                while (end + 3 > block_.size() && (block_[end - 1] & 0xc0) == 0x80) --end;
                carried_ = block_.substr(end - 1);
                block_.resize(end - 1);
            }
            if (!block_.empty()) return true;
        }
    }

    const std::vector<std::string>& files_;
    std::int64_t stride_;
    std::size_t next_file_ = 0, position_ = 0;
    std::ifstream file_;
    std::string block_, carried_, line_;
    bool done_ = false;
};

// The library's reasons speak of its source and its own options: they are said in our words.
[[noreturn]] void refuse_training(const std::string& reason, const std::vector<std::string>& files,
                                  const SentencePieceOptions& options) {
    spdlog::debug("SentencePiece: {}", reason);
    const std::string text = files.size() == 1 ? files[0] : fmt::format("{} and {} more", files[0], files.size() - 1);
    FENWICK_CHECK(reason.find("required_chars") == std::string::npos,
                  "{} has too many different characters for {} pieces; raise --vocab-size or lower --character-coverage", text,
                  options.vocab_size);
    fail("{} has too little text in UTF-8 to train a tokenizer on; give more, or use the tokenizer \"bytes\", which needs no "
         "training", text);
}

}  // namespace

std::unique_ptr<Tokenizer> make_sentencepiece(const std::string& definition, const std::string& name) {
    return std::make_unique<SentencePieceTokenizer>(definition, name);
}

std::int64_t train_sentencepiece(const std::vector<std::string>& files, const SentencePieceOptions& options,
                         const std::string& output_path) {
    FENWICK_CHECK(options.model_type == "bpe" || options.model_type == "unigram",
                  "tokenizer model type '{}' is unknown; use bpe or unigram", options.model_type);
    FENWICK_CHECK(options.vocab_size >= 300 && options.vocab_size <= (1 << 20),
                  "tokenizer vocabulary of {} is asked for; 300 to 1048576 can be trained (256 are bytes)", options.vocab_size);
    std::int64_t bytes = 0;
    for (const std::string& file : files) {
        bytes += size_of_file(file);
        FENWICK_CHECK(!TextReader(file).compressed(), "{} is compressed; a tokenizer is trained on plain text, so decompress it first",
                      file);
    }
    check_output(output_path, files);
    FENWICK_CHECK(options.character_coverage >= 0.98 && options.character_coverage <= 1,
                  "tokenizer character coverage is {}; it must be from 0.98 to 1", options.character_coverage);
    FENWICK_CHECK(bytes > 0, "no text to train a tokenizer on: {} empty", files.size() == 1 ? files[0] + " is" : "all files are");
    const int threads = options.threads > 0 ? options.threads : num_threads();
    const std::unordered_map<std::string, std::string> arguments = {
        {"model_type", options.model_type},
        {"vocab_size", std::to_string(options.vocab_size)},
        {"num_threads", std::to_string(threads)},
        {"character_coverage", fmt::format("{}", options.character_coverage)},
        {"byte_fallback", "true"},
        {"normalization_rule_name", "identity"},
        {"add_dummy_prefix", "false"},
        {"remove_extra_whitespaces", "false"},
        {"user_defined_symbols", "\n"},
        {"max_sentence_length", std::to_string(2 * Lines::longest)},
        // A small corpus gives a smaller vocabulary instead of an error.
        {"hard_vocab_limit", "false"},
        // Names that no text holds by chance: a corpus with "<unk>" in it learns that as an ordinary piece.
        {"unk_piece", "<|unknown|>"},
        {"eos_piece", "<|end of document|>"},
        {"unk_id", "0"},
        {"eos_id", "1"},
        {"bos_id", "-1"},
        {"pad_id", "-1"},
        {"minloglevel", "3"},
    };
    Lines lines(files, (bytes + options.sample_bytes - 1) / options.sample_bytes);
    std::string model;
    const auto status = sentencepiece::SentencePieceTrainer::Train(arguments, &lines, &model);
    if (!status.ok()) refuse_training(status.ToString(), files, options);
    const auto trained = make_sentencepiece(model, output_path);
    // From next to no text the library leaves out pieces that losslessness needs.
    if (!trained->lossless()) refuse_training("the trained tokenizer is not lossless", files, options);
    write_file_atomically(output_path, model);
    return trained->vocab_size();
}

}  // namespace fenwick::data
