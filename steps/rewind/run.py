"""A training whose batches can be read again: finished, running or interrupted.

A batch is a function of the data's order and of the training's configuration, both of which exist
before the first step, so nothing about a run needs to have been logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from models.shape.config import TransformerConfig
from pipeline.errors import CorruptOutput, InputError
from pipeline.store import storage
from pipeline.store.ledger import DIRECTORY as LEDGER
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import chosen, load, resolve_ref
from steps.artifacts import Checkpoint, Sequences
from steps.checkpoints.find import ABOUT, about_of, is_run
from steps.rewind.source import settings_of
from training.config import TrainConfig

_CHECKPOINTS = "checkpoint/"


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
    try:
        manifest = load(url)
    except NotADirectoryError as error:
        raise InputError(f"{url}: expected the directory of a train step, found a file") from error
    if manifest is None:
        return _unfinished(url)
    path, manifest = chosen(url, manifest)
    if not is_run(manifest):
        raise InputError(
            f"{url}: expected the output of a step that trains, found one of {manifest.label} "
            f"({manifest.step})"
        )
    output = Checkpoint(path, manifest)
    before, began, first = _continued(output)
    kept = {**first, **output.steps}
    return Run(path, output.model, output.train, output.sequences, kept, before, began)


def _continued(output: Checkpoint) -> tuple[Run | None, int, dict[int, str]]:
    """The run that an output extends, at which step, and the checkpoints before its own."""
    path, (_, manifest) = output.input_paths.get("checkpoint"), chosen(output.path, output.manifest)
    published = None if path is None else load(path)
    if path is None or published is None:
        return None, 0, {}
    at = settings_of(output).get("at")
    above = Checkpoint(*chosen(path, published))
    if above.imported or not manifest.step.endswith("extend"):
        return None, 0, {0: above.at(at)}
    before = open_run(path)
    began = at or max(above.steps)
    return before, began, {s: url for s, url in before.checkpoints.items() if s <= began}


def _unfinished(url: str) -> Run:
    ledgers = [Ledger(url, name) for name in storage.list_names(storage.join(url, LEDGER))]
    begun = [(found.root.split("/")[1], each) for each in ledgers if (found := each.find(ABOUT))]
    if not begun:
        raise InputError(
            f"{url}: expected the directory of a step that trains, whose data are recorded when "
            "training begins; found none"
        )
    _, ledger = max(begun, key=lambda pair: pair[0])  # the newest attempt's build
    about, kept = about_of(ledger), ledger.finished(_CHECKPOINTS)
    path = resolve_ref(url, about["sequences"])
    if (published := load(path)) is None:
        raise CorruptOutput(f"{path}: {url} was trained on this output, which is gone")
    return Run(
        url,
        TransformerConfig.from_plain(about["model"]),
        TrainConfig.from_plain(about["train"]),
        Sequences(path, published),
        dict(sorted((s.result["step"], storage.join(url, s.root)) for s in kept.values())),
    )
