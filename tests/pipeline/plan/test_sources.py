"""Data outside the store: what changed is noticed and named, what only moved is reused."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Annotated

import pytest

from pipeline import Artifact, External, InputError, Result, StepContext, step
from pipeline.errors import StepFailed, StoreUnavailable
from pipeline.execute.reference import adopt, choose
from pipeline.graph.order import named
from pipeline.graph.step import as_node
from pipeline.identity.listing import ListedFile, Listing
from pipeline.plan.plan import plan
from pipeline.plan.state import read_state
from pipeline.store import integrity, storage
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.manifest import load
from pipeline.store.outputs import Store
from tests.pipeline.helpers import (
    bring_up,
    check_invariants,
    executed,
    manifest_of,
    path_of,
    result,
)

asked: list[str] = []
during: list[str] = []  # what a body writes into its own source, as a name


class Words(Artifact):
    """The words of some files, in the result."""


def folder(path: str, seconds: float) -> Listing:
    """The files of a folder by SHA-256; unreachable when it is named so."""
    asked.append(path)
    if os.path.basename(path).startswith("far"):
        raise StoreUnavailable(f"{path}: no answer in {seconds:g} s")
    found = [p for p in sorted(Path(path).iterdir()) if p.is_file()]
    return Listing(
        path,
        tuple(
            ListedFile(p.name, p.stat().st_size, hashlib.sha256(p.read_bytes()).hexdigest())
            for p in found
        ),
        skipped=tuple(p.name for p in Path(path).iterdir() if p.is_dir()),
    )


@step(output=Words, version=1)
def words(
    run: StepContext, *, source: Annotated[str | None, External(folder, os.path.abspath)]
) -> Result:
    """All words, and their files written as shards."""
    found = []
    for path in sorted(Path(source or "").glob("*.txt")):
        with run.shard(path.stem) as directory:
            storage.write_atomic(storage.join(directory, "w"), path.read_bytes())
        found += path.read_text().split()
    for name in during:
        Path(source or "", name).write_text("later")
    return {"words": found}


pins = {"hub abc": "abc"}


def hub(value: str, seconds: float) -> Listing:
    """What is fixed for ever, so that nothing is listed."""
    asked.append(value)
    return Listing("hub", pinned=f"commit {pins[value]}")


@step(output=Words, version=1)
def pinned(run: StepContext, *, source: Annotated[str, External(hub)]) -> Result:
    return {"words": [source]}


@step(output=Words, version=1)
def count(run: StepContext, words: Words) -> Result:
    return {"count": len(words.result["words"])}


@pytest.fixture(autouse=True)
def quiet():
    asked.clear()
    during.clear()


@pytest.fixture
def corpus(tmp_path):
    return fill(tmp_path / "corpus", a="one two", b="three")


def fill(path, **texts):
    path.mkdir(exist_ok=True)
    for name, text in texts.items():
        (path / f"{name}.txt").write_text(text)
    return path


def planned(store, wanted):
    return {entry.node.label: entry for entry in plan([as_node(wanted)], Store(str(store)))}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda at: fill(at, a="one"), "source changed: a.txt 7 bytes -> 3 bytes"),
        (lambda at: fill(at, a="two one"), "source changed: a.txt has other content (7 bytes)"),
        (lambda at: fill(at, c="four"), "source changed: + c.txt"),
        (lambda at: (at / "b.txt").unlink(), "source changed: - b.txt"),
    ],
)
def test_a_changed_source_makes_its_step_stale(tmp_path, corpus, change, said):
    """plan names the file, the run reads it, and a step whose input came out otherwise runs too."""
    store, graph = str(tmp_path / "store"), count(words(source=str(corpus)))
    bring_up(store, graph)
    change(corpus)
    entries = planned(store, graph)
    assert (entries["words"].status, entries["words"].reason) == ("stale", said)
    assert entries["count"].reason.endswith("built again if words comes out differently")
    assert executed(store, graph)[0] == "words"
    assert result(store, graph)["count"] == sum(
        len(path.read_text().split()) for path in corpus.iterdir()
    )
    assert executed(store, graph) == []
    check_invariants(store)


def test_a_moved_source_is_the_same_and_a_touched_one(tmp_path, corpus):
    """Its output refers to the first one's files, and says the new place."""
    store = str(tmp_path / "store")
    bring_up(store, count(words(source=str(corpus))))
    for path in corpus.iterdir():
        os.utime(path, (1, 1))
    assert executed(store, count(words(source=str(corpus)))) == []
    moved = shutil.move(corpus, tmp_path / "moved")
    graph = count(words(source=str(moved)))
    assert planned(store, graph)["words"].status == "hit"
    assert executed(store, graph) == []
    found = manifest_of(store, words(source=str(moved)))
    assert found.alias.kind == "same inputs"
    assert str(moved) in str(found.sources["source"])
    fill(moved, a="changed")
    assert planned(store, graph)["words"].reason.startswith("source changed: a.txt")


def test_gc_keeps_files_that_a_moved_sources_output_refers_to(tmp_path, corpus):
    """The first output was rebuilt from other files since, so only the second one needs them."""
    store = Store(str(tmp_path / "store"))
    first = words(source=str(corpus))
    bring_up(store.prefix, first)
    moved = shutil.copytree(corpus, tmp_path / "moved")
    second = words(source=str(moved))
    assert executed(store.prefix, second) == []
    fill(corpus, a="other words")
    assert executed(store.prefix, first) == ["words"]
    kept = [as_node(first), as_node(second)]
    delete(store, find_garbage(store, kept).garbage)
    assert executed(store.prefix, first, second) == []
    path = path_of(store.prefix, second)
    assert list(integrity.problems(path, load(path))) == []
    delete(store, find_garbage(store, kept[:1]).garbage)
    delete(store, find_garbage(store, kept[:1]).garbage)
    assert not list((tmp_path / "store" / kept[0].directory / "retired").iterdir())


