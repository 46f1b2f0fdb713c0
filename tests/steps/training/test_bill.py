"""What `plan` says of a training on preemptible machines, and a budget that ends one."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from pipeline import pod
from pipeline.cli import stopping
from pipeline.execute.spending import Spending
from pipeline.graph.capacity import Capacity
from pipeline.graph.facts import Published
from pipeline.pages.record import read, runs
from pipeline.plan import facts as known
from pipeline.prices import PRICES
from steps.training.plan import bill
from steps.training.plan.bill import preemptions_of
from steps.training.plan.cost import TPU_HOURS, TPU_WAIT
from steps.training.plan.timings import fields
from tests.pipeline.execute.run_logs import Log
from tests.pipeline.execute.run_logs import node as recorded_node
from tests.steps.mini import MINI, run
from tests.steps.training.test_planning import node
from training.config import TrainConfig
from training.metrics.goodput import read_attempts

SPOT = Capacity(spot=True)


def stated(prefix="", capacity=SPOT, **settings):
    """The facts of the 200M experiment's training under a capacity."""
    train = node(**settings)
    return known.state([train], Published({}, prefix, capacity))[train.key]


@pytest.fixture
def noon(monkeypatch):
    """The time is a fixed one."""
    monkeypatch.setattr(bill.time, "time", lambda: 1_800_000_000.0)


def test_the_plan_on_spot_has_the_end_and_the_bill(noon):
    """Three percentiles each: the bill is the hours held times the price of 16 chips."""
    found = stated()
    data = json.loads(json.dumps(found.data["spot"], allow_nan=False))
    assert data["hours"] == sorted(data["hours"])
    assert data["held_hours"][1] <= data["hours"][1]
    price = PRICES["v6e"]
    assert data["spot_dollars"] == [16 * price.spot * each for each in data["held_hours"]]
    assert data["on_demand_dollars"][1] > data["spot_dollars"][1]
    assert data["hours_between"] == pytest.approx(TPU_HOURS)
    assert data["wait_seconds"] == TPU_WAIT
    assert data["best_mean_hours"] <= data["mean_hours"]
    assert data["ends"] == [bill.moment(1_800_000_000 + 3600 * each) for each in data["hours"]]
    assert found.seconds() == 3600 * data["held_hours"][1]
    assert (found.refusal, data["dearer"]) == ("", False)
    lines = found.lines[-1 - [line[:4] for line in found.lines[::-1]].index("spot") :]
    assert max(map(len, lines)) <= 100
    assert "github.com/skypilot-org/skypilot/pull/1500" in "\n".join(lines)
    assert stated().lines == found.lines


def test_without_spot_no_simulation_and_the_middle_of_the_prediction():
    """Of the run's own parts, from which the budget is counted."""
    found = stated(capacity=Capacity())
    assert "spot" not in found.data
    step = found.data["predicted"]["step_seconds"][1]
    middle = 7629 * step + 120
    assert found.seconds() == pytest.approx(middle, rel=0.02)
    assert stated(capacity=Capacity(True, (1e6,), "mine")).seconds() == pytest.approx(
        middle, rel=0.05
    )


def test_spot_is_refused_where_it_is_dearer():
    """With machines that stay for three minutes; the line has both amounts."""
    capacity = Capacity(spot=True, hours=(0.03, 0.08), source="samples of mine")
    found = stated(capacity=capacity)
    text = "\n".join(found.lines)
    assert "spot is dearer than on demand: " in text
    assert "samples of mine" in text
    assert found.data["spot"]["dearer"]
    assert "leave out --spot" in found.refusal
    assert found.data["spot"]["best_checkpoint_every"] < 1000
    hopeless = stated(capacity=dataclasses.replace(capacity, hours=(0.01,)))
    assert "never" in "\n".join(hopeless.lines)
    assert hopeless.seconds() == math.inf
    json.dumps(hopeless.data["spot"], allow_nan=False)


def attempt(folder, *, first, last, seconds, name="000001-aaaaaaaa"):
    """The metrics log of an attempt on 16 chips: `seconds` a step, 5 a save, 40 to the first."""
    startup = {"starting": 10.0, "importing": 5.0, "restoring": 20.0, "evaluation": 5.0}
    startup["first step"] = 3.0
    buckets = {
        "init": 40.0,
        "step": (last - first) * seconds,
        "evaluation": 5.0,
        "checkpoint": 10.0,
    }
    rows = [{"kind": "config", "attempt": name, "device": "TPU v6 lite", "devices": 16}]
    rows += [{"kind": "began", "step": first}]
    for saved, rest in (({"saved": True}, 0.5), ({"saved": True}, 1.0), ({}, 1.0)):
        spent = {bucket: rest * each for bucket, each in buckets.items()}
        rows.append({"kind": "time", "step": last, "buckets": spent, "startup": startup, **saved})
    folder.mkdir(parents=True)
    text = "".join(json.dumps({**row, "time": 1e9}) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)


