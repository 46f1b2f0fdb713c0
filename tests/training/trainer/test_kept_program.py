"""A step that an earlier attempt compiled is loaded; a damaged or foreign one is not, and why."""

import dataclasses
import hashlib
import json
import logging
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from tests.faults.trainers import Trainers, finish
from tests.training import tiny
from training.config.job import KeptProgram
from training.trainer import kept_program
from training.trainer.kept_program import KeptPrograms
from training.trainer.run_context import RunContext
from training.trainer.trainer import train

JOB = dataclasses.replace(tiny.TRAIN, steps=3, evaluate_every=3, checkpoint_every=3)


@pytest.fixture
def no_shared_cache(monkeypatch):
    """The suite's own compilation cache is off, also in processes."""
    for thread in threading.enumerate():  # of a run that was refused while its step compiled
        if thread.name.startswith("compile"):
            thread.join()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()  # JAX 0.12 still reads what it has opened
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the tiny run's token shards."""
    root = tmp_path_factory.mktemp("data")
    tiny.write_data(str(root))
    return root


def run(data, directory, *programs):
    """A run from the beginning: (result, what it kept, times JAX loaded instead of compiling)."""
    kept, hits = [], []

    def listen(event, **_):
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    job = tiny.make_job(
        str(data),
        train=JOB,
        splits=(),
        checkpoint_directory=f"{directory}/checkpoints",
        program_directory=f"{directory}/programs",
        programs=programs,
    )
    jax.monitoring.register_event_listener(listen)
    try:
        result = train(job, RunContext(on_program=kept.append), devices=jax.devices()[:1])
    finally:
        jax.monitoring.unregister_event_listener(listen)
    return result, kept, len(hits)


def flip(path):
    """Damage one byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    """Leave half of it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "SHA-256": flip,
    "bytes, expected": truncate,
    "No such file": Path.unlink,
}
FOREIGN = {
    "jaxlib": "0.1.0",
    "CPU": "Model 3 (features 0)",
    "flags": "--xla_cpu_enable_fast_math=true",
    "devices": "512 x TPU v6e",
    "program": "0" * 64,
    "JAX's key": "jit_train_step-0",
}


@pytest.mark.slow
def test_a_second_run_loads_the_step_of_the_first(data, tmp_path, no_shared_cache, caplog):
    """JAX itself counts what was loaded; losses are equal to the last bit."""
    cold, (kept,), hits = run(data, tmp_path / "cold")
    assert (cold.compilations, hits) == (1, 0)
    warm, again, hits = run(data, tmp_path / "warm", kept)
    assert (warm.compilations, hits, again) == (0, 1, [])
    assert tiny.learned(tiny.rows(warm)) == tiny.learned(tiny.rows(cold))
    assert "ignored" not in caplog.text


def compile_small(directory, *programs):
    """A small program of its own: (its value at 3, whether it was loaded, what was kept)."""
    found = []
    kept = KeptPrograms(programs, str(directory), found.append)

    def small(x):
        return jnp.sin(x) * 2 + 1

    lowered = jax.jit(small).lower(jax.ShapeDtypeStruct((), jnp.float32))
    compiled, loaded = kept.compile(tiny.program(1), lowered)
    kept.close()
    return float(compiled(jnp.float32(3))), loaded, found


@pytest.mark.parametrize("reason", [*FOREIGN, *DAMAGE])
def test_a_damaged_or_foreign_program_is_ignored_with_a_reason(
    tmp_path, no_shared_cache, caplog, reason
):
    """It is compiled anew, kept anew, and gives the same number.

    A program of another step, such as another batch phase's, is no reason to warn.
    """
    caplog.set_level(logging.INFO)
    cold, loaded, (kept,) = compile_small(tmp_path / "cold")
    assert not loaded
    assert compile_small(tmp_path / "warm", kept) == (cold, True, [])
    if reason in FOREIGN:
        other = FOREIGN[reason]
        program = dataclasses.replace(kept, made_for={**kept.made_for, reason: other})
        reason = f"made for {reason} {other!r}"
    else:
        program = kept
        DAMAGE[reason](Path(kept.path))
    value, loaded, (again,) = compile_small(tmp_path / "again", program)
    assert (value, loaded) == (cold, False)
    (record,) = [each for each in caplog.records if "ignored" in each.getMessage()]
    assert reason in record.getMessage()
    of_this_step = not reason.startswith("made for program ")
    assert record.levelno == (logging.WARNING if of_this_step else logging.INFO)
    assert again.made_for == kept.made_for


