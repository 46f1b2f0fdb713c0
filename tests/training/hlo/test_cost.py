"""Counting what a compiled program does, against programs whose cost is known."""

import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from pipeline.errors import InputError
from tests.training.hlo.cost import CompiledCost, convolution_flops, cost, traced_cost
from tests.training.hlo.parser import Array, parse, turns, walk
from training.cost.executed_flops import Cost, pair_flops, phase


def compiled(function, *arguments) -> CompiledCost:
    return cost(parse(jax.jit(function).lower(*arguments).compile().as_text()))


def traced(function, *arguments, devices=1) -> Cost:
    return traced_cost(jax.jit(function).trace(*arguments).jaxpr, devices)


def flops_of(expression: str, **sizes: int) -> int:
    """Two for every combination of indices of an einsum without letters that only one side sums."""
    return 2 * math.prod(sizes[letter] for letter in set(expression) - set(",->"))


@pytest.mark.parametrize(
    "expression",
    ["ij,jk->ik", "bij,bjk->bik", "bijc,bjck->bik", "ijc,cjk->ik", "abij,abkj->abik", "ia,ja->ij"],
)
@pytest.mark.parametrize("count", [compiled, traced])
def test_flops_of_a_product(count, expression):
    """Batch axes, several contracted axes, transposed sides."""
    sizes = dict(a=3, b=4, c=5, i=6, j=7, k=8)
    sides = expression[: expression.index("-")].split(",")
    left, right = (jnp.ones([sizes[letter] for letter in side]) for side in sides)
    found = count(lambda a, b: jnp.einsum(expression, a, b), left, right)
    assert found.matmul_flops == flops_of(expression, **sizes)
    assert found.recomputed_dots == found.attention_flops == 0


@pytest.mark.parametrize("count", [compiled, traced])
@pytest.mark.parametrize(("outer", "inner"), [(1, 5), (3, 5), (7, 2)])
def test_loops_are_multiplied_out(count, outer, inner):
    """A scan in a scan runs its matmul outer x inner times."""

    def function(x, weights):
        def turn(x, w):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=inner)[0], None

        return jax.lax.scan(turn, x, weights)[0]

    found = count(function, jnp.ones((8, 16)), jnp.ones((outer, 16, 16)))
    assert found.matmul_flops == outer * inner * flops_of("ij,jk->ik", i=8, j=16, k=16)
    assert getattr(found, "unknown_loops", 0) == 0


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


@given(
    left=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2),
    left_dilate=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilate=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.integers(1, 2),
)
@settings(max_examples=15)
@pytest.mark.slow
def test_flops_of_a_convolution(left, kernel, stride, padding, left_dilate, dilate, groups):
    """A convolution of ones has, at every output, the number of its real multiplications."""
    function = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=stride,
        padding=padding,
        lhs_dilation=left_dilate,
        rhs_dilation=dilate,
        feature_group_count=groups,
    )
    arguments = jnp.ones((2, 2 * groups, *left)), jnp.ones((3 * groups, 2, *kernel))
    if 0 in jax.eval_shape(function, *arguments).shape:
        return
    module = parse(jax.jit(function).lower(*arguments).as_text(dialect="hlo"))
    (visit,) = (v for v in walk(module) if v.instruction.opcode == "convolution")
    expected = 2 * int(np.sum(np.asarray(function(*arguments))))
    assert convolution_flops(visit.instruction, visit.computation) == expected


# The TPU compiler writes a matmul with two output axes per weight as a reversed, padded window.
PADDED = """\
ENTRY %main (a: bf16[512,1024,1], b: bf16[1024,16,64]) -> bf16[512,16,64] {
  %a = bf16[512,1024,1]{1,0,2:T(8,128)(2,1)} parameter(0)
  %b = bf16[1024,16,64]{2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[512,16,64]{2,0,1:T(8,128)(2,1)S(1)} convolution(%a, %b), \
window={size=16 pad=15_15 rhs_reversal=1}, dim_labels=bf0_i0o->b0f
}
"""


