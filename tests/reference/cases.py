"""The golden cases: sizes and random inputs. Every *_cases() yields (name, op, params, function of a Draw: the inputs)."""

import itertools
import zlib

import numpy

import reference


class Draw:
    """Random arrays; the stream is a function of the seed and the labels alone."""

    def __init__(self, seed, *labels):
        self.generator = numpy.random.default_rng([seed, *(zlib.crc32(str(label).encode()) for label in labels)])

    def normal(self, *shape):
        return self.generator.standard_normal(shape)

    def uniform(self, high, *shape):
        return high * self.generator.random(shape)

    def unit(self, *shape):
        """Vectors of length 1 along the last axis."""
        return reference.l2norm(self.normal(*shape), 0.0)

    def decays(self, kind, *shape):
        """Log decays. Strong: most tokens forget all that was before them, the others almost nothing."""
        strong = numpy.where(self.uniform(1.0, *shape) < 0.3, self.uniform(0.05, *shape), self.uniform(80.0, *shape))
        return -{"mild": self.uniform(0.3, *shape), "none": numpy.zeros(shape), "strong": strong}[kind]


def packed(*lengths):
    return numpy.cumsum([0, *lengths])


# ---- scans -------------------------------------------------------------------------------------------------------------

# Chunks have 64 tokens. Documents of one token stand first, last, alone and side by side.
SCANS = {
    "t1": dict(T=1, B=3, H=1, K=3, V=5),
    "t2": dict(T=2, H=5, K=4, V=1),
    "t4": dict(T=4, B=2, H=6, G=3, K=1, V=6),
    "t5": dict(T=5, B=3, H=3, K=7, V=9),
    "t31": dict(T=31, H=4, G=2, K=12, V=20),
    "t32": dict(T=32, B=2, H=3, K=9, V=4),
    "t33": dict(T=33, H=1, K=40, V=17),
    "t63": dict(T=63, B=2, H=3, G=3, K=20, V=24),
    "t65": dict(T=65, B=2, H=6, G=2, K=8, V=16),
    "t127": dict(T=127, H=4, G=4, K=24, V=8),
    "t128": dict(T=128, H=2, K=16, V=40),
    "t129": dict(T=129, B=2, H=2, G=2, K=10, V=14),
    "t193": dict(T=193, H=4, G=2, K=20, V=16),
    "t255": dict(T=255, H=2, K=8, V=17),
    "t256": dict(T=256, H=1, K=48, V=8),
    "t385": dict(T=385, H=1, K=16, V=12),
    "packed2": dict(documents=(1, 1, 64, 1, 63), H=4, G=2, K=12, V=10),
    "packed3": dict(documents=(65, 128, 1), H=3, K=16, V=8),
    "packed4": dict(documents=(1, 1, 1, 1, 1, 1, 1), H=2, K=5, V=6),
    "packed5": dict(documents=(130, 2, 33, 3), H=2, G=2, K=9, V=7),
    "strong_decay": dict(T=193, B=2, H=2, K=16, V=8, decay="strong"),
    "strong_decay_packed": dict(documents=(1, 70, 1, 88), H=2, G=2, K=8, V=12, decay="strong"),
    "no_decay": dict(T=150, H=2, K=24, V=16, decay="none"),
}
LEVELS = {
    "one_level": dict(T=70, H=2, K=8, V=12, L=1),
    "level_clamp3": dict(T=130, B=2, H=2, G=2, K=16, V=8, L=3),  # inside a chunk already
    "level_clamp7": dict(T=257, H=3, K=8, V=16, L=7),  # every level across chunks
    "level_clamp8": dict(T=257, H=2, K=8, V=16, L=8),  # all but the first level across chunks
    "level_clamp_packed": dict(documents=(1, 132, 65), H=2, K=12, V=8, L=2),
    "spare_levels": dict(T=66, H=2, K=8, V=8, L=12),  # more than a document can use
}


def scan_inputs(draw, op, H, K, V, T=None, documents=None, B=1, G=1, L=None, decay="mild"):
    T = T or sum(documents)
    L = L or reference.levels_needed(T if documents is None else max(documents))
    if "delta" in op:
        x = {"q": draw.unit(B, T, H, K), "k": draw.unit(B, T, H, K), "beta": draw.uniform(1.0, B, T, H)}
    else:
        x = {"q": draw.normal(B, T, G, K) / numpy.sqrt(K), "k": draw.normal(B, T, G, K)}
    x |= {"v": draw.normal(B, T, H, V), "g": draw.decays(decay, B, T, H)}
    if op.startswith("log_linear"):
        x["lam"] = draw.uniform(2.0, B, T, H, L)
    return x | ({"cu_seqlens": packed(*documents)} if documents else {})


