"""What both TPU kernels must do, interpreted: devices, any order of axes, remat in the model."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import pytest

import models.named as hax
from models.layers.axes import MeshAxes
from models.shape.splash_tiles import choose_way
from models.transformer import Forward
from tests.models import small
from tests.models.attention.attention_inputs import (
    attended,
    difference_from_reference,
    inputs,
    kernel_calls,
    small_blocks,
    tiled,
)

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("backend", ["ponente", "splash"])]
EVERYTHING = {"window": 300, "segmented": True, "soft_cap": 2.0}


@pytest.mark.parametrize("heads", [(), ("tensor",)])
def test_over_devices_equals_one_device(backend, heads):
    """Under shard_map over batch and heads the kernel computes the same."""
    options = {"segmented": True, "mesh_axes": MeshAxes(("data",), heads)}
    with jax.set_mesh(small.mesh(data=2, tensor=2)):
        assert difference_from_reference(backend, (4, 128, 2, 2, 64), **options) < 1e-5


@pytest.mark.parametrize(
    ("kv_heads", "way", "options"),
    [
        (1, "gathered", {"window": 150, "segmented": True}),
        (1, "zigzag", {"segmented": True}),
        (2, "heads", {"segmented": True, "soft_cap": 2.0}),
    ],
)
def test_positions_over_devices_equal_one_device(backend, kv_heads, way, options):
    """However the devices share a row, output and gradients are those of one device."""
    assert choose_way(kv_heads, True, options.get("window"), 2) == way
    mesh_axes = MeshAxes(("data",), (), ("sequence",))
    tiles, mesh = tiled(128, 128, 128, fused=way != "zigzag"), small.mesh(data=2, sequence=2)
    with small_blocks(), tiles, jax.set_mesh(mesh):
        shape = (2, 512, kv_heads, 2, 64)
        assert difference_from_reference(backend, shape, mesh_axes=mesh_axes, **options) < 1e-5


def test_positions_heads_and_batch_over_devices(backend):
    """All three at once, positions over two axes of the mesh, with the chosen tiles."""
    mesh_axes = MeshAxes(("data",), ("tensor",), ("outer", "inner"))
    with jax.set_mesh(small.mesh(data=1, outer=2, inner=2, tensor=2)):
        shape = (1, 512, 2, 2, 64)
        assert difference_from_reference(backend, shape, mesh_axes=mesh_axes, **EVERYTHING) < 1e-5


def test_axis_order_does_not_matter(backend):
    """Inputs as the projections make them, features first."""
    q, k, v, _ = inputs(1, 128, 2, 2, 64)
    run = eqx.filter_jit(functools.partial(attended, backend=backend, interpret=True))
    want = run(q, k, v)
    turned = q.rearrange(("kv_heads", "q_per_kv", "head_size", "batch", "position"))
    got = run(turned, k.rearrange(("kv_heads", "head_size", "batch", "position")), v)
    assert small.relative(got.rearrange(want.axes), want) == 0


def test_in_the_model_under_every_kind_of_remat(backend):
    """The model's gradients do not depend on the back end or on what its residuals cost."""
    model = small.model(head_size=64, kv_heads=1, heads=2, layers=2, attention_soft_cap=3.0)
    rows = small.named(small.tokens(1, 128))

    def squares(**forward):
        return lambda model: (
            hax.sum(hax.square(model.hidden(rows, forward=Forward(**forward)))).array
        )

    want = small.gradient(squares(backend="reference", remat="none"), model)
    for remat in ("full", "save:queries,keys,values,attention_residuals"):
        objective = squares(backend=backend, interpret=True, remat=remat)
        assert small.relative(small.gradient(objective, model), want) < 2e-5


def test_saved_residuals_spare_the_second_forward_kernel(backend):
    """Full recomputation runs the forward kernel twice, saving its residuals once."""
    saving = kernel_calls(backend, "save:queries,keys,values,attention_residuals")
    assert saving == kernel_calls(backend, "none") == 2  # forward, and one backward
    assert kernel_calls(backend, "full") == 3
