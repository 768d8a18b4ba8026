// What a path given on the command line is.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "data/tokenizer.h"

namespace fenwick::tools {

// corpus: a token file, or a folder of shards
enum class FileKind { config, corpus, checkpoint, run_folder, other };
// By content: a folder with checkpoints/ or a manifest, an HDF5 file by its format mark, a .yaml or .yml file by its name. Throws Error if
// there is nothing at `path`.
FileKind kind_of_file(const std::string& path);

// The tokenizer inside a corpus, checkpoint or run folder, or what data::open_tokenizer takes. end_of_document: as the
// command line has it.
std::unique_ptr<data::Tokenizer> open_tokenizer_of(const std::string& source,
                                                   const std::optional<std::string>& end_of_document = {});

}  // namespace fenwick::tools
