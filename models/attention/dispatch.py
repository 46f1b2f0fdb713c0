"""Causal grouped-query attention: one entry point, several back ends.

`reference` is plain Haliax and materializes all scores in float32. `blockwise` is plain JAX, runs
on any device and holds one block of scores at a time. `splash` is the Pallas kernel for TPUs,
`cudnn` the fused kernel for NVIDIA GPUs. All compute softmax(cap(q k^T)) v with scaled queries: a
position attends to itself and to earlier positions of its segment, with a window only to the last
`window` of these. `choose_backend` picks a back end once and returns the reason to log; no back end
falls back to another silently.
"""

from __future__ import annotations

import jax

import models.named as hax
from models.attention.backend_choice import (
    BACKENDS,
    KERNEL_OF,
    cudnn_unsupported_reason,
    splash_unsupported_reason,
)
from models.attention.blockwise import blockwise
from models.attention.cudnn import cudnn
from models.attention.reference import reference
from models.attention.splash import splash
from models.layers.axes import (
    BATCH,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    POSITION,
    Q_PER_KV,
    QUERY_FEATURES,
)
from models.mesh_axes import MeshAxes
from models.named import NamedArray
from pipeline.errors import InputError


def attend(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    *,
    backend: str,
    window: int | None = None,
    soft_cap: float | None = None,
    segment_ids: NamedArray | None = None,
    mesh_axes: MeshAxes | None = None,
    interpret: bool = False,
) -> NamedArray:
    """Causal self-attention; the output has the axes of `q`, in any order, and the dtype of `q`.

    The output and the log-sum-exp that a back end saves for its backward pass have the checkpoint
    name "attention_residuals".

    Args:
        q: queries [batch, position, kv_heads, q_per_kv, head_size] in any order, already scaled.
        k: keys [batch, position, kv_heads, head_size] in any order.
        v: values, same axes as the keys.
        backend: one of `BACKENDS`.
        window: positions each position attends to, itself included; None for all.
        soft_cap: c in c * tanh(score / c), or None.
        segment_ids: int32 [batch, position]; positions attend only to positions with equal ids.
        mesh_axes: mesh axes for the kernels; the compiler partitions the other back ends.
        interpret: run splash in the Pallas interpreter.

    Raises:
        InputError: the back end is unknown or cannot run these shapes, or `window` is below 1.
    """
    if window is not None and window < 1:
        raise InputError(f"attention: expected a window of at least 1 position, found {window}")
    if window is not None and window >= q.resolve_axis(POSITION).size:
        window = None
    if backend == "reference":
        out = reference(q, k, v, window, soft_cap, segment_ids)
        return hax.tree_checkpoint_name(out, "attention_residuals")
    if backend == "blockwise":
        return _attend_blockwise(q, k, v, window, soft_cap, segment_ids)
    if backend not in KERNEL_OF.values():
        raise InputError(
            f"attention: expected back end {', '.join(BACKENDS)}, found {backend!r}; "
            "take the one that choose_backend returns"
        )
    _check_kernel(backend, q, soft_cap, segment_ids, mesh_axes)
    if backend == "cudnn":
        return _attend_cudnn(q, k, v, window, mesh_axes)
    return _attend_splash(q, k, v, window, soft_cap, segment_ids, mesh_axes, interpret)


def _check_kernel(
    backend: str,
    q: NamedArray,
    soft_cap: float | None,
    segment_ids: NamedArray | None,
    mesh_axes: MeshAxes | None,
) -> None:
    position, head_size = (q.resolve_axis(name).size for name in (POSITION, HEAD_SIZE))
    shards = 1 if mesh_axes is None else mesh_axes.shards(mesh_axes.sequence)
    if backend == "splash":
        obstacle = splash_unsupported_reason(position, head_size, shards)
    else:
        obstacle = cudnn_unsupported_reason(
            head_size,
            soft_cap=soft_cap,
            segments=segment_ids is not None,
            dtype=q.dtype.name,
            sequence_shards=shards,
        )
    if obstacle is not None:
        raise InputError(f'attention: {backend} cannot run, {obstacle}; use "blockwise"')


def _attend_blockwise(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    window: int | None,
    soft_cap: float | None,
    segment_ids: NamedArray | None,
) -> NamedArray:
    rows = (BATCH, POSITION, KV_HEADS)
    queries = q.rearrange((*rows, Q_PER_KV, HEAD_SIZE))
    out = blockwise(
        queries.array,
        k.rearrange((*rows, HEAD_SIZE)).array,
        v.rearrange((*rows, HEAD_SIZE)).array,
        window=window,
        soft_cap=soft_cap,
        segment_ids=_segment_array(segment_ids),
    )
    return hax.named(out, queries.axes)


def _attend_cudnn(
    q: NamedArray, k: NamedArray, v: NamedArray, window: int | None, mesh_axes: MeshAxes | None
) -> NamedArray:
    rows = (BATCH, POSITION, KV_HEADS)
    queries = q.rearrange((*rows, Q_PER_KV, HEAD_SIZE)).flatten_axes((KV_HEADS, Q_PER_KV), HEADS)
    keys, values = (x.rearrange((*rows, HEAD_SIZE)).array for x in (k, v))
    out = cudnn(queries.array, keys, values, window=window, mesh_axes=mesh_axes)
    heads = tuple(q.resolve_axis(name) for name in (KV_HEADS, Q_PER_KV))
    return hax.named(out, queries.axes).unflatten_axis(HEADS, heads)


def _attend_splash(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    window: int | None,
    soft_cap: float | None,
    segment_ids: NamedArray | None,
    mesh_axes: MeshAxes | None,
    interpret: bool,
) -> NamedArray:
    heads_first = (BATCH, KV_HEADS, POSITION, HEAD_SIZE)
    queries = q.rearrange((BATCH, KV_HEADS, Q_PER_KV, POSITION, HEAD_SIZE))
    queries = queries.flatten_axes((KV_HEADS, Q_PER_KV), HEADS)
    out = splash(
        queries.array,
        k.rearrange(heads_first).array,
        v.rearrange(heads_first).array,
        _segment_array(segment_ids),
        window=window,
        soft_cap=soft_cap,
        mesh_axes=mesh_axes,
        interpret=interpret,
    )
    features = tuple(q.resolve_axis(name) for name in (KV_HEADS, Q_PER_KV, HEAD_SIZE))
    # The kernel merged the heads: [batch, heads * head_size, position].
    merged = hax.named(out, (q.resolve_axis(BATCH), QUERY_FEATURES, q.resolve_axis(POSITION)))
    return merged.unflatten_axis(QUERY_FEATURES, features)


def _segment_array(segment_ids: NamedArray | None) -> jax.Array | None:
    return None if segment_ids is None else segment_ids.rearrange((BATCH, POSITION)).array
