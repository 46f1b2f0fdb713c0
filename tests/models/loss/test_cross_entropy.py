"""The chunked cross-entropy against float64 NumPy and against automatic differentiation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.layers.axes import MeshAxes
from models.loss.cross_entropy import LossOptions, summed_losses, token_losses
from models.shape.footprint import chunk_count
from pipeline.errors import InputError
from tests.models import small

PLACEMENTS = {
    "data": ({"data": 8}, {"batch": ("data",)}),
    "data_and_tensor": ({"data": 4, "tensor": 2}, {"batch": ("data",), "heads": ("tensor",)}),
    "two_batch_axes": ({"data": 2, "fsdp": 4}, {"batch": ("data", "fsdp")}),
    "sequence": ({"data": 2, "sequence": 4}, {"batch": ("data",), "sequence": ("sequence",)}),
    "tables": ({"data": 2, "fsdp": 4}, {"batch": ("data", "fsdp"), "tables": ("fsdp",)}),
    "tables_by_embed": (
        {"fsdp": 2, "tensor": 2},
        {"batch": ("fsdp",), "heads": ("tensor",), "tables": ("fsdp",)},
    ),
    "split_tables": (
        {"data": 2, "fsdp": 4},
        {"batch": ("data", "fsdp"), "tables": ("fsdp",), "split_tables": True},
    ),
    "split_tables_and_sequence": (
        {"fsdp": 4, "sequence": 2},
        {
            "batch": ("fsdp",),
            "sequence": ("sequence",),
            "tables": ("fsdp",),
            "split_tables": True,
        },
    ),
    "sequence_alone": ({"sequence": 4}, {"batch": (), "sequence": ("sequence",)}),
}


def inputs(batch, position, vocab, embed=6, seed=0):
    """Hidden states, head, targets and weights, of which some are zero."""
    rng = np.random.default_rng(seed)
    weights = rng.choice([0.0, 0.5, 1.0, 3.0], (batch, position))
    return (
        jnp.asarray(rng.normal(size=(embed, batch, position)), jnp.float32),
        jnp.asarray(rng.normal(size=(vocab, embed)), jnp.float32),
        jnp.asarray(rng.integers(0, vocab, (batch, position)), jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


def numpy_losses(hidden, head, targets, cap):
    """Negative log-likelihood and log-sum-exp of each token, in float64, one token at a time."""
    hidden, head, targets = np.float64(hidden), np.float64(head), np.asarray(targets)
    nll, lse = np.zeros(targets.shape), np.zeros(targets.shape)
    for at in np.ndindex(targets.shape):
        scores = head @ hidden[(slice(None), *at)]
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        lse[at] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        nll[at] = lse[at] - scores[targets[at]]
    return nll, lse


def numpy_sums(hidden, head, targets, weights, z_loss, cap):
    nll, lse = numpy_losses(hidden, head, targets, cap)
    total = (np.float64(weights) * nll).sum()
    z = z_loss * (np.float64(weights) * lse**2).sum()
    return total + z, total, z


def plain(hidden, head, targets, weights, z_loss, cap):
    """The objective by full logits, for automatic differentiation."""
    logits = jnp.einsum("ebp,ve->bpv", hidden, head)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    at_target = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.sum(weights * (z_loss * lse**2 - at_target[..., 0]))


@functools.partial(jax.jit, static_argnums=4)
def ours(hidden, head, targets, weights, options):
    """The objective's gradients, the three sums, and the sums of the program without gradients."""

    def objective(hidden, head):
        sums = summed_losses(hidden, head, targets, weights, options)
        return sums[0], sums

    gradients, sums = jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, head)
    return gradients, sums, objective(hidden, head)[1]


def check(found, arrays, z_loss, cap, ids=None):
    """Sums are NumPy's, gradients those of the obvious formula, both without `ids` of padding."""
    (hidden_bar, head_bar), *both = found
    for sums in both:
        want = numpy_sums(*arrays, z_loss, cap)
        np.testing.assert_allclose(sums, want, rtol=1e-5, atol=1e-4)
    want = jax.grad(plain, argnums=(0, 1))(*arrays, z_loss, cap)
    for got, expected in zip((hidden_bar, head_bar[:ids]), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)
    assert ids is None or not np.asarray(head_bar[ids:]).any()


