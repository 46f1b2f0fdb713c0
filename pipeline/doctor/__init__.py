"""`ponente doctor`: whether this machine and the store are fit for a run.

Each check examines one thing and returns a finding with advice. Checks run concurrently, each with
a deadline, and an exception of a check becomes its finding.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence

from pipeline.doctor import checks
from pipeline.doctor.checks import Finding, describe

Check = Callable[[str], Finding]

CHECKS: dict[str, tuple[Check, float]] = {
    "python": (checks.python, 10.0),
    "packages": (checks.packages, 30.0),
    "devices": (checks.devices, checks.DEVICE_SECONDS + 10),
    "store": (checks.store, 20.0),
    "ray": (checks.ray, checks.RAY_SECONDS + 10),
    "hub": (checks.hub, 10.0),
}
"""Name -> (function of the store's prefix, seconds it may take)."""

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)KEY(_|$)", re.IGNORECASE)


def examine(prefix: str, chosen: dict[str, tuple[Check, float]] = CHECKS) -> list[Finding]:
    """The finding of every check of this machine and the store at `prefix`, in order."""
    threshold = logging.root.manager.disable
    # Libraries log a page about an unreachable bucket, which would hide the findings.
    logging.disable(logging.CRITICAL)
    try:
        started = [
            (name, seconds, _start(name, check, prefix))
            for name, (check, seconds) in chosen.items()
        ]
        begin = time.monotonic()
        return [
            _wait(name, thread, box, begin, seconds) for name, seconds, (thread, box) in started
        ]
    finally:
        logging.disable(threshold)


def _start(name: str, check: Check, prefix: str) -> tuple[threading.Thread, list[Finding]]:
    box: list[Finding] = []

    def work() -> None:
        try:
            box.append(check(prefix))
        except BaseException as error:  # noqa: BLE001 - any library may be behind a check
            box.append(Finding(name, "fail", describe(error)))

    # A daemon thread: a check that never returns must not keep the process alive.
    thread = threading.Thread(target=work, daemon=True, name=f"doctor {name}")
    thread.start()
    return thread, box


def _wait(
    name: str, thread: threading.Thread, box: list[Finding], begin: float, seconds: float
) -> Finding:
    thread.join(max(0.0, begin + seconds - time.monotonic()))
    if not box:
        advice = "check the network, the mount or the device that it uses"
        return Finding(name, "fail", f"no answer in {seconds:g} s", advice)
    found = box[0]
    return Finding(name, found.status, clean(found.found), clean(found.advice))


def clean(text: str) -> str:
    """`text` on one line, with credentials of URLs, headers and variables replaced by ***."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 8 and not os.path.exists(value):
            text = text.replace(value, "***")
    text = re.sub(r"://[^/@\s]*@", "://***@", text)
    text = re.sub(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}", r"\1 ***", text)
    return " ".join(text.split())


def main_lines(findings: Sequence[Finding]) -> tuple[list[str], int]:
    """(lines to print, exit status): a line per finding, advice below it; 1 if any failed."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<4}  {finding.name:<{width}}  {finding.found}")
        if finding.status != "ok" and finding.advice:
            lines.append(" " * (width + 8) + finding.advice)
    failed, warned = (sum(f.status == status for f in findings) for status in ("fail", "warn"))
    lines.append(
        f"{len(findings)} checks: {failed} failed, {warned} warnings"
        if failed or warned
        else f"{len(findings)} checks, nothing to do"
    )
    return lines, 1 if failed else 0
