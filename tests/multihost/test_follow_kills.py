"""Training and its follower at once, in processes of their own, killed midway: the same results."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from pipeline import lease
from pipeline.backend import InlineBackend
from pipeline.events import EventLog
from pipeline.executor import Execution
from pipeline.step import as_node
from pipeline.store import Store
from steps.artifacts import Checkpoint, Scores
from steps.block_shuffle import block_shuffle
from steps.follow import follow
from steps.train import train
from tests.pipeline.helpers import check_invariants
from tests.steps.synthetic import synthetic
from tests.training import tiny
from training.load import load_model

pytestmark = pytest.mark.slow

STEPS, EVERY = 1000, 100
CONFIG = dataclasses.replace(
    tiny.TRAIN,
    steps=STEPS,
    batch_size=32,
    evaluate_every=STEPS,
    checkpoint_every=EVERY,
    log_every=10,
)


def graph():
    """(training, its follower) on random tokens with two held-out sets."""
    tokens = synthetic(documents=1500, held_out=("validation", "other"))
    sequences = block_shuffle(tokens, sequence_length=tiny.LENGTH, io_block_size=4, window_blocks=8)
    model = train(sequences, model=tiny.MODEL, optimizer=tiny.OPTIMIZER, train=CONFIG)
    return model, follow(model, tokens)


class Killer:
    """Kills the process of a step, once each, when a step has come so far.

    Args:
        store: where the steps are.
        plan: step to kill -> (step to watch, how far it must have come).
    """

    def __init__(self, store, plan):
        self.store, self.plan, self.killed = store, dict(plan), {}

    def __call__(self, event):
        if event["event"] != "progress":
            return
        for victim, (watched, done) in list(self.plan.items()):
            if event["step"] == watched and event["done"] >= done:
                nodes = {as_node(node).label: as_node(node) for node in graph()}
                owner = lease.holder(Store(self.store).path(nodes[victim]))
                os.kill(owner["pid"], signal.SIGKILL)
                self.killed[victim] = self.plan.pop(victim)


def run(store, backend, plan=()):
    """(model, scores, events) of the graph, disturbed as planned."""
    events, killer = [], Killer(store, plan)
    log = EventLog(store, "trial", [events.append, killer])
    nodes = [as_node(node) for node in graph()]
    execution = Execution(nodes, Store(store), log, "again")
    execution.run(backend(log), execution.look())
    assert killer.plan == {}, f"never killed: {killer.plan}"
    assert check_invariants(store) == 4
    model, scores = (execution.published[node.key] for node in nodes)
    return Checkpoint(model.path, model.manifest), Scores(scores.path, scores.manifest), events


def test_followed_and_killed_midway_the_results_are_those_of_one_after_the_other(tmp_path):
    """kill -9 of follower and trainer: the same rows and parameters to the bit, none twice."""
    want_model, want_scores, _ = run(str(tmp_path / "after"), InlineBackend)
    steps = range(EVERY, STEPS + 1, EVERY)
    assert [row["step"] for row in want_scores.rows] == [step for step in steps for _ in range(2)]

    from pipeline.on_ray.backend import RayBackend

    ray = RayBackend()
    try:
        plan = {"follow": ("follow", 1), "train": ("train", STEPS // 2)}
        model, scores, events = run(str(tmp_path / "beside"), lambda log: ray, plan)
    finally:
        ray.close()
    assert scores.rows == want_scores.rows
    assert scores.result["measured"]["skipped"] == []
    assert scores.manifest.inputs["model"]["digest"] == model.manifest.content
    got, want = (load_model(m.final, tiny.MODEL) for m in (model, want_model))
    assert tiny.equal(got, want)
    assert model.rows("evaluations") == want_model.rows("evaluations")
    order = [(e["step"], e["event"]) for e in events]
    assert order.index(("follow", "progress")) < order.index(("train", "finished"))
    # Its own death, and that of the training it followed.
    assert order.count(("follow", "retried")) == 2
    assert order.count(("train", "retried")) == 1