def test_windows_that_slide_into_the_padding_cost_nothing():
    """Only one of the 16 taps meets data."""
    assert cost(parse(PADDED)).matmul_flops == flops_of("ij,jhk->ihk", i=512, j=1024, h=16, k=64)


@pytest.mark.parametrize(("name", "again"), [("c", 0), ("c.remat", 1), ("c.12.remat2", 1)])
def test_what_the_compiler_itself_makes_again(name, again):
    """Near the memory limit it repeats instructions and says so in their names only."""
    found = cost(parse(PADDED.replace("%c =", f"%{name} =")))
    assert (found.recomputed_dots, found.recomputed_flops) == (again, again * found.matmul_flops)


KERNEL = """\
ENTRY %main (q: bf16[2,16,512,64], p: s32[8]) -> bf16[2,16,512,64] {
  %q = bf16[2,16,512,64]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %p = s32[8]{0} parameter(1)
  %k.2 = (f32[512,128]{1,0:T(8,128)}, bf16[2,16,512,64]{3,2,1,0:T(8,128)(2,1)S(1)}) \
custom-call(%p, %q, /*index=2*/%q, %q), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/NAME/NAME/pallas_call"}, \
backend_config={"custom_call_config":{"body":"TUz"}}
  ROOT %g = bf16[2,16,512,64]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%k.2), index=1, \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}
}
"""


@pytest.mark.parametrize(
    ("name", "matmuls"),
    [
        ("splash_mha_fwd_residuals", 2),
        ("splash_mqa_fwd_segmented_no_residuals", 2),
        ("splash_mha_dq_no_residuals", 3),
        ("splash_mha_dkv_no_residuals", 5),  # no dq beside it: it is the fused one
        ("another_kernel", 0),
    ],
)
def test_attention_kernels(name, matmuls):
    """Attributes that span lines do not end the computation; only visible pairs count."""
    found = cost(parse(KERNEL.replace("NAME", name)))
    visible = np.tril(np.ones((512, 512))).sum()
    assert found.kernels == {name: 1}
    assert found.attention_flops == matmuls * 2 * 2 * 16 * 64 * visible
    assert len(list(walk(parse(KERNEL)))) == 4


def test_a_dkv_kernel_beside_a_dq_kernel_leaves_the_queries_to_it():
    before, call, after = re.split(r"(?=  %k.2)|(?=  ROOT)", KERNEL)
    dkv = call.replace("NAME", "splash_mha_dkv_no_residuals")
    dq = call.replace("NAME", "splash_mha_dq_no_residuals").replace("%k.2", "%k.3")
    found = cost(parse(before + dkv + dq + after))
    shape = (2, 16, 512, 64)
    assert found.attention_flops == (4 + 3) * pair_flops(shape, shape)


def test_kernels_of_a_divided_row_share_its_pairs():
    """A device of four has a quarter of the queries and all keys, in chunks of equal work."""
    whole, keys = (2, 16, 512, 64), (2, 4, 512, 64)
    assert 4 * pair_flops((2, 16, 128, 64), keys) == pair_flops(whole, keys)
    kernel = KERNEL.replace("NAME", "splash_mha_fwd_residuals")
    divided = kernel.replace("%q, %q)", "%k, %k)").replace(
        "  %p =", "  %k = bf16[2,4,2048,64]{3,2,1,0:T(8,128)(2,1)} parameter(2)\n  %p ="
    )
    found = cost(parse(divided))
    assert found.attention_flops == 2 * pair_flops((2, 16, 512, 64), (2, 4, 2048, 64))
    assert found.attention_flops > 3.9 * cost(parse(kernel)).attention_flops


def test_phases():
    assert phase("splash_mha_fwd_residuals") == "fwd"
    assert phase("splash_mqa_dkv_segmented_no_residuals") == "dkv"
    assert phase("rms_norm_fwd") is None


