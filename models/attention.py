"""Causal grouped-query attention: one call, several back ends.

`reference` is plain Haliax and runs everywhere; it makes all scores, in float32. `splash` is the
TPU kernel. Both compute softmax(cap(q k^T / sqrt(head_size))) v over the positions up to one's own,
in one's own segment; each is tested against the other, forward and backward. The choice is made
once, by `choose_backend`, with a reason to log; nothing falls back silently.
"""

from __future__ import annotations

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from models.attention_splash import AttentionSharding, splash, why_not
from models.axes import (
    BATCH,
    EMBED,
    HEAD_SIZE,
    HEADS,
    KEY_POSITION,
    KV_HEADS,
    POSITION,
    Q_PER_KV,
    ModelAxes,
)
from models.config import TransformerConfig
from models.initial import matrix, residual_matrix
from models.norms import RmsNorm
from models.rotary import rotate
from pipeline.errors import InputError

MASKED = -1e30


def choose_backend(
    requested: str, platform: str, *, position: int, head_size: int
) -> tuple[str, str]:
    """The back end to use and, for the log, why.

    Args:
        requested: "auto", "reference" or "splash".
        platform: of the devices that will run the program: "tpu", "cpu" or "gpu".
        position: tokens per row.
        head_size: width of one head.

    Raises:
        InputError: `requested` is unknown, or is "splash" where it cannot run.
    """
    if requested == "reference":
        return "reference", "reference attention: requested"
    if requested not in ("auto", "splash"):
        raise InputError(
            f"attention: expected auto, reference or splash, found {requested!r}; auto is safe"
        )
    obstacle = why_not(position, head_size)
    if platform != "tpu":
        obstacle = f"the kernel needs platform tpu and this is {platform}"
    if obstacle is None:
        return "splash", f"splash attention: {requested}, {position} positions on {platform}"
    if requested == "splash":
        raise InputError(
            f'attention: splash cannot run here, {obstacle}; use "auto" or "reference"'
        )
    return "reference", f"reference attention: auto, {obstacle}"


def attend(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    *,
    backend: str,
    soft_cap: float | None = None,
    segment_ids: NamedArray | None = None,
    sharding: AttentionSharding | None = None,
    interpret: bool = False,
) -> NamedArray:
    """Causal self-attention; axes and dtype of the result are those of `q`.

    Args:
        q: queries [batch, position, kv_heads, q_per_kv, head_size], not yet scaled.
        k: keys [batch, position, kv_heads, head_size].
        v: values, same axes.
        backend: "reference" or "splash".
        soft_cap: c in c * tanh(score / c), or None.
        segment_ids: int32 [batch, position]; attention stays inside equal ids.
        sharding: mesh axes for splash; the reference ignores it and is partitioned by the compiler.
        interpret: run splash in Pallas' interpreter.

    Raises:
        InputError: the back end is unknown or cannot run these shapes.
    """
    scale = q.resolve_axis(HEAD_SIZE).size ** -0.5
    if backend == "reference":
        return _reference(q * scale, k, v, soft_cap, segment_ids)
    if backend != "splash":
        raise InputError(
            f"attention: expected back end reference or splash, found {backend!r}; "
            "take the one that choose_backend returns"
        )
    obstacle = why_not(q.resolve_axis(POSITION).size, q.resolve_axis(HEAD_SIZE).size)
    if obstacle is not None:
        raise InputError(f'attention: splash cannot run, {obstacle}; use "reference"')
    heads_first = (BATCH, KV_HEADS, POSITION, HEAD_SIZE)
    queries = (q * scale).rearrange((BATCH, KV_HEADS, Q_PER_KV, POSITION, HEAD_SIZE))
    queries = queries.flatten_axes((KV_HEADS, Q_PER_KV), HEADS)
    out = splash(
        queries.array,
        k.rearrange(heads_first).array,
        v.rearrange(heads_first).array,
        None if segment_ids is None else segment_ids.rearrange((BATCH, POSITION)).array,
        soft_cap=soft_cap,
        sharding=sharding,
        interpret=interpret,
    )
    groups = (q.resolve_axis(KV_HEADS), q.resolve_axis(Q_PER_KV))
    return hax.named(out, queries.axes).unflatten_axis(HEADS, groups).rearrange(q.axes)


