"""Prompts that a model continues while it trains: plain data, no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What is written after which prompts.

    Attributes:
        tokenizer: URL of tokenizer.json.
        prompts: texts to continue; an empty one begins a document.
        new_tokens: to add at most.
        temperature: 0 takes the most likely token every time.
        top_k: sample among the k most likely only; None for all.
        top_p: sample among the likeliest that together have this probability; None for all.
        seed: of the draws; the same at every checkpoint.
    """

    tokenizer: str
    prompts: tuple[str, ...]
    new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = 40
    top_p: float | None = None
    seed: int = 0
