"""The order of training: which sequence of one cache, or of several, is read at which data offset.

Nothing is copied. The output records the order, a pure function of the seed and the sizes, or the
inputs of a mixture and their weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from models.shape.validation import at_least
from pipeline import InputError, Result, Runtime, StepContext, step
from steps.artifacts import TRAIN, Documents, Sequences, TokenCache
from steps.declared import data_setting, nearest_setting, of_conversations, vocabulary

_MOST_TOKENS = 8  # most tokens of any tokenizer per token of a source's count, maybe bytes / 4
_WIDEST_TOKEN = 4  # bytes of an id; 2 where the vocabulary has at most 65,536 ids


def advise(settings: Mapping[str, Any]) -> list[str]:
    """What `plan` says if a shuffle window is larger than the host's memory budget."""
    sequences = settings["io_block_size"] * settings["window_blocks"]
    window = sequences * settings["sequence_length"] * _WIDEST_TOKEN
    budget = settings["host_memory"]
    if window <= budget:
        return []
    return [
        f"a shuffle window of {settings['window_blocks']:,} blocks of {settings['io_block_size']} "
        f"sequences holds up to {window / 2**30:.1f} GiB of tokens, more than host_memory of "
        f"{budget / 2**30:.1f} GiB: the page cache cannot hold the window, and every sequence "
        "needs its own read from storage; lower window_blocks or io_block_size, or raise "
        "host_memory to what hosts can spare"
    ]


def _check(arguments: Mapping[str, Any]) -> None:
    length = arguments["sequence_length"]
    packed = nearest_setting(arguments["tokens"], "sequence_length")
    if packed not in (None, length):
        raise InputError(
            f"block_shuffle: sequence_length {length:,}: its tokens are packed into rows of "
            f"{packed:,}; give both steps the same length"
        )
    budget = data_setting(arguments["tokens"], "tokens", Documents)
    if budget is not None and 0 < _MOST_TOKENS * budget < length:
        raise InputError(
            f"block_shuffle: sequence_length {length:,} is longer than the {budget:,} tokens that "
            "sample has as its budget; sample more tokens or shorten the sequence"
        )
    names = ("sequence_length", "io_block_size", "window_blocks")
    at_least("block_shuffle", **{name: (arguments[name], 1) for name in names})


