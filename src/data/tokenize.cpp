#include "data/tokenize.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/parallel.h"
#include "base/sha256.h"
#include "data/utf8.h"

namespace fenwick::data {
namespace {

constexpr std::size_t read_bytes = 1 << 20;
constexpr std::size_t batch_bytes = 4 << 20;  // text that is encoded at once
constexpr std::size_t segment_bytes = 32 << 10, longest_segment = 64 << 10;
constexpr std::size_t longest_whole_document = 64 << 20;

// A piece of a document that is encoded by itself.
struct Segment {
    std::string text;
    std::int64_t separator_bytes = 0;  // before it, text of the document before
    bool ends_document = false;
    std::int64_t bytes = 0, words = 0;  // of the document, where it ends
};

// Cuts a stream of text into segments. Cuts depend on the text alone, not on the blocks it arrives in.
class Segmenter {
public:
    Segmenter(DocumentUnit unit, bool splits_at_newlines)
        : unit_(unit), splits_at_newlines_(splits_at_newlines), longest_(splits_at_newlines ? longest_segment : longest_whole_document) {}

    std::vector<Segment> segments;
    std::size_t pending_bytes = 0;  // of text in `segments`

    void add(std::string_view block) {
        while (!block.empty()) {
            const auto newline = block.find('\n');
            const std::string_view part = block.substr(0, newline);
            add_to_line(part);
            if (newline == std::string_view::npos) return;
            end_line();
            block.remove_prefix(newline + 1);
        }
    }

    void end_file() {
        if (unit_ != DocumentUnit::file && line_has_text_) end_line_without_newline();
        end_document();
        // White space at the end of the file.
        separator_bytes_ += static_cast<std::int64_t>(held_.size());
        held_.clear();
        line_has_text_ = false;
    }

    std::int64_t trailing_separator_bytes() const { return separator_bytes_; }

private:
    void add_to_line(std::string_view part) {
        if (unit_ == DocumentUnit::file) {
            add_text(part);
            return;
        }
        // White space is held back until it is known to be text: at the start of a line it may make a blank line, before a
        // newline "\r" may belong to it.
        if (!line_has_text_) {
            const auto first = std::find_if_not(part.begin(), part.end(), is_space);
            held_.append(part.begin(), first);
            if (first == part.end() && held_.size() < longest_segment) return;
            part.remove_prefix(static_cast<std::size_t>(first - part.begin()));
            line_has_text_ = true;
            add_text(std::exchange(held_, {}));
        }
        if (part.empty()) return;
        add_text(std::exchange(held_, {}));
        if (part.back() == '\r') {
            held_.assign(1, '\r');
            part.remove_suffix(1);
        }
        add_text(part);
    }

    void end_line() {
        if (unit_ == DocumentUnit::file) {
            add_text("\n");
            if (splits_at_newlines_ && text_.size() >= segment_bytes) cut(text_.size());
            return;
        }
        if (line_has_text_) {
            held_ += '\n';
            end_line_without_newline();
            return;
        }
        // A blank line: it and what is held before it are separators.
        end_document();
        separator_bytes_ += static_cast<std::int64_t>(std::exchange(held_, {}).size()) + 1;
    }

    void end_line_without_newline() {
        line_has_text_ = false;
        if (unit_ == DocumentUnit::line) {
            bytes_ += static_cast<std::int64_t>(std::exchange(held_, {}).size());
            end_document();
        } else if (splits_at_newlines_ && text_.size() >= segment_bytes) {
            cut(text_.size());  // the held newline starts the next segment, which a lossless tokenizer allows as well
        }
    }

    void add_text(std::string_view part) {
        if (part.empty()) return;
        if (!open_) {
            open_ = true;
            // A block begins with its first line: newlines held from before it are separators.
            opening_separator_ = std::exchange(separator_bytes_, 0);
        }
        bytes_ += static_cast<std::int64_t>(part.size());
        for (const char c : part) {
            const bool space = is_space(c);
            words_ += !space && !in_word_;
            in_word_ = !space;
        }
        text_.append(part);
        while (text_.size() > longest_) cut(place_to_cut());
    }

    // Before the last space that follows something else, else between characters.
    std::size_t place_to_cut() const {
        for (std::size_t at = longest_; at > longest_ / 2; --at)
            if (text_[at] == ' ' && text_[at - 1] != ' ') return at;
        std::size_t at = longest_;
        for (int back = 0; back < 3 && (text_[at] & 0xc0) == 0x80; ++back) --at;
        return at;
    }

    void cut(std::size_t at) {
        segments.push_back({text_.substr(0, at), std::exchange(opening_separator_, 0)});
        text_.erase(0, at);
        pending_bytes += at;
    }

