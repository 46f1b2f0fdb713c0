"""A step's intermediates stay with the process while a CPU trains, and go back afterwards."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from training.trainer import cpu_malloc

PAGES = 4 * 4200**2 // 4096
"""Of one of the arrays that `SCRIPT` computes with, which is larger than a thread's own heap."""

SCRIPT = """
import resource, sys, time
from training.trainer.cpu_malloc import kept, share_one_heap
if "shared" in sys.argv:
    share_one_heap()

import jax, jax.numpy as jnp
x = jnp.ones((4200, 4200))
step = jax.jit(lambda x: (jnp.sin(x) @ x[:, :8]).sum())
step(x).block_until_ready()

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        step(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

with kept(sys.argv[1]):
    new = min(faults(5) for _ in range(3))  # the heap has grown to its size by then
    time.sleep(0.5)  # the last step's intermediates are freed by a thread
    before = resident()
print(new, before - resident())
"""


def faults(*arguments: str, **environment: str) -> tuple[int, int]:
    """New pages that five steps need inside `kept`, and how many are given back at its end."""
    inherited = {name: value for name, value in os.environ.items() if name != cpu_malloc.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    new, given_back = done.stdout.split()
    return int(new), int(given_back)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_intermediates_are_not_cleared_again():
    """Five steps of XLA's own threads: hardly a new page on CPUs, all of them new elsewhere.

    Now and then a step begins before a thread freed the last one's array: that makes one new.
    """
    if faults("tpu", "shared")[0] < 5 * PAGES:
        pytest.skip("the kernel maps huge pages for every block, or this is not glibc")
    for new, given_back in (faults("cpu", "shared"), faults("cpu", MALLOC_ARENA_MAX="1")):
        assert new < 2 * PAGES
        assert given_back >= PAGES


@pytest.mark.parametrize(
    ("platforms", "file", "said", "shared"),
    [
        ("cpu", "accel0", None, True),
        ("", "accel0", None, False),
        ("", "vfio/7", None, False),
        ("", "null", None, True),
        ("", "null", "0", False),
    ],
)
def test_only_a_process_that_computes_on_cpus_shares_one_heap(
    monkeypatch, tmp_path: Path, platforms: str, file: str, said: str | None, shared: bool
):
    """Device files say what a machine has; the user's word comes before them."""
    monkeypatch.delenv(cpu_malloc.VARIABLE)
    if said is not None:
        monkeypatch.setenv(cpu_malloc.VARIABLE, said)
    told = []
    library = type("Library", (), {"mallopt": lambda _, *setting: told.append(setting)})()
    monkeypatch.setattr(cpu_malloc, "_glibc", lambda: library)
    config = SimpleNamespace(jax_platforms=platforms)
    monkeypatch.setattr(cpu_malloc, "jax", SimpleNamespace(config=config))
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    cpu_malloc.share_one_heap(tmp_path)
    assert told == ([(cpu_malloc.ARENA_MAX, 1)] if shared else [])
