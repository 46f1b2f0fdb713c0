"""Fault 16: records that are torn, foreign, hostile or no records at all.

A real manifest and a real ledger record are cut at every byte, get a wrong type at every place,
and are replaced by other texts. Whatever is there is taken as absent or refused by an error of
ours that names the place; never as an output, never with another exception, and no path that a
record names outside the store is looked at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PonenteError
from pipeline.graph.step import as_node
from pipeline.store import storage
from pipeline.store.manifest import NAME, load, load_verified
from tests.faults.crash import ALL, graph, outputs
from tests.faults.disk import Life
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.helpers import bring_up, ledgers
from tests.pipeline.toy import numbers

# Filled by the user's code: any JSON of this type is as good as another below them.
_FREE = ("config", "result", "provenance")
_OTHER: tuple[Any, ...] = (None, True, -1, 1.5, "x", "", [], [None], [[None]], {}, {"x": None})
_SIZE = 10 * 2**20
# Records of earlier versions lack these fields, and are good ones.
_ADDED = ("everything without code", "everything without needs", "needs = None")


@dataclass(frozen=True)
class Case:
    """One thing to find in a record's place."""

    name: str
    data: bytes
    whole: bool = True  # bring up a graph on it, and not only read it
    alone: bool = True  # it can be told from a good record without a look at the files it names