@pytest.mark.slow
@settings(max_examples=6)
@given(
    batch=st.sampled_from([1, 3]),
    position=st.sampled_from([1, 6]),
    vocab=st.sampled_from([1, 2, 37]),
    cap=st.sampled_from([None, 0.5, 20.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_sums_and_gradients_for_any_shape(batch, position, vocab, cap, z_loss, seed, data):
    """Sums are NumPy's and gradients those of the obvious formula, for every divisor of the row."""
    chunks = data.draw(st.sampled_from([c for c in range(1, position + 1) if position % c == 0]))
    arrays = inputs(batch, position, vocab, seed=seed)
    check(ours(*arrays, LossOptions(z_loss, cap, chunks)), arrays, z_loss, cap)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "placed"), PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize("chunks", [1, 2])
def test_devices_give_what_one_gives(axes, placed, chunks):
    """Sums and both gradients, with the rows or the positions spread over devices."""
    arrays = inputs(8, 8, 16, seed=2)
    with jax.set_mesh(small.mesh(**axes)):
        found = ours(*arrays, LossOptions(0.1, 2.0, chunks, MeshAxes(**placed)))
    assert small.relative(found, ours(*arrays, LossOptions(0.1, 2.0))) < 2e-6


IDS = 13
LOUD = 50.0
"""Padding that would have most of the probability."""


def padded(head: jax.Array, rows: int = 24) -> jax.Array:
    return jnp.concatenate([head, jnp.full((rows - len(head), head.shape[1]), LOUD)])


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "chunks"), [(None, 3), (1.5, 1)])
def test_padding_has_no_loss_and_no_gradient(cap, chunks):
    """In chunks of positions, with a z-loss and both with and without a soft cap."""
    arrays = inputs(3, 6, IDS)
    hidden, head, *rest = arrays
    options = LossOptions(0.1, cap, chunks, id_count=IDS)
    check(ours(hidden, padded(head), *rest, options), arrays, 0.1, cap, IDS)
    nll, best = token_losses(hidden, padded(head), rest[0], options)
    want, want_best = token_losses(hidden, head, rest[0], LossOptions(soft_cap=cap))
    np.testing.assert_allclose(nll, want, rtol=1e-5)
    np.testing.assert_array_equal(best, want_best)


SPREAD = {
    "by_the_compiler": (
        {"data": 2, "tensor": 4},
        {"batch": ("data",), "heads": ("tensor",)},
        "tensor",
    ),
    "by_the_compiler_alone": (
        {"data": 1, "tensor": 2},
        {"batch": ("data",), "heads": ("tensor",)},
        "tensor",
    ),
    "by_hand": (*PLACEMENTS["split_tables"], "fsdp"),
}


@pytest.mark.parametrize(("axes", "placed", "along"), SPREAD.values(), ids=SPREAD.keys())
@pytest.mark.slow
def test_a_padded_head_spread_over_devices(axes, placed, along):
    """Some devices hold padding alone: ids are counted over the whole axis."""
    mesh = small.mesh(**axes)
    arrays = inputs(8, 6, IDS)
    hidden, head, *rest = arrays
    by_vocab = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(along))
    with jax.set_mesh(mesh):
        spread = jax.device_put(padded(head), by_vocab)
        options = LossOptions(0.1, 2.0, 2, MeshAxes(**placed), IDS)
        found = ours(hidden, spread, *rest, options)
    check(found, arrays, 0.1, 2.0, IDS)


def test_the_head_gradient_is_added_over_devices_once():
    """One sum over devices for all chunks together, not one a chunk."""
    with jax.set_mesh(small.mesh(data=8)):
        options = LossOptions(chunks=4, mesh_axes=MeshAxes(("data",)))
        compiled = ours.lower(*inputs(8, 8, 16), options).compile()
    lines = [line for line in compiled.as_text().splitlines() if " all-reduce(" in line]
    assert sum("16,6]" in line for line in lines) == 1


