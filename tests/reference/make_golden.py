#!/usr/bin/env python3
"""Golden cases for golden_test from the formulas of reference.py. Needs numpy, h5py and autograd.

    make_golden.py FOLDER [--seed N]    writes the cases of cases.py
    make_golden.py --check FOLDER       computes a folder's cases again and prints how far its values are from these

One HDF5 file a case: root attributes `op` and `params` (JSON); datasets in/..., out/..., grad_out/... (the gradient that
enters) and grad_in/... (the gradients that must come out), in float64. A model has in/input_ids, in/params/<name>, out/logits,
out/loss (the mean cross entropy of every token's successor) and grad_in/params/<name>.
"""

import argparse
import itertools
import json
import pathlib
import sys

import h5py
import numpy
from autograd import make_vjp

import cases
import reference

CONSTANTS = ("cu_seqlens", "target", "input_ids")  # inputs without a gradient


def compute(op, params, inputs, grad_out, model_class=reference.Model):
    """All datasets of a case but its inputs. `grad_out(shape)` gives the gradient of the output."""
    if op == "adamw":
        settings = {name: params[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
        return {"out/param": reference.adamw(inputs["param"], inputs["grads"], **settings)}
    variables = {name: value for name, value in inputs.items() if name not in CONSTANTS}
    if op == "model":
        ids = inputs["input_ids"]
        through_model, logits = make_vjp(lambda x: model_class(params).logits(x, ids))(variables)
        through_loss, loss = make_vjp(lambda x: reference.successors_loss(x, ids))(logits)
        result = {"out/logits": logits, "out/loss": loss}
        gradients = through_model(through_loss(numpy.ones(1)))
    else:
        settings = {**params, **{name: inputs.get(name) for name in CONSTANTS}}
        backward, o = make_vjp(lambda x: reference.OPERATORS[op](x, settings))(variables)
        result = {"out/o": o, "grad_out/o": grad_out(o.shape)}
        gradients = backward(result["grad_out/o"])
    return result | {f"grad_in/{name}": gradient for name, gradient in gradients.items()}


def write_case(path, op, params, datasets):
    with h5py.File(path, "w") as file:
        file.attrs["op"] = op
        file.attrs["params"] = json.dumps(params)
        for name, value in datasets.items():
            file[name] = value


def read_case(path):
    with h5py.File(path) as file:
        datasets = {}
        file.visititems(lambda name, node: datasets.update({name: node[()]}) if isinstance(node, h5py.Dataset) else None)
        return file.attrs["op"], json.loads(file.attrs["params"]), datasets


def ratio(actual, expected):
    """RMS error by RMS; where zeros are expected, the error itself."""
    error, norm = (numpy.sqrt(numpy.mean(x * x)) for x in (actual - expected, expected))
    return error if norm < 1e-12 else error / norm


def conditioning(op, params, inputs, results):
    """The worst ratio of the same computation in float32, operation by operation."""
    single = {name: value.astype(numpy.float32) if value.dtype == numpy.float64 else value for name, value in inputs.items()}
    rounded = compute(op, params, single, lambda shape: results["grad_out/o"].astype(numpy.float32))
    return max(ratio(rounded[name], value) for name, value in results.items())


def generate(folder, seed):
    folder.mkdir(parents=True, exist_ok=True)
    for count, (name, op, params, make_inputs) in enumerate(cases.all_cases(), start=1):
        # Some random models multiply rounding by 1000 and more (a head whose output all but cancels, then a norm): they tell
        # nothing about an implementation in float32, and are drawn again.
        for attempt in itertools.count():
            inputs = make_inputs(cases.Draw(seed, name, attempt))
            grad_out = cases.Draw(seed, name, attempt, "grad_out").normal
            results = compute(op, params, inputs, lambda shape: grad_out(*shape))
            if op != "model" or conditioning(op, params, inputs, results) < 5e-6:
                break
        write_case(folder / f"{name}.h5", op, params, {f"in/{key}": value for key, value in inputs.items()} | results)
    print(f"{count} cases in {folder}")


def check(folder):
    """Prints the worst ratios by operator. Whether there are cases, and all are within 1e-10."""
    worst = {}
    paths = sorted(folder.glob("*.h5"))
    for path in paths:
        op, params, datasets = read_case(path)
        inputs = {name.removeprefix("in/"): value for name, value in datasets.items() if name.startswith("in/")}
        computed = compute(op, params, inputs, lambda shape: datasets["grad_out/o"])
        expected = {name: value for name, value in datasets.items() if not name.startswith("in/")}
        shapes = [{name: value.shape for name, value in side.items()} for side in (computed, expected)]
        if shapes[0] != shapes[1]:
            sys.exit(f"{path}: holds {shapes[1]}, but it should be {shapes[0]}")
        for name, value in expected.items():
            key = (params.get("model_type", op), "gradient" if name.startswith("grad") else "output")
            found = ratio(computed[name], value)
            if not found <= worst.get(key, (-1.0,))[0]:  # NaN is the worst of all
                worst[key] = (found, f"{path.name}: {name}")
    for (op, kind), (found, place) in sorted(worst.items()):
        print(f"{op:28} {kind:9} {found:.1e}  {place}")
    good = bool(paths) and all(found < 1e-10 for found, _ in worst.values())
    print(f"{len(paths)} cases, {'all' if good else 'NOT all'} within 1e-10")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--check", action="store_true", help="compare the folder's cases instead of writing any")
    parser.add_argument("--seed", type=int, default=1, help="of all random values (default: %(default)s)")
    arguments = parser.parse_args()
    if not arguments.check:
        generate(arguments.folder, arguments.seed)
    elif not check(arguments.folder):
        sys.exit(1)


if __name__ == "__main__":
    main()
