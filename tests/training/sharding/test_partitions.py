"""Where the traced and compiled step keeps the activations, for every layout."""

import re

import jax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from tests.training import tiny
from training.config import SPLIT_TABLES, Parallelism
from training.cost.hlo_cost import cost
from training.cost.hlo_parser import parse

LAYOUTS = {
    "data": Parallelism(sharding="replicated"),
    "fsdp": Parallelism(sharding="fsdp"),
    "fsdp-group": Parallelism(sharding="fsdp", group=2),
    "tensor": Parallelism(sharding="replicated", tensor=2),
    "sequence": Parallelism(sharding="zero1", sequence=2),
    "sequence4": Parallelism(sharding="fsdp", sequence=4),
    "all": Parallelism(sharding="fsdp", group=2, sequence=2, tensor=2),
    "split-tables": Parallelism(sharding="fsdp", group=4, rules=SPLIT_TABLES),
}
COLLECTIVES = {
    "data": {"all-reduce"},
    "fsdp": {"all-reduce", "all-gather", "reduce-scatter"},
    "fsdp-group": {"all-reduce", "all-gather", "reduce-scatter"},
    "tensor": {"all-reduce", "all-gather"},
    "split-tables": {"all-reduce", "all-gather", "reduce-scatter"},
}
"""Kinds that a step may have; nothing is moved from device to device by permutation."""


def constraints(jaxpr, found):
    """(shape, PartitionSpec) of every sharding constraint, those of inner programs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            shape = equation.outvars[0].aval.shape
            found.append((shape, equation.params["sharding"].spec))
        for inner in jaxprs_in_params(equation.params):
            constraints(inner, found)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_residual_stream_is_divided_as_the_layout_says(name):
    """In the traced step, forward and backward, and in its evaluation."""
    program = tiny.program(8, parallel=LAYOUTS[name])
    layout, train = program.layout, program.train
    stream = (train.batch_size, train.sequence_length, program.model.embed)
    sequence = "sequence" if layout.mesh.shape["sequence"] > 1 else None
    wanted = PartitionSpec(("data", "fsdp"), sequence, None)
    step = jax.make_jaxpr(program.step)(program.abstract, program.abstract_batch())
    specs = [spec for shape, spec in constraints(step.jaxpr, []) if shape == stream]
    # Of the embedding, and forward and backward of attention and MLP in the scanned layer.
    assert len(specs) >= 6
    assert {PartitionSpec(*spec, *(None,) * (3 - len(spec))) for spec in specs} == {wanted}
    text = program.compile().as_text()
    shards = layout.batch_shards, layout.mesh.shape["sequence"]
    kinds = {each.kind for each in cost(parse(text)).collectives}
    assert kinds <= COLLECTIVES.get(name, kinds)
    assert ("reduce-scatter" in kinds) == ("reduce-scatter" in COLLECTIVES.get(name, kinds))
    local = (stream[0] // shards[0], stream[1] // shards[1], stream[2])
    shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"f32\[(\d+,\d+,\d+)\]", text)}
    assert local in shapes
    assert stream not in shapes
