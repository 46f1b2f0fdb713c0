"""A recipe, and how one is put together from numbers and their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.shape.config import TransformerConfig
from models.shape.footprint import training_flops_per_token
from training.config import Group, OptimizerConfig, TrainConfig

UNCLIPPED = 1e9
"""`clip_norm` of recipes that do not clip: a norm that no gradient has."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides a model's loss besides its text and tokenizer.

    Attributes:
        sources: where each number is from, or its formula, by dotted name ("optimizer.beta1");
            "left out" says what the published code does besides.
    """

    name: str
    model: TransformerConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    sources: Mapping[str, str] = field(compare=False)

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.train.batch_size * self.train.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return self.train.steps * self.batch_tokens

    @property
    def flops(self) -> float:
        """FLOPs of all steps, with attention over all pairs inside windows, as the curves count."""
        length = self.train.sequence_length
        return self.tokens * training_flops_per_token(self.model, length, causal=False)


Part = tuple[str, str, dict[str, Any]]


def part(where: str, source: str, **numbers: Any) -> Part:
    """Fields of one source; `where` is "model", "optimizer", "optimizer.<group>" or "train"."""
    return where, source, numbers


def assemble(name: str, left_out: str, *parts: Part) -> Recipe:
    """The recipe of these parts."""
    fields: dict[str, dict[str, Any]] = {}
    for where, _, numbers in parts:
        fields.setdefault(where, {}).update(numbers)
    for where, numbers in fields.items():
        if group := where.partition(".")[2]:
            fields["optimizer"][group] = Group(**numbers)
    sources = {f"{where}.{key}": source for where, source, numbers in parts for key in numbers}
    return Recipe(
        name=name,
        model=TransformerConfig(**fields["model"]),
        optimizer=OptimizerConfig(**fields["optimizer"]),
        train=TrainConfig(**fields["train"]),
        sources={**sources, "left out": left_out},
    )
