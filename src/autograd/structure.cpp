// view, cast, add, scale, split_columns, checkpoint.
#include "autograd/check.h"
#include "autograd/ops.h"
#include "kernels/elementwise.h"

namespace fenwick::ops {

Variable view(const Variable& x, Shape shape) {
    return record("view", x.value().view(std::move(shape)), {x},
                  [dx = x.gradient(), shape = x.shape()](const Tensor& dy) { dx->add(dy.view(shape)); });
}

Variable cast(const Variable& x, DType dtype) {
    if (x.dtype() == dtype) return x;
    return record("cast", x.value().to(dtype), {x},
                  [dx = x.gradient(), from = x.dtype()](const Tensor& dy) { dx->add(dy.to(from)); });
}

Variable add(const Variable& x, const Variable& y) {
    check_shape("add", "y", y, x.shape());
    const DType dtype = y.dtype();
    if (dtype != gate_dtype(x.dtype())) check_dtype("add", "y", y, x.dtype());
    Tensor out;
    if (dtype == x.dtype()) {
        const Tensor a = x.value().contiguous(), b = y.value().contiguous();
        out = Tensor::empty(x.shape(), dtype, x.device());
        kernels::add(exec_of(out), {.dtype = dtype, .count = out.count(), .x = a.data(), .y = b.data(), .out = out.data()});
    } else {
        out = y.value().clone();
        kernels::axpby(exec_of(out), {.x_dtype = x.dtype(), .y_dtype = dtype, .rows = out.rows(), .columns = out.columns(),
                                      .x_stride = x.value().row_stride(), .y_stride = out.columns(), .b = 1.0,
                                      .x = x.value().data(), .y = out.data()});
    }
    return record("add", out, {x, y}, [dx = x.gradient(), dy = y.gradient(), narrow = x.dtype()](const Tensor& grad) {
        // Two owners of one buffer would add into each other: the second gets its own copy.
        if (dx) dx->add(grad.to(narrow));
        if (dy) dy->add(dx && narrow == grad.dtype() ? grad.clone() : grad);
    });
}

namespace {
Tensor scaled(const Tensor& x, double factor) {
    Tensor out = Tensor::empty(x.shape(), x.dtype(), x.device());
    kernels::axpby(exec_of(out), {.x_dtype = x.dtype(),
                                  .y_dtype = x.dtype(),
                                  .rows = x.rows(),
                                  .columns = x.columns(),
                                  .x_stride = x.row_stride(),
                                  .y_stride = x.columns(),
                                  .a = factor,
                                  .x = x.data(),
                                  .y = out.data()});
    return out;
}
}  // namespace

Variable scale(const Variable& x, double factor) {
    return record("scale", scaled(x.value(), factor), {x},
                  [dx = x.gradient(), factor](const Tensor& dy) { dx->add(scaled(dy, factor)); });
}

std::vector<Variable> split_columns(const Variable& x, const std::vector<std::int64_t>& widths) {
    std::int64_t total = 0;
    for (auto width : widths) total += width;
    FENWICK_CHECK(x.defined() && x.value().dim() >= 1 && total == x.value().columns(),
                  "[split_columns] widths {} add up to {}, the last dimension of {} is {}", to_string(widths), total,
                  to_string(x.shape()), x.value().columns());
    const bool recording = needs_grad({x});
    // The gradient of x as the slices fill it; made when the first slice's gradient is.
    auto gathered = std::make_shared<Tensor>();
    std::vector<std::shared_ptr<Gradient>> gradients;
    std::vector<Variable> slices;
    std::int64_t offset = 0;
    for (auto width : widths) {
        Tensor slice = x.value().narrow_columns(offset, width);
        if (recording) {
            auto gradient = std::make_shared<Gradient>(slice.shape(), slice.dtype(), slice.device());
            gradient->set_home([gathered, shape = x.shape(), dtype = x.dtype(), device = x.device(), offset, width] {
                if (!gathered->defined()) *gathered = Tensor::empty(shape, dtype, device);
                return gathered->narrow_columns(offset, width);
            });
            gradients.push_back(gradient);
            slices.emplace_back(std::move(slice), gradient);
        } else {
            slices.emplace_back(std::move(slice));
        }
        offset += width;
    }
    if (recording) {
        Tape::current()->push("split_columns", gradients, [gradients, gathered, dx = x.gradient()] {
            for (const auto& gradient : gradients) {
                if (!gradient->defined()) gradient->zero();
                gradient->clear();
            }
            dx->add(std::exchange(*gathered, Tensor()));
        });
    }
    return slices;
}

Variable checkpoint(const std::function<Variable(const std::vector<Variable>&)>& body, const std::vector<Variable>& inputs) {
    Tape* tape = Tape::current();
    if (tape == nullptr) return body(inputs);
    Tensor value;
    {
        NoRecording no_recording;
        value = body(inputs).value();
    }
    // Parameters inside body need gradients even where no input does, so this node is always recorded.
    auto gradient = std::make_shared<Gradient>(value.shape(), value.dtype(), value.device());
    tape->push("checkpoint", {gradient}, [gradient, body, inputs] {
        std::vector<Variable> leaves;
        for (const auto& input : inputs) leaves.emplace_back(input.value(), input.requires_grad());
        Tape inner;
        Variable output;
        {
            Recording recording(inner);
            output = body(leaves);
        }
        const Tensor seed = gradient->tensor();
        gradient->clear();
        if (!output.requires_grad()) return;
        inner.backward(output, seed);
        for (std::size_t i = 0; i < inputs.size(); ++i)
            if (inputs[i].requires_grad() && leaves[i].gradient()->defined()) inputs[i].gradient()->add(leaves[i].grad());
    });
    return Variable(std::move(value), std::move(gradient));
}

}  // namespace fenwick::ops
