"""`ponente generate`: continue prompts with a checkpoint and print the text as it is generated.

    ponente generate runs/train-0123456789 --prompt "The three laws"
    ponente generate gs://bucket/runs/train-0123456789 < prompts.txt
    ponente generate runs/warm_start-0123456789 --chat

Several prompts are continued as one batch and printed one after the other. Without `--prompt`,
every line of the standard input is a prompt, which is continued as soon as it is read. With
`--chat`, prompts and lines are what the user says, in one conversation, and the model replies.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline import InputError
from pipeline.cli.context import say
from pipeline.cli.options import verb_parser
from steps.checkpoints.find import Trained, find, open_model, open_tokenizer, too_long

if TYPE_CHECKING:
    from data.chat.encoder import ChatEncoder
    from data.chat.messages import Message
    from data.tokenizer.text_tokenizer import TextTokenizer
    from models.transformer import Transformer

_TOKENS = 128


def run(arguments: list[str]) -> int:
    """Find and load the checkpoint and print its completions; returns the exit status 0."""
    options = _parser().parse_args(arguments)
    _check(options)
    trained = find(options.checkpoint)
    state = "finished" if trained.finished else "not finished"
    say(f"checkpoint of step {trained.step:,}, training {state}: {trained.path}", error=True)
    tokenizer = open_tokenizer(trained, options.tokenizer)
    writer = Writer(trained, tokenizer, options)
    if options.chat:
        writer.chat(_chat_encoder(trained, tokenizer, options.template))
        return 0
    for prompts in [options.prompt] if options.prompt else ([line] for line in _lines()):
        writer.write(prompts)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = verb_parser("generate", __doc__)
    add = parser.add_argument
    add("checkpoint", help="directory of a train step, or of a checkpoint in it: a path or gs://")
    add("--prompt", action="append", metavar="TEXT", help="may be given several times")
    add(
        "--new-tokens",
        "--tokens",
        type=int,
        metavar="N",
        help=f"most new tokens ({_TOKENS}, or fewer to stay within the training length)",
    )
    add("--temperature", type=float, default=0.8, help="0 is greedy (%(default)s)")
    add("--top-k", type=int, default=40, help="draw among the k likeliest; 0 for all (%(default)s)")
    add("--top-p", type=float, default=1.0, help="draw among the likeliest that have this share")
    add("--seed", type=int, default=0, help="seed of the random numbers (%(default)s)")
    add(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json or a directory with one, instead of the one it was trained with",
    )
    add("--chat", action="store_true", help="talk to a model that was trained on conversations")
    add(
        "--system",
        metavar="TEXT",
        help="with --chat: the message that the conversation begins with",
    )
    add("--template", metavar="NAME|FILE", help="with --chat: a chat template, instead of its own")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise `InputError` with the names of the flags, which differ from those of arguments."""
    new = options.new_tokens
    for flag, value, right, wanted in (
        ("--new-tokens", new, new is None or new >= 1, "at least 1"),
        ("--temperature", options.temperature, 0 <= options.temperature < math.inf, "0 or above"),
        ("--top-k", options.top_k, options.top_k >= 0, "0 or above; 0 for all"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "above 0 and at most 1; 1 for all"),
        ("--seed", options.seed, 0 <= options.seed < 1 << 32, "0 to 2^32 - 1"),
    ):
        if not right:
            raise InputError(f"{flag}: found {value}, expected {wanted}")
    for flag, value in (("--system", options.system), ("--template", options.template)):
        if value is not None and not options.chat:
            raise InputError(f"{flag}: expected --chat beside it, found none; add --chat")


def _lines() -> Iterator[str]:
    """Lines of the standard input, each as soon as it is complete; of Windows too."""
    mark = "\ufeff"
    try:
        while line := sys.stdin.readline():
            yield line.removeprefix(mark).removesuffix("\n").removesuffix("\r")
            mark = ""
    except UnicodeDecodeError as error:
        found = error.object[error.start : error.start + 1]
        raise InputError(
            f"standard input: expected {error.encoding} text, found the byte 0x{found.hex()} "
            f"({error.reason}); convert it first"
        ) from error


