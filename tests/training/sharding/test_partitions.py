"""Where the traced and compiled step keeps the activations, for every layout."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from tests.bench import layouts
from tests.training import tiny
from tests.training.hlo import cost
from training.config import Parallelism

# Those of two devices are in the one that has all three axes.
LAYOUTS = {
    name: Parallelism(**layouts.fields(name))
    for name in layouts.LAYOUTS
    if name not in ("tensor2", "sequence2")
}
STATE = {"all-reduce", "all-gather", "reduce-scatter"}
SEQUENCE = {*STATE, "all-to-all", "collective-permute"}
COLLECTIVES = {
    **{name: {"all-reduce"} for name in ("data", "tensor4")},
    **{name: STATE for name in ("zero1", "fsdp", "fsdp-group4", "split-tables")},
    **{name: SEQUENCE for name in ("sequence4", "fsdp-sequence2-tensor2")},
}
"""Kinds that a step has; a token's successor comes by permutation where rows are divided."""

ROOT = Path(__file__).parents[3]
COMPILED = """
import sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tests.training import tiny

program = tiny.program(8, parallel=tiny.split(4), microbatches=2, batch_size=16)
assert dict(program.layout.mesh.shape).items() >= {"data": 2, "fsdp": 4}.items()
program.compile()
print("and one that has to be", file=sys.stderr, flush=True)
before, after = (
    NamedSharding(program.layout.mesh, PartitionSpec(*axes))
    for axes in ((None, "data", "fsdp"), (("data", "fsdp"),))
)
shape = jax.ShapeDtypeStruct((16, 2, 16), jnp.float32, sharding=before)
jax.jit(lambda x: jax.lax.with_sharding_constraint(jnp.cos(x), after)).lower(shape).compile()
"""


def constraints(jaxpr, found):
    """(shape, PartitionSpec) of every sharding constraint, those of inner programs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            shape = equation.outvars[0].aval.shape
            found.append((shape, equation.params["sharding"].spec))
        for inner in jaxprs_in_params(equation.params):
            constraints(inner, found)
    return found


def program_of(name):
    return tiny.program(8, model=tiny.FOUR_WAYS, parallel=LAYOUTS[name])


@functools.cache
def compiled(name):
    """HLO of the step in a layout, compiled once for all tests."""
    return program_of(name).compile().as_text()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slow
def test_the_residual_stream_is_divided_as_the_layout_says(name):
    """In the traced step, forward and backward, and in its evaluation."""
    program = program_of(name)
    layout, train = program.layout, program.train
    stream = (train.batch_size, train.sequence_length, program.model.embed)
    sequence = "sequence" if layout.mesh.shape["sequence"] > 1 else None
    wanted = PartitionSpec(("data", "fsdp"), sequence, None)
    step = jax.make_jaxpr(program.step)(program.abstract, program.abstract_batch())
    specs = [spec for shape, spec in constraints(step.jaxpr, []) if shape == stream]
    # Of the embedding, and forward and backward of attention and MLP in the scanned layer.
    assert len(specs) >= 6
    assert {PartitionSpec(*spec, *(None,) * (3 - len(spec))) for spec in specs} == {wanted}
    text = compiled(name)
    shards = layout.batch_shards, layout.mesh.shape["sequence"]
    assert {each.kind for each in cost(text).collectives} == COLLECTIVES[name]
    local = (stream[0] // shards[0], stream[1] // shards[1], stream[2])
    shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"f32\[(\d+,\d+,\d+)\]", text)}
    assert local in shapes
    assert stream not in shapes


@functools.cache
def compiled_evaluation(name):
    """HLO of the evaluation step for a batch."""
    program = program_of(name)
    counts = [
        jax.ShapeDtypeStruct((size,), jnp.int32, sharding=program.layout.replicated)
        for size in (program.train.batch_size, program.model.vocab_size)
    ]
    state = program.abstract.eval_params
    lowered = program.evaluation_step.lower(state, program.abstract_batch(), *counts)
    return lowered.compile().as_text()


def matmul_flops(text):
    """Of one device, in the compiled program."""
    counted = cost(text)
    assert counted.unknown_loops == 0
    return counted.matmul_flops


@pytest.mark.parametrize("name", ["tensor4", "sequence4", "fsdp-sequence2-tensor2"])
@pytest.mark.slow
def test_no_layout_has_a_device_multiply_what_another_does_too(name):
    """Matmuls of training and of evaluation, a device: as many as with the data split."""
    evaluated = matmul_flops(compiled_evaluation("data"))
    assert evaluated > 0
    assert matmul_flops(compiled_evaluation(name)) == evaluated
    assert matmul_flops(compiled(name)) == matmul_flops(compiled("data"))


@pytest.mark.slow
def test_no_array_is_gathered_whole_to_be_divided_anew():
    """The compiler warns of that in a control, and not in microbatches on groups of devices."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # a program that is loaded warns of nothing
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    step, known = done.stderr.split("and one that has to be")
    assert "Involuntary full rematerialization" in known
    assert "Involuntary full rematerialization" not in step