    void end_document() {
        if (!open_) return;
        // Held newlines end the last line of a block; they are its separator.
        cut(text_.size());
        segments.back().ends_document = true;
        segments.back().bytes = std::exchange(bytes_, 0);
        segments.back().words = std::exchange(words_, 0);
        in_word_ = open_ = false;
    }

    DocumentUnit unit_;
    bool splits_at_newlines_;
    std::size_t longest_;
    std::string text_;  // of the open document, not yet in a segment
    std::string held_;  // white space that is text if text follows
    bool open_ = false, line_has_text_ = false, in_word_ = false;
    std::int64_t bytes_ = 0, words_ = 0, separator_bytes_ = 0, opening_separator_ = 0;
};

// Encodes segments on all threads and writes them in order.
class Encoder {
public:
    Encoder(const Tokenizer& tokenizer, TokenFileWriter& writer) : tokenizer_(tokenizer), writer_(writer) {}

    void encode(std::vector<Segment>& segments) {
        std::vector<std::vector<std::int32_t>> ids(segments.size());
        parallel_for(0, static_cast<std::int64_t>(segments.size()), 1, [&](std::int64_t begin, std::int64_t end) {
            for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
                tokenizer_.encode(segments[i].text, ids[i]);
        });
        for (std::size_t i = 0; i < segments.size(); ++i) {
            add_separator(segments[i].separator_bytes);
            end_previous();
            writer_.append(ids[i].data(), static_cast<std::int64_t>(ids[i].size()));
            if (segments[i].ends_document) ended_ = {segments[i].bytes, segments[i].words};
        }
        segments.clear();
    }
    void add_separator(std::int64_t bytes) { (ended_ ? ended_->first : leading_) += bytes; }
    // A document ends in the file once the bytes of its separator are known.
    void end_previous() {
        if (ended_) writer_.end_document(ended_->first + std::exchange(leading_, 0), ended_->second);
        ended_.reset();
    }

private:
    const Tokenizer& tokenizer_;
    TokenFileWriter& writer_;
    std::optional<std::pair<std::int64_t, std::int64_t>> ended_;  // bytes and words of the document before
    std::int64_t leading_ = 0;  // separators before the first document, counted as its text
};

}  // namespace

DocumentUnit document_unit_from(std::string_view name) {
    if (name == "file") return DocumentUnit::file;
    if (name == "line") return DocumentUnit::line;
    if (name == "block") return DocumentUnit::block;
    fail("documents '{}' is unknown; use file, line or block", name);
}

TokenFileInfo tokenize_files(const Tokenizer& tokenizer, const TokenizeOptions& options) {
    FENWICK_CHECK(!options.files.empty(), "no text files to tokenize");
    std::int64_t total = 0, done = 0;
    for (const std::string& path : options.files) total += size_of_file(path);
    check_output(options.output, options.files);
    const auto no_text = [&] {
        const std::size_t shown = std::min<std::size_t>(options.files.size(), 4);
        const std::vector<std::string> names(options.files.begin(), options.files.begin() + static_cast<std::ptrdiff_t>(shown));
        fail("no text to tokenize in {}{}", fmt::join(names, ", "),
             shown < options.files.size() ? fmt::format(" and {} more", options.files.size() - shown) : "");
    };
    if (total == 0) no_text();

    TokenFileWriter writer(options.output, tokenizer, options.deflate);
    Segmenter segmenter(options.documents, tokenizer.splits_at_newlines());
    Encoder encoder(tokenizer, writer);
    std::string block(read_bytes, '\0');
    bool any = false;
    const auto encode_pending = [&] {
        any = any || !segmenter.segments.empty();
        encoder.encode(segmenter.segments);
        segmenter.pending_bytes = 0;
        if (options.progress) options.progress(done, total);
    };
    for (const std::string& path : options.files) {
        std::ifstream file(path, std::ios::binary);
        FENWICK_CHECK(file.is_open(), "{}: cannot be opened: {}", path, std::strerror(errno));
        Sha256 hash;
        std::int64_t bytes = 0;
        while (file) {
            file.read(block.data(), static_cast<std::streamsize>(block.size()));
            FENWICK_CHECK(!file.bad(), "{}: cannot be read: {}", path, std::strerror(errno));
            const std::string_view read = std::string_view(block).substr(0, static_cast<std::size_t>(file.gcount()));
            hash.update(read.data(), read.size());
            bytes += static_cast<std::int64_t>(read.size());
            done += static_cast<std::int64_t>(read.size());
            segmenter.add(read);
            if (segmenter.pending_bytes >= batch_bytes) encode_pending();
        }
        segmenter.end_file();
        writer.add_source({path, bytes, hash.hex()});
    }
    encode_pending();
    if (!any) no_text();
    encoder.add_separator(segmenter.trailing_separator_bytes());
    encoder.end_previous();
    return writer.finish();
}

}  // namespace fenwick::data
