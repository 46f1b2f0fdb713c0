"""How devices share a row: what is exchanged, and that causal work is equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from models.attention.context_parallel import Exchange, zigzag_order
from models.shape.splash_tiles import choose_way
from tests.models import small


@given(st.integers(1, 9), st.integers(1, 4))
def test_every_device_sees_as_many_pairs(shards, chunk):
    """Zigzag is a permutation in which each device's queries see equally many keys."""
    order = zigzag_order(2 * shards * chunk, shards)
    assert sorted(order) == list(range(len(order)))
    pairs = (order + 1).reshape(shards, -1).sum(axis=1)
    assert len(set(pairs)) == 1


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_the_exchange_gives_that_order_and_takes_it_back(shards):
    """Two permutations among the devices move all chunks, also for an odd number of devices."""
    position = 4 * shards
    exchange = Exchange(("sequence",), shards)
    rows = PartitionSpec(None, "sequence")

    def over(function):
        return jax.jit(
            functools.partial(jax.shard_map, in_specs=(rows,), out_specs=rows, check_vma=False)(
                function
            )
        )

    with jax.set_mesh(small.mesh(sequence=shards)):
        numbers = jnp.arange(position)[None]
        turned = over(lambda x: exchange.to_zigzag(x, 1))(numbers)
        back = over(lambda x: exchange.from_zigzag(x, 1))(turned)
    np.testing.assert_array_equal(turned[0], zigzag_order(position, shards))
    np.testing.assert_array_equal(back, numbers)


def test_the_way_follows_heads_and_window():
    """Heads where they divide; two chunks a device where causal work would be unequal."""
    assert choose_way(8, True, None, 4) == "heads"
    assert choose_way(2, True, None, 4) == "zigzag"
    assert choose_way(2, True, 512, 4) == "gathered"
    assert choose_way(2, False, None, 4) == "gathered"
