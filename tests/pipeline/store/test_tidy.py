"""What a published output lets go of: the data of other attempts, and nothing people look at."""

from __future__ import annotations

import pytest

from pipeline.graph.node import as_node, topological
from pipeline.store import storage
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.outputs import Store
from pipeline.store.tidy import discard_unreferenced
from tests.pipeline.helpers import bring_up, executed
from tests.pipeline.toy import numbers

SHOWN = (
    "log.txt",
    "failure.json",
    "metrics.jsonl",
    "traces/step-00000003/host.xplane.pb",
    "tensorboard/events.out.tfevents.1",
    "wandb/run-1/run.wandb",
    "stacks/process-0.txt",
)
DATA = (
    "checkpoints/00000010.a/weights",
    "shards/tokens/0/data.bin",
    "shards-2/half/data.bin",
    "of-a-step-of-ones-own.bin",
)


@pytest.mark.parametrize("collect", [False, True])
def test_of_another_attempt_the_data_goes_and_what_people_look_at_stays(tmp_path, collect):
    """As the publishing attempt tidies up, and as gc does."""
    node = as_node(numbers(count=4))
    bring_up(str(tmp_path), numbers(count=4))
    root = tmp_path / node.directory
    attempt = root / "attempts" / "000000-dead"
    for name in (*SHOWN, *DATA):
        storage.write_atomic(str(attempt / name), b"x")
    if collect:
        store = Store(str(tmp_path))
        delete(store, find_garbage(store, topological([node])))
    else:
        discard_unreferenced(str(root))
    left = {path.relative_to(attempt).as_posix() for path in attempt.rglob("*") if path.is_file()}
    assert left == set(SHOWN)
    assert executed(str(tmp_path), numbers(count=4)) == []


def test_a_link_that_a_tracker_left_is_deleted_and_what_it_leads_to_is_not(tmp_path):
    """Of an output that no experiment reaches, as W&B's `latest-run`."""
    bring_up(str(tmp_path / "store"), numbers(count=4))
    attempt = tmp_path / "store" / as_node(numbers(count=4)).directory / "attempts" / "000000-dead"
    (tmp_path / "elsewhere").write_bytes(b"1234")
    (attempt / "wandb").mkdir(parents=True)
    (attempt / "wandb" / "latest-run").symlink_to(tmp_path / "elsewhere")
    (attempt / "wandb" / "gone").symlink_to(tmp_path / "nowhere")
    store = Store(str(tmp_path / "store"))
    delete(store, find_garbage(store, []))
    assert not attempt.exists()
    assert (tmp_path / "elsewhere").read_bytes() == b"1234"
