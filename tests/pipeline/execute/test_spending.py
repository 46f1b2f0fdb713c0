"""What attempts cost, and a budget: read, refused, reached, and its ledger."""

from __future__ import annotations

import argparse
import json

import pytest

from pipeline import Hardware, InputError, pod
from pipeline.execute.run_record import RunRecord
from pipeline.execute.spending import Budget, Spending, dollars_an_hour, ledger, uses
from pipeline.pages.record import read
from pipeline.prices import PRICES
from tests.pipeline.execute.rented import trained
from tests.pipeline.execute.run_logs import START, Log, key, node

RUN = "20260921-120000-aaaaaa"
V6E = PRICES["v6e"]


def rented_run(prefix, *, spot=False) -> RunRecord:
    """A run of two trainings: one preempted after an hour, again at work since half an hour."""
    graph = [{**node("train"), "hardware": "v6e-16"}, {**node("report"), "hardware": ""}]
    log = Log(prefix, RUN).tell("run_started", run=RUN, graph=graph, spot=spot, experiment="mine")
    log.began("train").at(3600).tell("retried", "train", cause="gone", tries=0, preempted=True)
    log.at(60).began("train", "000002-bbbb").at(1800).tell("progress", "train", done=1, total=2)
    return read(prefix, RUN)


def test_attempts_cost_hours_times_the_price_of_all_chips(tmp_path):
    """The wait between them costs nothing; spot has its own price."""
    for spot, rate in ((False, V6E.on_demand), (True, V6E.spot)):
        record = rented_run(str(tmp_path / str(spot)), spot=spot)
        first, second = uses(record, START + 3600 + 60 + 1800)
        assert (first.seconds, second.seconds) == (3600, 1800)
        assert (first.preempted, second.preempted) == (True, spot)
        assert first.dollars == pytest.approx(16 * rate)
        assert second.dollars == pytest.approx(8 * rate)
    assert dollars_an_hour("2xv6e-16", spot=False) == 32 * V6E.on_demand
    assert dollars_an_hour("local", spot=False) is None
    assert dollars_an_hour("v99-3", spot=False) is None


def test_a_wait_for_hardware_within_an_attempt_costs_nothing(tmp_path):
    """An hour of it, as it was last reported, before half an hour of work."""
    log = Log(str(tmp_path), RUN).tell("run_started", run=RUN, graph=[node("train")])
    log.began("train").at(3600).tell("waiting_for_resources", "train", cause="none", seconds=3600)
    log.at(1800).tell("progress", "train", done=1, total=2)
    (use,) = uses(read(str(tmp_path), RUN), START + 5400)
    assert use.seconds == 1800


def test_a_wait_costs_nothing_after_its_last_report(tmp_path):
    """While it lasts, once it is over, and if the attempt ends in it."""
    log = Log(str(tmp_path), RUN).tell("run_started", run=RUN, graph=[node("train")])
    log.began("train").at(1280)
    log.tell("waiting_for_resources", "train", cause="none", seconds=1280).at(900)

    def held(now: float) -> float:
        (use,) = uses(read(str(tmp_path), RUN), now)
        return use.seconds

    assert held(log.now) == 0
    over = {"cause": "there", "seconds": 2180, "over": True}
    log.tell("waiting_for_resources", "train", **over).at(60)
    assert held(log.now) == 60  # also before it reports anything
    log.tell("waiting_for_resources", "train", cause="none", seconds=2240).at(500)
    log.tell("stopped", "train", cause="a signal")
    assert held(log.now) == 0


def test_a_budget_that_is_spent_says_so(tmp_path):
    """And steps that cost nothing may begin, also where the plan knows no end of them."""
    earlier, new = rented_run(str(tmp_path)), RunRecord(RUN, started=START + 9000)
    made = {"predict": lambda _: float("inf"), "clock": lambda: START + 9000}
    one = Spending(Budget.parse("$40"), new, **made, earlier=[earlier])
    assert "budget: $40 is spent" in one.refusal(trained(pod("v6e-16")))
    assert one.refusal(trained(pod("local"))) == ""


def test_the_ledger_sums_by_experiment_step_and_hardware(tmp_path):
    """Of two runs of one experiment, one on spot; a step without hardware has no price."""
    runs = [rented_run(str(tmp_path / str(spot)), spot=spot) for spot in (False, True)]
    (found,) = ledger(runs)
    assert (found["experiment"], found["attempts"]) == ("mine", 4)
    assert found["hours"] == pytest.approx(3.0)
    assert found["dollars"] == pytest.approx(24 * (V6E.on_demand + V6E.spot))
    dear, cheap = found["steps"]
    assert (dear["step"], dear["hardware"], dear["spot"]) == ("train", "v6e-16", False)
    assert (cheap["spot"], cheap["preempted"]) == (True, 2)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("$40", Budget(dollars=40.0)),
        ("$0.5", Budget(dollars=0.5)),
        ("3h", Budget(seconds=10_800.0)),
        ("90s", Budget(seconds=90.0)),
        ("12d", Budget(seconds=1_036_800.0)),
        ("$1234567.89", Budget(dollars=1_234_567.89)),
    ],
)
def test_a_budget_is_dollars_or_a_time(text, budget):
    assert Budget.parse(text) == budget == Budget.parse(str(budget))


