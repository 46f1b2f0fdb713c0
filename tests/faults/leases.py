"""Faults of leases: races, paused executors, wrong clocks, stale and torn lease files.

Every trial runs real processes on a store of its own and ends with the same checks (see
`lease_trial.Trial.check`). A violation is an AssertionError that starts with the fault and the
seed of the trial: the same function with that seed and a count of 1 runs it again.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.store import storage
from tests.faults.lease_remains import ELSEWHERE, REMAINS, Remains
from tests.faults.lease_trial import QUICK, Trial, Worker, owner_here, workers, write_lease
from tests.faults.lease_worker import PLACES
from tests.faults.registry import Fault

RACERS = 4
HOUR, DAY = 3600.0, 86400.0
_QUICK_LOOKS = {"LOOK_SECONDS": QUICK["LOOK_SECONDS"]}
CLOCKS: dict[str, dict[str, Any] | None] = {
    "true": None,
    "-1 day": {"kind": "offset", "seconds": -DAY},
    "-1 h": {"kind": "offset", "seconds": -HOUR},
    "+1 h": {"kind": "offset", "seconds": HOUR},
    "+1 day": {"kind": "offset", "seconds": DAY},
    "goes back": {"kind": "back", "seconds": HOUR, "calls": 5},
    "jumps": {"kind": "jump", "seconds": DAY},
}


def race(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 12: four executors, one plan, one store, started together, `count` times."""
    waited = reused = 0
    with workers(workspace, RACERS) as racing:
        for number in range(seed, seed + count):
            answers = _race(f"race, seed {number}", number, workspace, racing, [None] * RACERS)
            waited += sum(answer["waited"] > 0 for answer in answers)
            reused += sum(answer["statuses"].count("reused") for answer in answers)
    assert reused or not count, f"race, seed {seed}: no executor ever met another"
    return {"races": count, "executors": RACERS, "executors_that_waited": waited, "reused": reused}


def _race(
    name: str, seed: int, workspace: Path, racing: list[Worker], clocks: list[Any]
) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    trial = Trial(
        name,
        workspace / name.replace(" ", "_"),
        shards=draw.randint(1, 4),
        delay=draw.choice((0.0, 0.002, 0.02)),
    )
    # Each asks for the outputs in another order, so that every one of them is contended.
    orders = [
        trial.order(targets=draw.sample(range(3), 3), lease=_QUICK_LOOKS, clock=clock)
        for clock in clocks
    ]
    answers = trial.race(racing, orders)
    off = abs(answers[0]["now"] - answers[-1]["now"])
    wrong = clocks[0] is not None
    assert (off > HOUR / 4) == wrong, f"{trial.name}: the first clock is {off:.0f} s off"
    trial.remove()
    return answers


