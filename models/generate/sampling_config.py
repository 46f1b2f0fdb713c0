"""Settings of token sampling as plain data; imports no JAX. `token_sampling` implements them."""

from __future__ import annotations

import dataclasses

from pipeline.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of token sampling.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token every time.
        top_k: sample among the k likeliest tokens; None for all.
        top_p: sample among the likeliest tokens that together have this probability; None for all.
        seed: seed of the random numbers.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(
                f"Sampling.temperature: expected 0 or above, found {self.temperature}; 0 is greedy "
                "and 1 the model's own distribution"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(
                f"Sampling.top_k: expected at least 1, found {self.top_k}; None keeps all"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(
                f"Sampling.top_p: expected a probability above 0, at most 1, found {self.top_p}; "
                "None keeps all"
            )
        if not 0 <= self.seed < 1 << 32:
            raise InputError(f"Sampling.seed: expected 0 to 2^32 - 1, found {self.seed}")
