"""Several shuffled caches as one stream of training sequences, by weight, stage after stage.

Nothing is copied and nothing tokenised again: the output is a record of who is in the mixture and
with which weights. Change a weight, and only this step and what is trained on it change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import InputError, Result, StepContext, step
from steps.artifacts import Sequences
from steps.declared import asked


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Weights that hold from a point of training on.

    Attributes:
        start_tokens: training tokens seen before it, padding included; rounded up to a sequence.
        weights: one per input, in their order; only their ratios count.
    """

    start_tokens: int
    weights: tuple[float, ...]


def _check(arguments: Mapping[str, Any]) -> None:
    """Refuse weights and starts that make no mixture."""
    from data.batches.mixture import Mixture, MixturePhase

    for name in ("sequence_length", "vocab_size"):
        known = {asked(part, name) for part in arguments["sequences"]} - {None}
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
    stages = [MixturePhase(start=phase.start_tokens, weights=phase.weights) for phase in phases]
    Mixture(stages, arguments["seed"])


def _phases(weights: tuple[float, ...], later: tuple[Phase, ...]) -> tuple[Phase, ...]:
    return (Phase(start_tokens=0, weights=weights), *later)


@step(output=Sequences, version=1, check=_check)
def mix(
    run: StepContext,
    sequences: tuple[Sequences, ...],
    *,
    weights: tuple[float, ...],
    later: tuple[Phase, ...] = (),
    seed: int = 0,
) -> Result:
    """Sequences of every input in proportion to its weight; each input repeats, reshuffled.

    What is not training (validation, vocabulary) is the first input's.

    Args:
        run: the attempt.
        sequences: shuffled caches of one tokenizer and one sequence length.
        weights: share of sequences of each input, from the start.
        later: other weights from later points of training on.
        seed: another seed interleaves the inputs differently.
    """
    from data.batches.mixture import Mixture, MixturePhase

    length = _common_length(sequences)
    stages = tuple(
        MixturePhase(start=-(-phase.start_tokens // length), weights=phase.weights)
        for phase in _phases(weights, later)
    )
    Mixture(stages, seed)  # refuses phases that begin with the same sequence
    return {
        "sequence_length": length,
        "sequences": sum(part.result["sequences"] for part in sequences),
        "tokens_used": sum(part.result["tokens_used"] for part in sequences),
        "sources": [
            {"cache": part.cache.path, "sequences": part.result["sequences"]} for part in sequences
        ],
        "stages": [dataclasses.asdict(stage) for stage in stages],
        "seed": seed,
    }


def _common_length(sequences: tuple[Sequences, ...]) -> int:
    first = sequences[0]
    for part in sequences:
        if "stages" in part.result:
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
