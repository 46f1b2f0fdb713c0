"""Chat templates by name or in files, as the argument of a step; and that of a trained model."""

from __future__ import annotations

import hashlib
import os
from typing import Any, NamedTuple

from data.chat.named_templates import NAMED, named_template, template_of
from data.read.listing import absolute, list_source
from pipeline import InputError
from pipeline.identity.listing import Listing
from pipeline.store import storage
from steps.artifacts import Checkpoint, TokenCache

FILE = "chat_template.jinja"
_FILES = (FILE, "tokenizer_config.json")


class Chat(NamedTuple):
    """A chat template, and the id that ends an assistant's turn."""

    template: str
    end_id: int


def chat_of(model: Checkpoint | TokenCache) -> Chat | None:
    """How conversations were written in training; None of documents, and of an imported model."""
    if isinstance(model, Checkpoint):
        return None if model.imported else chat_of(model.sequences.cache)
    if not model.begins:
        return None
    file = storage.join(model.shard("vocabulary"), FILE)
    return Chat(storage.read_bytes(file).decode(), model.result["end_of_turn"])


def place_template(template: Any) -> Any:
    """The name of a template of ours, or the URL of the file that `template` names."""
    if not isinstance(template, str) or template in NAMED:
        return template
    if storage.is_local(template) and os.path.isdir(path := storage.local_path(template)):
        there = [name for name in _FILES if os.path.exists(os.path.join(path, name))]
        return os.path.join(path, there[0] if there else _FILES[0])
    return absolute(template)


def list_template(template: str, seconds: float) -> Listing:
    if template in NAMED:
        digest = hashlib.sha256(named_template(template).encode()).hexdigest()
        return Listing(template, pinned=f"the text {digest[:12]}")
    if storage.is_local(template) and not os.path.exists(storage.local_path(template)):
        raise InputError(
            f"template: expected one of {', '.join(NAMED)}, or a file, found none at {template}"
        )
    return list_source(template, seconds)


def read_template(template: str) -> str:
    """The text of the template that has this name, or that is in this file."""
    from data.read.byte_ranges import file_state, open_ranges

    if template in NAMED:
        return named_template(template)
    with open_ranges(template, file_state(template)) as file:
        return template_of(file.read(), template)
