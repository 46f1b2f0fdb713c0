"""The architectures of `transformers` that compute the same function as a `Transformer`.

A shape has at most one architecture: each requires values of fields that no other allows together.
A shape without an architecture is refused with the fields that prevent one, already in `plan`: a
model that loads in another project and computes something else is the worst outcome.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from models.hf.config_json import ARCHITECTURES, Architecture
from models.hf.keys import LLAMA3, YARN, Keys
from models.shape.config import TransformerConfig
from pipeline.errors import InputError

_FILE = "config.json: "


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
