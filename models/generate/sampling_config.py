"""Settings of token sampling as plain data; imports no JAX. `token_sampling` implements them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from msgspec import Meta

from models.shape.validation import Count, NotNegative, Seed, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of token sampling.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token every time.
        top_k: sample among the k likeliest tokens; None for all.
        top_p: sample among the likeliest tokens that together have this probability; None for all.
        seed: seed of the random numbers.
    """

    temperature: NotNegative = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