@functools.partial(jax.checkpoint, static_argnums=(3,))
def _reference(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    soft_cap: float | None,
    segment_ids: NamedArray | None,
) -> NamedArray:
    """Attention of scaled queries by plain matrix products.

    The scores are made again in the backward pass, as in splash: keeping them for every layer
    costs more time than that on a CPU, and batch * heads * position^2 numbers. Dividing by the
    softmax's sum comes after the product with the values, where there is less to divide.
    """
    keys = (BATCH, KV_HEADS, KEY_POSITION, HEAD_SIZE)
    k, v = (x.rename({POSITION: KEY_POSITION}).rearrange(keys) for x in (k, v))
    rows = (BATCH, KV_HEADS, Q_PER_KV, POSITION)
    scores = hax.dot(
        q.rearrange((*rows, HEAD_SIZE)),
        k,
        axis=HEAD_SIZE,
        out_axes=(*rows, KEY_POSITION),
        preferred_element_type=jnp.float32,
    )
    if soft_cap is not None:
        scores = soft_cap * hax.tanh(scores / soft_cap)
    visible = _visible(q.resolve_axis(POSITION), k.resolve_axis(KEY_POSITION), segment_ids)
    scores = hax.where(visible, scores, MASKED)
    # Any shift cancels, so the maximum needs no gradient.
    largest = hax.max(jax.lax.stop_gradient(scores), axis=KEY_POSITION)
    weights = hax.exp(scores - largest)
    out = hax.dot(weights.astype(v.dtype), v, axis=KEY_POSITION, preferred_element_type=jnp.float32)
    out = out / hax.sum(weights, axis=KEY_POSITION)
    return out.rearrange(q.axes).astype(q.dtype)


def _visible(Position: Axis, KeyPosition: Axis, segment_ids: NamedArray | None) -> NamedArray:
    """Which keys a position attends to: boolean [position, key_position], by row with segments."""
    keys = hax.arange(KeyPosition)
    causal = hax.arange(Position).broadcast_to((Position, KeyPosition)) >= keys
    if segment_ids is None:
        return causal
    of_keys = segment_ids.rename({POSITION: KEY_POSITION})
    both = (segment_ids.resolve_axis(BATCH), Position, KeyPosition)
    return causal & (segment_ids.broadcast_to(both) == of_keys)


class Attention(eqx.Module):
    """Projections, optional norms of queries and keys, rotation, attention, output projection.

    Attributes:
        query: [embed, kv_heads, q_per_kv, head_size].
        key: [embed, kv_heads, head_size].
        value: [embed, kv_heads, head_size].
        output: [kv_heads, q_per_kv, head_size, embed].
        query_norm: over head_size, shared by all heads (Dehghani et al., 2023, arXiv:2302.05442,
            as in Qwen3); None without qk_norm.
        key_norm: the same for keys.
        soft_cap: on the scores.
    """

    query: NamedArray
    key: NamedArray
    value: NamedArray
    output: NamedArray
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    soft_cap: float | None = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, axes: ModelAxes, *, key: jax.Array) -> Attention:
        """Float32 parameters."""
        keys = jax.random.split(key, 4)
        heads = (axes.KVHeads, axes.QPerKV, axes.HeadSize)
        kv = (axes.KVHeads, axes.HeadSize)

        def norm() -> RmsNorm | None:
            return RmsNorm.init(axes.HeadSize, config.norm_epsilon) if config.qk_norm else None

        return Attention(
            query=matrix(keys[0], (axes.Embed,), heads, config),
            key=matrix(keys[1], (axes.Embed,), kv, config),
            value=matrix(keys[2], (axes.Embed,), kv, config),
            output=residual_matrix(keys[3], heads, (axes.Embed,), config),
            query_norm=norm(),
            key_norm=norm(),
            soft_cap=config.attention_soft_cap,
        )

    def __call__(
        self,
        x: NamedArray,
        angles: NamedArray,
        *,
        segment_ids: NamedArray | None,
        backend: str,
        sharding: AttentionSharding | None,
        interpret: bool,
    ) -> NamedArray:
        """[batch, position, embed] to the same axes, in the parameters' dtype."""
        q, k, v = (hax.dot(x, w, axis=EMBED) for w in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        out = attend(
            hax.tree_checkpoint_name(rotate(q, angles), "queries"),
            hax.tree_checkpoint_name(rotate(k, angles), "keys"),
            hax.tree_checkpoint_name(v, "values"),
            backend=backend,
            soft_cap=self.soft_cap,
            segment_ids=segment_ids,
            sharding=sharding,
            interpret=interpret,
        )
        if backend == "reference":  # splash names its own output together with its log-sum-exp
            out = hax.tree_checkpoint_name(out, "attention_residuals")
        projected = hax.dot(out, self.output, axis=(KV_HEADS, Q_PER_KV, HEAD_SIZE))
        return hax.tree_checkpoint_name(projected, "attention_output")
