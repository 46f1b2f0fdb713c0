"""The lookup over devices against a plain one: rows, the table's gradient, and where it lies."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.layers.axes import MeshAxes
from models.layers.embedding import look_up
from tests.models import small

CASES = {
    "copied": ({"data": 8}, MeshAxes(("data",)), 16),
    "by_ids": ({"data": 2, "fsdp": 4}, MeshAxes(("data", "fsdp"), tables=("fsdp",)), 16),
    "by_embed": ({"data": 2, "fsdp": 4}, MeshAxes(("data", "fsdp"), tables=("fsdp",)), 17),
    "with_tensor": (
        {"fsdp": 2, "tensor": 2},
        MeshAxes(("fsdp",), heads=("tensor",), tables=("fsdp",)),
        16,
    ),
    "never_whole": (
        {"data": 2, "fsdp": 2, "sequence": 2},
        MeshAxes(("data", "fsdp"), (), ("sequence",), ("fsdp",), split_tables=True),
        16,
    ),
}


def inputs(vocab):
    """Table [vocab, 8], ids [8, 6] with repetitions, and weights of the found rows."""
    rng = np.random.default_rng(0)
    table, weights = rng.normal(size=(vocab, 8)), rng.normal(size=(8, 6, 8))
    ids = rng.integers(0, vocab, (8, 6), dtype=np.int32)
    return jnp.asarray(table, jnp.float32), ids, jnp.asarray(weights, jnp.float32)


def gradient(mesh_axes):
    """Compiled gradient of a weighted sum of the rows, and the rows."""

    def weighted(table, ids, weights):
        rows = look_up(table, ids, mesh_axes)
        return jnp.sum(rows * weights), rows

    return jax.jit(jax.grad(weighted, has_aux=True))


@pytest.mark.parametrize(("shape", "mesh_axes", "vocab"), CASES.values(), ids=CASES)
def test_rows_and_gradient_are_those_of_one_device(shape, mesh_axes, vocab):
    """However rows and table are divided; the oracle is NumPy's indexing and `add.at`."""
    table, ids, weights = inputs(vocab)
    want = np.zeros(table.shape, np.float32)
    np.add.at(want, ids, np.asarray(weights))
    with jax.set_mesh(small.mesh(**shape)):
        got, rows = gradient(mesh_axes)(table, ids, weights)
    np.testing.assert_array_equal(rows, np.asarray(table)[ids])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "mesh_axes", "vocab"), CASES.values(), ids=CASES)
def test_bfloat16_rows_of_one_id_add_up_in_float32(shape, mesh_axes, vocab):
    """A device reads an id more than 256 times, where a bfloat16 sum of ones stays as it is."""
    mesh_axes = dataclasses.replace(mesh_axes, wide_sums=True)  # as on CPUs
    table = jnp.zeros((vocab, 8), jnp.bfloat16)
    ids = np.zeros((8, 4096), np.int32)
    with jax.set_mesh(small.mesh(**shape)):
        got, _ = gradient(mesh_axes)(table, ids, jnp.ones((*ids.shape, 8), jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32)[0], 8 * 4096)
    assert not np.asarray(got, np.float32)[1:].any()


@pytest.mark.parametrize("name", ["by_ids", "by_embed", "never_whole"])
def test_no_gradient_of_a_table_is_all_reduced_whole(name):
    """A table's gradient is reduce-scattered over those that divide it; a split one is local."""
    shape, mesh_axes, vocab = CASES[name]
    mesh = small.mesh(**shape)
    rows = NamedSharding(mesh, PartitionSpec(mesh_axes.batch, mesh_axes.sequence or None))
    table, ids, weights = inputs(vocab)
    with jax.set_mesh(mesh):
        at_rest = NamedSharding(mesh, mesh_axes.table_split(*table.shape).spec)
        arrays = jax.device_put(table, at_rest), *jax.device_put((ids, weights), rows)
        text = gradient(mesh_axes).lower(*arrays).compile().as_text()
    whole = re.compile(rf"f32\[{vocab},8\]\S* all-reduce\(")
    assert not whole.search(text)
    assert " reduce-scatter(" in text


def test_a_group_looks_up_half_a_table_at_once():
    """No array has the rows of all the group's tokens, 16 times those of the table."""
    shape, mesh_axes, _ = CASES["never_whole"]
    table, ids = jnp.zeros((1024, 64)), np.zeros((8, 8192), np.int32)
    with jax.set_mesh(small.mesh(**shape)):
        text = gradient(mesh_axes).lower(table, ids, jnp.ones((*ids.shape, 64))).as_text()
    sizes = [
        np.prod([int(n) for n in dims.split("x")]) for dims in re.findall(r"<([\dx]+)x[fi]", text)
    ]
    own = 64 * ids.size // 8  # of a device, whose rows these are
    others = {size for size in sizes if size % 64 == 0} - {own, 8 * own, 1024 * 64}
    assert max(others) == 1024 * 64 // 2


def test_positions_that_no_number_of_parts_divides():
    """A prime number of them: the last part is filled up, and nothing of it returns."""
    shape, mesh_axes, vocab = CASES["never_whole"]
    rng = np.random.default_rng(1)
    table, weights = (
        jnp.asarray(rng.normal(size=(vocab, 8)), jnp.float32),
        rng.normal(size=(8, 26, 8)),
    )
    ids = rng.integers(0, vocab, (8, 26), dtype=np.int32)  # 13 on each of two devices
    want = np.zeros(table.shape, np.float32)
    np.add.at(want, ids, np.asarray(weights, np.float32))
    with jax.set_mesh(small.mesh(**shape)):
        got, rows = gradient(mesh_axes)(table, ids, jnp.asarray(weights, jnp.float32))
    np.testing.assert_array_equal(rows, np.asarray(table)[ids])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
