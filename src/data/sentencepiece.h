// SentencePiece models through the library; tokenizer.h is what others include.
#pragma once

#include <memory>
#include <string>

#include "data/tokenizer.h"

namespace fenwick::data {

// From the bytes of a .model file; `name` is what errors call it. The end of a document is the model's eos id, else
// its bos id, else its unknown id.
std::unique_ptr<Tokenizer> make_sentencepiece(const std::string& definition, const std::string& name);

}  // namespace fenwick::data
