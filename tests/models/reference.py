"""The transformer again, in float64 NumPy with loops: the oracle of the model's tests.

Written from the formulas, one row, one head and one position at a time; shares nothing with the
model but the names of its parameters.
"""

from __future__ import annotations

import cmath
import math

import numpy as np

from models.shape.config import YarnScaling

TABLES = ("value_embedding", "value_gate")
OUTSIDE_BLOCKS = ("embedding", "position_embedding", "head", "final_norm", *TABLES)
HEADS = "kv_heads q_per_kv head_size"


def parameters(model) -> dict[str, np.ndarray]:
    """The model's parameters as float64 arrays, axes in the order named here."""
    block = model.blocks.stacked
    attention, mlp = block.attention, block.mlp
    arrays = {
        "embedding": (model.embedding, "vocab embed"),
        "position_embedding": (model.position_embedding, "position embed"),
        "head": (model.head, "vocab embed"),
        "value_embedding": (model.value_embedding, "layers vocab kv_heads head_size"),
        "value_gate": (model.value_gate, "layers gate_inputs kv_heads"),
        "residual_scale": (block.residual_scale, "layers"),
        "input_scale": (block.input_scale, "layers"),
    }
    norms = {
        "final_norm": (model.final_norm, "embed"),
        "attention_norm": (block.attention_norm, "layers embed"),
        "mlp_norm": (block.mlp_norm, "layers embed"),
        "query_norm": (attention.query_norm, "layers head_size"),
        "key_norm": (attention.key_norm, "layers head_size"),
    }
    for name, (norm, axes) in norms.items():
        if norm is not None:
            arrays |= {name: (norm.weight, axes), f"{name}.bias": (norm.bias, axes)}
    linears = {
        "query": (attention.query, "embed", HEADS),
        "key": (attention.key, "embed", "kv_heads head_size"),
        "value": (attention.value, "embed", "kv_heads head_size"),
        "output": (attention.output, HEADS, "embed"),
        "gate": (mlp.gate, "embed", "mlp"),
        "up": (mlp.up, "embed", "mlp"),
        "down": (mlp.down, "mlp", "embed"),
    }
    for name, (linear, inner, outer) in linears.items():
        if linear is not None:
            arrays[name] = (linear.matrix, f"layers {inner} {outer}")
            arrays[f"{name}.bias"] = (linear.bias, f"layers {outer}")
    return {
        name: np.asarray(array.rearrange(tuple(axes.split())).array, np.float64)
        for name, (array, axes) in arrays.items()
        if array is not None
    }


def logits(model, tokens: np.ndarray, segment_ids: np.ndarray | None = None) -> np.ndarray:
    """Logits [batch, position, vocab] of integer tokens [batch, position]."""
    p, config = parameters(model), model.config
    if segment_ids is None:
        segment_ids = np.zeros_like(tokens)
    return np.stack(
        [_row(p, config, row, ids) for row, ids in zip(tokens, segment_ids, strict=True)]
    )


