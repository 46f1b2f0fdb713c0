"""Text for generation: prompts to ids, and generated ids to text as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

from data.tokenizer.text_tokenizer import TextTokenizer

_UNKNOWN = "\ufffd"


def prompt_ids(tokenizer: TextTokenizer, prompt: str) -> list[int]:
    """Ids of a prompt; an empty prompt is EOS, after which a new document begins.

    Raises:
        InputError: the prompt has a lone surrogate, which UTF-8 cannot express.
    """
    ids = tokenizer.encode_batch([prompt])[0].tolist()
    return ids or [tokenizer.eos_id]


class TextStream:
    """Decodes ids that arrive a few at a time; the pieces concatenate to the text of all ids.

    A character may be spread over several tokens. It is returned when its last byte has arrived, so
    that no piece ends within a character; an invalid byte sequence is returned as U+FFFD. (Where
    such bytes follow a character in byte tokens, the whole text has U+FFFD for the character too.)

    Args:
        tokenizer: the tokenizer of the ids.
        after: ids of the prompt that they continue.
    """

    def __init__(self, tokenizer: TextTokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._before = list(after)
        self._held: list[int] = []
        self._returned = 0  # characters of the held ids' text that were returned

    def push(self, ids: Sequence[int]) -> str:
        """The text that became final with these ids."""
        if not ids:
            return ""
        self._held += ids
        text = self._tokenizer.decode(self._held, self._before)
        if text.endswith(_UNKNOWN):
            # Later bytes can only change the incomplete sequence at the end. It decodes to one
            # U+FFFD, or to one per byte with a tokenizer of the SentencePiece kind.
            end = len(text) - 1 if self._tokenizer.byte_level else len(text.rstrip(_UNKNOWN))
            piece = text[self._returned : end]
            self._returned += len(piece)
            return piece
        piece = text[self._returned :]
        self._before, self._held, self._returned = self._held, [], 0
        return piece

    def finish(self) -> str:
        """The text held back so far; call it after the last ids."""
        held = self._held
        piece = self._tokenizer.decode(held, self._before)[self._returned :] if held else ""
        self._held, self._returned = [], 0
        return piece
