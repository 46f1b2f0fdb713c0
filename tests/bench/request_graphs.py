"""The graphs whose requests are counted, as an experiment file: steps of a line of text each.

    REQUEST_GRAPH=steps python tests/bench/request_graphs.py plan --prefix gs://bucket/store

`steps` are twenty of one shard each, a chain that fans out and comes together again; `shards` is
one step of `REQUEST_SHARDS` shards and one that reads it. The environment says which, and not a
preset: `gc` looks at every preset's outputs, and would ask about a graph that is not measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pipeline import Artifact, Experiment, Result, StepContext, named, step
from pipeline.store import storage

STEPS = {"steps": 20, "shards": 2}
_FILE = "line.txt"


def environment(graph: str, shards: int) -> dict[str, str]:
    """What a process that runs this file needs, to see this graph."""
    return {"REQUEST_GRAPH": graph, "REQUEST_SHARDS": str(shards)}


class Lines(Artifact):
    """Lines of text, one a shard."""

    def first(self) -> str:
        """The line of the first shard; the others are not opened."""
        path = storage.join(self.shard(self.shards()[0].name), _FILE)
        return storage.read_bytes(path).decode()


def write_line(directory: str, line: str) -> Mapping[str, Any]:
    """Shard writer: one line."""
    with storage.open_write(storage.join(directory, _FILE)) as file:
        file.write(line.encode())
    return {"characters": len(line)}


# A step defined in the file that is run has to be given its name.
@step(name="begin", output=Lines, version=1)
def begin(run: StepContext, *, shards: int) -> Result:
    """A line to each shard."""
    run.map(write_line, {f"part/{index:05d}": f"line {index}" for index in range(shards)})
    return {}


@step(name="follow", output=Lines, version=1)
def follow(run: StepContext, parts: tuple[Lines, ...], *, salt: str) -> Result:
    """One shard, of the first lines of the inputs."""
    text = " ".join(part.first() for part in parts)
    run.map(write_line, {"all": f"{salt}: {len(text)}"})
    return {}


def requests(
    graph: str = os.environ.get("REQUEST_GRAPH", "steps"),
    shards: int = int(os.environ.get("REQUEST_SHARDS", "1000")),
) -> Any:
    """The last step of the graph of that name."""
    if graph == "shards":
        return _followed("consumer", begin(shards=shards))
    end = begin(shards=1)
    for number in range(5):
        end = _followed(f"chain-{number}", end)
    fan = [_followed(f"fan-{number}", end) for number in range(8)]
    pairs = [_followed(f"pair-{n}", fan[2 * n], fan[2 * n + 1]) for n in range(4)]
    return _followed("last", _followed("together", *pairs))


def _followed(name: str, *parts: Any) -> Any:
    return named(follow(parts, salt=name), name)


experiment = Experiment(requests)

if __name__ == "__main__":
    experiment.main()
