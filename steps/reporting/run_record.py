"""What one training run left behind, as pages and comparisons look at it.

A finished run is a `Checkpoint`; one that still goes is its step's directory, and one that went
without the pipeline a directory with `metrics.jsonl`. What an older record does not have is empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline import InputError
from pipeline.errors import CorruptOutput
from pipeline.identity.fingerprint import canonical, plain
from pipeline.plan.lineage import Ancestor, lineage
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import ATTEMPTS, KEEP, Manifest, chosen, load, resolve_ref
from steps.checkpoints.find import ABOUT, is_run

if TYPE_CHECKING:
    from steps.artifacts import Checkpoint
    from training.metrics.goodput import Account
    from training.metrics.journal import Attempt

Row = dict[str, Any]
VALIDATION = "validation"
_METRICS = "metrics.jsonl"
_CONTINUED = "checkpoint"  # input of the steps that train on, whose model they begin with
_TAKEN = {None: "", "model": "with the model of ", "moments": "with the model and moments of "}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run.

    Attributes:
        name: for legends.
        history: a row a step, see `training.metrics.recorder`.
        evaluations: rows with step, loss and others, and the `set` they are of.
        samples: rows with step, prompt and completion.
        journals: accounts of the attempts as plain mappings.
        config: what it was asked to be, nested. What a run that it continues was asked is not
            in it: "continues" says which run that is.
        entropy: unigram entropy of the training tokens in nats, None where it is not known.
        partial: whether `config` may lack settings that the run has, as that of an unfinished one.
    """

    name: str
    history: list[Row]
    evaluations: list[Row]
    samples: list[Row]
    journals: list[Row]
    config: Mapping[str, Any]
    entropy: float | None = None
    partial: bool = False

    @property
    def sets(self) -> list[str]:
        """Names of the held-out sets, in order of appearance."""
        return list(dict.fromkeys(set_of(row) for row in self.evaluations))

    def scores(self, name: str) -> list[Row]:
        """The evaluations of one set."""
        return [row for row in self.evaluations if set_of(row) == name]

    def account(self) -> Account | None:
        """Where its time went; None without a journal."""
        from training.metrics.goodput import account
        from training.metrics.journal import Attempt

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
    tables = checkpoint.tables()
    return RunRecord(
        name=name,
        history=tables["history"],
        evaluations=tables["evaluations"],
        samples=tables["samples"],
        journals=checkpoint.journals,
        config=_configuration(ancestors, checkpoint),
        entropy=checkpoint.result.get("unigram_entropy"),
    )


def _configuration(ancestors: Iterable[Ancestor], checkpoint: Checkpoint) -> dict[str, Any]:
    """A run's own settings, and by step those of what it was made from.

    Of a selected run it is that of the run that was chosen.
    """
    path, own = _meant(checkpoint.path, checkpoint.manifest)
    read = _read(path, own)
    # A step that continues training has its model from the checkpoint; the number of steps, their
    # length and the seed may follow from what is trained on.
    settings = {**plain(own.config), **_settings(own.result)}
    for budget in ("epochs", "tokens"):  # of steps, which are among the settings
        settings.pop(budget, None)
    found: dict[str, Any] = {}
    if _CONTINUED in read:
        at, take = settings.pop("at", None), settings.pop("take", None)
        found["continues"] = _TAKEN.get(take, f"with {take} of ") + _point(read[_CONTINUED], at)
    return {**found, **_above(ancestors, read.values()), **settings}


def _point(path: str, at: int | None) -> str:
    """The run in the directory `path`, and how far it was when another one continued it."""
    published = load(path)
    if published is None:
        where = "" if at is None else f" at step {at}"
        return f"{path.rpartition('/')[2]}{where}, which is gone"
    path, run = _meant(path, published)
    if at is None and is_run(run):
        at = run.shard(run.result["checkpoint"]).result["step"]
    where = "" if at is None else f" at step {at}"
    # By its files too: another run may be called the same.
    return f"{run.label}{where} ({run.home(path).rpartition('/')[2]})"


def _above(ancestors: Iterable[Ancestor], paths: Iterable[str]) -> dict[str, Any]:
    """By step, the configuration of the outputs at `paths` and of what they were made from.

    Training runs are left out, with what nothing but they were made from.
    """
    ancestors = list(ancestors)
    manifests = {ancestor.path: ancestor.manifest for ancestor in ancestors}
    reached: set[str] = set()
    stack = list(paths)
    while stack:
        path = stack.pop()
        if path in manifests:
            path, manifest = _meant(path, manifests[path])
            if path not in reached and not is_run(manifest):
                reached.add(path)
                stack.extend(_read(path, manifest).values())
    return {a.manifest.label: plain(a.manifest.config) for a in ancestors if a.path in reached}


def _meant(path: str, manifest: Manifest) -> tuple[str, Manifest]:
    """Directory and manifest of what a selection chose, if that is still there; else its own."""
    try:
        return chosen(path, manifest)
    except CorruptOutput:
        return path, manifest


