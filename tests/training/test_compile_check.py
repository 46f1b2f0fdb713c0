"""The TPU compiler's verdict from a process of its own, and from disk the second time."""

import dataclasses
import importlib.util

import pytest

from models.shape.config import TransformerConfig
from pipeline import pod
from pipeline.errors import InputError
from steps.training.plan.declared_run import DeclaredRun
from steps.training.plan.facts import compiled_facts
from training import preflight
from training.config import OptimizerConfig, TrainConfig

SMALL = TransformerConfig(
    vocab_size=256, layers=1, embed=128, heads=1, kv_heads=1, head_size=128, mlp=128
)
TRAIN = TrainConfig(
    steps=10, batch_size=1 << 17, sequence_length=128, remat="matmuls", loss_chunks=1
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_compiler_refuses_and_its_answer_is_kept(tmp_path, monkeypatch):
    """A step that needs more than the 31.25 GiB of a v6e; the second look starts no process."""
    monkeypatch.setenv("PONENTE_CACHE", str(tmp_path))
    optimizer = OptimizerConfig(learning_rate=1e-3)
    run = DeclaredRun(
        SMALL, optimizer, TRAIN, pod("v6e-1"), 10, (), 1, exact=True, done=0, whole=TRAIN, epochs=()
    )
    shown = []
    first = compiled_facts(run, shown.append)
    assert shown[0].startswith("compiling for v6e-1 (--no-compile skips it); the first one may")
    compiled = first.data["compiled"]
    assert not compiled["fits"]
    assert compiled["limit_gib"] == pytest.approx(31.25, abs=0.011)
    # The logits alone, float32 and their gradient in bfloat16.
    assert compiled["temporaries_gib"] > TRAIN.batch_size * 128 * 256 * 6 / 2**30 / 2
    assert "does not fit v6e-1 by the TPU compiler" in first.refusal
    assert "temporaries" in first.refusal
    assert len(first.refusal.splitlines()) == 5

    def refuse(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(preflight.subprocess, "Popen", refuse)
    assert compiled_facts(run, shown.append).data == first.data
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--another")
    with pytest.raises(AssertionError, match="a process was started"):
        compiled_facts(run, shown.append)
    seconds = f"{compiled['compile_seconds']:.0f}"
    assert shown[-1].endswith(f"here 1 such took {seconds} to {seconds} s")


@pytest.mark.slow
def test_what_the_compiler_cannot_take_is_an_input_error(tmp_path, monkeypatch):
    """A slice that does not exist: the error of the process."""
    monkeypatch.setenv("PONENTE_CACHE", str(tmp_path))
    train = dataclasses.replace(TRAIN, batch_size=1)
    with pytest.raises(InputError, match=r"compiling for v6e-3 failed: .*slice: expected"):
        preflight.check(SMALL, OptimizerConfig(learning_rate=1e-3), train, "v6e-3", str)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import jax; jax.jit(lambda x: {}['the reason'])(1.0)", "KeyError: 'the reason'"),
        ("raise ValueError('first line\\n  second')", "ValueError: first line"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9 ended its process"),
        ("import sys; sys.exit('said by itself')", "said by itself"),
        ("import sys; sys.exit(1)", "no message"),
    ],
)
def test_the_reason_of_a_failure_is_the_error(monkeypatch, code, reason):
    """Not JAX's notice that it has removed its frames from the traceback of a traced function."""
    start = preflight.subprocess.Popen

    def fails(command, **options):
        return start([command[0], "-c", f"import sys; sys.stdin.read(); {code}"], **options)

    monkeypatch.setattr(preflight.subprocess, "Popen", fails)
    with pytest.raises(InputError, match=f"^compiling for v6e-8 failed: {reason}"):
        preflight._compile("{}", "v6e-8", str)
