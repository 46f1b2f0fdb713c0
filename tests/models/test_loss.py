"""The loss against NumPy and against plain automatic differentiation."""

from __future__ import annotations

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from models.attention_splash import AttentionSharding
from models.cross_entropy import chunk_count, token_losses
from models.loss import next_token_loss, nll_per_token
from models.precision import cast
from pipeline.errors import InputError
from tests.models import reference, small

SHAPES = {
    "tied": {},
    "untied": {"tied": False},
    "soft_cap": {"logit_soft_cap": 1.5},
}


def plain_loss(model, tokens, weight, z_loss):
    """Sum of nll and z-loss the obvious way: full logits, automatic differentiation."""
    logits = model.logits(tokens).array[:, :-1]
    lse = jax.nn.logsumexp(logits, axis=-1)
    at_target = jnp.take_along_axis(logits, tokens.array[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum((lse - at_target + z_loss * lse**2) * weight[:, :-1])


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_loss_equals_the_oracle(changes):
    """Total, z and count are NumPy's sums over all positions but the last."""
    model, rows = small.model(**changes), small.tokens()
    loss = small.run(lambda m: next_token_loss(m, small.named(rows), z_loss=0.01), model)
    nll, lse = reference.nll(model, rows)
    np.testing.assert_allclose(loss.total, nll.sum(), rtol=1e-5)
    np.testing.assert_allclose(loss.z, 0.01 * (lse**2).sum(), rtol=1e-5)
    assert loss.count == nll.size
    assert {part.dtype.name for part in (loss.total, loss.z, loss.count)} == {"float32"}


def test_nll_per_token_equals_the_oracle():
    """Position i holds the nll of token i + 1; the last position is zero."""
    model, rows = small.model(), small.tokens()
    got = small.run(lambda m: nll_per_token(m, small.named(rows), chunks=3), model)
    assert [axis.name for axis in got.axes] == ["batch", "position"]
    np.testing.assert_allclose(got.array[:, :-1], reference.nll(model, rows)[0], atol=1e-4)
    np.testing.assert_array_equal(got.array[:, -1], 0.0)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_chunked_loss_equals_the_plain_one(changes):
    """Value and every gradient agree with full logits, with a mask and a z-loss."""
    model, rows = small.model(layers=1, **changes), small.named(small.tokens())
    weight = np.random.default_rng(1).integers(0, 2, (2, 12)).astype(np.float32)
    mask = small.named(weight.astype(bool))

    def ours(model, chunks):
        loss = next_token_loss(model, rows, loss_mask=mask, z_loss=0.1, chunks=chunks)
        return loss.total + loss.z

    def plain(model):
        return plain_loss(model, rows, jnp.asarray(weight), 0.1)

    want = small.run(eqx.filter_value_and_grad(plain), model)
    for chunks in (1, 3):
        objective = functools.partial(ours, chunks=chunks)
        assert small.relative(small.run(eqx.filter_value_and_grad(objective), model), want) < 2e-5


@settings(deadline=None, max_examples=12)
@given(
    batch=st.sampled_from([1, 3]),
    position=st.sampled_from([1, 6]),
    vocab=st.sampled_from([2, 37]),
    cap=st.sampled_from([None, 0.5, 20.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_token_losses_for_any_shape(batch, position, vocab, cap, seed, data):
    """Values and both cotangents agree with the obvious formula for every divisor of the row."""
    chunks = data.draw(st.sampled_from([c for c in range(1, position + 1) if position % c == 0]))
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(batch, position, 5)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(vocab, 5)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocab, (batch, position)), jnp.int32)
    bars = [jnp.asarray(rng.normal(size=(batch, position)), jnp.float32) for _ in range(2)]

    def obvious(hidden, head):
        logits = jnp.einsum("bpe,ve->bpv", hidden, head)
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        lse = jax.nn.logsumexp(logits, axis=-1)
        return lse - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0], lse

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, hidden, head):
        out, pull = jax.vjp(function, hidden, head)
        return *out, *pull(tuple(bars))

    want = both(obvious, hidden, head)
    got = both(lambda h, w: token_losses(h, w, targets, cap, chunks), hidden, head)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_token_losses_gradient_is_a_derivative():
    """Finite differences confirm the hand-written backward pass."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(7, 3)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 7, (2, 4)), jnp.int32)
    for chunks in (1, 2):
        check_grads(
            lambda h, w, chunks=chunks: token_losses(h, w, targets, 2.0, chunks),
            (hidden, head),
            order=1,
            modes=["rev"],
            atol=2e-2,
            rtol=2e-2,
        )


def test_huge_logits_do_not_overflow():
    """Logits of thousands give finite losses and gradients."""
    hidden, head = jnp.full((1, 2, 1), 100.0), jnp.asarray([[-50.0], [50.0], [49.0]])
    targets = jnp.asarray([[0, 1]], jnp.int32)
    for chunks in (1, 2):
        (nll, _), pull = jax.vjp(
            lambda h, w, chunks=chunks: token_losses(h, w, targets, None, chunks), hidden, head
        )
        np.testing.assert_allclose(nll, [[10_000.0, 0.0]])
        assert all(np.isfinite(bar).all() for bar in pull((nll, nll)))


def test_means_are_exact_under_accumulation():
    """Sums of unequal microbatches add up to the sums of the whole batch."""
    model, rows = small.model(), small.tokens(batch=4)
    weight = np.random.default_rng(2).integers(0, 2, (4, 12)).astype(bool)

    def loss(part):
        tokens, mask = small.named(rows[part]), small.named(weight[part])
        return small.run(lambda m: next_token_loss(m, tokens, loss_mask=mask, z_loss=0.1), model)

    whole, parts = loss(slice(0, 4)), [loss(slice(0, 1)), loss(slice(1, 4))]
    summed = jax.tree.map(jnp.add, *parts)
    assert int(whole.count) == weight[:, :-1].sum()
    assert small.relative(summed, whole) < 1e-6


def test_masked_predictions_have_no_gradient():
    """A target behind the mask may be any token."""
    model, rows = small.model(), small.tokens(batch=1)
    weight = np.ones((1, 12), bool)
    weight[0, 5:] = False
    other = rows.copy()
    other[0, 6:] = (other[0, 6:] + 1) % 61

    def gradients(rows):
        def objective(model):
            tokens = small.named(rows)
            return next_token_loss(model, tokens, loss_mask=small.named(weight)).total

        return small.gradient(objective, model)

    assert small.relative(gradients(other), gradients(rows)) < 1e-6


def test_bfloat16_loss_is_float32():
    """In bfloat16 compute the sums stay float32 and the gradients near those of float32."""
    model, rows = small.model(), small.named(small.tokens())

    def objective(dtype):
        return lambda m: next_token_loss(cast(m, dtype), rows, chunks=3).total

    assert eqx.filter_eval_shape(objective(jnp.bfloat16), model).dtype == jnp.float32
    wide = small.gradient(objective(jnp.float32), model)
    narrow = small.gradient(objective(jnp.bfloat16), model)
    assert small.relative(narrow, wide) < 0.1


def test_row_without_a_divisor_is_refused():
    """A chunk count that does not divide the row is named in one line."""
    with pytest.raises(InputError, match="divisor of the 12 positions, found 5"):
        next_token_loss(small.model(), small.named(small.tokens()), chunks=5)


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


def test_auto_uses_the_budget_and_the_shards():
    """Memory of the compiled loss follows the budget; a sharded batch needs fewer chunks."""
    assert chunk_count(16, 256, 2048) == 1
    assert chunk_count(128, 8192, 32_768) == 256
    assert chunk_count(128, 8192, 32_768, shards=16) == 16
    model, rows = small.model(layers=1, vocab_size=4096), small.named(small.tokens(8, 64, 61))

    def scratch(**options):
        def objective(model):
            return next_token_loss(model, rows, **options).total

        lowered = jax.jit(jax.grad(objective)).lower(model)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    logits = 8 * 64 * 4096 * 4
    few, many = scratch(chunks="auto"), scratch(chunks="auto", chunk_budget=logits // 16)
    assert few >= logits
    assert many < logits / 2


def test_auto_reads_the_shards_of_the_sharding():
    """The batch axes of the attention's sharding say among how many devices logits are divided."""
    mesh = small.mesh(data=4, tensor=2)
    sharding = AttentionSharding(mesh, ("data",), ("tensor",))
    assert (sharding.batch_shards, sharding.head_shards) == (4, 2)
    model, rows = small.model(), small.named(small.tokens())
    budget = 2 * 12 * 61 * 4 // 4
    with_shards = jax.make_jaxpr(
        lambda: next_token_loss(model, rows, chunks="auto", chunk_budget=budget, sharding=sharding)
    )
    assert "length=4" not in str(with_shards())
    without = jax.make_jaxpr(
        lambda: next_token_loss(model, rows, chunks="auto", chunk_budget=budget)
    )
    assert "length=4" in str(without())


def test_learning_reduces_the_loss():
    """A few steps of gradient descent on one batch at least halve its loss."""
    model = small.model(layers=1)
    rows = small.named(small.tokens(batch=4, vocab=8))

    @eqx.filter_jit
    def step(model):
        def objective(model):
            loss = next_token_loss(model, rows, chunks=2)
            return loss.total / loss.count

        value, grads = eqx.filter_value_and_grad(objective)(model)
        return value, jax.tree.map(lambda p, g: p - 0.5 * g, model, grads)

    first, model = step(model)
    for _ in range(60):
        last, model = step(model)
    assert last < first / 2
    assert hax.isfinite(model.embedding).array.all()
