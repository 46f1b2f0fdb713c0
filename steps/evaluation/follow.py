"""Score the checkpoints of a training run while it trains, on hardware of its own.

Training never waits for this step, which polls the ledger of the training step for committed
checkpoints, scores the newest one that has no scores yet, and records the scores in its own ledger,
from which a new attempt resumes. It ends when the model is published and every checkpoint that
still exists has scores. A corrupt checkpoint is skipped, unless it is the published model: that is
an error.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from models.shape.config import TransformerConfig
from pipeline import (
    GangProcess,
    Hardware,
    InputError,
    Live,
    Result,
    Runtime,
    StepContext,
    local,
    step,
)
from pipeline.errors import CorruptOutput, WorkerLost
from pipeline.events import Emit, Progress, Warned
from pipeline.graph.step_context import ShardTask, write_shard
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import load, resolve_ref
from pipeline.store.parallel import concurrently
from steps.artifacts import Checkpoint, Scores, Sequences, TokenCache, Tokenizer
from steps.checkpoints.find import ABOUT, about_of
from steps.evaluation.evaluate import NOTHING_ELSE, Also, check_sizes, check_tokens, score_job
from steps.gang import FLAGS, joined
from steps.measured import SEQUENCES
from training.config import TrainConfig
from training.config.batch_schedule import due

if TYPE_CHECKING:
    from training.evaluate.checkpoint_scorer import Next, Scored

_FILE = "scores.json"
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Assignment:
    """The argument of every process of the gang.

    `job` is the `ScoreJob` of every checkpoint of the training step `model`, `steps` the training's
    length, and `expected` are the steps at which it saves a checkpoint.
    """

    job: Any
    model: Live[Checkpoint]
    steps: int
    ledger: Ledger
    attempt: str
    expected: tuple[int, ...] = ()


def _check(arguments: Mapping[str, Any]) -> None:
    check_sizes(arguments)
    if arguments["also"].prompts and arguments["tokenizer"] is None:
        raise InputError("follow: prompts need a tokenizer: give it as the input `tokenizer`")


@step(output=Scores, version=4, cpus=0, check=_check, environment=FLAGS)
def follow(
    run: StepContext,
    model: Annotated[Checkpoint, Live],
    tokens: TokenCache,
    tokenizer: Tokenizer | None = None,
    *,
    splits: tuple[str, ...] = (),
    sequences: int | None = None,
    also: Also = NOTHING_ELSE,
    batch_size: Annotated[int | None, Runtime] = None,
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """Loss and bits per byte of every checkpoint while training runs; arguments as for `evaluate`.

    The default splits are all held-out splits but "test", which is reserved for the trained model.

    A checkpoint that retention deletes before it is scored is skipped, with a warning, and listed
    in `measured.skipped`: keep more checkpoints (`TrainConfig.keep_checkpoints`), or score fewer
    `sequences`.
    """
    live = Live.of(model)
    shape, train = _trained_as(run, live)
    check_tokens("follow", _trained_on(run, live), tokens)
    named = splits or tokens.validation_splits
    sizes = {"sequences": sequences, "batch_size": batch_size}
    job = score_job(tokens, tokenizer, shape, train, named, also, **sizes)
    expected = _expected(train, live.source.arguments)
    work = Assignment(job, live, train.steps, run.ledger, run.attempt, expected)
    answer = run.gang(hardware, follow_process, work)
    if not answer["ended"]:
        # Not a failure of the step: the next attempt resumes after the recorded scores.
        raise WorkerLost("cancelled before the training it follows ended")
    return {**_table(run), "measured": {"hardware": hardware.name, "skipped": answer["skipped"]}}


def _trained_as(run: StepContext, live: Live[Checkpoint]) -> tuple[TransformerConfig, TrainConfig]:
    """The configurations of the model and of its training, which may still be running.

    The arguments of the training step, if these are complete; else those that it records (`ABOUT`)
    before it trains.
    """
    arguments = live.source.arguments
    shape, train = arguments.get("model"), arguments.get("train")
    declared = isinstance(shape, TransformerConfig) and isinstance(train, TrainConfig)
    if declared and train.steps and train.sequence_length:  # else derived from the sequences
        return shape, train
    if (published := _begun(run, live)) is not None:
        return published.model, published.train
    about = about_of(Ledger(live.path, live.source.build))
    return TransformerConfig.from_plain(about["model"]), TrainConfig.from_plain(about["train"])


def _trained_on(run: StepContext, live: Live[Checkpoint]) -> Checkpoint | TokenCache:
    """The published model, or else the token cache of its training."""
    if (published := _begun(run, live)) is not None:
        return published
    about = about_of(Ledger(live.path, live.source.build))
    path = resolve_ref(live.path, about["sequences"])
    found = load(path)
    if found is None:
        raise InputError(f"follow: {path}, which {live.path} trains on, is gone; run again")
    return Sequences(path, found).cache


def _begun(run: StepContext, live: Live[Checkpoint]) -> Checkpoint | None:
    """Wait until the training is published, which is returned, or has recorded `ABOUT`."""
    while (published := live.published()) is None and live.find(ABOUT) is None:
        if run.stopping:
            raise WorkerLost("cancelled before the training it follows began")
        time.sleep(_LOOK_SECONDS)
    return published


def _expected(train: TrainConfig, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Steps at which a training with these arguments saves a checkpoint; empty if unknown."""
    # A warm start counts its steps from 0; only `extend` continues at the checkpoint's step.
    first = 0 if "take" in arguments else arguments.get("at", 0)
    if first is None:
        return ()
    return (*(s for s in range(first + 1, train.steps) if due(s, train)), train.steps)


