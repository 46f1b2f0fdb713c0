"""Steps that follow their input while it is made: when they start, end, go on and are stale."""

from __future__ import annotations

import pytest

from pipeline import Artifact, InputError, Live
from pipeline.errors import StepFailed
from pipeline.graph.step import as_node
from pipeline.identity import digests
from pipeline.plan.plan import explain, plan
from pipeline.store.ledger import Ledger
from pipeline.store.outputs import Store
from tests.pipeline.graph.live_toy import ThreadBackend, counting, watching
from tests.pipeline.helpers import bring_up, check_invariants, result, run_on
from tests.pipeline.toy import total


@pytest.fixture
def marks(tmp_path):
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "store")


def pair(marks, count=4, fails="", salt=0, **how):
    """(the step that counts, the one that follows it)."""
    source = counting(count=count, salt=salt, marks=str(marks), **how)
    return source, watching(source, marks=str(marks), fails=fails)


def run(store, *wanted, slots=4, marks=None, events=None, **choice):
    events, backend = [] if events is None else events, ThreadBackend(slots)

    def hear(event):
        events.append(event)
        if marks is not None:
            release(event, marks)

    return run_on(backend, store, *wanted, events=hear, **choice), backend, events


def release(event, marks):
    """Once the follower has failed, let the other step go on without it."""
    if (event.get("step"), event["event"]) == ("watching", "failed"):
        for number in range(9):
            (marks / f"seen-{number}").touch()


def attempts_at(marks, number):
    return (marks / f"seen-{number}").read_text().split()


def test_a_follower_runs_beside_what_it_follows(store, marks):
    """The counting step waits for its follower after each number, so neither can be first."""
    source, watcher = pair(marks)
    execution, backend, events = run(store, watcher)
    assert backend.at_once == 2
    assert result(store, watcher)["total"] == 6
    published = {n.label: execution.published[n.key].manifest for n in execution.order}
    recorded = published["watching"].inputs["numbers"]
    assert recorded["digest"] == published["counting"].content
    assert recorded["key"] == as_node(source).key
    kinds = [(e["step"], e["event"]) for e in events if e["event"] in ("started", "finished")]
    assert kinds.index(("watching", "started")) < kinds.index(("counting", "finished"))
    assert check_invariants(store, finished=True) == 2
    assert run(store, watcher)[0].executed == []


@pytest.mark.parametrize("jobs", [1, 0])
def test_without_a_second_slot_it_runs_afterwards(store, marks, jobs):
    """One slot, or one job: the follower starts when the other is done, and finds the same."""
    _, watcher = pair(marks, waits=0)
    _, backend, events = run(store, watcher, slots=4 if jobs else 1, jobs=jobs)
    kinds = [(e["step"], e["event"]) for e in events if e["event"] in ("started", "finished")]
    assert backend.at_once == 1
    assert kinds.index(("counting", "finished")) < kinds.index(("watching", "started"))
    assert result(store, watcher)["total"] == 6


def test_both_orders_make_the_same_output(tmp_path, marks):
    """Followed, or read when it was done, in this process: equal contents, equal `action`."""
    found = []
    for name, waits in (("beside", 99), ("after", 0)):
        folder = marks / name
        folder.mkdir()
        prefix = str(tmp_path / name)
        _, watcher = pair(folder, waits=waits)
        execution = run(prefix, watcher)[0] if waits else bring_up(prefix, watcher)
        manifest = execution.published[as_node(watcher).key].manifest
        found.append((manifest.key, manifest.content, manifest.action))
    assert found[0] == found[1]


@pytest.mark.slow
def test_it_ends_when_the_other_is_lost_and_goes_on_with_its_next_attempt(store, marks):
    """The counting step is lost after three numbers: each is recorded once, by two attempts."""
    _, watcher = pair(marks, count=6, lost_after=3)
    execution, _, events = run(store, watcher)
    assert result(store, watcher)["total"] == 15
    by = [attempts_at(marks, number) for number in range(6)]
    assert all(len(attempts) == 1 for attempts in by)
    assert by[0] == by[2] != by[5]
    retried = {e["step"]: e["cause"] for e in events if e["event"] == "retried"}
    assert retried.keys() == {"counting", "watching"}
    assert "ended without an output" in retried["watching"]
    assert sorted(node.label for node in execution.executed) == ["counting", "watching"]
    assert check_invariants(store, finished=True) == 2


