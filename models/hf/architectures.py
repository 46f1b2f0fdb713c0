"""The architectures of `transformers` that compute the same function as a `Transformer`.

A shape has at most one architecture: each requires values of fields that no other allows together.
A shape without an architecture is refused with the fields that prevent one, already in `plan`: a
model that loads in another project and computes something else is the worst outcome.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from models.hf import config_json
from models.hf.keys import LLAMA3, YARN, Keys
from models.hf.tensors import Tensor, gpt2_tensors, rotary_tensors
from models.shape.config import TransformerConfig, YarnScaling
from pipeline.errors import InputError

_FILE = "config.json: "
_ALL = {
    "query_key_scale": 1.0,
    "residual_scale": None,
    "input_scale": None,
    "value_embeddings": "none",
}
_PLAIN = {"attention_soft_cap": None, "logit_soft_cap": None, "embedding_norm": False, **_ALL}
_ROTARY = {"mlp_kind": "swiglu", "norm": "rms", "positions": "rotary", **_PLAIN}


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers` for causal language models.

    `fields` are values that a `TransformerConfig` must have; `also` returns further conditions that
    prevent it, and their words, as "field=value ...". `write` takes and `read` returns a shape and
    the longest sequence of training.
    """

    name: str
    model_type: str
    fields: Mapping[str, Any]
    also: Callable[[TransformerConfig], Iterable[tuple[bool, str]]]
    write: Callable[[TransformerConfig, int], dict[str, Any]]
    read: Callable[[Keys], tuple[TransformerConfig, int]]
    tensors: Callable[[TransformerConfig], Iterable[Tensor]]

    def obstacles(self, config: TransformerConfig) -> tuple[str, ...]:
        """The fields that prevent a shape from having this architecture."""
        found = [
            f"{name}={getattr(config, name)!r}"
            for name, wanted in self.fields.items()
            if getattr(config, name) != wanted
        ]
        return (*found, *(words for prevents, words in self.also(config) if prevents))


def architecture_of(config: TransformerConfig) -> Architecture:
    """The architecture of a shape; `InputError` names the fields that the nearest ones forbid."""
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
    """One line for `plan`: the architecture, or the reason why there is none."""
    try:
        return f"exports to Hugging Face as {architecture_of(config).name}"
    except InputError as error:
        return f"does not export to Hugging Face: {error}"


def to_json(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """config.json of a shape, without the keys that depend on the tokenizer and the files.

    `positions` is the longest sequence of training. Raises `InputError` for shapes without an
    architecture.
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
    """Architecture, shape and longest sequence of a config.json.

    `ignore_keys` are unknown keys that the caller declares not to change the computation. Raises
    `InputError` for other ones, and for what cannot be computed here.
    """
    listed = content.get("architectures") or [None]
    if not isinstance(listed, list):
        raise InputError(f"config.json: architectures: expected a list, found {listed!r:.80}")
    name, kind = listed[0], content.get("model_type")
    known = next(
        (a for a in ARCHITECTURES if name == a.name or (name, kind) == (None, a.model_type)), None
    )
    if known is None:
        raise InputError(
            f"config.json: architecture {name or kind!s:.80} cannot be computed here; known are "
            f"{', '.join(known.name for known in ARCHITECTURES)}"
        )
    if kind not in (None, known.model_type):  # by which `transformers` chooses the class
        raise InputError(
            f"config.json: architectures has {name} and model_type is {kind!r:.80}; expected "
            f"{known.model_type!r}, or a model of the class that belongs to it"
        )
    keys = Keys(content, ignore_keys)
    try:
        config, positions = known.read(keys)
    except InputError as error:  # errors of TransformerConfig do not name the file and its keys
        pattern = r"\w+(?:Config|Scaling)\.(\w+)"
        text = re.sub(pattern, lambda field: _NAMES.get(field[1], field[1]), str(error))
        raise InputError(_FILE + text.removeprefix(_FILE)) from None
    keys.finish()
    return known, config, positions


_NAMES = {ours: theirs for theirs, ours in (LLAMA3 | YARN).items()}
_NAMES |= {"kv_heads": "num_key_value_heads", "head_size": "head_dim"}


def _window_in(config: TransformerConfig, expected: bool) -> list[tuple[bool, str]]:
    """Whether all layers have a window where one is expected, or none."""
    wrong = any((window is not None) != expected for window in config.windows)
    return [(wrong, f"window_pattern={config.window_pattern!r}")]


def _llama_also(config: TransformerConfig) -> list[tuple[bool, str]]:
    uneven = config.embed % config.heads != 0
    return [
        *_window_in(config, False),
        (uneven, f"embed={config.embed} (not a multiple of heads)"),
    ]


def _gpt2_also(config: TransformerConfig) -> list[tuple[bool, str]]:
    other = config.heads * config.head_size != config.embed
    return [
        *_window_in(config, False),
        (config.kv_heads != config.heads, f"kv_heads={config.kv_heads} (not heads)"),
        (other, f"head_size={config.head_size} (not embed / heads)"),
    ]


def _nanochat_also(config: TransformerConfig) -> list[tuple[bool, str]]:
    yarn = isinstance(config.rope_scaling, YarnScaling)
    return [*_window_in(config, False), (yarn, "rope_scaling=YarnScaling(...)")]


ARCHITECTURES = (
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        fields={**_ROTARY, "qk_norm": True, "biases": False, "qkv_biases": False},
        also=lambda _: (),
        write=config_json.write_qwen,
        read=config_json.read_qwen3,
        tensors=rotary_tensors,
    ),
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        fields={**_ROTARY, "qk_norm": False, "qkv_biases": False},
        also=_llama_also,
        write=config_json.write_llama,
        read=config_json.read_llama,
        tensors=rotary_tensors,
    ),
    Architecture(
        name="MistralForCausalLM",
        model_type="mistral",
        fields={**_ROTARY, "qk_norm": False, "biases": False, "qkv_biases": False},
        also=functools.partial(_window_in, expected=True),
        write=config_json.write_mistral,
        read=config_json.read_mistral,
        tensors=rotary_tensors,
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        fields={**_ROTARY, "qk_norm": False, "biases": False, "qkv_biases": True},
        also=lambda _: (),
        write=config_json.write_qwen2,
        read=config_json.read_qwen2,
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
            **_PLAIN,
        },
        also=_gpt2_also,
        write=config_json.write_gpt2,
        read=config_json.read_gpt2,
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
            **_ALL,
        },
        also=_nanochat_also,
        write=config_json.write_nanochat,
        read=config_json.read_nanochat,
        tensors=functools.partial(rotary_tensors, nanochat=True),
    ),
)
