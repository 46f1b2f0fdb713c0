"""Write and read the tokenizer files of `transformers`: tokenizer.json and its configurations.

`AutoTokenizer` of a written folder gives the ids of training. It inserts BOS before a text if the
tokenizer's own file does; without a BOS of its own, EOS is BOS too, as it was in training. As
always in `transformers`, the text of a special token is encoded as that token, unlike in training.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from data.tokenizer.text_tokenizer import TextTokenizer, library
from data.tokenizer.tokenizer_file import eos_of, ids_of, inserted, parse, with_fields
from models.hf.architectures import Architecture
from pipeline.errors import InputError
from pipeline.store import storage
from steps.exchange.choices import OTHER_TOKENIZER
from steps.exchange.gguf.vocabulary import pre_type
from steps.exchange.hf.hf_files import CHAT_TEMPLATE, read_file, read_json

_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
_IDS = ("generation_config.json", "config.json")


def write_tokenizer_files(
    tokenizer: TextTokenizer,
    folder: str,
    vocab_size: int,
    model_max_length: int,
    chat_template: str | None = None,
) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja.

    `vocab_size` are the rows of the exported embedding; those beyond the ids are padding.
    """
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"tokenizer: {tokenizer.vocab_size} ids, more than the model's {vocab_size}; export "
            "with the tokenizer it was trained with"
        )
    description: dict[str, Any] = json.loads(tokenizer.content)
    description |= {"truncation": None, "padding": None}
    before, after = inserted(library(tokenizer.content))
    names = {token["id"]: token["content"] for token in description["added_tokens"]}
    bos, eos = names[tokenizer.bos_id], names[tokenizer.eos_id]
    if after:
        description["post_processor"] = _template(bos, tokenizer.bos_id) if before else None
    special = {"bos_token": bos, "eos_token": eos}
    config = {
        "add_bos_token": bool(before),
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        # A model-specific class would replace the pre-tokenizer with its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
    }
    files = {"tokenizer.json": description, _CONFIG: config, _MAP: special}
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        storage.write_atomic(storage.join(folder, name), text.encode())
    if chat_template is not None:
        storage.write_atomic(storage.join(folder, CHAT_TEMPLATE), chat_template.encode())


def check_auto_tokenizer(tokenizer: TextTokenizer, architecture: Architecture) -> None:
    """Raise `InputError` if `AutoTokenizer` would not give the ids of training.

    It replaces the tokenizer of a Qwen2 model whatever class the folder names: by Qwen2Tokenizer,
    which takes entries and merges from the file, splits by an expression of its own and normalizes
    to NFC (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS` in tokenization_auto.py of transformers 5).
    """
    if architecture.model_type != "qwen2":
        return
    description = json.loads(library(tokenizer.content).to_str())
    normalizer = (description.get("normalizer") or {}).get("type")
    with contextlib.suppress(InputError):
        if normalizer == "NFC" and pre_type(description) == "qwen2":
            return
    raise InputError(
        f"tokenizer: AutoTokenizer gives a {architecture.name} the split and the normalizer of "
        f"Qwen2's own tokenizer, and with them other ids than training; {OTHER_TOKENIZER}"
    )


def read_tokenizer_files(folder: str, eos: str | None = None) -> bytes:
    """The tokenizer.json of a local folder, with the BOS and EOS that `transformers` gives it.

    They are those of tokenizer_config.json or special_tokens_map.json; else EOS is the token with a
    well-known name, and both have the ids of special tokens in generation_config.json or
    config.json, of several the first. What encoding inserts is a matter of tokenizer.json alone:
    beside it, transformers 5 ignores add_bos_token.
    """
    content = read_file(folder, "tokenizer.json")
    description = parse(content)
    named, config, *numbered = (_optional(folder, name) for name in (_MAP, _CONFIG, *_IDS))
    named |= config
    bos = _named("bos_token", description, named) or _numbered("bos_token", description, numbered)
    eos = eos or _named("eos_token", description, named)
    if eos is None:
        try:
            eos_of(description)
        except InputError:
            eos = _numbered("eos_token", description, numbered)
    return with_fields(content, eos_token=eos, bos_token=bos)


def _optional(folder: str, name: str) -> dict[str, Any]:
    return read_json(folder, name) if os.path.exists(os.path.join(folder, name)) else {}


def _named(token: str, description: Mapping[str, Any], file: Mapping[str, Any]) -> str | None:
    """The name that a file gives to `token`, if the vocabulary has it."""
    name = file.get(token)
    name = name.get("content") if isinstance(name, dict) else name
    known = {*ids_of(description), *(t["content"] for t in description["added_tokens"])}
    return name if isinstance(name, str) and name in known else None


def _numbered(
    token: str, description: Mapping[str, Any], files: list[dict[str, Any]]
) -> str | None:
    """The name of the special token whose id the first of some files gives to `token`."""
    model = description["model"]
    unknown = model.get("unk_token")
    if isinstance(index := model.get("unk_id"), int):  # Unigram
        unknown = {i: piece for piece, i in ids_of(description).items()}.get(index)
    special = {t["id"]: t["content"] for t in description["added_tokens"] if t["special"]}
    for file in files:
        index = file.get(f"{token}_id")
        index = index[0] if isinstance(index, list) and index else index
        if type(index) is int and special.get(index, unknown) != unknown:
            return special[index]
    return None


def _template(bos: str, index: int) -> dict[str, Any]:
    """The post-processor that puts `bos` before a text."""

    def after_bos(text: str, kind: int) -> list[dict[str, Any]]:
        before = {"SpecialToken": {"id": bos, "type_id": kind}}
        return [before, {"Sequence": {"id": text, "type_id": kind}}]

    return {
        "type": "TemplateProcessing",
        "single": after_bos("A", 0),
        "pair": [*after_bos("A", 0), *after_bos("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
