"""Times, sizes and numbers as text for people."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any


def command_line(words: Sequence[str]) -> str:
    """A recorded command as one line: for a shell, or the call in Python that it was."""
    return words[0] if len(words) == 1 else shlex.join(words)


def duration(seconds: float) -> str:
    """Such as `0.42 s`, `12.3 s`, `3 min 20 s`, `2 h 05 min`, `4 d 3 h`."""
    if seconds < 0.995:
        return f"{max(seconds, 0.0):.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def size(count: float) -> str:
    """A number of bytes in decimal units, such as `512 B` or `3.4 MB`."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} PB"


def moment(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when)) + " UTC"


def number(value: Any) -> str:
    """A result's value: grouped digits, a float's six digits, the length of a long list."""
    if isinstance(value, (list, tuple)):
        nested = any(isinstance(each, (dict, list, tuple)) for each in value)
        long = nested or len(value) > 6
        return f"{len(value):,} values" if long else ", ".join(map(number, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.6g}" if math.isfinite(value) else str(value)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings and dataclasses: {"train": {"steps": 8}} -> {"train.steps": 8}."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = dataclasses.asdict(tree)
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found
