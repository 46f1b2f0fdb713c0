"""Fault 55: one damaged manifest among sound ones; every question about the others is answered.

What `plan` says of the damaged one is what a run does, in one line with a remedy that works.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import Experiment
from pipeline.errors import CorruptOutput
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.plan.lineage import lineage, users
from pipeline.plan.plan import explain, plan
from pipeline.plan.state import CORRUPT
from pipeline.store import manifest
from pipeline.store.garbage import Keep, find_garbage
from pipeline.store.outputs import Store
from tests.faults.fake_gcs import FakeGCS
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.helpers import bring_up, executed
from tests.pipeline.toy import Scale, clamp, numbers, scaled, total

Damage = Callable[[Path], None]


def _fields(**changes: Any) -> Damage:
    """Other fields in the manifest."""

    def damage(url: Path) -> None:
        tree = json.loads(url.read_bytes())
        url.write_text(json.dumps({**tree, **changes}))

    return damage


def _text(change: Callable[[bytes], bytes]) -> Damage:
    return lambda url: url.write_bytes(change(url.read_bytes())) and None


def _origin(directory: str) -> Damage:
    origin = {"kind": "adopted", "directory": directory, "key": "0" * 64}
    return _fields(origin={**origin, "input": "", "differences": []})


def _link(target: str) -> Damage:
    def damage(url: Path) -> None:
        url.unlink()
        url.symlink_to(target)

    return damage


def _directory(url: Path) -> None:
    url.unlink()
    url.mkdir()


def _data(change: Callable[[Path], None]) -> Damage:
    """Do something to the output's first file."""

    def damage(url: Path) -> None:
        (shard, *_) = json.loads(url.read_bytes())["shards"]
        change(url.parent / shard["root"] / shard["files"][0]["path"])

    return damage


def _table(path: str) -> Damage:
    """Shards in a table that is not there."""
    about = {"path": path, "size": 9, "sha256": "0" * 64, "shards": 65, "bytes": 1}
    return _fields(shards=about)


KINDS: dict[str, Damage] = {
    "seconds NaN": _fields(seconds=float("nan")),
    "seconds infinite": _text(lambda text: text.replace(b'"seconds": ', b'"seconds": 1e999')),
    "seconds negative": _fields(seconds=-1.0),
    "seconds a text": _fields(seconds="long"),
    "started after any calendar": _fields(started=1e300),
    "shards a number": _fields(shards=3),
    "a table of shards that is gone": _table("attempts/000001-x/shards.jsonl"),
    "a table of shards outside the output": _table("../../shards.jsonl"),
    "a list": _text(lambda text: b"[" + text + b"]"),
    "null": _text(lambda _: b"null"),
    "empty": _text(lambda _: b""),
    "torn": _text(lambda text: text[: len(text) // 2]),
    "two of them": _text(lambda text: text + text),
    "nested": _text(lambda _: b'{"config":' * 100_000 + b"1" + b"}" * 100_000),
    "huge": _text(lambda _: b'{"config": "' + b"x" * (10 << 20) + b'"}'),
    "of a later schema": _fields(schema=99),
    "of another key": _fields(key="0" * 64),
    "files in no store": _origin("nowhere://x/y-0123456789abcdef0123"),
    "files in a bucket that is not there": _origin("gs://gone/x-0123456789abcdef0123"),
    "files in a directory that is not there": _origin("/nowhere/x-0123456789abcdef0123"),
    "files above the store": _origin("../x-0123456789abcdef0123"),
    "a link to itself": _link(manifest.NAME),
    "a directory": _directory,
    "a file gone": _data(lambda path: path.unlink()),
    "a file cut": _data(lambda path: path.write_bytes(b"")),
}


def beside_sound_ones(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Each kind of damage, asked about in every way, then repaired as the message says."""
    made = workspace / "made"
    cut = clamp(numbers(count=10), limit=7)
    sound = total(numbers(count=10), scaled(numbers(count=10), scale=Scale(3)))
    bring_up(str(made), cut, sound)

    def trial(number: int) -> None:
        kind = list(KINDS)[pick(number, len(KINDS))]
        store = workspace / f"store-{number}"
        shutil.copytree(made, store)
        bad = store / as_node(cut).directory
        KINDS[kind](bad / manifest.NAME)
        line = _questions(store, cut, sound)
        assert str(bad) in line, f"{kind}: the directory is not named: {line}"
        if "--force clamp" in line:
            bring_up(str(store), cut, sound, force=("clamp",))
        else:
            assert "move the directory away" in line, f"{kind}: no remedy: {line}"
            shutil.move(bad, workspace / f"away-{number}")
        executed(str(store), cut, sound)
        assert executed(str(store), cut, sound) == [], f"{kind}: not repaired"
        shutil.rmtree(store)

    with FakeGCS():
        return {"trials": trials(seed, count, trial), "kinds": len(KINDS)}


def _questions(path: Path, cut: Any, sound: Any) -> str:
    """What plan, run, verify, explain, show and gc say; returns the line about the damaged one."""
    store, targets = Store(str(path)), [as_node(cut), as_node(sound)]
    entries = plan(targets, store)
    (bad,) = [entry for entry in entries if entry.status == CORRUPT]
    assert bad.refused
    assert {e.status for e in entries if e is not bad} == {"hit"}, "a sound step is not a hit"
    # A run adds the command that would build it again.
    assert _refusal(path, cut, sound).startswith(bad.reason), "plan and run disagree"
    states = {e.path: "corrupt" if e is bad else "sound" for e in entries}
    assert _verified(path, cut, sound) == states, "plan and verify disagree"
    for entry in entries:
        assert all("\n" not in line for line in explain(entries, entry, store))
    assert executed(str(path), sound) == []
    assert len(lineage([store.path(as_node(sound))])) == 3
    assert users(str(path), store.outputs(), store.path(as_node(numbers(count=10))))
    report = find_garbage(store, topological([as_node(sound)]), Keep(recorded=False))
    assert {item.root for item in report.garbage} <= {bad.path}
    assert find_garbage(store, topological(targets), Keep(recorded=False)).garbage == []
    return bad.reason


def _verified(path: Path, *wanted: Any) -> dict[str, str]:
    """State of each output by its directory, as `verify` prints it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        Experiment(lambda: wanted).main(["verify", "--json", "--prefix", str(path)])
    return {each["path"]: each["state"] for each in json.loads(printed.getvalue())["outputs"]}


def _refusal(path: Path, *wanted: Any) -> str:
    try:
        bring_up(str(path), *wanted)
    except CorruptOutput as error:
        return " ".join(str(error).split())
    raise AssertionError("the run took no notice")


FAULTS = {55: [Fault("a damaged manifest beside sound ones", 25, 250, beside_sound_ones)]}
