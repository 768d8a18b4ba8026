#!/usr/bin/env python3
"""Which roundings to bfloat16 make the error of a whole model? Needs numpy, h5py and autograd.

    bfloat16_rounding.py FOLDER

For the models among FOLDER's golden cases: the results in float64, but with kinds of stored tensors (Model.store in
reference.py), and the gradients that reach them, rounded to bfloat16. A cell is the logits' RMS error by RMS / the worst such
ratio of a parameter's gradient / how many gradients are above 0.02.
"""

import argparse
import pathlib

import numpy
from autograd.extend import defvjp, primitive

import make_golden
import reference


def bfloat16(x):
    bits = numpy.asarray(x, dtype=numpy.float32).view(numpy.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & numpy.uint32(0xFFFF0000)
    return bits.view(numpy.float32).astype(float)


rounded, rounded_value = primitive(bfloat16), primitive(bfloat16)
defvjp(rounded, lambda value, x: bfloat16)  # an activation: its gradient is stored in bfloat16 too
defvjp(rounded_value, lambda value, x: lambda gradient: gradient)  # a weight: its gradient is float32


class RoundedModel(reference.Model):
    kinds = frozenset()  # of tensors that are rounded

    def store(self, kind, x):
        if kind not in self.kinds:
            return x
        return rounded_value(x) if kind == "weight" else rounded(x)


KINDS = ("weight", "stream", "norm", "projection", "gate", "convolution", "query and key", "value", "scan", "skip",
         "gated norm", "branch", "mlp", "logits")
ROWS = {
    "all": set(KINDS),
    "all but stream": set(KINDS) - {"stream"},
    "all but stream, gate": set(KINDS) - {"stream", "gate"},
    "all but stream, branch": set(KINDS) - {"stream", "branch"},
    "all but stream, branch, gate, logits": set(KINDS) - {"stream", "branch", "gate", "logits"},
    "factors of products only": {"weight", "norm", "gated norm", "mlp"},
    **{f"{kind} only": {kind} for kind in KINDS},
}


def cell(case, kinds):
    op, params, datasets = case
    inputs = {name.removeprefix("in/"): value for name, value in datasets.items() if name.startswith("in/")}
    RoundedModel.kinds = kinds
    results = make_golden.compute(op, params, inputs, None, RoundedModel)
    gradients = [make_golden.ratio(x, datasets[name]) for name, x in results.items() if name.startswith("grad_in/")]
    logits = make_golden.ratio(results["out/logits"], datasets["out/logits"])
    return f"{logits:.4f} / {max(gradients):.3f} / {sum(x > 0.02 for x in gradients)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    cases = {path.stem.removeprefix("model_"): make_golden.read_case(path)
             for path in sorted(parser.parse_args().folder.glob("model_*.h5"))}
    print("| rounded |", " | ".join(cases), "|")
    print("|---|" + "---|" * len(cases))
    for name, kinds in ROWS.items():
        print(f"| {name} |", " | ".join(cell(case, kinds) for case in cases.values()), "|", flush=True)


if __name__ == "__main__":
    main()