def scan_cases():
    for op in ("ssd", "log_linear_ssd", "gated_delta_rule", "log_linear_gated_delta_rule"):
        for name, sizes in (SCANS | (LEVELS if op.startswith("log_linear") else {})).items():
            params = {"heads": sizes["H"]} | ({"groups": sizes.get("G", 1)} if "delta" not in op else {})
            yield name, op, params, lambda draw, op=op, sizes=sizes: scan_inputs(draw, op, **sizes)


# ---- other operators ---------------------------------------------------------------------------------------------------


def rowwise_cases():
    for name, shape, eps in (("c", (5, 48), 1e-5), ("d", (14, 33), 1e-6), ("e", (1, 2), 1e-5), ("f", (3, 257), 1e-3)):
        for op, inputs in (("rms_norm", "x"), ("rms_norm_gated", "xz"), ("gated_rms_norm", "xz"), ("l2norm", "x")):
            weight = {"w": shape[-1]} if op != "l2norm" else {}
            shapes = {x: shape for x in inputs} | {x: (n,) for x, n in weight.items()}
            yield name, op, {"eps": eps}, lambda draw, shapes=shapes: {x: draw.normal(*s) for x, s in shapes.items()}
        yield name, "swiglu", {}, lambda draw, shape=shape: {x: 3 * draw.normal(*shape) for x in ("gate", "up")}


def cross_entropy_cases():
    def inputs(draw, rows, vocab, ignored):
        target = draw.generator.integers(vocab, size=rows)
        target[draw.generator.permutation(rows)[:ignored]] = -100
        return {"logits": 4 * draw.normal(rows, vocab), "target": target}

    for name, sizes in (("c", (1, 7, 0)), ("d", (19, 257, 5)), ("e", (65, 50, 64)), ("f", (4, 1000, 0))):
        params = {"ignore_index": -100, "reduction": "mean"}
        yield name, "cross_entropy", params, lambda draw, sizes=sizes: inputs(draw, *sizes)


def convolution_cases():
    def inputs(draw, B, C, W, T=None, bias=True, documents=None):
        x = {"x": draw.normal(B, T or sum(documents), C), "w": draw.normal(C, W)}
        x |= {"bias": draw.normal(C)} if bias else {}
        return x | ({"cu_seqlens": packed(*documents)} if documents else {})

    for name, sizes in {
        "e": dict(B=3, T=9, C=5, W=4),
        "f": dict(B=1, T=70, C=24, W=2),
        "g": dict(B=2, T=65, C=17, W=4, bias=False),
        "h": dict(B=1, T=3, C=6, W=7),  # wider than the sequence
        "i": dict(B=2, T=20, C=8, W=1, bias=False),
        "packed2": dict(B=1, documents=(1, 1, 3, 64, 1, 2, 5), C=10, W=4),
        "packed3": dict(B=1, documents=(130, 1), C=9, W=3, bias=False),
    }.items():
        yield name, "causal_conv1d", {}, lambda draw, sizes=sizes: inputs(draw, **sizes)


def attention_cases():
    def inputs(draw, H, D, T=None, B=1, G=1, documents=None):
        T = T or sum(documents)
        x = {"q": draw.normal(B, T, H, D), "k": draw.normal(B, T, G, D), "v": draw.normal(B, T, G, D)}
        return x | ({"cu_seqlens": packed(*documents)} if documents else {})

    for name, sizes in {
        "d": dict(B=3, T=1, H=3, G=3, D=4),
        "e": dict(B=2, T=65, H=6, G=2, D=10),
        "f": dict(T=127, H=3, D=64),
        "g": dict(T=193, H=2, G=2, D=33),
        "h": dict(B=2, T=64, H=8, G=4, D=5),
        "packed2": dict(documents=(1, 1, 63, 65, 1), H=4, G=2, D=12),
        "packed3": dict(documents=(1, 1, 1, 1, 1, 1), H=2, D=8),
    }.items():
        yield name, "softmax_attention", {}, lambda draw, sizes=sizes: inputs(draw, **sizes)

    for name, shape, theta in (("d", (3, 65, 2, 10), 1e4), ("e", (1, 200, 3, 32), 5e5), ("f", (2, 5, 1, 2), 100.0)):
        yield name, "rope", {"theta": theta}, lambda draw, shape=shape: {"x": draw.normal(*shape)}
    yield "packed0", "rope", {"theta": 1e4}, lambda draw: {"x": draw.normal(1, 70, 2, 6), "cu_seqlens": packed(1, 64, 1, 4)}


