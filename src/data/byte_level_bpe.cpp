#include "data/byte_level_bpe.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/error.h"
#include "base/utf8.h"
#include "data/normalization.h"

namespace fenwick::data {
namespace {

// The ids of words met before. Words repeat so often that this decides the speed. A place holds one word, of a size that
// most have; the newest stays.
class WordCache {
public:
    // The ids of `word`, or from encode(), which appends them to its argument.
    template <class Encode>
    void append(std::string_view word, std::vector<std::int32_t>& ids, const Encode& encode) {
        if (word.size() > sizeof(Entry::text)) {
            encode(ids);
            return;
        }
        Entry& entry = entries_[hash_of(word) >> (64 - log2_entries)];
        if (entry.size == word.size() && std::memcmp(entry.text, word.data(), word.size()) == 0) {
            ids.insert(ids.end(), entry.ids, entry.ids + entry.count);
            return;
        }
        const std::size_t begin = ids.size();
        encode(ids);
        const std::size_t count = ids.size() - begin;
        if (count > std::size(entry.ids)) return;
        entry.size = static_cast<std::uint8_t>(word.size());
        entry.count = static_cast<std::uint8_t>(count);
        std::memcpy(entry.text, word.data(), word.size());
        std::copy_n(ids.data() + begin, count, entry.ids);
    }

private:
    static constexpr int log2_entries = 15;  // 2 MiB
    struct alignas(64) Entry {
        std::int32_t ids[8];
        char text[30];
        std::uint8_t size, count;
    };
    static std::uint64_t hash_of(std::string_view word) {
        std::uint64_t hash = word.size();
        for (std::size_t at = 0; at < word.size(); at += 8) {
            std::uint64_t block = 0;
            std::memcpy(&block, word.data() + at, std::min<std::size_t>(8, word.size() - at));
            hash = (hash ^ block) * 0x9e3779b97f4a7c15ull;
            hash ^= hash >> 32;
        }
        return hash * 0x9e3779b97f4a7c15ull;
    }
    std::vector<Entry> entries_ = std::vector<Entry>(std::size_t{1} << log2_entries);
};

class ByteLevelBpe final : public Tokenizer {
public:
    explicit ByteLevelBpe(ByteLevelBpeParts parts)
        : parts_(std::move(parts)),
          encoder_(parts_.byte_ids, parts_.merges),
          special_(tokens_found(false)),
          normalized_(tokens_found(true)) {
        parts_.merges = {};
        for (const auto id : parts_.word_tokens) words_.emplace(parts_.token_bytes[static_cast<std::size_t>(id)], id);
        cuts_before_spaces_ = find_cuts_before_spaces();
    }

    std::string kind() const override { return "tokenizer.json"; }
    std::int64_t vocab_size() const override { return static_cast<std::int64_t>(parts_.token_bytes.size()); }
    std::int32_t end_of_document() const override { return parts_.end_of_document; }
    std::string definition() const override { return parts_.definition; }
    bool lossless() const override {
        const auto strips = [](const AddedToken& token) { return token.lstrip || token.rstrip; };
        const auto changes = [](const PreTokenizer& step) { return step.prefix_space || step.matches_only; };
        return !parts_.nfc && std::none_of(parts_.added_tokens.begin(), parts_.added_tokens.end(), strips) &&
               std::none_of(parts_.pre_tokenizers.begin(), parts_.pre_tokenizers.end(), changes) &&
               std::find(parts_.byte_ids.begin(), parts_.byte_ids.end(), -1) == parts_.byte_ids.end();
    }

    void encode(std::string_view text, std::vector<std::int32_t>& ids) const override {
        const Lease lease(*this);
        Workspace& workspace = *lease.workspace;
        special_.split(
            text, [&](std::string_view part) { encode_part(part, workspace, ids); },
            [&](std::int32_t id) { ids.push_back(id); });
    }

    std::string decode(const std::int32_t* ids, std::int64_t count) const override {
        std::string text;
        for (std::int64_t i = 0; i < count; ++i) {
            FENWICK_CHECK(ids[i] >= 0 && ids[i] < vocab_size(), "[decode] token {} is outside the vocabulary of {}", ids[i],
                          vocab_size());
            text += parts_.token_bytes[static_cast<std::size_t>(ids[i])];
        }
        return text;
    }

