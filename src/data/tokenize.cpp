#include "data/tokenize.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/parallel.h"
#include "base/random.h"
#include "base/utf8.h"
#include "data/corpus.h"
#include "data/corpus_writer.h"
#include "data/text_files.h"

namespace fenwick::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t read_bytes = 256 << 10;
constexpr int journal_version = 2;
// The stream of random numbers that draws the validation share: no other use of the seed draws the same.
constexpr std::uint64_t valid_stream = std::uint64_t{0x76616c69} << 32;  // "vali"

bool holds_json_lines(const std::string& path, TextFormat format) {
    if (format != TextFormat::by_name) return format == TextFormat::json_lines;
    fs::path name = fs::path(path).filename();
    for (const char* packed : {".gz", ".zst", ".xz"})
        if (name.extension() == packed) {
            name = name.stem();
            break;
        }
    return name.extension() == ".jsonl" || name.extension() == ".ndjson" || name.extension() == ".json";
}

std::int64_t words_in(std::string_view text, bool in_word) {
    std::int64_t words = 0;
    for (const char c : text) {
        const bool space = is_space(c);
        words += !space && !in_word;
        in_word = !space;
    }
    return words;
}

// ---------------------------------------------------------------------------------------------------- the threads

// Where reading begins: files before are passed over, and of this one so many documents or lines.
struct Position {
    std::size_t file = 0;
    std::int64_t unit = 0;
};

// A batch on its way: read, encoded, written. The end of a file is one without pieces.
struct Job {
    struct Encoded {
        std::size_t ids_end = 0;
        std::int64_t bytes = 0, words = 0;  // of text
    };

    std::size_t file = 0;
    TextBatch batch;
    std::optional<TokenSource> file_end;
    std::int64_t separator_bytes = 0;  // at the file's end, text of the document before
    bool is_last = false;
    std::int64_t file_bytes = 0;  // read of all files so far
    std::size_t weight = 0;       // of the text, for the limit of what is on its way

    std::vector<std::int32_t> ids;
    std::vector<Encoded> encoded;  // one a piece
    std::exception_ptr error;
    bool is_done = false;
};

class Pipeline {
public:
    Pipeline(const Tokenizer& tokenizer, const TokenizeOptions& options, const std::vector<TextFile>& files, Position start)
        : tokenizer_(tokenizer), options_(options), files_(files), start_(start) {
        const int workers = options.workers > 0 ? options.workers : num_threads();
        most_bytes_ = (4 * static_cast<std::size_t>(workers) + 8) * read_bytes;
        try {
            threads_.emplace_back([this] { read(); });
            for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
        } catch (const std::exception& error) {
            const std::size_t started = threads_.size();
            stop();
            fail("{} threads are asked for, {} could be started ({}); lower --workers", workers + 1, started, error.what());
        }
    }
    ~Pipeline() { stop(); }

    // The next batch in the order of the text, encoded. Throws what its making threw.
    std::unique_ptr<Job> next() {
        std::unique_lock lock(mutex_);
        done_.wait(lock, [&] { return !jobs_.empty() && jobs_.front()->is_done; });
        std::unique_ptr<Job> job = std::move(jobs_.front());
        jobs_.pop_front();
        --next_to_encode_;
        bytes_ -= job->weight;
        room_.notify_one();
        if (job->error) std::rethrow_exception(job->error);
        return job;
    }

private:
    struct Stopped {};

