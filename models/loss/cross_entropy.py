"""Cross-entropy of a linear head in chunks of positions, with a custom backward pass.

Full logits are the largest array of a small language model: 16,384 tokens x 32,768 ids x 4 bytes
are 2 GiB, and their gradient takes as much again. Here a `lax.scan` computes the logits of one
chunk at a time. The objective is a sum over tokens, so the gradient of a chunk's logits follows
from that chunk alone. The differentiated forward pass therefore computes the gradients of the
hidden states and of the head chunk by chunk and saves only these: no logits are stored or
recomputed (as in Liger Kernel, Hsu et al., 2024, arXiv:2410.10989, section 3.2).

Per token, with logits l = cap(h W^T), z = log sum_v exp(l_v), target t and weight w:

    objective     = w (z - l_t + a z^2)
    d / d l_v     = w (softmax(l)_v (1 + 2 a z) - [v = t])        as dz / d l_v = softmax(l)_v

Logits, z and every reduction are float32; the gradient of the logits is rounded to the hidden
states' dtype before its two matmuls, which accumulate in float32.

Where devices have different sequences of the batch, their gradients of the head are
reduce-scattered over the devices that store a part of the table each. With `MeshAxes.split_tables`
no device has a whole head: the hidden states of a chunk are all-gathered from the devices that
share a head, each computes the logits of its ids, and log-sum-exp and target logit are all-reduced
over them (vocabulary parallelism, Shoeybi et al., 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from models.layers.axes import MeshAxes, TableSplit, sum_scatter
from models.shape.footprint import check_chunks

_NO_PROBABILITY = -1e9  # exp is 0; finite, so that 0 times the soft cap's derivative is 0, not NaN


@dataclasses.dataclass(frozen=True)
class IdParts:
    """How the ids of logits [vocab, batch, position] are divided over devices.

    `axes` are mesh axes of the surrounding `shard_map` that divide the ids, in order; devices along
    them have different sequences of the batch. `count` is the number of ids; None where no logits
    are padding. `wide`: see `MeshAxes.wide_sums`.
    """

    axes: tuple[str, ...] = ()
    count: int | None = None
    wide: bool = False

    def mask(self, logits: Array) -> Array:
        """`logits` with the padding of the vocabulary masked."""
        if self.count is None:
            return logits
        first = jax.lax.axis_index(self.axes) * logits.shape[0] if self.axes else 0
        ids = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
        return jnp.where(ids < self.count, logits, _NO_PROBABILITY)

    def gather_rows(self, x: Array, axis: int) -> Array:
        """`x` all-gathered along `axis` from the devices that share the ids."""
        return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True) if self.axes else x

    def scatter_rows(self, x: Array, axis: int) -> Array:
        """`x` summed over the devices that share the ids and scattered along `axis`."""
        return sum_scatter(x, self.axes, axis, wide=self.wide) if self.axes else x

    def log_sum_exp(self, logits: Array) -> Array:
        """Log-sum-exp over all ids, [batch, position]."""
        local = jax.nn.logsumexp(logits, axis=0)
        if not self.axes:
            return local
        # log sum_d exp(lse_d) over devices d, shifted by the maximum so that no exp overflows.
        largest = jax.lax.pmax(local, self.axes)
        return largest + jnp.log(jax.lax.psum(jnp.exp(local - largest), self.axes))

    def is_target(self, logits: Array, targets: Array) -> Array:
        """Whether each logit is its position's target, boolean with the shape of `logits`."""
        ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 0)
        if self.axes:
            targets = targets - jax.lax.axis_index(self.axes) * logits.shape[0]
        return ids == targets[None]

    def at_target(self, logits: Array, targets: Array) -> Array:
        """The logit of every position's target, [batch, position]."""
        # Unlike a gather, a masked sum stays local when the compiler shards the ids.
        local = jnp.sum(jnp.where(self.is_target(logits, targets), logits, 0.0), axis=0)
        return jax.lax.psum(local, self.axes) if self.axes else local