def test_the_sound_one_of_several_is_loaded(tmp_path, no_shared_cache):
    """One of another program beside it is no obstacle."""
    _, _, (kept,) = compile_small(tmp_path / "cold")
    other = dataclasses.replace(kept, made_for={**kept.made_for, "program": "0" * 64})
    for programs in ((kept, other), (other, kept)):
        assert compile_small(tmp_path / "warm", *programs)[1:] == (True, [])


def test_what_xla_cannot_load_is_compiled(tmp_path, no_shared_cache, caplog):
    """Bytes that are as they were written, and no program."""
    cold, _, (kept,) = compile_small(tmp_path / "cold")
    wrong = b"no program"
    Path(kept.path).write_bytes(wrong)
    digest = hashlib.sha256(wrong).hexdigest()
    kept = dataclasses.replace(kept, size=len(wrong), sha256=digest)
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        assert compile_small(tmp_path / "again", kept)[:2] == (cold, False)
    assert "XLA cannot load it" in caplog.text


def test_a_cache_that_the_user_configured_is_left_alone(tmp_path, caplog):
    """JAX's own cache keeps the step, in the user's folder, and nothing else does."""
    caplog.set_level("INFO")
    assert jax.config.jax_compilation_cache_dir, "the suite has one"
    assert compile_small(tmp_path / "programs")[1:] == (False, [])
    assert not (tmp_path / "programs").exists()
    assert "kept in JAX's compilation cache" in caplog.text


def test_a_store_that_fails_costs_no_run(tmp_path, no_shared_cache, caplog):
    """A program that cannot be written is not kept, and the log says so."""
    (tmp_path / "programs").write_text("a file where a folder should be")
    assert compile_small(tmp_path / "programs")[1:] == (False, [])
    assert "not kept" in caplog.text


@pytest.mark.slow
def test_a_killed_run_resumes_without_compiling(data, tmp_path, no_shared_cache):
    """Every process of a new gang of two loads the step, and the run ends."""
    processes = 2
    arguments = ("--steps", "10", "--every", "2", "--pause", "0.2", "--split", str(processes))
    gang = {"processes": processes}
    with Trainers(data, tmp_path / "killed", *arguments, **gang) as trainers:
        trainers.wait_for(lambda line: line == "program kept")
        trainers.wait_for_step(6)
        for index in range(processes):
            trainers.kill(index)
    got = finish(data, tmp_path / "killed", *arguments, **gang)
    reports = [tmp_path / "killed" / f"report-{index}.json" for index in range(processes)]
    assert [json.loads(path.read_text())["compilations"] for path in reports] == [0] * processes
    assert [row["step"] for row in got["rows"]] == list(range(1, 11))
    journals = [json.loads(path.read_text()) for path in (tmp_path / "killed/journal").iterdir()]
    assert sorted((each["loaded"], each["outcome"]) for each in journals) == [
        (False, "running"),
        (True, "finished"),
    ]


def test_conditions_cover_what_jax_puts_into_its_key():
    """Two programs, and one program on other devices, are told apart."""
    one, two = tiny.program(1), tiny.program(2)
    first = kept_program.conditions(one, "a")
    assert kept_program.different(first, kept_program.conditions(one, "a")) is None
    assert "program" in str(kept_program.different(first, kept_program.conditions(one, "b")))
    assert "devices" in str(kept_program.different(first, kept_program.conditions(two, "a")))


def test_a_kept_program_is_plain_data():
    """It goes through JSON, as a ledger record holds it."""
    kept = KeptProgram(path="p", size=1, sha256="0", made_for={"jax": "1"})
    assert KeptProgram(**json.loads(json.dumps(dataclasses.asdict(kept)))) == kept
