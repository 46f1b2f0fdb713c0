"""Fault 58: garbage collection beside runs that read, in their store and in a shared one.

No run dies of what was deleted, and nothing that is protected is deleted, whatever was asked of
`gc`, when it was asked, and which inputs were built again meanwhile.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.graph.order import topological
from pipeline.graph.step import Node, as_node
from pipeline.store import integrity
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.manifest import load
from pipeline.store.outputs import Store
from pipeline.store.protection import Keep
from tests.faults.lease_trial import QUICK, Worker, quick_leases, workers
from tests.faults.reader_worker import graph
from tests.faults.registry import Fault, trials
from tests.pipeline.helpers import check_invariants

_WORKER = "tests.faults.reader_worker"


def _order(store: Path, **run: Any) -> dict[str, Any]:
    return {"lease": QUICK, "run": {"prefix": str(store), **run}}


def _run(worker: Worker, store: Path, **run: Any) -> str | None:
    """Run the graph and wait; the error, if there is one."""
    worker.order(_order(store, **run))
    return worker.answer(str(store))["error"]


def _collect(store: Path, nodes: list[Node], keep: Keep, draw: random.Random) -> int:
    """List, wait for an answer, and delete; the bytes."""
    at = Store(str(store))
    found = find_garbage(at, nodes, keep)
    time.sleep(draw.choice((0.0, 0.0, draw.random() * 0.2)))
    return delete(at, found.garbage, wait=draw.choice((0.0, 0.3)))[0]


def _sound(store: Path, nodes: list[Node]) -> None:
    for node in nodes:
        path = str(store / node.directory)
        found = load(path)
        assert found is not None, f"{path}: was deleted"
        problems = list(integrity.problems(path, found))
        assert not problems, problems


def beside_a_reader(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 58: `gc --delete` with random flags, and rebuilds, while a run builds and reads."""
    figures: Counter[str] = Counter()

    def trial(number: int) -> None:
        draw, store = random.Random(number), workspace / f"store-{number}"
        store.mkdir()
        wanted = topological([as_node(graph(tag=number))])
        assert _run(rebuilding, store, tag=number + 1, target="drawn") is None
        before = draw.choice((None, "drawn", "order"))
        if before is not None:
            assert _run(reading, store, tag=number, target=before) is None
        if draw.random() < 0.5:
            shutil.rmtree(store / "events", ignore_errors=True)
        reading.order(_order(store, tag=number, delay=draw.choice((0.005, 0.02))))
        recorded = True
        while not reading.answered:
            if not rebuilding.answered and draw.random() < 0.2:
                force = (draw.choice(("drawn", "order")),)
                rebuilding.order(_order(store, tag=number, target=force[0], force=force))
                figures["rebuilds"] += 1
                if draw.random() < 0.5:
                    error = rebuilding.answer(f"seed {number}")["error"]
                    assert error is None, f"a rebuild died: {error}"
                else:
                    pending.append(number)
            ordered = as_node(graph(tag=number, target="order")).directory
            kept = frozenset(draw.choice(((), (ordered,))))
            keep = Keep(recorded=draw.random() < 0.5, outputs=kept)
            recorded = recorded and keep.recorded
            figures["bytes deleted"] += _collect(store, draw.choice(([], wanted)), keep, draw)
            figures["collections"] += 1
            for _ in range(len(pending)):
                error = rebuilding.answer(f"seed {number}")["error"]
                assert error is None, f"a rebuild died: {error}"
                pending.pop()
            time.sleep(draw.random() * 0.05)
        error = reading.answer(f"seed {number}")["error"]
        assert error is None, f"the reader died: {error}"
        if recorded:
            _sound(store, wanted)
        # What was built from an input that was built again is stale, and nothing is lost.
        assert _run(reading, store, tag=number) is None
        check_invariants(str(store))
        shutil.rmtree(store)

    pending: list[int] = []
    with workers(workspace, 2, _WORKER) as (reading, rebuilding), quick_leases():
        return {"trials": trials(seed, count, trial), **figures}


def shared(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 58: a shared store is cleaned, and built again, beside a run that uses it.

    What the run publishes needs nothing of the shared store. A run that was reading there in place
    may end, and is whole when it is run again.
    """
    figures: Counter[str] = Counter()

    def trial(number: int) -> None:
        draw = random.Random(number)
        team, own = workspace / f"team-{number}", workspace / f"own-{number}"
        team.mkdir()
        own.mkdir()
        assert _run(reading, team, tag=number, target=draw.choice(("drawn", "order"))) is None
        target = draw.choice(("order", "slow"))
        run = {"tag": number, "target": target, "shared": [str(team)], "delay": 0.005}
        reading.order(_order(own, **run))
        time.sleep(draw.random() * 0.4)
        if draw.random() < 0.5:
            assert _run(cleaning, team, tag=number, target="drawn", force=("drawn",)) is None
        nodes = draw.choice(([], topological([as_node(graph(tag=number, target="drawn"))])))
        keep = Keep(recorded=draw.random() < 0.3)
        figures["bytes deleted"] += _collect(team, nodes, keep, draw)
        error = reading.answer(f"seed {number}")["error"]
        if error is not None:
            assert str(team) in error, error
            figures["run again"] += 1
            error = _run(reading, own, **run)
        assert error is None, error
        shutil.rmtree(team)
        check_invariants(str(own))
        published = [as_node(graph(tag=number, target=name)) for name in ("drawn", "order", "slow")]
        _sound(
            own, [node for node in published if (own / node.directory / "manifest.json").exists()]
        )
        assert _run(reading, own, tag=number, target="slow") is None
        shutil.rmtree(own)

    with workers(workspace, 2, _WORKER) as (reading, cleaning), quick_leases():
        return {"trials": trials(seed, count, trial), **figures}


FAULTS = {
    58: [
        Fault("gc beside a run that reads", 5, 100, beside_a_reader),
        Fault("a shared store cleaned beside its users", 4, 100, shared),
    ]
}
