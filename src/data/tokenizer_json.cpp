#include "data/tokenizer_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/error.h"
#include "base/files.h"
#include "base/utf8.h"
#include "data/byte_level_bpe.h"
#include "data/normalization.h"

namespace fenwick::data {
namespace {

using nlohmann::json;

constexpr std::int64_t most_ids = 1 << 21;  // a bound for memory; the largest vocabularies hold an eighth of it

// Text of a file in a message: on one line, not too long.
std::string shown(std::string_view text) {
    constexpr std::size_t longest = 60;
    const bool cut = text.size() > longest;
    if (cut) {
        std::size_t end = longest;
        while (end > 0 && (text[end] & 0xc0) == 0x80) --end;
        text = text.substr(0, end);
    }
    const std::string quoted = json(text).dump(-1, ' ', false, json::error_handler_t::replace);
    return fmt::format("'{}{}'", std::string_view(quoted).substr(1, quoted.size() - 2), cut ? "..." : "");
}
std::string value_text(const json& value) {
    if (value.is_string()) return shown(value.get_ref<const std::string&>());
    return value.is_array() ? "a list" : value.is_object() ? "an object" : value.dump();
}

json parse(std::string_view text, const std::string& name) {
    constexpr int deepest = 64;  // levels; far more would exhaust the stack where values are copied or written
    try {
        return json::parse(text, [&](int depth, json::parse_event_t, json&) {
            FENWICK_CHECK(depth <= deepest, "{}: lists and objects are nested more than {} deep", name, deepest);
            return true;
        });
    } catch (const json::parse_error& error) {
        fail("{}: not JSON: an error at byte {}", name, error.byte);
    } catch (const json::exception&) {
        fail("{}: not JSON: a number that is too large", name);
    }
}

// GPT-2's way to write bytes as printable characters: most of Latin-1 stands for itself, the others for U+0100 and up.
constexpr bool stands_for_itself(int byte) {
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}
std::array<char32_t, 256> byte_characters() {
    std::array<char32_t, 256> characters{};
    char32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte)
        characters[static_cast<std::size_t>(byte)] = stands_for_itself(byte) ? static_cast<char32_t>(byte) : next++;
    return characters;
}

// The bytes that a token of the vocabulary stands for; a token with other characters stands for its own.
class TokenBytes {
public:
    TokenBytes() {
        const auto characters = byte_characters();
        for (std::size_t byte = 0; byte < 256; ++byte) bytes_[characters[byte]] = static_cast<std::int16_t>(byte);
    }
    std::string of(std::string_view token, bool& all_bytes) const {
        std::string bytes;
        all_bytes = true;
        for (std::size_t at = 0; at < token.size();) {
            const std::size_t length = utf8_length(token.substr(at, 4));
            const char32_t c = length > 0 ? utf8_code_point(token.substr(at), length) : 0;
            if (c >= bytes_.size() || bytes_[c] < 0) {
                all_bytes = false;
                return std::string(token);
            }
            bytes += static_cast<char>(bytes_[c]);
            at += length;
        }
        return bytes;
    }

private:
    std::array<std::int16_t, 0x144> bytes_ = [] {
        std::array<std::int16_t, 0x144> none;
        none.fill(-1);
        return none;
    }();
};

class Reader {
public:
    Reader(const std::string& definition, const std::string& name) : name_(name), file_(parse(definition, name)) {
        parts_.definition = definition;
    }

    ByteLevelBpeParts read() {
        check(file_.is_object(), "a JSON object is needed");
        check(file_.contains("model"), "there is no model; a tokenizer.json has one");
        read_model();
        read_normalizer(value(file_, "normalizer"), 0);
        read_added_tokens();
        read_pre_tokenizer(value(file_, "pre_tokenizer"), true, 0);
        check(ends_in_byte_level_, "there is no pre_tokenizer ByteLevel; only byte-level BPE is supported");
        read_decoder(value(file_, "decoder"), 0);
        read_post_processor(value(file_, "post_processor"), 0);
        choose_end_of_document();
        return std::move(parts_);
    }

private:
    template <class... Args>
    [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
        fail("{}: {}", name_, fmt::format(format, std::forward<Args>(args)...));
    }
    template <class... Args>
    void check(bool condition, fmt::format_string<Args...> format, Args&&... args) const {
        if (!condition) refuse(format, std::forward<Args>(args)...);
    }

