"""An output of many shards: its manifest is small, and its table of shards is part of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from pipeline.errors import CorruptOutput
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.identity import digests
from pipeline.plan.plan import plan
from pipeline.plan.state import CORRUPT
from pipeline.store import integrity, manifest, shards, storage
from pipeline.store.garbage import Keep, delete, find_garbage
from pipeline.store.manifest import Manifest, load, load_verified
from pipeline.store.outputs import Store
from pipeline.store.shards import INLINE, Shard, ShardTable
from tests.faults.fake_gcs import FakeGCS
from tests.pipeline.helpers import bring_up, check_invariants, executed, result
from tests.pipeline.toy import Numbers, clamp, numbers, total

MANY = 7


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch) -> None:
    monkeypatch.setattr(shards, "INLINE", 3)
    shards._read.cache_clear()


def _wanted():
    return numbers(count=2 * MANY, shards=MANY)


def _published(store: str) -> tuple[Path, Manifest]:
    """Directory and manifest of an output of many shards; published before or now."""
    bring_up(store, _wanted())
    path = Path(store) / as_node(_wanted()).directory
    found = load(str(path))
    assert found is not None
    return path, found


def _rewrite_as_before(path: Path) -> None:
    """Rewrite the manifest with its shards in itself, as it was before there were tables."""
    found = load(str(path))
    tree = {**json.loads((path / manifest.NAME).read_bytes()), "schema": 4}
    tree["shards"] = msgspec.to_builtins(tuple(found.shards))
    (path / manifest.NAME).write_text(json.dumps(tree))
    (path / found.shards.table.path).unlink()


def test_many_shards_are_in_a_table_and_few_in_the_manifest(tmp_path):
    """Read back, they are the shards that were recorded, and the content digest knows no table."""
    path, found = _published(str(tmp_path))
    assert isinstance(found.shards, ShardTable)
    assert isinstance(json.loads((path / manifest.NAME).read_bytes())["shards"], dict)
    each = tuple(found.shards)
    assert [shard.name for shard in each] == [f"part/{i:03d}" for i in range(MANY)]
    assert found.content == digests.content(each, found.result, {})
    assert found.size == sum(shard.bytes for shard in each)
    assert load_verified(str(path), found.key) == found
    assert (each[2], each[-1], each[1:3]) == (found.shards[2], found.shards[-1], found.shards[1:3])
    bring_up(str(tmp_path), total(_wanted()))
    assert result(str(tmp_path), total(_wanted()))["total"] == sum(range(2 * MANY))
    assert executed(str(tmp_path), total(_wanted())) == []
    check_invariants(str(tmp_path), finished=True)
    few = numbers(count=4, shards=3)
    bring_up(str(tmp_path), few)
    tree = json.loads((tmp_path / as_node(few).directory / manifest.NAME).read_bytes())
    assert len(tree["shards"]) == 3


def test_a_shard_is_found_by_name_and_by_the_beginning_of_its_name(tmp_path):
    """An error names a few shards and not all."""
    path, found = _published(str(tmp_path))
    artifact = Numbers(str(path), found)
    assert artifact.shard("part/003") == f"{path}/{found.shards[3].root}"
    assert artifact.shards("part/00") == list(found.shards) == artifact.shards()
    assert artifact.shards("part/005") == [found.shards[5]]
    assert artifact.shards("part/9") == artifact.shards("a") == []
    with pytest.raises(KeyError, match=r"no shard 'part/9'.*'part/004'\] and 2 more"):
        found.shard("part/9")


def test_a_manifest_from_before_there_were_tables_is_as_good(tmp_path):
    """It is a hit, is not rewritten, and its content is the same."""
    path, found = _published(str(tmp_path))
    each = tuple(found.shards)
    _rewrite_as_before(path)
    before = (path / manifest.NAME).read_bytes()
    assert executed(str(tmp_path), total(_wanted())) == ["total"]
    old = load(str(path))
    assert old.shards == each
    assert (old.content, old.size, len(old.shards)) == (found.content, found.size, MANY)
    assert old.shard("part/006").name == "part/006"
    assert (path / manifest.NAME).read_bytes() == before
    assert list(integrity.problems(str(path), old)) == []


@pytest.mark.parametrize(
    "damage", ["delete", "truncate", "change", "another's", "directory", "loop"]
)
@pytest.mark.slow
def test_a_damaged_table_is_a_damaged_output_and_force_builds_it_again(tmp_path, damage):
    """Plan, run and verify name the file and the remedy."""
    store = str(tmp_path)
    path, found = _published(store)
    table = path / found.shards.table.path
    data = table.read_bytes()
    table.unlink()
    if damage == "directory":
        table.mkdir()
    if damage == "loop":
        table.symlink_to(table.name)
    if damage == "truncate":
        table.write_bytes(data[: len(data) // 2])
    if damage == "change":
        table.write_bytes(data.replace(b"part/000", b"part/007"))
    if damage == "another's":
        bring_up(store, other := numbers(count=8, shards=8))
        theirs = load(storage.join(store, as_node(other).directory))
        shutil.copy(tmp_path / as_node(other).directory / theirs.shards.table.path, table)
    shards._read.cache_clear()
    (entry,) = plan([as_node(_wanted())], Store(store))
    assert entry.status == CORRUPT
    assert str(table) in entry.reason
    assert f"--force {path.name}" in entry.reason
    report = find_garbage(Store(store), topological([as_node(_wanted())]))
    assert [item.url for item in report.garbage if str(path) in item.url] == []
    assert any(str(table) in line for line in report.left)
    (line, *_) = integrity.problems(str(path), load(str(path)))
    assert str(table) in line
    with pytest.raises(CorruptOutput, match=f"--force {path.name}"):
        bring_up(store, total(_wanted()))
    assert executed(store, total(_wanted()), force=("numbers",)) == ["numbers", "total"]


@pytest.mark.parametrize("where", ["../x.jsonl", "/etc/passwd", "attempts/../../x", "leases/x"])
def test_a_table_outside_the_attempts_is_refused(tmp_path, where):
    """And so is one whose shards would be."""
    path, _ = _published(str(tmp_path))
    tree = json.loads((path / manifest.NAME).read_bytes())
    tree["shards"]["path"] = where
    (path / manifest.NAME).write_text(json.dumps(tree))
    with pytest.raises(CorruptOutput, match="not a manifest of ours"):
        load(str(path))
    hostile = [Shard(f"part/{i}", where, (), {}) for i in range(MANY)]
    kept = shards.keep_shards(str(path), "000009-x", hostile)
    with pytest.raises(CorruptOutput, match=r"shards\.jsonl"):
        list(kept)


def test_gc_keeps_the_tables_of_outputs_and_of_replaced_ones_that_are_referred_to(tmp_path):
    """A rebuild's table replaces the one before, which goes with its manifest and not earlier."""
    store = Store(str(tmp_path))
    wanted = clamp(_wanted(), limit=100)
    path, first = _published(store.prefix)
    bring_up(store.prefix, wanted)
    bring_up(store.prefix, _wanted(), force=("numbers",))
    old, new = path / first.shards.table.path, path / load(str(path)).shards.table.path
    assert old != new
    assert old.exists(), "a reader may have it open"
    other = tmp_path / f"numbers-{'0' * 20}" / manifest.NAME
    tree = json.loads((path / "retired" / f"{first.attempt}.json").read_bytes())
    origin = {"kind": "adopted", "directory": path.name, "key": tree["key"], "input": ""}
    storage.write_atomic(
        str(other), json.dumps({**tree, "origin": {**origin, "differences": []}}).encode()
    )
    nodes = topological([as_node(wanted)])
    keep = Keep(outputs=frozenset({other.parent.name}))
    delete(store, find_garbage(store, nodes, keep).garbage)
    assert old.exists(), "an output refers to it"
    shutil.rmtree(other.parent)
    delete(store, find_garbage(store, nodes).garbage)
    assert not old.exists()
    assert new.exists()
    assert executed(store.prefix, wanted) == []
    check_invariants(store.prefix)