Sums = tuple[Array, Array, Array]
Gradients = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """How losses are computed.

    `id_count` rows of the head belong to an id; later rows are padding, without probability or
    gradient. None: all rows.
    """

    z_loss: float = 0.0  # a in the formula above
    soft_cap: float | None = None  # c in c * tanh(logits / c)
    chunks: int = 1  # a divisor of P
    mesh_axes: MeshAxes | None = None  # that divide batch, positions and the head
    id_count: int | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def summed_losses(
    hidden_EBP: Array, head_VE: Array, targets_BP: Array, weights_BP: Array, options: LossOptions
) -> Sums:
    """The objective, sum of w * nll + z_loss * w * z^2, and its two terms; float32 scalars.

    Only the objective is differentiable, with respect to the hidden states and the head, which have
    one float dtype; gradients of the terms are zero. Targets are int32, weights float32. Raises
    `InputError` if `chunks` does not divide P.
    """
    arrays = hidden_EBP, head_VE, targets_BP, weights_BP
    return _over_devices(functools.partial(_sums, options), options, *arrays)[0]


def token_losses(
    hidden_EBP: Array, head_VE: Array, targets_BP: Array, options: LossOptions
) -> tuple[Array, Array]:
    """Negative log-likelihood of every token, float32 [B, P], and whether no logit is larger."""
    ids, soft_cap = IdParts(count=options.id_count), options.soft_cap

    def one_chunk(_: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        hidden, targets = chunk
        logits = _logits(hidden, head_VE, soft_cap, ids)
        at_target = ids.at_target(logits, targets)
        return None, (ids.log_sum_exp(logits) - at_target, at_target >= jnp.max(logits, axis=0))

    split = (_split(hidden_EBP, options.chunks), _split(targets_BP, options.chunks))
    nll, best = jax.lax.scan(one_chunk, None, split)[1]
    return _join(nll), _join(best)


def _logits(hidden: Array, head: Array, soft_cap: float | None, ids: IdParts) -> Array:
    logits = jnp.einsum("ve,ebp->vbp", head, hidden, preferred_element_type=jnp.float32)
    return ids.mask(logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap))


def _losses(logits: Array, targets: Array, ids: IdParts) -> tuple[Array, Array]:
    """Negative log-likelihood and log-sum-exp, float32 [B, P]."""
    lse = ids.log_sum_exp(logits)
    return lse - ids.at_target(logits, targets), lse


def _logit_gradient(
    logits: Array, is_target: Array, lse: Array, weights: Array, options: LossOptions
) -> Array:
    """Gradient of the objective for the logits before the cap, float32 [V, B, P]."""
    z_loss, soft_cap = options.z_loss, options.soft_cap
    softmax = jnp.exp(logits - lse[None])
    gradient = softmax * (weights * (1.0 + 2.0 * z_loss * lse))[None]
    gradient = gradient - jnp.where(is_target, weights[None], 0.0)
    if soft_cap is not None:
        # d/dx c tanh(x / c) = 1 - (l / c)^2 at the capped logit l.
        gradient = gradient * (1.0 - jnp.square(logits / soft_cap))
    return gradient