def adamw_cases():
    for name, count, steps, decay in (("a", 1, 1, 0.0), ("b", 333, 12, 0.01)):
        params = {"lr": 3e-3, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": decay, "steps": steps}
        yield name, "adamw", params, lambda draw, n=count, s=steps: {"param": draw.normal(n), "grads": draw.normal(s, n)}


# ---- models ------------------------------------------------------------------------------------------------------------

# B, T, vocabulary, hidden size, layers, MLP width (0: the default), heads, and what else the type has
MODELS = {
    "transformer_mqa": ("transformer", 3, 33, 131, 40, 1, 56, 5, dict(num_kv_heads=1, rope_theta=1e3, norm_eps=1e-6)),
    "transformer_deep": ("transformer", 1, 70, 29, 24, 4, 40, 6, dict(num_kv_heads=3, rope_theta=5e5, head_dim=10)),
    "transformer_short": ("transformer", 4, 2, 17, 8, 1, 0, 2, dict(num_kv_heads=2, rope_theta=1e4, tied=True)),
    "mamba2_groups3": ("mamba2", 2, 65, 47, 24, 2, 40, 6, dict(head_dim=8, state_size=12, n_groups=3, conv_kernel=3)),
    "mamba2_tied": ("mamba2", 1, 130, 83, 20, 3, 32, 2, dict(head_dim=20, state_size=5, norm_eps=1e-6, tied=True)),
    "log_linear_mamba2_clamp": ("log_linear_mamba2", 1, 140, 53, 28, 2, 36, 3, dict(head_dim=12, state_size=20, num_levels=5)),
    "log_linear_mamba2_groups4": ("log_linear_mamba2", 3, 19, 101, 48, 1, 0, 8,
                                  dict(head_dim=6, state_size=7, n_groups=4, conv_kernel=2, num_levels=6)),
    "log_linear_mamba2_tied": ("log_linear_mamba2", 1, 193, 37, 16, 3, 24, 2,
                               dict(head_dim=16, state_size=16, n_groups=2, num_levels=9, tied=True)),
    "gated_deltanet_narrow": ("gated_deltanet", 2, 66, 47, 24, 2, 40, 3, dict(head_dim=8, expand_v=1.0, conv_size=3)),
    "gated_deltanet_tied": ("gated_deltanet", 1, 129, 71, 40, 1, 32, 2, dict(head_dim=12, expand_v=1.5, norm_eps=1e-6, tied=True)),
    "log_linear_gated_deltanet_clamp": ("log_linear_gated_deltanet", 1, 135, 53, 28, 2, 36, 3,
                                        dict(head_dim=10, expand_v=0.5, num_levels=4)),
    "log_linear_gated_deltanet_tied": ("log_linear_gated_deltanet", 2, 65, 43, 20, 3, 28, 2,
                                       dict(head_dim=12, expand_v=2.0, conv_size=2, num_levels=8, tied=True)),
    "log_linear_gated_deltanet_wide": ("log_linear_gated_deltanet", 3, 20, 97, 48, 1, 0, 6,
                                       dict(head_dim=8, expand_v=2.0, num_levels=6)),
}


def model_params(kind, vocab, hidden, layers, mlp, heads, more):
    params = {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp or None,
              "norm_eps": 1e-5, "tie_word_embeddings": more.get("tied", False), "model_type": kind, "num_heads": heads}
    if kind.endswith("mamba2"):
        params |= {"n_groups": 1, "conv_kernel": 4}
    elif kind.endswith("gated_deltanet"):
        params |= {"conv_size": 4}
    return params | {key: value for key, value in more.items() if key != "tied"}


def model_inputs(draw, params, B, T):
    """Values at which every parameter matters: matrices keep the variance, norms and scales are near 1, all else spreads."""

    def parameter(name, shape):
        last = name.rsplit(".", 1)[-1]
        if "norm" in name or last in ("D", "L"):
            return 1 + 0.1 * draw.normal(*shape)
        if len(shape) >= 2:
            return draw.normal(*shape) / (1 if "embeddings" in name else numpy.sqrt(shape[-1]))
        return {"dt_bias": draw.normal(*shape) - 1, "A_log": 0.5 * draw.normal(*shape), "bias": 0.1 * draw.normal(*shape)}[last]

    x = {f"params/{name}": parameter(name, shape) for name, shape in reference.Model(params).shapes().items()}
    return x | {"input_ids": draw.generator.integers(params["vocab_size"], size=(B, T))}


def model_cases():
    for name, (kind, B, T, *sizes) in MODELS.items():
        params = model_params(kind, *sizes)
        yield name, "model", params, lambda draw, params=params, B=B, T=T: model_inputs(draw, params, B, T)


# ---- all ---------------------------------------------------------------------------------------------------------------


def all_cases():
    for name, op, params, inputs in itertools.chain(rowwise_cases(), cross_entropy_cases(), convolution_cases(),
                                                    attention_cases(), scan_cases(), adamw_cases(), model_cases()):
        yield f"{op}_{name}", op, params, inputs
