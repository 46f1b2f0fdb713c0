"""What a step states of itself before it runs: in `plan`, at the start of a run, and refusals."""

import dataclasses
import json
import threading

import pytest

from pipeline import Experiment, Result, StepContext, step
from pipeline.cli import verbs
from pipeline.graph.facts import Facts
from tests.pipeline.toy import Numbers, numbers

LOOKS = []
LEARNING = []


@pytest.fixture(autouse=True)
def _longer_looks(monkeypatch):
    monkeypatch.setitem(verbs.FLAGS["no_compile"], "default", False)


def state(node, results):
    """The limit, the sum of the input's result where it is there, and a longer look."""
    LEARNING.append(results.learning)
    limit = node.config["limit"]
    there = results.get(node.inputs["numbers"].key)
    lines = (f"limit {limit}", f"{there['count']} numbers" if there else "numbers not counted yet")
    refusal = "a limit of 7 is out of stock\n6 and 8 are there" if limit == 7 else ""

    def examine(show):
        LOOKS.append((limit, threading.current_thread() is threading.main_thread()))
        show("looking")
        found = Facts(lines=("looked",), data={"looked": True})
        refused = dataclasses.replace(found, refusal="9 failed the longer look")
        return refused if limit == 9 else found

    return Facts(lines=lines, data={"limit": limit}, refusal=refusal, examine=examine)


@step(output=Numbers, version=1, facts=state)
def limited(run: StepContext, numbers: Numbers, *, limit: int) -> Result:
    with run.shard("all"):
        pass
    return {"count": limit}


def build_limited(limit: int = 1) -> Numbers:
    return limited(numbers(count=10), limit=limit)


EXPERIMENT = Experiment(build_limited)


def test_plan_shows_facts_and_what_a_longer_look_adds(ponente):
    """At once, then the longer look with its progress; `--no-compile` leaves that out."""
    LOOKS.clear()
    out = ponente("plan", experiment=EXPERIMENT)[1].splitlines()
    assert out[-6:] == [
        "limited:",
        "  limit 1",
        "  numbers not counted yet",
        "limited: looking",
        "limited:",
        "  looked",
    ]
    assert LOOKS == [(1, False)]
    out = ponente("plan", "--no-compile", experiment=EXPERIMENT)[1]
    assert "limit 1" in out
    assert "looked" not in out
    assert len(LOOKS) == 1


def test_facts_hear_whether_a_plan_may_learn_from_the_store(ponente):
    """By default it may, and so may a run's first lines."""
    LEARNING.clear()
    for words in (("plan",), ("plan", "--no-learning"), ("plan", "--no-learning", "--json")):
        assert ponente(*words, experiment=EXPERIMENT)[0] == 0
    assert LEARNING == [True, False, False]


def test_facts_as_json(ponente):
    """One object, without progress between."""
    tree = json.loads(ponente("plan", "--json", experiment=EXPERIMENT)[1])
    first, second = tree["steps"]
    assert "facts" not in first
    assert second["facts"] == {
        "limit": 1,
        "looked": True,
        "lines": ["limit 1", "numbers not counted yet", "looked"],
        "refusal": "",
    }


def test_a_run_begins_with_facts_and_stops_at_a_refusal(ponente):
    """Nothing is built before a refusal, whichever look refuses; what is up to date states none."""
    for limit, why in (("7", "6 and 8 are there"), ("9", "9 failed the longer look")):
        status, _, err = ponente("--limit", limit, experiment=EXPERIMENT)
        assert status == 1
        assert f"limited: {'a limit of 7' if limit == '7' else why}" in err
        assert why in err
        assert (
            "run would refuse limited"
            in ponente("plan", "--limit", limit, experiment=EXPERIMENT)[1]
        )
    assert "2 of 2 steps would run" in ponente("plan", experiment=EXPERIMENT)[1]
    status, out, _ = ponente(experiment=EXPERIMENT)
    assert status == 0
    assert "  limit 1" in out
    out = ponente("plan", "--limit", "2", experiment=EXPERIMENT)[1]
    assert "  10 numbers" in out
    assert "limit 1" not in ponente("plan", experiment=EXPERIMENT)[1]
