"""Logits of whole sequences, with few compiled programs."""

from __future__ import annotations

import jax
import numpy as np
from jax import Array

import models.named as hax
from models.generate.generate import backend_for, pad_prompts
from models.layers.axes import BATCH, POSITION
from models.transformer import Forward, Transformer
from pipeline.errors import InputError


def next_token_logits(model: Transformer, rows: np.ndarray) -> np.ndarray:
    """Float32 logits [batch, position, vocab] of ids [batch, position].

    Rows are padded at the end to a rounded length (see `models.generate.generate.bucket_length`),
    so that few lengths are compiled; the causal mask hides the padding.

    Raises:
        InputError: an id is outside the vocabulary, or rows are longer than the learned positions.
    """
    vocab, context = model.config.vocab_size, model.config.context
    if not 0 <= rows.min() <= rows.max() < vocab:
        raise InputError(
            f"tokens: expected ids in [0, {vocab}), found {rows.min()} to {rows.max()}; encode "
            "the text with the model's tokenizer"
        )
    if context is not None and rows.shape[1] > context:
        raise InputError(
            f"tokens: expected at most {context} positions, the number of learned positions, "
            f"found {rows.shape[1]}; shorten the sequences"
        )
    tokens, _ = pad_prompts(model.config, rows.tolist())
    backend = backend_for(model.config, model.embedding.array, tokens.shape[1])
    logits = _logits(model, tokens, backend=backend)
    return np.asarray(logits)[:, : rows.shape[1]]


def _forward(model: Transformer, tokens: Array, *, backend: str) -> Array:
    forward = Forward(backend=backend)
    return model.logits(hax.named(tokens, (BATCH, POSITION)), forward=forward).array


_logits = jax.jit(_forward, static_argnames="backend")
