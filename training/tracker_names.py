"""Names of trackers, for configurations: nothing is imported that a tracker needs."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import InputError

KINDS = ("tensorboard", "wandb", "trackio")


def check_names(field: str, names: Sequence[str]) -> None:
    """Raises `InputError` for a name that is no tracker's, or is there twice."""
    for name in names:
        if name not in KINDS or list(names).count(name) > 1:
            raise InputError(
                f"{field}: expected some of {', '.join(KINDS)}, each once, got {tuple(names)!r}; "
                "metrics.jsonl is always written and has no name"
            )
