"""Chunks of an array and who writes them, against numpy and counting."""

import math
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from training.checkpoint.chunk_grid import (
    ChunkGrid,
    chunk_shape,
    common,
    shape_of,
    within,
)
from training.checkpoint.device_to_host import assigned

SIZES = st.lists(st.integers(1, 12), max_size=3).map(tuple)


@st.composite
def boxed(draw):
    """A shape, a chunk shape that divides it, and a box inside it."""
    counts = draw(st.lists(st.integers(1, 4), max_size=3))
    chunk = tuple(draw(st.integers(1, 3)) for _ in counts)
    shape = tuple(n * c for n, c in zip(counts, chunk, strict=True))
    box = []
    for size in shape:
        begin = draw(st.integers(0, size - 1))
        box.append((begin, draw(st.integers(begin + 1, size))))
    return ChunkGrid(shape, chunk), tuple(box)


@given(boxed())
def test_a_box_is_put_together_from_the_chunks_that_overlap_it(given_):
    """Every value of the box comes from exactly one of them, and no other chunk has one."""
    grid, box = given_
    array = np.arange(math.prod(grid.shape)).reshape(grid.shape)
    every = {
        index: array[tuple(slice(*ends) for ends in grid.box(index))] for index in grid.every()
    }
    assert sorted(v for part in every.values() for v in part.flat) == list(array.flat)
    assert [grid.number(index) for index in every] == list(range(math.prod(grid.count)))
    found = np.full(shape_of(box), -1)
    for index in grid.overlapping(box):
        shared = common(grid.box(index), box)
        assert (found[within(shared, box)] == -1).all()
        assert found[within(shared, box)].size
        found[within(shared, box)] = every[index][within(shared, grid.box(index))]
    assert np.array_equal(found, array[tuple(slice(*ends) for ends in box)])


@given(SIZES, st.sampled_from([1, 2, 4]), st.integers(1, 400))
def test_chunks_divide_a_shard_and_are_no_crumbs(shard, itemsize, most):
    """Whole chunks; below the limit or impossible to cut without crumbs."""
    chunk = chunk_shape(shard, itemsize, most)
    assert len(chunk) == len(shard)
    assert all(size % part == 0 for size, part in zip(shard, chunk, strict=True))
    pieces = math.prod(shard) // math.prod(chunk)
    needed = -(-math.prod(shard) * itemsize // most)
    assert pieces <= max(1, 4 * needed) ** max(1, len(shard))
    if math.prod(shard) * itemsize <= most:
        assert chunk == shard


@pytest.mark.parametrize(
    ("shard", "chunk"),
    [
        ((12, 3072, 768), (3, 3072, 768)),  # layers first
        ((50257, 768), (50257, 128)),  # a prime number of rows stays whole
        ((32768, 768), (8192, 768)),
        ((), ()),
        ((0, 5), (1, 5)),
    ],
)
def test_chunks_of_real_shapes(shard, chunk):
    """Float32 in pieces of at most 32 MiB."""
    assert chunk_shape(shard, 4, 32 << 20) == chunk


SPECS = [(), ("a",), (None, "a"), ("b",), ("a", "b"), (("a", "b"),), ("b", "a")]


@given(st.lists(st.sampled_from(SPECS), min_size=1, max_size=12))
def test_every_shard_has_one_writer_that_holds_it(specs):
    """Each distinct shard once, by a device that has it, and none does much more than its part."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    arrays = tuple(
        (f"x{i}", (16, 16), 4, NamedSharding(mesh, PartitionSpec(*spec)))
        for i, spec in enumerate(specs)
    )
    writers, load, shards = assigned(arrays), Counter(), 0
    for name, shape, _, sharding in arrays:
        boxes = {}
        for device, index in sharding.devices_indices_map(shape).items():
            box = tuple(part.indices(16)[:2] for part in index)
            boxes.setdefault(box, []).append(device.id)
        shards += len(boxes)
        assert sum(math.prod(shape_of(box)) for box in boxes) == 256
        for box, holders in boxes.items():
            assert writers[name, box] in holders
            load[writers[name, box]] += math.prod(shape_of(box))
    assert len(writers) == shards
    assert max(load.values()) <= 256 * -(-len(specs) // 8) + 256
    assert assigned(tuple(reversed(arrays))) == writers
