"""The checks of `ponente doctor`: each a function of the store's prefix that returns a finding."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.accelerators import chip_of, peak_flops
from pipeline.errors import InputError, PonenteError
from pipeline.graph.module_names import hiding
from pipeline.prices import price_of
from pipeline.store import storage
from pipeline.store.bucket import bucket_warnings
from pipeline.store.write_check import check_writable

PYTHON = ((3, 11), (3, 13))
DEVICE_SECONDS, RAY_SECONDS, _CONNECT_SECONDS, _HUB_SECONDS = 60.0, 40.0, 3.0, 5.0
_DEVICES = {
    "/dev/accel[0-9]*": "TPU",
    "/dev/vfio/[0-9]*": "TPU",
    "/dev/nvidia[0-9]*": "NVIDIA GPU",
    "/dev/kfd": "AMD GPU",
}
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

# Run in its own process: jax keeps devices open, and can block forever on a TPU that is in use.
_ASK_JAX = """
import json, jax
devices = jax.devices()
memory = (devices[0].memory_stats() or {}).get("bytes_limit")
print("DEVICES " + json.dumps({"platform": devices[0].platform, "kind": devices[0].device_kind,
    "count": len(devices), "memory": memory, "jax": jax.__version__}))
"""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: the check's name.
        status: "ok", "warn" (a run works, with limitations) or "fail" (a run would fail).
        found: what the check found, in one line.
        advice: what to do; empty when there is nothing to do.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def describe(error: BaseException) -> str:
    """An exception's type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def python(_: str) -> Finding:
    """Whether the project supports this version of Python."""
    low, high = (".".join(map(str, version)) for version in PYTHON)
    good = PYTHON[0] <= sys.version_info[:2] <= PYTHON[1]
    found = f"{platform.python_version()} at {sys.executable}"
    advice = f"make the environment with Python {low} to {high}"
    return Finding("python", "ok" if good else "fail", found, advice)


def packages(_: str) -> Finding:
    """Whether the installed packages satisfy the project's requirements."""
    from packaging.requirements import Requirement

    advice = "pip install -e . in the checkout"
    try:
        lines = importlib.metadata.requires("ponente") or []
    except importlib.metadata.PackageNotFoundError:
        found = f"ponente is not installed in {sys.prefix}, so its requirements are unknown"
        return Finding("packages", "warn", found, advice)
    wrong, checked = [], 0
    for requirement in map(Requirement, lines):
        # Extras are optional.
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            checked += 1
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                wrong.append(f"{requirement.name} is missing ({requirement.specifier})")
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    found = "; ".join(wrong) or f"{checked} packages as required"
    return Finding("packages", "fail" if wrong else "ok", found, advice)


def accelerators() -> list[str]:
    """Accelerators that the operating system lists as devices."""
    return [name for pattern, name in _DEVICES.items() for _ in glob.glob(pattern)]


def devices(_: str) -> Finding:
    """The devices that jax uses, and whether it misses an accelerator of this machine."""
    visible, platforms = accelerators(), os.environ.get("JAX_PLATFORMS", "")
    shown = ", ".join(f"{visible.count(name)} x {name}" for name in dict.fromkeys(visible))
    try:
        done = _run(_ASK_JAX, DEVICE_SECONDS)
    except subprocess.TimeoutExpired:
        found = f"jax did not list its devices in {DEVICE_SECONDS:g} s; the system has: {shown}"
        advice = "another process may hold the TPU, or jax waits for other hosts of its slice"
        return Finding("devices", "warn", found, advice)
    answer = next((x for x in done.stdout.splitlines() if x.startswith("DEVICES ")), None)
    if answer is None:
        advice = f"JAX_PLATFORMS is {platforms or 'not set'}; the system has: {shown or 'none'}"
        return Finding("devices", "fail", f"jax does not start: {_last_line(done)}", advice)
    return judge_devices(json.loads(answer.removeprefix("DEVICES ")), shown, platforms)


def judge_devices(listed: dict[str, Any], shown: str, platforms: str) -> Finding:
    """The finding from jax's devices, the operating system's devices, and JAX_PLATFORMS."""
    found = f"{listed['count']} x {listed['kind']} ({listed['platform']}), jax {listed['jax']}"
    if listed["memory"]:
        found += f", {listed['memory'] / 2**30:.1f} GiB each"
    if listed["platform"] != "cpu":
        return _judge_chip(listed["kind"], listed["count"], found)
    if not shown:
        return Finding("devices", "ok", found)
    advice = "install jax's plugin: pip install -e '.[tpu]', or pip install 'jax[cuda13]'"
    if platforms:
        advice = f"JAX_PLATFORMS={platforms} leaves it out; unset it to use it"
    return Finding("devices", "warn", f"{found}; JAX does not see: {shown}", advice)


