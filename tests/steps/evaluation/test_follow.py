"""Which checkpoint a follower scores next, and what it makes of those that cannot be read."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import types

import pytest

from pipeline import Live, Result, StepContext, step
from pipeline.errors import CorruptOutput, StepFailed, StoreUnavailable, WorkerLost
from pipeline.events import Progress, Warned
from pipeline.graph.artifact import Source
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import make_ref
from steps.artifacts import Checkpoint, Sequences
from steps.checkpoints.find import tokenizer_digest
from steps.evaluation.evaluate import evaluate
from steps.evaluation.follow import Assignment, _Desk, _expected, _trained_as, _trained_on
from steps.evaluation.follow import follow as follow_step
from steps.tokens.sequences import block_shuffle
from tests.pipeline.helpers import bring_up
from tests.steps.built import built
from tests.steps.synthetic import synthetic
from tests.training import tiny
from training.evaluate import checkpoint_scorer
from training.evaluate.checkpoint_scorer import MOST_FAILED_LOOKS, Scored, follow

ROW = {"split": "validation", "loss": 3.0, "bits_per_byte": 1.0, "tokens": 10, "bytes": 20}


def name(number):
    return f"checkpoint/{number:08d}"


@step(output=Checkpoint, version=1, name="pretended_training")
def pretended(run: StepContext, *, steps: tuple[int, ...]) -> Result:
    """Checkpoints of one file; the last is the model."""
    for number in steps:
        with run.shard(name(number), {"step": number}) as directory:
            storage.write_atomic(storage.join(directory, "x"), b"x")
    return {"checkpoint": name(steps[-1])}


class Trial:
    """A training that is pretended, a follower's desk beside it, and a scorer that reads files."""

    def __init__(self, folder):
        self.root, self.events = str(folder / "train-0"), []
        self.made = Ledger(self.root, "g")
        self.live = Live(Checkpoint, self.root, "0" * 64, Source("g", "", {}))
        self.scores = Ledger(str(folder / "follow-0"), "g")
        self.expected = ()
        self.desk = self.fresh()
        self.unreadable, self.failures, self.order = {}, {}, []

    def fresh(self):
        return _Desk(Assignment(None, self.live, 100, self.scores, "1"), self.events.append)

    def commit(self, number):
        path = storage.join(self.root, "attempts", "1", f"{number}")
        storage.write_atomic(storage.join(path, "x"), b"x")
        self.made.add(name(number), path, {"step": number})

    def load(self, path):
        number = int(path.rpartition("/")[2].partition(".")[0])
        self.order.append(number)
        if self.failures.get(number):
            self.failures[number] -= 1
            raise StoreUnavailable(f"{path}: 503")
        if number in self.unreadable:
            self.unreadable[number]()
            raise CorruptOutput(f"{path}: gone or torn")
        return number

    def score(self, model):
        return Scored(rows=[{**ROW, "loss": 1 / model}], samples=[])

    def publish(self, steps, folder):
        """From now on, the training is published with checkpoints of these steps."""
        execution = bring_up(str(folder / "published"), pretended(steps=steps))
        (found,) = execution.published.values()
        self.live = Live(Checkpoint, found.path, found.manifest.key, Source("g", "", {}))
        self.desk.work = Assignment(None, self.live, 100, self.scores, "1", self.expected)

    def follow(self):
        return follow(self, self.desk.find, self.desk.keep, self.desk.skip)


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """A trial whose follower, when nothing is left to do for now, is told to leave."""
    made = Trial(tmp_path)

    def leave(seconds):
        if not made.failures:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(checkpoint_scorer, "time", types.SimpleNamespace(sleep=leave))
    return made


def test_the_newest_comes_first_and_none_comes_twice(trial):
    """Three checkpoints, newest first; a follower that was cut off does only what is new."""
    for number in (10, 20, 30):
        trial.commit(number)
    assert trial.follow() is False, "told to leave while training goes on"
    assert trial.order == [30, 20, 10]
    assert [s.result["step"] for s in trial.scores.finished("score/").values()] == [10, 20, 30]
    trial.commit(40)
    trial.desk = trial.fresh()
    assert trial.follow() is False
    assert trial.order == [30, 20, 10, 40]
    notes = [event.note for event in trial.events if isinstance(event, Progress)]
    assert notes[-1] == "validation loss 0.025"


def test_a_checkpoint_dropped_while_it_is_read_is_skipped_with_a_note(trial):
    """Retention takes one away in the middle of reading it: a warning, and the others go on."""
    for number in (10, 20):
        trial.commit(number)
    trial.unreadable[20] = lambda: trial.made.drop(name(20), "1")
    assert trial.follow() is False
    assert trial.order == [20, 10]
    (warning,) = [event for event in trial.events if isinstance(event, Warned)]
    assert "step 20 is skipped: deleted before it was scored" in warning.message
    assert list(trial.scores.finished("score/")) == ["score/00000010"]


def test_a_damaged_model_is_an_error(trial, tmp_path):
    """The last checkpoint is the output: it cannot be passed over. An older one can."""
    trial.publish((10, 20), tmp_path)
    trial.unreadable[10] = lambda: None
    assert trial.follow() is True
    assert list(trial.desk.skipped) == [10]
    trial.scores = Ledger(str(tmp_path / "again"), "g")
    trial.desk = trial.fresh()
    trial.unreadable[20] = lambda: None
    with pytest.raises(CorruptOutput, match="gone or torn"):
        trial.follow()


