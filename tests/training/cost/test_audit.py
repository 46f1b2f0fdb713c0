"""The audit of compiled programs: each planted fault is found, and nothing in a program without."""

import functools

import pytest

from pipeline.accelerators import TPUS
from tests.tpu_compiler import needs_libtpu, printed
from training.cost.audit import COPIES, HOST, KEEPS, NARROW, PADS, TWICE, WAITS, audit
from training.cost.step_time import MATMUL

pytestmark = [
    pytest.mark.slow,
    needs_libtpu,
]

SCRIPT = """
import dataclasses, json
from training.preflight import describe
devices = describe("v6e-4")
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from pipeline.accelerators import TPUS
from training.cost.audit import audit

mesh = Mesh(np.array(devices), ("data",))
one = SingleDeviceSharding(devices[0])
host = one.with_memory_kind("pinned_host")

def array(*shape, dtype="bfloat16", sharding=one):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

def audited(function, *arguments, **jitted):
    compiled = jax.jit(function, **jitted).lower(*arguments).compile()
    return [dataclasses.asdict(each) for each in audit(compiled.as_text(), TPUS["v6e"])]

def product(x, w):
    return jnp.tanh(x @ w)

def gathered(x, w, y):
    # The product of other arrays has time for the transfer.
    def local(x, w, y):
        whole = jax.lax.all_gather(x, "data", tiled=True)
        for _ in range(8):
            y = jnp.tanh(y @ w)
        return whole @ w, y
    return jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=(P(), P("data")),
        check_vma=False,
    )(x, w, y)

parted, copied = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
several = (
    array(4096, 1024, sharding=parted),
    array(1024, 1024, sharding=copied),
    array(32768, 1024, sharding=parted),
)
rows = array(1024, 1024, dtype="float32")
large = array(2048, 2048, dtype="float32")

def summed(ids, rows):
    return jnp.zeros((512, 1024), jnp.bfloat16).at[ids].add(rows)

def twice(x, w):
    def loss(x):
        return jnp.tanh(x @ w).astype("float32").sum()
    return jax.grad(jax.checkpoint(loss))(x)

def moved(x):
    return jnp.tanh(jax.device_put(x, one))

print(json.dumps({
    "clean": audited(product, array(1024, 1024), array(1024, 1024)),
    "waits": audited(gathered, *several),
    "narrow": audited(summed, array(4096, dtype="int32"), array(4096, 1024)),
    "wide": audited(
        lambda ids, rows: jnp.zeros((512, 1024)).at[ids].add(rows),
        array(4096, dtype="int32"), array(4096, 1024, dtype="float32"),
    ),
    "pads": audited(product, array(4096, 64), array(64, 4096)),
    "batched": audited(
        lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b), array(64, 512, 64), array(64, 64, 512)
    ),
    "twice": audited(twice, array(1024, 1024), array(1024, 1024)),
    "copies": audited(lambda x: x.T.reshape(4, 512, 2048) + 0, large),
    "keeps": audited(lambda x: x + 1, large),
    "donates": audited(lambda x: x + 1, large, donate_argnums=0),
    "host": audited(moved, array(2048, 2048, dtype="float32", sharding=host)),
}))
"""


@functools.cache
def found():
    """Findings by program, of one process that compiles for v6e."""
    return printed("-c", SCRIPT)[-1]


def by_kind(program):
    """Kind -> (what, times, bytes, seconds) of a program's flaws but for arguments kept."""
    kinds = {each["kind"]: each for each in found()[program] if each["kind"] != KEEPS}
    return {kind: (e["what"], e["times"], e["bytes"], e["seconds"]) for kind, e in kinds.items()}


MIB = 2**20


def test_a_collective_that_nothing_hides_is_a_wait():
    """8 MiB over four links of 90 GB/s."""
    ((what, times, size, seconds),) = by_kind("waits").values()
    assert (what, times, size) == ("all-gather (gathered/all_gather)", 1, 8 * MIB)
    assert seconds == pytest.approx(8 * MIB / 360e9)
    assert set(by_kind("waits")) == {WAITS}


OFFLOADED = """\
%called (p: f32[256,1024]) -> f32[1024,1024] {{
  %p = f32[256,1024]{{1,0}} parameter(0)
  ROOT %g = f32[1024,1024]{{1,0}} all-gather(%p), channel_id=1, dimensions={{0}}
}}, execution_thread="sparsecore"

%work (p: f32[256,1024]) -> f32[256,1024] {{
  %p = f32[256,1024]{{1,0}} parameter(0)
  ROOT %t = f32[256,1024]{{1,0}} tanh(%p)
}}

ENTRY %main (p: f32[256,1024]) -> f32[1024,1024] {{
  %p = f32[256,1024]{{1,0}} parameter(0)
  %s = ((f32[256,1024]{{1,0}}), f32[1024,1024]{{1,0}}) call-start(%p), \
async_execution_thread="sparsecore", to_apply=%called
  {work}
  ROOT %d = f32[1024,1024]{{1,0}} call-done(%s)
}}
"""


@pytest.mark.parametrize(
    "work", ["", "%w = f32[256,1024]{1,0} fusion(%p), kind=kLoop, calls=%work"]
)
def test_a_collective_on_the_sparse_cores_waits_unless_work_is_beside_it(work):
    """Whether anything is computed between its start and its end, in libtpu's order."""
    waits = [each for each in audit(OFFLOADED.format(work=work), TPUS["v6e"]) if each.kind == WAITS]
    assert len(waits) == (not work)


def test_a_sum_of_bfloat16_is_found():
    """Rows that are added up in a bfloat16 table; in a float32 one nothing is said."""
    assert by_kind("narrow") == {NARROW: ("scatter in bf16 (summed/scatter-add)", 1, 0, 0.0)}
    assert by_kind("wide") == {}


