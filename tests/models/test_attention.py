"""Both back ends against NumPy, against each other, and the choice between them."""

from __future__ import annotations

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from models.attention import attend, choose_backend
from models.attention_splash import AttentionSharding, block_sizes
from pipeline.errors import InputError
from tests.models import reference, small

reference_of = eqx.filter_jit(functools.partial(attend, backend="reference"))


def inputs(batch, position, kv_heads, q_per_kv, head_size, seed=0):
    """Random queries, keys, values and output cotangent as named arrays."""
    rng = np.random.default_rng(seed)
    kv = {"batch": batch, "position": position, "kv_heads": kv_heads, "head_size": head_size}
    q = {"batch": batch, "position": position, "kv_heads": kv_heads}
    q |= {"q_per_kv": q_per_kv, "head_size": head_size}

    def draw(axes):
        return hax.named(
            jnp.asarray(rng.normal(size=tuple(axes.values())), jnp.float32), tuple(axes)
        )

    return draw(q), draw(kv), draw(kv), draw(q)


def segments(batch, position, seed=0):
    """Segment ids that start at random places, different in each row."""
    starts = np.random.default_rng(seed).random((batch, position)) < 4 / position
    return small.named(np.cumsum(starts, axis=1).astype(np.int32))


def oracle(q, k, v, ids, soft_cap):
    q, k, v = (np.asarray(x.array, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, g, r in np.ndindex(q.shape[0], q.shape[2], q.shape[3]):
        out[b, :, g, r] = reference.attention_head(
            q[b, :, g, r], k[b, :, g], v[b, :, g], ids[b], soft_cap
        )
    return out


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (2, 3), (3, 1), (1, 4)])
def test_reference_equals_numpy(groups, segmented, soft_cap):
    """The plain back end computes what a loop over heads and positions computes."""
    q, k, v, _ = inputs(2, 9, *groups, 6)
    ids = segments(2, 9) if segmented else None
    got = reference_of(q, k, v, soft_cap=soft_cap, segment_ids=ids)
    plain_ids = np.zeros((2, 9)) if ids is None else np.asarray(ids.array)
    assert got.axes == q.axes
    np.testing.assert_allclose(got.array, oracle(q, k, v, plain_ids, soft_cap), atol=1e-5)


def test_axis_order_does_not_matter():
    """Inputs in another axis order give the same result in the queries' order."""
    q, k, v, _ = inputs(2, 9, 2, 3, 6)
    want = reference_of(q, k, v)
    turned = q.rearrange(("head_size", "q_per_kv", "batch", "kv_heads", "position"))
    moved = k.rearrange(("head_size", "kv_heads", "position", "batch"))
    got = reference_of(turned, moved, v)
    assert got.axes == turned.axes
    np.testing.assert_allclose(got.rearrange(want.axes).array, want.array, atol=1e-6)


def value_and_gradients(backend, q, k, v, bar, **options):
    @jax.jit
    def run(q, k, v):
        def objective(q, k, v):
            out = attend(q, k, v, backend=backend, **options)
            return hax.sum(out * bar).array, out

        return jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    return run(q, k, v)


CASES = {
    "multi_head": ((1, 256, 2, 1, 64), {}),
    "grouped": ((2, 256, 2, 2, 128), {}),
    "multi_query_two_blocks": ((1, 384, 1, 3, 64), {}),
    "soft_cap": ((1, 256, 2, 2, 64), {"soft_cap": 1.3}),
    "segments": ((2, 256, 2, 2, 64), {"segmented": True}),
    "segments_and_soft_cap": ((2, 128, 1, 2, 64), {"segmented": True, "soft_cap": 0.9}),
}


@pytest.mark.parametrize(("shape", "options"), CASES.values(), ids=CASES.keys())
def test_splash_equals_the_reference(shape, options):
    """The kernel, interpreted, agrees forward and in all three gradients."""
    q, k, v, bar = inputs(*shape)
    ids = segments(*shape[:2]) if options.get("segmented") else None
    common = {"soft_cap": options.get("soft_cap"), "segment_ids": ids}
    want = value_and_gradients("reference", q, k, v, bar, **common)
    got = value_and_gradients("splash", q, k, v, bar, **common, interpret=True)
    assert small.relative(got, want) < 1e-5


def test_splash_over_devices_equals_one_device():
    """Under shard_map over batch and heads the kernel computes the same."""
    mesh = small.mesh(data=2, tensor=2)
    q, k, v, bar = inputs(4, 128, 2, 2, 64)
    ids = segments(4, 128)
    want = value_and_gradients("reference", q, k, v, bar, segment_ids=ids)
    for heads in ((), ("tensor",)):
        sharding = AttentionSharding(mesh, ("data",), heads)
        got = value_and_gradients(
            "splash", q, k, v, bar, segment_ids=ids, sharding=sharding, interpret=True
        )
        assert small.relative(got, want) < 1e-5


