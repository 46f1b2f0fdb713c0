"""Checks of this machine: Python, packages, devices, open files, shared memory."""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

from pipeline.doctor.finding import Finding, ask

PYTHON = ((3, 11), (3, 13))
_DISTRIBUTION = "ponente"
_DEVICE_SECONDS = 90.0
# PCI device numbers of Google's TPUs. Its network cards have the same vendor.
_TPUS = {
    "0x0027": "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}
_OPEN_FILES = 8192  # what Ray asks for
_SHARED_MEMORY = 512 * 2**20  # twice the object store a local run starts Ray with

# Asked in a process of its own with the environment as it is: jax holds on to the devices, and
# can wait for good for a TPU that another process has.
_ASK_JAX = """
import json, jax
devices = jax.devices()
memory = (devices[0].memory_stats() or {}).get("bytes_limit")
print("DEVICES " + json.dumps({
    "platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
    "here": jax.local_device_count(), "memory": memory, "jax": jax.__version__,
}))
"""


def python(_: str) -> Finding:
    """The version of Python is one the project runs on."""
    low, high = (".".join(map(str, version)) for version in PYTHON)
    found = f"{platform.python_version()} at {sys.executable}"
    if PYTHON[0] <= sys.version_info[:2] <= PYTHON[1]:
        return Finding("python", "ok", found)
    return Finding("python", "fail", found, f"make the environment with Python {low} to {high}")


def packages(_: str) -> Finding:
    """What is installed is what the project's pins allow."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "packages",
            "warn",
            f"{_DISTRIBUTION} is not installed in {sys.prefix}, so its pins are unknown",
            "pip install -e . in the checkout",
        )
    wrong, good = [], 0
    for requirement in map(Requirement, lines):
        problem = _problem(requirement)
        good += problem == ""
        if problem:
            wrong.append(problem)
    if not wrong:
        return Finding("packages", "ok", f"{good} packages as pinned")
    return Finding("packages", "fail", "; ".join(wrong), "pip install -e . in the checkout")


def _problem(requirement: Any) -> str | None:
    """What is wrong with one requirement; empty if nothing, None if it does not apply here."""
    marker = requirement.marker
    # An extra is optional: its packages may be missing, but if they are there they are pinned.
    optional = marker is not None and not marker.evaluate({"extra": ""})
    if optional and not any(marker.evaluate({"extra": extra}) for extra in ("tpu", "dev")):
        return None
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return None if optional else f"{requirement.name} is missing ({requirement.specifier})"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} {version} is not {requirement.specifier}"


def visible_accelerators(root: str = "/") -> list[str]:
    """Accelerators the operating system shows, under its file system's `root`."""
    found = []
    for vendor in sorted(glob.glob(os.path.join(root, "sys/bus/pci/devices/*/vendor"))):
        if Path(vendor).read_text().strip() == "0x1ae0":
            device = Path(vendor).with_name("device").read_text().strip()
            if device in _TPUS:
                found.append(_TPUS[device])
    found += ["NVIDIA GPU"] * len(glob.glob(os.path.join(root, "dev/nvidia[0-9]*")))
    if not found and os.path.exists(os.path.join(root, "dev/dxg")):
        found.append("NVIDIA GPU")
    if not found and os.path.exists(os.path.join(root, "dev/kfd")):
        found.append("AMD GPU")
    return found


def devices(_: str) -> Finding:
    """What jax computes on here, and whether an accelerator of this machine is left out."""
    visible = visible_accelerators()
    status, out, err = ask([sys.executable, "-c", _ASK_JAX], _DEVICE_SECONDS)
    answer = next((line for line in out.splitlines() if line.startswith("DEVICES ")), None)
    if status is None:
        return Finding(
            "devices",
            "warn",
            f"jax did not name its devices in {_DEVICE_SECONDS:g} s",
            "another process may hold the TPU, or this host is one of a slice and jax waits for "
            "the others to start too",
        )
    if status != 0 or answer is None:
        last = (err.strip() or out.strip() or f"exit status {status}").splitlines()[-1]
        platforms = os.environ.get("JAX_PLATFORMS", "not set")
        return Finding(
            "devices",
            "fail",
            f"jax does not start: {last}",
            f"JAX_PLATFORMS is {platforms}; visible to the system: {_count(visible) or 'none'}",
        )
    return judge_devices(json.loads(answer.removeprefix("DEVICES ")), visible)


def judge_devices(told: dict[str, Any], visible: list[str]) -> Finding:
    """The finding from what jax told of its devices and what the operating system shows."""
    found = f"{told['count']} x {told['kind']} ({told['platform']})"
    if told["here"] != told["count"]:
        found += f", {told['here']} of them here"
    if told["memory"]:
        found += f", {told['memory'] / 2**30:.1f} GiB each"
    found += f", jax {told['jax']}"
    if told["platform"] != "cpu" or not visible:
        return Finding("devices", "ok", found)
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        advice = f"JAX_PLATFORMS={platforms} leaves it out; unset it to use it"
    elif visible[0].startswith("TPU"):
        advice = "pip install -e '.[tpu]' in the checkout, as a user who may open the device"
    else:
        advice = "install jax's plugin for it, such as pip install 'jax[cuda13]'"
    return Finding("devices", "warn", f"{found}; not to jax: {_count(visible)}", advice)


def _count(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def open_files(_: str) -> Finding:
    """How many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = ["no limit" if n == resource.RLIM_INFINITY else f"{n:,}" for n in (soft, hard)]
    found = f"{shown[0]} a process (at most {shown[1]})"
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES:
        return Finding("open files", "ok", found)
    return Finding("open files", "warn", found, f"ulimit -n {_OPEN_FILES} before starting Ray")


def shared_memory(_: str, path: str = "/dev/shm") -> Finding:
    """Whether Ray's object store has the shared memory it is started with."""
    if not os.path.isdir(path):
        return Finding("shared memory", "ok", f"no {path} on this system")
    usage = shutil.disk_usage(path)
    found = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} in {path}"
    if usage.free >= _SHARED_MEMORY:
        return Finding("shared memory", "ok", found)
    advice = "Ray would use the disk: free some, or docker run --shm-size 2g"
    return Finding("shared memory", "warn", found, advice)
