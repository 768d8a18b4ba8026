#include "data/tokenizer.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/files.h"
#include "base/sha256.h"
#include "base/utf8.h"
#include "data/sentencepiece.h"
#include "data/tokenizer_json.h"

namespace fenwick::data {

namespace fs = std::filesystem;

namespace {

// One id a byte, and one for the end of a document. Any bytes are text.
class ByteTokenizer final : public Tokenizer {
public:
    std::string kind() const override { return "bytes"; }
    std::int64_t vocab_size() const override { return 257; }
    std::int32_t end_of_document() const override { return 256; }
    void encode(std::string_view text, std::vector<std::int32_t>& ids) const override {
        // No reserve(): exact sizes would copy all ids for each of many short texts.
        const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
        ids.insert(ids.end(), bytes, bytes + text.size());
    }
    std::string decode(const std::int32_t* ids, std::int64_t count) const override {
        std::string text;
        text.reserve(static_cast<std::size_t>(count));
        for (std::int64_t i = 0; i < count; ++i) {
            FENWICK_CHECK(ids[i] >= 0 && ids[i] <= 256, "[decode] token {} is outside the vocabulary of 257", ids[i]);
            if (ids[i] < 256) text += static_cast<char>(ids[i]);
        }
        return text;
    }
    std::string definition() const override { return ""; }
    std::size_t safe_cut(std::string_view, std::size_t limit) const override { return limit; }
    bool lossless() const override { return true; }
};

constexpr const char* what_is_needed =
    "\"bytes\", or the path of a SentencePiece model, a tokenizer.json, or a vocab.bpe beside its encoder.json is needed";

// The file of a folder that defines a tokenizer. A tokenizer.json beside a tokenizer.model repeats it, in components that are
// not supported.
std::string file_of_tokenizer(const std::string& path) {
    std::error_code ignored;
    if (!fs::is_directory(path, ignored)) return path;
    for (const char* name : {"tokenizer.model", "tokenizer.json", "vocab.bpe", "merges.txt"})
        if (const fs::path file = fs::path(path) / name; fs::exists(file, ignored)) return file.string();
    fail("tokenizer {}: a folder without tokenizer.model, tokenizer.json or vocab.bpe; {}", path, what_is_needed);
}

bool looks_like_json(std::string_view text) {
    const auto first = std::find_if_not(text.begin(), text.end(), is_space);
    return first != text.end() && *first == '{';
}

// GPT-2's two files, "" where `path` is neither.
struct Gpt2Pair {
    std::string merges, vocabulary;
};
Gpt2Pair find_gpt2_pair(const std::string& path) {
    const fs::path folder = fs::path(path).parent_path();
    const std::string name = fs::path(path).filename().string();
    for (const auto& [merges, vocabulary] : {std::pair("vocab.bpe", "encoder.json"), std::pair("merges.txt", "vocab.json")}) {
        if (name != merges && name != vocabulary) continue;
        const Gpt2Pair pair = {name == vocabulary ? (folder / merges).string() : path, (folder / vocabulary).string()};
        for (const std::string& file : {pair.merges, pair.vocabulary}) {
            std::error_code ignored;
            FENWICK_CHECK(fs::exists(file, ignored), "tokenizer {}: {} must stand beside it", path, fs::path(file).filename().string());
        }
        return pair;
    }
    return {};
}

}  // namespace

std::size_t Tokenizer::safe_cut(std::string_view, std::size_t) const { return 0; }

std::string Tokenizer::identity() const {
    const std::string name = kind(), bytes = definition();
    Sha256 hash;
    hash.update(name.c_str(), name.size() + 1);  // the NUL parts the two
    hash.update(bytes.data(), bytes.size());
    return hash.hex();
}

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name_or_path, const std::string& end_of_document) {
    const auto without_name = [&](std::unique_ptr<Tokenizer> tokenizer) {
        FENWICK_CHECK(end_of_document.empty(), "{} tokenizers have their own end of a document; --end-of-document is for a tokenizer.json",
                      tokenizer->kind());
        return tokenizer;
    };
    if (name_or_path == "bytes") return without_name(std::make_unique<ByteTokenizer>());
    const std::string path = file_of_tokenizer(name_or_path);
    std::string definition;
    try {
        definition = read_file(path);
    } catch (const Error& error) {
        fail("tokenizer {}; {}", error.what(), what_is_needed);
    }
    if (const auto pair = find_gpt2_pair(path); !pair.merges.empty())
        definition = tokenizer_json_of_gpt2(pair.merges, pair.vocabulary);
    else if (!looks_like_json(definition))
        return without_name(make_sentencepiece(definition, path));
    if (!end_of_document.empty()) definition = with_end_of_document(definition, end_of_document, path);
    return make_tokenizer_json(definition, path);
}

std::unique_ptr<Tokenizer> restore_tokenizer(const std::string& kind, const std::string& definition) {
    if (kind == "bytes") return std::make_unique<ByteTokenizer>();
    if (kind == "sentencepiece") return make_sentencepiece(definition, "the stored tokenizer");
    if (kind == "tokenizer.json") return make_tokenizer_json(definition, "the stored tokenizer");
    fail("tokenizer kind '{}' is unknown; this program knows bytes, sentencepiece and tokenizer.json", kind);
}

}  // namespace fenwick::data
