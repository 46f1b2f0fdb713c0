"""config.json of a shape, written and read, one function each per architecture.

All keys are written, because defaults differ between architectures and versions of `transformers`.
Absent keys have its defaults; unsupported values raise an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from models.hf.keys import Keys, read_rope, write_rope
from models.hf.tensors import Tensor, gpt2_tensors, rotary_tensors
from models.shape.config import TransformerConfig, YarnScaling
from pipeline.errors import InputError

_LAYERS = 10_000
Read = tuple[TransformerConfig, int]
"""A shape, and the longest sequence of the config.json."""


_COMMON = {
    "mlp_kind": "swiglu",
    "norm": "rms",
    "positions": "rotary",
    "attention_soft_cap": None,
    "embedding_norm": False,
    "query_key_scale": 1.0,
    "residual_scale": None,
    "input_scale": None,
    "value_embeddings": "none",
    "qk_norm": False,
    "qkv_biases": False,
}
_LLAMA = {**_COMMON, "logit_soft_cap": None}
_MISTRAL = {**_LLAMA, "biases": False}
_GPT2: dict[str, Any] = {
    "mlp_kind": "gelu",
    "norm": "layer",
    "positions": "learned",
    "biases": True,
}
_NANOCHAT: dict[str, Any] = {
    "mlp_kind": "relu2",
    "norm": "plain_rms",
    "embedding_norm": True,
    "qk_norm": True,
}


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers` for causal language models.

    `fields` are values that a `TransformerConfig` must have; `also` returns what else prevents it,
    as "field=value ...". `write` takes and `read` returns a shape and the longest sequence.
    """

    name: str
    model_type: str
    fields: Mapping[str, Any]
    write: Callable[[TransformerConfig, int], dict[str, Any]]
    read: Callable[[Keys], Read]
    also: Callable[[TransformerConfig], Iterable[str]] = lambda _: ()
    tensors: Callable[[TransformerConfig], Iterable[Tensor]] = rotary_tensors

    def obstacles(self, config: TransformerConfig) -> tuple[str, ...]:
        found = [
            f"{name}={getattr(config, name)!r}"
            for name, wanted in self.fields.items()
            if getattr(config, name) != wanted
        ]
        return (*found, *self.also(config))


