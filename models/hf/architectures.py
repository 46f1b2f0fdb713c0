"""The architectures of `transformers` that compute what a `Transformer` of some shape does.

A shape has at most one of them: each asks for values of fields that no other allows together. What
has none is refused with the fields that prevent it, in `plan` already: a model that loads elsewhere
and computes something else is the worst outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from models.config import TransformerConfig, YarnScaling
from models.hf import rope
from models.hf.keys import Keys
from models.hf.tensors import Tensor, gpt2_tensors, rotary_tensors
from pipeline.errors import InputError

_ROTARY = {
    "mlp_kind": "swiglu",
    "norm": "rms",
    "positions": "rotary",
    "attention_soft_cap": None,
    "logit_soft_cap": None,
    "embedding_norm": False,
}


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers` for causal language models.

    Attributes:
        name: of the class, as in config.json's "architectures".
        model_type: as in config.json.
        fields: values that a `TransformerConfig` must have.
        also: fields that prevent it though they have those values, as "field=value ...".
        write: config.json of a shape, for rows of so many positions; without what all have.
        read: the shape of a config.json, and the longest rows that it names.
        tensors: of a shape, in the order of the files.
    """

    name: str
    model_type: str
    fields: Mapping[str, Any]
    also: Callable[[TransformerConfig], Iterable[str]]
    write: Callable[[TransformerConfig, int], dict[str, Any]]
    read: Callable[[Keys], tuple[TransformerConfig, int]]
    tensors: Callable[[TransformerConfig], Iterable[Tensor]]

    def obstacles(self, config: TransformerConfig) -> tuple[str, ...]:
        """What prevents a shape from being one of these, field by field."""
        found = [
            f"{name}={getattr(config, name)!r}"
            for name, wanted in self.fields.items()
            if getattr(config, name) != wanted
        ]
        return (*found, *self.also(config))


def architecture_of(config: TransformerConfig) -> Architecture:
    """The architecture of a shape.

    Raises:
        InputError: there is none; names the fields that the nearest ones do not allow.
    """
    obstacles = {known.name: known.obstacles(config) for known in ARCHITECTURES}
    for known in ARCHITECTURES:
        if not obstacles[known.name]:
            return known
    fewest = min(map(len, obstacles.values()))
    near = [f"{n} but for {', '.join(o)}" for n, o in obstacles.items() if len(o) == fewest]
    raise InputError(
        f"no architecture of transformers has this shape; it would be {'; '.join(near)}"
    )


def describe(config: TransformerConfig) -> str:
    """One line for `plan`: the architecture, or what prevents one."""
    try:
        return f"exports to Hugging Face as {architecture_of(config).name}"
    except InputError as error:
        return f"does not export to Hugging Face: {error}"


def to_json(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """config.json of a shape, without what is known of its tokenizer and files.

    Args:
        config: the shape.
        positions: longest rows of training.

    Raises:
        InputError: no architecture has the shape.
    """
    found = architecture_of(config)
    return {
        "architectures": [found.name],
        "model_type": found.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.embedding_std,
        **found.write(config, positions),
    }


def from_json(
    content: Mapping[str, Any], ignore_keys: Collection[str] = ()
) -> tuple[Architecture, TransformerConfig, int]:
    """Architecture, shape and longest rows of a config.json.

    Args:
        content: the JSON.
        ignore_keys: keys not known here that the caller knows to change nothing.

    Raises:
        InputError: an unknown architecture or key, or a setting that cannot be computed here.
    """
    name = next(iter(content.get("architectures") or ()), None)
    for known in ARCHITECTURES:
        if name == known.name or (name is None and content.get("model_type") == known.model_type):
            keys = Keys(content, ignore_keys)
            config, positions = known.read(keys)
            keys.finish()
            return known, config, positions
    raise InputError(
        f"config.json: architecture {name or content.get('model_type')} cannot be computed here; "
        f"known are {', '.join(known.name for known in ARCHITECTURES)}"
    )


def _prevents(*found: tuple[bool, str]) -> list[str]:
    return [text for prevented, text in found if prevented]


def _window(config: TransformerConfig) -> bool:
    return any(window is not None for window in config.windows)


def _pattern(config: TransformerConfig) -> str:
    return f"window_pattern={config.window_pattern!r}"


def _llama_also(config: TransformerConfig) -> list[str]:
    return _prevents(
        (_window(config), _pattern(config)),
        (bool(config.embed % config.heads), f"embed={config.embed} (no multiple of heads)"),
    )


def _write_rotary(config: TransformerConfig, positions: int) -> dict[str, Any]:
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
        **rope.write(config),
    }


def _write_llama(config: TransformerConfig, positions: int) -> dict[str, Any]:
    return {**_write_rotary(config, positions), "mlp_bias": config.biases}


