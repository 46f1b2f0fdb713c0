"""Attention kernels of our own for TPUs (Pallas): one forward, one backward.

All arrays are [head_size, position], as the projections write them. Scores of a block are [keys,
queries]: sums and maxima over keys are then vector operations, not permutations across lanes. A
grid step has one block of queries; all keys and values of its head are in vector memory, and a loop
inside visits only the chunks that the block sees. docs/attention.md has the arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.attention.reference import MASKED
from models.attention.tpu_scores import (
    MASK,
    PLAIN,
    Ids,
    Shape,
    dot,
    kinds_of,
    masked,
    same_id,
    scores_of,
    spread,
)
from models.shape.tpu_tiles import LANES, SAFE, Piece

VECTOR_MEMORY_LIMIT = 96 * 2**20
"""Bytes of vector memory that the compiler may use for a kernel, whatever its options say."""
MOST_KINDS = 2**17
"""Numbers in scalar memory, which has 1 MiB, that say what segments make of chunks."""


# Inside jit: JAX drops a call whose results are not used, but never a kernel.
@functools.partial(jax.jit, static_argnums=0)
def forward(
    shape: Shape, starts: Array, q: Array, k: Array, v: Array, ids: Ids
) -> tuple[Array, Array]:
    """The output, as `q`, and each query's log-sum-exp, float32 [batch, heads, 1, queries].

    `q` is scaled, [batch, heads, head_size, queries]; `k` and `v` are [batch, kv_heads, head_size,
    keys]. `starts` are the positions of the blocks' first queries, int32 [blocks].
    """
    block = shape.sight.block
    out, log_sum_exp = _call(
        shape,
        _forward_kernel,
        (len(q), shape.heads, shape.blocks),
        lambda row, head, block: (row, head, block),
        [("q", q), ("k", k), ("k", v)],
        [
            ("q", jax.ShapeDtypeStruct(q.shape, q.dtype)),
            ("row", jax.ShapeDtypeStruct((*q.shape[:2], 1, shape.queries), jnp.float32)),
        ],
        [
            pltpu.VMEM((shape.head_size, block), jnp.float32),
            pltpu.VMEM((1, block), jnp.float32),
            pltpu.VMEM((1, block), jnp.float32),
            pltpu.SMEM((1,), jnp.float32),
        ],
        starts,
        ids,
    )
    return out, log_sum_exp


def backward(
    shape: Shape,
    starts: Array,
    arrays: tuple[Array, Array, Array],
    ids: Ids,
    results: tuple[Array, Array],
    out_bar: Array,
) -> tuple[Array, Array, Array]:
    """Cotangents of `arrays`, the queries, keys and values; `results` are those of `forward`.

    The sums of a head's keys and values stay in vector memory over all queries that see them.
    """
    q, k, v = arrays
    out, log_sum_exp = results
    whole = pltpu.VMEM((shape.head_size, shape.keys), jnp.float32)
    q_bar, k_bar, v_bar = _call(
        shape,
        _backward_kernel,
        (len(q), shape.kv_heads, shape.group, shape.blocks),
        lambda row, kv_head, member, block: (row, kv_head * shape.group + member, block),
        [("q", q), ("k", k), ("k", v), ("q", out), ("q", out_bar), ("row", log_sum_exp)],
        [
            (kind, jax.ShapeDtypeStruct(x.shape, x.dtype))
            for kind, x in zip("qkk", arrays, strict=True)
        ],
        [pltpu.VMEM((shape.head_size, shape.sight.block), jnp.float32), whole, whole],
        starts,
        ids,
    )
    return q_bar, k_bar, v_bar


def _call(
    shape: Shape,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    where: Callable[..., tuple[Any, Any, Any]],
    inputs: list[tuple[str, Array]],
    outputs: list[tuple[str, Any]],
    scratch: list[Any],
    starts: Array,
    ids: Ids,
) -> Any:
    """Run a kernel on a grid whose indices `where` turns into (row, query head, block).

    A step sees of "q" a block of a query head, of "k" a whole key head, of "row" one value a query.
    """
    size, block, keys = shape.head_size, shape.sight.block, shape.keys
    once = {} if shape.buffers == 2 else {"pipeline_mode": pl.Buffered(1)}

    def at(kind: str, *indices: Any) -> tuple[Any, ...]:
        row, head, block = where(*indices[: len(grid)])
        return {
            "q": (row, head, 0, block),
            "row": (row, head, 0, block),
            "k": (row, lax.div(head, shape.group), 0, 0),
            "q_ids": (row, 0, block),
            "k_ids": (row, 0, 0),
        }[kind]

    specs = {
        "q": pl.BlockSpec((1, 1, size, block), functools.partial(at, "q")),
        "row": pl.BlockSpec((1, 1, 1, block), functools.partial(at, "row")),
        "k": pl.BlockSpec((1, 1, size, keys), functools.partial(at, "k"), **once),
        "q_ids": pl.BlockSpec((1, 1, block), functools.partial(at, "q_ids")),
        "k_ids": pl.BlockSpec((1, 1, keys), functools.partial(at, "k_ids")),
    }
    kinds = jnp.full(1, MASK, jnp.int32)
    if ids is not None:
        found = kinds_of(shape, *ids)
        kinds = found if found.size <= MOST_KINDS else kinds
        of_ids = [("q_ids", ids[0][:, None]), ("k_ids", ids[1][:, None])]
        inputs = [*inputs[:3], *of_ids, *inputs[3:]]
        scratch = [*scratch, pltpu.VMEM((keys, LANES), jnp.int32)]
    return pl.pallas_call(
        functools.partial(kernel, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[specs[kind] for kind, _ in inputs],
            out_specs=[specs[kind] for kind, _ in outputs],
            scratch_shapes=scratch,
        ),
        out_shape=[made for _, made in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(grid), vmem_limit_bytes=VECTOR_MEMORY_LIMIT
        ),
        interpret=shape.interpret,
        name=f"ponente{kernel.__name__}",
    )(starts, kinds, *(array for _, array in inputs))


def _forward_kernel(
    shape: Shape, starts: Any, kinds: Any, q: Any, k: Any, v: Any, *rest: Any
) -> None:
    (q_ids, k_ids), rest = (rest[:2], rest[2:]) if shape.segments else ((None, None), rest)
    out, log_sum_exp, acc, total, largest, norm, *wide = rest
    row, head, block = (pl.program_id(axis) for axis in range(3))

    # Once for a row its ids, once for a key head the largest norm.
    if shape.segments:
        pl.when((head == 0) & (block == 0))(lambda: spread(shape, k_ids, wide[0]))
    if not shape.shift:

        @pl.when((lax.rem(head, shape.group) == 0) & (block == 0))
        def _() -> None:
            norm[0] = _largest_norm(shape, k)

    acc[...] = jnp.zeros_like(acc)
    total[...] = jnp.zeros_like(total)
    largest[...] = jnp.full_like(largest, MASKED)
    queries = q[0, 0]

    def visit(shifted: bool, keys: Any, offset: Any, piece: Piece, by_segments: bool) -> None:
        at = slice(piece.first, piece.last)
        scores, _ = scores_of(shape, k[0, 0, :, keys], queries[:, at])
        same = same_id(q_ids, wide[0], keys, piece) if by_segments else None
        scores = masked(shape, scores, offset, piece, same)
        if shifted:
            before = largest[:, at]
            now = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
            largest[:, at] = now
            shrink = jnp.exp(before - now)
            total[:, at] *= shrink
            acc[:, at] *= shrink
            scores -= now
        weights = jnp.exp(scores)
        total[:, at] += jnp.sum(weights, axis=0, keepdims=True)
        acc[:, at] += dot(v[0, 0, :, keys], weights.astype(v.dtype), (1, 0))

    start, kind_of = starts[block], _kind_of(shape, kinds, row, block)
    if shape.shift:
        _sweep(shape, start, kind_of, functools.partial(visit, True))
    else:
        # By Cauchy and Schwarz no score is larger than the product of two norms.
        wide_q = queries.astype(jnp.float32)
        squared = norm[0] * jnp.max(jnp.sum(wide_q * wide_q, axis=0, keepdims=True))
        safe = (squared <= SAFE**2) | ((shape.soft_cap or math.inf) <= SAFE)

        @pl.when(safe)
        def _() -> None:
            _sweep(shape, start, kind_of, functools.partial(visit, False))
            largest[...] = jnp.zeros_like(largest)

        pl.when(jnp.logical_not(safe))(
            lambda: _slow_sweep(shape, start, functools.partial(visit, True))
        )
    out[0, 0] = (acc[...] / total[...]).astype(out.dtype)
    log_sum_exp[0, 0] = largest[...] + jnp.log(total[...])


def _backward_kernel(
    shape: Shape, starts: Any, kinds: Any, q: Any, k: Any, v: Any, *rest: Any
) -> None:
    (q_ids, k_ids), rest = (rest[:2], rest[2:]) if shape.segments else ((None, None), rest)
    out, out_bar, log_sum_exp, q_bar, k_bar, v_bar, q_acc, k_acc, v_acc, *wide = rest
    row, kv_head, member, block = (pl.program_id(axis) for axis in range(4))
    first_of_head = (member == 0) & (block == 0)
    if shape.segments:
        pl.when((kv_head == 0) & first_of_head)(lambda: spread(shape, k_ids, wide[0]))

    def clear(at: Any) -> None:
        zero = jnp.zeros((shape.head_size, shape.sight.chunk), jnp.float32)
        k_acc[:, at] = zero
        v_acc[:, at] = zero

    def write(at: Any) -> None:
        k_bar[0, 0, :, at] = k_acc[:, at].astype(k_bar.dtype)
        v_bar[0, 0, :, at] = v_acc[:, at].astype(v_bar.dtype)

    pl.when(first_of_head)(lambda: _every_chunk(shape, clear))
    q_acc[...] = jnp.zeros_like(q_acc)
    queries, bar = q[0, 0], out_bar[0, 0]
    # d/ds = p (d/dp - inner) for the softmax p of the scores s, with inner = sum_k p_k (d/dp)_k,
    # which equals <out, d/dout>.
    products = out[0, 0].astype(jnp.float32) * bar.astype(jnp.float32)
    inner = jnp.sum(products, axis=0, keepdims=True)
    normalizer = log_sum_exp[0, 0]

    def visit(keys: Any, offset: Any, piece: Piece, by_segments: bool) -> None:
        at = slice(piece.first, piece.last)
        some_k, some_q, some_bar = k[0, 0, :, keys], queries[:, at], bar[:, at]
        scores, slope = scores_of(shape, some_k, some_q)
        same = same_id(q_ids, wide[0], keys, piece) if by_segments else None
        scores = masked(shape, scores, offset, piece, same)
        weights = jnp.exp(scores - normalizer[:, at])
        weights_bar = dot(v[0, 0, :, keys], some_bar, (0, 0))
        v_acc[:, keys] += dot(some_bar, weights.astype(bar.dtype), (1, 1))
        scores_bar = weights * (weights_bar - inner[:, at])
        scores_bar = (scores_bar if slope is None else scores_bar * slope).astype(bar.dtype)
        k_acc[:, keys] += dot(some_q, scores_bar, (1, 1))
        q_acc[:, at] += dot(some_k, scores_bar, (1, 0))

    _sweep(shape, starts[block], _kind_of(shape, kinds, row, block), visit)
    q_bar[0, 0] = q_acc[...].astype(q_bar.dtype)
    last_of_head = (member == shape.group - 1) & (block == shape.blocks - 1)
    pl.when(last_of_head)(lambda: _every_chunk(shape, write))


Visit = Callable[[Any, Any, Piece, bool], None]
"""Compute with some keys, their offset from the block's first query (None: all are seen), some
queries, and whether segments hide scores."""


def _sweep(shape: Shape, start: Any, kind_of: Callable[[Any], Any], visit: Visit) -> None:
    """Visit all keys that a block of queries sees; `start` is the position of its first."""
    sight = shape.sight
    everything = Piece(0, sight.block, causal=False, windowed=False)

    def whole(index: Any, _: None) -> None:
        keys = pl.ds(pl.multiple_of(index * sight.chunk, LANES), sight.chunk)
        if not shape.segments:
            return visit(keys, None, everything, False)
        kind = kind_of(index)
        pl.when(kind == PLAIN)(lambda: visit(keys, None, everything, False))
        pl.when(kind == MASK)(lambda: visit(keys, None, everything, True))
        return None

    def partial(offsets: list[int]) -> None:
        for offset in offsets:
            keys = pl.ds(pl.multiple_of(start + offset, LANES), sight.chunk)
            for piece in sight.pieces(offset):
                visit(keys, offset, piece, shape.segments)

    # Chunks that every query sees, but for its segment.
    here = lax.div(start, sight.chunk)
    first = 0 if sight.whole is None else jnp.maximum(here - sight.whole, 0)
    if sight.whole != 0:
        lax.fori_loop(first, here, whole, None)

    # The block's own positions, and those at the window's edge: triangles, cut into pieces.
    for before, offsets in enumerate(sight.partial()):
        if offsets:
            pl.when(start >= before * sight.block)(functools.partial(partial, offsets))


def _slow_sweep(shape: Shape, start: Any, visit: Visit) -> None:
    """As `_sweep`, in one loop with every mask: few instructions for what is rare."""
    sight = shape.sight
    everything = Piece(0, sight.block, causal=True, windowed=sight.window is not None)

    def some(index: Any, _: None) -> None:
        first = pl.multiple_of(index * sight.chunk, LANES)
        visit(pl.ds(first, sight.chunk), first - start, everything, shape.segments)

    oldest = 0 if sight.window is None else jnp.maximum(start - sight.window + 1, 0)
    lax.fori_loop(
        lax.div(oldest, sight.chunk), lax.div(start + sight.block, sight.chunk), some, None
    )


def _every_chunk(shape: Shape, run: Callable[[Any], None]) -> None:
    def some(index: Any, _: None) -> None:
        run(pl.ds(pl.multiple_of(index * shape.sight.chunk, LANES), shape.sight.chunk))

    lax.fori_loop(0, shape.keys // shape.sight.chunk, some, None)


def _kind_of(shape: Shape, kinds: Any, row: Any, block: Any) -> Callable[[Any], Any]:
    if kinds.shape == (1,):  # too many rows and chunks for a table: all are masked
        return lambda _: kinds[0]
    first = (row * shape.blocks + block) * (shape.keys // shape.sight.chunk)
    return lambda chunk: kinds[first + chunk]


def _largest_norm(shape: Shape, k: Any) -> Array:
    """The largest sum of squares of a key."""
    chunk = shape.sight.chunk

    def some(index: Any, largest: Any) -> Any:
        keys = k[0, 0, :, pl.ds(pl.multiple_of(index * chunk, LANES), chunk)].astype(jnp.float32)
        return jnp.maximum(largest, jnp.max(jnp.sum(keys * keys, axis=0, keepdims=True)))

    return lax.fori_loop(0, shape.keys // chunk, some, jnp.float32(0))
