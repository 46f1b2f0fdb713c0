"""A step's intermediates stay with the process while a CPU trains, and go back afterwards."""

import os
import subprocess
import sys

import pytest

PAGES = 4 * 4200**2 // 4096
"""Of one of the arrays that `SCRIPT` computes with, which is larger than a thread's own heap."""

SCRIPT = """
import resource, sys
from training.sharding.distributed import joined
from training.trainer.cpu_memory import kept
import jax, jax.numpy as jnp

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        step(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

with joined(None):
    x = jnp.ones((4200, 4200))
    step = jax.jit(lambda x: (jnp.sin(x) @ x[:, :8]).sum())
    step(x).block_until_ready()
    with kept(sys.argv[1]):
        new = min(faults(5) for _ in range(3))  # the heap has grown to its size by then
        before = resident()
    print(new, before - resident())
"""


def faults(platform: str) -> tuple[int, int]:
    """New pages that five steps need inside `kept`, and how many are given back at its end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, platform],
        # Without the suite's virtual devices: JAX 0.12 has a thread for each of several.
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    new, given_back = done.stdout.split()
    return int(new), int(given_back)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_intermediates_are_not_cleared_again():
    """Five steps: few new pages on CPUs, all of them new elsewhere."""
    if faults("tpu")[0] < 5 * PAGES:
        pytest.skip("the kernel maps huge pages for every block, or this is not glibc")
    new, given_back = faults("cpu")
    assert new < 2 * PAGES
    assert given_back >= PAGES