    std::size_t safe_cut(std::string_view text, std::size_t limit) const override {
        if (text.empty()) return 0;
        if (cuts_before_spaces_)
            for (std::size_t at = std::min(limit, text.size() - 1); at > 0; --at)
                if (text[at] == ' ' && text[at - 1] > ' ' && text[at - 1] < 0x7f) return at;
        const Lease lease(*this);
        return cut_between_words(text, limit, *lease.workspace);
    }

private:
    // What one thread writes to.
    struct Workspace {
        explicit Workspace(const std::vector<PreTokenizer>& steps) : with_space(steps.size()) {
            for (const auto& step : steps)
                matchers.push_back(step.regex ? std::optional<Regex::Matcher>(*step.regex) : std::nullopt);
        }
        WordCache cache;
        BytePairEncoder::Workspace encoder;
        std::vector<std::optional<Regex::Matcher>> matchers;  // of each step
        std::vector<std::string> with_space;                  // of each step: its text behind a space
        std::string normalized;
        std::vector<Regex::Matcher::Match> matches;
    };
    // Takes a workspace that no thread uses, or makes one, and gives it back.
    struct Lease {
        explicit Lease(const ByteLevelBpe& owner) : owner(owner) {
            {
                const std::lock_guard lock(owner.mutex_);
                if (!owner.unused_.empty()) {
                    workspace = std::move(owner.unused_.back());
                    owner.unused_.pop_back();
                }
            }
            if (workspace == nullptr) workspace = std::make_unique<Workspace>(owner.parts_.pre_tokenizers);
        }
        ~Lease() {
            const std::lock_guard lock(owner.mutex_);
            owner.unused_.push_back(std::move(workspace));
        }
        Lease(const Lease&) = delete;
        Lease& operator=(const Lease&) = delete;
        const ByteLevelBpe& owner;
        std::unique_ptr<Workspace> workspace;
    };

    AddedTokens tokens_found(bool normalized) const {
        std::vector<AddedToken> tokens;
        for (const AddedToken& token : parts_.added_tokens) {
            if (token.normalized != normalized) continue;
            tokens.push_back(token);
            if (!normalized || !parts_.nfc) continue;
            tokens.back().content.clear();
            append_nfc(token.content, tokens.back().content);
        }
        return AddedTokens(std::move(tokens));
    }

    // Between special tokens.
    void encode_part(std::string_view text, Workspace& workspace, std::vector<std::int32_t>& ids) const {
        if (parts_.nfc) {
            workspace.normalized.clear();
            for_each_run(text, [&](std::string_view run, bool valid) {
                if (valid)
                    append_nfc(run, workspace.normalized);
                else
                    workspace.normalized += run;
            });
            text = workspace.normalized;
        }
        normalized_.split(
            text, [&](std::string_view part) { encode_text(part, workspace, ids); },
            [&](std::int32_t id) { ids.push_back(id); });
    }

    // Between added tokens.
    void encode_text(std::string_view text, Workspace& workspace, std::vector<std::int32_t>& ids) const {
        bool first = true;
        for_each_run(text, [&](std::string_view run, bool valid) {
            if (valid)
                encode_words(run, first, 0, workspace, ids);
            else
                encode_word(with_known_bytes(run), workspace, ids);
            first = false;
        });
    }

    // Bytes that no token stands for become U+FFFD, which the files that lack them make of invalid text elsewhere.
    std::string with_known_bytes(std::string_view text) const {
        std::string known;
        for (const char c : text)
            if (parts_.byte_ids[static_cast<unsigned char>(c)] < 0)
                known += "\xEF\xBF\xBD";
            else
                known += c;
        return known;
    }

    // Calls use(run, valid) for the longest runs of valid and of invalid UTF-8.
    template <class Use>
    static void for_each_run(std::string_view text, const Use& use) {
        while (!text.empty()) {
            std::size_t end = utf8_prefix(text);
            const bool valid = end > 0;
            if (!valid)
                while (end < text.size() && utf8_length(text.substr(end, 4)) == 0) ++end;
            use(text.substr(0, end), valid);
            text.remove_prefix(end);
        }
    }

