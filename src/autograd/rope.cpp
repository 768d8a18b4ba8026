#include "autograd/check.h"
#include "autograd/ops.h"
#include "kernels/rope.h"

namespace fenwick::ops {

Variable rope(const Variable& x, std::int64_t heads, double theta, const SequenceLayout& layout, std::int64_t position) {
    FENWICK_CHECK(x.defined() && x.value().dim() >= 1, "[rope] x is missing");
    FENWICK_CHECK(heads >= 1 && x.value().columns() % heads == 0 && x.value().columns() / heads % 2 == 0,
                  "[rope] x has shape {}; its last dimension must be {} heads of an even width", to_string(x.shape()), heads);
    FENWICK_CHECK(position >= 0, "[rope] position is {}; it must not be negative", position);
    layout.check("rope", x.value().rows());
    const std::int64_t columns = x.value().columns();
    // to = from, rotated (back, if inverse)
    const auto rotate = [heads, theta, layout, position, columns](const Tensor& from, const Tensor& to, bool inverse) {
        kernels::rope(exec_of(to), {.dtype = to.dtype(),
                                    .sequences = layout.sequences(),
                                    .heads = heads,
                                    .width = columns / heads,
                                    .theta = theta,
                                    .position = position,
                                    .inverse = inverse,
                                    .x_stride = from.row_stride(),
                                    .y_stride = to.row_stride(),
                                    .x = from.data(),
                                    .y = to.data()});
    };
    Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
    rotate(x.value(), y, false);
    return record("rope", y, {x}, [rotate, dx = x.gradient()](const Tensor& dy) {
        if (dx->defined()) {
            Tensor rotated = Tensor::empty(dy.shape(), dy.dtype(), dy.device());
            rotate(dy, rotated, true);
            dx->add(std::move(rotated));
        } else {
            rotate(dy, dx->target().tensor, true);
        }
    });
}

}  // namespace fenwick::ops
