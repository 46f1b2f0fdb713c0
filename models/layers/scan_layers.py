"""A stack of equal blocks applied one after the other, as a scan over its "layers" axis.

Program size and compile time do not grow with depth. Layers that differ in a static property (the
attention window) are scanned by cycle: with windows S S S L the scan's body has four blocks. Layers
after the last whole cycle are applied one by one. Remat wraps each block separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

import models.named as hax
from models.layers.axes import LAYERS
from models.named import NamedArray
from models.shape.footprint import cycles_of
from models.shape.remat_names import saved_names


def checkpoint_policy(remat: str) -> Callable[..., Any] | None:
    """The `jax.checkpoint` policy of a setting; None where `jax.checkpoint` is not used."""
    policies = jax.checkpoint_policies
    if remat == "none":
        return None
    if remat == "full":
        return policies.nothing_saveable
    if remat == "dots":
        return policies.dots_with_no_batch_dims_saveable
    saved, offloaded = saved_names(remat)
    if not offloaded:
        return policies.save_only_these_names(*saved)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


Kind = TypeVar("Kind")
Out = TypeVar("Out")
Block = TypeVar("Block")


def apply_layers(
    stacked: Any,
    x: NamedArray,
    apply: Callable[[Any, NamedArray, Kind], NamedArray],
    kinds: Sequence[Kind],
    *,
    unroll: int = 1,
    owners: Sequence[bool] = (),
) -> NamedArray:
    """`x` after all layers, where `apply(block, x, kind)` applies one; axes and dtype unchanged.

    The named arrays of `stacked` have the axis "layers", and `kinds` are the layers' static
    properties. The compiled loop applies `unroll` cycles per iteration. An array with fewer layers
    belongs to those that are true in `owners`, which follows from `kinds`; others get None for it.
    """

    def alone(block: Any, x: NamedArray, kind: Kind) -> tuple[NamedArray, None]:
        return apply(block, x, kind), None

    return collect_layers(stacked, x, alone, kinds, unroll=unroll, owners=owners)[0]


def collect_layers(
    stacked: Any,
    x: NamedArray,
    apply: Callable[[Any, NamedArray, Kind], tuple[NamedArray, Out]],
    kinds: Sequence[Kind],
    *,
    unroll: int = 1,
    owners: Sequence[bool] = (),
) -> tuple[NamedArray, Out]:
    """As `apply_layers`, and what `apply` returns beside `x`, with a leading axis of layers."""
    period, count = cycles_of(kinds)
    scanned = period * count
    named, structure = jax.tree.flatten(stacked, is_leaf=_is_named)
    layers_first = [leaf.rearrange((LAYERS, ...)) for leaf in named]
    axes = [leaf.axes[1:] for leaf in layers_first]
    every = [True] * len(kinds)
    own = [every if len(leaf.array) == len(kinds) else owners for leaf in layers_first]

    def layers_of(leaf: NamedArray, own: Sequence[bool]) -> jax.Array:
        return leaf.array[: sum(own[:scanned])].reshape(count, -1, *leaf.array.shape[1:])

    cycles = [layers_of(leaf, of) for leaf, of in zip(layers_first, own, strict=True)]

    def apply_each(x: NamedArray, arrays: list[jax.Array], layers: range) -> tuple[NamedArray, Any]:
        """Apply these layers; `arrays` and outputs have a leading axis of them."""
        outs, first = [], layers.start
        for i in layers:
            leaves = [
                hax.named(array[sum(of[first:i])], names) if of[i] else None
                for array, names, of in zip(arrays, axes, own, strict=True)
            ]
            x, out = apply(jax.tree.unflatten(structure, leaves), x, kinds[i])
            outs.append(out)
        return x, jax.tree.map(lambda *parts: jnp.stack(parts), *outs)

    def one_cycle(x: NamedArray, arrays: list[jax.Array]) -> tuple[NamedArray, Any]:
        return apply_each(x, arrays, range(period))

    with jax.named_scope(LAYERS):  # identifies the loop over layers in a compiled program
        x, outs = jax.lax.scan(one_cycle, x, cycles, unroll=unroll)
    outs = jax.tree.map(lambda out: out.reshape(scanned, *out.shape[2:]), outs)
    if scanned == len(kinds):
        return x, outs
    rest = [leaf.array[sum(of[:scanned]) :] for leaf, of in zip(layers_first, own, strict=True)]
    x, others = apply_each(x, rest, range(scanned, len(kinds)))
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), outs, others)


def split_layers(stacked: Block) -> tuple[Block, ...]:
    """One block per layer, each with arrays of its own.

    A CPU copies a layer out of stacked arrays before it multiplies by it, which adds half to the
    time of the matmuls of one token.
    """
    named, structure = jax.tree.flatten(stacked, is_leaf=_is_named)
    layers = named[0].resolve_axis(LAYERS).size
    return tuple(
        jax.tree.unflatten(structure, [leaf[LAYERS, i] for leaf in named]) for i in range(layers)
    )


def _is_named(leaf: Any) -> bool:
    return isinstance(leaf, NamedArray)
