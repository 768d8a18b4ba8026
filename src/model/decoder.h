// Generation, one token of each row at a time, with everything on the device: the same function as LanguageModel::step, cut
// into few launches (kernels/decode.h) that one CUDA graph holds. The host queues tokens and reads ids when it likes.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/decode.h"
#include "model/language_model.h"

namespace fenwick::model {

struct DecoderOptions {
    DType weights = DType::float32;  // of the matrices, and of the Transformer's cache; bfloat16 on CUDA
    bool graph = true;               // false: every launch by itself, for comparison
    bool one_launch = true;          // false: a launch an operator, even where a token can be one (kernels/decode.h)
    std::int64_t reserve = 256;      // tokens to make room for at first; it grows as needed
    // Of the draws: kernels::Sample.
    std::int64_t vocabulary = 0;  // ids below this alone; 0: all
    double temperature = 1.0;
    std::int64_t top_k = 0;
    double top_p = 1.0;
    std::uint64_t seed = 0, stream = 0;
};

class Decoder {
public:
    // Continues `state`, which it copies. The model must be a float32 one and outlive this; later changes of its weights
    // may not be seen, since matrices are packed here.
    Decoder(const LanguageModel& model, const DecodeState& state, const DecoderOptions& options);
    ~Decoder();
    Decoder(const Decoder&) = delete;
    Decoder& operator=(const Decoder&) = delete;

    // The ids that the next advance() takes in, one a row; without it, those that were drawn.
    void feed(const std::vector<std::int32_t>& ids);
    // Queues one token: its logits, and the draw of the next.
    void advance();
    // The ids of draw number `n` (from 0, one an advance()), waiting until they are there. The last `history` can be asked
    // for. Throws Error where the logits were not finite.
    std::vector<std::int32_t> drawn(std::int64_t n);
    static constexpr std::int64_t history = 16;

    Tensor logits() const;          // [batch, vocab] float32, of the last advance(); overwritten by the next
    std::int64_t position() const;  // tokens taken in, queued ones included
    std::int64_t launches() const;  // a token; 2 where all layers are one and the draw is the other

    // Seconds that the launches of one kind take of a token, each kind by itself: for benchmarks, with one_launch = false.
    // The state is garbage then.
    std::vector<std::pair<std::string, double>> time_by_kind();

private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace fenwick::model
