"""Causal grouped-query attention: one entry point, several back ends.

`reference` is plain Haliax and materializes all scores in float32. `blockwise` is plain JAX and
holds one block of scores at a time. `ponente` is our kernel for TPUs, `splash` JAX's, `cudnn` the
fused kernel for NVIDIA GPUs, `triton` the one for documents there. All compute
softmax(cap(q k^T)) v with scaled queries: a position attends to itself and to earlier positions of
its segment, with a window only to the last `window` of these. No back end falls back to another
silently.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax

import models.named as hax
from models.attention.backend_choice import BACKENDS, kernel_obstacle
from models.attention.blockwise import blockwise
from models.attention.cudnn import cudnn
from models.attention.ponente import ponente
from models.attention.reference import Mask, reference
from models.attention.splash import splash
from models.layers.axes import (
    BATCH,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    POSITION,
    Q_PER_KV,
    QUERY_FEATURES,
    MeshAxes,
)
from models.named import NamedArray
from pipeline.errors import InputError


@jax.named_scope("attention")  # identifies its operations in a profile
def attend(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: Mask,
    *,
    backend: str,
    mesh_axes: MeshAxes | None = None,
    interpret: bool = False,
) -> NamedArray:
    """Causal self-attention; the output has the axes of `q`, in any order, and the dtype of `q`.

    `q` [batch, position, kv_heads, q_per_kv, head_size] is scaled, `k` and `v` are [batch,
    position, kv_heads, head_size], in any order. The output and the log-sum-exp that a back end
    saves for its backward pass have the checkpoint name "attention_residuals". `mesh_axes` are for
    the kernels; the compiler partitions the other back ends. `interpret` runs ponente, splash and
    triton in the Pallas interpreter.
    """
    position, head_size = (q.resolve_axis(name).size for name in (POSITION, HEAD_SIZE))
    if mask.window is not None and mask.window < 1:
        raise InputError(
            f"attention: expected a window of at least 1 position, found {mask.window}"
        )
    if mask.window is not None and mask.window >= position:
        mask = dataclasses.replace(mask, window=None)
    if backend not in BACKENDS:
        raise InputError(
            f"attention: expected back end {', '.join(BACKENDS)}, found {backend!r}; "
            "take the one that choose_backend returns"
        )
    obstacle = kernel_obstacle(
        backend,
        position=position,
        head_size=head_size,
        soft_cap=mask.soft_cap,
        segments=mask.segment_ids is not None,
        window=mask.window,
        dtype=q.dtype.name,
        sequence_shards=1 if mesh_axes is None else mesh_axes.shards(mesh_axes.sequence),
    )
    if obstacle is not None:
        raise InputError(f'attention: {backend} cannot run, {obstacle}; use "blockwise"')
    if backend == "reference":
        return hax.tree_checkpoint_name(reference(q, k, v, mask), "attention_residuals")
    if backend == "splash":
        return _attend_splash(q, k, v, mask, mesh_axes, interpret)
    if backend == "ponente":
        return _attend_ponente(q, k, v, mask, mesh_axes, interpret)
    queries = q.rearrange((BATCH, POSITION, KV_HEADS, Q_PER_KV, HEAD_SIZE))
    keys, values = (x.rearrange((BATCH, POSITION, KV_HEADS, HEAD_SIZE)).array for x in (k, v))
    if backend == "blockwise":
        return hax.named(blockwise(queries.array, keys, values, mask), queries.axes)
    flat = queries.flatten_axes((KV_HEADS, Q_PER_KV), HEADS)
    if backend == "triton":
        from models.attention.triton import triton  # kernels that only a GPU's program imports

        assert mask.segment_ids is not None
        segment_ids = mask.segment_ids.rearrange((BATCH, POSITION)).array
        of_gpu = partial(triton, segment_ids_BP=segment_ids, interpret=interpret)
    else:
        of_gpu = partial(cudnn, window=mask.window)
    out = of_gpu(flat.array, keys, values, mesh_axes=mesh_axes)
    return hax.named(out, flat.axes).unflatten_axis(HEADS, queries.axes[2:4])


def _attend_splash(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: Mask,
    mesh_axes: MeshAxes | None,
    interpret: bool,
) -> NamedArray:
    heads_first = (BATCH, KV_HEADS, POSITION, HEAD_SIZE)
    queries = q.rearrange((BATCH, KV_HEADS, Q_PER_KV, POSITION, HEAD_SIZE))
    queries = queries.flatten_axes((KV_HEADS, Q_PER_KV), HEADS)
    keys, values = (x.rearrange(heads_first).array for x in (k, v))
    out = splash(queries.array, keys, values, mask, mesh_axes=mesh_axes, interpret=interpret)
    features = tuple(q.resolve_axis(name) for name in (KV_HEADS, Q_PER_KV, HEAD_SIZE))
    # The kernel merged the heads: [batch, heads * head_size, position].
    merged = hax.named(out, (q.resolve_axis(BATCH), QUERY_FEATURES, q.resolve_axis(POSITION)))
    return merged.unflatten_axis(QUERY_FEATURES, features)


def _attend_ponente(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: Mask,
    mesh_axes: MeshAxes | None,
    interpret: bool,
) -> NamedArray:
    queries = q.rearrange((BATCH, KV_HEADS, Q_PER_KV, HEAD_SIZE, POSITION))
    flat = queries.flatten_axes((KV_HEADS, Q_PER_KV), HEADS)
    keys, values = (x.rearrange((BATCH, KV_HEADS, HEAD_SIZE, POSITION)).array for x in (k, v))
    out = ponente(flat.array, keys, values, mask, mesh_axes=mesh_axes, interpret=interpret)
    return hax.named(out, flat.axes).unflatten_axis(HEADS, queries.axes[1:3])
