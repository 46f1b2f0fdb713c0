"""Newton-Schulz iterations of a model's matrices, shared by the devices that split them.

Matrices of one shape are one stack. An all-to-all gives each device an equal number of whole ones,
the last of them zeros where the number is not divisible, and another takes the results back. The
order of rows and columns is free: the iteration commutes with permutations of them. Devices that
hold the same parts (of copies of the state, and of a sequence) repeat the work.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

import models.named as hax
from models.jax_numerics import exact_products
from models.layers.axes import EMBED, LAYERS
from training.sharding.layout import Layout, is_named

JORDAN = (3.4445, -4.7750, 2.0315)

# By the paper's algorithm, for singular values of 0.001 to 1, with a cushion of 0.02 and, against
# rounding, x / 1.02 in all polynomials but the last. nanochat has these too.
POLAR_EXPRESS = (
    (8.156554525, -22.483292926, 15.878769915),
    (4.042929935, -2.808917466, 0.500017845),
    (3.891667802, -2.772484153, 0.506064818),
    (3.285753658, -2.368129493, 0.464490242),
    (2.346541326, -1.709782838, 0.423235512),
)


def newton_schulz(x: jax.Array, steps: int, iteration: str = "newton_schulz") -> jax.Array:
    """A matrix with singular values near 1: https://kellerjordan.github.io/posts/muon.

    "polar_express" brings them as near as so many iterations can: arXiv:2505.16932.
    """
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.mT, steps, iteration).mT
    polar = iteration == "polar_express"
    # Coefficients and sums of products are float32: bfloat16 would round 3.4445 to 3.4375.
    coefficients = jnp.array(POLAR_EXPRESS[:steps] if polar else JORDAN, jnp.float32)
    same = None if polar else tuple(coefficients)
    multiply = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    norm = jnp.linalg.norm(x.astype(jnp.float32))
    x = (x / ((1.01 * norm if polar else norm) + 1e-7)).astype(x.dtype)

    def iterate(i: int, x: jax.Array) -> jax.Array:
        a, b, c = same or coefficients[i]
        gram = multiply(x, x.mT).astype(x.dtype)
        factor = (b * gram + c * multiply(gram, gram)).astype(x.dtype)
        return (a * x + multiply(factor, x)).astype(x.dtype)

    return jax.lax.fori_loop(0, steps, iterate, x)


Iteration = Callable[[jax.Array], jax.Array]


def orthogonalize(tree: Any, one: Iteration, dtype: DTypeLike, layout: Layout | None = None) -> Any:
    """`one` in `dtype` of each float32 matrix, sharded as moments; no layout is one device."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_named)
    turned = [leaf.rearrange((LAYERS, EMBED, ...)) for leaf in leaves]
    specs = [PartitionSpec()] * len(turned)
    if layout:
        specs = [x.array.spec for x in layout.shardings(turned, layout.rules.optimizer_state)]
    # (columns, mesh axes that divide rows, those that divide columns) -> places in `turned`
    stacks: dict[tuple[int, tuple[str, ...], tuple[str, ...]], list[int]] = defaultdict(list)
    for i, (x, spec) in enumerate(zip(turned, specs, strict=True)):
        stacks[math.prod(x.array.shape[2:]), _axes(spec[1:2]), _axes(spec[2:])].append(i)

    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        """On one device: its parts of the arrays [layer, row, column...]."""
        found = list(arrays)
        for (_, *split), members in stacks.items():
            own = [arrays[i] for i in members]
            parts = [x.reshape(*x.shape[:2], -1).astype(dtype) for x in own]
            results = _share(jnp.concatenate(parts), one, split)
            ends = np.cumsum([len(part) for part in parts])[:-1]
            for i, part in zip(members, jnp.split(results, ends), strict=True):
                found[i] = part.reshape(arrays[i].shape)
        return found

    if layout and layout.devices > 1:
        mesh = layout.mesh.abstract_mesh
        run = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    with exact_products(dtype):
        found = run([x.array for x in turned])
    named = [hax.named(y.astype(jnp.float32), x.axes) for y, x in zip(found, turned, strict=True)]
    return structure.unflatten([y.rearrange(x.axes) for y, x in zip(named, leaves, strict=True)])


def _axes(entries: Any) -> tuple[str, ...]:
    """All mesh axes of entries of a partition spec."""
    return sum(((each,) if isinstance(each, str) else each or () for each in entries), ())


def _share(x: jax.Array, one: Iteration, split: list[tuple[str, ...]]) -> jax.Array:
    """Parts [matrix, m, n] that `split` makes of rows and columns -> those of `one` of a whole."""
    moves = [(axes, side) for side, axes in enumerate(split, 1) if axes]
    padding = -len(x) % jax.lax.axis_size(sum(split, ()))
    # A CPU's compiler would send the arrays that were joined, and refuses their different layouts.
    whole = jax.lax.optimization_barrier(jnp.pad(x, ((0, padding), (0, 0), (0, 0))))
    for axes, side in moves:
        whole = jax.lax.all_to_all(whole, axes, 0, side, tiled=True)
    # One by one: their float32 products take memory.
    whole = jax.lax.map(one, whole)
    for axes, side in reversed(moves):
        whole = jax.lax.all_to_all(whole, axes, side, 0, tiled=True)
    return whole[: len(x)]
