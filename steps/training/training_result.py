"""What the result of a step that trains says of its run."""

from __future__ import annotations

from typing import Any

from pipeline import Hardware


def measured(trained: dict[str, Any], hardware: Hardware) -> dict[str, Any]:
    """What depends on the hardware, of a `training.config.job.TrainResult` as a mapping."""
    return {
        "hardware": hardware.name,
        "devices": trained["devices"],
        "seconds": trained["seconds"],
        "compilations": trained["compilations"],
        "attention": f"{trained['backend']}: {trained['backend_reason']}",
        "notes": trained["notes"],
        "memory": trained["memory"],
    }


def summary(
    checkpoint: str, rows: list[dict[str, Any]], entropy: float, skipped: int
) -> dict[str, Any]:
    """Losses of the run's first and last evaluation, skipped updates, and the headline."""
    # An extended run may evaluate on other splits than the run that it continues: take the first
    # split of the last evaluation.
    name = next(row["split"] for row in rows if row["step"] == rows[-1]["step"])
    of_split = [row for row in rows if row["split"] == name]
    first, last = of_split[0], of_split[-1]
    per_byte = last.get("bits_per_byte")
    bits = "" if per_byte is None else f"; {per_byte:.3f} bits per byte"
    bits += f"; {skipped:,} updates not applied" if skipped else ""
    return {
        "checkpoint": checkpoint,
        "skipped": skipped,
        "unigram_entropy": entropy,
        "first": first,
        "last": last,
        "evaluations": [row for row in rows if row["step"] == last["step"]],
        "headline": [
            f"{name} loss {first['loss']:.3f} -> {last['loss']:.3f} nats per token over "
            f"{last['step']:,} steps (unigram entropy {entropy:.3f}{bits})"
        ],
    }
