"""What the backward pass keeps: never changes the gradients, and is what the setting says."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import pytest

import models.named as hax
from models.layers.scan_layers import checkpoint_policy
from models.shape.footprint import footprint
from models.shape.remat_names import (
    BLOCK_INPUT,
    CHECKPOINT_NAMES,
    MATMULS,
    NAMED_POLICIES,
    saved_names,
)
from models.transformer import Forward
from pipeline.errors import InputError
from tests.models import small

ALL = "save:" + ",".join(CHECKPOINT_NAMES)
OFFLOAD = "save:gate,up;offload:queries,attention_residuals"
SETTINGS = ("full", "attention", "matmuls", "dots", "save:gate,up", ALL, OFFLOAD)


def squares(remat):
    rows = small.named(small.tokens())
    return lambda model: hax.sum(hax.square(model.hidden(rows, forward=Forward(remat=remat)))).array


@functools.cache
def plain_gradient():
    return small.gradient(squares("none"), small.model(attention_soft_cap=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [*SETTINGS, f"offload:{BLOCK_INPUT}"])
def test_every_setting_gives_the_same_gradients(remat):
    """What the backward pass keeps, and where, never changes what it computes."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "offload" in remat and "pinned_host" not in kinds:
        pytest.skip("this backend has no pinned_host memory")
    got = small.gradient(squares(remat), small.model(attention_soft_cap=2.0))
    assert small.relative(got, plain_gradient()) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "unroll", "barriers"),
    [
        ({"window_pattern": "L", "window": None}, 1, False),
        ({"layers": 4, "window_pattern": "SSSL", "window": 4}, 1, True),
        ({"layers": 3, "window_pattern": "SL", "window": 4}, 1, True),
        ({"window_pattern": "L", "window": None}, 2, True),
    ],
    ids=["alike", "cycle", "rest", "unrolled"],
)
def test_blocks_of_one_body_are_recomputed_one_after_the_other(changes, unroll, barriers):
    """A barrier keeps XLA from recomputing them together: libtpu needed 2.9 GiB more for SSSL."""
    rows = small.named(small.tokens())

    def loss(model):
        return hax.sum(
            hax.square(model.hidden(rows, forward=Forward(remat="full", unroll=unroll)))
        ).array

    jaxpr = str(eqx.filter_make_jaxpr(eqx.filter_grad(loss))(small.model(**changes))[0])
    assert ("prevent_cse=False" not in jaxpr) == barriers


@functools.cache
def saved_bytes(remat) -> int:
    backward = jax.eval_shape(lambda m: jax.vjp(squares(remat), m)[1], small.model())
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


@pytest.mark.slow
def test_settings_differ_in_what_they_keep():
    """Bytes kept for the backward pass grow from full over named values to none."""
    order = ("full", "save:gate", "save:gate,up", "attention", "matmuls", "none")
    kept = [saved_bytes(remat) for remat in order]
    assert kept == sorted(kept)
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_every_name_keeps_its_documented_width(name):
    """Saving one name keeps its width per token and layer more than saving none."""
    config, tokens = small.config(), small.tokens().size
    more = saved_bytes(f"save:{name}") - saved_bytes("full")
    want = 4 * tokens * config.layers * footprint(config).widths[name]
    # A block's input is kept whatever the setting; its name only lets it be moved.
    assert more == (0 if name == BLOCK_INPUT else want)


@pytest.mark.slow
def test_a_blocks_input_is_moved_and_not_copied():
    """Offloaded, it is kept in the host's memory and nowhere else."""
    remat = f"offload:{BLOCK_INPUT}"
    assert saved_bytes(remat) == saved_bytes("full")
    gradient = eqx.filter_grad(squares(remat))
    layers, shape = small.config().layers, ",".join(map(str, small.tokens().shape))
    stacked = f"<host>[{layers},{shape},{small.config().embed}]"
    assert stacked in str(jax.make_jaxpr(gradient)(small.model()))


def dots(remat) -> int:
    """Matmuls in the traced gradient, counting a scan's body once."""
    jaxpr = jax.make_jaxpr(eqx.filter_grad(squares(remat)))(small.model())
    return str(jaxpr).count("dot_general")


@pytest.mark.slow
def test_products_recomputes_no_projection():
    """Under "matmuls" no matmul of the layer is made twice, attention's scores apart."""
    in_scores = 2  # the reference back end makes its scores and their matmul again by itself
    assert dots("matmuls") == dots("none")
    assert dots("full") > dots("attention") > dots("matmuls")
    assert dots("full") - dots("matmuls") >= 7 - in_scores


def test_settings_are_read():
    """Named policies and lists, kept and offloaded."""
    assert saved_names("full") == ((), ())
    assert saved_names("matmuls") == (MATMULS, ())
    assert saved_names("save:gate, up") == (("gate", "up"), ())
    assert saved_names("save:gate;offload:queries,keys") == (("gate",), ("queries", "keys"))
    assert saved_names("save:attention;offload:up") == (NAMED_POLICIES["attention"], ("up",))
    assert saved_names("offload:up") == ((), ("up",))
    assert checkpoint_policy("none") is None


@pytest.mark.parametrize(
    "remat", ["some", "save:gates", "save:", "save:gate;save:up", "save:gate,", "keep:gate", ""]
)
def test_unknown_settings_are_refused(remat):
    """The message lists what could be meant."""
    with pytest.raises(InputError, match="mlp_input"):
        small.model().hidden(small.named(small.tokens()), forward=Forward(remat=remat))
