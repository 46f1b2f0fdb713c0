"""Executed FLOPs against the matmuls of the traced step, and against counts made by hand."""

import dataclasses
import math

import jax
import pytest
from jax.interpreters import partial_eval

from models.shape import presets
from models.shape.footprint import attended_pairs, training_flops_per_token
from tests.training import tiny
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.cost.executed_flops import executed_flops
from training.step.program import build_program

MODEL = tiny.MODEL


def traced(program):
    """FLOPs of every matmul of the traced step, without those that nothing needs."""
    closed = program.step.trace(program.abstract, program.abstract_batch()).jaxpr
    live, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return _matmuls(live)


def _matmuls(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "shard_map":  # its shapes are one device's
            mesh, split = equation.params["mesh"], equation.params["newly_manual_axes"]
            turns = math.prod(mesh.shape[axis] for axis in split)
        total += turns * sum(_matmuls(each) for each in inner if hasattr(each, "eqns"))
        if equation.primitive.name == "dot_general":
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            left, right = (variable.aval for variable in equation.invars)
            if len(contracted) + len(batch) < max(left.ndim, right.ndim):  # else elementwise
                length = math.prod(left.shape[axis] for axis in contracted)
                total += 2 * equation.outvars[0].aval.size * length
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "devices", "changes"),
    [
        ("none", 1, {}),
        ("full", 1, {"microbatches": 2}),
        ("attention", 4, {"parallel": tiny.split(2)}),
        ("save:queries,keys,values", 1, {}),
        ("dots", 1, {}),
    ],
)
def test_the_train_step_executes_what_the_formula_says(remat, devices, changes):
    """Every matmul of forward, backward and repetition, in any parts, on any devices."""
    program = tiny.program(devices, remat=remat, **changes)
    train, backend = program.train, program.backend
    assert backend == "reference"
    assert executed_flops(MODEL, tiny.OPTIMIZER, train, backend, devices) == traced(program)


def tomat(remat="matmuls", optimizer="adamw", backend="splash", model=presets.tomat_200m, **layout):
    parallel = Parallelism(sharding="zero1", **layout)
    train = TrainConfig(batch_size=128, sequence_length=8192, remat=remat, parallel=parallel)
    return executed_flops(model, OptimizerConfig(kind=optimizer), train, backend, 16)


def test_kernels_multiply_the_visible_pairs():
    """By hand: 2 matmuls forward, 5 backward in one kernel; the docs say 1.054 of the model's."""
    model, length = presets.tomat_200m, 8192
    width, tokens = model.heads * model.head_size, 128 * length
    pairs = model.layers * attended_pairs(length)
    weights = 6 * model.matmul_parameters * tokens
    assert tomat() == tomat(backend="cudnn") == weights + 7 * 2 * 128 * width * pairs
    asked = training_flops_per_token(model, length, causal=True) * tokens
    assert tomat() / asked == pytest.approx(1.054, abs=0.0005)
    # Attention again, and what it needs.
    inputs = 2 * model.embed * model.head_size * (model.heads + 2 * model.kv_heads)
    again = 2 * 2 * 128 * width * pairs + tokens * model.layers * inputs
    assert tomat("save:mlp_input,gate,up") - tomat() == again
    # Two kernels, 2 + 7 matmuls, where one would write too many partial sums.
    windowed = dataclasses.replace(model, window=256, window_pattern="S")
    near = model.layers * attended_pairs(length, 256)
    assert tomat(model=windowed) == weights + 9 * 2 * 128 * width * near
    # Triton recomputes scores and their gradient for the queries.
    assert tomat(backend="triton") == weights + 9 * 2 * 128 * width * pairs
    assert tomat(backend="blockwise") is None


def test_devices_share_whole_matrices():
    """36 matrices of the MLP and 48 of attention on 16 devices, each 3 and 3; on 4, each 9 and 12.

    Copies of the state repeat them.
    """
    wide, square = 5 * (4 * 1024**2 * 4096 + 2 * 1024**3), 5 * 6 * 1024**3
    assert tomat(optimizer="muon") - tomat() == 16 * (3 * wide + 3 * square)
    fours = 16 * (9 * wide + 12 * square)
    assert tomat(optimizer="muon", group=4) - tomat() == fours
    assert tomat(optimizer="muon", group=2, tensor=2) - tomat(group=2, tensor=2) == fours
    # Eight do not divide the 36: each has 5, of which the last devices iterate zeros.
    eights = 16 * (5 * wide + 6 * square)
    assert tomat(optimizer="muon", group=8) - tomat() == eights


@pytest.mark.slow
def test_muons_products_are_those_of_the_traced_step():
    """Of three layers on groups of four devices, zeros included."""
    model = dataclasses.replace(MODEL, layers=3)
    muon = dataclasses.replace(tiny.OPTIMIZER, kind="muon")
    parallel = Parallelism(sharding="zero1", group=2, tensor=2)
    train = dataclasses.replace(tiny.TRAIN, parallel=parallel)
    program = build_program(model, muon, train, jax.devices(), eos_id=tiny.EOS)
    assert executed_flops(model, muon, train, program.backend, 8) == traced(program)
