"""Tokenizers in the shape of published ones, made here: the fields that matter are as theirs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.data.tokenizer.split_tokenizers import documents, tokenizer_json

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def special(content: str, index: int, **flags: Any) -> dict[str, Any]:
    """An added token as the file has it."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **plain, "special": True, **flags}


def _with_tokens(name: str, specials: list[str], middle: str | None = None) -> bytes:
    """A byte-level one with its EOS taken out, other special tokens, and an added token midway."""
    description = json.loads(tokenizer_json(name))
    vocabulary = description["model"]["vocab"]
    del vocabulary["<|endoftext|>"]
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    added = []
    if middle is not None:
        place = len(ordered) // 2
        added.append(special(middle, place, special=False))
        ordered.insert(place, middle)
    ids = {token: index for index, token in enumerate(ordered)}
    description["model"]["vocab"] = {t: i for t, i in ids.items() if t != middle}
    added += [special(token, len(ordered) + index) for index, token in enumerate(specials)]
    description["added_tokens"] = added
    return json.dumps(description).encode()


def _gpt2() -> bytes:
    return tokenizer_json("gpt2")


def _llama3() -> bytes:
    reserved = [f"<|reserved_special_token_{n}|>" for n in range(20)]
    names = ["<|begin_of_text|>", "<|end_of_text|>", *reserved, "<|eot_id|>"]
    description = json.loads(_with_tokens("llama3", names))
    begin = description["added_tokens"][0]["id"]
    description["post_processor"] = json.loads(
        _post_processor("<|begin_of_text|>", begin)  # as Llama's, it puts a token first
    )
    return json.dumps(description).encode()


def _post_processor(token: str, index: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, index)]
    )
    return json.dumps(json.loads(tokenizer.to_str())["post_processor"])


def _qwen() -> bytes:
    return _with_tokens("qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<tool_call>")


def _sentencepiece(normalizer: Any, decoder: Any) -> bytes:
    """BPE with pieces of bytes, and spaces written as U+2581 by the normalizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<unk>", "<s>", "</s>", *_BYTES], show_progress=False
    )
    tokenizer.train_from_iterator(documents(30), trainer=trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoder
    description = json.loads(tokenizer.to_str())
    description["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    description["added_tokens"] = [special(name, i) for i, name in enumerate(_SPECIAL)]
    return json.dumps(description).encode()


_SPECIAL = ("<unk>", "<s>", "</s>")


def _llama2() -> bytes:
    return _sentencepiece(
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    )


def _gemma() -> bytes:
    return _sentencepiece(
        normalizers.Replace(" ", "\u2581"),
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        ),
    )


def _unigram() -> bytes:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=700, special_tokens=list(_SPECIAL), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(documents(30), trainer=trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    description = json.loads(tokenizer.to_str())
    entries = description["model"]["vocab"]
    description["model"]["vocab"] = [*entries, *([piece, -20.0] for piece in _BYTES)]
    description["model"]["byte_fallback"] = True
    return json.dumps(description).encode()


def _wordpiece() -> bytes:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=700, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(documents(30), trainer=trainer)
    return tokenizer.to_str().encode()


_MAKE: dict[str, Callable[[], bytes]] = {
    "gpt2": _gpt2,
    "llama3": _llama3,
    "qwen": _qwen,
    "llama2": _llama2,
    "gemma": _gemma,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}
KEEPING = tuple(name for name in _MAKE if name != "wordpiece")
EOS_NAMES = {
    "gpt2": "<|endoftext|>",
    "llama3": "<|end_of_text|>",
    "qwen": "<|endoftext|>",
    "llama2": "</s>",
    "gemma": "</s>",
    "unigram": "</s>",
}


@functools.cache
def shape(name: str) -> bytes:
    """The tokenizer.json in the shape of `name`."""
    return _MAKE[name]()