def test_a_process_reads_a_table_once_and_a_small_output_has_none():
    """However often the output is opened; one request, or two with a table."""
    with FakeGCS() as server:
        path = storage.join("gs://bucket/store", as_node(_wanted()).directory)
        bring_up("gs://bucket/store", _wanted())
        shards._read.cache_clear()
        before = len(server.log)
        for _ in range(5):
            found = load(path)
            assert len(Numbers(path, found).shards("part/")) == MANY
        asked = [line[1] for line in server.log[before:]]
        assert sum("shards.jsonl" in url for url in asked) == 1
        assert sum("manifest.json" in url for url in asked) == 5


def test_a_large_table_finds_what_it_is_asked_for(tmp_path):
    """By name, and by the beginning of names."""
    many = [Shard(f"part/{i:06d}", f"attempts/1/shards/{i:06d}", (), {}) for i in range(2_000)]
    odd = {"text": "half a pair \ud800, a pair \U0001f30a", "number": 10**30, "small": 5e-324}
    many[1234] = msgspec.structs.replace(many[1234], result=odd)
    kept = shards.keep_shards(str(tmp_path), "1", many)
    assert isinstance(kept, ShardTable)
    assert len(kept) == 2_000 > INLINE
    assert shards.find(kept, "part/001234") == many[1234]
    assert shards.find(kept, "part/1234") is None
    assert list(shards.starting(kept, "part/0012")) == many[1200:1300]
