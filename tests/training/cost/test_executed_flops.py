"""Executed FLOPs against counts made by hand, and refusals where nothing can be counted."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from models.flops import training_flops_per_token
from tests.training import tiny
from tests.training.hlo.cost import cost
from tests.training.hlo.parser import parse
from training.config import Parallelism
from training.cost.executed_flops import executed_flops
from training.cost.step_work import orthogonalization_flops
from training.step.program import build_program

MODEL = tiny.MODEL


def counted(function, *shapes, model=MODEL, length=tiny.LENGTH, devices=1):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return executed_flops(jax.jit(function).trace(*arguments).jaxpr, model, length, devices)


def traced(**changes):
    program = tiny.program(**changes)
    closed = program.step.trace(program.abstract, program.abstract_batch()).jaxpr
    return executed_flops(closed, MODEL, tiny.LENGTH, program.layout.devices)[0]


def by_hand(remat):
    """Matmuls of one step of the tiny model by its shapes, the reference back end's attention.

    Of a layer forward: queries, keys, values, output, gate, up, down, and two matmuls over all
    pairs, masked or not. Backward every matmul is two, and that back end makes its two again;
    `full` does all of a layer again but for the last one, whose result nobody needs.
    """
    rows, length, embed = tiny.BATCH, tiny.LENGTH, MODEL.embed
    tokens = rows * length
    wide, narrow = MODEL.heads * MODEL.head_size, MODEL.kv_heads * MODEL.head_size
    inputs = 2 * tokens * embed * (wide + 2 * narrow)
    scores = 2 * rows * length * length * wide
    output = 2 * tokens * wide * embed
    gates = 2 * 2 * tokens * embed * MODEL.mlp
    down = 2 * tokens * MODEL.mlp * embed
    layer = inputs + 2 * scores + output + gates + down
    head = 2 * tokens * embed * MODEL.vocab_size
    again = {"none": 0, "full": layer - down}[remat]
    return MODEL.layers * (3 * layer + 2 * scores + again) + 3 * head


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_train_step_executes_what_its_shapes_say(remat):
    """Every matmul of forward, backward and recomputation, and nothing else."""
    assert traced(remat=remat) == by_hand(remat)


@pytest.mark.slow
def test_microbatches_and_devices_change_nothing():
    """The same matmuls in more parts, on more devices."""
    whole = traced(remat="none")
    assert traced(remat="none", microbatches=2) == whole
    assert traced(remat="none", devices=4, parallel=tiny.split(2)) == whole


def test_executed_is_more_than_the_model_asks_for():
    """Also without recomputation: attention is multiplied above the diagonal too."""
    asked = training_flops_per_token(MODEL, tiny.LENGTH, causal=True) * tiny.BATCH * tiny.LENGTH
    assert asked < traced(remat="none") < traced(remat="full")


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_compiled_program_executes_what_was_traced(remat):
    """The compiler's own text has the same matmuls, but for a few that it finds to be equal."""
    program = tiny.program(remat=remat)
    compiled = cost(parse(program.compile().as_text()))
    assert compiled.unknown_loops == 0
    assert traced(remat=remat) == pytest.approx(compiled.matmul_flops, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "sharding"), [(1, "replicated"), (4, "replicated")])
def test_each_copy_of_muons_state_repeats_its_products(devices, sharding):
    """What the compiler's program does on one device beyond AdamW's is the formula's figure."""
    train = dataclasses.replace(
        tiny.TRAIN, remat="none", parallel=Parallelism(sharding=sharding, group=1)
    )

    def flops(kind):
        optimizer = dataclasses.replace(tiny.OPTIMIZER, kind=kind)
        program = build_program(MODEL, optimizer, train, jax.devices()[:devices], eos_id=tiny.EOS)
        found = cost(parse(program.compile().as_text()))
        assert found.unknown_loops == 0
        closed = program.step.trace(program.abstract, program.abstract_batch()).jaxpr
        once = orthogonalization_flops(MODEL, optimizer)
        repeated = (devices - 1) * once
        total, _ = executed_flops(closed, MODEL, tiny.LENGTH, devices, repeated)
        return found.matmul_flops, total / devices, once

    (plain, *_), (compiled, counted_, once) = flops("adamw"), flops("muon")
    assert compiled - plain == pytest.approx(once, rel=0.01)
    assert counted_ == pytest.approx(compiled, rel=0.03)


def test_loops_of_known_length_are_multiplied_out():
    """Seven turns of a matmul of 8 x 16 by 16 x 16."""

    def loop(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=7)[0]

    assert counted(loop, (8, 16), (16, 16))[0] == 7 * 2 * 8 * 16 * 16


def test_a_product_that_nothing_needs_does_not_count():
    """The compiler drops it, and so does the count."""

    def wasteful(x, w):
        _ = x @ w @ w
        return x @ w

    assert counted(wasteful, (8, 16), (16, 16))[0] == 2 * 8 * 16 * 16


def test_what_cannot_be_counted_has_no_figure():
    """A loop that ends when it likes, or a branch: None and a reason, not a wrong number."""

    def until(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)

    def either(x, w):
        return jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x)

    for function, word in ((until, "loop"), (either, "branch")):
        found, why = counted(function, (16, 16), (16, 16))
        assert found is None
        assert word in why

    def harmless(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x @ w)

    assert counted(harmless, (16, 16), (16, 16))[0] == 2 * 16**3


def test_fused_attention_on_gpus_is_counted_by_formula(monkeypatch):
    """cuDNN's kernels: 2 matmuls forward and 5 backward, over the pairs of a causal mask."""
    from jax._src.cudnn import fused_attention_stablehlo

    from models.attention import cudnn

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    batch, position, heads, size = 2, 256, 4, 64
    shape = jax.ShapeDtypeStruct((batch, position, heads, size), jnp.bfloat16)

    def loss(q, k, v):
        return cudnn.cudnn(q, k, v, window=None, mesh_axes=None).astype(jnp.float32).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    closed = jax.jit(gradient).trace(shape, shape, shape).jaxpr
    matmul = 2 * batch * heads * size * position * (position + 1) // 2
    found, _ = executed_flops(closed, MODEL, position, 1)
    assert found == 7 * matmul
    both = jax.value_and_grad(jax.checkpoint(loss), argnums=(0, 1, 2))
    again = jax.jit(both).trace(shape, shape, shape)
    found, why = executed_flops(again.jaxpr, MODEL, position, 1)
    assert found == 9 * matmul
    assert "22% of them a second time" in why
    # Of the model's two layers one sees 64 positions: its kernels leave out pairs further apart.
    windowed = dataclasses.replace(MODEL, window=64, window_pattern="SL")
    near = sum(min(t + 1, 64) for t in range(position)) / (position * (position + 1) / 2)
    seen = (near + 1) / 2
    found, _ = executed_flops(closed, windowed, position, 1)
    assert found == pytest.approx(7 * matmul * seen)