    // A member of an object, null where there is none.
    static const json& value(const json& object, const char* key) {
        static const json null;
        if (!object.is_object()) return null;
        const auto found = object.find(key);
        return found == object.end() ? null : *found;
    }
    bool flag(const json& object, const char* key, const std::string& where) const {
        const json& found = value(object, key);
        check(found.is_boolean(), "{}: '{}' must be true or false", where, key);
        return found.get<bool>();
    }
    bool flag(const json& object, const char* key, const std::string& where, bool otherwise) const {
        return value(object, key).is_null() ? otherwise : flag(object, key, where);
    }
    std::int32_t id_of(const json& number, std::string_view token) const {
        check(number.is_number_integer(), "token {} has the id {}; ids are whole numbers", shown(token), value_text(number));
        const bool fits =
            number.is_number_unsigned() ? number.get<std::uint64_t>() < most_ids : number.get<std::int64_t>() >= 0;
        check(fits, "token {} has the id {}; ids from 0 to {} are supported", shown(token), value_text(number),
              most_ids - 1);
        return number.get<std::int32_t>();
    }
    std::string type_of(const json& component, const char* where) const {
        check(component.is_object() && value(component, "type").is_string(), "{}: an object with a 'type' is needed", where);
        return component.at("type").get<std::string>();
    }
    // The members of a Sequence, under whatever key this kind of component keeps them.
    const json& members(const json& sequence, const char* key, const char* where, int depth) const {
        constexpr int deepest = 8;
        constexpr std::size_t most = 64;
        const json& list = value(sequence, key);
        check(list.is_array(), "{} Sequence: '{}' must be a list", where, key);
        check(depth < deepest && list.size() <= most, "{} Sequence: more than {} members or {} deep is not supported", where,
              most, deepest);
        return list;
    }

    void read_model() {
        const json& model = file_.at("model");
        check(model.is_object(), "model: an object is needed");
        if (model.contains("type"))
            check(type_of(model, "model") == "BPE", "model {} is not supported; BPE is", value_text(model.at("type")));
        const json& dropout = value(model, "dropout");
        check(dropout.is_null() || (dropout.is_number() && dropout.get<double>() == 0),
              "model: dropout is not supported, for the ids of a text must be the same each time");
        for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
            check(value(model, key).is_null() || value(model, key) == "", "model: {} is not supported", key);
        parts_.ignore_merges = flag(model, "ignore_merges", "model", false);
        read_vocabulary(value(model, "vocab"));
        read_merges(value(model, "merges"));
    }

    void read_vocabulary(const json& vocabulary) {
        check(vocabulary.is_object() && !vocabulary.empty(), "model: 'vocab' must be an object of tokens and their ids");
        const TokenBytes token_bytes;
        parts_.byte_ids.fill(-1);
        ids_.reserve(vocabulary.size());
        for (const auto& [token, number] : vocabulary.items()) {
            const std::int32_t id = id_of(number, token);
            claim(id, token);
            ids_.emplace(token, id);
            bool all_bytes = false;
            const std::string bytes = token_bytes.of(token, all_bytes);
            bytes_at(id) = bytes;
            if (!all_bytes || bytes.empty()) continue;
            if (bytes.size() == 1) parts_.byte_ids[static_cast<unsigned char>(bytes[0])] = id;
            if (parts_.ignore_merges) parts_.word_tokens.push_back(id);
        }
        for (std::size_t byte = 0; byte < 256; ++byte)
            check(parts_.byte_ids[byte] >= 0 || byte == 0xc0 || byte == 0xc1 || byte >= 0xf5,
                  "model: 'vocab' has no token for the byte 0x{:02X}; a byte-level BPE has one for each byte of UTF-8",
                  byte);
    }

