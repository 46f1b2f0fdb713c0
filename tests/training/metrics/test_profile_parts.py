"""Kinds of work in compiled programs, and their seconds in traces."""

from __future__ import annotations

import dataclasses
import gzip
import json

import jax
import pytest

from tests.training import tiny
from training.cost.step_time import KINDS
from training.metrics import profile_parts
from training.metrics.profile_parts import PARTS, kinds, write_parts
from training.metrics.profiler import Profiler

BODY = "jvp(layers)/while/body/"


def line(name, operation, of, *, root=False):
    """An instruction, of the operation `of` in the traced program."""
    metadata = f'metadata={{op_name="jit(s)/{of}"}}'
    return f"  {'ROOT ' * root}%{name} = f32[8,8]{{1,0}} {operation}, {metadata}"


PROGRAM = "\n".join(
    [
        "HloModule jit_train_step, is_scheduled=true",
        "",
        "%fused (p: f32[8,8]) -> f32[8,8] {",
        "  %p = f32[8,8]{1,0} parameter(0)",
        line("dot.1", "dot(%p, %p), lhs_contracting_dims={1}", BODY + "dot_general"),
        line("add.1", "add(%dot.1, %p)", BODY + "add", root=True),
        "}",
        "",
        "ENTRY %main (a: f32[8,8]) -> f32[8,8] {",
        "  %a = f32[8,8]{1,0} parameter(0)",
        line("up", "fusion(%a), kind=kOutput, calls=%fused", BODY + "add"),
        line("scores", "dot(%up, %up)", f"transpose({BODY[:11]})/while/body/attention/dot_general"),
        line("logits", "dot(%up, %up)", "transpose(jvp())/dot_general"),
        line("norm", "multiply(%logits, %up)", BODY + "mul"),
        line("sum", "all-reduce(%norm)", "transpose(jvp(layers))/reduce"),
        line("muon", "dot(%sum, %sum)", "dot_general"),
        line("adam", "add(%muon, %a)", "add", root=True),
        "}",
        "",
    ]
)


def test_an_operation_has_the_kind_of_what_it_does_and_where():
    """A fusion with a matmul is a matmul, whatever its last operation is."""
    found = kinds(PROGRAM)
    want = {
        "up": "matmul",
        "scores": "attention",
        "logits": "head",
        "norm": "elementwise",
        "sum": "communication",
        "muon": "update",
        "adam": "update",
    }
    assert {name: found[name] for name in want} == want


def test_seconds_are_of_one_step_and_one_device(tmp_path, monkeypatch):
    """By hand, of two devices and three steps; what is no operation of the program is left out."""
    (tmp_path / "one.xplane.pb").touch()
    events = [(d, name, 0.6) for d in "ab" for name in ("up", "logits", "logits", "memcpy")]
    monkeypatch.setattr(profile_parts, "operations", lambda trace: iter(events))
    found = write_parts(tmp_path, PROGRAM, 3)
    assert found == pytest.approx({"head": 0.4, "matmul": 0.2})
    assert json.loads((tmp_path / PARTS).read_text()) == found


@pytest.mark.slow
def test_a_profiled_train_step_has_all_its_kinds(tmp_path):
    """Of a real step on the CPU; together they are what Perfetto shows of its operations."""
    program = tiny.program(model=dataclasses.replace(tiny.MODEL, vocab_multiple=2048))
    given = program.abstract, program.abstract_batch()
    compiled = program.step.lower(*given).compile()
    state, batch = jax.tree.map(
        lambda each: jax.device_put(jax.numpy.zeros(each.shape, each.dtype), each.sharding), given
    )
    profiler = Profiler(str(tmp_path), (2, 2), poll=60)
    profiler.program = compiled.as_text
    for step in range(1, 5):
        if profiler.due(step):
            profiler.before(step)
        state, _ = jax.block_until_ready(compiled(state, batch))
    profiler.close()
    folder = tmp_path / "traces" / "step-00000002"
    found = json.loads((folder / PARTS).read_text())
    assert set(found) == {"matmul", "head", "attention", "elementwise", "update"} < set(KINDS)
    (trace,) = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    shown = 0.0
    for event in events:
        name = event.get("args", {}).get("hlo_op", "")
        if name and not name.startswith(("while", "call", "conditional")):
            shown += event["dur"] / 1e6 / 2
    assert sum(found.values()) == pytest.approx(shown, rel=1e-3)
