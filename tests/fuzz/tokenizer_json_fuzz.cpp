// libFuzzer target: whatever a tokenizer.json says, it makes a tokenizer or throws Error. A tokenizer has ids in its
// vocabulary for any text, gives back the text unless the file asks for a loss, and gives its pieces the ids of the whole.
// The input is the file itself, or, more often, members to be put into a small file that is right (a JSON merge patch).
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"
#include "data/tokenizer_json.h"
#include "support/small_tokenizer.h"

namespace {

using namespace fenwick;
using nlohmann::json;

bool has_flag(const json& file, const char* flag) {
    const auto tokens = file.find("added_tokens");
    return tokens != file.end() && tokens->is_array() && std::any_of(tokens->begin(), tokens->end(), [&](const json& token) {
               return token.is_object() && token.contains(flag) && token[flag] == true;
           });
}

// What of a file may change the text.
bool may_lose_text(const json& file) {
    const std::string pre_tokenizer = file.contains("pre_tokenizer") ? file["pre_tokenizer"].dump() : "";
    bool bytes_as_added_token = false;  // a token that reads as bytes although it is found by its characters
    if (file.contains("added_tokens") && file["added_tokens"].is_array())
        for (const json& token : file["added_tokens"]) {
            const std::string content = token.value("content", "");
            bytes_as_added_token =
                bytes_as_added_token || std::any_of(content.begin(), content.end(), [](char c) { return (c & 0x80) != 0; });
        }
    return (file.contains("normalizer") && !file["normalizer"].is_null()) || has_flag(file, "lstrip") ||
           has_flag(file, "rstrip") || bytes_as_added_token ||
           pre_tokenizer.find("\"add_prefix_space\":true") != std::string::npos ||
           pre_tokenizer.find("Removed") != std::string::npos;
}

void use(const data::Tokenizer& tokenizer, const std::string& text, bool lossless) {
    std::vector<std::int32_t> ids, parts;
    tokenizer.encode(text, ids);
    for (const auto id : ids)
        if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
    const std::string back = tokenizer.decode(ids.data(), static_cast<std::int64_t>(ids.size()));
    if (lossless && back != text) std::abort();
    std::string_view rest = text;
    while (!rest.empty()) {
        std::size_t cut = tokenizer.safe_cut(rest, std::min<std::size_t>(rest.size(), 20));
        if (cut > 20) std::abort();
        if (cut == 0) cut = rest.size();
        tokenizer.encode(rest.substr(0, cut), parts);
        rest.remove_prefix(cut);
    }
    if (parts != ids) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const json small = test::small_tokenizer(test::byte_level(true));
    static const std::string sample = "The  then 1234 nai\u0308ve\u00e9\n\n \u65e5\u672c <|endoftext|>'s!! \xff\xfe a";
    const std::string input(reinterpret_cast<const char*>(data), std::min<std::size_t>(size, 4096));
    try {
        data::make_tokenizer_json(input, "fuzz");
    } catch (const Error&) {
    }
    const json patch = json::parse(input, nullptr, false);
    if (!patch.is_object()) return 0;
    json file = small;
    file.merge_patch(patch);
    try {
        const auto tokenizer = data::make_tokenizer_json(file.dump(-1, ' ', false, json::error_handler_t::replace), "fuzz");
        const bool lossless = !may_lose_text(file);
        use(*tokenizer, sample, lossless);
        use(*tokenizer, input, lossless);
    } catch (const Error&) {
    }
    return 0;
}
