"""What every vocabulary holds. Imports nothing heavy: a plan reads it."""

from __future__ import annotations

from pipeline.errors import InputError

EOS = "<|endoftext|>"
SMALLEST_VOCAB = 257  # every byte and EOS


def check_vocab_size(vocab_size: int) -> None:
    """Raise `InputError` unless the 256 bytes and EOS have room."""
    if vocab_size < SMALLEST_VOCAB:
        raise InputError(
            f"vocab_size={vocab_size}: expected at least {SMALLEST_VOCAB} (256 bytes and {EOS}); "
            "ask for more"
        )
