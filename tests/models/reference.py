"""The transformer again, in float64 NumPy with loops: the oracle of the model's tests.

Written from the formulas, one row, one head and one position at a time; shares nothing with the
model but the names of its parameters.
"""

from __future__ import annotations

import numpy as np

OUTSIDE_BLOCKS = ("embedding", "head", "final_norm")


def parameters(model) -> dict[str, np.ndarray]:
    """The model's parameters as float64 arrays, axes in the order named here."""
    block = model.blocks.stacked
    attention, mlp = block.attention, block.mlp
    orders = {
        "embedding": (model.embedding, "vocab embed"),
        "head": (model.head, "vocab embed"),
        "final_norm": (model.final_norm.weight, "embed"),
        "attention_norm": (block.attention_norm.weight, "layers embed"),
        "mlp_norm": (block.mlp_norm.weight, "layers embed"),
        "query": (attention.query, "layers embed kv_heads q_per_kv head_size"),
        "key": (attention.key, "layers embed kv_heads head_size"),
        "value": (attention.value, "layers embed kv_heads head_size"),
        "output": (attention.output, "layers kv_heads q_per_kv head_size embed"),
        "query_norm": (attention.query_norm and attention.query_norm.weight, "layers head_size"),
        "key_norm": (attention.key_norm and attention.key_norm.weight, "layers head_size"),
        "gate": (mlp.gate, "layers embed mlp"),
        "up": (mlp.up, "layers embed mlp"),
        "down": (mlp.down, "layers mlp embed"),
    }
    return {
        name: np.asarray(array.rearrange(tuple(axes.split())).array, np.float64)
        for name, (array, axes) in orders.items()
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


def _row(p, config, tokens, segment_ids):
    x = p["embedding"][tokens]
    for layer in range(config.layers):
        w = {name: array[layer] for name, array in p.items() if name not in OUTSIDE_BLOCKS}
        h = _norm(x, w["attention_norm"], config.norm_epsilon)
        x = x + _attention(w, config, h, segment_ids)
        h = _norm(x, w["mlp_norm"], config.norm_epsilon)
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    head = p["embedding"] if config.tied else p["head"]
    return _cap(_norm(x, p["final_norm"], config.norm_epsilon) @ head.T, config.logit_soft_cap)


def _attention(w, config, h, segment_ids):
    out = np.zeros((len(h), config.embed))
    for g in range(config.kv_heads):
        keys, values = h @ w["key"][:, g], h @ w["value"][:, g]
        if config.qk_norm:
            keys = _norm(keys, w["key_norm"], config.norm_epsilon)
        keys = _rotate(keys, config.rope_base)
        for r in range(config.heads // config.kv_heads):
            queries = h @ w["query"][:, g, r]
            if config.qk_norm:
                queries = _norm(queries, w["query_norm"], config.norm_epsilon)
            mixed = attention_head(
                _rotate(queries, config.rope_base),
                keys,
                values,
                segment_ids,
                config.attention_soft_cap,
            )
            out += mixed @ w["output"][g, r]
    return out


def attention_head(queries, keys, values, segment_ids, soft_cap):
    """One head's causal attention, [position, head_size] each, position by position."""
    out = np.zeros_like(queries)
    for i, query in enumerate(queries):
        seen = [j for j in range(i + 1) if segment_ids[j] == segment_ids[i]]
        scores = _cap(keys[seen] @ query / np.sqrt(len(query)), soft_cap)
        weights = np.exp(scores - scores.max())
        out[i] = weights @ values[seen] / weights.sum()
    return out


def _norm(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def _rotate(x, base):
    """Each pair (i, i + half) as one complex number, times exp(i * angle)."""
    half = x.shape[1] // 2
    turned = np.empty_like(x)
    for position in range(len(x)):
        for i in range(half):
            angle = position * base ** (-2 * i / (2 * half))
            pair = complex(x[position, i], x[position, i + half]) * np.exp(1j * angle)
            turned[position, i], turned[position, i + half] = pair.real, pair.imag
    return turned


def _cap(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)
