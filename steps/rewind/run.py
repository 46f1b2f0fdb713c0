"""A training whose batches can be read again: finished, running or interrupted.

A batch is a function of the data's order and of the training's configuration, both of which exist
before the first step, so nothing about a run needs to have been logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from models.shape.config import TransformerConfig
from pipeline.errors import CorruptOutput, InputError
from pipeline.store import storage
from pipeline.store.manifest import chosen, load, resolve_ref
from steps.artifacts import Checkpoint, Sequences
from steps.checkpoints.find import (
    ABOUT,
    CHECKPOINTS,
    Continued,
    about_of,
    builds_of,
    is_run,
    published_in,
)
from steps.rewind.source import settings_of
from training.config import TrainConfig


@dataclass(frozen=True)
class Run:
    """One training, in its step's directory `path`.

    Attributes:
        checkpoints: URL by step of those that are kept; of an extended run those before too, and at
            0 the one that a new run took its model from.
        before: the run that this one extends, which had done `began` steps.
    """

    path: str
    model: TransformerConfig
    train: TrainConfig
    sequences: Sequences
    checkpoints: Mapping[int, str]
    before: Run | None = None
    began: int = 0

    def that_did(self, step: int) -> Run:
        """The run that did a step, counted from 1; `InputError` if there is no such step."""
        if not 1 <= step <= self.train.steps:
            raise InputError(
                f"{self.path}: expected a step from 1 to {self.train.steps:,}, found {step}"
            )
        return self if self.before is None or step > self.began else self.before.that_did(step)

    def checkpoint_before(self, step: int) -> tuple[int, str] | None:
        """Step and URL of the last kept checkpoint of fewer steps; None if none is kept."""
        found = [done for done in self.checkpoints if done < step]
        return (last := max(found), self.checkpoints[last]) if found else None


def open_run(url: str) -> Run:
    """The run in the directory of a step that trains; `InputError` for another directory."""
    url = storage.normalise(url)
    if (manifest := published_in(url)) is None:
        return _unfinished(url)
    path, manifest = chosen(url, manifest)
    if not is_run(manifest):
        raise InputError(
            f"{url}: expected the output of a step that trains, found one of {manifest.label} "
            f"({manifest.step})"
        )
    output = Checkpoint(path, manifest)
    continued = None
    if (above := output.input_paths.get("checkpoint")) is not None:
        at, extends = settings_of(output).get("at"), manifest.step.endswith("extend")
        continued = Continued(above, at, extends)
    before, began, first = _before(continued)
    kept = {**first, **output.steps}
    return Run(path, output.model, output.train, output.sequences, kept, before, began)


def _before(continued: Continued | None) -> tuple[Run | None, int, dict[int, str]]:
    """The run that another extends, at which step, and the checkpoints before its own."""
    published = None if continued is None else load(continued.path)
    if continued is None or published is None:
        return None, 0, {}
    above = Checkpoint(*chosen(continued.path, published))
    if above.imported or not continued.extends:
        return None, 0, {0: above.at(continued.at)}
    before = open_run(continued.path)
    began = continued.at or max(above.steps)
    return before, began, {s: url for s, url in before.checkpoints.items() if s <= began}


def _unfinished(url: str) -> Run:
    """The newest run in a directory without a manifest.

    Of one that an older version began, what it continues is unknown: it has its own steps alone.
    """
    ledgers = builds_of(url)
    begun = [(found.root.split("/")[1], each) for each in ledgers if (found := each.find(ABOUT))]
    if not begun:
        raise InputError(
            f"{url}: expected the directory of a step that trains, whose data are recorded when "
            "training begins; found none"
        )
    _, ledger = max(begun, key=lambda pair: pair[0])  # the newest attempt's build
    about, kept = about_of(ledger), ledger.finished(CHECKPOINTS)
    path = resolve_ref(url, about["sequences"])
    if (published := load(path)) is None:
        raise CorruptOutput(f"{path}: {url} was trained on this output, which is gone")
    continued = Continued(**found) if (found := about.get("continued")) else None
    if continued is not None:
        continued = replace(continued, path=resolve_ref(url, continued.path))
    before, began, first = _before(continued)
    own = sorted((s.result["step"], storage.join(url, s.root)) for s in kept.values())
    return Run(
        url,
        TransformerConfig.from_plain(about["model"]),
        TrainConfig.from_plain(about["train"]),
        Sequences(path, published),
        {**first, **dict(own)},
        before,
        began,
    )
