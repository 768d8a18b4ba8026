// What a path given on the command line is.
#pragma once

#include <memory>
#include <string>

#include "data/tokenizer.h"

namespace fenwick::tools {

enum class FileKind { config, token_file, checkpoint, run_folder, other };
// By content: a folder with checkpoints/, an HDF5 file by its format mark, a .yaml or .yml file by its name. Throws Error if
// there is nothing at `path`.
FileKind kind_of_file(const std::string& path);

// "bytes", a SentencePiece .model, or the tokenizer inside a token file, checkpoint or run folder.
std::unique_ptr<data::Tokenizer> open_tokenizer_of(const std::string& source);

}  // namespace fenwick::tools