def test_one_relative_path_from_two_folders_is_two_sources(tmp_path, monkeypatch):
    """The second one's files are read, though both graphs are written alike."""
    store = str(tmp_path / "store")
    for name, text in (("one", "a b c"), ("two", "d e")):
        (tmp_path / name).mkdir()
        fill(tmp_path / name / "docs", a=text)
        monkeypatch.chdir(tmp_path / name)
        assert executed(store, words(source="docs")) == ["words"]
        assert result(store, words(source="docs"))["words"] == text.split()


def test_shards_of_another_listing_are_not_resumed(tmp_path, corpus):
    """A failed build's shards are reused only while the source is what they were cut from."""
    store, graph = str(tmp_path / "store"), words(source=str(corpus))
    during.append("c.txt")
    with pytest.raises(StepFailed):
        bring_up(store, graph)
    during.clear()
    assert planned(store, graph)["words"].status == "failed"
    assert "shards finished" not in planned(store, graph)["words"].reason
    bring_up(store, graph)
    assert result(store, graph)["words"] == ["one", "two", "three", "later"]


@pytest.mark.parametrize("name", ["c.txt", "a.txt"])
def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, corpus, name):
    """After the body, by the file's name; nothing is published."""
    store, graph = str(tmp_path / "store"), words(source=str(corpus))
    during.append(name)
    with pytest.raises(StepFailed, match=rf"words\(source=\.\.\.\).*{name}.*run again"):
        bring_up(store, graph)
    assert manifest_of(store, graph) is None


def test_a_source_that_changes_before_its_step_begins_costs_no_work(tmp_path, corpus):
    """Between planning and the body, which does not run."""
    store, graph = str(tmp_path / "store"), words(source=str(corpus))
    events = []

    def change(event):
        if event["event"] == "started":
            fill(corpus, a="other")
        events.append(event["event"])

    class Listener(list):
        append = staticmethod(change)

    with pytest.raises(StepFailed, match=r"a\.txt"):
        bring_up(store, graph, events=Listener())
    assert "shard" not in " ".join(events)


def test_an_unreachable_source_is_no_reason_to_lose_its_output(tmp_path, corpus):
    """plan and run say that it is used unchecked, and why; what follows is as it was."""
    store = str(tmp_path / "store")
    bring_up(store, count(words(source=str(corpus))))
    far = tmp_path / "far"
    node = as_node(words(source=str(far)))
    seen, other = read_state([node], Store(store)), as_node(words(source=str(corpus)))
    found = adopt(Store(store), node, seen, choose(Store(store), node, seen, other.directory))
    assert found.manifest.sources == {}
    entry = planned(store, count(words(source=str(far))))["words"]
    assert (entry.status, entry.needed, entry.reused) == ("unchecked", False, True)
    assert entry.notes == [
        f"words: {far}: no answer in 8 s; the output that is there is used unchecked"
    ]
    execution = bring_up(store, words(source=str(far)))
    assert (execution.executed, execution.notes) == ([], entry.notes)


def test_a_step_that_must_run_needs_its_source(tmp_path):
    """plan shows that it would run and says why it cannot; run refuses before any work."""
    store, graph = str(tmp_path / "store"), words(source=str(tmp_path / "far"))
    entry = planned(store, graph)["words"]
    assert (entry.status, entry.needed) == ("miss", True)
    assert entry.notes == [f"words: {tmp_path / 'far'}: no answer in 8 s"]
    with pytest.raises(StoreUnavailable, match=r"words: .*no answer"):
        bring_up(store, graph)
    with pytest.raises(InputError, match=r"words: .*nowhere"):
        bring_up(store, words(source=str(tmp_path / "nowhere")))


def test_one_location_is_asked_once_a_command(tmp_path, corpus):
    """However many steps name it; an argument that is None names nothing."""
    graph = [named(words(source=str(corpus)), name) for name in ("first", "second")]
    plan([as_node(g) for g in graph], Store(str(tmp_path)))
    plan([as_node(words(source=None))], Store(str(tmp_path)))
    assert asked == [str(corpus)]


def test_what_is_matched_and_not_read_is_said(tmp_path, corpus):
    (corpus / "deeper").mkdir()
    entry = planned(tmp_path, words(source=str(corpus)))["words"]
    assert entry.notes == [f"words: source {corpus} matches what is not read: deeper"]


def test_a_pinned_source_is_not_asked_again_and_says_what_it_is(tmp_path, monkeypatch):
    """In the manifest, and in words; another commit is another output."""
    store = str(tmp_path)
    bring_up(store, pinned(source="hub abc"))
    assert asked == ["hub abc"]
    found = manifest_of(store, pinned(source="hub abc"))
    assert str(found.sources["source"]) == "hub, pinned to commit abc"
    monkeypatch.setitem(pins, "hub abc", "def")
    assert planned(store, pinned(source="hub abc"))["pinned"].reason == (
        "source changed: hub, pinned to commit abc -> hub, pinned to commit def"
    )
