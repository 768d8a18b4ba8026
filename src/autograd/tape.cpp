#include "autograd/tape.h"

#include <utility>

#include "base/timer.h"

namespace fenwick {
namespace {

thread_local Tape* current_tape = nullptr;

}  // namespace

Tape* Tape::current() { return current_tape; }

Recording::Recording(Tape& tape) : previous_(std::exchange(current_tape, &tape)) {}
Recording::~Recording() { current_tape = previous_; }
NoRecording::NoRecording() : previous_(std::exchange(current_tape, nullptr)) {}
NoRecording::~NoRecording() { current_tape = previous_; }

void Tape::push(std::string_view name, std::vector<std::shared_ptr<Gradient>> outputs, std::function<void()> backward) {
    nodes_.push_back({name, std::move(outputs), std::move(backward)});
    if (profiling()) lap(name, "forward");
}

void Tape::backward(const Variable& output, Tensor seed) {
    backward(std::vector<std::pair<Variable, Tensor>>{{output, std::move(seed)}});
}

void Tape::backward(const std::vector<std::pair<Variable, Tensor>>& outputs_and_seeds) {
    for (const auto& [output, seed] : outputs_and_seeds) {
        FENWICK_CHECK(output.requires_grad(), "[backward] the output depends on nothing that requires a gradient");
        output.gradient()->add(seed.defined() ? seed : Tensor::full(output.shape(), 1.0, output.dtype(), output.device()));
    }
    NoRecording no_recording;
    while (!nodes_.empty()) {
        Node node = std::move(nodes_.back());
        nodes_.pop_back();
        bool reached = false;
        for (const auto& gradient : node.outputs) reached = reached || gradient->defined();
        if (reached) node.backward();
        if (profiling()) lap(node.name, "backward");
    }
}

bool needs_grad(Inputs inputs) {
    if (Tape::current() == nullptr) return false;
    for (const Variable& input : inputs)
        if (input.requires_grad()) return true;
    return false;
}

Variable record(std::string_view name, Tensor output, Inputs inputs, std::function<void(const Tensor&)> backward) {
    if (!needs_grad(inputs)) return Variable(std::move(output));
    auto gradient = std::make_shared<Gradient>(output.shape(), output.dtype(), output.device());
    Tape::current()->push(name, {gradient}, [gradient, backward = std::move(backward)] {
        const Tensor grad = gradient->tensor().contiguous();
        gradient->clear();
        backward(grad);
    });
    return Variable(std::move(output), std::move(gradient));
}

std::vector<Variable> record(std::string_view name, std::vector<Tensor> outputs, Inputs inputs,
                             std::function<void(const std::vector<Tensor>&)> backward) {
    std::vector<Variable> variables;
    if (!needs_grad(inputs)) {
        for (auto& output : outputs) variables.emplace_back(std::move(output));
        return variables;
    }
    std::vector<std::shared_ptr<Gradient>> gradients;
    for (auto& output : outputs) {
        gradients.push_back(std::make_shared<Gradient>(output.shape(), output.dtype(), output.device()));
        variables.emplace_back(std::move(output), gradients.back());
    }
    Tape::current()->push(name, gradients, [gradients, backward = std::move(backward)] {
        std::vector<Tensor> grads;
        for (const auto& gradient : gradients) {
            grads.push_back(gradient->defined() ? gradient->tensor().contiguous() : Tensor());
            gradient->clear();
        }
        backward(grads);
    });
    return variables;
}

}  // namespace fenwick