def _split(x: Array, chunks: int) -> Array:
    """[..., P] to [chunks, ..., P / chunks]; the batch axis is not split and so stays sharded."""
    *rest, position = x.shape
    check_chunks(position, chunks)
    return jnp.moveaxis(x.reshape(*rest, chunks, position // chunks), -2, 0)


def _join(x: Array) -> Array:
    """Inverse of `_split`."""
    chunks, *rest, position = x.shape
    return jnp.moveaxis(x, 0, -2).reshape(*rest, chunks * position)


def _sums(
    options: LossOptions, ids: IdParts, hidden: Array, head: Array, *others: Array
) -> tuple[Sums, tuple[()]]:
    """The sums without gradients, over the sequences of all devices that share the ids."""

    def one_chunk(sums: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[Any, None]:
        hidden, targets, weights = _gather_chunk(chunk, ids)
        losses = _losses(_logits(hidden, head, options.soft_cap, ids), targets, ids)
        return _add(sums, *losses, weights, options.z_loss), None

    zero = jnp.zeros((), jnp.float32)
    split = tuple(_split(x, options.chunks) for x in (hidden, *others))
    (nll, z), _ = jax.lax.scan(one_chunk, (zero, zero), split)
    return (nll + z, nll, z), ()


def _sums_and_gradients(
    options: LossOptions, ids: IdParts, hidden: Array, head: Array, *others: Array
) -> tuple[Sums, Gradients]:
    """The sums, and the objective's gradients of the hidden states and, in float32, of the head."""

    def one_chunk(carry: tuple[Any, Array], chunk: tuple[Array, ...]) -> tuple[Any, Array]:
        sums, head_bar = carry
        hidden, targets, weights = _gather_chunk(chunk, ids)
        logits = _logits(hidden, head, options.soft_cap, ids)
        nll, lse = _losses(logits, targets, ids)
        is_target = ids.is_target(logits, targets)
        gradient = _logit_gradient(logits, is_target, lse, weights, options)
        gradient = gradient.astype(hidden.dtype)
        hidden_bar = ids.scatter_rows(jnp.einsum("ve,vbp->ebp", head, gradient), 1)
        more = jnp.einsum("vbp,ebp->ve", gradient, hidden, preferred_element_type=jnp.float32)
        return (_add(sums, nll, lse, weights, options.z_loss), head_bar + more), hidden_bar

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero), jnp.zeros(head.shape, jnp.float32)
    split = tuple(_split(x, options.chunks) for x in (hidden, *others))
    ((nll, z), head_bar), hidden_bar = jax.lax.scan(one_chunk, start, split)
    return (nll + z, nll, z), (_join(hidden_bar), head_bar)


def _gather_chunk(chunk: tuple[Array, ...], ids: IdParts) -> tuple[Array, Array, Array]:
    """All-gathered hidden states, targets and weights of the devices that share the ids."""
    hidden, targets, weights = chunk
    return ids.gather_rows(hidden, 1), ids.gather_rows(targets, 0), ids.gather_rows(weights, 0)


def _add(
    sums: tuple[Array, Array], nll: Array, lse: Array, weights: Array, z_loss: float
) -> tuple[Array, Array]:
    of_nll, of_z = sums
    return of_nll + jnp.sum(nll * weights), of_z + z_loss * jnp.sum(jnp.square(lse) * weights)


def _over_devices(run: Any, options: LossOptions, *arrays: Array) -> Any:
    """`run(ids, *arrays)` on every device's sequences, with one all-reduce of the sums."""
    mesh_axes, id_count = options.mesh_axes, options.id_count
    head, tokens = arrays[1], () if mesh_axes is None else mesh_axes.tokens
    if mesh_axes is None or mesh_axes.shards(tokens) == 1:
        # Nothing to reduce. XLA's CPU compiler also cannot partition the vocabulary inside a
        # shard_map whose axes all have size 1.
        return run(IdParts(count=id_count), *arrays)
    table = mesh_axes.table_split(*head.shape)
    ids = IdParts(table.axes if table.stays else (), id_count, table.wide)
    # Devices along `ids.axes` gathered each other's sequences: their sums are already equal.
    different = tuple(name for name in tokens if name not in ids.axes)

    def local(*arrays: Array) -> tuple[Sums, Any]:
        sums, gradients = run(ids, *arrays)
        if gradients:
            # With a divided head the gradient already sums over the devices that share the table.
            split = TableSplit() if table.stays else table
            gradients = gradients[0], split.reduce(gradients[1], different)
        return jax.lax.psum(sums, different), gradients

    rows = PartitionSpec(mesh_axes.batch, mesh_axes.sequence)
    hidden, whole = PartitionSpec(None, *rows), PartitionSpec()
    gradients = (hidden, table.spec) if run.func is not _sums else ()
    return jax.shard_map(
        local,
        in_specs=(hidden, table.spec if table.stays else whole, rows, rows),
        out_specs=(whole, gradients),
        axis_names=set(tokens),
        check_vma=False,
    )(*arrays)


def _forward(*arguments: Any) -> tuple[Sums, Gradients]:
    *arrays, options = arguments
    return _over_devices(functools.partial(_sums_and_gradients, options), options, *arrays)


def _backward(
    options: LossOptions, gradients: Gradients, cotangents: Sums
) -> tuple[Array, Array, None, None]:
    hidden_bar, head_bar = gradients
    # The objective is a scalar: its cotangent scales the gradients that the forward pass computed.
    of_objective = cotangents[0]
    scaled = hidden_bar.astype(jnp.float32) * of_objective
    # The head has the hidden states' dtype, and so must its cotangent.
    head_bar = (head_bar * of_objective).astype(hidden_bar.dtype)
    return scaled.astype(hidden_bar.dtype), head_bar, None, None


summed_losses.defvjp(_forward, _backward)
