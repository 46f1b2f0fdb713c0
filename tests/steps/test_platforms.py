"""Which platforms JAX is to look for, by what the machine has."""

from __future__ import annotations

import os
from contextlib import nullcontext
from fnmatch import fnmatch

import jax
import pytest

from pipeline import GangProcess, pod
from pipeline.accelerators import GPUS
from steps import platforms
from steps.gang import joined
from steps.platforms import GPU_SHARE, devices_of


@pytest.fixture
def machine(monkeypatch):
    """Linux and no variable set; called with device files and variables, gives JAX_PLATFORMS."""
    monkeypatch.setattr(platforms.sys, "platform", "linux")
    for name in ("JAX_PLATFORMS", "TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE"):
        monkeypatch.delenv(name, raising=False)

    def choose(*devices, **variables):
        def matches(pattern):
            return [path for path in devices if fnmatch(path, pattern)]

        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(platforms, "glob", matches)
        platforms.use_cpu_alone()
        return os.environ.get("JAX_PLATFORMS")

    return choose


def test_without_accelerators_jax_looks_for_none(machine):
    """On Linux; libtpu would write its errors otherwise."""
    assert machine("/dev/null", "/dev/dri/card0") == "cpu"


@pytest.mark.parametrize(
    "device", ["/dev/accel0", "/dev/vfio/0", "/dev/nvidia0", "/dev/kfd", "/dev/dri/renderD128"]
)
def test_with_an_accelerator_jax_chooses(machine, device):
    """A TPU by either of its drivers, or a GPU."""
    assert machine("/dev/null", device) is None


@pytest.mark.parametrize("name", ["TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE"])
def test_a_tpu_by_its_variables_needs_no_device(machine, name):
    """As in a container that is not given its devices yet."""
    assert machine(**{name: "0"}) is None


@pytest.mark.parametrize("devices", [(), ("/dev/nvidia0",)])
def test_what_the_user_has_set_stays(machine, devices):
    """With accelerators and without."""
    assert machine(*devices, JAX_PLATFORMS="tpu,cpu") == "tpu,cpu"


def test_a_jax_that_was_imported_before_looks_for_none_either(machine):
    """It has read the variable already; what it was told itself stays."""
    before = jax.config.jax_platforms
    try:
        for told, wanted in ((None, "cpu"), ("tpu,cpu", "tpu,cpu")):
            jax.config.update("jax_platforms", told)
            machine("/dev/null")
            assert jax.config.jax_platforms == wanted
    finally:
        jax.config.update("jax_platforms", before)


def test_a_gang_may_use_most_of_a_gpus_memory(monkeypatch):
    """JAX preallocates the share that plans count with, unless the user has set another."""
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setattr("training.sharding.distributed.joined", lambda *_: nullcontext())
    monkeypatch.delenv(name, raising=False)
    for given in (None, "0.5"):
        if given is not None:
            monkeypatch.setenv(name, given)
        with joined(GangProcess()):
            assert os.environ[name] == (given or str(GPU_SHARE))
    limit = devices_of(pod("8xh100")).limit
    assert limit == GPU_SHARE * GPUS["h100"].memory