def nll(model, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Negative log-likelihood of each next token [batch, position - 1], and log-sum-exp."""
    scores = logits(model, tokens)[:, :-1]
    lse = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    return lse - np.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0], lse


def layer_windows(config) -> list[int | None]:
    """Positions each layer sees, None for all: the letters in turn, and the last layer all.

    Where every letter is S, the last layer is no exception.
    """
    windows, letters = [], list(config.window_pattern)
    while len(windows) < config.layers:
        letter = letters.pop(0)
        letters.append(letter)
        windows.append({"L": None, "S": config.window}[letter])
    return [*windows[:-1], None] if "L" in letters else windows


def _row(p, config, tokens, segment_ids):
    x = p["embedding"][tokens]
    if config.embedding_norm:
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_epsilon)
    if config.positions == "learned":
        before = [segment_ids[:i].tolist().count(here) for i, here in enumerate(segment_ids)]
        x = x + np.stack([p["position_embedding"][i] for i in before])
    first = x
    for layer, window in enumerate(layer_windows(config)):
        w = {n: a[layer] for n, a in p.items() if n.split(".")[0] not in OUTSIDE_BLOCKS}
        if config.value_embeddings == "alternate" and (config.layers - 1 - layer) % 2 == 0:
            table, gate = (p[name][layer // 2] for name in TABLES)
            w |= {"rows": table[tokens], "value_gate": gate}
        x = w.get("residual_scale", 1.0) * x + w.get("input_scale", 0.0) * first
        x = x + _attention(w, config, _norm(x, w, "attention_norm", config), segment_ids, window)
        x = x + _mlp(w, config, _norm(x, w, "mlp_norm", config))
    head = p["embedding"] if config.tied else p["head"]
    scores = _norm(x, p, "final_norm", config) @ head[: config.vocab_size].T
    return _cap(scores, config.logit_soft_cap)


def _mlp(w, config, h):
    def project(x, name):
        return x @ w[name] + w.get(f"{name}.bias", 0.0)

    up = project(h, "up")
    if config.mlp_kind == "swiglu":
        gate = project(h, "gate")
        up = gate / (1 + np.exp(-gate)) * up
    elif config.mlp_kind == "gelu":
        cubic = up + 0.044715 * up**3
        up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * cubic))
    else:
        up = np.where(up > 0, up, 0.0) ** {"relu": 1, "relu2": 2}[config.mlp_kind]
    return project(up, "down")


def _attention(w, config, h, segment_ids, window):
    out = np.zeros((len(h), config.embed)) + w.get("output.bias", 0.0)

    def project(name, *head):
        bias = w[f"{name}.bias"][head] if f"{name}.bias" in w else 0.0
        return h @ w[name][(slice(None), *head)] + bias

    def placed(x, norm):
        if config.qk_norm:
            x = config.query_key_scale * _norm(x, w, norm, config)
        return x if config.positions == "learned" else _rotate(x, config)

    for g in range(config.kv_heads):
        keys, values = placed(project("key", g), "key_norm"), project("value", g)
        if "rows" in w:
            share = 1 / (1 + np.exp(-h[:, :12] @ w["value_gate"][:, g]))
            values = values + 3 * share[:, None] * w["rows"][:, g]
        for r in range(config.heads // config.kv_heads):
            queries = placed(project("query", g, r), "query_norm")
            cap = config.attention_soft_cap
            mixed = attention_head(queries, keys, values, segment_ids, cap, window)
            out += mixed @ w["output"][g, r]
    return out


def attention_head(queries, keys, values, segment_ids, soft_cap, window=None):
    """One head's causal attention, [position, head_size] each, position by position."""
    out = np.zeros_like(queries)
    for i, query in enumerate(queries):
        first = 0 if window is None else max(0, i - window + 1)
        seen = [j for j in range(first, i + 1) if segment_ids[j] == segment_ids[i]]
        scores = _cap(keys[seen] @ query / np.sqrt(len(query)), soft_cap)
        weights = np.exp(scores - scores.max())
        out[i] = weights @ values[seen] / weights.sum()
    return out


def _norm(x, w, name, config):
    if config.norm == "layer":
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(x.var(-1, keepdims=True) + config.norm_epsilon)
        return scaled * w[name] + w[f"{name}.bias"]
    scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)
    return scaled if config.norm == "plain_rms" else scaled * w[name]


def frequencies(config) -> list[float]:
    """Radians per position of each pair, scaled as Llama 3 (by wavelength) or YaRN (by index)."""
    plain = [config.rope_base ** (-2 * i / config.head_size) for i in range(config.head_size // 2)]
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if isinstance(scaling, YarnScaling):
        return _yarn(plain, config, scaling)
    longest = scaling.original_context / scaling.low_frequency_factor
    shortest = scaling.original_context / scaling.high_frequency_factor

    def scaled(frequency):
        wavelength = 2 * math.pi / frequency
        if wavelength < shortest:
            return frequency
        if wavelength > longest:
            return frequency / scaling.factor
        smooth = scaling.original_context / wavelength - scaling.low_frequency_factor
        smooth /= scaling.high_frequency_factor - scaling.low_frequency_factor
        return (1 - smooth) * frequency / scaling.factor + smooth * frequency

    return [scaled(frequency) for frequency in plain]


def _yarn(plain, config, scaling) -> list[float]:
    """Between the last pair that turns often enough and the first that turns too seldom."""

    def turns(i):
        frequency = config.rope_base ** (-2 * i / config.head_size)
        return scaling.original_context * frequency / (2 * math.pi)

    places = range(config.head_size)
    low = max((i for i in places if turns(i) >= scaling.beta_fast), default=0)
    high = min((i for i in places if turns(i) <= scaling.beta_slow), default=places[-1])

    def scaled(i, frequency):
        share = min(max((i - low) / (high - low), 0.0), 1.0)
        return (1 - share) * frequency + share * frequency / scaling.factor

    return [scaled(i, frequency) for i, frequency in enumerate(plain)]


def _rotate(x, config):
    """Each pair (i, i + half) as one complex number, times exp(i * angle)."""
    half = x.shape[1] // 2
    scaling = config.rope_scaling
    length = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    turned = np.empty_like(x)
    for position in range(len(x)):
        for i, frequency in enumerate(frequencies(config)):
            turn = length * cmath.exp(1j * position * frequency)
            pair = complex(x[position, i], x[position, i + half]) * turn
            turned[position, i], turned[position, i + half] = pair.real, pair.imag
    return turned


def _cap(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)
