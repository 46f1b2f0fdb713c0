"""Faults 47 and 48: deletion beside a live build, and two live owners of one build.

What is published is what the build declared, every byte, whatever was deleted or resumed when.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.graph.step import Node
from pipeline.store import integrity, lease, manifest
from pipeline.store.garbage import Keep, delete, find_garbage
from pipeline.store.outputs import Store
from tests.faults.lease_trial import DEADLINE_SECONDS, QUICK, Worker, quick_leases, workers
from tests.faults.owner_worker import PARTS, STEPS, node_of
from tests.faults.registry import Fault, trials

_WORKER = "tests.faults.owner_worker"
_BUILDS = ("first", "forced", "resumed", "of another experiment")


def _order(store: Path, kind: str, delay: float, **more: Any) -> dict[str, Any]:
    about = {"kind": kind, "store": str(store), "delay": delay, "lease": QUICK}
    return {**about, "marks": f"{store}.marks", "refused_from": PARTS, **more}


def _published(node: Node, store: Path) -> manifest.Manifest:
    """What is published of the step, after every byte was compared."""
    path = str(store / node.directory)
    found = manifest.load_verified(path, node.key)
    assert found is not None, "nothing was published"
    assert not list(integrity.problems(path, found))
    return found


def collected(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 47: `gc --delete` again and again while a step is built."""
    figures: Counter[str] = Counter()

    def race(number: int) -> None:
        kind, draw = _BUILDS[number % len(_BUILDS)], random.Random(number)
        store = workspace / f"gc-{number}"
        store.mkdir()
        order = _order(store, "parts", draw.choice((0.01, 0.03)))
        node = node_of(order)
        if kind == "forced":
            _build(builder, order)
            order["force"] = True
        elif kind == "resumed":
            builder.order({**order, "refused_from": draw.randrange(1, PARTS)})
            assert "asked to refuse" in builder.answer(str(number))["error"]
        nodes = [] if kind == "of another experiment" else [node]
        time.sleep(draw.random() * 0.05)
        builder.order(order)
        with quick_leases():
            while not builder.answered:
                report = find_garbage(Store(str(store)), nodes, Keep())
                figures["bytes deleted"] += delete(Store(str(store)), report.garbage)[0]
                figures["collections"] += 1
                time.sleep(draw.random() * 0.02)
        answer = builder.answer(str(number))
        assert answer["error"] is None, answer["error"]
        names = [shard.name for shard in _published(node, store).shards]
        assert names == [f"part/{i:03d}" for i in range(PARTS)]
        shutil.rmtree(store)

    with workers(workspace, 1, _WORKER) as (builder,):
        return {"races": trials(seed, count, race), **figures}


def _build(worker: Worker, order: dict[str, Any]) -> None:
    worker.order(order)
    answer = worker.answer(order["store"])
    assert answer["error"] is None, answer["error"]


def two_owners(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 48: a second trainer takes over while the first hangs, or works on after `unlock`."""
    figures: Counter[str] = Counter()

    def trial(number: int) -> None:
        draw, store = random.Random(number), workspace / f"owners-{number}"
        shutil.copytree(prepared, store)
        order = _order(store, "train", 0.05)
        marks = Path(order["marks"])
        marks.touch()
        first.order(order)
        _wait(first, marks, draw.randrange(STEPS))
        time.sleep(draw.random() * 0.15)
        if number % 2:
            first.signal(signal.SIGSTOP)
            try:
                second.order(order)
                _wait(second, marks, draw.randrange(STEPS))
                time.sleep(draw.random() * 0.15)
            finally:
                first.signal(signal.SIGCONT)
        else:
            lease.end(str(store / node.directory))
            second.order(order)
        answers = [worker.answer(f"seed {number}") for worker in (first, second)]
        for answer in answers:
            assert answer["error"] is None, answer["error"]
        ended = sorted(status for answer in answers for status in answer["statuses"])
        assert ended in (["published"], ["published", "reused"]), ended
        assert _parameters(_published(node, store)) == wanted, "other parameters"
        figures[" and ".join(ended)] += 1
        shutil.rmtree(store)

    prepared = workspace / "prepared"
    prepared.mkdir()
    node = node_of({"kind": "train"})
    with workers(workspace, 2, _WORKER) as (first, second):
        _build(first, _order(prepared, "train", 0.0))
        wanted = _parameters(_published(node, prepared))
        shutil.rmtree(prepared / node.directory)
        return {"trials": trials(seed, count, trial), **figures}


def _wait(worker: Worker, marks: Path, step: int) -> None:
    """Until the worker has done so many steps, or has ended."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and not worker.answered:
        said = [line.split() for line in marks.read_text().splitlines()]
        if any(len(s) == 2 and s[0] == str(worker.pid) and float(s[1]) >= step for s in said):
            return
        time.sleep(0.005)
    assert worker.answered, f"step {step} was not reached"


def _parameters(published: manifest.Manifest) -> dict[str, list[str]]:
    """Digests of the arrays of the checkpoints that are published, by step."""
    return {
        str(shard.result["step"]): sorted(
            file.sha256 for file in shard.files if file.path.startswith("arrays/")
        )
        for shard in published.shards
        if shard.name.startswith("checkpoint/")
    }


FAULTS = {
    47: [Fault("gc beside a build", 10, 100, collected)],
    48: [Fault("two live owners of one training", 2, 50, two_owners)],
}
