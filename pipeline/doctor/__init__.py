"""`ponente doctor`: is this machine, and the store, fit for a run?

Each check looks at one thing and says what it found and what to do; none can hang, and none prints
a secret. Checks run at the same time, so the whole takes as long as the slowest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pipeline.doctor import machine, network, store
from pipeline.doctor.finding import Check, Finding, guarded

CHECKS = (
    Check("python", machine.python),
    Check("packages", machine.packages),
    Check("devices", machine.devices, seconds=100),
    Check("open files", machine.open_files),
    Check("shared memory", machine.shared_memory),
    Check("bucket", store.bucket, seconds=50),
    Check("store", store.store, seconds=90, after="bucket"),
    Check("clock", store.clock, seconds=90, after="bucket"),
    Check("disk", store.disk, seconds=10),
    Check("ray", network.ray, seconds=70),
    Check("cluster", network.cluster, seconds=10),
    Check("hub", network.hub, seconds=12),
)


def examine(prefix: str, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """What every check found about this machine and the store at `prefix`, in order.

    Returns within the longest deadline of the checks, whatever they do.
    """
    waits: dict[str, Callable[[], Finding]] = {}
    threshold = logging.root.manager.disable
    # What a library logs about a bucket that does not answer is a page of traceback; the finding
    # has its last line.
    logging.disable(logging.CRITICAL)
    try:
        for check in checks:
            waits[check.name] = guarded(check, prefix, waits.get(check.after))
        return [waits[check.name]() for check in checks]
    finally:
        logging.disable(threshold)


def main_lines(findings: Sequence[Finding]) -> tuple[list[str], int]:
    """(lines to print, exit status): a line a finding, advice below it; 1 if any failed."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<4}  {finding.name:<{width}}  {finding.found}")
        if finding.status != "ok" and finding.advice:
            lines.append(" " * (width + 8) + finding.advice)
    counts = {status: sum(f.status == status for f in findings) for status in ("warn", "fail")}
    lines.append(
        f"{len(findings)} checks: {counts['fail']} failed, {counts['warn']} to look at"
        if any(counts.values())
        else f"{len(findings)} checks, nothing to do"
    )
    return lines, 1 if counts["fail"] else 0