@pytest.mark.parametrize("text", ["40", "$", "$40h", "h", "0s", "$0", "-3h", "3 h", "$1e9"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"'\$40' \(in quotes\) or a time"):
        Budget.parse(text)


def spending(budget: str, record: RunRecord, hours: float | None, now: float) -> Spending:
    seconds = None if hours is None else 3600 * hours
    return Spending(Budget.parse(budget), record, lambda node: seconds, lambda: now)


def test_a_step_that_exceeds_the_rest_is_refused_before_it_starts(tmp_path):
    """By what is spent and by what a running step will still spend; one that began may resume."""
    record, now = rented_run(str(tmp_path)), START + 3600 + 60 + 1800
    rate = 16 * V6E.on_demand  # dollars an hour; 1.5 hours are spent
    train, other = trained(pod("v6e-16")), trained(pod("v6e-16"), steps=2)
    assert spending(f"${rate * 2.6:.2f}", record, 1.0, now).refusal(other) == ""
    why = spending(f"${rate * 2.4:.2f}", record, 1.0, now).refusal(other)
    assert f"expected at most ${rate * 0.9:,.2f}, which is left of ${rate * 2.4:.2f}" in why
    assert (
        f"found ${rate:,.2f} by the plan's middle (60 min of v6e-16 at ${rate:,.2f} an hour)" in why
    )
    assert "--budget" in why
    empty = RunRecord(RUN, started=START)
    one = spending(f"${rate * 1.5:.2f}", empty, 1.0, START)
    assert one.refusal(train) == "" == one.refusal(train)
    empty.steps[train.key] = rented_run(str(tmp_path / "2")).steps[key("train")]
    empty.steps[train.key].key, empty.steps[train.key].attempts = train.key, []
    assert "expected at most" in one.refusal(other)  # the first is promised its hour


def test_a_budget_of_time_counts_the_run_s_own_time():
    record = RunRecord(RUN, started=START)
    one = spending("3h", record, 2.0, START + 3600)
    assert one.refusal(trained(pod("local"))) == ""
    assert "found 2 h by" in spending("3h", record, 2.0, START + 4000).refusal(
        trained(pod("local"))
    )
    assert one.reached() == ""
    assert (
        "the budget of 10800s is reached (3 h spent)"
        in spending("3h", record, None, START + 10_800).reached()
    )


def test_dollars_are_reached_by_the_bill(tmp_path):
    record, rate = rented_run(str(tmp_path)), 16 * V6E.on_demand
    end = START + 3600 + 60 + 1800  # 1.5 hours
    budget = f"${rate * 1.5:.2f}"
    assert spending(budget, record, None, end - 1).reached() == ""
    assert (
        f"the budget of ${rate * 1.5:g} is reached"
        in spending(budget, record, None, end + 1).reached()
    )


def test_a_command_that_was_killed_and_started_again_has_one_budget(tmp_path):
    """As machines that were taken away with their driver do; until the last event of its log."""
    new, clock = RunRecord(RUN, started=START + 9000), {"clock": lambda: START + 9100}
    for spot, rate in ((False, V6E.on_demand), (True, V6E.spot)):
        earlier = [rented_run(str(tmp_path / str(spot)), spot=spot)]
        one = Spending(Budget.parse("$200"), new, **clock, earlier=earlier, spot=spot)
        assert one._spent() == pytest.approx(1.5 * 16 * rate)
    one = Spending(Budget.parse("3h"), new, **clock, earlier=earlier)
    assert one._spent() == 3600 + 60 + 1800 + 100


def test_what_has_no_price_is_refused_in_dollars(monkeypatch):
    """A chip without a price always, this machine where no other step has one."""
    record = RunRecord(RUN, started=START)
    local, chip = trained(pod("local")), trained(pod("v6e-16"), steps=2)
    one = spending("$40", record, None, START)
    one.check([local, chip], [local, chip])
    one.check([local], [local, chip])  # what is left costs nothing
    with pytest.raises(InputError, match=r"hardware with a price for \$40.*--budget 3h"):
        one.check([local], [local])
    with pytest.raises(InputError, match=r"price of v7x-16 on demand for \$40.*PONENTE_PRICES"):
        one.check([trained(pod("v7x-16"))], [trained(pod("v7x-16"))])
    dear = spending("$40", record, 10.0, START)
    with pytest.raises(InputError, match=r"^train: budget: .*10 h of v6e-16"):
        dear.check([local, chip], [local, chip])
    assert isinstance(chip.hardware[0], Hardware)
