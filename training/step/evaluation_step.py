"""The compiled evaluation step: negative log-likelihood, tokens and bytes of each sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

import models.named as hax
from models.layers.precision import cast
from models.loss.next_token import score_tokens
from models.shape.loss_chunks import logit_budget
from models.transformer import Transformer
from training.config import TrainConfig
from training.sharding.layout import Layout
from training.step.document_mask import Boundaries

EvaluationStep = Callable[
    [Transformer, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]
]


def make_evaluation_step(
    config: TrainConfig, layout: Layout, backend: str, boundaries: Boundaries
) -> EvaluationStep:
    """Jitted (model, tokens, lengths, token_bytes) -> nll, tokens and bytes per sequence, [batch].

    Negative log-likelihoods are in nats, float32; the counts are int32.
    """
    # Held-out splits have no padding: there, EOS after EOS is an empty document, which counts.
    unpadded = dataclasses.replace(boundaries, padded=False)

    def evaluation_step(
        model: Transformer, stored: jax.Array, lengths: jax.Array, token_bytes: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens = boundaries.tokens(stored)
        with layout.activations():
            compute_params = cast(model, jnp.dtype(config.compute_dtype))
            nll, _ = score_tokens(
                layout.gather_model(compute_params),
                hax.named(tokens, ("batch", "position")),
                segment_ids=boundaries.segments(tokens),
                budget=logit_budget(layout.platform),
                forward=layout.forward(backend, unroll=config.unroll),
            )
        # Position i predicts token i + 1, which must lie before the end of its sequence.
        counted = jnp.arange(1, tokens.shape[1])[None] < lengths[:, None]
        if (unmasked := unpadded.counted(stored)) is not None:
            counted = counted & unmasked.array[:, :-1]
        target_bytes = jnp.where(counted, token_bytes[tokens[:, 1:]], 0)
        return (
            jnp.sum(jnp.where(counted, nll.array[:, :-1], 0.0), axis=1),
            jnp.sum(counted, axis=1, dtype=jnp.int32),
            jnp.sum(target_bytes, axis=1, dtype=jnp.int32),
        )

    return jax.jit(evaluation_step, out_shardings=layout.replicated)
