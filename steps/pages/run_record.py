"""The record of one training run, for reports and comparisons.

A finished run is a `Checkpoint`. A run in progress is read from its step's directory, and a run
without the pipeline from a directory with `metrics.jsonl`. Fields that an older record lacks are
empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline import InputError
from pipeline.errors import CorruptOutput
from pipeline.identity.fingerprint import canonical, plain
from pipeline.plan.lineage import Ancestor, lineage
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import KEEP, Manifest, chosen, load, resolve_ref
from pipeline.store.shards import ATTEMPTS
from steps.artifacts import TRAIN
from steps.checkpoints.find import ABOUT, is_run
from steps.measured import recipe_of

if TYPE_CHECKING:
    from steps.artifacts import Checkpoint, Sequences
    from training.metrics.differences import RunLoss
    from training.metrics.goodput import Account, AttemptTime

Row = dict[str, Any]
VALIDATION = "validation"
_METRICS = "metrics.jsonl"
_CONTINUED = "checkpoint"  # input of `extend` and `warm_start`: the model that they continue
_TAKEN = {None: "", "model": "with the model of ", "moments": "with the model and moments of "}


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run."""

    name: str  # label in legends
    history: list[Row]  # a row per step, see `training.metrics.recorder`
    evaluations: list[Row]  # with step, loss and other metrics, and the `split` that was scored
    samples: list[Row]  # with step, prompt and completion
    attempts: list[AttemptTime]
    # Its settings, nested. Those of a run that it continues are not included; "continues" names it.
    config: Mapping[str, Any]
    # Unigram entropy of the training tokens in nats, of a mixture's first source; None if unknown.
    entropy: float | None = None
    partial: bool = False  # whether `config` may lack settings, as for an unfinished run
    sequences: Sequence[Row] = ()  # losses by sequence, see `training.metrics.differences`
    recipe: str = ""  # the same of runs that differ in seeds alone, see `recipe_of`; "" if unknown
    forecasts: Sequence[Row] = ()  # before the first step, see `TrainJob.forecast`

    @property
    def splits(self) -> list[str]:
        """Names of the held-out splits, in order of appearance."""
        return list(dict.fromkeys(split_of(row) for row in self.evaluations))

    def scores(self, name: str) -> list[Row]:
        """The evaluations on one split."""
        return [row for row in self.evaluations if split_of(row) == name]

    def measured(self, name: str) -> RunLoss:
        """The last evaluation on one split."""
        from training.metrics.differences import RunLoss, SequenceLosses

        last = self.scores(name)[-1]
        key = name, last["step"]
        rows = [row for row in self.sequences if (split_of(row), row["step"]) == key]
        losses = SequenceLosses.of_row(rows[-1]) if rows else None
        return RunLoss(self.name, last["loss"], self.recipe, losses)

    def samples_by_prompt(self) -> dict[str, list[Row]]:
        """The samples, newest first."""
        found: dict[str, list[Row]] = {}
        for row in reversed(self.samples):
            found.setdefault(str(row["prompt"]), []).append(row)
        return found

    def account(self) -> Account | None:
        """The account of its wall time; None without times."""
        from training.metrics.goodput import account

        return account(self.attempts) if self.attempts else None


def split_of(row: Mapping[str, Any]) -> str:
    """Name of the held-out split of an evaluation."""
    return str(row.get("split") or VALIDATION)


def split_counts(sequences: Sequences) -> dict[str, Row]:
    """Statistics of the splits by name: of a mixture, train of every cache with the cache's name.

    Held-out splits are those of the first cache.
    """
    own = sequences.cache.result["splits"]
    if not sequences.parts:
        return own
    caches = {part.cache.path.rpartition("/")[2]: part.cache for part in sequences.parts}
    found = {f"{TRAIN} of {name}": cache.result["splits"][TRAIN] for name, cache in caches.items()}
    first = next(iter(caches))
    return found | {f"{split} of {first}": own[split] for split in own if split != TRAIN}


