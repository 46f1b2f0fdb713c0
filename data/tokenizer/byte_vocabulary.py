"""The tokenizer whose ids are bytes, which needs no training.

ByT5 (Xue et al., 2022, arXiv:2105.13626) and language models before BPE read text like this. A
token is a byte, so the loss in bits per token equals bits per byte (except for EOS tokens).
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data.tokenizer.special_tokens import EOS


def _letters() -> tuple[str, ...]:
    # GPT-2's byte-level alphabet writes a printable byte as itself, and the other bytes, in order,
    # as the characters from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character) for character in alphabet if ord(character) < 256}
    others = iter(character for character in alphabet if ord(character) >= 256)
    return tuple(chr(b) if b in printable else next(others) for b in range(256))


LETTERS = _letters()
"""The character of every byte in the alphabet of ByteLevel."""


def byte_tokenizer_json() -> bytes:
    """The content of its `tokenizer.json`: byte b has id b, and EOS has id 256.

    It is byte-level BPE without merges.
    """
    vocabulary = {letter: byte for byte, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer.to_str().encode("utf-8")
