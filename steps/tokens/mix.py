"""Mix several shuffled caches into one stream of training sequences, by weights per phase.

Nothing is copied or tokenised again: the output records the inputs and their weights. A change of a
weight rebuilds only this step and the training on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import InputError, Result, StepContext, step
from steps.artifacts import Sequences
from steps.declared import nearest_setting


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Weights of the inputs from a point of training on.

    Attributes:
        start_tokens: training tokens before the phase, padding included; rounded up to a sequence.
        weights: one per input, in the order of the inputs; only their ratios matter.
    """

    start_tokens: int
    weights: tuple[float, ...]


def _check(arguments: Mapping[str, Any]) -> None:
    """Refuse inputs of different lengths or vocabularies, and invalid weights and starts."""
    from data.batches.mixture import Mixture, MixturePhase

    for name in ("sequence_length", "vocab_size"):
        known = {nearest_setting(part, name) for part in arguments["sequences"]} - {None}
        if len(known) > 1:
            raise InputError(
                f"mix: inputs of {name} {' and '.join(map(str, sorted(known)))}; "
                "mix sequences that were made alike"
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


@step(output=Sequences, version=2, check=_check)
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
        "sources": [
            {"cache": part.cache.path, "sequences": part.result["sequences"]} for part in sequences
        ],
        "phases": [dataclasses.asdict(phase) for phase in by_sequence],
        "seed": seed,
    }


def _common_length(sequences: tuple[Sequences, ...]) -> int:
    first = sequences[0]
    for part in sequences:
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