    void claim(std::int32_t id, const std::string& token) {
        const auto [owner, is_new] = owners_.emplace(id, token);
        check(is_new, "tokens {} and {} both have the id {}", shown(owner->second), shown(token), id);
    }
    std::string& bytes_at(std::int32_t id) {
        const auto index = static_cast<std::size_t>(id);
        if (parts_.token_bytes.size() <= index) parts_.token_bytes.resize(index + 1);
        return parts_.token_bytes[index];
    }

    void read_merges(const json& merges) {
        check(merges.is_array(), "model: 'merges' must be a list of pairs of tokens");
        parts_.merges.reserve(merges.size());
        std::string joined;
        const auto id_in_merge = [&](const std::string& token) {
            const auto found = ids_.find(token);
            check(found != ids_.end(), "merge {}: token {} is not in the vocabulary", parts_.merges.size(), shown(token));
            return found->second;
        };
        for (const json& merge : merges) {
            std::string left, right;
            if (merge.is_string()) {
                const std::string& both = merge.get_ref<const std::string&>();
                const auto space = both.find(' ');
                check(space != std::string::npos && both.find(' ', space + 1) == std::string::npos,
                      "merge {} is {}; two tokens and a space between them are needed", parts_.merges.size(), shown(both));
                left = both.substr(0, space);
                right = both.substr(space + 1);
            } else {
                check(merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string(),
                      "merge {} is {}; a pair of tokens is needed", parts_.merges.size(), value_text(merge));
                left = merge[0].get<std::string>();
                right = merge[1].get<std::string>();
            }
            joined = left + right;
            parts_.merges.push_back({id_in_merge(left), id_in_merge(right), id_in_merge(joined)});
        }
    }

    void read_added_tokens() {
        const json& list = value(file_, "added_tokens");
        if (list.is_null()) return;
        check(list.is_array(), "'added_tokens' must be a list");
        std::unordered_map<std::string, bool> seen;
        for (const json& entry : list) {
            const json& content = value(entry, "content");
            check(content.is_string() && content != "", "added_tokens: each needs a 'content', some text");
            AddedToken token{.content = content.get<std::string>()};
            const std::string where = "added token " + shown(token.content);
            token.id = id_of(value(entry, "id"), token.content);
            token.single_word = flag(entry, "single_word", where, false);
            token.lstrip = flag(entry, "lstrip", where, false);
            token.rstrip = flag(entry, "rstrip", where, false);
            const bool special = flag(entry, "special", where, false);
            token.normalized = flag(entry, "normalized", where, !special);
            check(seen.emplace(token.content, true).second, "{} is there twice", where);
            if (const auto known = ids_.find(token.content); known != ids_.end())
                check(known->second == token.id, "{} has the id {}, and {} in the vocabulary", where, token.id,
                      known->second);
            else
                add_text(token);
            if (special) special_.push_back(token.content);
            ids_.emplace(token.content, token.id);
            parts_.added_tokens.push_back(std::move(token));
        }
    }

    // What the token decodes to, where the vocabulary does not say: its content, normalised where it is found so.
    void add_text(const AddedToken& token) {
        claim(token.id, token.content);
        std::string& bytes = bytes_at(token.id);
        if (token.normalized && parts_.nfc)
            append_nfc(token.content, bytes);
        else
            bytes = token.content;
    }

    void read_normalizer(const json& normalizer, int depth) {
        if (normalizer.is_null()) return;
        const std::string type = type_of(normalizer, "normalizer");
        if (type == "Sequence") {
            for (const json& member : members(normalizer, "normalizers", "normalizer", depth))
                read_normalizer(member, depth + 1);
            return;
        }
        check(type == "NFC", "normalizer {} is not supported; NFC is", shown(type));
        try {
            check_normalization_is_built();
        } catch (const Error& error) {
            refuse("{}", error.what());
        }
        parts_.nfc = true;
    }

