"""The whole model against the NumPy oracle, and the laws it must obey."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.axes import model_axes
from models.precision import cast
from models.remat import CHECKPOINT_NAMES
from models.rotary import rotary_angles
from pipeline.errors import InputError
from tests.models import reference, small

logits_of = eqx.filter_jit(lambda model, tokens, **forward: model.logits(tokens, **forward).array)


@pytest.mark.parametrize("changes", small.VARIANTS.values(), ids=small.VARIANTS.keys())
def test_logits_equal_the_oracle(changes):
    """Every variant computes what float64 loops over the formulas compute."""
    model, rows = small.model(**changes), small.tokens()
    want = reference.logits(model, rows)
    assert abs(want).max() > 0.5
    np.testing.assert_allclose(logits_of(model, small.named(rows)), want, atol=1e-4, rtol=1e-4)


def test_segments_equal_the_oracle():
    """Attention stays inside a segment, wherever its borders are in each row."""
    model, rows = small.model(), small.tokens()
    ids = np.array([[0] * 5 + [1] * 7, [3] * 1 + [4] * 8 + [5] * 3], np.int32)
    got = logits_of(model, small.named(rows), segment_ids=small.named(ids))
    np.testing.assert_allclose(got, reference.logits(model, rows, ids), atol=1e-4, rtol=1e-4)
    assert abs(got - logits_of(model, small.named(rows))).max() > 1e-2


@settings(deadline=None, max_examples=20)
@given(changed=st.integers(0, 11), new=st.integers(0, 60), seed=st.integers(0, 3))
def test_the_future_does_not_influence_the_past(changed, new, seed):
    """Changing token i leaves the logits before i as they were, to the bit."""
    model, rows = small.model(), small.tokens(seed=seed)
    other = rows.copy()
    other[:, changed] = new
    before = logits_of(model, small.named(rows))
    after = logits_of(model, small.named(other))
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])


def test_rows_do_not_influence_each_other():
    """A row's logits do not depend on the rest of the batch."""
    model, rows = small.model(), small.tokens(batch=3)
    whole = logits_of(model, small.named(rows))
    alone = logits_of(model, small.named(rows[1:2]))
    np.testing.assert_allclose(whole[1:2], alone, atol=1e-5)


def squares(forward):
    rows = small.named(small.tokens())
    return lambda model: hax.sum(hax.square(model.hidden(rows, **forward))).array


SAVE_MOST = "save:queries,keys,values,attention_residuals,mlp_input,gate,up"


@pytest.mark.parametrize("remat", ["full", "dots", SAVE_MOST, tuple(CHECKPOINT_NAMES)])
def test_every_remat_setting_gives_the_same_gradients(remat):
    """What the backward pass keeps never changes what it computes."""
    model = small.model(attention_soft_cap=2.0)
    plain = small.gradient(squares({"remat": "none"}), model)
    assert small.relative(small.gradient(squares({"remat": remat}), model), plain) < 1e-6


def saved_bytes(remat) -> int:
    backward = jax.eval_shape(lambda m: jax.vjp(squares({"remat": remat}), m)[1], small.model())
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


def test_remat_settings_differ_in_what_they_keep():
    """Bytes kept for the backward pass grow from full over named values to none."""
    kept = [saved_bytes(remat) for remat in ("full", "save:gate", "save:gate,up", "dots", "none")]
    assert kept == sorted(kept)
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_every_name_is_in_the_block(name):
    """Saving any one of the documented names keeps more than saving none."""
    assert saved_bytes(f"save:{name}") > saved_bytes("full")


@pytest.mark.parametrize("remat", ["some", "save:gates", ("gate", "nothing"), "save:"])
def test_unknown_remat_is_refused(remat):
    """The message lists what could be meant."""
    with pytest.raises(InputError, match="mlp_input"):
        small.model().hidden(small.named(small.tokens()), remat=remat)


def test_the_scan_equals_a_loop_over_layers():
    """Scanning the stack is applying its layers one after the other."""
    model, rows = small.model(), small.named(small.tokens())
    axes = model_axes(model.config)
    angles = rotary_angles(rows.resolve_axis("position"), axes.HeadSize, model.config.rope_base)
    x = model.embedding.take("vocab", rows)
    for block in model.blocks.unstacked():
        x = block(x, angles, segment_ids=None, backend="reference", sharding=None, interpret=False)
    looped = model.final_norm(x)
    np.testing.assert_allclose(model.logits_of(looped).array, logits_of(model, rows), atol=1e-5)


def test_layers_start_different():
    """Each layer, and each matrix of a layer, draws its own numbers."""
    stack = small.init(small.config()).blocks.stacked
    gate, up = stack.mlp.gate.array, stack.mlp.up.array
    assert not np.isclose(gate[0], gate[1]).any()
    assert not np.isclose(gate, up).any()


def test_initial_scales():
    """Matrices have variance 1/fan_in, residual ones 2 * layers less, the embedding its own."""
    config = small.config(embed=256, heads=8, kv_heads=4, head_size=32, mlp=512, embedding_std=0.02)
    model = small.init(config)
    cut = 0.9866  # standard deviation of a unit normal cut at three
    attention, mlp = model.blocks.stacked.attention, model.blocks.stacked.mlp
    for array, std in (
        (attention.query, 256**-0.5),
        (attention.value, 256**-0.5),
        (attention.output, 256**-0.5 / 6**0.5),
        (mlp.up, 256**-0.5),
        (mlp.down, 512**-0.5 / 6**0.5),
        (model.embedding, 0.02),
    ):
        assert float(array.array.std()) == pytest.approx(cut * std, rel=0.02)


def test_cast_changes_all_but_norms():
    """bfloat16 matrices, float32 norm weights, float32 logits, bfloat16 hidden states."""
    model, rows = cast(small.model(), jnp.bfloat16), small.named(small.tokens())
    assert model.embedding.dtype == model.blocks.stacked.mlp.up.dtype == jnp.bfloat16
    assert model.final_norm.weight.dtype == jnp.float32
    assert model.blocks.stacked.attention.query_norm.weight.dtype == jnp.float32
    assert eqx.filter_eval_shape(model.hidden, rows).dtype == jnp.bfloat16
    assert eqx.filter_eval_shape(model.logits, rows).dtype == jnp.float32


def test_bfloat16_is_near_float32():
    """Computing in bfloat16 moves the logits by its rounding, not more."""
    model, rows = small.model(), small.named(small.tokens())
    wide, narrow = logits_of(model, rows), logits_of(cast(model, jnp.bfloat16), rows)
    assert 1e-4 < abs(wide - narrow).max() / abs(wide).max() < 0.05


def test_gradients_through_cast_are_float32():
    """The gradient with respect to the stored parameters has their dtype."""
    rows = small.named(small.tokens())
    grads = small.gradient(
        lambda m: hax.mean(cast(m, jnp.bfloat16).logits(rows)).array, small.model()
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


def test_sharding_by_axis_name_changes_nothing():
    """The same numbers come out of eight devices, with batch and mlp spread over them."""
    mesh = small.mesh(data=4, tensor=2)
    mapping = {"batch": "data", "mlp": "tensor", "kv_heads": "tensor"}
    model, rows = small.model(), small.named(small.tokens(batch=4))

    @eqx.filter_jit
    def spread(model, rows):
        with hax.axis_mapping(mapping):
            return hax.shard(model).logits(hax.shard(rows)).array

    with hax.partitioning.set_mesh(mesh):
        got = spread(model, rows)
    assert got.sharding.spec[0] == "data"
    np.testing.assert_allclose(got, logits_of(model, rows), atol=2e-5)
