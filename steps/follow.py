"""Score the checkpoints of a training run while it trains, on hardware of its own.

    model  = train(sequences, ...)
    scores = follow(model, tokens)

Training never waits for it. It looks for committed checkpoints in the ledger of the training step,
scores the newest one that it has not scored, and records each in its own ledger, so one that was
cut off resumes where it was. It ends when the model is published and every checkpoint that is still
there is scored. A damaged one is left out, but never the model itself: that is an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from models.config import TransformerConfig
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
from pipeline.graph.step_context import Emit, ShardTask, write_shard
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from steps.artifacts import Checkpoint, Scores, TokenCache, Tokenizer
from steps.checkpoints.find import ABOUT, about_of
from steps.coordinator import FLAGS, coordinator_of
from steps.scoring.job import NOTHING_ELSE, Also, check_questions, score_job
from training.checkpoint.retention import due
from training.config import TrainConfig

if TYPE_CHECKING:
    from training.evaluate.checkpoint_scorer import Scored
    from training.evaluate.follow_checkpoints import Next

_FILE = "scores.json"
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Assignment:
    """What every process of the gang is sent.

    Attributes:
        job: what checkpoints are scored on.
        model: whose checkpoints.
        steps: of the training, to say how far it is.
        ledger, attempt: where scores are recorded.
        expected: steps that the training saves a checkpoint of.
    """

    job: Any
    model: Live[Checkpoint]
    steps: int
    ledger: Ledger
    attempt: str
    expected: tuple[int, ...] = ()


def _check(arguments: Mapping[str, Any]) -> None:
    check_questions(arguments)
    if arguments["also"].prompts and arguments["tokenizer"] is None:
        raise InputError("follow: prompts need a tokenizer: give it as the input `tokenizer`")


@step(output=Scores, version=2, cpus=0, check=_check, environment=FLAGS)
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
    """Loss and bits per byte of every checkpoint, as it comes; arguments as for `evaluate`.

    By default of every held-out split but "test", which is for the trained model.

    A checkpoint that retention deletes before it is scored is left out, with a warning, and listed
    in `measured.skipped`: keep more of them (`TrainConfig.keep_checkpoints`), or ask for fewer
    `sequences`.
    """
    live = Live.of(model)
    shape, train = _trained_as(run, live)
    job = score_job(
        tokens,
        tokenizer,
        shape,
        train,
        splits=splits or tokens.validation_splits,
        sequences=sequences,
        also=also,
        batch_size=batch_size,
    )
    expected = _expected(train, live.source.arguments)
    work = Assignment(job, live, train.steps, run.ledger, run.attempt, expected)
    answer = run.gang(hardware, follow_process, work)
    if not answer["ended"]:
        # Not a failure: what is scored is recorded, and another attempt resumes there.
        raise WorkerLost("asked to stop before the training it follows ended")
    return {**_table(run), "measured": {"hardware": hardware.name, "skipped": answer["skipped"]}}


def _trained_as(run: StepContext, live: Live[Checkpoint]) -> tuple[TransformerConfig, TrainConfig]:
    """Shape and training of the model, which a step that is still at work was called with.

    One that trains on has the shape from its checkpoint, and says it before it begins.
    """
    arguments = live.source.arguments
    shape, train = arguments.get("model"), arguments.get("train")
    declared = isinstance(shape, TransformerConfig) and isinstance(train, TrainConfig)
    if declared and train.steps and train.sequence_length:  # else they follow from the sequences
        return shape, train
    while (published := live.published()) is None and live.find(ABOUT) is None:
        if run.stopping:
            raise WorkerLost("asked to stop before the training it follows began")
        time.sleep(_LOOK_SECONDS)
    if published is not None:
        return published.model, published.train
    about = about_of(Ledger(live.path, live.source.build))
    return TransformerConfig.from_plain(about["model"]), TrainConfig.from_plain(about["train"])


def _expected(train: TrainConfig, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Steps that a training called so saves a checkpoint of; none where that is not known."""
    # A warm start counts its steps from 0, whatever checkpoint it takes the parameters of.
    first = 0 if "take" in arguments else arguments.get("at", 0)
    if first is None:
        return ()
    steps = range(first + 1, train.steps)
    saved = [s for s in steps if due(s, train)]
    return (*saved, train.steps)


