"""Counting what a compiled program does, against programs whose cost is known."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from tests.training.hlo import cost
from training.cost.hlo import parse, turns, walk


def compiled(function, *arguments):
    return cost(jax.jit(function).lower(*arguments).compile().as_text())


def flops_of(expression: str, **sizes: int) -> int:
    """Two for every combination of indices of an einsum without letters that only one side sums."""
    return 2 * math.prod(sizes[letter] for letter in set(expression) - set(",->"))


@pytest.mark.parametrize(
    "expression",
    ["bijc,bjck->bik", "ijc,cjk->ik", "abij,abkj->abik"],
)
def test_flops_of_a_product(expression):
    """Batch axes, several contracted axes, transposed sides."""
    sizes = dict(a=3, b=4, c=5, i=6, j=7, k=8)
    sides = expression[: expression.index("-")].split(",")
    left, right = (jnp.ones([sizes[letter] for letter in side]) for side in sides)
    found = compiled(lambda a, b: jnp.einsum(expression, a, b), left, right)
    assert found.matmul_flops == flops_of(expression, **sizes)


@pytest.mark.parametrize(("outer", "inner"), [(1, 5), (7, 2)])
def test_loops_are_multiplied_out(outer, inner):
    """A scan in a scan runs its matmul outer x inner times."""

    def function(x, weights):
        def turn(x, w):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=inner)[0], None

        return jax.lax.scan(turn, x, weights)[0]

    found = compiled(function, jnp.ones((8, 16)), jnp.ones((outer, 16, 16)))
    assert found.matmul_flops == outer * inner * flops_of("ij,jk->ik", i=8, j=16, k=16)
    assert found.unknown_loops == 0


@given(start=st.integers(0, 9), length=st.integers(3, 30), step=st.integers(1, 4))
@settings(max_examples=8)
def test_turns_without_the_compilers_annotation(start, length, step):
    """Start, bound and step are read from the text; TPU programs carry no annotation."""

    def function(x):
        def more(carried):
            return carried[0] < start + length * step - (step - 1)

        def turn(carried):
            return carried[0] + step, jnp.sin(carried[1]) * carried[0]

        return jax.lax.while_loop(more, turn, (jnp.int32(start), x))[1]

    # Of a loop over fewer numbers the CPU makes a call, out of sight of its start.
    numbers = jax.ShapeDtypeStruct((2**17, 1024), jnp.float32)
    text = jax.jit(function).lower(numbers).compile().as_text()
    module = parse(text.replace("known_trip_count", "forgotten"))
    loops = [visit for visit in walk(module) if visit.instruction.opcode == "while"]
    assert [turns(module, each.computation, each.instruction) for each in loops] == [length]


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
    """Where the bound depends on data."""

    def function(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e6, lambda x: x @ x, x)

    found = compiled(function, jnp.ones((8, 8)))
    assert found.unknown_loops == 1
    assert found.matmul_flops == flops_of("ij,jk->ik", i=8, j=8, k=8)


def test_collectives_by_kind_and_loop():
    """One reduction of 8 KiB a turn in a loop over layers, one gather outside."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def local(x, weights):
        def turn(x, w):
            return jax.lax.psum(jnp.tanh(x @ w), "data"), None

        with jax.named_scope("layers"):
            x = jax.lax.scan(turn, x, weights)[0]
        return jax.lax.all_gather(x, "data")

    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found = compiled(function, jnp.ones((128, 64)), jnp.ones((5, 64, 64)))
    by_kind = {each.kind: each for each in found.collectives}
    assert set(by_kind) == {"all-reduce", "all-gather"}
    rows = by_kind["all-reduce"]
    assert (rows.count, rows.bytes, rows.in_layer_loops) == (5, 5 * 32 * 64 * 4, 5)
    gather = by_kind["all-gather"]
    assert (gather.count, gather.bytes, gather.in_layer_loops) == (1, 128 * 64 * 4, 0)


OFFLOADED = """\
%called (p: f32[64,8], t: token[]) -> f32[4,8] {
  %t = token[] parameter(1)
  %p = f32[64,8]{1,0:T(8,128)} parameter(0), backend_config={"compute_type":"COMPUTE_TYPE_SCALAR"}
  ROOT %r = f32[4,8]{1,0:T(8,128)} reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (p: f32[64,8]) -> f32[4,8] {
  %p = f32[64,8]{1,0:T(8,128)} parameter(0)
  %t = token[] custom-call(), custom_call_target="PrepareAsyncCallDone"
  %s = ((f32[64,8]{1,0:T(8,128)}, token[]), f32[4,8]{1,0:T(8,128)}) call-start(%p, %t), \
async_execution_thread="sparsecore", to_apply=%called
  ROOT %d = f32[4,8]{1,0:T(8,128)} call-done(%s)
}
"""


def test_a_collective_on_the_sparse_cores_counts():
    """libtpu calls it on a thread of its own, whose name stands behind the computation."""
    (found,) = cost(OFFLOADED).collectives
    assert (found.kind, found.count, found.bytes) == ("reduce-scatter", 1, 64 * 8 * 4)
