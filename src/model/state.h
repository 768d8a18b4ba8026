// The decoding state behind model::DecodeState: what every layer's mixer carries.
#pragma once

#include "model/language_model.h"
#include "model/mixer.h"

namespace fenwick::model {

class State final : public DecodeState {
public:
    std::int64_t position() const override { return seen; }
    std::int64_t bytes() const override {
        std::int64_t total = 0;
        for (const auto& layer : layers) total += layer.bytes();
        return total;
    }
    std::unique_ptr<DecodeState> clone() const override {
        auto copy = std::make_unique<State>();
        copy->batch = batch;
        copy->seen = seen;
        for (const auto& layer : layers) copy->layers.push_back(layer.clone());
        return copy;
    }

    std::int64_t batch = 0, seen = 0;
    std::vector<MixerState> layers;
};

}  // namespace fenwick::model