def pause(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 13: an executor is stopped in mid-step past its lease, and goes on afterwards.

    In every third trial the second is stopped too while the first goes on and publishes, so the
    one that comes too late is the one that holds the newer lease.
    """
    places: dict[str, int] = {}
    seconds = []
    with workers(workspace, 2) as (first, second):
        operations = _count_operations(workspace / "undisturbed", first)
        for number in range(seed, seed + count):
            draw = random.Random(number)
            name = f"pause, seed {number}"
            trial = Trial(name, workspace / f"pause-{number}", shards=2, targets=[0])
            # Named places and storage operations by turns; 2 x operations seeds have had them all.
            stop: dict[str, Any] = {"place": PLACES[number // 2 % len(PLACES)]}
            if number % 2:
                stop = {"operation": number // 2 % operations + 1}
            again = {"operation": draw.randint(1, operations)} if number % 3 == 2 else None
            seconds.append(_pause(trial, first, second, stop, again))
            what = str(stop.get("place", "operation")) + (" twice" if again else "")
            places[what] = places.get(what, 0) + 1
            trial.remove()
    return {
        "pauses": count,
        "operations_to_stop_at": operations,
        "where": places,
        "takeover_seconds_max": round(max(seconds), 2),
        "stale_seconds": QUICK["STALE_SECONDS"],
    }


def _count_operations(store: Path, worker: Worker) -> int:
    """Storage operations of an undisturbed step, from its lease to its manifest."""
    trial = Trial("pause, undisturbed", store, shards=2, targets=[0])
    worker.order(trial.order())
    answer = worker.answer(trial.name)
    trial.check([answer])
    assert answer["operations"] > 10, "the operations of the step were not counted"
    trial.remove()
    return answer["operations"]


def _pause(
    trial: Trial,
    first: Worker,
    second: Worker,
    stop: dict[str, Any],
    second_stop: dict[str, Any] | None,
) -> float:
    """One trial; returns the seconds the second waited for the lease."""
    first.order(trial.order(lease=QUICK, pause=stop))
    assert first.wait_until_stopped(trial.name), f"{trial.name}: not stopped at {stop}"
    second.order(trial.order(lease=QUICK, pause=second_stop))
    if second_stop is not None and second.wait_until_stopped(trial.name):
        winner = "000001-"
        first.resume()
        answers = [first.answer(trial.name)]
        text = (trial.root(0) / "manifest.json").read_bytes()
        second.resume()
        answers.insert(0, second.answer(trial.name))
    else:
        winner = "000002-"
        answers = [second.answer(trial.name)]
        text = (trial.root(0) / "manifest.json").read_bytes()
        first.resume()
        answers.append(first.answer(trial.name))
    what = f"{trial.name} (stopped at {stop}, {second_stop})"
    trial.name = what
    trial.check(answers)
    assert (trial.root(0) / "manifest.json").read_bytes() == text, (
        f"{what}: published bytes changed"
    )
    attempt = trial.published(0).attempt
    assert attempt.startswith(winner), f"{what}: published by {attempt}, expected {winner}*"
    assert trial.takeovers(0) <= 1, f"{what}: {trial.takeovers(0)} takeovers"
    return answers[0]["acquire"][0]


def clock(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 14: fault 12 and two scripted meetings, with one executor's wall clock wrong.

    `count` races for each of six clocks; the meetings (a live holder, a dead one) must be decided
    as they are under true clocks, whoever of the two has the wrong one. The clock is patched in the
    process: libfaketime 0.9.10 breaks the sleep of the Python this was written with.
    """
    tried, waits = [], 0
    with workers(workspace, RACERS) as racing:
        for name, wrong in CLOCKS.items():
            shifted = wrong and {**wrong, "seed": seed}
            waits += _under_clock(name, shifted, seed, count, workspace, racing)
            tried.append(name)
    assert waits, f"seed {seed}: every live holder was done before anyone came by"
    races, meetings = count * len(CLOCKS), 4 * len(CLOCKS)
    return {"clocks": tried, "races": races, "meetings": meetings, "waited_for_live_holder": waits}


def _under_clock(
    name: str, wrong: Any, seed: int, count: int, workspace: Path, racing: list[Worker]
) -> int:
    """Races and meetings under one clock; how often a live holder was waited for."""
    waits = 0
    for number in range(seed, seed + count):
        title = f"clock {name}, seed {number}"
        _race(title, number, workspace, racing, [wrong] + [None] * (RACERS - 1))
    for alive in (True, False):
        meetings = []
        # Both arrangements at the same time, each in a store of its own.
        for pair, clocks in ((racing[:2], (wrong, None)), (racing[2:], (None, wrong))):
            trial = Trial(
                f"clock {name}, seed {seed}, {'live' if alive else 'dead'} holder",
                workspace / f"meeting-{len(meetings)}",
                shards=1,
                delay=1.5 * QUICK["STALE_SECONDS"] if alive else 0.0,
                targets=[0],
            )
            _meet(trial, pair, clocks, alive=alive)
            meetings.append((trial, pair))
        for trial, pair in meetings:
            waits += _decided(trial, pair, alive=alive)
            trial.remove()
    return waits


def _meet(trial: Trial, pair: list[Worker], clocks: tuple[Any, Any], *, alive: bool) -> None:
    """A holder on another host works for longer than the stale time, or is gone; one comes by."""
    if alive:
        pair[0].order(trial.order(lease=QUICK, clock=clocks[0], host="elsewhere"))
        _wait_for(trial, trial.root(0) / "leases" / "000001.json")
    else:
        write_lease(trial.root(0), 1, {"host": "elsewhere", "pid": 1, "since": 4e9})
    pair[1].order(trial.order(lease=QUICK, clock=clocks[1]))


def _decided(trial: Trial, pair: list[Worker], *, alive: bool) -> int:
    """Check what came of a meeting; how often a live holder was waited for: 0 or 1."""
    answers = [pair[1].answer(trial.name)]
    if alive:
        answers.append(pair[0].answer(trial.name))
    trial.check(answers)
    waited = answers[0]["waited"]
    decided = (answers[0]["statuses"], trial.takeovers(0))
    expected = (["reused"], 0) if alive else (["published"], 1)
    assert decided == expected, f"{trial.name}: decided {decided}, expected {expected}"
    # On a busy machine a live holder may be done before the other looks.
    assert waited == 1 or alive, f"{trial.name}: took a silent holder's lease at once"
    return waited if alive else 0


def _wait_for(trial: Trial, path: Path) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if path.exists():
            return
        pause.wait(0.01)
    raise AssertionError(f"{trial.name}: {path.name} did not appear")


def remains(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 15: every kind of remains in `leases/`, then two executors; `count` rounds of all.

    Free at once or after the silence as the kind says, never wedged, and what is taken over is
    held against the other. Plus holders that beat, here and elsewhere: left alone while they do.
    """
    dead: list[float] = []
    # Most of a round is waiting for silence, so two halves of the kinds go at the same time.
    with workers(workspace, 4) as racing, ThreadPoolExecutor(2) as halves:
        for number in range(seed, seed + count):
            rounds = [
                halves.submit(_round, number, half, workspace, racing[2 * half : 2 * half + 2])
                for half in (0, 1)
            ]
            dead += [seconds for half in rounds for seconds in half.result()]
    return {
        "kinds": len(REMAINS) + 2,
        "trials": count * (len(REMAINS) + 2),
        "dead_owner_here_takeover_seconds": {
            "median": round(statistics.median(dead), 4),
            "max": round(max(dead), 4),
        },
        "stale_seconds": QUICK["STALE_SECONDS"],
    }


def _round(number: int, half: int, workspace: Path, pair: list[Worker]) -> list[float]:
    """Every second kind, and one of the holders that beat; seconds to take over a dead owner's."""
    dead = []
    for index, (kind, what) in list(enumerate(REMAINS.items()))[half::2]:
        trial = Trial(
            f"remains ({kind}), seed {number}",
            workspace / f"remains-{number}-{index}",
            delay=0.02,
            targets=[0],
        )
        seconds = _after(trial, what, random.Random(f"{number} {kind}"), pair)
        dead += [seconds] if kind == "dead owner here" else []
        trial.remove()
    _while_it_beats(workspace / f"beats-{number}-{half}", number, half == 0, pair[0])
    return dead


def _after(trial: Trial, what: Remains, draw: random.Random, racing: list[Worker]) -> float:
    """One kind of remains; returns the seconds until the lease was taken."""
    what.write(trial.root(0), draw)
    answers = trial.race(racing, [trial.order(lease=QUICK)] * 2)
    # In a race one of the two has the lease and the other finds the output or waits for it.
    taker = min(answers, key=lambda answer: answer["statuses"] != ["published"])
    seconds = taker["acquire"][0]
    lease = trial.root(0) / "leases" / f"{what.number:06d}.json"
    assert lease.is_file(), f"{trial.name}: lease {what.number} was not taken"
    assert trial.published(0).attempt.startswith(f"{what.number:06d}-"), trial.name
    if what.at_once:
        assert not taker["waited"], f"{trial.name}: waited {seconds:.2f} s, expected none"
    else:
        assert seconds >= QUICK["STALE_SECONDS"], f"{trial.name}: taken after {seconds:.2f} s"
    return seconds


def _while_it_beats(store: Path, seed: int, here: bool, worker: Worker) -> None:
    where = "here" if here else "elsewhere"
    trial = Trial(f"remains (owner {where} beats), seed {seed}", store, targets=[0])
    base = write_lease(trial.root(0), 7, owner_here(os.getpid()) if here else ELSEWHERE)
    with _beating(base):
        worker.order(trial.order(lease=QUICK))
        threading.Event().wait(2.5 * QUICK["STALE_SECONDS"])
        names = storage.list_names(str(base.parent))
        assert "000008.json" not in names, f"{trial.name}: a live lease was taken"
    answer = worker.answer(trial.name)
    trial.check([answer])
    assert answer["waited"] == 1, f"{trial.name}: did not wait"
    assert trial.takeovers(0) == 1, f"{trial.name}: not taken over after the silence"
    trial.remove()


@contextlib.contextmanager
def _beating(base: Path) -> Iterator[None]:
    """Heartbeats as a holder writes them, while the block runs."""
    stopped = threading.Event()

    def beat() -> None:
        count = 0
        while not stopped.wait(QUICK["BEAT_SECONDS"]):
            count += 1
            storage.write_atomic(f"{base}.beat", str(count).encode())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


FAULTS: dict[int, list[Fault]] = {
    12: [Fault("four executors, one store", 8, 200, race)],
    13: [Fault("an executor stopped past its lease", 3, 50, pause)],
    14: [Fault("one executor's wall clock is wrong", 1, 10, clock)],
    15: [Fault("stale and torn lease files", 1, 5, remains)],
}
