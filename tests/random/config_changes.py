"""A config.json that must be read, and random changes of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

ROWS = 1000
_ABSENT = object()
_ROTARY = ("Llama", "Mistral", "Qwen2", "Qwen3", "NanoChat")
KINDS = (*_ROTARY, "GPT2")
_ODD = (None, _ABSENT, _ABSENT, 0, -1, 1.5, "4", True, False, [], {}, 2**31, 1e39, 10**400)
_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

Change = dict[str, Any]
"""Keys of config.json and their new values."""


def class_of(kind: str) -> str:
    return f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"


def sound(kind: str, draw: random.Random) -> dict[str, Any]:
    """A config.json that must be read, with all keys that have no small default."""
    heads, head = draw.choice((2, 4)), draw.choice((6, 8))
    shared = {
        "architectures": [class_of(kind)],
        "model_type": kind.lower(),
        "vocab_size": ROWS,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if kind == "GPT2":
        own = {"n_embd": heads * head, "n_layer": 2, "n_head": heads, "n_positions": 64}
        return shared | own | draw.choice(({}, {"n_inner": 40}, {"layer_norm_epsilon": 1e-3}))
    config = shared | {
        "hidden_size": heads * head,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // draw.choice((1, 2)),
        "max_position_embeddings": 64,
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "rope_theta": draw.choice((500.0, 10_000)),
    }
    if kind == "Llama":
        biases = draw.random() < 0.3
        config |= {"attention_bias": biases, "mlp_bias": biases}
    if kind == "Mistral":
        config["sliding_window"] = draw.choice((None, 5))
    if kind in ("Qwen2", "Qwen3") and draw.random() < 0.3:
        config |= {"use_sliding_window": True, "sliding_window": 5}
        config |= {"layer_types": ["sliding_attention", "full_attention"]}
    if kind == "Qwen3" or draw.random() < 0.3:
        config["head_dim"] = draw.choice((6, 10))
    return config


def _scaling(draw: random.Random) -> dict[str, Any]:
    """Settings of rotary positions, sound or not."""
    factors = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    length = {"original_max_position_embeddings": draw.choice((16, 32))}
    kind = draw.choice(("llama3", "yarn", "default") * 4 + ("linear", "dynamic"))
    found: dict[str, Any] = {"rope_type": kind}
    if kind == "llama3":
        found |= factors | length
    elif kind != "default":
        found |= {"factor": draw.choice((2.0, 8))} | length
        more = {"attention_factor": 1.3, "beta_fast": 20, "beta_slow": 2.0}
        found |= {name: more[name] for name in more if draw.random() < 0.3}
    if draw.random() < 0.3:
        found["type"] = found.pop("rope_type")
    if draw.random() < 0.4:
        found["rope_theta"] = draw.choice((300.0, 10_000.0, 500))
    if draw.random() < 0.2:
        found.pop(draw.choice(list(found)))
    if draw.random() < 0.1:
        names = (*found, "mscale", "truncate", "partial_rotary_factor", "mrope_section")
        found[draw.choice(names)] = draw.choice((*_ODD[:2], 0, 1, 0.5, -1.0, "8", True, [2, 3]))
    return {name: value for name, value in found.items() if value is not _ABSENT}


def _rope(config: dict[str, Any], draw: random.Random) -> Change:
    """Other rotary settings, in the form of transformers 4 or 5 or in both."""
    places = draw.choice(
        (["rope_scaling"], ["rope_parameters"], ["rope_scaling", "rope_parameters"])
    )
    scaling = _scaling(draw)
    change: Change = dict.fromkeys(places, scaling)
    if len(places) == 2 and draw.random() < 0.7:
        change["rope_parameters"] = {**scaling, "rope_theta": config["rope_theta"]}
    if draw.random() < 0.3:
        change["original_max_position_embeddings"] = draw.choice((16, 48, 32, None, "16"))
    if draw.random() < 0.3:
        odd_base = draw.choice((None, 0, -1, "1e4", 1e39))
        change["rope_theta"] = draw.choice((_ABSENT, 2000, 300.0, odd_base))
    return change


def _other_kind(config: dict[str, Any], draw: random.Random) -> Change:
    kind = draw.choice(KINDS)
    named = draw.choice(([class_of(kind)], [class_of(kind), "Other"], None, _ABSENT, [], "Llama"))
    return draw.choice(({"model_type": kind.lower()}, {"architectures": named}))


def _layers(config: dict[str, Any], draw: random.Random) -> Change:
    kinds = [draw.choice(("full_attention", "sliding_attention")) for _ in range(2)]
    return {
        "layer_types": draw.choice((kinds, kinds[:1], None, _ABSENT, [*kinds, "chunked"])),
        "use_sliding_window": draw.choice((True, False, None, _ABSENT)),
        "sliding_window": draw.choice((5, 9, None, _ABSENT, 0, -2, "5", 5.0, True)),
        "max_window_layers": draw.choice((0, 1, 2, _ABSENT, -1)),
    }


def _one(config: dict[str, Any], draw: random.Random) -> Change:
    """An odd value of a key that is there, or a key that may be."""
    more = {
        "head_dim": (4, 8, 12, 5, None),
        "hidden_act": ("silu", "gelu", "relu2", None),
        "activation_function": ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu"),
        "attention_bias": (True, False, None, "no"),
        "mlp_bias": (True, False),
        "tie_word_embeddings": (True, False, None, 1),
        "final_logit_softcapping": (None, 5.0, 30, 0, _ABSENT),
        "scale_attn_by_inverse_layer_idx": (True, False),
        "scale_attn_weights": (True, False),
        "partial_rotary_factor": (1.0, 1, 0.5, None),
        "initializer_range": (0, 0.5, -1, "x"),
        "is_causal": (False, True),
        "quantization_config": ({}, None, {"bits": 4}),
        "attention_multiplier": (0.1, 1.0, None, False),
        "num_key_value_heads": (1, 2, 3, None, _ABSENT),
        "sliding_window": (3, None, _ABSENT),
        "use_cache": (True, False, None),
        "transformers_weights": ("other.safetensors",),
        "dtype": ("float16", "bfloat16", None),
    }
    values = {**dict.fromkeys(config, _ODD), **more}
    if draw.random() < 0.3:
        values = dict.fromkeys(config.keys() - {"architectures"}, _ODD)
    name = draw.choice(sorted(values))
    return {name: draw.choice(values[name])}


def odd(kind: str, draw: random.Random) -> tuple[dict[str, Any], Change]:
    """A config.json of up to three random changes, and the changes."""
    config = sound(kind, draw)
    ways: list[Callable[[dict[str, Any], random.Random], Change]] = [_one, _one, _other_kind]
    ways += [_rope, _rope, _rope] if kind != "GPT2" else []
    ways += [_layers] if kind in ("Qwen2", "Qwen3") else []
    change: Change = {}
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        change |= draw.choice(ways)(config, draw)
    found = {**config, **change}
    return {name: value for name, value in found.items() if value is not _ABSENT}, change


# What a message may call a key: by a key that it belongs to or is compared with.
_ALSO = {
    "rope_scaling": ("rope_",),
    "rope_parameters": ("rope_",),
    "model_type": ("architecture",),
    "architectures": ("architecture", "model_type"),
    "attention_bias": ("mlp_bias",),
    "num_attention_heads": ("num_key_value_heads", "hidden_size", "head_dim"),
    "n_head": ("n_embd",),
    "hidden_size": ("head_dim",),
}


def names_a_change(line: str, change: Change) -> bool:
    """Whether a refusal names something that was changed."""
    if {"model_type", "architectures"} & change.keys():
        return line.startswith("config.json: ")  # any key may be odd in another class
    inner = [n for v in change.values() if isinstance(v, dict) for n in v]
    names = [*change, *inner, *(other for name in change for other in _ALSO.get(name, ()))]
    if inner or "original_max_position_embeddings" in change:
        names += _ROPE_KEYS
    return any(name in line for name in names)


def shown(change: Change) -> str:
    shown = {n: "absent" if v is _ABSENT else v for n, v in change.items()}
    return f"{shown!r:.400}"
