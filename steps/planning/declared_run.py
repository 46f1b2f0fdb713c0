"""The training run that a node declares, as far as it follows from the graph."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from models.config import TransformerConfig
from models.flops import training_flops_per_token
from pipeline import Hardware
from pipeline.graph.facts import Results
from pipeline.graph.node import Node
from steps.artifacts import TRAIN, Documents, TokenCache
from steps.budget import steps_of
from steps.declared import nearest_setting
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import batch_phases, largest_phase


@dataclass(frozen=True)
class DeclaredRun:
    """A step that trains.

    Attributes:
        train: the configuration of its largest batch phase, with the sequences' length.
        steps: optimizer steps; None if they depend on outputs that do not exist yet.
        phases: number of steps and configuration of each batch phase; empty without `steps`.
        splits: number of held-out splits to evaluate on.
        exact: whether `steps` is exact, or estimated from the tokens of the cache or the budget of
            `sample`.
    """

    model: TransformerConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    hardware: Hardware
    steps: int | None
    phases: tuple[tuple[int, TrainConfig], ...]
    splits: int
    exact: bool

    @property
    def tokens(self) -> int | None:
        """Training tokens."""
        if self.steps is None:
            return None
        return sum(steps * t.batch_size * t.sequence_length for steps, t in self.phases)

    @property
    def flops(self) -> float | None:
        """FLOPs of training, with causal attention."""
        if self.steps is None:
            return None
        return sum(
            steps
            * train.batch_size
            * train.sequence_length
            * training_flops_per_token(self.model, train.sequence_length, causal=True)
            for steps, train in self.phases
        )


def declared_run(node: Node, results: Results) -> DeclaredRun | None:
    """The run that `node` declares; None if its model or length does not follow from the graph."""
    model = nearest_setting(node, "model")
    sequences, train = node.inputs.get("sequences"), node.config["train"]
    if sequences is None or not isinstance(model, TransformerConfig):
        return None
    result = results.get(sequences.key, {})
    length = train.sequence_length or result.get("sequence_length")
    length = length or nearest_setting(sequences, "sequence_length")
    if not length:
        return None
    train = dataclasses.replace(train, sequence_length=length)
    steps, exact = _steps(node, sequences, train, results)
    known = dataclasses.replace(train, steps=steps or train.steps)
    wanted = node.config.get("splits") or nearest_setting(sequences, "splits", Documents) or ((),)
    return DeclaredRun(
        model=model,
        optimizer=node.config["optimizer"],
        train=largest_phase(known).config(known),
        hardware=node.runtime["hardware"],
        steps=steps,
        phases=tuple((p.end - p.first, p.config(known)) for p in batch_phases(known) if steps),
        splits=len(wanted),
        exact=exact,
    )


def _steps(
    node: Node, sequences: Node, train: TrainConfig, results: Results
) -> tuple[int | None, bool]:
    if train.steps:
        return train.steps, True
    if (tokens := node.config.get("tokens")) is not None:
        return steps_of(tokens // train.sequence_length, train), True
    epochs = node.config.get("epochs") or 1
    if (available := results.get(sequences.key, {}).get("sequences")) is not None:
        return steps_of(int(epochs * available), train), True
    available = _counted(sequences, results) or nearest_setting(sequences, "tokens", Documents)
    if available is None or available < 0:
        return None, False
    return steps_of(int(epochs * available) // train.sequence_length, train), False


def _counted(sequences: Node, results: Results) -> int | None:
    """Training tokens of the one cache that the sequences are cut from, once that is built."""
    caches = [n for n in sequences.inputs.values() if issubclass(n.output, TokenCache)]
    splits = results.get(caches[0].key, {}).get("splits", {}) if len(caches) == 1 else {}
    return splits.get(TRAIN, {}).get("tokens")