    void stop() {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        room_.notify_all();
        work_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    void push(std::unique_ptr<Job> job) {
        constexpr std::size_t most_jobs = 4096;
        job->weight = job->batch.text.size();
        std::unique_lock lock(mutex_);
        room_.wait(lock, [&] {
            return stopping_ || jobs_.empty() || (jobs_.size() < most_jobs && bytes_ + job->weight <= most_bytes_);
        });
        if (stopping_) throw Stopped{};
        bytes_ += job->weight;
        jobs_.push_back(std::move(job));
        work_.notify_one();
    }

    void read() {
        std::size_t file = 0;
        std::int64_t file_bytes = 0;
        const auto make_job = [&] {
            auto job = std::make_unique<Job>();
            job->file = file;
            job->file_bytes = file_bytes;
            return job;
        };
        try {
            const auto on_batch = [&](TextBatch batch) {
                auto job = make_job();
                job->batch = std::move(batch);
                push(std::move(job));
            };
            DocumentSplitter documents(options_.documents, tokenizer_, on_batch);
            JsonLineSplitter lines(on_batch);
            std::string block(read_bytes, '\0');
            for (; file < files_.size(); ++file) {
                const TextFile& source = files_[file];
                if (file < start_.file) {
                    file_bytes += source.bytes;
                    continue;
                }
                const std::int64_t skip = file == start_.file ? start_.unit : 0;
                const std::int64_t before = file_bytes;
                TextReader reader(source.path);
                const auto feed = [&](auto& splitter) {
                    for (std::size_t count = block.size(); count == block.size();) {
                        count = reader.read(block.data(), block.size());
                        file_bytes = before + reader.bytes_read();
                        splitter.add(std::string_view(block).substr(0, count));
                        std::lock_guard lock(mutex_);
                        if (stopping_) throw Stopped{};
                    }
                    splitter.end_file();
                    splitter.flush();
                };
                if (holds_json_lines(source.path, options_.format)) {
                    lines.begin_file(source.path, skip);
                    feed(lines);
                } else {
                    documents.begin_file(skip);
                    feed(documents);
                }
                FENWICK_CHECK(reader.bytes_read() == source.bytes, "{} has changed while it was read", source.path);
                auto end = make_job();
                end->separator_bytes = documents.take_separator_bytes();
                end->file_end = {source.path, reader.bytes_read(), reader.sha256()};
                push(std::move(end));
            }
            auto last = make_job();
            last->is_last = true;
            push(std::move(last));
        } catch (const Stopped&) {
        } catch (...) {
            auto job = make_job();
            job->error = std::current_exception();
            try {
                push(std::move(job));
            } catch (const Stopped&) {
            }
        }
    }

    void work() {
        while (true) {
            Job* job = nullptr;
            {
                std::unique_lock lock(mutex_);
                work_.wait(lock, [&] { return stopping_ || next_to_encode_ < static_cast<std::ptrdiff_t>(jobs_.size()); });
                if (stopping_) return;
                job = jobs_[static_cast<std::size_t>(next_to_encode_++)].get();
            }
            try {
                encode(*job);
            } catch (...) {
                job->error = std::current_exception();
            }
            std::lock_guard lock(mutex_);
            job->is_done = true;
            if (job == jobs_.front().get()) done_.notify_one();
        }
    }

    void encode(Job& job) const {
        job.encoded.reserve(job.batch.pieces.size());
        for (const TextPiece& piece : job.batch.pieces) {
            const std::string_view text = std::string_view(job.batch.text).substr(piece.begin, piece.end - piece.begin);
            if (piece.is_json) {
                encode_json(job, piece, text);
            } else {
                if (piece.begins_document)
                    tokenizer_.encode(text, job.ids);
                else
                    tokenizer_.encode_continued(text, job.ids);
                job.encoded.push_back(
                    {job.ids.size(), static_cast<std::int64_t>(text.size()), words_in(text, piece.continues_word)});
            }
        }
        job.batch.text = {};
    }

    void encode_json(Job& job, const TextPiece& piece, std::string_view line) const {
        std::string text;
        try {
            text = json_text(line, options_.text_field);
        } catch (const Error& error) {
            fail("{}:{}: {}", files_[job.file].path, piece.unit + 1, error.what());
        }
        std::size_t limit = first_limit;
        for (std::string_view rest = text; !rest.empty();) {
            const std::size_t end = piece_end(tokenizer_, rest, true, limit);
            if (rest.size() == text.size())
                tokenizer_.encode(rest.substr(0, end), job.ids);
            else
                tokenizer_.encode_continued(rest.substr(0, end), job.ids);
            rest.remove_prefix(end);
        }
        job.encoded.push_back({job.ids.size(), static_cast<std::int64_t>(text.size()), words_in(text, false)});
    }

    const Tokenizer& tokenizer_;
    const TokenizeOptions& options_;
    const std::vector<TextFile>& files_;
    Position start_;
    std::size_t most_bytes_ = 0;

    std::mutex mutex_;
    std::condition_variable room_, work_, done_;
    std::deque<std::unique_ptr<Job>> jobs_;  // in the order of the text
    std::ptrdiff_t next_to_encode_ = 0;      // in jobs_
    std::size_t bytes_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

// ---------------------------------------------------------------------------------------------------- the run

// The outputs, and the journal from which they are continued.
class Run {
public:
    Run(const Tokenizer& tokenizer, const TokenizeOptions& options) : tokenizer_(tokenizer), options_(options) {
        check_options();
        files_ = list_text_files(options.inputs);
        outputs_.push_back(std::make_unique<CorpusWriter>(options.output, tokenizer, options.shard_tokens, options.deflate));
        if (!options.valid_output.empty())
            outputs_.push_back(
                std::make_unique<CorpusWriter>(options.valid_output, tokenizer, options.shard_tokens, options.deflate));
        for (const TextFile& file : files_) progress_.total_file_bytes += file.bytes;
        check_places();
        if (progress_.total_file_bytes == 0) no_text();
    }

    TokenizeResult run() {
        open_work_folders();
        try {
            if (!is_complete_) {
                tokenize();
                complete();
            }
            publish();
        } catch (const Error& error) {
            end_with(error.what());
        } catch (const std::bad_alloc&) {
            const int workers = options_.workers > 0 ? options_.workers : num_threads();
            end_with(workers > 1 ? fmt::format("out of memory; lower --workers from {}", workers)
                                 : "out of memory with one worker; shorter documents (lines of JSON) need less");
        }
        TokenizeResult result{.output = TokenCorpus(outputs_[0]->output()).info()};
        if (outputs_.size() > 1) result.valid = TokenCorpus(outputs_[1]->output()).info();
        return result;
    }

private:
    [[noreturn]] void end_with(const std::string& message) {
        if (!is_disposable_) fail("{}; what is done is kept in {}: the same command goes on from there", message, work());
        remove_work_folders();
        throw Error(message);
    }

    const std::string& work() const { return outputs_[0]->work_folder(); }
    std::string journal_path() const { return work() + "/journal.json"; }
    std::string inputs_path() const { return work() + "/inputs.jsonl"; }
    std::string sources_path() const { return work() + "/sources.jsonl"; }

    [[noreturn]] void no_text() const {
        std::vector<std::string> names;
        for (const TextFile& file : files_)
            if (names.size() < 4) names.push_back(file.path);
        fail("no text to tokenize in {}{}", fmt::join(names, ", "),
             names.size() < files_.size() ? fmt::format(" and {} more", files_.size() - names.size()) : "");
    }

    // ---- checks

    void check_options() const {
        FENWICK_CHECK(!options_.inputs.empty(), "no text files to tokenize");
        FENWICK_CHECK(!options_.output.empty(), "no output to write to");
        FENWICK_CHECK(options_.shard_tokens >= 1, "shards of {} tokens are asked for; at least 1 is needed",
                      options_.shard_tokens);
        FENWICK_CHECK(options_.valid_share >= 0 && options_.valid_share < 1 &&
                          (options_.valid_share > 0 || options_.valid_output.empty()),
                      "--valid-share is {}{}; it must be above 0 and below 1, as in --valid-share 0.01", options_.valid_share,
                      options_.valid_output.empty() ? "" : " beside --valid-output");
        FENWICK_CHECK(options_.valid_share == 0 || !options_.valid_output.empty(),
                      "--valid-share is {}, and nothing says where these documents go; name --valid-output", options_.valid_share);
    }

    // Of a place where nothing may stand yet; weakly_canonical leaves names relative whose first part is not there.
    static fs::path canonical(const std::string& path) {
        std::error_code ignored;
        return fs::weakly_canonical(fs::absolute(path, ignored), ignored);
    }

    void check_places() const {
        for (const auto& output : outputs_) {
            const std::string& path = output->output();
            check_output(path, options_.inputs);
            for (const std::string& input : options_.inputs) {
                std::error_code ignored;
                if (!fs::is_directory(input, ignored)) continue;
                const auto way = canonical(path).lexically_relative(fs::canonical(input, ignored));
                FENWICK_CHECK(way.empty() || *way.begin() == "..",
                              "{} would lie in {}, a folder that is read; name a place outside of it", path, input);
            }
        }
        FENWICK_CHECK(outputs_.size() < 2 || canonical(outputs_[0]->output()) != canonical(outputs_[1]->output()),
                      "{} is the output and the output of the validation share; name two", options_.output);
    }

    // By its name
    static bool is_shard(const fs::path& path) {
        return path.extension() == ".h5" && path.stem().string().find_first_not_of("0123456789") == std::string::npos;
    }

    void check_outputs_are_free() const {
        for (const auto& output : outputs_) {
            const std::string& path = output->output();
            const std::string folder = fs::path(path).parent_path().string();
            FENWICK_CHECK(!is_shard(path) || !is_corpus_folder(folder),
                          "{} would be a shard of the corpus {}, which would no longer be whole; name another place", path,
                          folder.empty() ? "that stands here" : folder);
            std::error_code ignored;
            if (!fs::exists(path, ignored)) continue;
            FENWICK_CHECK(options_.overwrite, "{} exists already; name another place, or give --overwrite to replace it",
                          path);
            FENWICK_CHECK(is_token_file_path(path) ? is_token_file(path) : is_corpus_folder(path),
                          "{} is no corpus, and is not replaced; name another place", path);
            if (is_token_file_path(path)) continue;
            for (const auto& entry : fs::directory_iterator(path, ignored)) {
                const std::string name = entry.path().filename().string();
                FENWICK_CHECK(is_shard(entry.path()) || name == manifest_name || name == sources_name,
                              "{} holds {}, which is no part of a corpus; it is not replaced: move that away, or name another place",
                              path, name);
            }
        }
    }

    // ---- the journal

    // What the result depends on, by the names of the command line.
    nlohmann::json options_in_journal() const {
        nlohmann::json json = {
            {"--tokenizer", tokenizer_.identity()},          {"--documents", static_cast<int>(options_.documents)},
            {"--format", static_cast<int>(options_.format)}, {"--text-field", options_.text_field},
            {"--shard-tokens", options_.shard_tokens},       {"--deflate", options_.deflate}};
        if (outputs_.size() > 1) {
            json["--valid-output"] = options_.valid_output;
            json["--valid-share"] = options_.valid_share;
            json["--valid-seed"] = options_.valid_seed;
        }
        return json;
    }

    std::string input_line(const TextFile& file) const {
        return nlohmann::json{{"name", file.path}, {"bytes", file.bytes}, {"modified", file.modified}}.dump(
                   -1, ' ', false, nlohmann::json::error_handler_t::replace) +
               "\n";
    }

    void open_work_folders() {
        std::vector<std::string> made;
        try {
            for (const auto& output : outputs_) {
                std::error_code error;
                const std::string& work = output->work_folder();
                if (fs::exists(work, error) && !fs::exists(work + "/lock", error) &&
                    (!fs::is_directory(work, error) || !fs::is_empty(work, error)))
                    fail("{} is in the way, and nothing that fenwick tokenize left; move it away, or name another output", work);
                error.clear();
                if (fs::create_directory(work, error)) made.push_back(work);
                FENWICK_CHECK(!error, "{}: cannot be written: {}", output->output(),
                              reason_not_made(work, error));
                FENWICK_CHECK(locks_.emplace_back().acquire(output->work_folder() + "/lock"),
                              "{}: another run is writing it; wait for its end, or name another output", output->output());
            }
            if (!options_.restart && fs::exists(journal_path()))
                resume();
            else
                begin();
        } catch (const Error&) {
            std::error_code ignored;
            for (const std::string& folder : made) fs::remove_all(folder, ignored);
            throw;
        }
    }

    void begin() {
        check_outputs_are_free();
        // What is there has no journal, or is not wanted.
        for (const auto& output : outputs_) clear(output->work_folder());
        sources_.emplace(sources_path(), 0, outputs_[0]->output());
        is_disposable_ = true;
    }

    // The journal goes last: while it is there, another run knows what the rest is.
    static void clear(const std::string& work) {
        std::error_code ignored;
        std::vector<fs::path> entries;
        for (const auto& entry : fs::directory_iterator(work, ignored)) entries.push_back(entry.path());
        std::sort(entries.begin(), entries.end(), [](const fs::path& a, const fs::path& b) {
            return std::pair(a.filename() == "journal.json", a) < std::pair(b.filename() == "journal.json", b);
        });
        for (const auto& entry : entries)
            if (entry.filename() != "lock") fs::remove_all(entry, ignored);
    }

    void resume() {
        try {
            const auto journal = nlohmann::json::parse(read_file(journal_path()));
            FENWICK_CHECK(journal.at("version") == journal_version,
                          "{} was written by another version of this program; give --restart to begin anew", journal_path());
            check_seal(journal, journal_path(), "; give --restart to begin anew");
            const auto options = options_in_journal();
            for (const auto& [name, value] : options.items())
                FENWICK_CHECK(
                    journal.at("options").contains(name) && journal.at("options").at(name) == value,
                    "{} holds an interrupted run with another {}; give the same to go on, or --restart to begin anew",
                    work(), name);
            FENWICK_CHECK(
                journal.at("options").size() == options.size(),
                "{} holds an interrupted run with a validation share; give the same to go on, or --restart to begin anew",
                work());
            check_inputs();
            is_complete_ = journal.at("complete");
            if (is_complete_) {
                for (const auto& output : outputs_) output->check_complete();
                return;
            }
            check_outputs_are_free();
            start_ = {journal.at("file"), journal.at("unit")};
            documents_ = journal.at("documents");
            for (std::size_t i = 0; i < outputs_.size(); ++i) outputs_[i]->restore(journal.at("outputs").at(i));
            sources_.emplace(sources_path(), journal.at("sources_bytes"), outputs_[0]->output());
            progress_.resumed = true;
        } catch (const nlohmann::json::exception&) {
            fail("{} is damaged: it is not the JSON that fenwick tokenize writes; give --restart to begin anew",
                 journal_path());
        }
        for (std::size_t i = 0; i < start_.file; ++i) progress_.file_bytes += files_.at(i).bytes;
        report();
    }

    void check_inputs() const {
        std::ifstream known(inputs_path(), std::ios::binary);
        std::string line;
        constexpr const char* remedy = "give the same to go on, or --restart to begin anew";
        const auto name_in = [&](const std::string& input) {
            try {
                return nlohmann::json::parse(input).at("name").get<std::string>();
            } catch (const nlohmann::json::exception&) {
                fail("{} is damaged; give --restart to begin anew", inputs_path());
            }
        };
        const auto removed = [&] {  // the file of `line`
            fail("{} holds an interrupted run that reads {}, which is no longer among the files; {}", work(), name_in(line),
                 remedy);
        };
        for (const TextFile& file : files_) {
            const std::string found = input_line(file);
            FENWICK_CHECK(std::getline(known, line), "{} holds an interrupted run over fewer files, without {}; {}", work(),
                          file.path, remedy);
            if (line + "\n" == found) continue;
            FENWICK_CHECK(name_in(line) != name_in(found),
                          "{} has changed since the run that {} holds was interrupted; give --restart to begin anew",
                          file.path, work());
            const auto is_it = [&](const TextFile& other) { return name_in(input_line(other)) == name_in(line); };
            if (std::none_of(files_.begin(), files_.end(), is_it)) removed();
            fail("{} holds an interrupted run that reads {} where {} is given now; {}", work(), name_in(line), file.path,
                 remedy);
        }
        if (std::getline(known, line)) removed();
    }

    // Between documents.
    void commit(bool complete = false) {
        if (is_disposable_) {
            std::string inputs;
            for (const TextFile& file : files_) inputs += input_line(file);
            write_file_atomically(inputs_path(), inputs);
        }
        sources_->sync();
        nlohmann::json journal = {{"version", journal_version},
                                  {"options", options_in_journal()},
                                  {"file", files_ended_},
                                  {"unit", last_file_ == files_ended_ ? last_unit_ + 1 : 0},
                                  {"documents", documents_},
                                  {"sources_bytes", sources_->size()},
                                  {"outputs", nlohmann::json::array()},
                                  {"complete", complete}};
        for (const auto& output : outputs_) journal["outputs"].push_back(output->commit());
        seal(journal);
        write_file_atomically(journal_path(), journal.dump() + "\n");
        is_disposable_ = false;
        for (const auto& output : outputs_) output->forget_spools();
        text_at_commit_ = progress_.text_bytes;
    }

    // ---- the work

    void tokenize() {
        Pipeline pipeline(tokenizer_, options_, files_, start_);
        files_ended_ = start_.file;
        last_file_ = start_.file;
        last_unit_ = start_.unit - 1;
        while (true) {
            const std::unique_ptr<Job> job = pipeline.next();
            progress_.file_bytes = std::max(progress_.file_bytes, job->file_bytes);
            if (job->is_last) {
                end_document();
                report();
                return;
            }
            write(*job);
            if (job->file_end) {
                add_separator(job->separator_bytes);
                const std::string line = job->file_end->json() + "\n";
                sources_->append(line.data(), line.size());
                files_ended_ = job->file + 1;
            }
            report();
        }
    }

    void write(const Job& job) {
        std::size_t begin = 0;
        for (std::size_t i = 0; i < job.encoded.size(); ++i) {
            const TextPiece& piece = job.batch.pieces[i];
            const Job::Encoded& encoded = job.encoded[i];
            if (piece.is_json && encoded.bytes == 0) continue;  // a line without text
            add_separator(piece.separator_bytes);
            if (piece.begins_document) begin_document();
            outputs_[output_]->append(job.ids.data() + begin, static_cast<std::int64_t>(encoded.ids_end - begin));
            begin = encoded.ids_end;
            bytes_ += encoded.bytes;
            words_ += encoded.words;
            progress_.text_bytes += encoded.bytes;
            if (piece.ends_document) {
                last_file_ = job.file;
                last_unit_ = piece.unit;
            }
        }
    }

    // What separates a document from the one before is that one's text; what comes before the first is the first one's.
    // Where a run goes on, the document before has been written with its separator.
    void add_separator(std::int64_t bytes) {
        if (is_open_ || documents_ == 0) bytes_ += bytes;
    }

    void begin_document() {
        end_document();
        if (outputs_[output_]->shard_is_full()) {
            outputs_[output_]->close_shard();
            commit();
        } else if (progress_.text_bytes - text_at_commit_ >= options_.commit_bytes) {
            commit();
        }
        output_ = outputs_.size() > 1 && is_valid_document(options_.valid_seed, documents_, options_.valid_share) ? 1 : 0;
        is_open_ = true;
    }

    // Once its separator is known
    void end_document() {
        if (!is_open_) return;
        outputs_[output_]->end_document(std::exchange(bytes_, 0), std::exchange(words_, 0));
        ++documents_;
        is_open_ = false;
    }

    void complete() {
        if (documents_ == 0) no_text();
        for (std::size_t i = 0; i < outputs_.size(); ++i)
            FENWICK_CHECK(outputs_[i]->num_documents() > 0,
                          "of {} documents none falls into the {} share; change --valid-share or --valid-seed", documents_,
                          i == 0 ? "training" : "validation");
        sources_->flush();
        for (const auto& output : outputs_) output->complete(sources_path());
        // One output is put in place in one step: there is nothing to go on from in between.
        if (!is_disposable_ || outputs_.size() > 1) commit(true);
    }

    void publish() {
        // The first output, whose folder holds the journal, comes last.
        for (std::size_t i = outputs_.size(); i-- > 0;) outputs_[i]->publish();
        remove_work_folders();
    }

    void remove_work_folders() {
        std::error_code ignored;
        for (std::size_t i = outputs_.size(); i-- > 0;) {
            clear(outputs_[i]->work_folder());
            fs::remove_all(outputs_[i]->work_folder(), ignored);
        }
    }

    void report() const {
        if (options_.progress) options_.progress(progress_);
    }

    const Tokenizer& tokenizer_;
    const TokenizeOptions& options_;
    std::vector<TextFile> files_;
    std::vector<std::unique_ptr<CorpusWriter>> outputs_;  // the corpus and, if asked for, its validation share
    std::deque<FileLock> locks_;
    std::optional<AppendFile> sources_;
    TokenizeProgress progress_;
    Position start_;
    bool is_complete_ = false;    // all that remains is to put it in place
    bool is_disposable_ = false;  // the work folders are ours and hold nothing that a later run could use

    std::int64_t documents_ = 0;  // begun and ended
    std::size_t output_ = 0;      // of the open document, or the last one
    bool is_open_ = false;
    std::int64_t bytes_ = 0, words_ = 0;  // of the open document
    std::size_t files_ended_ = 0, last_file_ = 0;
    std::int64_t last_unit_ = -1, text_at_commit_ = 0;
};

}  // namespace

TextFormat text_format_from(std::string_view name) {
    if (name == "auto") return TextFormat::by_name;
    if (name == "text") return TextFormat::text;
    if (name == "jsonl") return TextFormat::json_lines;
    fail("format '{}' is unknown; use auto, text or jsonl", name);
}

bool is_valid_document(std::uint64_t seed, std::int64_t document, double share) {
    const std::uint64_t bits = Random::bits(seed, valid_stream, static_cast<std::uint64_t>(document));
    return static_cast<double>(bits >> 11) * 0x1.0p-53 < share;
}

TokenizeResult tokenize(const Tokenizer& tokenizer, const TokenizeOptions& options) { return Run(tokenizer, options).run(); }

}  // namespace fenwick::data
