"""Times, sizes, numbers and configurations as people write them."""

from __future__ import annotations

import math
import time
from typing import Any


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
    """Unix seconds as a UTC date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when)) + " UTC"


def number(value: Any) -> str:
    """A value of a result: integers with separators, floats with six digits, text as it is."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}" if math.isfinite(value) else str(value)
    return str(value)


def flat(tree: dict[str, Any], path: str = "") -> dict[str, str]:
    """Nested results as `dotted.name -> text`; a list is given by its length when it is long."""
    lines: dict[str, str] = {}
    for name, value in tree.items():
        full = f"{path}.{name}" if path else str(name)
        if isinstance(value, dict):
            lines |= flat(value, full)
        elif isinstance(value, list | tuple) and (len(value) > 6 or _nested(value)):
            lines[full] = f"{len(value):,} values"
        elif isinstance(value, list | tuple):
            lines[full] = ", ".join(number(item) for item in value)
        else:
            lines[full] = number(value)
    return lines


def _nested(values: list[Any] | tuple[Any, ...]) -> bool:
    return any(isinstance(value, dict | list | tuple) for value in values)


def shortened(text: str, limit: int) -> str:
    """`text` with its middle left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    head = (limit - 1) * 3 // 5
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"
