"""`ponente generate --chat`: a conversation with a chat model, whose replies are streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from data.chat.messages import Message
from pipeline import InputError
from pipeline.cli.context import say
from steps.checkpoints.find import too_long

if TYPE_CHECKING:
    from data.chat.encoder import ChatEncoder
    from data.tokenizer.text_tokenizer import TextTokenizer
    from models.generate.sampling_config import Sampling
    from models.transformer import Transformer
    from steps.checkpoints.find import Trained


def open_chat(trained: Trained, tokenizer: TextTokenizer, template: str | None) -> ChatEncoder:
    """The encoder of a model's chat template, or of `template`, a name or a file."""
    from data.chat.encoder import ChatEncoder
    from steps.tokens.chat_templates import chat_of, place_template, read_template

    if template is not None:
        return ChatEncoder(tokenizer, read_template(place_template(template)))
    chat = chat_of(trained.text_source)
    if chat is None:
        raise InputError(
            f"{trained.path}: it was not trained on conversations, so its chat template is not "
            "known; pass --template NAME or FILE, or leave out --chat to continue texts"
        )
    return ChatEncoder(tokenizer, chat.template)


class Talk:
    """A conversation, which grows by what the user and the model write."""

    def __init__(
        self,
        trained: Trained,
        tokenizer: TextTokenizer,
        encoder: ChatEncoder,
        sampling: Sampling,
        new_tokens: int | None,
        system: str | None,
    ) -> None:
        self._trained, self._tokenizer, self._encoder = trained, tokenizer, encoder
        self._sampling, self._new_tokens = sampling, new_tokens
        self._messages = [] if system is None else [Message("system", system)]
        self._model: Transformer | None = None

    def run(self, lines: Iterable[str]) -> None:
        """Print a reply to each line that is not blank."""
        for line in lines:
            if line.strip():
                self.reply(line)

    def reply(self, text: str) -> None:
        """Print the reply to a user's message, as it is generated."""
        from data.tokenizer.text_tokenizer import TextStream
        from models.generate.generate import check, stream
        from steps.checkpoints.find import open_model

        trained = self._trained
        asked = [*self._messages, Message("user", text)]
        try:
            ids = self._encoder.prompt_ids(asked)
        except ValueError as error:
            raise InputError(f"message: {error}; write it without that") from error
        left = trained.sequence_length - len(ids)
        new_tokens = self._new_tokens or max(left, 1)
        check(trained.model, [ids], new_tokens)
        if warning := too_long(len(ids) + new_tokens, trained.sequence_length):
            say(f"warning: {warning}", error=True)
        if self._model is None:
            self._model = open_model(trained.path, trained.model, trained.compute_dtype)
        ends = {self._encoder.end_id, self._tokenizer.eos_id}
        shown, parts = TextStream(self._tokenizer, ids), []
        for (more,) in stream(
            self._model,
            [ids],
            new_tokens=new_tokens,
            sampling=self._sampling,
            eos_id=self._encoder.end_id,
        ):
            stop = next((at for at, index in enumerate(more) if index in ends), None)
            parts.append(shown.push(more[:stop]))
            sys.stdout.write(parts[-1])
            sys.stdout.flush()
            if stop is not None:
                break
        parts.append(shown.finish())
        sys.stdout.write(f"{parts[-1]}\n")
        sys.stdout.flush()
        self._messages = [*asked, Message("assistant", "".join(parts))]
