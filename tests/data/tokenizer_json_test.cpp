#include "data/tokenizer_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/files.h"
#include "support/small_tokenizer.h"
#include "support/temporary_folder.h"
#include "support/tokenizer_check.h"

namespace fenwick::data {
namespace {

using nlohmann::json;
using test::byte_level;
using test::decode;
using test::encode;
using test::error_of;
using test::small_tokenizer;
using testing::HasSubstr;

#ifdef FENWICK_HAVE_PCRE2
class TokenizerJson : public testing::Test {};
#else
class TokenizerJson : public testing::Test {
    void SetUp() override { GTEST_SKIP() << "built without PCRE2"; }
};
TEST(WithoutPcre2, ATokenizerJsonIsRefusedByTheNameOfThePackage) {
    EXPECT_THAT(error_of([] { make_tokenizer_json(small_tokenizer(byte_level(true)).dump(), "a.json"); }),
                "a.json: pre_tokenizer ByteLevel: regular expressions need PCRE2, which this build was made without; "
                "install libpcre2-dev and "
                "build again");
}
#endif

TEST_F(TokenizerJson, MalformedFilesGiveOneLine) {
    const json good = small_tokenizer(byte_level(true), {"ab", "abc"});
    ASSERT_EQ(error_of([&] { make_tokenizer_json(good.dump(), "a.json"); }), "");
    const auto split_with = [](const char* behavior, bool invert, const json& pattern) {
        return test::sequence(
            {{{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", invert}}, byte_level(false)});
    };
    struct Case {
        std::string message;
        std::function<void(json&)> damage;
    };
    const std::vector<Case> cases = {
        // Components
        {"model 'WordPiece' is not supported; BPE is", [](json& j) { j["model"]["type"] = "WordPiece"; }},
        {"model 'Unigram' is not supported; BPE is", [](json& j) { j["model"]["type"] = "Unigram"; }},
        {"model: an object with a 'type' is needed", [](json& j) { j["model"]["type"] = 3; }},
        {"model: dropout is not supported, for the ids of a text must be the same each time",
         [](json& j) { j["model"]["dropout"] = 0.1; }},
        {"model: end_of_word_suffix is not supported", [](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }},
        {"model: continuing_subword_prefix is not supported",
         [](json& j) { j["model"]["continuing_subword_prefix"] = "##"; }},
        {"normalizer 'Lowercase' is not supported; NFC is",
         [](json& j) {
             j["normalizer"] = {{"type", "Lowercase"}};
         }},
        {"normalizer 'NFKC' is not supported; NFC is",
         [](json& j) {
             j["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", "NFKC"}}}}};
         }},
        {"pre_tokenizer 'Metaspace' is not supported; ByteLevel, Split, Digits and Sequence are",
         [](json& j) {
             j["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "_"}};
         }},
        {"there is no pre_tokenizer; only byte-level BPE, with pre_tokenizer ByteLevel, is supported",
         [](json& j) { j.erase("pre_tokenizer"); }},
        {"there is no pre_tokenizer ByteLevel; only byte-level BPE is supported",
         [](json& j) { j["pre_tokenizer"] = test::split("a"); }},
        {"pre_tokenizer ByteLevel is supported as the last one only",
         [](json& j) {
             j["pre_tokenizer"] = test::sequence({byte_level(true), test::split("a")});
         }},
        {"pre_tokenizer Split: behavior 'MergedWithNext' is not supported; Isolated is, and Removed with invert",
         [&](json& j) {
             j["pre_tokenizer"] = split_with("MergedWithNext", false, {{"Regex", "a"}});
         }},
        {"pre_tokenizer Split: behavior 'Removed' is not supported; Isolated is, and Removed with invert",
         [&](json& j) {
             j["pre_tokenizer"] = split_with("Removed", false, {{"Regex", "a"}});
         }},
        {"pre_tokenizer Split: 'pattern' must hold a 'Regex' or a 'String'",
         [&](json& j) { j["pre_tokenizer"] = split_with("Isolated", false, "a"); }},
        {"pre_tokenizer Split, pattern '(': missing closing parenthesis",
         [](json& j) {
             j["pre_tokenizer"] = test::sequence({test::split("("), byte_level(false)});
         }},
        {"pre_tokenizer Split, pattern '\\\\w': '\\w' at byte 0 is not supported",
         [](json& j) {
             j["pre_tokenizer"] = test::sequence({test::split("\\w"), byte_level(false)});
         }},
        {"decoder 'WordPiece' is not supported; ByteLevel is",
         [](json& j) {
             j["decoder"] = {{"type", "WordPiece"}};
         }},
        {"post_processor 'Odd' is not supported",
         [](json& j) {
             j["post_processor"] = {{"type", "Odd"}};
         }},
        // Types
        {"there is no model; a tokenizer.json has one", [](json& j) { j.erase("model"); }},
        {"model: an object is needed", [](json& j) { j["model"] = json::array(); }},
        {"model: 'ignore_merges' must be true or false", [](json& j) { j["model"]["ignore_merges"] = "yes"; }},
        {"pre_tokenizer ByteLevel: 'add_prefix_space' must be true or false",
         [](json& j) { j["pre_tokenizer"].erase("add_prefix_space"); }},
        {"pre_tokenizer: an object with a 'type' is needed", [](json& j) { j["pre_tokenizer"] = "ByteLevel"; }},
        {"pre_tokenizer Sequence: 'pretokenizers' must be a list",
         [](json& j) {
             j["pre_tokenizer"] = {{"type", "Sequence"}};
         }},
        {"pre_tokenizer Sequence: more than 64 members or 8 deep is not supported",
         [](json& j) { j["pre_tokenizer"] = test::sequence(std::vector<json>(65, byte_level(false))); }},
        {"pre_tokenizer Sequence: more than 64 members or 8 deep is not supported",
         [](json& j) {
             for (int i = 0; i < 9; ++i) j["pre_tokenizer"] = test::sequence({j["pre_tokenizer"]});
         }},
        {"'added_tokens' must be a list", [](json& j) { j["added_tokens"] = 3; }},
        {"added_tokens: each needs a 'content', some text", [](json& j) { j["added_tokens"][0]["content"] = ""; }},
        {"added_tokens: each needs a 'content', some text", [](json& j) { j["added_tokens"][0] = "<|endoftext|>"; }},
        {"added token '<|endoftext|>': 'lstrip' must be true or false", [](json& j) { j["added_tokens"][0]["lstrip"] = 1; }},
        {"added token '<|endoftext|>' is there twice", [](json& j) { j["added_tokens"].push_back(j["added_tokens"][0]); }},
        // Ids
        {"model: 'vocab' must be an object of tokens and their ids", [](json& j) { j["model"]["vocab"] = json::array(); }},
        {"model: 'vocab' must be an object of tokens and their ids", [](json& j) { j["model"]["vocab"] = json::object(); }},
        {"token 'abc' has the id -1; ids from 0 to 2097151 are supported", [](json& j) { j["model"]["vocab"]["abc"] = -1; }},
        {"token 'abc' has the id 2097152; ids from 0 to 2097151 are supported",
         [](json& j) { j["model"]["vocab"]["abc"] = 2097152; }},
        {"token 'abc' has the id 18446744073709551615; ids from 0 to",
         [](json& j) { j["model"]["vocab"]["abc"] = ~std::uint64_t{0}; }},
        {"token 'abc' has the id 1.5; ids are whole numbers", [](json& j) { j["model"]["vocab"]["abc"] = 1.5; }},
        {"token 'abc' has the id '7'; ids are whole numbers", [](json& j) { j["model"]["vocab"]["abc"] = "7"; }},
        {"token 'abc' has the id a list; ids are whole numbers", [](json& j) { j["model"]["vocab"]["abc"] = {1}; }},
        {"tokens 'ab' and 'abc' both have the id 256", [](json& j) { j["model"]["vocab"]["abc"] = 256; }},
        {"tokens 'ab' and '<|endoftext|>' both have the id 256", [](json& j) { j["added_tokens"][0]["id"] = 256; }},
        {"added token 'ab' has the id 258, and 256 in the vocabulary",
         [](json& j) { j["added_tokens"].push_back(test::added_token(258, "ab")); }},
        {"token '<|endoftext|>' has the id null; ids are whole numbers", [](json& j) { j["added_tokens"][0].erase("id"); }},
        {"model: 'vocab' has no token for the byte 0x41; a byte-level BPE has one for each byte of UTF-8",
         [](json& j) { j["model"]["vocab"].erase("A"); }},
        // Merges
        {"model: 'merges' must be a list of pairs of tokens", [](json& j) { j["model"].erase("merges"); }},
        {"merge 1: token 'xy' is not in the vocabulary",
         [](json& j) {
             j["model"]["merges"][1] = {"xy", "b"};
         }},
        {"merge 1: token 'ba' is not in the vocabulary",
         [](json& j) {
             j["model"]["merges"][1] = {"b", "a"};
         }},
        {"merge 0 is a list; a pair of tokens is needed",
         [](json& j) {
             j["model"]["merges"][0] = {"a", "b", "c"};
         }},
        {"merge 0 is 5; a pair of tokens is needed", [](json& j) { j["model"]["merges"][0] = 5; }},
        {"merge 0 is 'ab'; two tokens and a space between them are needed", [](json& j) { j["model"]["merges"][0] = "ab"; }},
        {"merge 0 is 'a b c'; two tokens and a space between them are needed",
         [](json& j) { j["model"]["merges"][0] = "a b c"; }},
        // The end of a document
        {"no token is known to end a document; name one with --end-of-document",
         [](json& j) { j["added_tokens"] = json::array(); }},
        {"'<|endoftext|>' and '</s>' could end a document; name one with --end-of-document",
         [](json& j) { j["added_tokens"].push_back(test::added_token(259, "</s>")); }},
        {"end of document '<end>' is not a token of it", [](json& j) { j["model"]["end_of_document"] = "<end>"; }},
        {"end of document 7 is not a token of it", [](json& j) { j["model"]["end_of_document"] = 7; }},
    };
    for (const auto& [message, damage] : cases) {
        json file = good;
        damage(file);
        const std::string error = error_of([&] { make_tokenizer_json(file.dump(), "a.json"); });
        EXPECT_THAT(error, testing::StartsWith("a.json: " + message));
        EXPECT_EQ(error.find('\n'), std::string::npos);
    }
    // Texts of the file in a message stay short and on one line.
    json file = good;
    file["model"]["vocab"]["x\n" + std::string(1000, 'y')] = 256;
    EXPECT_THAT(error_of([&] { make_tokenizer_json(file.dump(), "a.json"); }),
                testing::AllOf(HasSubstr("'x\\nyyy"), testing::Not(HasSubstr("\n")), testing::SizeIs(testing::Lt(200))));
    // What is no JSON, or of a depth or with a number that no file needs
    const std::string text = good.dump();
    EXPECT_EQ(error_of([&] { make_tokenizer_json("", "a.json"); }), "a.json: not JSON: an error at byte 1");
    EXPECT_THAT(error_of([&] { make_tokenizer_json(text.substr(0, text.size() / 2), "a.json"); }),
                HasSubstr("a.json: not JSON: an error at byte "));
    EXPECT_THAT(error_of([&] { make_tokenizer_json("{\"model\": \"\xff\"}", "a.json"); }),
                HasSubstr("a.json: not JSON: an error at byte "));
    EXPECT_EQ(error_of([&] { make_tokenizer_json("{\"model\": 1e999}", "a.json"); }),
              "a.json: not JSON: a number that is too large");
    EXPECT_EQ(error_of([&] { make_tokenizer_json("[]", "a.json"); }), "a.json: a JSON object is needed");
    for (const char* open : {"[", "{\"a\":"}) {
        std::string deep;
        for (int i = 0; i < 1000000; ++i) deep += open;
        EXPECT_EQ(error_of([&] { make_tokenizer_json("{\"x\":" + deep, "a.json"); }),
                  "a.json: lists and objects are nested more than 64 deep");
    }
}

TEST_F(TokenizerJson, WhatItLeavesOpenIsAllowed) {
    const json good = small_tokenizer(byte_level(true), {"ab", "abc"});
    const auto ids = encode(*make_tokenizer_json(good.dump(), "a.json"), "abc ab<|endoftext|>x");
    const std::vector<std::function<void(json&)>> changes = {
        [](json& j) { j["model"].erase("type"); },
        [](json& j) { j["model"]["dropout"] = 0.0; },
        [](json& j) {
            j["model"]["merges"] = {"a b", "ab c"};
        },  // as older files write them
        [](json& j) { j["model"]["byte_fallback"] = true; },
        [](json& j) { j["model"]["unk_token"] = "a"; },
        [](json& j) { j.erase("normalizer"), j.erase("decoder"), j.erase("post_processor"); },
        [](json& j) {
            j["truncation"] = {{"max_length", 2}};
        },
        [](json& j) {
            j["post_processor"] = {{"type", "Sequence"},
                                   {"processors", {byte_level(true), {{"type", "TemplateProcessing"}}}}};
        },
        [](json& j) {
            j["decoder"] = {{"type", "Sequence"}, {"decoders", {byte_level(true)}}};
        },
        [](json& j) { j["pre_tokenizer"] = test::sequence({test::sequence({j["pre_tokenizer"]})}); },
        [](json& j) { j["added_tokens"].push_back(test::added_token(5000, "<far>")); },  // ids without a token
    };
    for (std::size_t i = 0; i < changes.size(); ++i) {
        json file = good;
        changes[i](file);
        const auto tokenizer = make_tokenizer_json(file.dump(), "a.json");
        EXPECT_EQ(encode(*tokenizer, "abc ab<|endoftext|>x"), ids) << "change " << i;
        EXPECT_EQ(decode(*tokenizer, ids), "abc ab<|endoftext|>x") << "change " << i;
    }
    json file = good;
    changes.back()(file);
    const auto far = make_tokenizer_json(file.dump(), "a.json");
    EXPECT_EQ(far->vocab_size(), 5001);
    EXPECT_EQ(decode(*far, {97, 4000, 5000}), "a<far>");
    EXPECT_THAT(error_of([&] { decode(*far, {5001}); }), HasSubstr("token 5001 is outside the vocabulary of 5001"));
    EXPECT_THAT(error_of([&] { decode(*far, {-1}); }), HasSubstr("token -1 is outside"));
}

TEST_F(TokenizerJson, TheEndOfADocumentIsPartOfTheDefinition) {
    test::TemporaryFolder folder;
    json file = small_tokenizer(byte_level(true), {"ab"});
    test::write_text(folder / "tokenizer.json", file.dump());
    const auto usual = open_tokenizer(folder / "tokenizer.json");
    EXPECT_EQ(usual->end_of_document(), 257);
    EXPECT_EQ(usual->definition(), file.dump());
    file["added_tokens"].push_back(test::added_token(258, "</s>"));
    test::write_text(folder / "tokenizer.json", file.dump());
    EXPECT_THAT(error_of([&] { open_tokenizer(folder / "tokenizer.json"); }),
                HasSubstr("'<|endoftext|>' and '</s>' could end a document"));
    const auto named = open_tokenizer(folder / "tokenizer.json", "</s>");
    EXPECT_EQ(named->end_of_document(), 258);
    EXPECT_NE(named->identity(), open_tokenizer(folder / "tokenizer.json", "<|endoftext|>")->identity());
    EXPECT_EQ(restore_tokenizer(named->kind(), named->definition())->end_of_document(), 258);
    EXPECT_EQ(open_tokenizer(folder / "tokenizer.json", "ab")->end_of_document(), 256);  // any token will do
    EXPECT_THAT(error_of([&] { open_tokenizer(folder / "tokenizer.json", "<no>"); }),
                HasSubstr("end of document '<no>' is not a token of it"));
    EXPECT_EQ(error_of([] { open_tokenizer("bytes", "</s>"); }),
              "bytes tokenizers have their own end of a document; --end-of-document is for a tokenizer.json");
}

// A folder, or either of the two files, under both pairs of names; the definition is a tokenizer.json of the same ids.
TEST_F(TokenizerJson, Gpt2PairsAreOneTokenizer) {
    test::TemporaryFolder folder;
    json file = small_tokenizer(byte_level(true), {" the", " then", "ab"});
    auto& vocabulary = file["model"]["vocab"];
    vocabulary["<|endoftext|>"] = vocabulary.size();
    file["added_tokens"] = json::array();
    std::string merges = "#version: 0.2\n";
    for (const auto& merge : file["model"]["merges"])
        merges += merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
    const std::string text = " the then ab <|endoftext|>";
    const auto expected = make_tokenizer_json(file.dump(), "a.json");
    std::string identity;
    for (const auto& [merges_name, vocabulary_name] :
         {std::pair("vocab.bpe", "encoder.json"), std::pair("merges.txt", "vocab.json")}) {
        test::TemporaryFolder pair;
        test::write_text(pair / merges_name, merges);
        EXPECT_EQ(error_of([path = pair / merges_name] { open_tokenizer(path); }),
                  "tokenizer " + (pair / merges_name) + ": " + vocabulary_name + " must stand beside it");
        test::write_text(pair / vocabulary_name, vocabulary.dump());
        for (const std::string& path : {pair.path(), pair / merges_name, pair / vocabulary_name}) {
            const auto tokenizer = open_tokenizer(path);
            EXPECT_EQ(tokenizer->kind(), "tokenizer.json");
            EXPECT_EQ(tokenizer->end_of_document(), expected->end_of_document());
            EXPECT_EQ(encode(*tokenizer, text), encode(*expected, text));
            EXPECT_EQ(encode(*restore_tokenizer("tokenizer.json", tokenizer->definition()), text), encode(*expected, text));
            if (identity.empty()) identity = tokenizer->identity();
            EXPECT_EQ(tokenizer->identity(), identity);
        }
        test::write_text(pair / merges_name, "#version: 0.2\n\xc4\xa0 t\na\xff b\n");
        EXPECT_EQ(error_of([&] { open_tokenizer(pair.path()); }), pair / merges_name + ": line 3 is not UTF-8");
        test::write_text(pair / merges_name, merges);
        test::write_text(pair / vocabulary_name, "[1]");
        EXPECT_EQ(error_of([&] { open_tokenizer(pair.path()); }),
                  pair / vocabulary_name + ": an object of tokens and their ids is needed");
        const std::string cut = vocabulary.dump().substr(0, 50);
        test::write_text(pair / vocabulary_name, cut);
        EXPECT_EQ(error_of([&] { open_tokenizer(pair.path()); }),
                  pair / vocabulary_name + ": not JSON: an error at byte " + std::to_string(cut.size() + 1));
    }
    test::TemporaryFolder empty;
    EXPECT_THAT(error_of([&] { open_tokenizer(empty.path()); }),
                HasSubstr("a folder without tokenizer.model, tokenizer.json or vocab.bpe"));
    test::write_text(empty / "vocab.json", "{}");
    EXPECT_THAT(error_of([&] { open_tokenizer(empty / "vocab.json"); }), HasSubstr("merges.txt must stand beside it"));
}

}  // namespace
}  // namespace fenwick::data
