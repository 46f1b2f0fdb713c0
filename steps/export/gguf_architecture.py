"""The llama.cpp architecture that computes the same model as a config.json of `transformers`.

An `Architecture` has the names and shapes of a model's tensors, and writes its hyperparameters to a
GGUF file. A setting that llama.cpp's code for the architecture does not support is refused: a file
that loads and computes something else is the worst outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType

from models.hf.keys import Keys
from pipeline.errors import InputError

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    """The correspondence of a model in `transformers` and in llama.cpp.

    Attributes:
        arch: llama.cpp's architecture.
        layers: number of blocks.
        rows: rows of the embedding.
        shapes: shape of every tensor, by its name in the safetensors files.
        reordered: number of heads, by name, of the tensors whose rows llama.cpp needs in another
            order, see `interleaved`.
        transposed: names of the matrices stored as [in, out]; llama.cpp stores [out, in].
        describe: writes the hyperparameters to a file.
        made: tensors that the safetensors files lack, by their name in GGUF.
    """

    arch: MODEL_ARCH
    layers: int
    rows: int
    shapes: Shapes
    describe: Callable[[GGUFWriter], None]
    reordered: Mapping[str, int] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    made: Mapping[str, np.ndarray] = field(default_factory=dict)


def architecture(config: Config) -> Architecture:
    """The architecture of a config.json.

    Raises:
        InputError: no known architecture of llama.cpp computes the same, or a setting is missing.
    """
    listed = config.get("architectures")
    name = listed[0] if isinstance(listed, list) and listed else None
    make = _KNOWN.get(str(name))
    if make is None:
        raise InputError(
            f"config.json: architecture {name!s:.80} has no counterpart in llama.cpp that is known "
            f"here; known are {', '.join(_KNOWN)}"
        )
    keys = Keys(config)
    for known, most in _COUNTS.items():
        if config.get(known) is not None:
            keys.count(known, most=most)
    for known in _NUMBERS:
        if config.get(known) is not None:
            keys.number(known)
    try:
        return make(config)
    except KeyError as error:
        raise InputError(f"config.json: expected {error}, found none; export it again") from error


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_size, ...] of queries or keys in the order of llama.cpp's "llama".

    Its rotary embedding rotates the pairs of features (0, 1), (2, 3), ...; `transformers` rotates
    the pairs (i, i + head_size / 2). So row i of a head moves to 2 i, and i + head_size / 2 to
    2 i + 1.
    """
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _llama(config: Config) -> Architecture:
    _expect(config, hidden_act="silu")
    heads, head, kv = _heads(config)
    biased = [n for n, has in (("attn", "attention_bias"), ("mlp", "mlp_bias")) if config.get(has)]
    rope, made = _rope(config), {}
    if rope["rope_type"] == "llama3":
        made["rope_freqs.weight"] = _llama3_factors(rope, head)
    projections = {"q_proj": heads, "k_proj": kv}
    return Architecture(
        arch=MODEL_ARCH.LLAMA,
        layers=config["num_hidden_layers"],
        rows=config["vocab_size"],
        shapes=_llama_shapes(config, biased),
        describe=lambda writer: _describe_llama(writer, config, rope),
        reordered={
            f"model.layers.{layer}.self_attn.{name}.{kind}": count
            for layer in range(config["num_hidden_layers"])
            for name, count in projections.items()
            for kind in (("weight", "bias") if "attn" in biased else ("weight",))
        },
        made=made,
    )


def _qwen3(config: Config) -> Architecture:
    _expect(config, hidden_act="silu", attention_bias=False)
    kinds = config.get("layer_types")
    if kinds is None:
        whole = not config.get("use_sliding_window")
    else:
        whole = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if not whole:
        raise InputError(
            f"config.json: layer_types is {kinds!r:.80}; llama.cpp's Qwen3 attends to the whole "
            "sequence in every layer, so the file would compute something else"
        )
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        raise InputError(
            "config.json: rope_type 'llama3'; llama.cpp's Qwen3 reads no such factors; models "
            "without qk_norm are exported as Llama, which has them"
        )
    _, head, _ = _heads(config)
    shapes = _llama_shapes(config, [])
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (head,)
    return Architecture(
        arch=MODEL_ARCH.QWEN3,
        layers=config["num_hidden_layers"],
        rows=config["vocab_size"],
        shapes=shapes,
        describe=lambda writer: _describe_llama(writer, config, rope),
    )


