"""The doctor on the machine: Python, packages, devices, limits."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import pytest

from pipeline.doctor import machine


def _machine(root: Path, *pci: tuple[str, str], devices: tuple[str, ...] = ()) -> str:
    for number, (vendor, device) in enumerate(pci):
        folder = root / f"sys/bus/pci/devices/{number}"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    (root / "dev").mkdir(parents=True, exist_ok=True)
    for name in devices:
        (root / "dev" / name).touch()
    return str(root)


TOLD = {"platform": "cpu", "kind": "cpu", "count": 8, "here": 8, "memory": None, "jax": "0.10.2"}


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fail")],
)
def test_python_versions(version, status, monkeypatch):
    """3.11 to 3.13."""
    monkeypatch.setattr(sys, "version_info", (*version, 1, "final", 0))
    assert machine.python("").status == status


@pytest.mark.parametrize(
    ("lines", "status", "says"),
    [
        (["pytest>=1", "fsspec"], "ok", "2 packages"),
        (["pytest<1", "fsspec"], "fail", "pytest"),
        (["no-such-package>=1"], "fail", "no-such-package is missing (>=1)"),
        (["no-such-package; extra == 'tpu'", "fsspec"], "ok", "1 packages"),
        (["pytest<1; extra == 'dev'"], "fail", "pytest"),
        (["pytest<1; sys_platform == 'nowhere'"], "ok", "0 packages"),
    ],
)
def test_packages_are_held_against_the_pins(lines, status, says, monkeypatch):
    """Missing and foreign versions; extras only when they are there; markers are honoured."""
    monkeypatch.setattr("importlib.metadata.requires", lambda _: lines)
    finding = machine.packages("")
    assert finding.status == status
    assert says in finding.found


def test_a_checkout_that_is_not_installed_is_a_warning(monkeypatch):
    """Its pins are unknown."""
    monkeypatch.setattr(machine, "_DISTRIBUTION", "no-such-distribution")
    assert machine.packages("").status == "warn"


def test_accelerators_are_those_the_system_shows(tmp_path):
    """TPUs by PCI number, not their network card; GPUs by device file."""
    seen = machine.visible_accelerators
    tpu = _machine(tmp_path / "tpu", *[("0x1ae0", "0x006f")] * 4, ("0x1ae0", "0x0042"))
    gpu = _machine(tmp_path / "gpu", devices=("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"))
    assert seen(tpu) == ["TPU v6e"] * 4
    assert seen(gpu) == ["NVIDIA GPU"] * 2
    assert seen(_machine(tmp_path / "none", ("0x8086", "0x006f"))) == []


@pytest.mark.parametrize(
    ("told", "visible", "status", "advice"),
    [
        ({}, [], "ok", ""),
        ({}, ["TPU v6e"] * 4, "warn", ".[tpu]"),
        ({}, ["NVIDIA GPU"], "warn", "cuda"),
        ({"platform": "tpu", "memory": 32 * 2**30}, ["TPU v6e"] * 4, "ok", ""),
    ],
)
def test_an_accelerator_that_jax_does_not_see_is_a_warning(
    told, visible, status, advice, monkeypatch
):
    """With what to install, or which setting hides it."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    finding = machine.judge_devices({**TOLD, **told}, visible)
    assert finding.status == status
    assert advice in finding.advice
    assert ("32.0 GiB" in finding.found) == bool(told)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    if status == "warn":
        assert "JAX_PLATFORMS=cpu" in machine.judge_devices({**TOLD, **told}, visible).advice


@pytest.mark.slow
def test_devices_are_asked_of_jax_in_this_environment(monkeypatch):
    """The eight virtual devices of the suite, and nothing loaded into this process by it."""
    monkeypatch.setattr(machine, "visible_accelerators", lambda: [])
    finding = machine.devices("")
    assert finding.status == "ok"
    assert finding.found.startswith("8 x cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    finding = machine.devices("")
    assert finding.status == "fail"
    assert "no_such_platform" in finding.found + finding.advice


def test_a_jax_that_does_not_answer_is_a_warning(monkeypatch):
    """A host of a slice waits for the others: nothing is wrong with it."""
    monkeypatch.setattr(machine, "_DEVICE_SECONDS", 0.5)
    monkeypatch.setattr(machine, "_ASK_JAX", "import time; time.sleep(600)")
    finding = machine.devices("")
    assert finding.status == "warn"
    assert "slice" in finding.advice


@pytest.mark.parametrize(("soft", "status"), [(1024, "warn"), (65536, "ok"), (-1, "ok")])
def test_open_files(soft, status, monkeypatch):
    """Ray wants 8192; no limit is enough."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    finding = machine.open_files("")
    assert finding.status == status
    assert "at most no limit" in finding.found


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, "warn"), (2**30, "ok")])
def test_shared_memory(free, status, monkeypatch, tmp_path):
    """A container's 64 MiB is too little; a system without it has none to look at."""
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2 * free, free, free)
    )
    assert machine.shared_memory("", str(tmp_path)).status == status
    assert machine.shared_memory("", str(tmp_path / "none")).status == "ok"
