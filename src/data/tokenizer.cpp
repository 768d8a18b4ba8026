#include "data/tokenizer.h"

#include "base/error.h"
#include "base/files.h"
#include "base/sha256.h"
#include "data/sentencepiece.h"

namespace fenwick::data {
namespace {

// One id a byte, and one for the end of a document. Any bytes are text.
class ByteTokenizer final : public Tokenizer {
public:
    std::string kind() const override { return "bytes"; }
    std::int64_t vocab_size() const override { return 257; }
    std::int32_t end_of_document() const override { return 256; }
    void encode(std::string_view text, std::vector<std::int32_t>& ids) const override {
        ids.reserve(ids.size() + text.size());
        for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
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
    bool splits_at_newlines() const override { return true; }
};

}  // namespace

std::size_t Tokenizer::safe_cut(std::string_view, std::size_t) const { return 0; }

std::string Tokenizer::identity() const {
    const std::string name = kind(), bytes = definition();
    Sha256 hash;
    hash.update(name.c_str(), name.size() + 1);  // the NUL parts the two
    hash.update(bytes.data(), bytes.size());
    return hash.hex();
}

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name_or_path) {
    if (name_or_path == "bytes") return std::make_unique<ByteTokenizer>();
    std::string definition;
    try {
        definition = read_file(name_or_path);
    } catch (const Error& error) {
        fail("tokenizer {}; \"bytes\" or the path of a SentencePiece model is needed", error.what());
    }
    return make_sentencepiece(definition, name_or_path);
}

std::unique_ptr<Tokenizer> restore_tokenizer(const std::string& kind, const std::string& definition) {
    if (kind == "bytes") return std::make_unique<ByteTokenizer>();
    if (kind == "sentencepiece") return make_sentencepiece(definition, "the stored tokenizer");
    fail("tokenizer kind '{}' is unknown; this program knows bytes and sentencepiece", kind);
}

}  // namespace fenwick::data