def _read(path: str, manifest: Manifest) -> dict[str, str]:
    """URL of the directory of each input, by name."""
    if not manifest.inputs and manifest.origin is not None:
        # An adopted output need not say what it was made from; whose files it has, does.
        path = manifest.home(path)
        manifest = load(path) or manifest
    return {name: resolve_ref(path, read["directory"]) for name, read in manifest.inputs.items()}


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run of what it says of itself: the settings that a manifest has, as it has them.

    Args:
        given: some of model, optimizer and train, with all their fields as JSON holds them.
    """
    from models.config import TransformerConfig
    from training.config import OptimizerConfig, TrainConfig

    kinds: dict[str, Any] = {
        "model": TransformerConfig.from_plain,
        "optimizer": lambda fields: OptimizerConfig(**fields),
        "train": TrainConfig.from_plain,
    }
    found: dict[str, Any] = {}
    for part, rebuild in kinds.items():
        fields = given.get(part)
        if isinstance(fields, Mapping):
            try:
                found[part] = plain(canonical(rebuild(fields)))
            except (InputError, KeyError, TypeError):
                found[part] = dict(fields)  # of a version with other fields
    return found


def of_directory(url: str, name: str) -> RunRecord:
    """A run without a manifest: one that still goes, was cut off, or went without the pipeline.

    Args:
        url: directory of its step, of one attempt, which stands for the run up to its end, or of a
            `metrics.jsonl`, with the journals in `journal` beside it.
        name: for legends.

    Raises:
        InputError: there is no such file.
    """
    from training.metrics.journal import read_journals

    root, inside, attempt = url.rpartition(f"/{ATTEMPTS}/")
    generation, journals = _attempts(root, attempt) if inside else _attempts(url)
    if journals:
        step = root if inside else url
        attempts = [_entries(storage.join(step, ATTEMPTS, a.attempt, KEEP)) for a in journals]
        above = _lineage(Ledger(step, generation))
    else:
        journals = read_journals(storage.join(url, "journal"))
        attempts, above = [_entries(url)], {}
    if not any(attempts):
        raise InputError(
            f"{url}: expected the directory of a run, with a {_METRICS} that is not empty, or of a "
            "`train` step, whose run writes one when it begins"
        )
    configs = [each for entries in attempts for each in entries if each["kind"] == "config"]
    return RunRecord(
        name=name,
        history=_joined(attempts, "step"),
        evaluations=_joined(attempts, "evaluation"),
        samples=_joined(attempts, "sample"),
        journals=[json.loads(each.to_json()) for each in journals],
        config={**above, **_settings(configs[-1])} if configs else above,
        partial=True,
    )


def _attempts(step: str, last: str = "") -> tuple[str, list[Attempt]]:
    """Generation and journals of the newest run in a step's directory, by attempt.

    Args:
        step: URL of the directory.
        last: name of an attempt: of the run that it is of, and up to it. None are found where it
            has no journal.
    """
    from training.metrics.journal import read_journals

    runs = []
    for generation in storage.list_names(storage.join(step, "journal")):
        journals = read_journals(storage.join(step, "journal", generation))
        # Attempts are numbered, and clocks of machines contradict each other.
        journals.sort(key=lambda each: each.attempt)
        names = [each.attempt for each in journals]
        if last in names:
            return generation, journals[: names.index(last) + 1]
        runs.append((names[-1:], generation, journals))
    if last or not runs:
        return "", []
    _, generation, journals = max(runs, key=lambda each: each[:2])
    return generation, journals


def _lineage(ledger: Ledger) -> dict[str, Any]:
    """By step, the configuration of what an unfinished run is trained on."""
    about = ledger.find(ABOUT)
    if about is None:
        return {}
    written = storage.read_json(storage.join(ledger.root, about.root, "about.json"))
    sequences = resolve_ref(ledger.root, written["sequences"])
    return _above(lineage([sequences]), [sequences])


def _entries(directory: str) -> list[Row]:
    from training.metrics.history import read_log

    try:
        return list(read_log(directory))
    except ValueError as error:
        url = storage.join(directory, _METRICS)
        raise InputError(f"{url}: expected an object of JSON a line ({error})") from error


def _joined(attempts: list[list[Row]], kind: str) -> list[Row]:
    """The entries of one kind in order of steps; of a step that was done again, the last ones."""
    joined: dict[tuple[Any, ...], Row] = {}
    for entries in attempts:
        rows = [each for each in entries if each["kind"] == kind]
        begins = [each["step"] for each in entries if each["kind"] == "began"]
        # One that ended before it had read its checkpoint did nothing, and took nothing back.
        if begins or rows:
            first = begins[-1] if begins else 0
            joined = {k: row for k, row in joined.items() if k[0] <= first and (first or k[0])}
        joined |= {(row["step"], row.get("set"), row.get("prompt")): row for row in rows}
    return sorted(joined.values(), key=lambda row: row["step"])