    void read_pre_tokenizer(const json& pre_tokenizer, bool last, int depth) {
        check(!pre_tokenizer.is_null(),
              "there is no pre_tokenizer; only byte-level BPE, with pre_tokenizer ByteLevel, is supported");
        const std::string type = type_of(pre_tokenizer, "pre_tokenizer");
        if (type == "Sequence") {
            const json& list = members(pre_tokenizer, "pretokenizers", "pre_tokenizer", depth);
            for (std::size_t i = 0; i < list.size(); ++i)
                read_pre_tokenizer(list[i], last && i + 1 == list.size(), depth + 1);
            return;
        }
        check(type == "ByteLevel" || type == "Split" || type == "Digits",
              "pre_tokenizer {} is not supported; ByteLevel, Split, Digits and Sequence are", shown(type));
        PreTokenizer step;
        try {
            if (type == "ByteLevel") {
                // What would follow would see the characters that stand for bytes.
                check(last, "pre_tokenizer ByteLevel is supported as the last one only");
                ends_in_byte_level_ = true;
                step.prefix_space = flag(pre_tokenizer, "add_prefix_space", "pre_tokenizer ByteLevel");
                if (flag(pre_tokenizer, "use_regex", "pre_tokenizer ByteLevel", true))
                    step.regex = std::make_unique<Regex>(
                        R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)");
                if (!step.prefix_space && step.regex == nullptr) return;
            } else if (type == "Digits") {
                const bool individual = flag(pre_tokenizer, "individual_digits", "pre_tokenizer Digits", false);
                step.regex = std::make_unique<Regex>(individual ? R"(\p{N})" : R"(\p{N}+)");
            } else {
                read_split(pre_tokenizer, step);
            }
        } catch (const Error& error) {
            const std::string_view message = error.what();
            if (message.starts_with(name_ + ": ")) throw;
            if (type != "Split") refuse("pre_tokenizer {}: {}", type, message);
            refuse("pre_tokenizer Split, pattern {}: {}", value_text(pre_tokenizer.at("pattern").front()), message);
        }
        parts_.pre_tokenizers.push_back(std::move(step));
    }

    void read_split(const json& split, PreTokenizer& step) const {
        const json& pattern = value(split, "pattern");
        const json& behavior = value(split, "behavior");
        check(behavior.is_string(), "pre_tokenizer Split: there is no 'behavior'");
        const bool invert = flag(split, "invert", "pre_tokenizer Split", false);
        // What is no match is removed, in the other case what is one: a loss of text either way, but of none with the
        // patterns in use, for they match all of a text.
        step.matches_only = behavior == "Removed" && invert;
        check(behavior == "Isolated" || step.matches_only,
              "pre_tokenizer Split: behavior {}{} is not supported; Isolated is, and Removed with invert",
              value_text(behavior), invert ? " with invert" : "");
        const json& regex = value(pattern, "Regex");
        const json& text = value(pattern, "String");
        check(regex.is_string() != text.is_string(), "pre_tokenizer Split: 'pattern' must hold a 'Regex' or a 'String'");
        step.regex = std::make_unique<Regex>(regex.is_string() ? Regex(regex.get<std::string>())
                                                               : Regex::literal(text.get_ref<const std::string&>()));
    }

    void read_decoder(const json& decoder, int depth) const {
        if (decoder.is_null()) return;
        const std::string type = type_of(decoder, "decoder");
        if (type == "Sequence")
            for (const json& member : members(decoder, "decoders", "decoder", depth)) read_decoder(member, depth + 1);
        else
            check(type == "ByteLevel", "decoder {} is not supported; ByteLevel is", shown(type));
    }

    // All that are known only add special tokens; one that is not might change more.
    void read_post_processor(const json& processor, int depth) const {
        if (processor.is_null()) return;
        const std::string type = type_of(processor, "post_processor");
        if (type == "Sequence")
            for (const json& member : members(processor, "processors", "post_processor", depth))
                read_post_processor(member, depth + 1);
        else
            check(type == "ByteLevel" || type == "TemplateProcessing" || type == "BertProcessing" ||
                      type == "RobertaProcessing",
                  "post_processor {} is not supported; ByteLevel, TemplateProcessing, BertProcessing, RobertaProcessing and "
                  "Sequence are",
                  shown(type));
    }