    // From `step` on. `begins`: nothing stands before the text.
    void encode_words(std::string_view text, bool begins, std::size_t step, Workspace& workspace,
                      std::vector<std::int32_t>& ids) const {
        if (step == parts_.pre_tokenizers.size()) {
            encode_word(text, workspace, ids);
            return;
        }
        const PreTokenizer& pre_tokenizer = parts_.pre_tokenizers[step];
        if (pre_tokenizer.prefix_space && begins && text.front() != ' ') {
            std::string& with_space = workspace.with_space[step];
            with_space.assign(1, ' ').append(text);
            text = with_space;
        }
        if (pre_tokenizer.regex == nullptr) {
            encode_words(text, true, step + 1, workspace, ids);
            return;
        }
        for_each_word(text, pre_tokenizer, *workspace.matchers[step],
                      [&](std::string_view word) { encode_words(word, true, step + 1, workspace, ids); });
    }

    template <class Use>
    static void for_each_word(std::string_view text, const PreTokenizer& pre_tokenizer, Regex::Matcher& matcher,
                              const Use& use) {
        Words words(text, matcher, false);
        std::size_t done = 0;
        while (words.next()) {
            if (words.match.begin > done && !pre_tokenizer.matches_only) use(text.substr(done, words.match.begin - done));
            if (words.match.end > words.match.begin)
                use(text.substr(words.match.begin, words.match.end - words.match.begin));
            done = words.match.end;
        }
        if (done < text.size() && !pre_tokenizer.matches_only) use(text.substr(done));
    }

    // The matches of a regex one after another. An empty one right behind another does not count.
    struct Words {
        Words(std::string_view text, Regex::Matcher& matcher, bool more_follows)
            : text(text), matcher(matcher), more_follows(more_follows) {}
        bool next() {
            while (from <= text.size()) {
                if (matcher.find(text, from, more_follows, match) != Regex::Matcher::Result::match) return false;
                from = match.end;
                const bool counts = match.end > match.begin || match.end != last_end;
                last_end = match.end;
                if (counts) return true;
                if (from == text.size()) return false;
                from += utf8_length(text.substr(from, 4));
            }
            return false;
        }
        std::string_view text;
        Regex::Matcher& matcher;
        bool more_follows;
        Regex::Matcher::Match match;
        std::size_t from = 0, last_end = ~std::size_t{0};
    };

    void encode_word(std::string_view word, Workspace& workspace, std::vector<std::int32_t>& ids) const {
        workspace.cache.append(word, ids, [&](std::vector<std::int32_t>& to) {
            if (parts_.ignore_merges)
                if (const auto found = words_.find(word); found != words_.end()) {
                    to.push_back(found->second);
                    return;
                }
            encoder_.encode(word, workspace.encoder, to);
        });
    }

    // Whether every text may be cut between a visible ASCII character and a space: none of the regexes has a match that
    // holds both (a space stands at the start of a match or among white space), nor looks farther than one character behind
    // a match of white space; and no added token reaches over such a place or takes the space.
    bool find_cuts_before_spaces() const {
        static const std::vector<std::string> known = {
            // GPT-2, GPT-NeoX, RoBERTa, OLMo...
            R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
            // Llama 3, GPT-4
            R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
            // Qwen 2
            R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
            // GPT-4o
            R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
            R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
            R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
            // Digits
            R"(\p{N})", R"(\p{N}+)", R"(\p{N}{1,3})"};
        if (special_.looks_right() || normalized_.looks_right() || special_.holds_cut_before_space() ||
            normalized_.holds_cut_before_space())
            return false;
        bool any = false;
        for (const PreTokenizer& step : parts_.pre_tokenizers) {
            if (step.regex == nullptr) continue;
            if (std::find(known.begin(), known.end(), step.regex->pattern()) == known.end()) return false;
            any = any || step.regex->pattern().find("\\s") != std::string::npos;
        }
        return any;
    }

