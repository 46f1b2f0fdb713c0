"""What a plan predicted of a training beside what the training measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 2**30
_ONLY = (
    ("compile_seconds", "compilation, waited for", "{:.3g} s"),
    ("waiting", "wait for data, of the steps' time", "{:.1%}"),
)


def predicted_table(step: Mapping[str, Any]) -> list[list[str]]:
    """A row per figure of a record of `steps.training.measured_step`; none without a record.

    The parts of a profiled step follow its time, that with the largest difference first.
    """
    if not step:
        return []
    rows = [["", "predicted", "measured", "measured / predicted"]]
    predicted, measured = step["predicted"], step["seconds"]
    said = predicted.get("seconds")
    if said is None:
        rows.append(["a step", "no row of this chip", f"{measured:.3g} s", ""])
    else:
        low, middle, high = said
        inside = "inside" if low <= measured <= high else "outside"
        by = f"x{predicted['factor']:.3g} by {predicted['runs']} runs" if predicted["runs"] else ""
        rows.append(
            [
                f"a step, median of {step['steps']:,}",
                f"{middle:.3g} s ({low:.3g} to {high:.3g}{', ' if by else ''}{by})",
                f"{measured:.3g} s",
                f"{measured / middle:.2f}, {inside} the interval",
            ]
        )
    parts, times = step.get("parts", {}), predicted.get("times", {})
    for kind in sorted(parts, key=lambda kind: -abs(parts[kind] - times.get(kind, 0.0))):
        rows.append(_row(f"... {kind}", times.get(kind), parts[kind], "{:.3g} s"))
    if "memory_bytes" in step:
        sizes = predicted["memory_bytes"] / GIB, step["memory_bytes"] / GIB
        rows.append(_row("memory of a device, peak", *sizes, "{:.2f} GiB"))
    if "save_seconds" in step:
        said = predicted.get("save_seconds")
        rows.append(_row("a save, waited for", said, step["save_seconds"], "{:.3g} s"))
    return rows + [_row(what, None, step[name], unit) for name, what, unit in _ONLY if name in step]


def _row(what: str, predicted: float | None, measured: float, unit: str) -> list[str]:
    if predicted is None:
        return [what, "", unit.format(measured), ""]
    ratio = f"{measured / predicted:.2f}" if predicted > 0 else ""
    return [what, unit.format(predicted), unit.format(measured), ratio]


def memory_table(parts: dict[str, float]) -> list[list[str]]:
    """A row per part of a device's estimated memory, and their sum."""
    rows = [*parts.items(), ("sum", sum(parts.values()))]
    unit, name = (2**30, "GiB") if sum(parts.values()) >= 2**29 else (2**20, "MiB")
    return [["part", name], *([part, f"{size / unit:.2f}"] for part, size in rows)]