def follow_process(work: Assignment, *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    """One process of the gang; process 0 looks for checkpoints and records their scores."""
    from training.evaluate.checkpoint_scorer import Scorer
    from training.evaluate.follow_checkpoints import follow as follow_loop
    from training.sharding import distributed

    coordinator = coordinator_of(process)
    distributed.initialize(coordinator)
    desk = _Desk(work, emit)
    with closing(Scorer(work.job)) as scorer:
        ended = follow_loop(scorer, desk.find, desk.keep, desk.skip)
    if coordinator is not None:
        distributed.shutdown()
    return {"ended": ended, "skipped": [{"step": s, "cause": c} for s, c in desk.skipped.items()]}


@dataclass
class _Desk:
    """Process 0's side: which checkpoints there are, and which are done with."""

    work: Assignment
    emit: Emit
    skipped: dict[int, str] = field(default_factory=dict)
    _scored: set[int] | None = None

    def find(self) -> Next:
        """The newest checkpoint that is not done with."""
        from training.evaluate.follow_checkpoints import Next

        if self._scored is None:
            finished = self.work.ledger.finished("score/").values()
            self._scored = {shard.result["step"] for shard in finished}
        live = self.work.model
        # Asked first: what is published after the shards were listed could have more of them.
        published = live.published()
        if published is None:
            there = {s.result["step"]: s for s in live.shards("checkpoint/").values()}
            passed = set(self.skipped)
        else:
            there = {s.result["step"]: s for s in published.shards("checkpoint/")}
            # The final model is scored after all: it was not known to be final when it was skipped.
            model = published.manifest.shard(published.result["checkpoint"])
            there[model.result["step"]] = model
            passed = self.skipped.keys() - {model.result["step"]}
        left = there.keys() - self._scored - passed
        if not left:
            if published is not None:
                self._tell_missed()
            return Next(end=published is not None)
        newest = there[max(left)]
        path = live.url(newest) if published is None else published.shard(newest.name)
        return Next(newest.name, max(left), path)

    def keep(self, found: Next, scored: Scored) -> None:
        """Record the scores of a checkpoint."""
        assert self._scored is not None
        name = f"score/{found.step:08d}"
        item = {
            "step": found.step,
            **{
                part: [{"step": found.step, **row} for row in rows]
                for part, rows in asdict(scored).items()
            },
        }
        write_shard(ShardTask(self.work.ledger, self.work.attempt, name, write_scores, item))
        self._scored.add(found.step)
        self.skipped.pop(found.step, None)
        first = scored.rows[0]
        note = f"{first['set']} loss {first['loss']:.3f}"
        progress = {"done": found.step, "total": self.work.steps, "unit": "steps", "note": note}
        self.emit({"event": "progress", **progress})

    def skip(self, found: Next, cause: str) -> None:
        """Take note of a checkpoint that cannot be read.

        Raises:
            CorruptOutput: when it is the model that was published.
        """
        published = self.work.model.published()
        if published is not None and published.result["checkpoint"] == found.name:
            raise CorruptOutput(
                f"the model that is published, of step {found.step:,}, cannot be read: {cause}; "
                f"build it again with --force {published.manifest.label}"
            )
        if published is None and self.work.model.find(found.name) is None:
            cause = "deleted before it was scored; keep more checkpoints, or score fewer sequences"
        self.skipped[found.step] = cause
        message = f"the checkpoint of step {found.step} is skipped: {cause}"
        self.emit({"event": "warning", "message": message})

    def _tell_missed(self) -> None:
        """Take note of checkpoints that came and went between two looks."""
        assert self._scored is not None
        missed = sorted(set(self.work.expected) - self._scored - self.skipped.keys())
        if not missed:
            return
        cause = "deleted before it was looked at, or never saved; keep more checkpoints"
        self.skipped |= dict.fromkeys(missed, cause)
        steps = ", ".join(map(str, missed[:10])) + (" ..." if len(missed) > 10 else "")
        message = f"{len(missed)} checkpoints are not scored, of steps {steps}: {cause}"
        self.emit({"event": "warning", "message": message})


def write_scores(directory: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Shard writer: the scores of one checkpoint."""
    storage.write_atomic(storage.join(directory, _FILE), json.dumps(item).encode())
    return {"step": item["step"]}


def _table(run: StepContext) -> dict[str, Any]:
    """Every checkpoint's rows by step, and those of the last one."""
    urls = [storage.join(run.root, s.root, _FILE) for s in run.finished("score/").values()]
    scores = [storage.read_json(url) for url in urls]
    rows = [row for score in scores for row in score["rows"]]
    last = scores[-1]["rows"][0]
    return {
        **last,
        "rows": rows,
        "tasks": [row for score in scores for row in score["tasks"]],
        "headline": [
            f"{len(scores)} checkpoints followed; {last['set']} loss of the last, step "
            f"{last['step']:,}: {last['loss']:.3f} nats per token"
        ],
    }
