"""Causal grouped-query attention: one entry point, several back ends.

`reference` is plain Haliax and materializes all scores in float32. `blockwise` is plain JAX and
holds one block of scores at a time. `ponente` is our kernel for TPUs, `splash` JAX's, `cudnn` the
fused kernel for NVIDIA GPUs, `triton` the one for documents there. All compute
softmax(cap(q k^T)) v with scaled queries, and none falls back to another silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
from jax import Array
from jax.sharding import PartitionSpec

import models.named as hax
from models.attention.backend_choice import BACKENDS, kernel_obstacle
from models.attention.blockwise import blockwise
from models.attention.cudnn import cudnn
from models.attention.ponente import ponente
from models.attention.reference import RESIDUALS, Mask, reference
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

AXES = {
    "ponente": (BATCH, KV_HEADS, HEAD_SIZE, POSITION),
    "splash": (BATCH, KV_HEADS, POSITION, HEAD_SIZE),
}
"""Order of the axes of keys and values that a back end reads, where positions do not come first."""


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
        return hax.tree_checkpoint_name(reference(q, k, v, mask), RESIDUALS)
    axes = AXES.get(backend, (BATCH, POSITION, KV_HEADS, HEAD_SIZE))
    after = axes.index(KV_HEADS) + 1
    queries = q.rearrange((*axes[:after], Q_PER_KV, *axes[after:]))
    if backend != "blockwise":
        queries = queries.flatten_axes((KV_HEADS, Q_PER_KV), HEADS)
    keys, values = (x.rearrange(axes).array for x in (k, v))
    arrays = queries.array, keys, values
    if backend == "blockwise":
        return hax.named(blockwise(*arrays, mask), queries.axes)
    if backend == "cudnn":
        out = _on_devices(partial(cudnn, mask.window), mesh_axes, *arrays)
    elif backend == "triton":
        from models.attention.triton import triton  # kernels that only a GPU's program imports

        out = _on_devices(partial(triton, interpret), mesh_axes, *arrays, mask.ids_BP)
    elif backend == "ponente":
        out = ponente(*arrays, mask, mesh_axes=mesh_axes, interpret=interpret)
    else:
        out = splash(*arrays, mask, mesh_axes=mesh_axes, interpret=interpret)
        # The kernel merged the heads: [batch, heads * head_size, position].
        features = tuple(q.resolve_axis(name) for name in (KV_HEADS, Q_PER_KV, HEAD_SIZE))
        merged = (q.resolve_axis(BATCH), QUERY_FEATURES, q.resolve_axis(POSITION))
        return hax.named(out, merged).unflatten_axis(QUERY_FEATURES, features)
    heads = tuple(q.resolve_axis(name) for name in (KV_HEADS, Q_PER_KV))
    return hax.named(out, queries.axes).unflatten_axis(HEADS, heads)


def _on_devices(
    run: Callable[..., Array], mesh_axes: MeshAxes | None, *arrays: Array | None
) -> Array:
    """`run` with the rows and heads of each device: [batch, position, heads, head_size], or ids."""
    if mesh_axes is None:
        return run(*arrays)
    rows, heads = mesh_axes.batch or None, mesh_axes.heads or None
    by_head = PartitionSpec(rows, None, heads)
    specs = (by_head, by_head, by_head, PartitionSpec(rows))[: len(arrays)]
    return jax.shard_map(run, in_specs=specs, out_specs=by_head, check_vma=False)(*arrays)
