#include "data/documents.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/utf8.h"

namespace fenwick::data {
namespace {

constexpr std::size_t batch_bytes = 256 << 10, batch_pieces = 8 << 10;
constexpr std::size_t longest_held = 64 << 10;
constexpr std::size_t look_ahead = 64;  // bytes past a cut that tokenizers look at
constexpr std::size_t longest_json_line = 32 << 20;

// Before the last space that follows something else, else between characters.
std::size_t forced_cut(std::string_view text, std::size_t limit) {
    for (std::size_t at = limit; at > limit / 2; --at)
        if (text[at] == ' ' && text[at - 1] != ' ') return at;
    std::size_t at = limit;
    for (int back = 0; back < 3 && (text[at] & 0xc0) == 0x80; ++back) --at;
    return at;
}

// Keeps the text of one field of the outermost object, the last one of the name as other readers do; builds nothing else.
class FieldFinder final : public nlohmann::json_sax<nlohmann::json> {
public:
    explicit FieldFinder(const std::string& field) : field_(field) {}

    bool found = false, is_text = false;
    std::string text;
    std::string problem;  // of the JSON

    bool null() override { return other(); }
    bool boolean(bool) override { return other(); }
    bool number_integer(number_integer_t) override { return other(); }
    bool number_unsigned(number_unsigned_t) override { return other(); }
    bool number_float(number_float_t, const string_t&) override { return other(); }
    bool binary(binary_t&) override { return other(); }
    bool string(string_t& value) override {
        if (!other()) return false;
        if (wanted_ && depth_ == 1) {
            text = std::move(value);
            is_text = true;
        }
        return true;
    }
    bool key(string_t& name) override {
        if (depth_ == 1) wanted_ = name == field_;
        return true;
    }
    bool start_object(std::size_t) override { return depth_ == 0 ? (depth_ = 1) : open(); }
    bool end_object() override { return close(); }
    bool start_array(std::size_t) override { return open(); }
    bool end_array() override { return close(); }
    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
        problem = fmt::format("it is not valid JSON (at byte {})", position);
        return false;
    }

private:
    // Any value
    bool other() {
        if (depth_ == 0) {
            problem = "it is no JSON object";
            return false;
        }
        if (wanted_ && depth_ == 1) {
            found = true;
            is_text = false;
        }
        return true;
    }
    bool open() { return other() && (++depth_, true); }
    bool close() { return --depth_, true; }

    const std::string& field_;
    int depth_ = 0;
    bool wanted_ = false;
};

}  // namespace

DocumentUnit document_unit_from(std::string_view name) {
    if (name == "file") return DocumentUnit::file;
    if (name == "line") return DocumentUnit::line;
    if (name == "block") return DocumentUnit::block;
    fail("documents '{}' is unknown; use file, line or block", name);
}

std::size_t piece_end(const Tokenizer& tokenizer, std::string_view text, bool whole, std::size_t& limit) {
    while (text.size() >= limit + look_ahead) {
        std::size_t cut = tokenizer.safe_cut(text.substr(0, limit + look_ahead), limit);
        if (cut == 0 && limit >= longest_piece) cut = forced_cut(text, limit);
        if (cut != 0) {
            limit = first_limit;
            return cut;
        }
        limit *= 2;
    }
    if (!whole) return 0;
    limit = first_limit;
    return text.size();
}

// ---------------------------------------------------------------------------------------------------- text

DocumentSplitter::DocumentSplitter(DocumentUnit unit, const Tokenizer& tokenizer, std::function<void(TextBatch)> on_batch)
    : document_unit_(unit), tokenizer_(tokenizer), on_batch_(std::move(on_batch)) {}

void DocumentSplitter::begin_file(std::int64_t units_to_skip) {
    unit_ = 0;
    units_to_skip_ = units_to_skip;
}

void DocumentSplitter::add(std::string_view block) {
    if (document_unit_ == DocumentUnit::file) {
        add_text(block);
        return;
    }
    while (!block.empty()) {
        const auto newline = block.find('\n');
        add_to_line(block.substr(0, newline));
        if (newline == std::string_view::npos) return;
        end_line();
        block.remove_prefix(newline + 1);
    }
}

void DocumentSplitter::end_file() {
    if (document_unit_ != DocumentUnit::file && line_has_text_) end_line_without_newline();
    end_document();
    // White space at the end of the file
    separator_bytes_ += static_cast<std::int64_t>(held_.size());
    held_.clear();
    line_has_text_ = false;
}

void DocumentSplitter::flush() {
    if (!batch_.pieces.empty()) on_batch_(std::exchange(batch_, {}));
    piece_begin_ = 0;
}

