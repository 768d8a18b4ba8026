#include "data/added_tokens.h"

#include <algorithm>

#include "base/utf8.h"

namespace fenwick::data {
namespace {

// The character that ends `text`, "" where none does.
std::string_view last_character(std::string_view text) {
    for (std::size_t length = 1; length <= std::min<std::size_t>(text.size(), 4); ++length)
        if (utf8_length(text.substr(text.size() - length)) == length) return text.substr(text.size() - length);
    return {};
}
std::string_view first_character(std::string_view text) { return text.substr(0, utf8_length(text.substr(0, 4))); }
bool is_space_character(std::string_view character) {
    return !character.empty() && is_white_space(utf8_code_point(character, character.size()));
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
        const AddedToken& token = tokens_[i];
        std::size_t node = 0;
        for (const char c : token.content) {
            const auto byte = static_cast<unsigned char>(c);
            auto& edges = nodes_[node].next;
            const auto edge =
                std::find_if(edges.begin(), edges.end(), [&](const auto& known) { return known.first == byte; });
            if (edge != edges.end()) {
                node = static_cast<std::size_t>(edge->second);
                continue;
            }
            edges.emplace_back(byte, static_cast<std::int32_t>(nodes_.size()));
            node = nodes_.size();
            nodes_.emplace_back();
        }
        if (nodes_[node].token < 0) nodes_[node].token = static_cast<std::int32_t>(i);
        begins_[static_cast<unsigned char>(token.content.front())] = true;
        longest_ = std::max(longest_, token.content.size());
        looks_right_ = looks_right_ || token.single_word || token.rstrip;
        looks_around_ = looks_around_ || looks_right_ || token.lstrip;
        if (token.single_word && word_character_ == nullptr)
            word_character_ = std::make_unique<Regex>(Regex::word_character());
    }
}

bool AddedTokens::holds_cut_before_space() const {
    return std::any_of(tokens_.begin(), tokens_.end(), [](const AddedToken& token) {
        for (std::size_t i = 1; i < token.content.size(); ++i)
            if (token.content[i] == ' ' && token.content[i - 1] > ' ' && token.content[i - 1] < 0x7f) return true;
        return false;
    });
}

bool AddedTokens::is_word_character(std::string_view character) const {
    if (character.empty()) return false;
    Regex::Matcher::Match match;
    return Regex::Matcher(*word_character_).find(character, 0, false, match) == Regex::Matcher::Result::match;
}

bool AddedTokens::find(std::string_view text, std::size_t from, std::size_t done, Place& place) const {
    if (tokens_.empty()) return false;
    for (std::size_t at = from; at < text.size(); ++at) {
        if (!begins_[static_cast<unsigned char>(text[at])]) continue;
        const AddedToken* found = nullptr;
        std::size_t end = 0, node = 0;
        for (std::size_t i = at; i < text.size(); ++i) {
            const auto& edges = nodes_[node].next;
            const auto byte = static_cast<unsigned char>(text[i]);
            const auto edge =
                std::find_if(edges.begin(), edges.end(), [&](const auto& known) { return known.first == byte; });
            if (edge == edges.end()) break;
            node = static_cast<std::size_t>(edge->second);
            if (nodes_[node].token < 0) continue;
            found = &tokens_[static_cast<std::size_t>(nodes_[node].token)];
            end = i + 1;
        }
        if (found == nullptr) continue;
        if (found->single_word && (is_word_character(last_character(text.substr(0, at))) ||
                                   is_word_character(first_character(text.substr(end))))) {
            at = end - 1;
            continue;
        }
        place = {at, end, end, found->id};
        if (found->lstrip)
            for (auto space = last_character(text.substr(0, place.begin)); place.begin > done && is_space_character(space);
                 space = last_character(text.substr(0, place.begin)))
                place.begin -= space.size();
        if (found->rstrip)
            for (auto space = first_character(text.substr(place.end)); is_space_character(space);
                 space = first_character(text.substr(place.end)))
                place.end += space.size();
        return true;
    }
    return false;
}

}  // namespace fenwick::data