def _kind(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if number else type(value).__name__


def _replaced(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A copy of a JSON tree with another value at one place."""
    if not at:
        return value
    if isinstance(tree, dict):
        return {k: _replaced(v, at[1:], value) if k == at[0] else v for k, v in tree.items()}
    return [_replaced(v, at[1:], value) if i == at[0] else v for i, v in enumerate(tree)]


def _places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield at, tree
    if at and at[-1] in _FREE:
        return
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _places(value, (*at, key))


def _typed(tree: Any) -> Iterator[Case]:
    """A value of another type at every place, and every field of ours missing or unknown."""
    for at, found in _places(tree):
        where = "/".join(str(key) for key in at) or "everything"
        if where == "config":
            continue
        for value in _OTHER:
            if _kind(value) != _kind(found):
                data = json.dumps(_replaced(tree, at, value)).encode()
                if (name := f"{where} = {value!r}") not in _ADDED:
                    yield Case(name, data, whole=len(at) == 1)
        if isinstance(found, dict) and at[-1:] != ("inputs",) and not set(at) & set(_FREE):
            more = json.dumps(_replaced(tree, at, {**found, "unknown": 1})).encode()
            yield Case(f"{where} with a field nobody knows", more)
            for key in found:
                less = {k: v for k, v in found.items() if k != key}
                data = json.dumps(_replaced(tree, at, less)).encode()
                if (name := f"{where} without {key}") not in _ADDED:
                    yield Case(name, data)


def _texts(whole: bytes) -> Iterator[Case]:
    """Cut at every byte; and what was never a record."""
    for length in range(len(whole)):
        yield Case(f"cut at byte {length}", whole[:length], whole=length % 64 == 0)
    first = json.loads(whole)
    key, value = next(iter(first.items()))
    twice = f'{{"{key}": {json.dumps(value)}, '.encode() + whole.strip()[1:]
    half = len(whole) // 2
    yield Case("a field twice", twice)
    yield Case("byte order mark", b"\xef\xbb\xbf" + whole)
    yield Case("UTF-16", whole.decode().encode("utf-16"))
    yield Case("NUL bytes in the middle", whole[:half] + b"\0" * 64 + whole[half + 64 :])
    yield Case("NUL bytes alone", b"\0" * len(whole))
    yield Case("not UTF-8", whole[:half] + b"\xff\xfe" + whole[half:])
    yield Case("two records", whole + whole)
    yield Case("10 MiB of noise", os.urandom(1 << 16) * (_SIZE >> 16))
    yield Case("10 MiB of text", b'{"x": "' + b"x" * _SIZE + b'"}')
    yield Case("nested a million deep", b"[" * 1_000_000)
    yield Case("objects nested deep", b'{"schema":' * 100_000 + b"1" + b"}" * 100_000)
    yield Case("HTML", b"<html><body>503 Service Unavailable</body></html>")
    for text in ("null", "true", "0", "-1", "1e999", "NaN", '""', "[]", "{}", "[[null]]", "[{}]"):
        yield Case(text, text.encode())


def _hostile_shards(shards: dict[str, Any], outside: Path) -> Iterator[Case]:
    """A shard's record that points elsewhere, at what exists; or says what cannot be."""
    up = "../" * 12
    roots = ["..", "../x", "../../x", "/etc", str(outside), f"{up}{str(outside)[1:]}", ""]
    roots += [".", "a/../../x", f"file://{outside}", f"memory:/{outside}", "a\\b", "a\0b", "~"]
    roots += ["x" * 300, "\ud800", "\U0001f30a" * 200, "ledger", "leases"]
    for root in roots:
        yield _case(f"root {root[:24]!r}", {**shards, "root": root})
    (file, *rest) = shards["files"]
    paths = ["..", "../n.txt", str(outside / "n.txt"), "", "a\0b", "\ud800", "\U0001f30a" * 200]
    for path in paths:
        yield _case(f"path {path[:24]!r}", {**shards, "files": [{**file, "path": path}, *rest]})
    for size in (-1, -file["size"], float(file["size"]), True, 0, file["size"] + 1, 10**400):
        tree = {**shards, "files": [{**file, "size": size}, *rest]}
        # That a size is another than the file's shows when somebody looks at the file.
        yield _case(f"size {str(size)[:20]}", tree, alone=type(size) is not int or size < 0)
    cut = {**file, "sha256": file["sha256"][:-1]}
    yield _case("sha256 cut", {**shards, "files": [cut, *rest]})
    yield _case("a file twice", {**shards, "files": [file, *shards["files"]]})


def _case(name: str, tree: Any, *, alone: bool = True) -> Case:
    return Case(name, json.dumps(tree).encode(), alone=alone)


def _manifest_cases(path: str, other: str, outside: Path) -> list[Case]:
    """Everything to put in the place of the manifest in `path`."""
    whole = storage.read_bytes(storage.join(path, NAME))
    tree = json.loads(whole)
    cases = [*_texts(whole), *_typed(tree)]
    cases.append(Case("another step's", storage.read_bytes(storage.join(other, NAME))))
    for hostile in _hostile_shards(tree["shards"][0], outside):
        changed = {**tree, "shards": [json.loads(hostile.data), *tree["shards"][1:]]}
        cases.append(_case(hostile.name, changed))
    changes = {
        "later schema": {"schema": tree["schema"] + 1},
        "earlier schema": {"schema": 0},
        "schema true": {"schema": True},
        "schema as float": {"schema": float(tree["schema"])},
        "another key": {"key": "0" * 64},
        "part of the key": {"key": tree["key"][:20]},
        "key in capitals": {"key": tree["key"].upper()},
        "a shard twice": {"shards": [tree["shards"][0], *tree["shards"]]},
    }
    return cases + [_case(name, {**tree, **change}) for name, change in changes.items()]


def _ledger_cases(url: str, other: str, outside: Path) -> list[Case]:
    """Everything to put in the place of the ledger record at `url`."""
    whole = storage.read_bytes(url)
    tree = json.loads(whole)
    foreign = Case("another shard's", storage.read_bytes(other))
    hostile = [
        Case(c.name, json.dumps({**tree, "shard": json.loads(c.data)}).encode(), alone=c.alone)
        for c in _hostile_shards(tree["shard"], outside)
    ]
    return [*_texts(whole), *_typed(tree), foreign, *hostile]


def _refused(what: str, place: str, action: Callable[[], Any], absent: tuple[Any, ...]) -> None:
    """The action says absent, or raises an error of ours that names the place."""
    refused = None
    try:
        answer = action()
    except FileNotFoundError:
        return
    except PonenteError as error:
        refused = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:200]}") from error
    if refused is None:
        assert answer in absent, f"{what}: taken for a good record: {str(answer)[:200]}"
    else:
        assert place in refused, f"{what}: the error does not name {place}: {refused[:300]}"


def _watched(store: str, outside: Path, action: Callable[[], None]) -> None:
    """Do it, and see that nothing outside the store was looked at."""
    life = Life(str(outside), count_reads=True)
    with life:
        action()
    touched = [o.path for o in life.operations if not f"{o.path}/".startswith(store + "/")]
    assert not touched, f"looked at {touched}, which is outside the store"


def _built_or_refused(store: str, place: str, wanted: Any, reference: dict[str, Any]) -> None:
    """Bringing the graph up is refused, naming the place, or ends as if nothing had been there."""

    def build() -> None:
        bring_up(store, wanted)
        found = outputs(store)
        same = {label: found[label] for label in reference if label in found} == reference
        assert same, "built on a bad record: other outputs"

    _refused("bring up", place, build, (None,))