def follow_process(work: Assignment, *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    from training.evaluate.checkpoint_scorer import Scorer
    from training.evaluate.checkpoint_scorer import follow as follow_loop

    desk = _Desk(work, emit)
    with joined(process), closing(Scorer(work.job)) as scorer:
        ended = follow_loop(scorer, desk.find, desk.keep, desk.skip)
    return {"ended": ended, "skipped": [{"step": s, "cause": c} for s, c in desk.skipped.items()]}


@dataclass
class _Desk:
    """The state of process 0: which checkpoints exist, and which are scored or skipped."""

    work: Assignment
    emit: Emit
    skipped: dict[int, str] = field(default_factory=dict)
    _scored: set[int] | None = None

    def find(self) -> Next:
        """The newest checkpoint that is neither scored nor skipped; or the end of the training."""
        from training.evaluate.checkpoint_scorer import Next

        if self._scored is None:
            finished = self.work.ledger.finished("score/").values()
            self._scored = {shard.result["step"] for shard in finished}
        live = self.work.model
        # Before the ledger is listed: a later publication could add checkpoints to the list.
        published = live.published()
        if published is None:
            saved = {s.result["step"]: s for s in live.shards("checkpoint/").values()}
            skipped = set(self.skipped)
        else:
            saved = {s.result["step"]: s for s in published.shards("checkpoint/")}
            # Score the final model even if it was skipped before it was known to be final.
            model = published.manifest.shard(published.result["checkpoint"])
            saved[model.result["step"]] = model
            skipped = self.skipped.keys() - {model.result["step"]}
        left = saved.keys() - self._scored - skipped
        if not left:
            if published is not None:
                self._warn_missed()
            return Next(end=published is not None)
        newest = saved[max(left)]
        path = live.url(newest) if published is None else published.shard(newest.name)
        return Next(newest.name, max(left), path)

    def keep(self, found: Next, scored: Scored) -> None:
        assert self._scored is not None
        name = f"score/{found.step:08d}"
        item: dict[str, Any] = {"step": found.step}
        for part, rows in asdict(scored).items():
            if part != SEQUENCES or found.step == self.work.steps:
                item[part] = [{"step": found.step, **row} for row in rows]
        write_shard(ShardTask(self.work.ledger, self.work.attempt, name, write_scores, item))
        self._scored.add(found.step)
        self.skipped.pop(found.step, None)
        first = scored.rows[0]
        note = f"{first['split']} loss {first['loss']:.3f}"
        self.emit(Progress(found.step, self.work.steps, "steps", note))

    def skip(self, found: Next, cause: str) -> None:
        """Record and report a checkpoint that cannot be read."""
        published = self.work.model.published()
        if published is not None and published.result["checkpoint"] == found.name:
            raise CorruptOutput(
                f"the model that is published, of step {found.step:,}, cannot be read: {cause}; "
                f"build it again with --force {shlex.quote(published.manifest.label)}"
            )
        if published is None and self.work.model.find(found.name) is None:
            cause = "deleted before it was scored; keep more checkpoints, or score fewer sequences"
        self.skipped[found.step] = cause
        self.emit(Warned(f"the checkpoint of step {found.step} is skipped: {cause}"))

    def _warn_missed(self) -> None:
        """Record and report checkpoints that were saved and deleted between two polls."""
        assert self._scored is not None
        missed = sorted(set(self.work.expected) - self._scored - self.skipped.keys())
        if not missed:
            return
        cause = "deleted before they were seen, or never saved; keep more checkpoints"
        self.skipped |= dict.fromkeys(missed, cause)
        steps = ", ".join(map(str, missed[:10])) + (" ..." if len(missed) > 10 else "")
        self.emit(Warned(f"{len(missed)} checkpoints are not scored, of steps {steps}: {cause}"))


def write_scores(directory: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    storage.write_atomic(storage.join(directory, _FILE), json.dumps(item).encode())
    return {"step": item["step"]}


def _table(run: StepContext) -> dict[str, Any]:
    """The result: rows of every checkpoint by step, and the scores of the last one."""
    urls = [storage.join(run.root, s.root, _FILE) for s in run.finished("score/").values()]
    scores = concurrently(storage.read_json, urls, run.root)
    rows = [row for score in scores for row in score["rows"]]
    last = scores[-1]["rows"][0]
    headline = (
        f"{len(scores)} checkpoints followed; {last['split']} loss of the last, step "
        f"{last['step']:,}: {last['loss']:.3f} nats per token"
    )
    return {**last, "rows": rows, "headline": [headline]}
