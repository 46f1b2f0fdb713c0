"""Checkpoints of several real processes, and their restore by any number."""

import os
import re

import jax
import pytest

from tests.training.checkpoint.checkpoint_worker import OTHER_SPECS, SPECS, is_right, like, state
from tests.training.trainer.test_processes import run_processes
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.files import read_index
from training.checkpoint.restore import restore

pytestmark = pytest.mark.slow


def test_processes_save_without_meeting_and_agree_on_what_is_there(tmp_path):
    """Each writes its share; process 0 alone commits, and says who failed or stayed away.

    What may pass is called so in all of them. What several saved is restored by one on any number
    of devices, and what one saved by several.
    """
    root, count = str(tmp_path), 4
    checkpointer = Checkpointer(root, attempt="one")
    checkpointer.save(9, state(9), {})
    checkpointer.wait()
    worker = "tests.training.checkpoint.checkpoint_worker"
    first, *others = run_processes(root, count, 1, module=worker)
    path = os.path.join(root, "00000001.a")
    assert first["committed"] == [[1, path]]
    assert all(report["committed"] == [] for report in others)
    assert all(report["right"] == [True] * 3 for report in (first, *others))
    assert re.search("^StoreUnavailable: .*process [1-3]: .*No space left", first["full"])
    assert all(
        report[what].startswith("StoreUnavailable: ")
        for report in (first, *others)
        for what in ("full", "passing")
    )
    assert all("No space left" in report["full"] for report in others)
    assert first["absent"].startswith("StoreUnavailable: ")
    assert f"processes {list(range(1, count))} wrote nothing" in first["absent"]
    assert "arrays/rows/c.0.0: expected what was saved, found no file" in first["damaged"]
    for report in others:
        assert report["damaged"] == (
            "CorruptOutput: processes [0] could not read the checkpoint; their logs have the reason"
        )
    verdicts = {report["mixed"].partition(":")[0] for report in (first, *others)}
    assert verdicts == {"CorruptOutput"}
    assert first["unexpected"].startswith("RuntimeError: processes [1]")
    assert others[0]["unexpected"] == "KeyError: 'a bug'"
    assert all(report["unexpected"].startswith("RuntimeError") for report in others[1:])
    kept = os.path.join(root, "kept")
    index = read_index(kept)
    parts = {name for name, _, _ in index["files"] if name.startswith("parts/")}
    assert parts == {f"parts/{i:05d}.json" for i in range(1, count)}
    assert len(index["leaves"]["rows"]["crc32c"]) == count
    for number in (1, 2, 4, 8):
        for specs in (SPECS, OTHER_SPECS):
            assert is_right(restore(kept, like(jax.devices()[:number], specs), step=1), 1)
