// Embedding look-up and its gradient.
#pragma once

#include "kernels/kernel.h"

namespace fenwick::kernels {

struct Embedding {
    DType dtype;                       // of y
    DType table_dtype;                 // of the table
    std::int64_t rows = 0, width = 0;  // rows: number of tokens
    const std::int32_t* ids = nullptr; // [rows], each in [0, vocab); checked by the caller
    const void* table = nullptr;       // [vocab, width]
    void* y = nullptr;                 // [rows, width]
};
FENWICK_KERNEL(embedding_forward, Embedding)

// dtable[id] (+)= sum of dy over the rows with that id, in row order (no atomics: repeats bit for bit).
struct EmbeddingBackward {
    DType dtype;         // of dy
    DType table_dtype;   // of dtable
    std::int64_t rows = 0, width = 0, vocab = 0;
    const std::int32_t* ids = nullptr;
    const void* dy = nullptr;
    void* dtable = nullptr;
    bool accumulate_dtable = false;
};
FENWICK_KERNEL(embedding_backward, EmbeddingBackward)

}  // namespace fenwick::kernels