@pytest.mark.parametrize("sound", [False, True])
def test_the_model_is_never_among_the_skipped(trial, tmp_path, sound):
    """Skipped before anybody knew that it is the model: read again, scored, or else an error."""
    trial.commit(20)
    trial.unreadable[20] = lambda: None
    assert trial.follow() is False
    assert list(trial.desk.skipped) == [20]
    trial.publish((10, 20), tmp_path)
    if sound:
        del trial.unreadable[20]
        assert trial.follow() is True
        assert list(trial.scores.finished("score/")) == ["score/00000010", "score/00000020"]
        assert trial.desk.skipped == {}
    else:
        with pytest.raises(CorruptOutput, match=r"step 20, .*gone or torn.*--force pret"):
            trial.follow()


def test_a_store_that_fails_for_a_moment_costs_no_checkpoint(trial, tmp_path):
    """Two checkpoints of three fail at first, one as often as it may: all three are scored."""
    trial.publish((10, 20, 30), tmp_path)
    trial.failures = {30: MOST_FAILED_LOOKS - 1, 10: 1}
    assert trial.follow() is True
    assert trial.order == [30] * MOST_FAILED_LOOKS + [20, 10, 10]
    assert len(trial.scores.finished("score/")) == 3
    assert trial.desk.skipped == {}
    assert [event for event in trial.events if isinstance(event, Warned)] == []


def test_a_store_that_goes_on_failing_ends_the_attempt_and_the_next_scores_all(trial, tmp_path):
    """The error is one for which a step is tried again, and nothing was passed over."""
    trial.publish((10, 20), tmp_path)
    trial.failures = {20: MOST_FAILED_LOOKS}
    with pytest.raises(StoreUnavailable, match=r"failed 5 times in a row: .*503"):
        trial.follow()
    assert trial.order == [20] * MOST_FAILED_LOOKS
    assert trial.desk.skipped == {}
    trial.desk = trial.fresh()
    assert trial.follow() is True
    assert len(trial.scores.finished("score/")) == 2


def test_what_came_and_went_between_two_looks_is_listed(trial, tmp_path):
    """Of six checkpoints the last is there at the end; one warning names the other five."""
    trial.expected = (10, 20, 30, 40, 50, 60)
    trial.publish((60,), tmp_path)
    assert trial.follow() is True
    assert trial.order == [60]
    assert sorted(trial.desk.skipped) == [10, 20, 30, 40, 50]
    (warning,) = [event for event in trial.events if isinstance(event, Warned)]
    assert warning.message.startswith("5 checkpoints are not scored, of steps 10, 20, 30")


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ({}, (2, 3, 4, 6, 7)),
        ({"at": 4}, (6, 7)),
        ({"at": None}, ()),
        ({"at": 4, "take": "model"}, (2, 3, 4, 6, 7)),
        ({"at": None, "take": "moments"}, (2, 3, 4, 6, 7)),
    ],
)
def test_a_training_saves_at_its_interval_its_milestones_and_its_end(arguments, want):
    """From where it begins: 0, or the step of the run that is extended, as far as it is said."""
    train = dataclasses.replace(tiny.TRAIN, steps=7, checkpoint_every=2, milestones=(3,))
    assert _expected(train, arguments) == want


BY_EPOCHS = dataclasses.replace(tiny.TRAIN, steps=0)
BY_SEQUENCES = dataclasses.replace(tiny.TRAIN, sequence_length=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"model": tiny.MODEL, "train": BY_EPOCHS, "epochs": 1.0},
        {"model": tiny.MODEL, "train": BY_SEQUENCES},
    ],
)
def test_a_follower_waits_for_what_the_arguments_of_the_training_do_not_say(trial, arguments):
    """The shape of a model that is trained on, steps by epochs or tokens, the sequences' length."""
    run = types.SimpleNamespace(stopping=True)
    trial.live = dataclasses.replace(trial.live, source=Source("g", "", arguments))
    with pytest.raises(WorkerLost, match="before the training it follows began"):
        _trained_as(run, trial.live)
    about = {"model": dataclasses.asdict(tiny.MODEL), "train": dataclasses.asdict(tiny.TRAIN)}
    path = storage.join(trial.root, "attempts", "1", "about")
    storage.write_atomic(storage.join(path, "about.json"), json.dumps(about).encode())
    trial.made.add("about", path, {})
    assert _trained_as(run, trial.live) == (tiny.MODEL, tiny.TRAIN)


@step(output=Checkpoint, version=1)
def unscored(run: StepContext, sequences: Sequences) -> Result:
    """A model without checkpoints, of which nothing is read before its data are refused."""
    settings = {"model": dataclasses.asdict(tiny.MODEL), "train": dataclasses.asdict(tiny.TRAIN)}
    return {"checkpoint": "none", **settings}


@pytest.mark.parametrize("score", [evaluate, follow_step])
def test_tokens_of_another_tokenizer_are_refused(tmp_path, score):
    """Their loss would mean nothing, of as many ids too."""
    model = unscored(block_shuffle(synthetic(tokenizer="mine"), tiny.LENGTH))
    with pytest.raises(
        StepFailed, match=r"model's tokenizer has digest mine, that of the tokens t;"
    ):
        bring_up(str(tmp_path), score(model, synthetic(tokenizer="t")))


def test_a_follower_knows_the_tokenizer_of_a_training_that_runs(trial, tmp_path):
    """By the sequences that the training records before its first step."""
    data = built(tmp_path, block_shuffle(synthetic(tokenizer="mine"), tiny.LENGTH), Sequences)
    path = storage.join(trial.root, "attempts", "1", "about")
    about = {"sequences": make_ref(trial.root, data.path)}
    storage.write_atomic(storage.join(path, "about.json"), json.dumps(about).encode())
    trial.made.add("about", path, {})
    found = _trained_on(types.SimpleNamespace(stopping=True), trial.live)
    assert tokenizer_digest(found) == "mine"
