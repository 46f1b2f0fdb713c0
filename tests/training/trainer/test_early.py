"""Looks at the loss of a run before its end."""

import math

import pytest

from tests.training import tiny
from training.metrics.early import window
from training.trainer.trainer import train

pytestmark = pytest.mark.slow


def test_a_loss_outside_of_its_interval_is_said(tmp_path):
    """By the mean of the rows in the window, also where an earlier attempt wrote some of them."""
    tiny.write_data(str(tmp_path))
    early = [[2, 0.0, 99.0], [4, 99.0, 100.0], [6, 0.0, 1.0]]
    row = {"steps": 6, "loss": 3.0, "low": 2.9, "high": 3.1, "law": "L(D)", "runs": 2}
    job = tiny.make_job(str(tmp_path), forecast={**row, "early": early})
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


def test_a_window_is_the_last_fifth():
    assert [list(window(n)) for n in (1, 4, 10)] == [[1], [4], [9, 10]]
    assert all(math.isclose(len(window(n)), n / 5) for n in (50, 1000))
