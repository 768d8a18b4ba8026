"""Every operator and model, straight from its formula: dense masks and token-by-token recurrences, nothing chunkwise.

NumPy in float64; gradients come from reverse-mode differentiation of this text (the package `autograd`). Shapes: B batch,
T tokens, H heads, G groups (head h reads group h // (H // G)), K key width, V value width, L levels. `documents` are the
offsets of packed documents along T (None: every row is one document). Operators take a dict of named inputs and return "o".
"""

import autograd.numpy as np
import numpy

# ---- documents and levels ----------------------------------------------------------------------------------------------


def spans(documents, length):
    """The documents of a row as (begin, end)."""
    offsets = [0, length] if documents is None else [int(offset) for offset in documents]
    return list(zip(offsets[:-1], offsets[1:]))


def positions(documents, length):
    """document[t] and position[t], counted from the start of the token's own document."""
    ends = spans(documents, length)
    document = numpy.concatenate([numpy.full(end - begin, i) for i, (begin, end) in enumerate(ends)])
    position = numpy.concatenate([numpy.arange(end - begin) for begin, end in ends])
    return document, position


def sees(documents, length):
    """[T, T]: token t sees token s of its own document, s <= t."""
    document, position = positions(documents, length)
    return (document[:, None] == document) & (position[:, None] >= position)


def level(t, s):
    return numpy.frexp(numpy.bitwise_xor(t, s))[1]  # frexp's exponent of a positive whole number is its bit width, of 0 is 0


def levels_needed(length):
    return int(level(length - 1, 0)) + 1


# ---- pointwise and norms -----------------------------------------------------------------------------------------------


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(x, 0.0)


def rms_norm(x, w, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w


def l2norm(x, eps=1e-6):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)