def of_checkpoint(checkpoint: Checkpoint, name: str, ancestors: Iterable[Ancestor]) -> TrainingRun:
    """The record of a finished run; `ancestors`, its lineage, have the settings of all inputs."""
    tables: dict[str, Any] = {**checkpoint.tables()}
    return TrainingRun(
        name=name,
        attempts=checkpoint.attempts,
        config=_configuration(ancestors, checkpoint),
        entropy=checkpoint.result.get("unigram_entropy"),
        recipe=recipe_of(checkpoint.path, checkpoint.manifest),
        **tables,
    )


def _configuration(ancestors: Iterable[Ancestor], checkpoint: Checkpoint) -> dict[str, Any]:
    """A run's own settings, or those of the run it selects, and by step those of its inputs."""
    path, own = meant(checkpoint.path, checkpoint.manifest)
    read = _read(path, own)
    # The result has settings that the configuration lacks: the model of a continued checkpoint, and
    # steps, sequence length and seed that depend on the sequences.
    settings = {**plain(own.config), **_settings(own.result)}
    for budget in ("epochs", "tokens"):  # the settings have the steps that follow from them
        settings.pop(budget, None)
    found: dict[str, Any] = {}
    if _CONTINUED in read:
        at, take = settings.pop("at", None), settings.pop("take", None)
        found["continues"] = _TAKEN.get(take, f"with {take} of ") + _point(read[_CONTINUED], at)
    return {**found, **_above(ancestors, read.values()), **settings}


def _point(path: str, at: int | None) -> str:
    """Name of the run in the directory `path`, with the step at which another run continued it."""
    published = load(path)
    if published is None:
        where = "" if at is None else f" at step {at}"
        return f"{path.rpartition('/')[2]}{where}, which is gone"
    path, run = meant(path, published)
    if at is None and is_run(run):
        at = run.shard(run.result["checkpoint"]).result["step"]
    where = "" if at is None else f" at step {at}"
    # The directory's name is added because another run may have the same label.
    return f"{run.label}{where} ({run.home(path).rpartition('/')[2]})"


def _above(ancestors: Iterable[Ancestor], paths: Iterable[str]) -> dict[str, Any]:
    """By step, the configuration of the outputs at `paths` and of their ancestors.

    Training runs are left out, and so are ancestors that are reached only through them.
    """
    ancestors = list(ancestors)
    manifests = {ancestor.path: ancestor.manifest for ancestor in ancestors}
    reached: set[str] = set()
    stack = list(paths)
    while stack:
        path = stack.pop()
        if path in manifests:
            path, manifest = meant(path, manifests[path])
            if path not in reached and not is_run(manifest):
                reached.add(path)
                stack.extend(_read(path, manifest).values())
    return {a.manifest.label: plain(a.manifest.config) for a in ancestors if a.path in reached}


def meant(path: str, manifest: Manifest) -> tuple[str, Manifest]:
    """Directory and manifest of the output that a selection chose, if it exists; else its own."""
    try:
        return chosen(path, manifest)
    except CorruptOutput:
        return path, manifest


def _read(path: str, manifest: Manifest) -> dict[str, str]:
    """URL of the directory of each input, by name."""
    if not manifest.inputs and manifest.alias is not None:
        # An adopted output may record no inputs; the manifest of the original output has them.
        path = manifest.home(path)
        manifest = load(path) or manifest
    return {name: resolve_ref(path, read["directory"]) for name, read in manifest.inputs.items()}


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """A run's recorded settings in the form of a manifest's configuration, so that both compare."""
    from models.shape.config import TransformerConfig
    from models.shape.validation import from_plain
    from training.config import OptimizerConfig, TrainConfig

    kinds: dict[str, Any] = {
        "model": TransformerConfig.from_plain,
        "optimizer": lambda fields: from_plain(OptimizerConfig, fields),
        "train": TrainConfig.from_plain,
    }
    found: dict[str, Any] = {}
    for part, rebuild in kinds.items():
        fields = given.get(part)
        if isinstance(fields, Mapping):
            try:
                found[part] = plain(canonical(rebuild(fields)))
            except (InputError, KeyError, TypeError, msgspec.ValidationError):
                found[part] = dict(fields)  # written by a version with other fields
    return found


