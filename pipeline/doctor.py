"""`ponente doctor`: whether this machine and the store are fit for a run.

Checks run concurrently, each with a deadline, and an exception of a check becomes its finding.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline import holders
from pipeline.accelerators import peak_flops
from pipeline.errors import PonenteError, one_line
from pipeline.graph.module_names import hiding
from pipeline.identity.secret_text import is_secret_name
from pipeline.store import storage
from pipeline.store.write_check import bucket_warnings, check_writable

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_DEVICE_SECONDS, _CONNECT_SECONDS = 60.0, 3.0
_DEVICES = {
    "/dev/accel[0-9]*": "TPU",
    "/dev/vfio/[0-9]*": "TPU",
    "/dev/nvidia[0-9]*": "NVIDIA GPU",
    "/dev/kfd": "AMD GPU",
}
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
    """What one check found, in one line."""

    name: str
    status: Literal["ok", "warn", "fail"]  # warn: a run works, with limitations
    found: str
    advice: str = ""  # what to do


def requirements() -> list[Requirement]:
    """What the project requires here, without extras. Raises `PackageNotFoundError`."""
    from packaging.requirements import Requirement

    lines = map(Requirement, importlib.metadata.requires("ponente") or [])
    return [r for r in lines if r.marker is None or r.marker.evaluate({"extra": ""})]


def packages(_: str) -> Finding:
    """Whether Python and the installed packages satisfy the project's requirements."""
    from packaging.specifiers import SpecifierSet

    python, advice = platform.python_version(), "run make setup, or pip install -e . here"
    try:
        required = requirements()
        pythons = importlib.metadata.metadata("ponente")["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        found = f"ponente is not installed in {sys.prefix}, so its requirements are unknown"
        return Finding("packages", "warn", found, advice)
    wrong = [] if python in SpecifierSet(pythons) else [f"Python {python} is not {pythons}"]
    for requirement in required:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing ({requirement.specifier})")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    found = "; ".join(wrong) or f"Python {python}, {len(required)} packages as required"
    return Finding("packages", "fail" if wrong else "ok", f"{found}, in {sys.prefix}", advice)


def devices(_: str) -> Finding:
    """The devices that jax uses, and whether it misses an accelerator of this machine."""
    visible = [name for pattern, name in _DEVICES.items() for _ in glob.glob(pattern)]
    shown = ", ".join(f"{visible.count(name)} x {name}" for name in dict.fromkeys(visible))
    platforms = os.environ.get("JAX_PLATFORMS", "")
    command = [sys.executable, "-c", _ASK_JAX]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=_DEVICE_SECONDS, **quiet)
    except subprocess.TimeoutExpired:
        found = f"jax did not list its devices in {_DEVICE_SECONDS:g} s; the system has: {shown}"
        advice = "see `held`, or jax waits for other hosts of its slice"
        return Finding("devices", "warn", found, advice)
    answer = next((x for x in done.stdout.splitlines() if x.startswith("DEVICES ")), None)
    if answer is None:
        error = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        advice = f"JAX_PLATFORMS is {platforms or 'not set'}; the system has: {shown or 'none'}"
        return Finding("devices", "fail", f"jax does not start: {error}", advice)
    return judge_devices(json.loads(answer.removeprefix("DEVICES ")), shown, platforms)


def judge_devices(listed: dict[str, Any], shown: str, platforms: str) -> Finding:
    """The finding from jax's devices, the operating system's devices, and JAX_PLATFORMS."""
    found = f"{listed['count']} x {listed['kind']} ({listed['platform']}), jax {listed['jax']}"
    if listed["memory"]:
        found += f", {listed['memory'] / 2**30:.1f} GiB each"
    if listed["platform"] != "cpu":
        if (peak := peak_flops(listed["kind"])) is None:
            advice = (
                "runs work, but MFU is not shown and memory is not planned. Add it to the table"
            )
            return Finding("devices", "warn", f"{found}; not in pipeline/accelerators.py", advice)
        return Finding("devices", "ok", f"{found}, {peak / 1e12:,.0f} TFLOP/s each")
    if not shown:
        return Finding("devices", "ok", found)
    advice = "install jax's plugin: pip install -e '.[tpu]' or '.[cuda]'"
    if platforms:
        advice = f"JAX_PLATFORMS={platforms} leaves it out; unset it to use it"
    return Finding("devices", "warn", f"{found}; JAX does not see: {shown}", advice)


def held(_: str) -> Finding:
    """Whether another process holds a chip or a port that a run on TPUs needs."""
    ports = [each for each in map(holders.port, holders.PORTS) if each is not None]
    found = [*holders.chips(), *ports]
    if not found:
        return Finding("held", "ok", f"no chip, and of ports none of {[*holders.PORTS]}")
    what, advice = (
        "; ".join(dict.fromkeys(getattr(each, part) for each in found))
        for part in ("found", "advice")
    )
    return Finding("held", "warn", what, advice)


