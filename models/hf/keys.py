"""Reads a config.json key by key, so that no key that changes the model is skipped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pipeline.errors import InputError

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
        """Whether a key is present, possibly as null."""
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
        """True or false. Raises `InputError` for other values."""
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