def test_a_product_smaller_than_the_matrix_unit_is_found():
    """64 contracted numbers fill a quarter of the unit: three quarters of the time are padding."""
    needed = 2 * 4096 * 4096 * 64 / (918e12 * MATMUL["v6e"])
    (what, times, _, seconds) = by_kind("pads")[PADS]
    assert (what, times) == ("4.0 x of a matmul (product/dot_general)", 1)
    assert seconds == pytest.approx(3 * needed)


def test_a_product_that_is_computed_twice_is_found():
    needed = 2 * 1024**3 / (918e12 * MATMUL["v6e"])
    (what, times, _, seconds) = by_kind("twice")[TWICE]
    assert (what, times) == ("a matmul (rematted_computation/dot_general)", 1)
    assert seconds == pytest.approx(needed)


def test_the_parts_of_a_batch_are_matmuls_of_their_own():
    """64 of them that contract over 64 numbers, which libtpu writes as one convolution."""
    needed = 64 * 2 * 512 * 64 * 512 / (918e12 * MATMUL["v6e"])
    (what, times, _, seconds) = by_kind("batched")[PADS]
    assert (what, times) == ("4.0 x of a matmul (bmk,bkn->bmn/dot_general)", 1)
    assert seconds == pytest.approx(3 * needed)


SUM = """\
%add (a: bf16[], b: bf16[]) -> bf16[] {{
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %s = bf16[] add(%a, %b)
}}

ENTRY %main (p: bf16[1024,1024]) -> bf16[1024,1024] {{
  %p = bf16[1024,1024]{{1,0}} parameter(0)
  %s = bf16[1024,1024]{{1,0}} all-reduce-start(%p), channel_id=1, replica_groups={groups}, \
to_apply=%add
  %w = bf16[1024,1024]{{1,0}} fusion(%p), kind=kLoop, calls=%add
  ROOT %d = bf16[1024,1024]{{1,0}} all-reduce-done(%s)
}}
"""


@pytest.mark.parametrize(
    ("groups", "narrow"),
    [
        ("[1,512]<=[512]", True),
        ("{{" + ",".join(map(str, range(300))) + "}}", True),
        ("[4,128]<=[512]", False),
        ("{{0,1},{2,3}}", False),
    ],
)
def test_a_bfloat16_sum_over_many_devices_is_found(groups, narrow):
    """Beside work too, however the devices are written; up to 256 of them nothing is said."""
    flaws = audit(SUM.format(groups=groups), TPUS["v6e"])
    assert [each.kind for each in flaws] == [NARROW] * narrow


SENT = """\
ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {{
  %p = f32[1024,1024]{{1,0}} parameter(0)
  %t = token[] after-all()
  %s = (f32[1024,1024]{{1,0}}, u32[], token[]) send(%p, %t), channel_id=1, \
frontend_attributes={{_xla_megascale_transfer_type="ALL_REDUCE"}}
  {work}
  %d = token[] send-done(%s), channel_id=1
  ROOT %r = f32[1024,1024]{{1,0}} bitcast(%p)
}}
"""


@pytest.mark.parametrize(
    ("work", "kinds"),
    [("", [WAITS]), ("%w = f32[1024,1024]{1,0} convolution(%p, %p)", [])],
)
def test_a_transfer_between_slices_is_a_wait_unless_work_hides_it(work, kinds):
    """From its send to the end of it. A convolution that cannot be read makes no error."""
    flaws = audit(SENT.format(work=work), TPUS["v6e"])
    assert [each.kind for each in flaws if each.kind != KEEPS] == kinds


def test_copies_are_found():
    """A transpose of 16 MiB, read and written."""
    (_, times, size, seconds) = by_kind("copies")[COPIES]
    assert (times, size) == (1, 16 * MIB)
    assert seconds == pytest.approx(2 * 16 * MIB / 1600e9)


def test_an_argument_that_is_not_donated_is_found():
    (each,) = found()["keeps"]
    assert (each["kind"], each["what"], each["bytes"]) == (KEEPS, "x", 16 * MIB)
    assert found()["donates"] == []


def test_a_transfer_from_the_host_is_found():
    (_, times, size, seconds) = by_kind("host")[HOST]
    assert (times, size) == (1, 16 * MIB)
    assert seconds == pytest.approx(16 * MIB / 16e9)


def test_a_program_without_faults_has_no_flaws():
    assert found()["clean"] == []


def test_the_worst_comes_first_and_equal_events_are_one():
    """Made HLO: three copies of one name, and a larger one."""
    text = """\
HloModule m, input_output_alias={ {0}: (0, {}, may-alias) }

ENTRY %main (p: f32[2048,1024]) -> f32[2048,1024] {
  %p = f32[2048,1024]{1,0} parameter(0), metadata={op_name="p"}
  %a = f32[2048,1024]{0,1} copy(%p), metadata={op_name="jit(train_step)/a/transpose"}
  %b = f32[2048,1024]{1,0} copy(%a), metadata={op_name="jit(train_step)/a/transpose"}
  %c = f32[8192,1024]{1,0} copy(%b), metadata={op_name="jit(train_step)/b/transpose"}
  ROOT %d = f32[2048,1024]{1,0} copy(%c), metadata={op_name="jit(train_step)/a/transpose"}
}
"""
    wide, three = audit(text, TPUS["v6e"])
    assert (wide.what, wide.times, wide.bytes) == ("copy (b/transpose)", 1, 32 * MIB)
    assert (three.what, three.times, three.bytes) == ("copy (a/transpose)", 3, 24 * MIB)
    assert str(wide) == "  0.04 ms copies: copy (b/transpose), 1 a step, 32 MiB"