def _write_mistral(config: TransformerConfig, positions: int) -> dict[str, Any]:
    written = _write_rotary(config, positions)
    del written["attention_bias"]
    return {**written, "sliding_window": config.window}


def _write_qwen(config: TransformerConfig, positions: int) -> dict[str, Any]:
    windows = config.windows
    sliding = {
        "use_sliding_window": _window(config),
        "sliding_window": config.window if _window(config) else None,
        "max_window_layers": config.layers,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }
    return {**_write_rotary(config, positions), **sliding}


def _write_qwen2(config: TransformerConfig, positions: int) -> dict[str, Any]:
    written = _write_qwen(config, positions)
    del written["attention_bias"]
    return written


def _write_nanochat(config: TransformerConfig, positions: int) -> dict[str, Any]:
    changed = {"hidden_act": "relu2", "final_logit_softcapping": config.logit_soft_cap}
    return {**_write_rotary(config, positions), **changed}


def _write_gpt2(config: TransformerConfig, positions: int) -> dict[str, Any]:
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
    found = keys.get("tie_word_embeddings", tied)
    std = keys.number("initializer_range", 0.02)
    shape = {"vocab_size": keys.count("vocab_size"), "tied": bool(found)}
    return {**shape, **({"embedding_std": std} if std > 0 else {})}


