"""Every registered fault suite, at the size of a commit; and the rules the suites rely on."""

from __future__ import annotations

import os

import pytest

from tests.faults.registry import Fault, Violation, carry_out, gather, pick, trials

SEED = int(os.environ.get("PONENTE_SEED", "0"))


def _suites():
    for number, faults in gather().items():
        for index, fault in enumerate(faults):
            if not fault.ci:
                continue
            marks = [pytest.mark.slow] if fault.slow else []
            yield pytest.param(number, fault, id=f"{number}-{index}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fault"), list(_suites()))
def test_fault(number, fault, tmp_path):
    """The system survives; the row says what was tried, and the seed replays it."""
    row = carry_out(number, fault, SEED, fault.ci, tmp_path)
    print(row)  # noqa: T201 - shown when it fails
    assert row["passed"], f"{row.get('replay')}\n{row.get('error')}"
    tried = ("trials", "races", "pauses", "kinds", "runs")
    assert sum(row["figures"].get(name, 0) for name in tried) > 0


@pytest.mark.parametrize("cases", [1, 2, 3, 7, 100, 997])
def test_as_many_trials_as_cases_try_each_once(cases):
    """From any first number."""
    for seed in (0, 5, 123_456):
        assert sorted(pick(seed + i, cases) for i in range(cases)) == list(range(cases))


def test_the_number_of_a_failing_trial_replays_it(tmp_path):
    """All trials are made, and the one that failed is the first of a run with its number."""
    tried = []

    def trial(number):
        tried.append(number)
        assert number != 12, "twelve"

    fault = Fault("numbers", 5, 5, lambda seed, count, _: {"trials": trials(seed, count, trial)})
    row = carry_out(99, fault, 10, 5, tmp_path)
    assert not row["passed"]
    assert tried == [10, 11, 12, 13, 14]
    assert row["replay"] == "--only 99 --seed 12"
    assert "twelve" in row["error"]
    with pytest.raises(Violation, match="twelve"):
        fault.run(12, 1, tmp_path)
    assert carry_out(99, fault, 13, 5, tmp_path)["passed"]