void DocumentSplitter::add_to_line(std::string_view part) {
    // White space is held back until it is known to be text: at the start of a line it may make a blank line, before a
    // newline
    // "\r" may belong to it.
    if (!line_has_text_) {
        const auto first = std::find_if_not(part.begin(), part.end(), is_space);
        held_.append(part.begin(), first);
        if (first == part.end() && held_.size() < longest_held) return;
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

void DocumentSplitter::end_line() {
    if (line_has_text_) {
        held_ += '\n';
        end_line_without_newline();
        return;
    }
    // A blank line: it and what is held before it are separators.
    end_document();
    separator_bytes_ += static_cast<std::int64_t>(std::exchange(held_, {}).size()) + 1;
}

void DocumentSplitter::end_line_without_newline() {
    line_has_text_ = false;
    if (document_unit_ != DocumentUnit::line) return;  // the held newline is text of the block if another line follows
    end_document();
    separator_bytes_ += static_cast<std::int64_t>(std::exchange(held_, {}).size());
}

void DocumentSplitter::add_text(std::string_view part) {
    if (part.empty()) return;
    if (!open_) {
        open_ = begins_ = true;
        continues_word_ = false;
        opening_separator_ = std::exchange(separator_bytes_, 0);
    }
    if (skipping()) return;
    while (!part.empty()) {
        const std::size_t length = batch_.text.size() - piece_begin_, wanted = limit_ + look_ahead;
        const std::size_t step = length < wanted ? std::min(part.size(), wanted - length) : 0;
        batch_.text.append(part.substr(0, step));
        part.remove_prefix(step);
        const std::string_view piece = std::string_view(batch_.text).substr(piece_begin_);
        if (const std::size_t end = piece_end(tokenizer_, piece, false, limit_)) end_piece(end, false);
    }
}

void DocumentSplitter::end_piece(std::size_t length, bool ends_document) {
    const std::size_t end = piece_begin_ + length;
    batch_.pieces.push_back({.begin = piece_begin_,
                             .end = end,
                             .unit = unit_,
                             .separator_bytes = std::exchange(opening_separator_, 0),
                             .begins_document = std::exchange(begins_, false),
                             .ends_document = ends_document,
                             .continues_word = continues_word_});
    if (length > 0) continues_word_ = !is_space(batch_.text[end - 1]);
    piece_begin_ = end;
    if (end < batch_bytes && batch_.pieces.size() < batch_pieces) return;
    std::string rest = batch_.text.substr(end);
    batch_.text.resize(end);
    on_batch_(std::exchange(batch_, {}));
    batch_.text = std::move(rest);
    piece_begin_ = 0;
}

void DocumentSplitter::end_document() {
    if (!open_) return;
    open_ = false;
    if (skipping()) {
        opening_separator_ = 0;
    } else {
        while (true) {
            const std::size_t length = batch_.text.size() - piece_begin_;
            const std::size_t end = piece_end(tokenizer_, std::string_view(batch_.text).substr(piece_begin_), true, limit_);
            end_piece(end, end == length);
            if (end == length) break;
        }
    }
    ++unit_;
}

// ---------------------------------------------------------------------------------------------------- JSON

JsonLineSplitter::JsonLineSplitter(std::function<void(TextBatch)> on_batch) : on_batch_(std::move(on_batch)) {}

void JsonLineSplitter::begin_file(std::string path, std::int64_t units_to_skip) {
    path_ = std::move(path);
    unit_ = 0;
    units_to_skip_ = units_to_skip;
}

void JsonLineSplitter::add(std::string_view block) {
    while (!block.empty()) {
        const auto newline = std::min(block.find('\n'), block.size());
        batch_.text.append(block.substr(0, newline));
        FENWICK_CHECK(batch_.text.size() - line_begin_ <= longest_json_line,
                      "{}:{}: the line has more than {} MiB; is it JSON lines?", path_, unit_ + 1, longest_json_line >> 20);
        if (newline == block.size()) return;
        end_line();
        block.remove_prefix(newline + 1);
    }
}

void JsonLineSplitter::end_file() {
    if (batch_.text.size() > line_begin_) end_line();
}

void JsonLineSplitter::flush() {
    if (!batch_.pieces.empty()) on_batch_(std::exchange(batch_, {}));
    line_begin_ = 0;
}

void JsonLineSplitter::end_line() {
    const std::string_view line = std::string_view(batch_.text).substr(line_begin_);
    if (unit_ < units_to_skip_ || std::all_of(line.begin(), line.end(), is_space)) {
        batch_.text.resize(line_begin_);
    } else {
        batch_.pieces.push_back({.begin = line_begin_,
                                 .end = batch_.text.size(),
                                 .unit = unit_,
                                 .is_json = true,
                                 .begins_document = true,
                                 .ends_document = true});
        line_begin_ = batch_.text.size();
    }
    ++unit_;
    if (line_begin_ >= batch_bytes || batch_.pieces.size() >= batch_pieces) flush();
}

std::string json_text(std::string_view line, const std::string& field) {
    FieldFinder finder(field);
    const bool parsed = nlohmann::json::sax_parse(line, &finder);
    FENWICK_CHECK(parsed, "{}", finder.problem);
    FENWICK_CHECK(finder.found, "it has no field '{}'", field);
    FENWICK_CHECK(finder.is_text, "its field '{}' is no text", field);
    return std::move(finder.text);
}

}  // namespace fenwick::data
