// The tape: a list of executed operators, walked in reverse by backward().
//
// An operator records itself with record(): its name, its output, its inputs, and a closure that turns the output's
// gradient into contributions to the inputs' gradients. Order of execution is the order of the list, so no sort is needed,
// and each node, with all it saved, is freed as backward passes it. There is no global state beyond "recording or not".
#pragma once

#include <functional>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "autograd/variable.h"

namespace fenwick {

class Tape {
public:
    Tape() = default;
    Tape(const Tape&) = delete;
    Tape& operator=(const Tape&) = delete;

    // The tape this thread records on; null when it does not record.
    static Tape* current();

    void push(std::string_view name, std::vector<std::shared_ptr<Gradient>> outputs, std::function<void()> backward);

    // Seeds the gradient of `output` with ones (or `seed`) and runs all nodes in reverse. The tape is empty afterwards.
    void backward(const Variable& output, Tensor seed = {});
    // The same for several outputs at once.
    void backward(const std::vector<std::pair<Variable, Tensor>>& outputs_and_seeds);
    std::size_t size() const { return nodes_.size(); }
    void clear() { nodes_.clear(); }

private:
    struct Node {
        std::string_view name;  // a literal
        std::vector<std::shared_ptr<Gradient>> outputs;
        std::function<void()> backward;
    };
    std::vector<Node> nodes_;
};

// While it lives, this thread records on `tape`.
class Recording {
public:
    explicit Recording(Tape& tape);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

private:
    Tape* previous_;
};

// While it lives, this thread does not record.
class NoRecording {
public:
    NoRecording();
    ~NoRecording();
    NoRecording(const NoRecording&) = delete;
    NoRecording& operator=(const NoRecording&) = delete;

private:
    Tape* previous_;
};

using Inputs = std::initializer_list<std::reference_wrapper<const Variable>>;

// True if an operator with these inputs must be recorded (and must save what its backward needs).
// Undefined variables (absent optional inputs) count as constants.
bool needs_grad(Inputs inputs);

// Makes the operator's output a variable. If needs_grad(inputs), records `backward`, called with the output's gradient
// (contiguous); it adds to the inputs' gradients through their Gradient objects. It must not capture the output Variable.
Variable record(std::string_view name, Tensor output, Inputs inputs, std::function<void(const Tensor& grad_output)> backward);

// The same for several outputs; gradients of outputs that nothing reached arrive undefined.
std::vector<Variable> record(std::string_view name, std::vector<Tensor> outputs, Inputs inputs,
                             std::function<void(const std::vector<Tensor>& grad_outputs)> backward);

}  // namespace fenwick