def test_times_of_the_training_s_own_attempts_take_the_place_of_predictions(tmp_path):
    """A step of 2 s, a save of 5 s, a restart of 40 s; of other hardware none counts."""
    train = node()
    home = tmp_path / train.directory / "attempts" / "000001-aaaaaaaa" / "keep"
    attempt(home, first=100, last=200, seconds=2.0)
    assert fields(read_attempts([str(home)]))["step"] == (2.0, 2.0, 2.0)
    data = stated(str(tmp_path)).data["spot"]
    times = {"steps": 7629, "step": (2.0, 2.0, 2.0), "save": 5.0, "start": 40.0, "restart": 40.0}
    assert data["times"] == times
    assert train.directory in data["measured"]
    assert stated(str(tmp_path), hardware="v6e-8").data["spot"]["measured"] == ""
    assert stated(str(tmp_path), Capacity()).seconds() == 40 + 2 * 7629 + 8 * 5


def test_steps_of_other_batches_are_not_those_that_are_left(tmp_path):
    """Attempts at 128 sequences say nothing of 256; one that began with these does."""
    training = TrainConfig(batch_size=128, batch_schedule=((150, 256),))
    train = node(training=training)
    above = tmp_path / train.directory / "attempts"
    attempt(above / "000001-aaaaaaaa" / "keep", first=100, last=200, seconds=2.0)
    found = stated(str(tmp_path), training=training).data
    assert found["spot"]["times"]["step"] != (2.0, 2.0, 2.0)
    assert "step" not in found["spot"]["measured"].partition(" by ")[0].split(", ")
    late = "000002-aaaaaaaa"
    attempt(above / late / "keep", first=150, last=250, seconds=9.0, name=late)
    found = stated(str(tmp_path), training=training).data
    assert found["spot"]["times"]["step"] == (9.0, 9.0, 9.0)


def test_the_store_s_own_preemptions_take_the_place_of_the_prior(tmp_path):
    """Three in 12 hours of two slices, so one every 8 hours a slice; waits of 100 s."""
    log = Log(str(tmp_path), "20260921-120000-aaaaaa")
    graph = [
        {**recorded_node("train"), "hardware": "2xv6e-16"},
        {**recorded_node("other"), "hardware": "v4-16"},
    ]
    log.tell("run_started", run=log.run, graph=graph, spot=True)
    hardware, results = pod("v6e-16"), Published({}, str(tmp_path))
    for number in range(3):
        log.began("train", f"00000{number}-aaaa").at(4 * 3600)
        log.tell("retried", "train", cause="gone", tries=0, preempted=True).at(100)
        if number < 2:
            assert preemptions_of(hardware, results)[1].startswith("TPU slices")
    log.began("train", "000009-aaaa").tell("finished", "train", seconds=1.0, result={})
    log.began("other").at(1e6).tell("finished", "other", seconds=1.0, result={})
    found, source = preemptions_of(hardware, results)
    assert found.seconds == (8 * 3600,)
    assert found.wait == pytest.approx(100)
    assert source == "3 times in the store's runs"
    assert preemptions_of(pod("2xv6e-16"), results)[0].seconds == (4 * 3600,)
    assert preemptions_of(pod("v4-16"), results)[1].startswith("TPU slices")
    given = Published({}, str(tmp_path), Capacity(True, (1.0, 2.0), "mine"))
    assert preemptions_of(hardware, given)[0].seconds == (3600, 7200)


@pytest.mark.slow
def test_a_training_ends_at_a_checkpoint_when_its_budget_is_reached(tmp_path, monkeypatch, capfd):
    """By the signal of a preemption, with the reason; the same command resumes from its step."""
    settings = dataclasses.replace(
        MINI, training=dataclasses.replace(MINI.training, steps=3000, checkpoint_every=2000)
    )
    monkeypatch.setattr(stopping, "BUDGET_SECONDS", 0.05)

    def spent(self: Spending, **promised: bool) -> float:
        return 1e9 * any("steps" in step.progress for step in self._record.steps.values())

    monkeypatch.setattr(Spending, "_spent", spent)
    words = ("--until", "train", "--budget", "3h")
    assert run(str(tmp_path), *words, settings=settings) == 130
    err = capfd.readouterr().err
    assert "stopping: the budget of 10800s is reached" in err
    (record,) = runs(str(tmp_path))
    (train,) = (step for step in record.steps.values() if step.label == "train")
    assert train.state == "stopped"
    assert train.cause.startswith("saved after step ")
    assert read(str(tmp_path), record.run).outcome == "interrupted"
    steps = int(train.cause.split()[3].rstrip(";"))
    assert list(tmp_path.glob(f"train-*/attempts/*/checkpoints/*{steps:08d}*"))