@pytest.mark.parametrize("count", [compiled, traced])
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (jax.checkpoint_policies.everything_saveable, 0),
        (jax.checkpoint_policies.dots_saveable, 0),
        # The second matmul's result is needed by nothing, so only the first one runs again.
        (jax.checkpoint_policies.nothing_saveable, 1),
    ],
)
def test_recomputed_products(count, policy, again):
    """In a scan of six blocks of two matmuls."""

    def block(x, w):
        return jnp.tanh(x @ w[0]) @ w[1], None

    def loss(weights, x):
        body = jax.checkpoint(block, policy=policy, prevent_cse=False)
        return jnp.sum(jnp.square(jax.lax.scan(body, x, weights)[0]))

    found = count(jax.grad(loss, argnums=(0, 1)), jnp.ones((6, 2, 16, 16)), jnp.ones((8, 16)))
    one = flops_of("ij,jk->ik", i=8, j=16, k=16)
    assert found.recomputed_dots == 6 * again
    assert found.recomputed_flops == 6 * again * one
    assert found.matmul_flops == 6 * (6 + again) * one


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
    # Shapes inside are one device's, so both count the work of one device.
    again = traced(function, jnp.ones((128, 64)), jnp.ones((5, 64, 64)), devices=4)
    assert found.matmul_flops == again.matmul_flops == 5 * 2 * 32 * 64 * 64


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
    (found,) = cost(parse(OFFLOADED)).collectives
    assert (found.kind, found.count, found.bytes) == ("reduce-scatter", 1, 64 * 8 * 4)


def test_arrays():
    assert Array("bf16", (8, 128)).bytes == 2048
    assert Array("pred", ()).bytes == 1
    assert Array("f8e4m3fn", (4,)).bytes == 4
    assert str(Array("s4", (3, 2))) == "s4[3,2]"


def test_a_text_without_a_program_is_refused():
    with pytest.raises(InputError, match="ENTRY"):
        parse("HloModule jit_f\n")


SCRIPT = """
import dataclasses, json, sys
from training.cost.topology import describe
devices = describe("v6e-1")
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from tests.training.hlo.parser import parse
from tests.training.hlo.cost import cost

def loss(weights, x):
    def block(x, w):
        x = jnp.einsum("bpe,ehk->bphk", x, w[0])
        return jnp.tanh(jnp.einsum("bphk,ehk->bpe", x, w[1])), None
    policy = jax.checkpoint_policies.nothing_saveable
    return jnp.sum(jax.lax.scan(jax.checkpoint(block, policy=policy), x, weights)[0])

def shape(*sides):
    place = SingleDeviceSharding(devices[0])
    return jax.ShapeDtypeStruct(sides, jnp.bfloat16, sharding=place)

for layers in (3, 6):
    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    lowered = step.lower(shape(layers, 2, 256, 4, 64), shape(2, 128, 256))
    found = cost(parse(lowered.compile().as_text()))
    print(json.dumps(dataclasses.asdict(found)))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_tpu_compilers_text():
    """Matmuls with several head axes become convolutions; loops carry no annotation."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    three, six = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    one = flops_of("bpe,ehk->bphk", b=2, p=128, e=256, h=4, k=64)
    for layers, found in ((3, three), (6, six)):
        # Two forward, four backward; tanh needs the second matmul again, which needs the first.
        assert found["recomputed_dots"] == 2 * layers
        assert found["matmul_flops"] == 8 * layers * one
        assert found["recomputed_flops"] == 2 * layers * one
        assert found["unknown_loops"] == 0
        assert sum(found["cycles_by_kind"].values()) == found["cycles"]
        assert sum(each["flops"] for each in found["operations"]) == found["matmul_flops"]
    assert six["cycles_by_kind"]["matmul"] == 2 * three["cycles_by_kind"]["matmul"] > 0
