"""Which array lies where, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import models.named as hax
from pipeline.errors import InputError
from training.config import Parallelism, TrainConfig
from training.cost.memory_plan import check_batch
from training.sharding.layout import make_layout


def test_mesh_has_four_axes():
    """Eight devices in groups of 2, split once for sequence and tensor, lie in process order."""
    parallel = Parallelism(sharding="fsdp", group=1, sequence=2, tensor=2)
    layout = make_layout(list(reversed(jax.devices())), parallel)
    assert dict(layout.mesh.shape) == {"data": 2, "fsdp": 1, "sequence": 2, "tensor": 2}
    assert [device.id for device in layout.mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize(
    ("parallel", "spec"),
    [
        (Parallelism(sharding="replicated"), (None, None)),
        (Parallelism(sharding="zero1", group=4), (None, "fsdp")),
        (Parallelism(sharding="fsdp"), (None, "fsdp")),
        (Parallelism(sharding="fsdp", tensor=2), ("tensor", "fsdp")),
    ],
)
def test_parameters_are_split_along_embed(parallel, spec):
    """A split state is split along embed, and what tensor splits along its own axes."""
    layout = make_layout(jax.devices(), parallel)
    tree = {"w": hax.zeros((hax.Axis("mlp", 6), hax.Axis("embed", 8))), "step": jnp.int32(0)}
    shardings = layout.shardings(tree)
    assert shardings["w"].array.spec == PartitionSpec(*spec)
    assert shardings["step"].spec == PartitionSpec()


def test_embed_must_be_divisible_by_the_group():
    """An embed that the group does not divide is refused, naming both."""
    layout = make_layout(jax.devices(), Parallelism(sharding="fsdp"))
    with pytest.raises(InputError, match="embed 12 is not divisible by the 8 devices"):
        layout.shardings(hax.zeros((hax.Axis("mlp", 4), hax.Axis("embed", 12))))


def test_vectors_are_not_split():
    """Norm weights and biases are whole on every device, also stacked by layer."""
    layout = make_layout(jax.devices(), Parallelism(sharding="fsdp"))
    layers, embed, mlp = (hax.Axis(name, 16) for name in ("layers", "embed", "mlp"))
    found = layout.shardings(
        [hax.zeros(embed), hax.zeros((layers, embed)), hax.zeros((embed, mlp))]
    )
    assert [each.array.is_fully_replicated for each in found] == [True, True, False]


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (Parallelism(sharding="fsdp", group=3), "8 devices .* group of 3"),
        (Parallelism(sharding="replicated", tensor=3), "8 devices .* tensor 3"),
    ],
)
def test_devices_must_be_divisible(parallel, words):
    """Sizes that do not divide the devices are refused, naming both."""
    with pytest.raises(InputError, match=words):
        make_layout(jax.devices(), parallel)


def test_batch_must_spread_over_devices_and_microbatches():
    """A batch that leaves a device without an equal share is refused, naming both."""
    split = Parallelism(sharding="fsdp", group=2)

    def check(batch_size, microbatches):
        train = TrainConfig(batch_size=batch_size, microbatches=microbatches)
        check_batch(train, split, 8)

    check(16, 2)
    with pytest.raises(InputError, match=r"12 .* is not divisible by 8 devices .*multiple of 8"):
        check(12, 1)
    with pytest.raises(InputError, match="multiple of 16"):
        check(8, 2)


def test_place_splits_rows_in_order():
    """Every device holds its contiguous rows of the batch."""
    layout = make_layout(jax.devices()[:4], Parallelism(sharding="fsdp", group=2))
    rows = np.arange(24, dtype=np.int32).reshape(8, 3)
    placed = layout.place(rows, 8)
    np.testing.assert_array_equal(placed, rows)
    for shard in placed.addressable_shards:
        first = 2 * shard.device.id
        np.testing.assert_array_equal(shard.data, rows[first : first + 2])
