"""A stack of equal blocks applied one after the other, as a scan over its "layers" axis.

The program's size and its compile time do not grow with depth. Layers that differ in something
static (the attention window) are scanned by cycle: with windows S S S L the scan's body holds four
blocks. Layers after the last whole cycle are applied one by one. Each block is checkpointed on its
own, so what the backward pass keeps is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from models.axes import LAYERS

Kind = TypeVar("Kind")
Out = TypeVar("Out")
Block = TypeVar("Block")


def cycles_of(kinds: Sequence[Any]) -> tuple[int, int]:
    """Layers of one cycle, and number of cycles, that `kinds` begin with; the rest has no cycle.

    The choice with the fewest blocks in the program: those of one cycle and those of the rest.
    """
    count = len(kinds)

    def repeats(period: int) -> int:
        layers = next((i for i in range(count) if kinds[i] != kinds[i % period]), count)
        return layers // period

    choices = ((period, repeats(period)) for period in range(1, count + 1))
    return min(choices, key=lambda choice: (choice[0] + count - choice[0] * choice[1], choice[0]))


def apply_layers(
    stacked: Any,
    x: NamedArray,
    apply: Callable[[Any, NamedArray, Kind], NamedArray],
    kinds: Sequence[Kind],
    *,
    unroll: int = 1,
) -> NamedArray:
    """`x` after every layer, `apply(block, x, kind)` each.

    Args:
        stacked: a block whose named arrays all have the axis "layers".
        x: the carry; axes and dtype are those of the result.
        apply: one layer.
        kinds: what is static about each layer, one entry a layer.
        unroll: cycles of layers in one turn of the compiled loop.
    """

    def alone(block: Any, x: NamedArray, kind: Kind) -> tuple[NamedArray, None]:
        return apply(block, x, kind), None

    return collect_layers(stacked, x, alone, kinds, unroll=unroll)[0]


def collect_layers(
    stacked: Any,
    x: NamedArray,
    apply: Callable[[Any, NamedArray, Kind], tuple[NamedArray, Out]],
    kinds: Sequence[Kind],
    *,
    unroll: int = 1,
) -> tuple[NamedArray, Out]:
    """`x` after every layer as `apply_layers`, and what the layers put out besides.

    `apply` returns `x` and a tree of arrays; these come back with an axis for the layers in front.
    """
    period, count = cycles_of(kinds)
    scanned = period * count
    named, structure = jax.tree.flatten(stacked, is_leaf=_is_named)
    layers_first = [leaf.rearrange((LAYERS, ...)) for leaf in named]
    axes = [leaf.axes[1:] for leaf in layers_first]
    cycles = [
        leaf.array[:scanned].reshape(count, period, *leaf.array.shape[1:]) for leaf in layers_first
    ]

    def in_turn(
        x: NamedArray, arrays: list[jax.Array], kinds: Sequence[Kind]
    ) -> tuple[NamedArray, Any]:
        """`arrays` and outputs have an axis for the layers in front."""
        outs = []
        for i, kind in enumerate(kinds):
            leaves = [hax.named(array[i], axes[n]) for n, array in enumerate(arrays)]
            x, out = apply(jax.tree.unflatten(structure, leaves), x, kind)
            outs.append(out)
        return x, jax.tree.map(lambda *parts: jnp.stack(parts), *outs)

    def one_cycle(x: NamedArray, arrays: list[jax.Array]) -> tuple[NamedArray, Any]:
        return in_turn(x, arrays, kinds[:period])

    with jax.named_scope(LAYERS):  # by which a compiled program's loop over layers is known
        x, outs = jax.lax.scan(one_cycle, x, cycles, unroll=unroll)
    outs = jax.tree.map(lambda out: out.reshape(scanned, *out.shape[2:]), outs)
    if scanned == len(kinds):
        return x, outs
    rest = [leaf.array[scanned:] for leaf in layers_first]
    x, others = in_turn(x, rest, kinds[scanned:])
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), outs, others)


def split_layers(stacked: Block) -> tuple[Block, ...]:
    """One block a layer, each with arrays of its own.

    A loop that reads a layer out of stacked arrays copies it where the compiler cannot multiply by
    a part of an array, as on a CPU. That is nothing beside the matmuls of a whole row, and half as
    much again as the matmuls of one token.
    """
    named, structure = jax.tree.flatten(stacked, is_leaf=_is_named)
    layers = named[0].resolve_axis(LAYERS).size
    return tuple(
        jax.tree.unflatten(structure, [leaf[LAYERS, i] for leaf in named]) for i in range(layers)
    )


def _is_named(leaf: Any) -> bool:
    return isinstance(leaf, NamedArray)
