"""What one training run left behind, as pages and comparisons look at it.

A finished run is a `Checkpoint`; one that still goes, or went without the pipeline, is a directory
with `metrics.jsonl`. What an older record does not have is empty here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline import InputError, storage
from pipeline.lineage import Ancestor
from steps.page import plain

if TYPE_CHECKING:
    from steps.artifacts import Checkpoint
    from training.goodput import Account

Row = dict[str, Any]
VALIDATION = "validation"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run.

    Attributes:
        name: for legends.
        history: a row a step, see `training.metrics`.
        evaluations: rows with step, loss and others, and the `set` they are of.
        samples: rows with step, prompt and completion.
        journals: accounts of the attempts as plain mappings.
        config: what it was asked to be, nested.
        entropy: unigram entropy of the training tokens in nats, None where it is not known.
    """

    name: str
    history: list[Row]
    evaluations: list[Row]
    samples: list[Row]
    journals: list[Row]
    config: Mapping[str, Any]
    entropy: float | None = None

    @property
    def sets(self) -> list[str]:
        """Names of the held-out sets, in order of appearance."""
        return list(dict.fromkeys(set_of(row) for row in self.evaluations))

    def scores(self, name: str) -> list[Row]:
        """The evaluations of one set."""
        return [row for row in self.evaluations if set_of(row) == name]

    def account(self) -> Account | None:
        """Where its time went; None without a journal."""
        from training.goodput import account
        from training.journal import Attempt

        if not self.journals:
            return None
        return account([Attempt.from_json(json.dumps(each).encode()) for each in self.journals])


def set_of(row: Mapping[str, Any]) -> str:
    """Which held-out set an evaluation is of."""
    return str(row.get("set") or VALIDATION)


def of_checkpoint(checkpoint: Checkpoint, name: str, ancestors: Iterable[Ancestor]) -> RunRecord:
    """A finished run.

    Args:
        checkpoint: its output.
        name: for legends.
        ancestors: its lineage, which has the configuration of everything it was made from.
    """
    record = checkpoint.shard("record")
    return RunRecord(
        name=name,
        history=checkpoint.rows("history"),
        evaluations=checkpoint.rows("evaluations"),
        samples=_lines(storage.join(record, "samples.jsonl")),
        journals=_lines(storage.join(record, "journals.jsonl")),
        config=_configuration(list(ancestors), checkpoint.path),
        entropy=checkpoint.result.get("unigram_entropy"),
    )


def _configuration(ancestors: list[Ancestor], path: str) -> dict[str, Any]:
    """By step: a run's own under "train", also where two runs call their steps differently."""
    return {
        "train" if a.path == path else a.manifest.label: plain(a.manifest.config) for a in ancestors
    }


def of_directory(url: str, name: str) -> RunRecord:
    """A run whose `metrics.jsonl` is at `url`; its journals are looked for in `journal` beside it.

    Raises:
        InputError: there is no such file.
    """
    from training.journal import read_journals
    from training.tracker_files import NAME, read_lines

    entries = read_lines(storage.join(url, NAME))
    if not entries:
        raise InputError(
            f"{url}: expected the directory of a run, with a {NAME} that is not empty, or an "
            "output of a `train` step"
        )
    kinds: dict[str, list[Row]] = {"step": [], "evaluation": [], "sample": [], "config": []}
    for entry in entries:
        kinds.setdefault(entry["kind"], []).append(entry)
    config = kinds["config"][-1] if kinds["config"] else {}
    journals = read_journals(storage.join(url, "journal"))
    return RunRecord(
        name=name,
        history=_newest(kinds["step"]),
        evaluations=_newest(kinds["evaluation"]),
        samples=_newest(kinds["sample"]),
        journals=[json.loads(each.to_json()) for each in journals],
        config={k: v for k, v in config.items() if isinstance(v, Mapping)},
    )


def _newest(rows: list[Row]) -> list[Row]:
    """Rows in order of steps; of one that was done again, what was written last."""
    by_step = {(row["step"], row.get("set"), row.get("prompt")): row for row in rows}
    return sorted(by_step.values(), key=lambda row: row["step"])


def _lines(url: str) -> list[Row]:
    from training.tracker_files import read_lines

    return read_lines(url)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: {"train": {"steps": 8}} -> {"train.steps": 8}."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = dataclasses.asdict(tree)
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found
