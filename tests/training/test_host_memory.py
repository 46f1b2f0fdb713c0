"""Freed memory stays, and goes back afterwards."""

import resource
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from training.host_memory import kept

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        b'x' * (48 * 2**20 + times)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with kept(sys.argv[1]):
    faults(2)
    inside = faults(5)
print(inside, faults(5))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_blocks_are_not_cleared_again():
    """48 MiB filled five times: no new pages inside, new ones each time outside and off CPUs."""
    pages = 48 * 2**20 // resource.getpagesize()
    found = {}
    for platform in ("cpu", "tpu"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, platform], capture_output=True, text=True, check=True
        )
        found[platform] = [int(word) for word in done.stdout.split()]
    if found["tpu"][0] < pages:
        pytest.skip("the kernel maps huge pages for every block, or this is not glibc")
    assert found["cpu"][0] < pages
    assert found["cpu"][1] >= pages