def _gpt2(config: Config) -> Architecture:
    _expect(
        config,
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    embed, layers, vocab = config["n_embd"], config["n_layer"], config["vocab_size"]
    mlp = config.get("n_inner") or 4 * embed
    matrices = {
        "attn.c_attn": (embed, 3 * embed),
        "attn.c_proj": (embed, embed),
        "mlp.c_fc": (embed, mlp),
        "mlp.c_proj": (mlp, embed),
    }
    shapes: Shapes = {
        "transformer.wte.weight": (vocab, embed),
        "transformer.wpe.weight": (config["n_positions"], embed),
    }
    norms = ["transformer.ln_f"]
    for layer in range(layers):
        at = f"transformer.h.{layer}"
        norms += [f"{at}.ln_1", f"{at}.ln_2"]
        for name, shape in matrices.items():
            shapes[f"{at}.{name}.weight"], shapes[f"{at}.{name}.bias"] = shape, shape[1:]
    for name in norms:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (embed,)
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, embed)

    def describe(writer: GGUFWriter) -> None:
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(embed)
        writer.add_feed_forward_length(mlp)
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])

    return Architecture(
        arch=MODEL_ARCH.GPT2,
        layers=layers,
        rows=vocab,
        shapes=shapes,
        describe=describe,
        transposed=frozenset(
            f"transformer.h.{layer}.{name}.weight" for layer in range(layers) for name in matrices
        ),
    )


_KNOWN = {"LlamaForCausalLM": _llama, "Qwen3ForCausalLM": _qwen3, "GPT2LMHeadModel": _gpt2}


_LAYERS, _SIZES = 10_000, 2**31 - 1
_COUNTS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _LAYERS),
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), _SIZES),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings"), _SIZES),
    **dict.fromkeys(("vocab_size", "n_embd", "n_head", "n_inner", "n_positions"), _SIZES),
}
_NUMBERS = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta")


def _expect(config: Config, **wanted: Any) -> None:
    """Refuse settings that llama.cpp's code for the architecture ignores."""
    for name, value in wanted.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if config.get(name, allowed[0]) not in allowed:
            raise InputError(
                f"config.json: {name} is {config[name]!r}; llama.cpp's code for "
                f"{config['architectures'][0]} computes {allowed[0]!r} only"
            )


def _heads(config: Config) -> tuple[int, int, int]:
    """(query heads, head size, key and value heads)."""
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    return heads, head, config.get("num_key_value_heads") or heads


def _llama_shapes(config: Config, biased: list[str]) -> Shapes:
    (heads, head, kv), embed = _heads(config), config["hidden_size"]
    vocab, mlp = config["vocab_size"], config["intermediate_size"]
    matrices = {
        "self_attn.q_proj": (heads * head, embed),
        "self_attn.k_proj": (kv * head, embed),
        "self_attn.v_proj": (kv * head, embed),
        "self_attn.o_proj": (embed, heads * head),
        "mlp.gate_proj": (mlp, embed),
        "mlp.up_proj": (mlp, embed),
        "mlp.down_proj": (embed, mlp),
    }
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocab, embed),
        "model.norm.weight": (embed,),
    }
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, embed)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (embed,)
        for name, shape in matrices.items():
            shapes[f"{at}.{name}.weight"] = shape
            if any(part in name for part in biased):
                shapes[f"{at}.{name}.bias"] = shape[:1]
    return shapes


def _describe_llama(writer: GGUFWriter, config: Config, rope: Config) -> None:
    heads, head, kv = _heads(config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        _describe_yarn(writer, rope)


def _describe_yarn(writer: GGUFWriter, rope: Config) -> None:
    factor = rope["factor"]
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
    writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    # YaRN scales attention by 0.1 ln(factor) + 1 (Peng et al., 2023, arXiv:2309.00071). llama.cpp
    # multiplies this by the file's factor, so the file has the ratio of the two.
    paper = 0.1 * math.log(factor) + 1.0
    writer.add_rope_scaling_attn_factors((rope.get("attention_factor") or paper) / paper)


def _rope(config: Config) -> dict[str, Any]:
    """Rotary parameters, read as transformers 5 or transformers 4 writes them."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise InputError(
            f"config.json: rope_parameters: expected one set of settings for all layers, found "
            f"{given!r:.200}"
        )
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = given.get("rope_theta") or config.get("rope_theta", 10_000.0)
    if kind not in ("default", "llama3", "yarn") or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"config.json: rotary positions of the type {kind!r:.80} with {given!r:.200} are not "
            "exported; known are default, llama3 and yarn over the whole head"
        )
    if {"mscale", "mscale_all_dim"} & given.keys() or given.get("truncate") is False:
        raise InputError("config.json: YaRN with mscale or without truncation is not exported")
    return {**given, "rope_type": kind, "rope_theta": float(theta)}


def _llama3_factors(rope: Config, head: int) -> np.ndarray:
    """float32 [head / 2]: the divisors of rotary frequencies in Llama 3's scaling.

    As `transformers` computes it (Llama Team, 2024, arXiv:2407.21783, and the released code).
    """
    frequencies = rope["rope_theta"] ** -(np.arange(0, head, 2, dtype=np.float64) / head)
    # Periods of each frequency in the original context: with at least `high` of them a frequency
    # is unchanged, with at most `low` it is divided by `factor`, in between it is interpolated.
    periods = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    blend = np.clip((periods - low) / (high - low), 0.0, 1.0)
    return (1.0 / (blend + (1.0 - blend) / factor)).astype(np.float32)
