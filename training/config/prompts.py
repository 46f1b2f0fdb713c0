"""Prompts that a model continues while it trains: plain data, no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts and the sampling of their continuations.

    Attributes:
        tokenizer: URL of tokenizer.json.
        prompts: texts to continue; an empty one begins a document.
        new_tokens: maximum number of tokens to generate.
        temperature: sampling temperature; 0 always takes the most likely token.
        top_k: sample from the k most likely tokens; None for all.
        top_p: sample from the likeliest tokens that together have this probability; None for all.
        seed: seed of the sampling, the same at every checkpoint.
    """

    tokenizer: str
    prompts: tuple[str, ...]
    new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = 40
    top_p: float | None = None
    seed: int = 0