    // A cut at an edge of an added token, of bytes that are not UTF-8, or of a match of the first regex that is the same
    // whatever follows: found by matching as if more text followed, and checked by matching what is before the cut as if
    // nothing did. From the cut on the regex matches as it does in the whole, for it does not look behind.
    std::size_t cut_between_words(std::string_view text, std::size_t limit, Workspace& workspace) const {
        std::size_t step = 0;
        while (step < parts_.pre_tokenizers.size() && parts_.pre_tokenizers[step].regex == nullptr) ++step;
        if (step == parts_.pre_tokenizers.size() || parts_.pre_tokenizers[step].regex->looks_behind() ||
            special_.looks_around() || normalized_.looks_around())
            return 0;
        for (const PreTokenizer& pre_tokenizer : parts_.pre_tokenizers)
            if (pre_tokenizer.prefix_space) return 0;

        // Behind `end` an added token may begin that is not wholly seen, a character may be incomplete, and the normal form
        // may be another text.
        const auto without = [](std::size_t size, std::size_t bytes) { return size > bytes ? size - bytes : 0; };
        std::size_t end = without(parts_.nfc ? nfc_prefix(text) : text.size(), without(normalized_.longest(), 1));
        end = std::min(end, without(text.size(), std::max<std::size_t>(special_.longest(), 4) - 1));
        const auto may_begin = [&](std::size_t at) {
            if (!parts_.nfc || at >= text.size()) return at < text.size();
            const std::size_t length = utf8_length(text.substr(at, 4));
            return length == 0 || starts_nfc_part(utf8_code_point(text.substr(at), length));
        };

        std::size_t cut = 0;
        const auto offer = [&](std::size_t at) {
            if (at > cut && at <= limit && at <= end && may_begin(at)) cut = at;
        };
        const auto in_run = [&](std::string_view run, bool valid) {
            const auto begin = static_cast<std::size_t>(run.data() - text.data());
            if (begin >= end || begin > limit) return;
            offer(begin);
            const bool open = begin + run.size() >= end;
            if (!open) offer(begin + run.size());
            if (!valid || begin + run.size() <= cut) return;
            run = run.substr(0, utf8_prefix(run.substr(0, end - begin)));  // `end` may be within a character
            Regex::Matcher& matcher = *workspace.matchers[step];
            auto& matches = workspace.matches;
            matches.clear();
            for (Words words(run, matcher, open); begin + words.from <= limit && words.next();)
                matches.push_back(words.match);
            int attempts = 8;
            for (auto last = matches.rbegin(); last != matches.rend() && attempts > 0; ++last)
                for (const std::size_t at : {last->end, last->begin}) {
                    if (at == 0 || begin + at <= cut || begin + at > limit || !may_begin(begin + at)) continue;
                    if (same_matches(run.substr(0, at), matches, matcher)) {
                        cut = begin + at;
                        return;
                    }
                    if (--attempts == 0) return;
                }
        };
        const auto in_part = [&](std::string_view part) { for_each_run(part, in_run); };
        special_.split(
            text, [&](std::string_view part) { normalized_.split(part, in_part, [](std::int32_t) {}); },
            [](std::int32_t) {});
        return cut;
    }

    // Whether the matches of `text` by itself are those of `matches` that begin in it.
    static bool same_matches(std::string_view text, const std::vector<Regex::Matcher::Match>& matches,
                             Regex::Matcher& matcher) {
        std::size_t known = 0;
        for (Words words(text, matcher, false); words.next() && words.match.begin < text.size(); ++known)
            if (known == matches.size() || matches[known].begin != words.match.begin ||
                matches[known].end != words.match.end)
                return false;
        return known == matches.size() || matches[known].begin >= text.size();
    }

    ByteLevelBpeParts parts_;
    BytePairEncoder encoder_;
    AddedTokens special_, normalized_;
    std::unordered_map<std::string_view, std::int32_t> words_;  // with ignore_merges
    bool cuts_before_spaces_ = false;
    mutable std::mutex mutex_;
    mutable std::vector<std::unique_ptr<Workspace>> unused_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_byte_level_bpe(ByteLevelBpeParts parts) {
    return std::make_unique<ByteLevelBpe>(std::move(parts));
}

}  // namespace fenwick::data
