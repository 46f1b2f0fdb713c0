"""Reads a config.json key by key, so that no key that changes the model is skipped.

Rotary positions have two forms: version 5 of `transformers` has one object, `rope_parameters`;
older ones have `rope_theta` and `rope_scaling`. We write both. A file with both must mean the same
by either, since programs differ in which they read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from models.shape.config import RopeScaling, TransformerConfig, YarnScaling
from pipeline.errors import InputError

_BASE = 10_000.0
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context",
}
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "temperature",
}
_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor")


def write_rope(config: TransformerConfig) -> dict[str, Any]:
    scaling, base, old = config.rope_scaling, config.rope_base, None
    if scaling is not None:
        yarn = isinstance(scaling, YarnScaling)
        values = {
            theirs: getattr(scaling, ours) for theirs, ours in (YARN if yarn else LLAMA3).items()
        }
        given = {name: value for name, value in values.items() if value is not None}
        old = {"rope_type": "yarn" if yarn else "llama3", **given}
    both = {**(old or {"rope_type": "default"}), "rope_theta": base}
    return {"rope_parameters": both, "rope_theta": base, "rope_scaling": old}


def read_rope(keys: Keys, positions: int) -> tuple[float, RopeScaling | YarnScaling | None]:
    """Base and scaling of the rotary frequencies; `positions` is the default original context."""
    base = keys.number("rope_theta", _BASE, above=0)
    keys.expect("partial_rotary_factor", 1.0, 1)
    original = keys.count("original_max_position_embeddings", positions)
    given = {name: keys.get(name) for name in ("rope_scaling", "rope_parameters")}
    found = {
        name: _read_form(keys, name, settings, base, original)
        for name, settings in given.items()
        if settings
    } or {"rope_theta": (base, None)}
    first, *others = found.values()
    if others and others != [first]:
        raise InputError(
            f"config.json: rope_scaling {given['rope_scaling']!r:.200} and rope_parameters "
            f"{given['rope_parameters']!r:.200} disagree; leave one out"
        )
    return first


def _read_form(
    keys: Keys, name: str, found: Any, base: float, original: int
) -> tuple[float, RopeScaling | YarnScaling | None]:
    if not isinstance(found, Mapping) or any(isinstance(v, Mapping) for v in found.values()):
        raise InputError(
            f"config.json: {name}: expected one set of settings for all layers, found "
            f"{found!r:.200}"
        )
    inner = keys.inside(found)
    kind = inner.get("rope_type", inner.get("type", "default"))
    # YaRN's boundaries are logarithms to the base.
    base = inner.number("rope_theta", base, above=1 if kind == "yarn" else 0)
    inner.expect("partial_rotary_factor", 1.0, 1)
    names = {"default": {}, "llama3": LLAMA3, "yarn": YARN}.get(str(kind))
    if names is None:
        raise InputError(
            f"config.json: rope_type {kind!r:.80} is unknown here; known are default, llama3 "
            "and yarn"
        )
    if kind == "yarn":
        inner.expect("truncate", True)
    stated = {theirs: ours for theirs, ours in names.items() if inner.get(theirs) is not None}
    given: dict[str, Any] = {ours: inner.number(theirs) for theirs, ours in stated.items()}
    if names:
        context = inner.count("original_max_position_embeddings", original)
        # Beside the object it has priority in `transformers`.
        given["original_context"] = keys.count("original_max_position_embeddings", context)
    inner.finish()
    for theirs, ours in names.items():
        if ours not in given and theirs not in _OPTIONAL:
            raise InputError(f"config.json: rope_type {kind!r}: expected {theirs}, found none")
    if not names:
        return base, None
    return base, (YarnScaling if kind == "yarn" else RopeScaling)(**given)


_HARMLESS = """
_name_or_path _attn_implementation architectures model_type transformers_version torch_dtype dtype
use_cache return_dict bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout pretraining_tp
reorder_and_upcast_attn output_attentions id2label output_hidden_states label2id num_labels
problem_type torchscript summary_type summary_use_proj summary_activation summary_first_dropout
summary_proj_to_labels task_specific_params chunk_size_feed_forward gradient_checkpointing
is_encoder_decoder is_decoder n_ctx finetuning_task tokenizer_class prefix max_window_layers
use_sliding_window tie_encoder_decoder do_sample temperature top_k _attn_implementation_autoset
unsloth_fixed unsloth_version is_llama_config top_p max_length min_length num_beams
repetition_penalty
"""
"""Keys about training, generation, storage or display, which do not change what is computed."""

_MOST = 2**31 - 1  # largest size: an int32, as in other programs that read a config.json
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which models compute


class Keys:
    """The keys of a config.json; `finish` raises an error for keys that were never read."""

    def __init__(self, content: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
        self._content = content
        self._ignored = ignored
        self._unread = set(content) - set(_HARMLESS.split()) - set(ignored)

    def inside(self, content: Mapping[str, Any]) -> Keys:
        """The keys of an object inside this one, with the same keys ignored."""
        return Keys(content, self._ignored)

    def get(self, name: str, default: Any = None) -> Any:
        """A key's value; the default where it is absent or null."""
        self._unread.discard(name)
        value = self._content.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        return name in self._content

    def count(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        """A positive integer. Raises `InputError` for other values and for a missing one."""
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value <= most:
            large = f" of at most {most:,}" if type(value) is int and value > most else ""
            raise InputError(
                f"config.json: {name}: expected a positive integer{large}, found {value!r:.80}"
            )
        return value

    def number(
        self, name: str, default: float | None = None, *, above: float = float("-inf")
    ) -> float:
        """A number. Raises `InputError` for other values, not above `above`, or a missing one."""
        value = self.get(name, default)
        number = type(value) in (int, float)
        if not number or not above < value or not abs(value) <= _LARGEST:
            more = f" above {above:g}" if above > float("-inf") else ""
            more += " that float32 can hold" if number and value > _LARGEST else ""
            raise InputError(f"config.json: {name}: expected a number{more}, found {value!r:.80}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise InputError(f"config.json: {name}: expected true or false, found {value!r:.80}")
        return value

    def expect(self, name: str, *allowed: Any, default: Any = None) -> None:
        """Raise `InputError` unless a key, or its default where absent, has one of these values."""
        value = self.get(name, allowed[0] if default is None else default)
        if value not in allowed or type(value) not in map(type, allowed):
            wanted = " or ".join(map(repr, allowed))
            raise InputError(
                f"config.json: {name} is {value!r:.80}; only {wanted} can be computed here"
            )

    def finish(self) -> None:
        """Raise `InputError` if a key was neither read nor known not to change the computation."""
        if unread := [n for n in sorted(self._unread) if self._content[n] not in (None, False)]:
            name = unread[0]
            raise InputError(
                f"config.json: unknown key {name!r:.80} = {self._content[name]!r:.80} (of "
                f"{len(unread)} such keys), which may change what the model computes; if it does "
                "not, leave it out, or name it in ignore_keys"
            )