def _judge_chip(kind: str, count: int, found: str) -> Finding:
    """The finding on an accelerator from the tables of chips and prices."""
    chip, peak = chip_of(kind), peak_flops(kind)
    if chip is None or peak is None:
        advice = "runs work, but MFU is not shown and memory is not planned. Add it to the table"
        return Finding("devices", "warn", f"{found}; not in pipeline/accelerators.py", advice)
    found += f", {peak / 1e12:,.0f} TFLOP/s each"
    try:
        price = price_of(chip.name)
    except InputError as error:
        return Finding("devices", "warn", found, str(error))
    cost = price.of(count) if price is not None else ""
    return Finding("devices", "ok", f"{found}; an hour costs {cost}" if cost else found)


def store(prefix: str) -> Finding:
    """Whether the store can do what the commit protocol needs: create, refuse, overwrite, list."""
    prefix, start = storage.normalise(prefix), time.perf_counter()
    missing = _missing_folders(prefix) if storage.is_local(prefix) else []
    try:
        weak = check_writable(prefix)
        problem = weak or _list_and_delete(storage.join(prefix, f".doctor-{uuid.uuid4().hex}"))
    except PonenteError as error:
        return Finding("store", "fail", str(error))
    except Exception as error:  # noqa: BLE001 - any library may be behind a URL
        advice = "check the network and the login, or give a --prefix that this user may write to"
        return Finding("store", "fail", f"{prefix}: {describe(error)}", advice)
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                os.rmdir(path)
    if problem:
        advice = "outputs could be lost or published twice here; use a local disk or gs://"
        return Finding("store", "fail", f"{prefix}: {problem}", advice)
    took = f"{(time.perf_counter() - start) * 1e3:,.0f} ms"
    found = f"{prefix}: create, overwrite, list and delete work, {took}"
    costs = bucket_warnings(prefix)
    return Finding("store", "warn" if costs else "ok", found, "; ".join(costs))


def _missing_folders(path: str) -> list[str]:
    """`path` and its parents, as far as they do not exist, innermost first."""
    missing = []
    while path != os.path.dirname(path) and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _list_and_delete(folder: str) -> str:
    """What the store did wrong; empty if nothing."""
    storage.write_atomic(storage.join(folder, "record"), b"")
    listed = storage.list_names(folder)
    storage.delete_tree(folder)
    if listed != ["record"]:
        return "a listing lacks the object just written"
    return "a listing still shows deleted objects" if storage.list_names(folder) else ""


def ray(_: str) -> Finding:
    """Whether Ray imports, and the cluster of RAY_ADDRESS accepts connections."""
    if other := hiding("pipeline", [os.getcwd()]):
        advice = (
            "rename it: it hides ponente's package 'pipeline' from workers started in its folder"
        )
        return Finding("ray", "fail", other, advice)
    advice = "pip install -e . in the checkout; --executor inline runs without Ray"
    try:
        done = _run("import ray; print(ray.__version__)", RAY_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding("ray", "fail", f"does not import in {RAY_SECONDS:g} s", advice)
    if done.returncode:
        return Finding("ray", "fail", f"does not import: {_last_line(done)}", advice)
    found, address = done.stdout.split()[-1], os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local", "auto"):
        return Finding("ray", "ok", f"{found}, RAY_ADDRESS {address or 'is not set'}")
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.partition("/")[0].partition(":")
    try:
        number = int(port or (10001 if scheme == "ray" else 6379))
        socket.create_connection((host, number), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        advice = "start the cluster, open its port, or unset RAY_ADDRESS (host:6379, ray://host)"
        return Finding("ray", "fail", f"{found}, RAY_ADDRESS={address}: {describe(error)}", advice)
    return Finding("ray", "ok", f"{found}, RAY_ADDRESS={address} accepts connections")


def hub(_: str) -> Finding:
    """Whether the hub answers, unless the user chose to stay offline."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    for name in _OFFLINE:
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return Finding("hub", "ok", f"skipped: {name} is set, only cached files are used")
    start = time.perf_counter()
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=_HUB_SECONDS) as answer:
            problem = f"HTTP status {answer.status}" if answer.status >= 500 else ""
    except urllib.error.HTTPError as error:
        # The hub answered: only server errors and 407, a proxy's login, are problems.
        problem = f"HTTP status {error.code}" if error.code >= 500 or error.code == 407 else ""
        error.close()
    except (OSError, ValueError) as error:
        problem = describe(error)
    if not problem:
        return Finding("hub", "ok", f"{endpoint}, {(time.perf_counter() - start) * 1e3:.0f} ms")
    advice = "set HF_ENDPOINT or https_proxy, or HF_HUB_OFFLINE=1; python-docs:// needs no hub"
    return Finding("hub", "warn", f"{endpoint}: {problem}", advice)


def _run(code: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run Python code in this environment; it is killed after `seconds`."""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
    )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    text = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
    return text.splitlines()[-1]
