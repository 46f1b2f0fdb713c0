"""Which positions attend to which."""

from __future__ import annotations

import dataclasses

from jax import Array

from models.layers.axes import BATCH, POSITION
from models.named import NamedArray

MASKED = -1e30
"""The score of a masked key; its exponential is 0."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """Causal, and what else limits or caps the scores.

    Attributes:
        window: positions each position attends to, itself included; None for all.
        soft_cap: c in c * tanh(score / c), or None.
        segment_ids: int32 [batch, position]; positions attend only to positions with equal ids.
    """

    window: int | None = None
    soft_cap: float | None = None
    segment_ids: NamedArray | None = None

    @property
    def ids_BP(self) -> Array | None:
        """`segment_ids` as an array."""
        ids = self.segment_ids
        return None if ids is None else ids.rearrange((BATCH, POSITION)).array