@step(output=Sequences, version=2, advise=advise, check=_check)
def block_shuffle(
    run: StepContext,
    tokens: TokenCache,
    sequence_length: int,
    *,
    io_block_size: int = 64,
    window_blocks: int = 1024,
    seed: int = 0,
    host_memory: Annotated[int, Runtime] = 4 << 30,
) -> Result:
    """Sequences of `sequence_length` tokens: blocks are shuffled, then sequences within windows.

    Args:
        tokens: the token cache; a packed one must be packed for this `sequence_length`.
        sequence_length: tokens of a sequence.
        io_block_size: neighbouring sequences of a block, which the first shuffle keeps together,
            see `data.batches.block_shuffle`.
        window_blocks: blocks of a window, in which the second shuffle mixes all sequences.
        seed: another seed gives another order.
        host_memory: bytes of a window that a host can cache; `plan` warns if a window is larger.
    """
    from data.batches.block_shuffle import BlockShuffle
    from data.batches.sequences import row_count

    packed = tokens.result.get("sequence_length", sequence_length)
    if packed != sequence_length:
        raise InputError(
            f"sequence_length {sequence_length:,}: {tokens.path} is packed into rows of {packed:,} "
            "tokens; shuffle with that length or pack again"
        )
    available = tokens.tokens(TRAIN)
    count = row_count([available], sequence_length)
    if count == 0:
        raise InputError(
            f"sequence_length {sequence_length:,} is longer than the data: {tokens.path} has "
            f"{available:,} training tokens; sample more tokens or shorten the sequence"
        )
    about = {"io_block_size": io_block_size, "window_blocks": window_blocks, "seed": seed}
    BlockShuffle(sequences=count, **about)  # refuses what it cannot shuffle
    return {
        "sequence_length": sequence_length,
        "sequences": count,
        "tokens_used": count * sequence_length,
        "tokens_left_over": available - count * sequence_length,
        **about,
    }


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Weights of the inputs from a point of training on.

    Attributes:
        start_tokens: training tokens before the phase, padding included; rounded up to a sequence.
        weights: one per input, in the order of the inputs; only their ratios matter.
    """

    start_tokens: int
    weights: tuple[float, ...]


def _check_mix(arguments: Mapping[str, Any]) -> None:
    """Refuse inputs of different lengths or vocabularies, and invalid weights and starts."""
    from data.batches.mixture import Mixture, MixturePhase

    for name, declared in (
        ("sequence_length", lambda part: nearest_setting(part, "sequence_length")),
        ("vocab_size", vocabulary),
    ):
        found = map(declared, arguments["sequences"])
        known = {value for value in found if value is not None}
        if len(known) > 1:
            raise InputError(
                f"mix: inputs of {name} {' and '.join(map(str, sorted(known)))}; "
                "mix sequences that were made alike"
            )
    if len({of_conversations(part) for part in arguments["sequences"]}) > 1:
        raise InputError(
            "mix: found sequences of conversations and of documents, whose rows mark what begins "
            "in other ways; train on one after the other with warm_start"
        )
    parts, phases = arguments["sequences"], _phases(arguments["weights"], arguments["later"])
    if any(len(phase.weights) != len(parts) for phase in phases):
        raise InputError(
            f"mix: {len(parts)} inputs and weights {[p.weights for p in phases]}; give one "
            "weight per input in every phase"
        )
    ordered = [MixturePhase(start=phase.start_tokens, weights=phase.weights) for phase in phases]
    Mixture(ordered, arguments["seed"])  # its constructor refuses


def _phases(weights: tuple[float, ...], later: tuple[Phase, ...]) -> tuple[Phase, ...]:
    return (Phase(start_tokens=0, weights=weights), *later)


@step(output=Sequences, version=3, check=_check_mix)
def mix(
    run: StepContext,
    sequences: tuple[Sequences, ...],
    *,
    weights: tuple[float, ...],
    later: tuple[Phase, ...] = (),
    seed: int = 0,
) -> Result:
    """Sequences of every input in proportion to its weight; an input that ends is reshuffled.

    Validation splits and vocabulary come from the first input.

    Args:
        sequences: shuffled caches of one tokenizer and one sequence length.
        weights: relative share of sequences of each input, from the start.
        later: phases with other weights, in order of their start.
        seed: another seed interleaves the inputs differently.
    """
    from data.batches.mixture import Mixture, MixturePhase

    length = _common_length(sequences)
    by_sequence = tuple(
        MixturePhase(start=-(-phase.start_tokens // length), weights=phase.weights)
        for phase in _phases(weights, later)
    )
    Mixture(by_sequence, seed)  # refuses phases that start at the same sequence
    return {
        "sequence_length": length,
        "sequences": sum(part.result["sequences"] for part in sequences),
        "tokens_used": sum(part.result["tokens_used"] for part in sequences),
        "sources": [{"sequences": part.result["sequences"]} for part in sequences],
        "phases": [dataclasses.asdict(phase) for phase in by_sequence],
        "seed": seed,
    }


def _common_length(sequences: tuple[Sequences, ...]) -> int:
    first = sequences[0]
    for part in sequences:
        if part.order is not None:
            raise InputError(
                f"mix: {part.path} leaves documents out of one order; mix first, then `without`"
            )
        if part.parts:
            raise InputError(f"mix: {part.path} is a mixture already; mix its inputs instead")
        for what, found, expected in (
            ("sequence_length", part.result["sequence_length"], first.result["sequence_length"]),
            ("tokenizer", part.cache.result["tokenizer"], first.cache.result["tokenizer"]),
        ):
            if found != expected:
                raise InputError(
                    f"mix: {part.path} has {what} {found}, {first.path} has {expected}; "
                    "mix sequences that were made alike"
                )
    return first.result["sequence_length"]