def _read_rotary(keys: Keys, *, epsilon: float = 1e-6, **more: Any) -> dict[str, Any]:
    base, scaling = rope.read(keys)
    embed, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    return {
        **_common(keys, tied=False),
        "layers": keys.count("num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "kv_heads": keys.count("num_key_value_heads", heads),
        "head_size": keys.count("head_dim", embed // heads),
        "mlp": keys.count("intermediate_size"),
        "norm_epsilon": keys.number("rms_norm_eps", epsilon),
        "rope_base": base,
        "rope_scaling": scaling,
        "qk_norm": False,
        **more,
    }


def _positions(keys: Keys, default: int) -> int:
    return keys.count("max_position_embeddings", default)


def _read_llama(keys: Keys) -> tuple[TransformerConfig, int]:
    keys.expect("hidden_act", "silu")
    biases = keys.get("attention_bias", False)
    keys.expect("mlp_bias", bool(biases), default=False)
    shape = _read_rotary(keys, biases=bool(biases))
    return TransformerConfig(**shape), _positions(keys, 2048)


def _read_mistral(keys: Keys) -> tuple[TransformerConfig, int]:
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    # Absent, it is 4096; null, there is none.
    window = keys.get("sliding_window") if keys.has("sliding_window") else 4096
    windows = {} if window is None else {"window_pattern": "S", "window": window}
    return TransformerConfig(**_read_rotary(keys, **windows)), _positions(keys, 131_072)


def _read_qwen(keys: Keys, **more: Any) -> tuple[TransformerConfig, int]:
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    shape = _read_rotary(keys, **more)
    used = keys.get("use_sliding_window", False)
    window = keys.get("sliding_window", 4096) if used else None
    keys.get("sliding_window")
    kinds = keys.get("layer_types")
    first_short = keys.get("max_window_layers", 28)
    if kinds is None:
        short = [window is not None and layer >= first_short for layer in range(shape["layers"])]
    else:
        short = _short_layers(kinds, shape["layers"])
    if any(short):
        if window is None:
            raise InputError(
                "config.json: layer_types has sliding_attention and no sliding_window is in use"
            )
        shape |= {"window": window, "window_pattern": _pattern_of(short)}
    return TransformerConfig(**shape), _positions(keys, 32_768)


def _short_layers(kinds: Any, layers: int) -> list[bool]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InputError(f"config.json: layer_types: expected {layers} of them, found {kinds!r}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise InputError(
            f"config.json: layer_types has {min(unknown)!r}; only full_attention and "
            "sliding_attention can be computed here"
        )
    return [kind == "sliding_attention" for kind in kinds]


def _pattern_of(short: list[bool]) -> str:
    """The shortest repeated pattern that gives these layers; the last one is never short in it."""
    letters = "".join("S" if one else "L" for one in short)
    if "L" in letters and letters[-1] == "S":
        raise InputError(
            "config.json: the last layer has sliding attention and others have not; only patterns "
            "that end with full attention can be computed here"
        )
    for length in range(1, len(letters) + 1):
        repeated = (letters[:length] * len(letters))[: len(letters)]
        if "L" in letters[:length]:
            repeated = repeated[:-1] + "L"
        if repeated == letters:
            return letters[:length]
    raise AssertionError("unreachable")


def _read_qwen2(keys: Keys) -> tuple[TransformerConfig, int]:
    return _read_qwen(keys, qkv_biases=True)


def _read_qwen3(keys: Keys) -> tuple[TransformerConfig, int]:
    # Its head size does not follow from the width.
    return _read_qwen(keys, qk_norm=True, head_size=keys.count("head_dim", 128))


def _read_nanochat(keys: Keys) -> tuple[TransformerConfig, int]:
    keys.expect("hidden_act", "relu2")
    keys.expect("attention_bias", False)
    cap = keys.get("final_logit_softcapping") if keys.has("final_logit_softcapping") else 15.0
    shape = _read_rotary(keys) | {"qk_norm": True}
    shape |= {"mlp_kind": "relu2", "norm": "plain_rms", "embedding_norm": True}
    return TransformerConfig(**shape, logit_soft_cap=cap), _positions(keys, 2048)


def _read_gpt2(keys: Keys) -> tuple[TransformerConfig, int]:
    keys.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    keys.expect("scale_attn_weights", True)
    keys.expect("scale_attn_by_inverse_layer_idx", False)
    keys.expect("add_cross_attention", False)
    embed, heads, positions = (
        keys.count("n_embd", 768),
        keys.count("n_head", 12),
        keys.count("n_positions", 1024),
    )
    if embed % heads:
        raise InputError(f"config.json: n_embd {embed} is no multiple of n_head {heads}")
    config = TransformerConfig(
        **_common(keys, tied=True),
        layers=keys.count("n_layer", 12),
        embed=embed,
        heads=heads,
        kv_heads=heads,
        head_size=embed // heads,
        mlp=keys.count("n_inner", 4 * embed),
        mlp_kind="gelu",
        norm="layer",
        norm_epsilon=keys.number("layer_norm_epsilon", 1e-5),
        biases=True,
        positions="learned",
        context=positions,
        qk_norm=False,
    )
    return config, positions


def _gpt2_also(config: TransformerConfig) -> list[str]:
    return _prevents(
        (_window(config), _pattern(config)),
        (config.kv_heads != config.heads, f"kv_heads={config.kv_heads} (not heads)"),
        (
            config.heads * config.head_size != config.embed,
            f"head_size={config.head_size} (not embed / heads)",
        ),
    )


def _nanochat_also(config: TransformerConfig) -> list[str]:
    yarn = isinstance(config.rope_scaling, YarnScaling)
    return _prevents((_window(config), _pattern(config)), (yarn, "rope_scaling=YarnScaling(...)"))


def _mistral_also(config: TransformerConfig) -> list[str]:
    whole = any(window is None for window in config.windows)
    return _prevents((whole, _pattern(config)))


def _nothing(config: TransformerConfig) -> list[str]:
    del config
    return []


def _nanochat_tensors(config: TransformerConfig) -> Iterable[Tensor]:
    return rotary_tensors(config, nanochat=True)


ARCHITECTURES = (
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        fields={**_ROTARY, "qk_norm": True, "biases": False, "qkv_biases": False},
        also=_nothing,
        write=_write_qwen,
        read=_read_qwen3,
        tensors=rotary_tensors,
    ),
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        fields={**_ROTARY, "qk_norm": False, "qkv_biases": False},
        also=_llama_also,
        write=_write_llama,
        read=_read_llama,
        tensors=rotary_tensors,
    ),
    Architecture(
        name="MistralForCausalLM",
        model_type="mistral",
        fields={**_ROTARY, "qk_norm": False, "biases": False, "qkv_biases": False},
        also=_mistral_also,
        write=_write_mistral,
        read=_read_mistral,
        tensors=rotary_tensors,
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        fields={**_ROTARY, "qk_norm": False, "biases": False, "qkv_biases": True},
        also=_nothing,
        write=_write_qwen2,
        read=_read_qwen2,
        tensors=rotary_tensors,
    ),
    Architecture(
        name="GPT2LMHeadModel",
        model_type="gpt2",
        fields={
            "mlp_kind": "gelu",
            "norm": "layer",
            "biases": True,
            "qkv_biases": False,
            "positions": "learned",
            "qk_norm": False,
            "attention_soft_cap": None,
            "logit_soft_cap": None,
            "embedding_norm": False,
        },
        also=_gpt2_also,
        write=_write_gpt2,
        read=_read_gpt2,
        tensors=gpt2_tensors,
    ),
    Architecture(
        name="NanoChatForCausalLM",
        model_type="nanochat",
        fields={
            "mlp_kind": "relu2",
            "norm": "plain_rms",
            "positions": "rotary",
            "qk_norm": True,
            "biases": False,
            "qkv_biases": False,
            "attention_soft_cap": None,
            "embedding_norm": True,
        },
        also=_nanochat_also,
        write=_write_nanochat,
        read=_read_nanochat,
        tensors=_nanochat_tensors,
    ),
)
