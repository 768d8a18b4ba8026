#include "tools/file_kind.h"

#include <filesystem>

#include "base/files.h"
#include "base/hdf5.h"
#include "data/corpus.h"
#include "train/checkpoint.h"

namespace fenwick::tools {

namespace fs = std::filesystem;

FileKind kind_of_file(const std::string& path) {
    std::error_code ignored;
    if (fs::is_directory(path, ignored)) {
        if (data::is_corpus_folder(path) || data::holds_shards(path)) return FileKind::corpus;
        return fs::is_directory(fs::path(path) / "checkpoints") ? FileKind::run_folder : FileKind::other;
    }
    (void)size_of_file(path);  // refuses what is no file
    const std::string extension = fs::path(path).extension().string();
    if (extension == ".yaml" || extension == ".yml") return FileKind::config;
    if (!hdf5::is_hdf5(path)) return FileKind::other;
    const auto file = hdf5::File::open(path);
    const std::string format = file.has_attribute("/", "format") ? file.attribute_string("/", "format") : "";
    if (format.find("token") != std::string::npos) return FileKind::corpus;
    if (format.find("checkpoint") != std::string::npos) return FileKind::checkpoint;
    fail("{} is neither a Fenwick token file nor a Fenwick checkpoint", path);
}

std::unique_ptr<data::Tokenizer> open_tokenizer_of(const std::string& source,
                                                   const std::optional<std::string>& end_of_document) {
    FENWICK_CHECK(!end_of_document || !end_of_document->empty(),
                  "--end-of-document is empty; the name of a token is needed, as in --end-of-document '<|im_end|>'");
    // A name without a file is the tokenizer's to understand ("bytes") or to refuse.
    std::error_code ignored;
    const FileKind kind = fs::exists(source, ignored) ? kind_of_file(source) : FileKind::other;
    FENWICK_CHECK(kind == FileKind::other || !end_of_document,
                  "the tokenizer in {} has its end of a document; --end-of-document is for a tokenizer.json", source);
    switch (kind) {
        case FileKind::corpus: return data::TokenCorpus(source).tokenizer();
        case FileKind::checkpoint:
        case FileKind::run_folder: {
            const auto tokenizer = train::read_checkpoint_header(train::find_checkpoint(source)).tokenizer;
            return data::restore_tokenizer(tokenizer.kind, tokenizer.definition);
        }
        default:
            return data::open_tokenizer(source, end_of_document.value_or(""));
    }
}

}  // namespace fenwick::tools