    void choose_end_of_document() {
        const json& named = value(file_.at("model"), "end_of_document");
        if (!named.is_null()) {
            const auto found = named.is_string() ? ids_.find(named.get<std::string>()) : ids_.end();
            check(found != ids_.end(), "end of document {} is not a token of it", value_text(named));
            parts_.end_of_document = found->second;
            return;
        }
        static const std::vector<std::string> names = {"<|endoftext|>",
                                                       "<|end_of_text|>",
                                                       "</s>",
                                                       "<eos>",
                                                       "<|eos|>",
                                                       "[EOS]",
                                                       "<|end_of_document|>",
                                                       "<|end_of_sentence|>",
                                                       "<\uff5cend\u2581of\u2581sentence\uff5c>"};
        std::vector<std::string> found;
        std::copy_if(names.begin(), names.end(), std::back_inserter(found), [&](const std::string& name) {
            return std::find(special_.begin(), special_.end(), name) != special_.end();
        });
        if (found.empty())
            std::copy_if(names.begin(), names.end(), std::back_inserter(found),
                         [&](const std::string& name) { return ids_.contains(name); });
        check(!found.empty(), "no token is known to end a document; name one with --end-of-document");
        check(found.size() == 1, "{} and {} could end a document; name one with --end-of-document", shown(found[0]),
              shown(found.back()));
        parts_.end_of_document = ids_.at(found[0]);
    }

    const std::string& name_;
    json file_;
    ByteLevelBpeParts parts_;
    std::unordered_map<std::string, std::int32_t> ids_;     // of vocabulary and added tokens
    std::unordered_map<std::int32_t, std::string> owners_;  // the token of each id
    std::vector<std::string> special_;
    bool ends_in_byte_level_ = false;
};

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer_json(const std::string& definition, const std::string& name) {
    return make_byte_level_bpe(Reader(definition, name).read());
}

std::string with_end_of_document(const std::string& definition, const std::string& token, const std::string& name) {
    auto file = parse(definition, name);
    FENWICK_CHECK(file.is_object() && file.contains("model") && file["model"].is_object(),
                  "{}: there is no model; a tokenizer.json has one", name);
    file["model"]["end_of_document"] = token;
    return file.dump();
}

std::string tokenizer_json_of_gpt2(const std::string& merges_path, const std::string& vocabulary_path) {
    json vocabulary = parse(read_file(vocabulary_path), vocabulary_path);
    FENWICK_CHECK(vocabulary.is_object(), "{}: an object of tokens and their ids is needed", vocabulary_path);
    json merges = json::array();
    const std::string text = read_file(merges_path);
    std::string_view rest = text;
    for (std::size_t line = 1; !rest.empty(); ++line) {
        const auto end = std::min(rest.find('\n'), rest.size());
        std::string_view merge = rest.substr(0, end);
        rest.remove_prefix(std::min(end + 1, rest.size()));
        if (merge.ends_with('\r')) merge.remove_suffix(1);
        if (merge.empty() || (line == 1 && merge.starts_with("#version"))) continue;
        FENWICK_CHECK(utf8_prefix(merge) == merge.size(), "{}: line {} is not UTF-8", merges_path, line);
        merges.push_back(merge);
    }
    const json byte_level = {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
    const json model = {{"type", "BPE"},
                        {"dropout", nullptr},
                        {"unk_token", nullptr},
                        {"continuing_subword_prefix", nullptr},
                        {"end_of_word_suffix", nullptr},
                        {"fuse_unk", false},
                        {"byte_fallback", false},
                        {"vocab", std::move(vocabulary)},
                        {"merges", std::move(merges)}};
    return json{
        {"version", "1.0"},      {"truncation", nullptr},       {"padding", nullptr},        {"added_tokens", json::array()},
        {"normalizer", nullptr}, {"pre_tokenizer", byte_level}, {"post_processor", nullptr}, {"decoder", byte_level},
        {"model", model}}
        .dump();
}

}  // namespace fenwick::data
