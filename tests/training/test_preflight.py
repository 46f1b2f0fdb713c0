"""What a program needs, from the compiler of its own devices."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from models.shape.config import TransformerConfig
from pipeline import pod
from pipeline.accelerators import TPUS
from pipeline.errors import InputError
from steps.platforms import devices_of
from steps.training.plan.declared_run import DeclaredRun
from steps.training.plan.facts import compiled_facts
from tests.tpu_compiler import needs_libtpu, printed
from tests.training import tiny
from training import preflight as module
from training.config import OptimizerConfig, TrainConfig
from training.cost.resolved_run import resolve_run
from training.preflight import argument_bytes, describe, parse_refusal, preflight

GIB = 2**30


def test_the_compilers_messages():
    """The two ways in which the TPU compiler refuses a program for its memory."""
    found = parse_refusal(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (73.50G) exceeds available HBM (31.25G).",
        GIB,
    )
    assert found == (73.5 * GIB, 31.25 * GIB)
    found = parse_refusal(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.11G of 512.00M hbm. "
        "Exceeded hbm capacity by 17.61G.",
        GIB,
    )
    assert found == ((18.11 - 1) * GIB, GIB / 2)


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack",
        "INTERNAL: HLO temporaries (73.50G) exceeds available HBM (31.25G)",
    ],
)
def test_other_errors_propagate(message, monkeypatch):
    """Too little vector memory is a mistake in a kernel's block sizes and not in the batch."""

    def fail():
        raise jax.errors.JaxRuntimeError(message)

    program = tiny.program(1)
    monkeypatch.setattr(type(program), "lower", lambda _: SimpleNamespace(compile=fail))
    assert parse_refusal(message, 0) is None
    with pytest.raises(jax.errors.JaxRuntimeError, match=message[:20]):
        preflight(program)


@pytest.mark.slow
def test_a_program_of_the_cpu():
    """It fits, and its arguments are the state and the batch."""
    program = tiny.program(4)
    found, compiled = preflight(program)
    assert compiled is not None
    assert found.fits
    assert found.limit_gib is None
    assert found.arguments_gib * GIB == argument_bytes(program)
    assert found.need_gib >= found.arguments_gib + found.temporaries_gib
    assert found.peak_gib > 0


@pytest.mark.parametrize("name", ["v6e-3", "cpu-2x2", "local", "v6e:", "v6e:0x4", "4x4"])
def test_unknown_slices_are_refused(name):
    with pytest.raises(InputError, match="slice: expected"):
        describe(name)


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'ponente\[tpu\]'"):
        describe("v6e-16")


SCRIPT = """
import dataclasses, json, sys
from training.preflight import describe
names = {name: describe(name) for name in ("v6e-1", "v6e-4", "v6e-8", "v6e-16", "v6e:2x2")}
from models.shape.config import TransformerConfig
from training.config import OptimizerConfig, TrainConfig
from tests.training.hlo import cost
from training.preflight import preflight
from training.step.program import build_program

model = TransformerConfig(
    vocab_size=1024, layers=2, embed=256, heads=2, kv_heads=1, head_size=128, mlp=512
)
def program():
    train = TrainConfig(
        steps=10,
        batch_size=8,
        sequence_length=512,
        remat="full",
        loss_chunks=1,
        microbatches=2,
    )
    return build_program(model, OptimizerConfig(), train, names["v6e-1"], eos_id=0)

import jax
from pipeline.accelerators import TPUS
from training.preflight import parse_refusal

def limit(tpu):
    # From the refusal of a program that needs twice as much as there is.
    one = jax.sharding.SingleDeviceSharding(describe(min(tpu.names, key=tpu.names.get))[0])
    size = (int(tpu.memory) // 1024, 1024)
    array = jax.ShapeDtypeStruct(size, "bfloat16", sharding=one)
    try:
        jax.jit(lambda x: (x + 1, x * 2), out_shardings=one).lower(array).compile()
    except jax.errors.JaxRuntimeError as error:
        return parse_refusal(str(error), 0)[1]

verdict, compiled = preflight(program())
print(json.dumps({
    "limits": {name: limit(tpu) for name, tpu in TPUS.items()},
    "devices": {name: len(devices) for name, devices in names.items()},
    "hosts": {name: devices[-1].process_index + 1 for name, devices in names.items()},
    "parameters": model.parameter_count,
    "small": dataclasses.asdict(verdict),
    "cycles": cost(compiled.as_text()).cycles,
}))
"""


@pytest.mark.slow
@needs_libtpu
def test_the_tpu_compiler():
    """A program that fits on a chip; tests/bench/test_hbm.py has one that does not."""
    found = printed("-c", SCRIPT)[-1]
    assert found["devices"] == {"v6e-1": 1, "v6e-4": 4, "v6e-8": 8, "v6e-16": 16, "v6e:2x2": 4}
    assert found["hosts"] == {"v6e-1": 1, "v6e-4": 1, "v6e-8": 1, "v6e-16": 4, "v6e:2x2": 1}
    small = found["small"]
    assert small["fits"]
    # The compiler says it to two decimals, and reserves a little more since libtpu 0.0.50.
    assert small["limit_gib"] == 31.25
    usable = {name: tpu.usable for name, tpu in TPUS.items()}
    assert found["limits"] == pytest.approx(usable, abs=0.011 * GIB)
    state = 12 * found["parameters"] / GIB
    assert state < small["arguments_gib"] < 1.1 * state + 0.01
    # The peak has the program's own code in it, which for two layers is about as large.
    assert small["arguments_gib"] < small["peak_gib"] < small["need_gib"] + 0.1 < 1
    assert found["cycles"] > 0
    twice = [each["what"] for each in small["flaws"] if each["kind"] == "computes twice"]
    assert any(what.startswith("a kernel") for what in twice)  # the blocks are recomputed
    assert small["versions"]["libtpu"] is not None


