"""Looks at the loss of a run before its end."""

import math

import pytest

from pipeline.errors import StoreUnavailable
from tests.training import tiny
from training.config.job import Start
from training.metrics import early
from training.metrics.early import window
from training.trainer.trainer import train


@pytest.mark.slow
def test_a_loss_outside_of_its_interval_is_said(tmp_path):
    """By the mean of the rows in the window, also where an earlier attempt wrote some of them."""
    tiny.write_data(str(tmp_path))
    looks = [[2, 0.0, 99.0], [4, 99.0, 100.0], [6, 0.0, 1.0]]
    row = {"steps": 6, "loss": 3.0, "low": 2.9, "high": 3.1, "law": "L(D)", "runs": 2}
    job = tiny.make_job(str(tmp_path), forecast={**row, "early": looks})
    heard = tiny.Heard()
    result = train(job, heard)
    losses = {row["step"]: row["loss"] for row in tiny.rows(result)}
    found = tiny.entries(job, "off_forecast")
    assert [(each["step"], each["low"], each["high"]) for each in found] == [
        (4, 99.0, 100.0),
        (6, 0.0, 1.0),
    ]
    for each, side in zip(found, ("below", "above"), strict=True):
        assert each["loss"] == pytest.approx(losses[each["step"]])
        assert f"{side} the {each['low']:.3f} to {each['high']:.3f}" in each["reason"]
    assert [kind for kind, _ in heard.events if kind == "off_forecast"] == ["off_forecast"] * 2

    resumed = tiny.make_job(
        str(tmp_path),
        resume_from=tuple(heard.committed[:5]),
        checkpoint_directory=str(tmp_path / "again"),
    )
    train(resumed)
    again = tiny.entries(resumed, "off_forecast")
    assert again == found[1:]

    branch = tiny.make_job(
        str(tmp_path),
        start=Start(checkpoint=heard.committed[2][1], take="everything", step=3),
        checkpoint_directory=str(tmp_path / "branch"),
    )
    train(branch)
    assert tiny.entries(branch, "off_forecast") == []  # it is no forecast of this run


class Log:
    """A metrics log whose rows are given; a row comes in while it is stored."""

    def __init__(self, rows, error=None):
        self.rows, self.error, self.stored = rows, error, False
        self.history = ("before",)

    def flush(self):
        if self.error is not None:
            raise self.error
        self.stored, self.history = True, ("with what came meanwhile",)


def look(monkeypatch, losses, error=None):
    log = Log([{"step": n, "loss": loss} for n, loss in enumerate(losses, 1)], error)
    row = {"steps": 100, "early": [[10, 2.0, 3.0]]}

    def read(history, kinds):
        assert (history, log.stored) == (("before",), True)
        return iter(log.rows)

    monkeypatch.setattr(early, "read_history", read)
    return early.EarlyLooks(log, [row], 100).outside(10)


def test_steps_without_a_loss_do_not_count(monkeypatch):
    """A skipped step has none; a window of such steps says nothing."""
    nan = math.nan
    assert look(monkeypatch, [9.0] * 8 + [nan, 2.5]) is None
    assert look(monkeypatch, [9.0] * 8 + [nan, 4.0])["loss"] == 4.0
    assert look(monkeypatch, [9.0] * 8 + [nan, nan]) is None


@pytest.mark.slow
def test_a_store_that_fails_ends_no_training(tmp_path, monkeypatch, caplog):
    """The look is not made, and the log says so."""
    tiny.write_data(str(tmp_path))
    job = tiny.make_job(str(tmp_path), forecast={"steps": 6, "early": [[2, 0.0, 1.0]]})

    def fails(self, step):
        raise StoreUnavailable("down")

    monkeypatch.setattr(early.EarlyLooks, "outside", fails)
    assert train(job).steps == 6
    assert "step 2: not compared with the forecast: down" in caplog.text


def test_a_window_is_the_last_fifth():
    assert [list(window(n)) for n in (1, 4, 10)] == [[1], [4], [9, 10]]
    assert all(math.isclose(len(window(n)), n / 5) for n in (50, 1000))
