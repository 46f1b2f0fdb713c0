"""Several processes follow a run, and one of them has trouble with the store."""

import jax
import pytest

from models.transformer import Transformer
from tests.training import tiny
from tests.training.trainer.test_processes import run_processes
from training.checkpoint.checkpointer import Checkpointer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("what", ["index", "arrays", "disk"])
def test_a_store_that_fails_in_one_process_makes_all_read_again(tmp_path, what):
    """Each reads twice, process 0 keeps one score, nothing is skipped, and they end together."""
    saver = Checkpointer(str(tmp_path), attempt="a")
    path = saver.save(1, {"model": Transformer.init(tiny.MODEL, key=jax.random.key(0))}, {})
    saver.wait()
    reports = run_processes(
        str(tmp_path), 2, 1, path, what, module="tests.training.evaluate.follow_worker"
    )
    assert [report["loads"] for report in reports] == [2, 2]
    assert [report["kept"] for report in reports] == [[1], []]
    assert [report["skipped"] for report in reports] == [[], []]
    assert all(report["ended"] for report in reports)
