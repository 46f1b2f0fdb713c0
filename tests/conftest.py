"""Settings of the whole suite: the CPU, eight virtual devices, strict ranks, no network."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests import compilation

# Read when jax starts, so they are set before any test module can import it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", compilation.xla_flags(devices=8))
compilation.share_programs()
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A plan of a TPU run asks the compiler for minutes: training/test_preflight.py does so once.
os.environ.setdefault("PONENTE_NO_COMPILE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's workers are nice to everything else, and so to the rest of this suite, for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.pop("PONENTE_PREFIX", None)
os.environ.pop("RAY_ADDRESS", None)

# How long an example takes says more of the machine's other work than of the code.
settings.register_profile("suite", deadline=None, max_examples=50)
settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import without the garbage collector, which goes through all modules again and again.

    Afterwards it looks only at what the tests make.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


MOST_MAPS = 65_530  # of a process, as Linux has it by default (vm.max_map_count)


def memory_maps() -> int:
    """Memory maps of this process; 0 where that is not known."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def drop_programs(most: int = MOST_MAPS // 3) -> None:
    """Let go of all compiled programs if this process has more than `most` memory maps.

    Every program of XLA's for the CPU holds three maps or more for as long as a cache of JAX's has
    it. A session compiles more than twenty thousand; where the maps run out, the compiler says
    "Cannot allocate memory", and writing that program to the compilation cache is a segmentation
    fault.
    """
    if "jax" not in sys.modules or memory_maps() <= most:
        return
    import jax

    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """After each module: tests of the next one share few programs with it."""
    yield
    drop_programs()


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run the `ponente` command in this process; returns (status, stdout, stderr).

    With `more` it has those verbs beside the engine's, else the library's.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the command adds

    def run(*words, more=None):
        from pipeline import cli
        from steps.cli import command

        monkeypatch.setattr(sys, "argv", ["ponente", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            command() if more is None else cli.command(more)
        return stop.value.code or 0, *capsys.readouterr()

    return run