def store(prefix: str) -> Finding:
    """Whether the store can do what the commit protocol needs: create, refuse, overwrite, list."""
    prefix, start = storage.normalise(prefix), time.perf_counter()
    folders = (Path(prefix), *Path(prefix).parents) if storage.is_local(prefix) else ()
    missing = [folder for folder in folders if not os.path.lexists(folder)]
    folder = storage.join(prefix, f".doctor-{uuid.uuid4().hex}")
    try:
        problem = check_writable(prefix)
        storage.write_atomic(storage.join(folder, "record"), b"")
        if storage.list_names(folder) != ["record"]:
            problem = problem or "a listing lacks the object just written"
        storage.delete_tree(folder)
        if storage.list_names(folder):
            problem = problem or "a listing still shows deleted objects"
    except PonenteError as error:
        return Finding("store", "fail", str(error))
    except Exception as error:  # noqa: BLE001 - any library may be behind a URL
        advice = "check the network and the login, or give a --prefix that this user may write to"
        return Finding("store", "fail", f"{prefix}: {one_line(error)}", advice)
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
    if problem:
        advice = "outputs could be lost or published twice here; use a local disk or gs://"
        return Finding("store", "fail", f"{prefix}: {problem}", advice)
    took = f"{(time.perf_counter() - start) * 1e3:,.0f} ms"
    costs = bucket_warnings(prefix)
    found = f"{prefix}: create, overwrite, list and delete work, {took}"
    return Finding("store", "warn" if costs else "ok", found, "; ".join(costs))


def ray(_: str) -> Finding:
    """Whether Ray's workers find this project, and RAY_ADDRESS accepts connections."""
    if other := hiding("pipeline", [os.getcwd()]):
        advice = (
            "rename it: it hides ponente's package 'pipeline' from workers started in its folder"
        )
        return Finding("ray", "fail", other, advice)
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local", "auto"):
        return Finding("ray", "ok", f"RAY_ADDRESS {address or 'is not set'}")
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.partition("/")[0].partition(":")
    try:
        number = int(port or (10001 if scheme == "ray" else 6379))
        socket.create_connection((host, number), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        advice = "start the cluster, open its port, or unset RAY_ADDRESS (host:6379, ray://host)"
        return Finding("ray", "fail", f"RAY_ADDRESS={address}: {one_line(error)}", advice)
    return Finding("ray", "ok", f"RAY_ADDRESS={address} accepts connections")


Check = Callable[[str], Finding]
CHECKS: dict[str, tuple[Check, float]] = {
    "packages": (packages, 30.0),
    "devices": (devices, _DEVICE_SECONDS + 10),
    "held": (held, 20.0),
    "store": (store, 20.0),
    "ray": (ray, 10.0),
}
"""Name -> (function of the store's prefix, seconds it may take)."""


def examine(prefix: str, chosen: dict[str, tuple[Check, float]] = CHECKS) -> list[Finding]:
    """The finding of every check of this machine and the store at `prefix`, in order."""
    boxes: dict[str, list[Finding]] = {name: [] for name in chosen}

    def work(name: str, check: Check) -> None:
        try:
            boxes[name].append(check(prefix))
        except BaseException as error:  # noqa: BLE001 - any library may be behind a check
            boxes[name].append(Finding(name, "fail", one_line(error)))

    threshold = logging.root.manager.disable
    # Libraries log a page about an unreachable bucket, which would hide the findings.
    logging.disable(logging.CRITICAL)
    begin = time.monotonic()
    try:
        # Daemon threads: a check that never returns must not keep the process alive.
        threads = [
            threading.Thread(target=work, args=(n, chosen[n][0]), daemon=True) for n in chosen
        ]
        for thread in threads:
            thread.start()
        for thread, (_, seconds) in zip(threads, chosen.values(), strict=True):
            thread.join(max(0.0, begin + seconds - time.monotonic()))
    finally:
        logging.disable(threshold)
    advice = "check the network, the mount or the device that it uses"
    return [
        Finding(f.name, f.status, clean(f.found), clean(f.advice))
        for name, box in boxes.items()
        for f in box or [Finding(name, "fail", f"no answer in {chosen[name][1]:g} s", advice)]
    ]


def clean(text: str) -> str:
    """`text` on one line, with credentials of URLs, headers and variables replaced by ***."""
    for name, value in os.environ.items():
        if is_secret_name(name) and len(value) >= 8 and not os.path.exists(value):
            text = text.replace(value, "***")
    text = re.sub(r"://[^/@\s]*@", "://***@", text)
    text = re.sub(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}", r"\1 ***", text)
    return " ".join(text.split())


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line per finding, advice below it, and a summary."""
    width = max((len(finding.name) for finding in findings), default=0)
    shown = []
    for finding in findings:
        shown.append(f"{finding.status:<4}  {finding.name:<{width}}  {finding.found}")
        if finding.status != "ok" and finding.advice:
            shown.append(" " * (width + 8) + finding.advice)
    failed, warned = (sum(f.status == status for f in findings) for status in ("fail", "warn"))
    good = "nothing to do" if not failed + warned else f"{failed} failed, {warned} warnings"
    return [*shown, f"{len(findings)} checks: {good}"]
