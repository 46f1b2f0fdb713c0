"""The tokenizer whose ids are bytes: nothing to train, and nothing between a model and the text.

ByT5 (Xue et al., 2022, arXiv:2105.13626) and the language models before BPE read text so. A token
is a byte, so the loss in bits per token is that in bits per byte (the ends of documents apart).
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data.tokenizer.special_tokens import EOS

ENTRIES = 257
"""Ids: byte b is id b, and EOS is 256."""


def byte_tokenizer_json() -> bytes:
    """The content of its `tokenizer.json`: byte-level BPE without merges."""
    # The byte-level alphabet (GPT-2's) writes a printable byte as itself, and the others, in order,
    # as the characters from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character) for character in alphabet if ord(character) < 256}
    others = iter(character for character in alphabet if ord(character) >= 256)
    vocabulary = {chr(b) if b in printable else next(others): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer.to_str().encode("utf-8")