def _chat_encoder(trained: Trained, tokenizer: TextTokenizer, template: str | None) -> ChatEncoder:
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


class Writer:
    """Prints what a checkpoint writes, as it writes it."""

    def __init__(
        self, trained: Trained, tokenizer: TextTokenizer, options: argparse.Namespace
    ) -> None:
        self._trained, self._tokenizer, self._options = trained, tokenizer, options

    @cached_property
    def _model(self) -> Transformer:
        trained = self._trained
        return open_model(trained.path, trained.model, trained.compute_dtype)

    def write(self, prompts: list[str]) -> None:
        """Print each prompt and its completion, in order, separated by blank lines."""
        encoded = [self._tokenizer.prompt_ids(prompt) for prompt in prompts]
        left = self._trained.sequence_length - max(map(len, encoded))
        new_tokens = self._options.new_tokens or min(_TOKENS, max(left, 1))
        # The part of every text that is not printed yet, and the row that is being printed.
        waiting, at = list(prompts), 0
        for parts in self._stream(encoded, new_tokens, self._tokenizer.eos_id):
            waiting = [before + text for before, (text, _) in zip(waiting, parts, strict=True)]
            while at < len(prompts):
                sys.stdout.write(waiting[at])
                waiting[at] = ""
                if not parts[at][1]:
                    break
                at += 1
                sys.stdout.write("\n\n" if at < len(prompts) else "\n")
            sys.stdout.flush()

    def chat(self, encoder: ChatEncoder) -> None:
        """Print a reply to each prompt, or line, that is not blank, in one conversation."""
        from data.chat.messages import Message

        system = self._options.system
        messages = [] if system is None else [Message("system", system)]
        for line in self._options.prompt or _lines():
            if line.strip():
                messages.append(Message("user", line))
                messages.append(Message("assistant", self._reply(encoder, messages)))

    def _reply(self, encoder: ChatEncoder, messages: list[Message]) -> str:
        try:
            ids = encoder.prompt_ids(messages)
        except ValueError as error:
            raise InputError(f"message: {error}; write it without that") from error
        new_tokens = self._options.new_tokens or max(self._trained.sequence_length - len(ids), 1)
        reply = ""
        for ((text, _),) in self._stream([ids], new_tokens, encoder.end_id):
            reply += text
            sys.stdout.write(text)
            sys.stdout.flush()
        say()
        return reply

    def _stream(
        self, prompts: list[list[int]], new_tokens: int, end: int
    ) -> Iterator[list[tuple[str, bool]]]:
        """(the new text of a row, whether it has ended) of every row, again and again."""
        from data.tokenizer.text_tokenizer import TextStream
        from models.generate.generate import check, stream
        from models.generate.sampling_config import Sampling

        options, length = self._options, self._trained.sequence_length
        # Refuse an invalid prompt before the slow load of the model.
        check(self._trained.model, prompts, new_tokens)
        if warning := too_long(max(map(len, prompts)) + new_tokens, length):
            say(f"warning: {warning}", error=True)
        sampling = Sampling(
            temperature=options.temperature,
            top_k=options.top_k or None,
            top_p=options.top_p,
            seed=options.seed,
        )
        texts = [TextStream(self._tokenizer, ids) for ids in prompts]
        left, ends = [new_tokens] * len(prompts), {end, self._tokenizer.eos_id}
        for parts in stream(
            self._model, prompts, new_tokens=new_tokens, sampling=sampling, eos_id=end
        ):
            more = [""] * len(prompts)
            for row, ids in enumerate(parts):
                if not left[row]:
                    continue
                stop = next((at for at, index in enumerate(ids) if index in ends), None)
                left[row] = left[row] - len(ids) if stop is None else 0
                more[row] = texts[row].push(ids[:stop])
                more[row] += "" if left[row] else texts[row].finish()
            yield [(text, not rest) for text, rest in zip(more, left, strict=True)]
            if not any(left):
                return
