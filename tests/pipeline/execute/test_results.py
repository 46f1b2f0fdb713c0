"""What a step may return, and where it may write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Artifact, Experiment, Result, StepContext, step
from pipeline.errors import InputError
from pipeline.store.decode import plain_result


def write(directory: str, item: Any) -> dict[str, Any]:
    Path(directory, "hello.txt").write_text("hi")
    return {"mean": np.float32(item), "count": np.int64(item)}


@step(output=Artifact, version=1)
def measured(run: StepContext) -> Result:
    shards = run.map(write, {"a": 1, "b": 2})
    with run.shard("plain") as directory:
        Path(directory, "hello.txt").write_text("hi")
    total = sum(shard.result["count"] for shard in shards.values())
    loss = {"loss": np.float32(0.5), "rows": [np.int64(3), np.zeros(())], "good": np.bool_(True)}
    return {"total": total, "nested": loss}


def run(store: Path) -> Artifact:
    return Experiment(lambda: measured()).run(prefix=store, executor="inline")


def test_numbers_of_numpy_are_numbers(tmp_path):
    """In the results of steps and of shards, nested ones too; and a shard has its directory."""
    found = run(tmp_path)
    nested = {"loss": 0.5, "rows": [3, 0.0], "good": True}
    assert found.result == {"total": 3, "nested": nested}
    results = [shard.result for shard in found.manifest.shards if shard.name != "plain"]
    assert results == [{"mean": 1.0, "count": 1}, {"mean": 2.0, "count": 2}]
    assert type(found.result["total"]) is int
    assert run(tmp_path).manifest == found.manifest


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ([1, 2], "a list"),
        (3, "found a int"),
        ({"a": [1, {"b": np.zeros(2)}]}, r"result\['a'\]\[1\]\['b'\] of type ndarray"),
        ({"a": object()}, r"result\['a'\] of type object"),
        ({(1, 2): 3}, r"the name \(1, 2\) in result"),
    ],
)
def test_a_result_that_is_no_mapping_of_json_is_refused(result, says):
    with pytest.raises(InputError, match=says):
        plain_result(result)