def _write_rotary(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """The keys of Llama and of the architectures with its key names."""
    return {
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": config.biases,
        "attention_dropout": 0.0,
        **write_rope(config),
    }


def _write_llama(config: TransformerConfig, positions: int) -> dict[str, Any]:
    return {**_write_rotary(config, positions), "mlp_bias": config.biases}


def _write_mistral(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """MistralConfig; every layer has the window."""
    written = _write_rotary(config, positions)
    del written["attention_bias"]
    return {**written, "sliding_window": config.window}


def _write_qwen(config: TransformerConfig, positions: int) -> dict[str, Any]:
    windows = config.windows
    sliding = {
        "use_sliding_window": any(windows),
        "sliding_window": config.window if any(windows) else None,
        "max_window_layers": config.layers,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }
    return {**_write_rotary(config, positions), **sliding}


def _write_qwen2(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """Qwen2Config, which has no setting for biases."""
    written = _write_qwen(config, positions)
    del written["attention_bias"]
    return written


def _write_nanochat(config: TransformerConfig, positions: int) -> dict[str, Any]:
    changed = {"hidden_act": "relu2", "final_logit_softcapping": config.logit_soft_cap}
    return {**_write_rotary(config, positions), **changed}


def _write_gpt2(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """GPT2Config; its longest sequence is that of the learned positions."""
    del positions
    return {
        "n_positions": config.context,
        "n_embd": config.embed,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_epsilon,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _common(keys: Keys, tied: bool) -> dict[str, Any]:
    keys.expect("quantization_config", None)
    keys.expect("is_causal", True)
    found = keys.flag("tie_word_embeddings", tied)
    std = keys.number("initializer_range", 0.02)
    shape = {"vocab_size": keys.count("vocab_size"), "tied": found}
    return {**shape, **({"embedding_std": std} if std > 0 else {})}


def _read_rotary(keys: Keys, longest: int, kv_heads: int | None = None, **more: Any) -> Read:
    """The shape of Llama and of the architectures with its key names.

    `longest` and `kv_heads` are defaults, None for as many as there are heads; `more` are fields
    that differ from Llama's.
    """
    positions = keys.count("max_position_embeddings", longest)
    base, scaling = read_rope(keys, positions)
    embed, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if keys.has("num_key_value_heads") or kv_heads is None:  # null means as many as heads
        kv_heads = heads
    fields: dict[str, Any] = {
        **_common(keys, tied=False),
        "layers": keys.count("num_hidden_layers", most=_LAYERS),
        "embed": embed,
        "heads": heads,
        "kv_heads": keys.count("num_key_value_heads", kv_heads),
        "head_size": keys.count("head_dim", embed // heads),
        "mlp": keys.count("intermediate_size"),
        "norm_epsilon": keys.number("rms_norm_eps", 1e-6, above=0),
        "rope_base": base,
        "rope_scaling": scaling,
        "qk_norm": False,
        **more,
    }
    return TransformerConfig(**fields), positions


def _read_llama(keys: Keys) -> Read:
    keys.expect("hidden_act", "silu")
    biases = keys.flag("attention_bias", False)
    keys.expect("mlp_bias", biases, default=False)
    return _read_rotary(keys, 2048, biases=biases)


def _read_mistral(keys: Keys) -> Read:
    """MistralConfig; a `sliding_window` of null means no window."""
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    window = _sliding_window(keys)
    windows = {} if window is None else {"window_pattern": "S", "window": window}
    return _read_rotary(keys, 131_072, 8, **windows)


def _sliding_window(keys: Keys) -> int | None:
    """4096 where the key is absent; no window where it is null."""
    if keys.has("sliding_window") and keys.get("sliding_window") is None:
        return None
    return keys.count("sliding_window", 4096)


def _read_qwen(keys: Keys, **more: Any) -> Read:
    """Qwen2Config or Qwen3Config, which differ in `more`."""
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    used = keys.flag("use_sliding_window", False)
    window = _sliding_window(keys) if used else None
    kinds = keys.get("layer_types")
    layers = keys.count("num_hidden_layers", most=_LAYERS)
    first_short = keys.number("max_window_layers", 28)
    if kinds is None:
        short = [window is not None and layer >= first_short for layer in range(layers)]
    else:
        short = _short_layers(kinds, layers)
    if any(short):
        if window is None:
            raise InputError(
                "config.json: layer_types has sliding_attention but sliding_window is not in use"
            )
        more |= {"window": window, "window_pattern": _pattern_of(short)}
    return _read_rotary(keys, 32_768, 32, **more)


def _short_layers(kinds: Any, layers: int) -> list[bool]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InputError(
            f"config.json: layer_types: expected a list of {layers}, found {kinds!r:.200}"
        )
    if unknown := [k for k in kinds if k not in ("full_attention", "sliding_attention")]:
        raise InputError(
            f"config.json: layer_types has {unknown[0]!r:.80}; only full_attention and "
            "sliding_attention can be computed here"
        )
    return [kind == "sliding_attention" for kind in kinds]


def _pattern_of(short: list[bool]) -> str:
    """The shortest pattern that repeats to these layers, see `TransformerConfig.window_pattern`."""
    letters = "".join("S" if one else "L" for one in short)
    if "L" in letters and letters[-1] == "S":
        raise InputError(
            "config.json: the last layer has sliding attention and others have full attention; "
            "only patterns that end with full attention can be computed here"
        )
    for length in range(1, len(letters) + 1):
        repeated = (letters[:length] * -(-len(letters) // length))[: len(letters)]
        if "L" in letters[:length]:
            repeated = repeated[:-1] + "L"
        if repeated == letters:
            return letters[:length]
    raise AssertionError("unreachable")


def _read_qwen2(keys: Keys) -> Read:
    return _read_qwen(keys, qkv_biases=True)


def _read_qwen3(keys: Keys) -> Read:
    # The default head size does not depend on the width, unless the key is null.
    size = {} if keys.has("head_dim") else {"head_size": 128}
    return _read_qwen(keys, qk_norm=True, **size)


def _read_nanochat(keys: Keys) -> Read:
    keys.expect("hidden_act", "relu2")
    keys.expect("attention_bias", False)
    cap = 15.0
    if keys.has("final_logit_softcapping"):
        cap = keys.get("final_logit_softcapping")
        cap = None if cap is None else keys.number("final_logit_softcapping", above=0)
    config, positions = _read_rotary(keys, 2048, **_NANOCHAT, logit_soft_cap=cap)
    if isinstance(config.rope_scaling, YarnScaling):
        raise InputError(
            "config.json: rope_type 'yarn': NanoChat's norm after the rotation undoes its scale of "
            "the scores, which cannot be computed here"
        )
    return config, positions


def _read_gpt2(keys: Keys) -> Read:
    keys.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    keys.expect("scale_attn_weights", True)
    keys.expect("scale_attn_by_inverse_layer_idx", False)
    keys.expect("add_cross_attention", False)
    embed, heads = keys.count("n_embd", 768), keys.count("n_head", 12)
    positions = keys.count("n_positions", 1024)
    if embed % heads:
        raise InputError(f"config.json: n_embd {embed} is not a multiple of n_head {heads}")
    config = TransformerConfig(
        **_common(keys, tied=True),
        layers=keys.count("n_layer", 12, most=_LAYERS),
        embed=embed,
        heads=heads,
        kv_heads=heads,
        head_size=embed // heads,
        mlp=keys.count("n_inner", 4 * embed),
        norm_epsilon=keys.number("layer_norm_epsilon", 1e-5, above=0),
        context=positions,
        qk_norm=False,
        **_GPT2,
    )
    return config, positions


def _window_in(config: TransformerConfig, expected: bool) -> Iterator[str]:
    """Whether all layers have a window where one is expected, or none."""
    if any((window is not None) != expected for window in config.windows):
        yield f"window_pattern={config.window_pattern!r}"


def _llama_also(config: TransformerConfig) -> Iterator[str]:
    yield from _window_in(config, False)
    if config.embed % config.heads:
        yield f"embed={config.embed} (not a multiple of heads)"


def _gpt2_also(config: TransformerConfig) -> Iterator[str]:
    yield from _window_in(config, False)
    if config.kv_heads != config.heads:
        yield f"kv_heads={config.kv_heads} (not heads)"
    if config.heads * config.head_size != config.embed:
        yield f"head_size={config.head_size} (not embed / heads)"


def _nanochat_also(config: TransformerConfig) -> Iterator[str]:
    yield from _window_in(config, False)
    if isinstance(config.rope_scaling, YarnScaling):
        yield "rope_scaling=YarnScaling(...)"


ARCHITECTURES = (
    Architecture(
        "Qwen3ForCausalLM", "qwen3", {**_MISTRAL, "qk_norm": True}, _write_qwen, _read_qwen3
    ),
    Architecture("LlamaForCausalLM", "llama", _LLAMA, _write_llama, _read_llama, _llama_also),
    Architecture(
        "MistralForCausalLM",
        "mistral",
        _MISTRAL,
        _write_mistral,
        _read_mistral,
        also=functools.partial(_window_in, expected=True),
    ),
    Architecture(
        "Qwen2ForCausalLM", "qwen2", {**_MISTRAL, "qkv_biases": True}, _write_qwen2, _read_qwen2
    ),
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        {**_LLAMA, **_GPT2},
        _write_gpt2,
        _read_gpt2,
        also=_gpt2_also,
        tensors=gpt2_tensors,
    ),
    Architecture(
        "NanoChatForCausalLM",
        "nanochat",
        {**_COMMON, **_NANOCHAT, "biases": False},
        _write_nanochat,
        _read_nanochat,
        also=_nanochat_also,
        tensors=functools.partial(rotary_tensors, nanochat=True),
    ),
)
