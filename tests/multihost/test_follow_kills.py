"""Training and its follower at once, in processes of their own, killed midway: the same results."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from pipeline.execute.backend import InlineBackend
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph.step import as_node
from pipeline.store import lease
from pipeline.store.outputs import Store
from steps.artifacts import Checkpoint, Scores
from steps.evaluation.follow import follow
from steps.tokens.sequences import block_shuffle
from steps.training.train import train
from tests.pipeline.helpers import check_invariants, heard
from tests.steps.synthetic import synthetic
from tests.training import tiny
from training.checkpoint.restore import load_model

pytestmark = pytest.mark.slow

STEPS, EVERY = 200, 20
CONFIG = dataclasses.replace(
    tiny.TRAIN,
    steps=STEPS,
    batch_size=16,
    evaluate_every=STEPS,
    checkpoint_every=EVERY,
    log_every=10,
    watchdog_seconds=600.0,
)


def graph():
    """(training, its follower) on random tokens with two held-out splits."""
    tokens = synthetic(documents=1500, held_out=("validation", "other"))
    sequences = block_shuffle(tokens, sequence_length=tiny.LENGTH, io_block_size=4, window_blocks=8)
    model = train(sequences, model=tiny.MODEL, optimizer=tiny.OPTIMIZER, train=CONFIG)
    return model, follow(model, tokens)


class Killer:
    """Sends signals to the processes of steps, each once, when a step has come so far.

    Args:
        store: where the steps are.
        plan: (step to watch, how far it must have come since it was last sent a signal, step whose
            process it is, signal), in the order in which it happens.
    """

    def __init__(self, store, plan):
        self.store, self.plan = store, list(plan)
        self.done = {}

    def __call__(self, event):
        if event["event"] == "progress":
            self.done[event["step"]] = event["done"]
        while self.plan:
            watched, done, victim, number = self.plan[0]
            if self.done.get(watched, 0) < done:
                return
            nodes = {as_node(node).label: as_node(node) for node in graph()}
            owner = lease.holder(Store(self.store).path(nodes[victim]))
            if owner is None:
                return  # between two attempts: a later event will do
            os.kill(owner.owner["pid"], number)
            self.done.pop(victim, None)
            self.plan.pop(0)


def run(store, backend, plan=()):
    """(model, scores, events) of the graph, disturbed as planned."""
    events, killer = [], Killer(store, plan)
    log = EventLog(store, "trial", [heard(events.append), heard(killer)])
    nodes = [as_node(node) for node in graph()]
    execution = Execution(nodes, Store(store), log, "again")
    execution.run(backend(log), execution.look())
    assert not killer.plan, f"never happened: {killer.plan}"
    assert check_invariants(store) == 4
    model, scores = (execution.published[node.key] for node in nodes)
    return Checkpoint(model.path, model.manifest), Scores(scores.path, scores.manifest), events


def test_followed_and_killed_midway_the_results_are_those_of_one_after_the_other(
    tmp_path, ray_backend
):
    """kill -9 of follower and trainer: the same rows and parameters to the bit, none twice.

    Training stands still until the follower has scored something, however long that takes, and
    again until the follower's next attempt has: only one at work can lose what it follows.
    """
    want_model, want_scores, _ = run(str(tmp_path / "after"), InlineBackend)
    steps = range(EVERY, STEPS + 1, EVERY)
    assert [row["step"] for row in want_scores.rows] == [step for step in steps for _ in range(2)]

    plan = [
        ("train", 2 * EVERY, "train", signal.SIGSTOP),
        ("follow", 1, "train", signal.SIGCONT),
        ("follow", 1, "follow", signal.SIGKILL),
        ("train", STEPS // 2, "train", signal.SIGSTOP),
        ("follow", 1, "train", signal.SIGKILL),
    ]
    model, scores, events = run(str(tmp_path / "beside"), lambda log: ray_backend, plan)
    assert scores.rows == want_scores.rows
    assert scores.result["measured"]["skipped"] == []
    assert scores.manifest.inputs["model"]["digest"] == model.manifest.content
    got, want = (load_model(m.final, tiny.MODEL) for m in (model, want_model))
    assert tiny.equal(got, want)
    assert model.rows("evaluations") == want_model.rows("evaluations")
    order = [(e.get("step"), e["event"]) for e in events]
    assert order.index(("follow", "progress")) < order.index(("train", "finished"))
    retried = {
        step: [e["cause"] for e in events if (e.get("step"), e["event"]) == (step, "retried")]
        for step in ("train", "follow")
    }
    assert [cause.partition(" (")[0] for cause in retried["train"]] == ["its worker died"]
    died, *ended = retried["follow"]
    assert died.startswith("its worker died")
    # At its next heartbeat, up to ten seconds later, unless it is finished by then.
    assert ended in ([], ["the step it follows ended without an output"])