def log_softmax(x):
    shifted = x - np.max(x, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def cross_entropy(logits, target, ignore_index=-100):
    """The mean over the rows whose target is not ignored; logits [rows, vocabulary]."""
    rows = numpy.flatnonzero(target != ignore_index)
    return np.mean(-log_softmax(logits)[rows, target[rows]], keepdims=True)


# ---- sequence mixing ---------------------------------------------------------------------------------------------------


def causal_conv1d(x, w, bias, documents):
    """x [B, T, C], w [C, W]: the last tap meets the current token; SiLU."""
    length, width = x.shape[1], w.shape[1]
    position = positions(documents, length)[1]
    total = 0.0 if bias is None else bias
    for lag in range(min(width, length)):
        earlier = np.concatenate([np.zeros_like(x[:, :lag]), x[:, : length - lag]], axis=1)
        total = total + np.where((position >= lag)[:, None], earlier, 0.0) * w[:, width - 1 - lag]
    return silu(total)


def rope(x, theta, documents):
    """x [B, T, H, D]: the pair (i, i + D/2) of the token at position t turns by t * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    position = positions(documents, x.shape[1])[1]
    angle = position[:, None, None] * theta ** (-numpy.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    cos, sin = numpy.cos(angle).astype(x.dtype), numpy.sin(angle).astype(x.dtype)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def heads_of_groups(x, heads):
    """[B, T, G, D] -> [B, T, H, D]"""
    return np.repeat(x, heads // x.shape[2], axis=2)


def softmax_attention(q, k, v, documents):
    """q [B, T, H, D]; k, v [B, T, G, D]"""
    heads, width = q.shape[2:]
    scores = np.einsum("bthd,bshd->bhts", q, heads_of_groups(k, heads)) / width**0.5
    scores = np.where(sees(documents, q.shape[1]), scores, -1e30)
    return np.einsum("bhts,bshd->bthd", np.exp(log_softmax(scores)), heads_of_groups(v, heads))


def ssd(q, k, v, g, lam, documents):
    """q, k [B, T, G, K]; v [B, T, H, V]; g [B, T, H]; lam [B, T, H, L] or None for the linear operator"""
    length, heads = v.shape[1:3]
    t = numpy.arange(length)
    # decay[b, h, t, s] = the sum of g over s < r <= t, added up from s so that nothing cancels
    after = np.transpose(g, (0, 2, 1))[..., None] * (t[:, None] > t)
    weights = np.exp(np.cumsum(after, axis=2)) * sees(documents, length)
    weights = weights * np.einsum("bthk,bshk->bhts", heads_of_groups(q, heads), heads_of_groups(k, heads))
    if lam is not None:
        position = positions(documents, length)[1]
        clamped = numpy.minimum(level(position[:, None], position), lam.shape[-1] - 1)
        weights = weights * sum(
            np.transpose(lam[..., l], (0, 2, 1))[..., None] * (clamped == l) for l in range(lam.shape[-1])
        )
    return np.einsum("bhts,bshv->bthv", weights, v)


def gated_delta_rule(q, k, v, g, beta, lam, documents):
    """q, k [B, T, H, K]; v [B, T, H, V]; g, beta [B, T, H]; lam [B, T, H, L] or None for the linear operator.

    Token by token: the states of all levels decay and forget what they hold for the key, level 0 takes the new value. Before
    that, the states of levels 0 .. ctz(t) merge into level ctz(t) + 1, as the bits of t carry.
    """
    batch, length, heads, key_width = k.shape
    outputs = []
    for begin, end in spans(documents, length):
        count = 1 if lam is None else levels_needed(end - begin)
        level_zero = (numpy.arange(count) == 0)[:, None]
        tokens = slice(begin, end)
        decays = np.exp(g[:, tokens])[..., None, None, None]
        steps, values = k[:, tokens] * beta[:, tokens][..., None], v[:, tokens][:, :, :, None] * level_zero
        state = numpy.zeros((batch, heads, count, key_width, v.shape[-1]), k.dtype)
        states = []
        for t in range(end - begin):
            if count > 1 and t > 0:
                state = np.einsum("ml,bhlkv->bhmkv", merge(t, count).astype(k.dtype), state)
            state = decays[:, t] * state
            change = values[:, t] - np.einsum("bhk,bhlkv->bhlv", k[:, begin + t], state)
            state = state + np.einsum("bhk,bhlv->bhlkv", steps[:, t], change)
            states.append(state)
        reads = np.einsum("bthk,tbhlkv->bthlv", q[:, tokens], np.stack(states))
        if lam is not None:
            reads = lam[:, tokens][..., numpy.minimum(numpy.arange(count), lam.shape[-1] - 1)][..., None] * reads
        outputs.append(np.sum(reads, axis=3))
    return np.concatenate(outputs, axis=1)


def merge(t, count):
    """[count, count]: which levels (columns) token t >= 1 adds up to which (rows)."""
    target = (t & -t).bit_length()  # ctz + 1
    source = numpy.arange(count)
    return numpy.where(source < target, target, source) == source[:, None]


# ---- the operators by the names of the golden files --------------------------------------------------------------------

OPERATORS = {
    "rms_norm": lambda x, p: rms_norm(x["x"], x["w"], p["eps"]),
    "rms_norm_gated": lambda x, p: rms_norm(x["x"], x["w"], p["eps"]) * silu(x["z"]),
    "gated_rms_norm": lambda x, p: rms_norm(x["x"] * silu(x["z"]), x["w"], p["eps"]),
    "l2norm": lambda x, p: l2norm(x["x"], p["eps"]),
    "swiglu": lambda x, p: silu(x["gate"]) * x["up"],
    "cross_entropy": lambda x, p: cross_entropy(x["logits"], p["target"]),
    "causal_conv1d": lambda x, p: causal_conv1d(x["x"], x["w"], x["bias"] if "bias" in x else None, p["cu_seqlens"]),
    "rope": lambda x, p: rope(x["x"], p["theta"], p["cu_seqlens"]),
    "softmax_attention": lambda x, p: softmax_attention(x["q"], x["k"], x["v"], p["cu_seqlens"]),
    "ssd": lambda x, p: ssd(x["q"], x["k"], x["v"], x["g"], None, p["cu_seqlens"]),
    "log_linear_ssd": lambda x, p: ssd(x["q"], x["k"], x["v"], x["g"], x["lam"], p["cu_seqlens"]),
    "gated_delta_rule": lambda x, p: gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"], None, p["cu_seqlens"]),
    "log_linear_gated_delta_rule": lambda x, p: gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], x["lam"], p["cu_seqlens"]
    ),
}


def adamw(param, grads, lr, beta1, beta2, eps, weight_decay):
    """The parameter after the steps of grads [steps, count], with decoupled weight decay."""
    first, second = numpy.zeros_like(param), numpy.zeros_like(param)
    for step, grad in enumerate(grads, start=1):
        first = beta1 * first + (1 - beta1) * grad
        second = beta2 * second + (1 - beta2) * grad * grad
        update = first / (1 - beta1**step) / (numpy.sqrt(second / (1 - beta2**step)) + eps)
        param = param - lr * weight_decay * param - lr * update
    return param


# ---- models ------------------------------------------------------------------------------------------------------------


def linear(x, weight):
    return np.matmul(x, np.transpose(weight))


def split(x, widths):
    ends = numpy.cumsum(widths)
    return [x[..., end - width : end] for width, end in zip(widths, ends)]


def to_heads(x, heads):
    return np.reshape(x, x.shape[:2] + (heads, -1))


def merge_heads(x):
    return np.reshape(x, x.shape[:2] + (-1,))


def successors_loss(logits, ids):
    """The mean cross entropy of every token's successor; logits [B, T, vocabulary], ids [B, T]."""
    return cross_entropy(np.reshape(logits[:, :-1], (-1, logits.shape[-1])), ids[:, 1:].ravel())


class Model:
    """A language model: `config` is the "params" of its golden file, parameters are "params/<flash-linear-attention's name>"."""

    def __init__(self, config):
        self.config = config
        self.type = config["model_type"]
        self.mamba = self.type.endswith("mamba2")
        self.log_linear = self.type.startswith("log_linear")
        self.heads = config["num_heads"]
        self.levels = config.get("num_levels", 0)
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.root, self.mixer = ("backbone.", "mixer") if self.mamba else ("model.", "attn")
        self.final_norm = self.root + ("norm_f.weight" if self.mamba else "norm.weight")
        self.mlp_width = config.get("intermediate_size") or 256 * -(-8 * config["hidden_size"] // 768)

    def layer_prefixes(self):
        return [f"{self.root}layers.{i}." for i in range(self.config["num_hidden_layers"])]

    def shapes(self):
        """The shape of every parameter, by name."""
        c, width, H = self.config, self.config["hidden_size"], self.heads
        shapes = {self.root + "embeddings.weight": (c["vocab_size"], width), self.final_norm: (width,)}
        if not c["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (c["vocab_size"], width)
        if self.mamba:
            inner, keys = H * self.head_dim, c["n_groups"] * c["state_size"]
            convolved = inner + 2 * keys
            mixer = {
                "in_proj.weight": (inner + convolved + H + H * self.levels, width),
                "conv1d.weight": (convolved, 1, c["conv_kernel"]),
                "conv1d.bias": (convolved,),
                "D": (H,),
                "norm.weight": (inner,),
                "out_proj.weight": (width, inner),
            }
        elif self.type == "transformer":
            inner, keys = H * self.head_dim, c["num_kv_heads"] * self.head_dim
            mixer = {f"{x}_proj.weight": (n, width) for x, n in (("q", inner), ("k", keys), ("v", keys))}
            mixer["o_proj.weight"] = (width, inner)
        else:
            keys, values = H * self.head_dim, H * round(c["expand_v"] * self.head_dim)
            mixer = {f"{x}_proj.weight": (n, width) for x, n in zip("qkvabg", (keys, keys, values, H, H, values))}
            mixer |= {f"{x}_conv1d.weight": (n, 1, c["conv_size"]) for x, n in zip("qkv", (keys, keys, values))}
            mixer |= {"o_norm.weight": (values // H,), "o_proj.weight": (width, values)}
            if self.log_linear:
                mixer["l_proj.weight"] = (H * self.levels, width)
        if self.type != "transformer":
            mixer |= {"A_log": (H,), "dt_bias": (H,)}
            if self.log_linear:
                mixer["L"] = (H, self.levels)
        for layer in self.layer_prefixes():
            shapes |= {f"{layer}{self.mixer}.{name}": shape for name, shape in mixer.items()}
            shapes |= {f"{layer}{self.mixer}_norm.weight": (width,), f"{layer}mlp_norm.weight": (width,)}
            shapes |= {f"{layer}mlp.{x}_proj.weight": (self.mlp_width, width) for x in ("gate", "up")}
            shapes[f"{layer}mlp.down_proj.weight"] = (width, self.mlp_width)
        return shapes

    def store(self, kind, x):
        """Called with every tensor that a program would keep in memory, and with every matrix of a product ("weight")."""
        return x

    def linear(self, kind, x, weight):
        return self.store(kind, linear(x, self.store("weight", weight)))

    def logits(self, params, ids):
        eps = self.config["norm_eps"]
        embeddings = params[f"params/{self.root}embeddings.weight"]
        mix = self.mamba2 if self.mamba else self.attention if self.type == "transformer" else self.gated_deltanet
        x = self.store("stream", embeddings[ids])
        for layer in self.layer_prefixes():

            def weight(name, prefix="params/" + layer):
                return params[prefix + name]

            def mixer_weight(name, prefix=f"params/{layer}{self.mixer}."):
                return params[prefix + name]

            y = self.store("norm", rms_norm(x, weight(self.mixer + "_norm.weight"), eps))
            x = self.store("stream", x + mix(y, mixer_weight))
            y = self.store("norm", rms_norm(x, weight("mlp_norm.weight"), eps))
            gate, up = (self.linear("mlp", y, weight(f"mlp.{name}_proj.weight")) for name in ("gate", "up"))
            branch = self.linear("branch", self.store("mlp", silu(gate) * up), weight("mlp.down_proj.weight"))
            x = self.store("stream", x + branch)
        head = embeddings if self.config["tie_word_embeddings"] else params["params/lm_head.weight"]
        return self.linear("logits", self.store("norm", rms_norm(x, params["params/" + self.final_norm], eps)), head)

    def attention(self, x, weight):
        theta = self.config["rope_theta"]
        heads = {"q": self.heads, "k": self.config["num_kv_heads"], "v": self.config["num_kv_heads"]}
        q, k, v = (to_heads(self.linear("projection", x, weight(f"{name}_proj.weight")), n) for name, n in heads.items())
        q, k = (self.store("query and key", rope(y, theta, None)) for y in (q, k))
        o = self.store("scan", softmax_attention(q, k, v, None))
        return self.linear("branch", merge_heads(o), weight("o_proj.weight"))

    def level_scales(self, raw, weight):
        return softplus(weight("L") * to_heads(raw, self.heads)) if self.log_linear else None

    def mamba2(self, x, weight):
        c, H, groups = self.config, self.heads, self.config["n_groups"]
        inner, keys = H * self.head_dim, groups * c["state_size"]
        projected = linear(x, self.store("weight", weight("in_proj.weight")))
        z, xbc, dt, dl = split(projected, [inner, inner + 2 * keys, H, H * self.levels])
        z, xbc, dt, dl = *(self.store("projection", y) for y in (z, xbc)), *(self.store("gate", y) for y in (dt, dl))
        xbc = self.store("convolution", causal_conv1d(xbc, weight("conv1d.weight")[:, 0], weight("conv1d.bias"), None))
        u, b, c_ = split(xbc, [inner, keys, keys])
        u = to_heads(u, H)
        dt = softplus(dt + weight("dt_bias"))
        g = -np.exp(weight("A_log")) * dt
        lam = self.level_scales(dl, weight)
        v = self.store("value", u * dt[..., None])
        o = self.store("scan", ssd(to_heads(c_, groups), to_heads(b, groups), v, g, lam, None))
        y = self.store("skip", o + weight("D")[:, None] * u)
        y = to_heads(merge_heads(y) * silu(z), groups)
        y = rms_norm(y, np.reshape(weight("norm.weight"), (groups, -1)), c["norm_eps"])
        return self.linear("branch", self.store("gated norm", merge_heads(y)), weight("out_proj.weight"))

    def gated_deltanet(self, x, weight):
        def project(kind, name):
            return self.linear(kind, x, weight(f"{name}_proj.weight"))

        def convolve(name):
            y = causal_conv1d(project("projection", name), weight(f"{name}_conv1d.weight")[:, 0], None, None)
            return to_heads(self.store("convolution", y), self.heads)

        q, k, v = (convolve(name) for name in "qkv")
        q, k = (self.store("query and key", l2norm(y)) for y in (q, k))
        if not self.log_linear:
            q = self.store("query and key", q / self.head_dim**0.5)
        g = -np.exp(weight("A_log")) * softplus(project("gate", "a") + weight("dt_bias"))
        beta = sigmoid(project("gate", "b"))
        lam = self.level_scales(project("gate", "l"), weight) if self.log_linear else None
        o = self.store("scan", gated_delta_rule(q, k, v, g, beta, lam, None))
        gate = silu(to_heads(project("projection", "g"), self.heads))
        o = self.store("gated norm", rms_norm(o, weight("o_norm.weight"), self.config["norm_eps"]) * gate)
        return self.linear("branch", merge_heads(o), weight("o_proj.weight"))
