"""Ids and loss mask of conversations: those that `apply_chat_template` of `transformers` gives.

Special tokens are found in the template's own text only. A tokenizer is made in which each of them
has another name (an alias of noncharacters), the template's are renamed in the rendered text, and
what a message spells out stays text. All else (splits, normalizers, spaces around special tokens)
is the library's, on the whole rendered text, as in `transformers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from data.chat.messages import Conversation
from data.chat.template import ALIAS, BEGIN, END, PROBE, ChatTemplate
from data.tokenizer.text_tokenizer import TextTokenizer, library
from data.tokenizer.tokenizer_file import parse
from pipeline.errors import InputError

_CONTROL = re.compile(r"<\|[^\s<>|]+\|>")  # how templates write tokens that no text has


class Encoded(NamedTuple):
    """A conversation: ids int64 [n], and bool [n] whether each is predicted."""

    ids: np.ndarray
    predicted: np.ndarray


class ChatEncoder:
    """Encodes conversations by a chat template; `end_id` ends an assistant's turn.

    Refused where the tokenizer lacks a token that the template names, where no special token ends
    the assistant's turn, and by `ChatTemplate`.
    """

    def __init__(self, tokenizer: TextTokenizer, source: str) -> None:
        description = parse(tokenizer.content)
        ids = {t["content"]: t["id"] for t in description["added_tokens"] if t["special"]}
        names = {index: name for name, index in ids.items()}
        bos, eos = names[tokenizer.bos_id], names[tokenizer.eos_id]
        known = {token["content"] for token in description["added_tokens"]}
        if lacking := sorted(set(_CONTROL.findall(source)) - known):
            raise InputError(
                f"template: it names {', '.join(lacking)}, which the tokenizer does not have as "
                'tokens; take template="alpaca" or "zephyr", which need EOS only, or a tokenizer '
                "with them, as of train_tokenizer(special_tokens=...)"
            )
        self.template = ChatTemplate(source, list(ids), bos, eos)
        self._library = library(_aliased(description, list(ids)))
        self._library.encode_special_tokens = False
        (probe,) = self.encode([PROBE])
        self.end_id = int(probe.ids[probe.predicted][-1])
        if self.end_id not in names:
            raise InputError(
                "template: an assistant's turn ends with "
                f"{tokenizer.decode(probe.ids[probe.predicted][-1:])!r}, which is no special token "
                "of the tokenizer, so that generation would not end; end it with eos_token, or "
                "take a tokenizer with the template's tokens"
            )

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """Ids and loss masks. Raises `ValueError` with what is wrong with a conversation."""
        return self.encode_rendered([self.template.render(each) for each in conversations])

    def encode_rendered(self, rendered: Sequence[str]) -> list[Encoded]:
        """Ids and loss masks of conversations that the template rendered."""
        pairs = [self._aliased_text(each) for each in rendered]
        texts, spans = [text for text, _ in pairs], [predicted for _, predicted in pairs]
        encodings = self._library.encode_batch(texts, add_special_tokens=False)
        found = []
        for encoding, predicted in zip(encodings, spans, strict=True):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            mask = np.zeros(len(offsets), bool)
            for begin, end in predicted:
                mask |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
            found.append(Encoded(np.array(encoding.ids, np.int64), mask))
        return found

    def prompt_ids(self, messages: Conversation) -> list[int]:
        """Ids before the assistant's next message. Raises `ValueError` as `encode`."""
        text, _ = self._aliased_text(self.template.prompt(messages))
        return self._library.encode(text, add_special_tokens=False).ids

    def _aliased_text(self, rendered: str) -> tuple[str, list[tuple[int, int]]]:
        """The text to encode, and the ranges of its characters that are predicted."""
        parts, spans, at, begin = [], [], 0, 0
        for piece, index in self.template.pieces(rendered):
            if piece == BEGIN:
                begin = at
            elif piece == END:
                spans += [(begin, at)] if at > begin else []
            else:
                parts.append(piece if index is None else _alias(index))
                at += len(parts[-1])
        return "".join(parts), spans


def _alias(index: int) -> str:
    return f"{ALIAS}{index}{ALIAS}"


def _aliased(description: dict[str, Any], special: Sequence[str]) -> bytes:
    """The tokenizer.json with special token i named `_alias(i)`, and nothing inserted."""
    names = {name: _alias(index) for index, name in enumerate(special)}

    def renamed(name: str) -> str:
        return names.get(name, name)

    model = dict(description["model"])
    if isinstance(entries := model["vocab"], dict):
        model["vocab"] = {renamed(piece): index for piece, index in entries.items()}
    else:
        model["vocab"] = [[renamed(piece), score] for piece, score in entries]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = renamed(unknown)
    added = [{**t, "content": renamed(t["content"])} for t in description["added_tokens"]]
    changed = {"model": model, "added_tokens": added, "post_processor": None}
    return json.dumps({**description, **changed}).encode("utf-8")