def test_it_ends_when_the_other_fails_for_good(store, marks):
    """The failure is the counting step's, the follower is skipped, and nothing hangs."""
    _, watcher = pair(marks, refuses_after=2)
    events = []
    with pytest.raises(StepFailed) as failure:
        run(store, watcher, events=events)
    text = str(failure.value)
    assert "step counting failed: asked to refuse" in text
    assert "watching" not in text
    assert result_of(store, watcher) is None
    last = [e for e in events if e.get("step") == "watching"][-1]
    cause = "the step it follows ended without an output"
    assert (last["event"], last["cause"]) == ("skipped", cause)


def result_of(store, wanted):
    return Store(store).find(as_node(wanted))


@pytest.mark.slow
def test_a_failing_follower_costs_nobody_the_step_it_follows(store, marks):
    """It fails at the first number; the other is lost later, tried again, and published."""
    source, watcher = pair(marks, fails="refuses", lost_after=2)
    after = total(source)
    events = []
    with pytest.raises(StepFailed, match="step watching failed: asked to refuse"):
        run(store, watcher, after, marks=marks, events=events)
    assert [e["step"] for e in events if e["event"] == "retried"] == ["counting"]
    assert result_of(store, source) is not None
    assert result_of(store, after) is None, "after a failure nothing new is begun"


def test_without_room_beside_it_runs_afterwards(store, marks):
    """A follower whose hardware is taken waits for the step it follows; that is no failed try."""
    _, watcher = pair(marks, waits=1, fails="no room")
    _, _, events = run(store, watcher)
    assert result(store, watcher)["total"] == 6
    again = ("retried", "waiting_for_resources")
    found = [(e["event"], e["cause"], e.get("tries", 0)) for e in events if e["event"] in again]
    # The other, when the step it follows has ended by the time that the driver hears of this.
    first, second = ("waits for the step it follows: taken", "taken")
    assert found in ([("retried", first, 0)], [("waiting_for_resources", second, 0)])


def test_a_rebuild_is_followed_and_not_the_output_it_replaces(store, marks):
    """Built again by force, the old manifest is there all the time and is not taken for the new."""
    source, watcher = pair(marks)
    run(store, watcher)
    old = {n: result_of(store, n).manifest for n in (source, watcher)}
    for mark in marks.iterdir():
        mark.unlink()
    execution, _, _ = run(store, watcher, force=("counting", "watching"))
    assert sorted(node.label for node in execution.executed) == ["counting", "watching"]
    new = {n: result_of(store, n).manifest for n in (source, watcher)}
    assert all(new[n].attempt != old[n].attempt for n in old)
    assert new[watcher].content == old[watcher].content
    assert check_invariants(store, finished=True) == 2


def test_ending_before_the_other_is_refused(store, marks):
    """A body that leaves while its live input is unpublished publishes nothing."""
    _, watcher = pair(marks, fails="leaves", waits=2)
    with pytest.raises(StepFailed, match="ended before its live input 'numbers' was published"):
        run(store, watcher, marks=marks)
    assert result_of(store, watcher) is None


def test_a_cut_off_follower_is_partial_in_the_plan(store, marks):
    """What it recorded counts, although what it follows is not published either."""
    _, watcher = pair(marks, count=5, refuses_after=2)
    with pytest.raises(StepFailed):
        run(store, watcher)
    planned = {entry.node.label: entry for entry in plan([as_node(watcher)], Store(store))}
    assert "2 of ? shards finished" in planned["watching"].detail
    assert planned["watching"].beside == ("counting",)
    node = as_node(watcher)
    source = node.inputs["numbers"]
    build = digests.build_id(digests.action(source.identity, {}), "")
    mine = digests.build_id(digests.action(node.identity, {"numbers": build}), "")
    ledger = Ledger(Store(store).path(node), mine)
    assert len(ledger.finished()) == 2


def test_plan_says_that_it_follows(store, marks):
    """The live input is named, and that the follower runs while the other does."""
    _, watcher = pair(marks)
    entries = plan([as_node(watcher)], Store(store))
    lines = list(explain(entries, entries[1], Store(store)))
    assert any("numbers = counting (miss, live)" in line for line in lines)
    lines = list(explain(entries, entries[0], Store(store)))
    assert any("watching: starts while it runs" in line for line in lines)


def test_an_argument_that_is_not_live_is_refused():
    with pytest.raises(InputError, match=r"Annotated\[Kind, Live\]"):
        Live.of(Artifact)
