"""Text at the two ends of a model that writes: prompts to ids, and ids to text as they come."""

from __future__ import annotations

from collections.abc import Sequence

from data.tokenizer.text_tokenizer import TextTokenizer

_UNKNOWN = "\ufffd"


def prompt_ids(tokenizer: TextTokenizer, prompt: str) -> list[int]:
    """Ids of a prompt; an empty one is the end of a document, after which another begins.

    Raises:
        InputError: the prompt has a lone surrogate, which UTF-8 cannot express.
    """
    ids = tokenizer.encode_batch([prompt])[0].tolist()
    return ids or [tokenizer.eos_id]


class TextStream:
    """The text of ids that come a few at a time: all pieces together are the text of all ids.

    A character may be spread over several tokens. It is yielded when its last byte has come, so
    that no piece ends within one; what turns out to be no character is yielded as U+FFFD.

    Args:
        tokenizer: of the ids.
        after: ids of the prompt that they continue.
    """

    def __init__(self, tokenizer: TextTokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._before = list(after)
        self._held: list[int] = []
        self._said = 0  # characters of what is held

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        if not ids:
            return ""
        self._held += ids
        text = self._tokenizer.decode(self._held, self._before)
        if text.endswith(_UNKNOWN):
            # Bytes to come can change nothing but the last sequence, which reads as one character;
            # of a tokenizer that has a piece for each byte, as one for each.
            end = len(text) - 1 if self._tokenizer.byte_level else len(text.rstrip(_UNKNOWN))
            piece = text[self._said : end]
            self._said += len(piece)
            return piece
        piece = text[self._said :]
        self._before, self._held, self._said = self._held, [], 0
        return piece

    def finish(self) -> str:
        """What was held back; nothing more will come."""
        held = self._held
        piece = self._tokenizer.decode(held, self._before)[self._said :] if held else ""
        self._held, self._said = [], 0
        return piece
