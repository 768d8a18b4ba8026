// Tokens found in the text as they are, before it is parted into words: added and special tokens of tokenizer.json.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/regex.h"

namespace fenwick::data {

struct AddedToken {
    std::int32_t id = 0;
    std::string content;
    bool single_word = false;  // only where no word character stands beside it
    bool lstrip = false;       // takes the white space before it
    bool rstrip = false;       // takes the white space after it
    bool normalized = false;   // found in the normalised text
};

// Finds tokens from left to right, of those at one place the longest. A token that its flags forbid is passed over, with
// no shorter one in its place.
class AddedTokens {
public:
    AddedTokens() = default;
    explicit AddedTokens(std::vector<AddedToken> tokens);  // contents not empty; of two with one content the first counts

    // Calls text(part) and token(id) in order; parts are never empty.
    template <class OnText, class OnToken>
    void split(std::string_view text, const OnText& on_text, const OnToken& on_token) const {
        std::size_t done = 0;
        Place place;
        for (std::size_t from = 0; find(text, from, done, place); from = place.match_end) {
            if (done < place.begin) on_text(text.substr(done, place.begin - done));
            on_token(place.id);
            done = place.end;
        }
        if (done < text.size()) on_text(text.substr(done));
    }

    std::size_t longest() const { return longest_; }     // bytes of the longest content
    bool looks_around() const { return looks_around_; }  // whether any token has single_word, lstrip or rstrip
    bool looks_right() const { return looks_right_; }    // single_word or rstrip
    // Whether any content has a visible ASCII character followed by a space.
    bool holds_cut_before_space() const;

private:
    struct Node {
        std::int32_t token = -1;
        std::vector<std::pair<unsigned char, std::int32_t>> next;
    };
    struct Place {
        std::size_t begin = 0, end = 0;  // with the white space it takes
        std::size_t match_end = 0;
        std::int32_t id = 0;
    };
    // The next token whose content begins at or after `from`; white space is taken back to `done`.
    bool find(std::string_view text, std::size_t from, std::size_t done, Place& place) const;
    bool is_word_character(std::string_view character) const;

    std::vector<AddedToken> tokens_;
    std::vector<Node> nodes_ = std::vector<Node>(1);
    std::array<bool, 256> begins_{};
    std::unique_ptr<Regex> word_character_;
    std::size_t longest_ = 0;
    bool looks_around_ = false, looks_right_ = false;
};

}  // namespace fenwick::data
