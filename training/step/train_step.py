"""The optimizer step and the evaluation step, each one program for any number of processes.

The loss of a microbatch is a *sum* over its counted tokens. Sums of losses and gradients are
accumulated in float32 and divided once by the number of counted tokens in the whole batch, so the
result does not depend on the number of microbatches, even when masks make their counts unequal.

A step counts only if it learned: one without a counted token, one whose loss, gradient norm or
updated parameters are not finite, and one whose loss is a spike (`training.step.state`) leave
parameters, EMA, optimizer state and the window of losses unchanged and increment `skipped`; `step`
advances, so the next step reads the next batch.

A batch holds stored ids only, which determine documents and loss mask:

- An EOS begins a segment: it is the first token of the document that follows it, and a prompt
  begins with it too. Attention stays inside a segment, so no prediction sees another document's
  text; the EOS itself is predicted from the document that it ends.
- An EOS after an EOS is padding (see `data.batches.packing`); its prediction does not count.
- Where a cache has a loss mask, an id >= vocab_size stands for the token id - vocab_size: the model
  reads the token, and its prediction does not count.
- Where rows hold conversations, an id >= 2 vocab_size does too, and begins a segment; an EOS, which
  may end a turn inside one, begins none.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import models.named as hax
from models.jax_numerics import exact_products
from models.layers.axes import BATCH, POSITION
from models.layers.norms import cast
from models.loss.next_token import next_token_loss, score_tokens
from models.named import NamedArray
from models.transformer import Transformer
from training.config import TrainConfig
from training.cost.memory_plan import logit_budget
from training.optimizer import Schedule
from training.sharding.layout import Layout
from training.step.state import (
    TrainState,
    ema_weight,
    is_spike,
    remember,
    shardings_of,
)


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """Derives tokens, segments and loss mask from the stored ids of a run.

    `separate` stops attention at the end of a document, `padded` sequences may end in padding, and
    `masked_from` is the vocabulary's size where ids are stored with a loss mask; with `begins`
    those from twice its size on begin a segment.
    """

    eos_id: int
    separate: bool = False
    padded: bool = False
    masked_from: int | None = None
    begins: bool = False

    def tokens(self, stored: jax.Array) -> jax.Array:
        """Token ids, int32 [batch, position], of stored ids of the same shape and dtype."""
        if self.masked_from is None:
            return stored
        if self.begins:
            return stored % self.masked_from
        return jnp.where(stored < self.masked_from, stored, stored - self.masked_from)

    def segments(self, stored: jax.Array) -> NamedArray | None:
        """int32 [batch, position], equal within a document; None if attention crosses documents."""
        if not self.separate:
            return None
        # Position i has the number of EOS ids in 0..i, so an EOS shares the next document's number.
        if self.begins and self.masked_from is not None:
            begins = stored >= 2 * self.masked_from
        else:
            begins = self.tokens(stored) == self.eos_id
        return hax.named(jnp.cumsum(begins.astype(jnp.int32), axis=1), (BATCH, POSITION))

    def counted(self, stored: jax.Array) -> NamedArray | None:
        """Bool [batch, position]: whether the prediction of token i + 1 counts; None if all do."""
        # The last position has no next token; the loss ignores the value that wraps around to it.
        following, counts = jnp.roll(stored, -1, axis=1), []
        if self.masked_from is not None:
            counts.append(following < self.masked_from)
        if self.padded:
            counts.append((stored != self.eos_id) | (following != self.eos_id))
        if not counts:
            return None
        return hax.named(jnp.stack(counts).all(axis=0), (BATCH, POSITION))


EvaluationStep = Callable[
    [Transformer, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]
]


def make_evaluation_step(
    config: TrainConfig, layout: Layout, backend: str, boundaries: Boundaries
) -> EvaluationStep:
    """Jitted (model, tokens, lengths, token_bytes) -> nll, tokens and bytes per sequence, [batch].

    Negative log-likelihoods are in nats, float32; the counts are int32. Held-out splits have no
    padding: there, EOS after EOS is an empty document, which counts, so their `boundaries` are not
    `padded`.
    """

    def evaluation_step(
        model: Transformer, stored: jax.Array, lengths: jax.Array, token_bytes: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens = boundaries.tokens(stored)
        with layout.activations(), exact_products(config.compute_dtype):
            compute_params = cast(model, jnp.dtype(config.compute_dtype))
            nll, _ = score_tokens(
                layout.gather_model(compute_params),
                hax.named(tokens, ("batch", "position")),
                segment_ids=boundaries.segments(stored),
                budget=logit_budget(layout.platform),
                forward=layout.forward(backend, unroll=config.unroll),
            )
        # Position i predicts token i + 1, which must lie before the end of its sequence.
        counted = jnp.arange(1, tokens.shape[1])[None] < lengths[:, None]
        if (unmasked := boundaries.counted(stored)) is not None:
            counted = counted & unmasked.array[:, :-1]
        target_bytes = jnp.where(counted, token_bytes[tokens[:, 1:]], 0)
        return (
            jnp.sum(jnp.where(counted, nll.array[:, :-1], 0.0), axis=1),
            jnp.sum(counted, axis=1, dtype=jnp.int32),
            jnp.sum(target_bytes, axis=1, dtype=jnp.int32),
        )

    return jax.jit(evaluation_step, out_shardings=layout.replicated)


Metrics = dict[str, jax.Array]


class LossSums(NamedTuple):
    """Of the counted tokens of a batch, float32 scalars: sums of nll (nats) and z-loss, number."""

    nll: jax.Array
    z: jax.Array
    tokens: jax.Array


@dataclass(frozen=True)
class LossFunction:
    """The summed loss of a batch, and its gradients with respect to float32 parameters."""

    config: TrainConfig
    layout: Layout
    backend: str
    boundaries: Boundaries

    def __call__(
        self, compute_params: Transformer, stored: jax.Array
    ) -> tuple[jax.Array, LossSums]:
        """The summed objective, nll + z-loss, and its two terms with the token count.

        Takes the gathered model in the compute dtype and stored ids, int32 [batch, position].
        """
        config, layout, boundaries = self.config, self.layout, self.boundaries
        alone = self.reduces_once  # on one device, inside `shard_map`
        with contextlib.nullcontext() if alone else layout.activations():
            loss = next_token_loss(
                compute_params,
                hax.named(boundaries.tokens(stored), ("batch", "position")),
                loss_mask=boundaries.counted(stored),
                segment_ids=boundaries.segments(stored),
                z_loss=config.z_loss,
                chunks=int(config.loss_chunks),
                forward=layout.forward(
                    self.backend, alone=alone, remat=config.remat, unroll=config.unroll
                ),
            )
        return loss.objective, LossSums(loss.total, loss.z, loss.count)

    @property
    def reduces_once(self) -> bool:
        """Whether devices add up microbatches on their own, and then with each other."""
        return self.config.microbatches > 1 and self.config.parallel.reduce == "step"

    def gradients(self, model: Transformer, tokens: jax.Array) -> tuple[LossSums, Transformer]:
        """Summed losses and summed float32 gradients of a global batch [batch, position].

        Parameters are cast to the compute dtype once a step, not once a microbatch. Gradients of a
        microbatch are computed in the compute dtype and summed in float32.
        """
        compute_params = self.layout.gather_model(cast(model, jnp.dtype(self.config.compute_dtype)))
        if self.config.microbatches == 1:
            return self._microbatch(compute_params, tokens)
        microbatches = self._split_microbatches(tokens)
        if not self.reduces_once:
            return self._accumulated(compute_params, microbatches)
        return self.layout.sum_once(self._accumulated, compute_params, microbatches)

    def _microbatch(
        self, compute_params: Transformer, stored: jax.Array
    ) -> tuple[LossSums, Transformer]:
        gradient, sums = jax.grad(self, has_aux=True)(compute_params, stored)
        if not self.reduces_once:
            gradient = jax.lax.with_sharding_constraint(gradient, self.layout.shardings(gradient))
        return sums, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)

    def _accumulated(
        self, compute_params: Transformer, microbatches: jax.Array
    ) -> tuple[LossSums, Transformer]:
        """The sums over `microbatches` [microbatch, batch, position]."""

        def add(total: Any, batch: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, self._microbatch(compute_params, batch)), None

        one = jax.eval_shape(self._microbatch, compute_params, microbatches[0])
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), one)
        return jax.lax.scan(add, zero, microbatches)[0]

    def _split_microbatches(self, rows: jax.Array) -> jax.Array:
        """[batch, position] -> [microbatch, batch, position], no sequence changes its device.

        A device's sequences are contiguous in the batch. Microbatch m takes those with index m mod
        n, so it has an equal share of every device's sequences.
        """
        count = self.config.microbatches
        split = rows.reshape(rows.shape[0] // count, count, *rows.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(split, self.layout.microbatch)


def _select(keep: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, old)


def _apply(
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    state: TrainState,
    gradients: Transformer,
    rate: jax.Array,
    loss: jax.Array,
    sound: jax.Array,
) -> tuple[TrainState, Metrics]:
    norm = optax.tree.norm(gradients)
    # Typed as Any: optax takes any pytree, its type annotations allow fewer.
    update: Any = optimizer.update
    # Under strict promotion, optax's bias correction (float to an integer power) would raise.
    with jax.numpy_dtype_promotion("standard"):
        direction, optimizer_state = update(
            gradients, state.optimizer_state, state.model, step=state.step
        )
    model = jax.tree.map(lambda p, d: p - rate * d, state.model, direction)
    parameter_norm = optax.tree.norm(model)
    # A norm is finite only if all its elements are, so two scalars check every gradient and
    # parameter. The step is computed in any case and then selected: no branch waits for the host.
    applied = sound & jnp.isfinite(norm) & jnp.isfinite(parameter_norm)
    ema, recent, averaged = state.ema, state.recent, state.averaged
    if recent is not None:
        applied &= ~is_spike(recent, state.applied, loss, config.spike_guard)
        recent = _select(applied, remember(recent, loss), recent)
    if ema is not None:
        if averaged is None:
            weight = ema_weight(config.ema, state.applied + 1)
        else:
            # Of the mean of a run that this one continues, only as many steps as are in both count.
            past = jnp.maximum(state.step - (config.steps - config.averaged_steps), 0)
            count = jnp.minimum(averaged, past) + 1
            # Where the first of these steps is not applied, nothing of them is in the mean yet.
            averaged = jnp.where(applied, count, jnp.where(past == 0, 0, averaged))
            weight = 1.0 / count.astype(jnp.float32)
        updated = jax.tree.map(lambda a, p: (1.0 - weight) * a + weight * p, ema, model)
        ema = _select(applied, updated, ema)
    new = TrainState(
        step=state.step + 1,
        skipped=state.skipped + jnp.where(applied, 0, 1).astype(jnp.int32),
        model=_select(applied, model, state.model),
        optimizer_state=_select(applied, optimizer_state, state.optimizer_state),
        ema=ema,
        recent=recent,
        averaged=averaged,
    )
    return new, {"grad_norm": norm, "parameter_norm": parameter_norm}


def make_train_step(
    loss_function: LossFunction,
    optimizer: optax.GradientTransformation,
    rate: Schedule,
    abstract: TrainState,
    options: Mapping[str, str | bool],
) -> jax.stages.Wrapped:
    """The jitted step (state, tokens) -> (state, metrics); the state is donated.

    The state has the shapes and shardings of `abstract`. Tokens are stored ids, int32 [batch,
    position], sharded as `layout.batch`. Metrics are float32 scalars: `loss` (mean nll in nats per
    counted token; 0 without one), `grad_norm` and `parameter_norm` (global 2-norms),
    `learning_rate`, `tokens` (counted in the loss) and `skipped` (steps not applied so far).
    """
    config, layout = loss_function.config, loss_function.layout

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        with exact_products(config.compute_dtype):  # the backward pass too
            sums, summed = loss_function.gradients(state.model, tokens)
        count = jnp.maximum(sums.tokens, 1.0)  # a batch without counted tokens has gradients of 0
        gradients = jax.tree.map(lambda g: g / count, summed)
        if layout.parallel.optimizer_memory == "host":
            copied = jax.device_put(state.optimizer_state, on_device)
            state = dataclasses.replace(state, optimizer_state=copied)
        learning_rate = rate(state.step)
        loss = sums.nll / count
        sound = (sums.tokens > 0) & jnp.isfinite(loss + sums.z)
        new, metrics = _apply(optimizer, config, state, gradients, learning_rate, loss, sound)
        metrics |= {
            "loss": loss,
            "learning_rate": learning_rate,
            "tokens": sums.tokens,
            "skipped": new.skipped,
        }
        return new, {name: value.astype(jnp.float32) for name, value in metrics.items()}

    target = shardings_of(abstract)
    on_device = jax.tree.map(lambda s: s.with_memory_kind("device"), target.optimizer_state)
    return jax.jit(
        train_step,
        donate_argnums=0,
        compiler_options=dict(options),
        in_shardings=(target, layout.batch),
        out_shardings=(target, layout.replicated),
    )
