"""`run --budget` and `spending`, as a user types them."""

from __future__ import annotations

import json

import pytest

from pipeline import Experiment, local, pod
from pipeline.cli import stopping
from pipeline.execute.run_record import BUDGET_STOP
from pipeline.execute.spending import Spending
from pipeline.graph.capacity import Capacity
from pipeline.pages.record import runs
from tests.pipeline.execute.rented import Trained, evaluated, train


def build(steps: int = 60, seconds: float = 0.0) -> Trained:
    return train(steps=steps, seconds=seconds, hardware=local())


EXPERIMENT = Experiment(build)


def test_a_step_that_would_exceed_the_budget_is_refused(ponente, tmp_path):
    """By `plan` and its page too; nothing was started. No unit is wrong usage."""
    words = ("--seconds", "7200", "--budget", "1h")
    status, out, err = ponente("run", *words, experiment=EXPERIMENT)
    assert status == 1
    assert "found 2 h by the plan's middle (2 h of local)" in err
    assert "running" not in out
    assert "run would refuse train: budget:" in ponente("plan", *words, experiment=EXPERIMENT)[1]
    page = tmp_path / "plan.html"
    assert ponente("plan", *words, "--html", str(page), experiment=EXPERIMENT)[0] == 0
    assert "run would refuse it: budget: expected at most 60 min" in page.read_text()
    assert ponente("plan", "--budget", "40", experiment=EXPERIMENT)[0] == 2


def rent(hardware: str = "v7x-8") -> Trained:
    return evaluated(hardware=pod(hardware))


@pytest.mark.parametrize(
    ("experiment", "found"),
    [
        (EXPERIMENT, "expected steps on hardware with a price for $40, found none"),
        (Experiment(rent), "expected a price of v7x-8 on demand for $40, found none"),
    ],
)
def test_dollars_for_what_has_no_price_are_refused_by_plan_and_run(ponente, experiment, found):
    """In the same words, also of a step of which a plan knows nothing."""
    for verb in ("plan", "run"):
        status, _, err = ponente(verb, "--budget", "$40", experiment=experiment)
        assert status == 1
        assert found in err


@pytest.mark.slow
def test_a_refused_start_does_not_renew_a_budget(ponente, monkeypatch):
    """The first run was cut off by the budget, and each later start of the command is refused."""
    monkeypatch.setattr(stopping, "BUDGET_SECONDS", 0.05)
    words = ("run", "--budget", "3s", "--steps", "200", "--final")  # of ten seconds
    status, _, err = ponente(*words, experiment=EXPERIMENT)
    assert "stopping: the budget of 3s is reached" in err
    assert status == 0
    for _ in range(2):
        status, _, err = ponente(*words, experiment=EXPERIMENT)
        assert status == 1
        assert "budget: 3s is spent" in err


def test_hours_between_preemptions_are_a_number_or_a_file(ponente, tmp_path):
    """Comments and empty lines are no samples; what is no hours is wrong usage."""
    file = tmp_path / "hours.txt"
    file.write_text("# of last week\n5.5\n\n0.25  # at night\n")
    assert Capacity.parse(str(file)).hours == (5.5, 0.25)
    assert Capacity.parse("6") == Capacity(True, (6.0,), "given by --preemptions")
    file.write_text("5.5\nnever\n")
    for text in (str(file), str(tmp_path / "none"), "0", "-1", "nan", "inf"):
        status, _, err = ponente("plan", f"--preemptions={text}", experiment=EXPERIMENT)
        assert status == 2
        assert "expected hours" in err


def test_a_run_stops_when_its_budget_is_reached_and_resumes(ponente, tmp_path, monkeypatch):
    """As after Ctrl-C, with the reason; what was written is reused, the ledger has both runs."""

    def spent(self: Spending, **promised: bool) -> float:
        return 9.0 * any(step.shards > 1 for step in self._record.steps.values())

    with monkeypatch.context() as patched:
        patched.setattr(stopping, "BUDGET_SECONDS", 0.05)
        patched.setattr(Spending, "_spent", spent)
        status, _, err = ponente("run", "--budget", "1s", experiment=EXPERIMENT)
    assert status == 130
    assert "stopping: the budget of 1s is reached" in err
    assert "run it again to resume" in err
    made = [*(tmp_path / "store").glob("train-*/attempts/*/shards/*")]
    assert 1 <= len(made) < 60
    assert runs(str(tmp_path / "store"))[0].cause == BUDGET_STOP
    status, out, _ = ponente("run", "--budget", "1h", experiment=EXPERIMENT)
    assert status == 0
    assert "1 steps executed" in out or "1 step executed" in out
    status, out, _ = ponente("spending", "--json", experiment=EXPERIMENT)
    assert status == 0
    (found,) = json.loads(out)["experiments"]
    (row,) = found["steps"]
    assert (row["step"], row["hardware"], row["attempts"]) == ("train", "local", 2)
    assert row["dollars"] is None
    out = ponente("spending", experiment=EXPERIMENT)[1]
    assert "build" in out
    assert max(map(len, out.splitlines())) <= 100
    assert ponente("spending", str(tmp_path / "none"), experiment=EXPERIMENT)[0] == 1
