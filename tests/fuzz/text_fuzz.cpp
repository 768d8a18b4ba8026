// libFuzzer target: any bytes through byte-level tokenizers of every kind. Ids are in the vocabulary, the text comes back
// from those that lose nothing, and pieces, cut wherever safe_cut allows, have the ids of the whole. The first byte chooses
// the tokenizer, the second and third the windows that cuts are found from.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/random.h"
#include "data/tokenizer_json.h"
#include "support/small_tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace fenwick;
    static const auto tokenizers = [] {
        std::vector<std::pair<test::SmallTokenizer, std::unique_ptr<data::Tokenizer>>> made;
        for (auto& [name, small] : test::small_tokenizers())
            made.emplace_back(small, data::make_tokenizer_json(small.file.dump(), name));
        return made;
    }();
    if (size < 3) return 0;
    const auto& [small, tokenizer] = tokenizers[data[0] % tokenizers.size()];
    const std::string text(reinterpret_cast<const char*>(data) + 3, size - 3);
    std::vector<std::int32_t> ids, parts;
    tokenizer->encode(text, ids);
    for (const auto id : ids)
        if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
    if (small.lossless && tokenizer->decode(ids.data(), static_cast<std::int64_t>(ids.size())) != text) std::abort();

    Random random(data[1] + 256u * data[2]);
    std::string_view rest = text;
    while (!rest.empty()) {
        const std::size_t window = 1 + random.below(rest.size()), limit = 1 + random.below(window);
        std::size_t cut = tokenizer->safe_cut(rest.substr(0, window), limit);
        if (cut > limit) std::abort();
        if (cut == 0 && window == rest.size()) cut = window;
        if (cut == 0 && random.below(2) > 0) continue;
        if (cut == 0) cut = rest.size();
        tokenizer->encode(rest.substr(0, cut), parts);
        rest.remove_prefix(cut);
    }
    if (parts != ids) std::abort();
    return 0;
}
