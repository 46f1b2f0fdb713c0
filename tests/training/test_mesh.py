"""Which array lies where, and what is refused."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pipeline.errors import InputError
from training.mesh import check_batch, make_layout


def test_mesh_has_the_axes_data_and_fsdp():
    """Eight devices with fsdp 4 are a mesh of 2 x 4 in process order."""
    layout = make_layout(list(reversed(jax.devices())), fsdp=4)
    assert dict(layout.mesh.shape) == {"data": 2, "fsdp": 4}
    assert [device.id for device in layout.mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize(("fsdp", "spec"), [(1, (None, None)), (4, (None, "fsdp"))])
def test_parameters_are_split_along_embed(fsdp, spec):
    """Parameters are split along embed when fsdp > 1 and replicated when it is 1."""
    layout = make_layout(jax.devices(), fsdp=fsdp)
    tree = {"w": hax.zeros((hax.Axis("mlp", 6), hax.Axis("embed", 8))), "step": jnp.int32(0)}
    shardings = layout.shardings(tree)
    assert shardings["w"].array.spec == PartitionSpec(*spec)
    assert shardings["step"].spec == PartitionSpec()


def test_embed_must_be_divisible_by_fsdp():
    """An embed that fsdp does not divide is refused, naming both."""
    layout = make_layout(jax.devices(), fsdp=8)
    with pytest.raises(InputError, match="embed 12 is not divisible by fsdp 8"):
        layout.shardings(hax.zeros(hax.Axis("embed", 12)))


def test_devices_must_be_divisible_by_fsdp():
    """An fsdp that does not divide the devices is refused, naming both."""
    with pytest.raises(InputError, match=r"8 devices .* fsdp 3"):
        make_layout(jax.devices(), fsdp=3)


def test_batch_must_spread_over_devices_and_microbatches():
    """A batch that leaves a device without an equal share is refused, naming both."""
    layout = make_layout(jax.devices(), fsdp=2)
    check_batch(layout, 16, 2)
    with pytest.raises(InputError, match=r"12 is not divisible by 8 devices .*multiple of 8"):
        check_batch(layout, 12, 1)
    with pytest.raises(InputError, match="multiple of 16"):
        check_batch(layout, 8, 2)


def test_place_splits_rows_in_order():
    """Every device holds its contiguous rows of the batch."""
    layout = make_layout(jax.devices()[:4], fsdp=2)
    rows = np.arange(24, dtype=np.int32).reshape(8, 3)
    placed = layout.place(rows, 8)
    np.testing.assert_array_equal(placed, rows)
    for shard in placed.addressable_shards:
        first = 2 * shard.device.id
        np.testing.assert_array_equal(shard.data, rows[first : first + 2])