def of_directory(
    url: str, name: str, entries: Callable[[str], Iterable[Row]] | None = None
) -> TrainingRun:
    """The record of a run without a manifest: in progress, interrupted, or without the pipeline.

    Raises `InputError` for a directory without a `metrics.jsonl`, or with an empty one.

    Args:
        url: directory of its step; of one attempt, for the run up to the end of that attempt; or of
            a `metrics.jsonl`.
        name: label in legends.
        entries: reads the metrics log in a directory; by default all of it.
    """
    from training.metrics.goodput import fold
    from training.metrics.metrics_log import TABLES

    root, inside, attempt = url.rpartition(f"/{ATTEMPTS}/")
    step, entries = root if inside else url, entries or _entries
    directories, build = _attempts(step, attempt if inside else "")
    above = _lineage(Ledger(step, build)) if build else {}
    logs = [log for each in directories or [url] if (log := list(entries(each)))]
    if not logs:
        raise InputError(
            f"{url}: expected the directory of a run, with a {_METRICS} that is not empty, or of a "
            "`train` step, whose run writes one when it begins"
        )
    configs = [each for log in logs for each in log if each["kind"] == "config"]
    tables: dict[str, Any] = {table: _joined(logs, kind) for table, kind in TABLES.items()}
    return TrainingRun(
        name=name,
        attempts=list(filter(None, map(fold, logs))),
        config={**above, **_settings(configs[-1])} if configs else above,
        partial=True,
        **tables,
    )


def _attempts(step: str, last: str) -> tuple[list[str], str]:
    """Directories of the metrics logs of the newest run of a step, and its build.

    With `last`, those of that attempt's run up to it.
    """
    from training.metrics.metrics_log import read_log

    # Sorted by number, because the clocks of machines differ.
    above = storage.join(step, ATTEMPTS)
    found = {}
    for name in storage.list_names(above):
        directory = storage.join(above, name, KEEP)
        config = next(read_log(directory), None)
        if config is not None and (not last or name <= last):
            found[directory] = config.get("build", "")
    if not found or (last and storage.join(above, last, KEEP) not in found):
        return [], ""
    build = next(reversed(found.values()))
    return [directory for directory, own in found.items() if own == build], build


def _lineage(ledger: Ledger) -> dict[str, Any]:
    """By step, the configuration of an unfinished run's training data."""
    about = ledger.find(ABOUT)
    if about is None:
        return {}
    written = storage.read_json(storage.join(ledger.root, about.root, "about.json"))
    sequences = resolve_ref(ledger.root, written["sequences"])
    return _above(lineage([sequences]), [sequences])


def _entries(directory: str) -> list[Row]:
    from training.metrics.metrics_log import read_log

    try:
        return list(read_log(directory))
    except ValueError as error:
        url = storage.join(directory, _METRICS)
        raise InputError(f"{url}: expected an object of JSON a line ({error})") from error


def _joined(attempts: list[list[Row]], kind: str) -> list[Row]:
    """The entries of one kind by step; for a step that was repeated, those of the last attempt."""
    joined: dict[tuple[Any, ...], Row] = {}
    for entries in attempts:
        rows = [each for each in entries if each["kind"] == kind]
        begins = [each["step"] for each in entries if each["kind"] == "began"]
        # An attempt that ended before it restored its checkpoint repeats no steps.
        if begins or rows:
            first = begins[-1] if begins else 0
            joined = {k: row for k, row in joined.items() if k[0] <= first and (first or k[0])}
        joined |= {(row["step"], row.get("split"), row.get("prompt")): row for row in rows}
    return sorted(joined.values(), key=lambda row: row["step"])
