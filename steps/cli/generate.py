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
from steps.checkpoints.find import Trained, find, open_model, open_tokenizer, too_long
from steps.cli.chat import Talk, open_chat

if TYPE_CHECKING:
    from data.tokenizer.text_tokenizer import TextTokenizer
    from models.generate.sampling_config import Sampling
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
    if options.chat:
        encoder = open_chat(trained, tokenizer, options.template)
        how = (_sampling(options), options.new_tokens, options.system)
        Talk(trained, tokenizer, encoder, *how).run(options.prompt or _lines())
        return 0
    writer = Writer(trained, tokenizer, options)
    for prompts in [options.prompt] if options.prompt else ([line] for line in _lines()):
        writer.write(prompts)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ponente generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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


def _sampling(options: argparse.Namespace) -> Sampling:
    from models.generate.sampling_config import Sampling

    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k or None,
        top_p=options.top_p,
        seed=options.seed,
    )


def _lines() -> Iterator[str]:
    """Lines of the standard input, each as soon as it is complete.

    Line ends may be those of Windows, and a byte order mark may begin the input.
    """
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


class Writer:
    """Prints the completions of a checkpoint, which it loads at the first prompt."""

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
        from data.tokenizer.text_tokenizer import TextStream
        from models.generate.generate import check, stream

        options, length = self._options, self._trained.sequence_length
        encoded = [self._tokenizer.prompt_ids(prompt) for prompt in prompts]
        longest = max(map(len, encoded))
        new_tokens = options.new_tokens or min(_TOKENS, max(length - longest, 1))
        # Refuse an invalid prompt before the slow load of the model.
        check(self._trained.model, encoded, new_tokens)
        if warning := too_long(longest + new_tokens, length):
            say(f"warning: {warning}", error=True)
        texts = [TextStream(self._tokenizer, ids) for ids in encoded]
        eos = self._tokenizer.eos_id
        # The part of every text that is not printed yet, and the row that is being printed.
        waiting, ended, counts, at = list(prompts), [False] * len(prompts), [0] * len(prompts), 0
        for parts in stream(
            self._model, encoded, new_tokens=new_tokens, sampling=_sampling(options), eos_id=eos
        ):
            for row, ids in enumerate(parts):
                counts[row] += len(ids)
                waiting[row] += texts[row].push([i for i in ids if i != eos])
                if ids and (eos in ids or counts[row] == new_tokens):
                    waiting[row] += texts[row].finish()
                    ended[row] = True
            while at < len(prompts):
                sys.stdout.write(waiting[at])
                waiting[at] = ""
                if not ended[at]:
                    break
                at += 1
                sys.stdout.write("\n\n" if at < len(prompts) else "\n")
            sys.stdout.flush()