@pytest.mark.slow
def test_only_the_objective_has_a_gradient():
    """Its parts are for reading: gradients through them are exactly zero."""
    hidden, head, targets, weights = inputs(2, 4, 7)

    def part(index):
        def of(hidden, head):
            return summed_losses(hidden, head, targets, weights, LossOptions(0.1, None, 2))[index]

        return jax.grad(of, argnums=(0, 1))(hidden, head)

    assert all(np.asarray(g).any() for g in part(0))
    assert not any(np.asarray(g).any() for index in (1, 2) for g in part(index))


@pytest.mark.slow
def test_huge_logits_do_not_overflow():
    """Logits of thousands give finite losses and gradients."""
    hidden, head = jnp.full((1, 1, 2), 100.0), jnp.asarray([[-50.0], [50.0], [49.0]])
    arrays = (hidden, head, jnp.asarray([[0, 1]], jnp.int32), jnp.ones((1, 2), jnp.float32))
    for chunks in (1, 2):
        gradients, sums, _ = ours(*arrays, LossOptions(chunks=chunks))
        np.testing.assert_allclose(sums, [10_000.0, 10_000.0, 0.0])
        assert all(np.isfinite(gradient).all() for gradient in gradients)
        nll, _ = token_losses(*arrays[:3], LossOptions(chunks=chunks))
        np.testing.assert_allclose(nll, [[10_000.0, 0.0]])


def test_low_precision_inputs_give_float32_sums():
    """bfloat16 in: float32 sums, gradients in bfloat16 near those of float32."""
    arrays = inputs(2, 6, 37, embed=16)
    want_gradients, want, _ = ours(*arrays, LossOptions(0.1, None, 3))
    narrow = (*(x.astype(jnp.bfloat16) for x in arrays[:2]), *arrays[2:])
    gradients, sums, _ = ours(*narrow, LossOptions(0.1, None, 3))
    assert {x.dtype.name for x in sums} == {"float32"}
    assert {x.dtype.name for x in gradients} == {"bfloat16"}
    assert small.relative(sums, want) < 0.01
    assert small.relative(gradients, want_gradients) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 1.5])
def test_token_losses_equal_numpy(cap):
    """One number a token, for every number of chunks."""
    hidden, head, targets, _ = inputs(2, 6, 11)
    want = numpy_losses(hidden, head, targets, cap)[0]
    for chunks in (1, 2, 6):
        got, best = token_losses(hidden, head, targets, LossOptions(0.0, cap, chunks))
        likely = np.argmax(np.einsum("ve,ebp->bpv", head, hidden), axis=-1)
        np.testing.assert_array_equal(best, likely == targets)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_chunks_that_do_not_divide_are_refused():
    """The message names the row and the number, whichever function is called."""
    hidden, head, targets, weights = inputs(1, 12, 5)
    for call in (
        lambda: summed_losses(hidden, head, targets, weights, LossOptions(chunks=5)),
        lambda: token_losses(hidden, head, targets, LossOptions(chunks=5)),
    ):
        with pytest.raises(InputError, match=r"divisor of the 12 positions .*, found 5"):
            call()


@given(
    batch=st.integers(1, 512),
    position=st.integers(1, 4096),
    vocab=st.integers(1, 200_000),
    shards=st.integers(1, 64),
    budget=st.integers(2**20, 2**32),
)
def test_auto_chunks_are_the_fewest_that_fit(batch, position, vocab, shards, budget):
    """The count divides the row, fits the budget if any divisor does, and none smaller fits."""
    chunks = chunk_count(batch, position, vocab, shards=shards, budget=budget)

    def fits(count):
        return batch * position * vocab * 4 <= budget * shards * count

    divisors = [c for c in range(1, position + 1) if position % c == 0]
    assert chunks == min(filter(fits, divisors), default=position)
