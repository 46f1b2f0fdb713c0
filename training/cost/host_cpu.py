"""This machine's CPU: which it is, for programs and measurements that hold for no other."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path


def processor() -> str:
    """Digest of this CPU's model and instructions, for which XLA compiles; JAX's keys lack it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    kinds = ("model name", "flags", "Features")
    own = sorted({line for line in lines if line.startswith(kinds)}) or lines[:1]
    return hashlib.sha256("\n".join(own).encode()).hexdigest()[:12]


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