SMALL = TransformerConfig(
    vocab_size=256, layers=1, embed=128, heads=1, kv_heads=1, head_size=128, mlp=128
)
TRAIN = TrainConfig(
    steps=10, batch_size=1 << 17, sequence_length=128, remat="matmuls", loss_chunks=1
)


OPTIMIZER = OptimizerConfig(learning_rate=1e-3)


def declared(train):
    """A run of ten steps on one v6e."""
    known = {"exact": True, "done": 0, "whole": train, "epochs": ()}
    return DeclaredRun(SMALL, OPTIMIZER, train, pod("v6e-1"), 10, 1, **known)


@pytest.mark.slow
@needs_libtpu
def test_the_compiler_refuses_and_its_answer_is_kept(tmp_path, monkeypatch):
    """A step that needs more than the 31.25 GiB of a v6e; the second look starts no process."""
    monkeypatch.setenv("PONENTE_CACHE", str(tmp_path))
    run, shown = declared(TRAIN), []
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

    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    assert compiled_facts(run, shown.append).data == first.data
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--another")
    with pytest.raises(AssertionError, match="a process was started"):
        compiled_facts(run, shown.append)
    seconds = f"{compiled['compile_seconds']:.0f}"
    assert shown[-1].endswith(f"here 1 such took {seconds} to {seconds} s")


@pytest.mark.parametrize(
    ("optimizer", "average"),
    [
        ({"warmup": 2000}, 0),
        ({"schedule": "wsd", "warmup": 10, "decay": 3000}, 0),
        ({}, 1500),
    ],
)
def test_lengths_in_steps_fit_a_run_whose_steps_are_not_known(monkeypatch, optimizer, average):
    """As with a budget of epochs of sequences that are not built yet."""
    train = dataclasses.replace(TRAIN, steps=0, average_last=average)
    given = OptimizerConfig(**optimizer)
    run = dataclasses.replace(declared(train), steps=None, exact=False, optimizer=given)
    asked = []

    def check(model, optimizer, train, name, show):
        asked.append(resolve_run(model, optimizer, train, devices_of(pod(name))))
        sizes = dict.fromkeys(("limit", "need", "peak", "arguments", "temporaries"), 1.0)
        found = {f"{name}_gib": size for name, size in sizes.items()}
        rest = {"host_gib": 0.0, "versions": {"libtpu": "1"}}
        return {**found, "fits": True, "compile_seconds": 1.0, "flaws": [], **rest}

    monkeypatch.setattr(module, "check", check)
    assert compiled_facts(run, str).data["compiled"]["fits"]
    assert len(asked) == 1


@pytest.mark.slow
@needs_libtpu
def test_what_fits_is_audited(tmp_path, monkeypatch):
    """The flaws as lines, worst first, with what cures each kind, and as JSON."""
    monkeypatch.setenv("PONENTE_CACHE", str(tmp_path))
    run = declared(dataclasses.replace(TRAIN, batch_size=256, remat="full"))
    found = compiled_facts(run, str)
    flaws = found.data["compiled"]["flaws"]
    assert [each["seconds"] for each in flaws] == sorted(
        (each["seconds"] for each in flaws), reverse=True
    )
    memory, head, *lines = found.lines
    assert "fits; arguments" in memory
    count = "flaws" if len(flaws) <= 8 else f"8 of {len(flaws)} flaws"
    assert head.startswith(f"program     {count} in the compiled step, worst first")
    assert lines[0].split(": ")[0].endswith(flaws[0]["kind"])
    cures = [line for line in lines if line.startswith("  against ")]
    shown = {each["kind"] for each in flaws[:8]}
    assert len(cures) == len(shown)


@pytest.mark.slow
def test_what_the_compiler_cannot_take_is_an_input_error(tmp_path, monkeypatch):
    """A slice that does not exist: the error of the process."""
    monkeypatch.setenv("PONENTE_CACHE", str(tmp_path))
    train = dataclasses.replace(TRAIN, batch_size=1)
    with pytest.raises(InputError, match=r"compiling for v6e-3 failed: .*slice: expected"):
        module.check(SMALL, OPTIMIZER, train, "v6e-3", str)


@pytest.mark.slow
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
    start = module.subprocess.Popen

    def fails(command, **options):
        return start([command[0], "-c", f"import sys; sys.stdin.read(); {code}"], **options)

    monkeypatch.setattr(module.subprocess, "Popen", fails)
    with pytest.raises(InputError, match=f"^compiling for v6e-8 failed: {reason}"):
        module._compile("{}", "v6e-8", str)
