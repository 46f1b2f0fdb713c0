"""A pod whose machine is taken away: the run saves, is tried again, and ends as if undisturbed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from pipeline import pod
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph.step import as_node
from pipeline.store.outputs import Store
from steps.artifacts import Checkpoint
from steps.tokens.sequences import block_shuffle
from steps.training.train import train
from tests.pipeline.helpers import bring_up, heard
from tests.steps.synthetic import VOCAB, synthetic
from tests.training import tiny

pytestmark = pytest.mark.slow
STEPS = 80
CONFIG = dataclasses.replace(tiny.TRAIN, steps=STEPS, checkpoint_every=1000, evaluate_every=1000)


def _node(hardware):
    sequences = block_shuffle(
        synthetic(), sequence_length=tiny.LENGTH, io_block_size=4, window_blocks=3
    )
    model = dataclasses.replace(tiny.MODEL, vocab_size=VOCAB)
    return train(
        sequences, model=model, optimizer=tiny.OPTIMIZER, train=CONFIG, hardware=pod(hardware)
    )


def _terminate_one() -> bool:
    """SIGTERM to one process of the gang; whether there was one."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if b"_GangProcess" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    if found:
        os.kill(max(found), signal.SIGTERM)
    return bool(found)


def test_a_preempted_pod_resumes_from_its_checkpoint(tmp_path, ray_backend):
    """One attempt more, no try used up, and the losses of a run that nobody disturbed."""
    store, events, sent = str(tmp_path / "pod"), [], []

    def listen(event):
        events.append(event)
        if event["event"] == "progress" and event.get("unit") == "steps" and not sent:
            sent.extend([event["done"]] if _terminate_one() else [])

    node = as_node(_node("cpu-2x1"))
    log = EventLog(store, "test", [heard(listen)])
    execution = Execution([node], Store(store), log, "again")
    execution.run(ray_backend, execution.look())
    again = [event for event in events if event["event"] == "retried"]
    assert [event["tries"] for event in again] == [0]
    assert "preempted after step" in again[0]["cause"]
    found = execution.published[node.key]
    disturbed = Checkpoint(found.path, found.manifest)
    there = bring_up(str(tmp_path / "alone"), _node("local")).published[node.key]
    alone = Checkpoint(there.path, there.manifest)
    rows = [tiny.learned(run.rows("history")) for run in (disturbed, alone)]
    assert [row["step"] for row in rows[0]] == list(range(1, STEPS + 1))
    assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]
    # Rounding on two processes and on one grows with the steps.
    losses = [[row["loss"] for row in run] for run in rows]
    np.testing.assert_allclose(losses[0][:30], losses[1][:30], rtol=0, atol=1e-4)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.1)
