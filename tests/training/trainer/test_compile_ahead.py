"""A program that an earlier attempt compiled is loaded; a damaged one is compiled again."""

import dataclasses
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from tests.faults.trainers import SPLIT, Trainers, finish
from tests.tpu_compiler import needs_libtpu, printed
from tests.training import tiny
from training.trainer.compile_ahead import cache_in

JOB = dataclasses.replace(tiny.TRAIN, steps=3, evaluate_every=3, checkpoint_every=3)
LEAST = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def no_shared_cache(monkeypatch):
    """The suite's own compilation cache is off, also in processes, and JAX keeps every program."""
    for thread in threading.enumerate():  # of a run that was refused while its step compiled
        if thread.name.startswith("compile"):
            thread.join()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    changed = {"jax_compilation_cache_dir": None, LEAST: 0.0}
    before = {name: getattr(jax.config, name) for name in changed}
    for settings in (changed, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        reset_cache()  # JAX 0.12 still reads what it has opened
        if settings is changed:
            yield


@pytest.mark.slow
def test_a_second_attempt_loads_the_step_of_the_first(data, tmp_path, no_shared_cache):
    """And nothing else differs: losses are equal to the last bit."""
    job = tiny.make_job(
        data, train=JOB, splits=(), shared_directory=str(tmp_path / "shared" / "b1")
    )
    runs = [tiny.run(job, checkpoint_directory=str(tmp_path / name)) for name in ("cold", "warm")]
    assert [run.compilations for run in runs] == [1, 0]
    cold, warm = (tiny.learned(tiny.rows(run)) for run in runs)
    assert warm == cold


def compile_small(directory):
    """A small program of its own: its value at 3, and the keys of what was loaded."""

    def small(x):
        return jnp.sin(x) * 2 + 1

    with cache_in(str(directory)) as found:
        compiled = jax.jit(small).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()
    return float(compiled(jnp.float32(3))), found


def flip(path):
    """Damage one byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    """Leave half of it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_entry_is_compiled_again_and_replaced(tmp_path, no_shared_cache, damage):
    """With the same number."""
    value, found = compile_small(tmp_path)
    assert found == []
    (entry,) = (path for path in tmp_path.rglob("jit_small-*"))
    assert compile_small(tmp_path) == (value, [entry.name])
    damage(entry)
    assert compile_small(tmp_path) == (value, [])
    assert compile_small(tmp_path) == (value, [entry.name])


def test_a_cache_that_the_user_configured_is_left_alone(tmp_path):
    """JAX keeps the program in the user's folder, and nothing else does."""
    assert jax.config.jax_compilation_cache_dir, "the suite has one"
    compile_small(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache")
def test_a_store_that_fails_costs_no_run(tmp_path, no_shared_cache):
    """A program that cannot be kept is compiled."""
    (tmp_path / "shared").write_text("a file where a folder should be")
    assert compile_small(tmp_path / "shared")[1] == []


@pytest.mark.slow
def test_a_killed_run_resumes_without_compiling(data, tmp_path, no_shared_cache):
    """Process 0 of a new gang of two loads the step, and the run ends."""
    arguments = ("--steps", "10", "--every", "2", "--pause", "0.2", *SPLIT)
    with Trainers(data, tmp_path / "killed", *arguments, processes=2) as trainers:
        trainers.wait_for_step(6)
        for index in range(2):
            trainers.kill(index)
    got = finish(data, tmp_path / "killed", *arguments, processes=2)
    assert got["compilations"] == 0
    assert [row["step"] for row in got["rows"]] == list(range(1, 11))


LOWER = """
import hashlib, json
from training.preflight import describe
devices = describe("v6e-4")
from models.attention import splash
from models.jax_numerics import fixed_numerics
from models.shape.config import TransformerConfig
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.step.program import build_program

model = TransformerConfig(
    vocab_size=512, layers=2, embed=128, heads=1, kv_heads=1, head_size=128, mlp=256
)
train = TrainConfig(
    steps=9, batch_size=4, sequence_length=256, parallel=Parallelism(sharding="fsdp")
)
with fixed_numerics():
    program = build_program(model, OptimizerConfig(), train, devices, eos_id=0)
    module = program.lower().compiler_ir().operation
text = module.get_asm(enable_debug_info=True)
assert "tpu_custom_call" in text, "the kernel is in it"
print(json.dumps({"lies": splash.__file__, "text": hashlib.sha256(text.encode()).hexdigest()}))
"""


@pytest.mark.slow
@needs_libtpu
def test_a_step_for_tpus_does_not_know_where_its_code_lies(tmp_path):
    """Here, and in another folder on other lines: one text with its places, so one key of JAX's
    cache. A Ray session unpacks the code into a folder of its own."""
    here, there = Path(__file__).parents[3], tmp_path / "session" / "unpacked"
    for name in ("data", "models", "pipeline", "training"):
        shutil.copytree(here / name, there / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in there.rglob("*.py"):
        text = path.read_text()
        later = text.replace("from __future__", "# another line\n# and one\nfrom __future__", 1)
        path.write_text(later)
    first, second = (
        printed("-P", "-c", LOWER, PYTHONPATH=str(folder))[-1] for folder in (here, there)
    )
    assert first["lies"].startswith(str(here))
    assert second["lies"].startswith(str(there))
    assert first["text"] == second["text"]
