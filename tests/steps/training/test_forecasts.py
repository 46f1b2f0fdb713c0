"""A forecast from a store's runs: in the plan, before the first step, in the curve, and scored."""

from __future__ import annotations

import dataclasses
import importlib
import math

import pytest

from pipeline.graph.facts import Published
from pipeline.graph.step import as_node
from pipeline.store.outputs import Found
from steps.artifacts import Checkpoint
from steps.pages.charts import loss_chart
from steps.pages.run_record import of_checkpoint, of_directory
from steps.scaling_law import forecast
from steps.scaling_law.forecast import SHARE
from steps.training.continue_training import extend
from steps.training.plan.facts import training_facts
from steps.training.train import train
from tests.pipeline.helpers import bring_up
from tests.steps.built import built
from tests.steps.evaluation.test_train_on import CONSTANT, FOUR, MODEL, sequences
from training.metrics.metrics_log import read_log

compare = importlib.import_module("steps.pages.compare")  # of the package, the name is the step's

pytestmark = pytest.mark.slow

ALL = dataclasses.replace(FOUR, evaluate_batches="all")


def rung(steps, **changes):
    config = dataclasses.replace(ALL, steps=steps, **changes)
    return train(sequences(high=8), model=MODEL, optimizer=CONSTANT, train=config)


def planned(store, node, *existing):
    """Lines and data of a training's facts, with the outputs of other steps in the store."""
    found = bring_up(store, *existing).published
    places = {key: Found(each.path, each.manifest) for key, each in found.items()}
    facts = training_facts(as_node(node), Published(places, store))
    lines = [line for line in facts.lines if line.startswith("loss  ")]
    return lines, facts.data.get("forecast")


def test_a_forecast_is_planned_recorded_drawn_and_scored(tmp_path, capsys, monkeypatch):
    """Of the third budget of a model, from two; runs of other recipes or few steps do not count."""
    store, none = str(tmp_path), "no finished run of 500 steps or more in this store"
    data, first, second, third = sequences(high=8), rung(4), rung(8), rung(16)
    lines, found = planned(store, third)
    assert found == {"why": "the sequences are not built yet"}
    assert lines == ["loss        no forecast: the sequences are not built yet"]
    short = {"why": "a run of fewer than 500 steps is the beginning of training"}
    assert planned(store, third, data, first)[1] == short
    assert planned(store, rung(500), data, first)[1] == {"why": none}
    monkeypatch.setattr(forecast, "LEAST_STEPS", 0)
    _, found = planned(store, third, data, first)
    assert found["why"].endswith("of its model and settings, found 1")
    lines, found = planned(store, third, data, first, second, rung(8, z_loss=0.1))
    assert (found["law"], found["runs"], found["share"]) == ("L(D)", 2, SHARE)
    assert found["low"] < found["loss"] < found["high"]
    interval = f"80%: {found['low']:.3f} to {found['high']:.3f}"
    said = f"{found['loss']:.3f} nats per token ({interval}), by L(D) of 2 runs"
    assert lines == [f"loss        {said}"]

    run = built(store, third, Checkpoint)
    kinds = [each["kind"] for each in read_log(run.shard("record"))]
    assert kinds.index("forecast") < kinds.index("step")
    row = run.rows("forecasts")[0]
    planned_row = {name: found[name] for name in ("loss", "low", "high", "law", "runs")}
    early = row.pop("early")
    assert row == {"step": 0, "steps": 16, **planned_row}
    assert [step for step, *_ in early] == [2, 4, 8]
    other = built(store, second, Checkpoint)  # the first is too short for a tenth of its steps
    losses = [
        math.log(each["loss"] / other.result["last"]["loss"]) for each in other.rows("history")
    ]
    for number, step in enumerate((1, 2, 4)):
        low, high = early[number][1:]
        middle = math.log(row["low"] * row["high"]) / 2 + losses[step - 1]
        assert math.log(low * high) / 2 == pytest.approx(middle)
    last = run.result["last"]["loss"]
    inside = found["low"] <= last <= found["high"]
    scored = {**planned_row, "measured": last, "inside": inside}
    assert run.result["measured"]["forecast"] == scored
    assert run.result["headline"][1].startswith(
        f"forecast {found['loss']:.3f}, measured {last:.3f}"
    )
    live = of_directory(f"{run.path}/attempts/{run.manifest.attempt}", "live")
    for record in (of_checkpoint(run, "done", []), live):
        assert "forecast, 80 %" in loss_chart(record)
    assert "forecast" not in loss_chart(of_checkpoint(built(store, first, Checkpoint), "", []))

    assert compare.main(["--forecasts", store]) == 0
    *each, total = capsys.readouterr().out.splitlines()
    assert len(each) == 1
    assert each[0].startswith(as_node(third).directory)
    assert total.startswith(f"{int(inside)} of 1 inside their 80% interval")

    more = dataclasses.replace(ALL, steps=20)
    longer = extend(third, data, optimizer=CONSTANT, train=more)
    extended = built(store, longer, Checkpoint)
    assert "forecast" not in extended.result["measured"]
    assert "forecast" not in loss_chart(of_checkpoint(extended, "", []))
    # Nor has one that ends after as many steps, at another rate.
    slow, same = dataclasses.replace(CONSTANT, learning_rate=1e-3), as_node(third).config["train"]
    other = built(store, extend(third, data, optimizer=slow, train=same, at=8), Checkpoint)
    assert "forecast" not in other.result["measured"]
    assert len(other.result["headline"]) == 1
    assert other.rows("forecasts") == []
