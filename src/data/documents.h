// From a stream of text to documents, in pieces that are encoded by themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/tokenizer.h"

namespace fenwick::data {

// What becomes one document. A line's and a block's text is without its last newline ("\r\n" too); blank lines (of
// white space alone) separate blocks and are no documents. Every byte of the files counts as text of some document,
// separators as text of the document before them, so that bits per byte refer to the files as they are.
enum class DocumentUnit : std::uint8_t { file, line, block };
DocumentUnit document_unit_from(std::string_view name);  // "file", "line", "block"; throws Error naming these

// A part of a document, or a line of JSON.
struct TextPiece {
    std::size_t begin = 0, end = 0;    // in the batch's text
    std::int64_t unit = 0;             // which document of its file, or which line of a JSON file, from 0
    std::int64_t separator_bytes = 0;  // before it, text of the document before
    bool is_json = false;
    bool begins_document = false, ends_document = false;
    bool continues_word = false;  // what comes before it in the document is no white space
};

// What is encoded at once: about 256 KiB of text, more where one piece is longer.
struct TextBatch {
    std::string text;
    std::vector<TextPiece> pieces;
};

// Where a text may be cut into pieces: the longest is about 32 KiB where the tokenizer finds a safe place to cut. Where it
// finds none a piece grows to `longest_piece`, and is then cut before a space, else between characters.
inline constexpr std::size_t longest_piece = 2 << 20;
// The end of the first piece of a text, or 0 where it needs more text to decide; `whole`: no more text comes. `limit` is the
// caller's to keep from call to call, starting from first_limit.
inline constexpr std::size_t first_limit = 32 << 10;
std::size_t piece_end(const Tokenizer& tokenizer, std::string_view text, bool whole, std::size_t& limit);

// Cuts files into documents and these into pieces, which depend on the text alone, not on the blocks it arrives in. Memory
// is that of a batch and a longest piece.
class DocumentSplitter {
public:
    // `on_batch` takes full batches.
    DocumentSplitter(DocumentUnit unit, const Tokenizer& tokenizer, std::function<void(TextBatch)> on_batch);

    // The file's first documents, so many, are passed over: read, counted as units, and given to no batch.
    void begin_file(std::int64_t units_to_skip = 0);
    void add(std::string_view block);
    void end_file();
    void flush();  // gives away the batch that is not yet full; between files
    // What separates the last document from what may come.
    std::int64_t take_separator_bytes() { return std::exchange(separator_bytes_, 0); }

private:
    void add_to_line(std::string_view part);
    void end_line();
    void end_line_without_newline();
    void add_text(std::string_view part);
    void end_piece(std::size_t length, bool ends_document);
    void end_document();
    bool skipping() const { return unit_ < units_to_skip_; }

    DocumentUnit document_unit_;
    const Tokenizer& tokenizer_;
    std::function<void(TextBatch)> on_batch_;
    TextBatch batch_;
    std::size_t piece_begin_ = 0;  // the open piece is the batch's text from here
    std::size_t limit_ = first_limit;
    std::string held_;  // white space that is text if text follows
    bool open_ = false, begins_ = false, line_has_text_ = false, continues_word_ = false;
    std::int64_t unit_ = 0, units_to_skip_ = 0, separator_bytes_ = 0, opening_separator_ = 0;
};

// Cuts files into lines of JSON, each a piece and a unit.
class JsonLineSplitter {
public:
    explicit JsonLineSplitter(std::function<void(TextBatch)> on_batch);

    void begin_file(std::string path, std::int64_t units_to_skip = 0);
    void add(std::string_view block);  // throws Error, naming file and line, where a line is longer than 32 MiB
    void end_file();
    void flush();

private:
    void end_line();

    std::function<void(TextBatch)> on_batch_;
    TextBatch batch_;
    std::string path_;
    std::size_t line_begin_ = 0;
    std::int64_t unit_ = 0, units_to_skip_ = 0;
};

// The text of a JSON object's field, escapes resolved. Throws Error that says what is wrong: "no field 'text'".
std::string json_text(std::string_view line, const std::string& field);

}  // namespace fenwick::data