def _setting(workspace: Path) -> tuple[str, Path]:
    """(a store with the graph brought up, a directory of decoys with the same files)."""
    store, outside = str(workspace / "around" / "store"), workspace / "around" / "outside"
    bring_up(store, graph())
    outside.mkdir()
    source = as_node(numbers(count=9, shards=3))
    shard = load(storage.join(store, source.directory)).shards[0]  # type: ignore[union-attr]
    for place in (outside, outside.parent / "x", outside.parent / "store" / "x"):
        place.mkdir(exist_ok=True)
        for file in shard.files:
            url = storage.join(store, source.directory, shard.root, file.path)
            (place / file.path).write_bytes(storage.read_bytes(url))
    return store, outside


def bad_manifests(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Every case in the place of a published manifest, read and built upon."""
    store, outside = _setting(workspace)
    wanted = graph()
    node = as_node(wanted).inputs["right"]
    path = storage.join(store, node.directory)
    user = storage.join(store, as_node(wanted).directory)
    place, good = Path(path) / NAME, storage.read_bytes(storage.join(path, NAME))
    reference = outputs(store)
    cases = _manifest_cases(path, user, outside)
    whole = []

    def trial(number: int) -> None:
        case = cases[pick(number, len(cases))]
        place.write_bytes(case.data)

        def check() -> None:
            _refused("load verified", path, lambda: load_verified(path, node.key), (None,))
            if case.whole:
                (Path(user) / NAME).rename(Path(user) / "hidden")
                try:
                    whole.append(case.name)
                    _built_or_refused(store, path, wanted, reference)
                finally:
                    (Path(user) / "hidden").replace(Path(user) / NAME)

        try:
            _named(case, lambda: _watched(store, outside.parent, check))
        finally:
            place.write_bytes(good)

    made = trials(seed, min(count, len(cases)), trial)
    return {"trials": made, "cases": len(cases), "brought_up": len(whole), "bytes": len(good)}


def _named(case: Case, action: Callable[[], None]) -> None:
    try:
        action()
    except PonenteError as error:
        raise AssertionError(f"{case.name}: published as it was: {error}") from error
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else repr(error)
        raise AssertionError(f"{case.name}: {text[:400]}") from error


def bad_ledger_records(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Every case in the place of a finished shard's record, read, and adopted by a new attempt."""
    store, outside = _setting(workspace)
    node = as_node(numbers(count=9, shards=3))
    path = storage.join(store, node.directory)
    first, second = _records_of(path, store)
    good = Path(first).read_bytes()
    reference = {node.label: outputs(store)[node.label]}
    published = Path(path) / NAME
    manifest = published.read_bytes()
    cases = _ledger_cases(first, second, outside)
    whole = []

    def trial(number: int) -> None:
        case = cases[pick(number, len(cases))]
        published.unlink(missing_ok=True)
        Path(first).write_bytes(case.data)

        def check() -> None:
            (ledger,) = ledgers(path)
            if case.alone:
                _refused("read", first, lambda: ledger.find("part/000"), ())
                _refused("finished", first, lambda: "part/000" in ledger.finished(), (False,))
            if case.whole:
                whole.append(case.name)
                _built_or_refused(store, path, node, reference)
            load_verified(path, node.key)  # None, or a good one: nothing bad was published

        try:
            _named(case, lambda: _watched(store, outside.parent, check))
        finally:
            Path(first).write_bytes(good)
            published.write_bytes(manifest)

    made = trials(seed, min(count, len(cases)), trial)
    return {"trials": made, "cases": len(cases), "brought_up": len(whole), "bytes": len(good)}


def _records_of(path: str, store: str) -> tuple[str, str]:
    """The ledger records of the first two shards, found by what is read for them."""
    found = []
    for name in ("part/000", "part/001"):
        life = Life(store)
        with life:
            assert ledgers(path)[0].find(name).name == name
        (url,) = [read for read in life.read if read.endswith(".json")]
        found.append(url)
    return found[0], found[1]


FAULTS: dict[int, list[Fault]] = {
    16: [
        Fault("torn, foreign and hostile manifests", ALL, ALL, bad_manifests),
        Fault("torn, foreign and hostile ledger records", 60, ALL, bad_ledger_records),
    ]
}
