"""Turns generated ids to text as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

_CONTEXT = 8  # ids before a continuation: more than the bytes of a character


class TextStream:
    """Decodes ids that arrive a few at a time; the texts concatenate to the text of all ids.

    Ids stand for bytes, and a character may be spread over several of them: it is returned when its
    last byte has arrived. Bytes that are not UTF-8 are returned as U+FFFD, by the substitution of
    maximal subparts (Unicode Standard, section 3.9), and change no character around them.

    Args:
        tokenizer: a `TextTokenizer`.
        after: the ids before them. Without any but BOS and EOS a document begins, where a
            SentencePiece-like tokenizer has a space that its text has not.
    """

    def __init__(self, tokenizer: Any, after: Sequence[int] = ()) -> None:
        self._pieces = tokenizer.pieces
        before = [i for i in after if i not in (tokenizer.bos_id, tokenizer.eos_id)]
        self._begins = tokenizer.strips_space and not before
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(self._pieces[i] for i in before[-_CONTEXT:]))

    def push(self, ids: Iterable[int]) -> str:
        """The text that became complete with these ids."""
        data = b"".join(self._pieces[i] for i in ids)
        if self._begins and data:
            data = data.removeprefix(b" ")
            self._begins = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD for a character whose end did not arrive; call it after the last ids."""
        return self._decoder.decode(b"", final=True)