def test_splash_in_the_model_under_every_kind_of_remat():
    """The model's gradients do not depend on the back end or on what splash's residuals cost."""
    model = small.model(head_size=64, kv_heads=1, heads=2, layers=2, attention_soft_cap=3.0)
    rows = small.named(small.tokens(1, 128))

    def squares(**forward):
        return lambda model: hax.sum(hax.square(model.hidden(rows, **forward))).array

    want = small.gradient(squares(backend="reference", remat="none"), model)
    for remat in ("full", "save:queries,keys,values,attention_residuals"):
        objective = squares(backend="splash", interpret=True, remat=remat)
        assert small.relative(small.gradient(objective, model), want) < 2e-5


def kernel_calls(remat):
    model = small.model(head_size=64, layers=2)
    rows = small.named(small.tokens(1, 128))

    def objective(model):
        out = model.hidden(rows, backend="splash", interpret=True, remat=remat)
        return hax.sum(out).array

    program = jax.make_jaxpr(jax.grad(objective))(model).jaxpr
    # Without the dead code that every compiler removes, among it unused recomputation.
    program, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    return count(program, "pallas_call")


def count(program, primitive):
    """How often a primitive occurs in a program and the programs inside it."""
    inner = [
        part
        for equation in program.eqns
        for value in equation.params.values()
        for part in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    inner = [getattr(part, "jaxpr", part) for part in inner]
    here = sum(equation.primitive.name == primitive for equation in program.eqns)
    return here + sum(count(part, primitive) for part in inner if hasattr(part, "eqns"))


def test_saved_residuals_spare_the_second_forward_kernel():
    """Full recomputation runs the forward kernel twice, saving its residuals once."""
    saving = kernel_calls("save:queries,keys,values,attention_residuals")
    assert saving == kernel_calls("none") == 3  # forward, and two backward
    assert kernel_calls("full") == 4


@pytest.mark.parametrize(
    ("position", "tile"),
    [(128, 128), (384, 128), (768, 256), (1536, 512), (4096, 1024), (4608, 512), (8192, 2048)],
)
def test_block_sizes_divide_the_row(position, tile):
    """The tile is the largest of the table that divides the row."""
    blocks = block_sizes(position)
    assert blocks.block_q == blocks.block_kv == tile
    for outer, inner in (
        (blocks.block_kv, blocks.block_kv_compute),
        (blocks.block_kv_dkv, blocks.block_kv_dkv_compute),
    ):
        assert position % outer == 0
        assert outer % inner == 0
    assert blocks.has_backward_blocks


@pytest.mark.parametrize(
    ("requested", "platform", "position", "head_size", "name", "why"),
    [
        ("auto", "tpu", 512, 128, "splash", "auto"),
        ("splash", "tpu", 128, 64, "splash", "splash"),
        ("auto", "tpu", 500, 128, "reference", "multiple of 128"),
        ("auto", "tpu", 512, 32, "reference", "multiple of 64"),
        ("auto", "cpu", 512, 128, "reference", "platform tpu and this is cpu"),
        ("reference", "tpu", 512, 128, "reference", "requested"),
    ],
)
def test_the_choice_and_its_reason(requested, platform, position, head_size, name, why):
    """Auto takes splash where it can run, and every choice says why."""
    chosen, reason = choose_backend(requested, platform, position=position, head_size=head_size)
    assert chosen == name
    assert why in reason


@pytest.mark.parametrize(
    ("requested", "platform", "position", "head_size", "why"),
    [
        ("splash", "cpu", 512, 128, "this is cpu"),
        ("splash", "tpu", 500, 128, "500 positions"),
        ("splash", "tpu", 512, 32, "head size of 32"),
        ("flash", "tpu", 512, 128, "found 'flash'"),
    ],
)
def test_what_cannot_run_is_refused(requested, platform, position, head_size, why):
    """Asking for splash where it cannot run is an error, never a quiet fallback."""
    with pytest.raises(InputError, match=why):
        choose_backend(requested, platform, position=position, head_size=head_size)


@pytest.mark.parametrize(
    ("backend", "position", "why"), [("auto", 128, "choose_backend"), ("splash", 100, "128")]
)
def test_attend_refuses_what_it_cannot_run(backend, position, why):
    """The call itself has no fallback either."""
    q, k, v, _ = inputs(1, position, 1, 1, 64)
    with pytest.raises(InputError, match=why):
        attend(q, k, v, backend=backend)
