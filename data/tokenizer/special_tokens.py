"""The tokens that every vocabulary must have. Imports no heavy library, since `plan` imports it."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import InputError

EOS = "<|endoftext|>"
"""Name of EOS in tokenizers trained here; others may use any name."""
SMALLEST_VOCAB = 257  # every byte and EOS
_LARGEST_VOCAB = 1 << 22  # the trainer allocates memory for all ids; Gemma's vocabulary has 1 << 18

_DOCUMENT_ENDS = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
"""Ends of turn of chat models; they end a document if no other token does."""


def check_vocab_size(vocab_size: int) -> None:
    if not SMALLEST_VOCAB <= vocab_size <= _LARGEST_VOCAB:
        least = f"at least {SMALLEST_VOCAB} (256 bytes and {EOS}); ask for more"
        most = f"at most {_LARGEST_VOCAB:,}; ask for fewer"
        bound = least if vocab_size < SMALLEST_VOCAB else most
        raise InputError(f"vocab_size={vocab_size}: expected {bound}")


def find_eos(special: Mapping[str, int], name: str | None = None) -> int:
    """The id of the token that ends a document: of `name`, or of the only well-known name."""
    if name is not None and name not in special:
        raise InputError(
            f"tokenizer.json: eos_token is {name!r}, which is no special token; expected one of "
            f"{_names(special)}"
        )
    for known in (_DOCUMENT_ENDS, _TURN_ENDS):
        found = [token for token in known if token in special] if name is None else [name]
        if len(found) == 1:
            return special[found[0]]
        if found:
            raise InputError(
                f"tokenizer.json: each of {', '.join(found)} could be the special token that ends "
                "a document; pass eos=<name of the one that does>"
            )
    raise InputError(
        f"tokenizer.json: expected a special token that ends a document, such as {EOS}, found "
        f"{_names(special)}; pass eos=<name of the one that does>"
    )


def _names(special: Mapping[str, int]) -> str:
    return ", ".join(sorted(special, key=special.__getitem__)[:20]) or "none"
