"""The ledger of a build: which shards count as finished for which code of their step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from pipeline.errors import WorkerLost
from pipeline.store import ledger as ledger_module
from pipeline.store import storage
from pipeline.store.ledger import Ledger, Record
from pipeline.store.shards import Shard
from tests.faults.fake_gcs import FakeGCS


def wrote(ledger: Ledger, attempt: str, *, name: str = "part", text: str = "x") -> Shard:
    """Record a shard of one file that an attempt wrote."""
    directory = Path(ledger.root, "attempts", attempt, "shards", name)
    directory.mkdir(parents=True)
    (directory / "a.txt").write_text(text)
    return ledger.add(name, str(directory), {"text": text})


@pytest.fixture
def old(tmp_path) -> Ledger:
    """A ledger with a shard that other code wrote."""
    found = Ledger(str(tmp_path), code="old")
    wrote(found, "000001-a", text="old")
    return found


def test_a_shard_of_other_code_is_not_finished_and_is_replaced(old):
    """It stays until there is another one, and then nobody finds it any more."""
    new = Ledger(old.root, code="new")
    assert new.finished() == {}
    assert new.find("part") == old.finished()["part"], "its record is there"
    made = wrote(new, "000002-b", text="new")
    assert made.result == {"text": "new"}
    assert new.finished() == {"part": made}
    assert old.finished() == {}
    assert new.look("part") == Record("000002-b", made, "new")


def test_of_two_writers_of_the_same_code_the_first_one_is_kept(old):
    """Also where both replace a shard of other code."""
    new = Ledger(old.root, code="new")
    first = wrote(new, "000002-b", text="first")
    assert wrote(new, "000002-c", text="second") == first
    assert new.finished() == {"part": first}


def test_a_writer_of_other_code_that_was_replaced_ends(old):
    """A paused attempt cannot bring its code's shard back."""
    wrote(Ledger(old.root, code="new"), "000002-b")
    with pytest.raises(WorkerLost, match="000002-b"):
        wrote(old, "000001-b")


@pytest.mark.parametrize("reader", [{"code": "new", "keep": True}, {"code": ""}])
def test_shards_of_other_code_are_reused_on_request_and_by_readers(old, reader):
    """`keep` is the user's word; a reader without code reads them all."""
    kept = Ledger(old.root, **reader)
    assert list(kept.finished()) == ["part"]
    assert wrote(kept, "000002-b", text="new").result == {"text": "old"}


def test_a_claimed_shard_keeps_the_code_that_wrote_it(old):
    """Whatever the code of the attempt that takes it over."""
    new = Ledger(old.root, code="new")
    shard = new.claim("part", "000002-b")
    assert new.look("part") == Record("000002-b", shard, "old")
    new.drop("part", "000002-b")
    assert new.look("part") is None


def test_a_record_of_an_earlier_version_is_reused(old):
    """It has no code; an upgrade is no edit of the step."""
    url = Path(old.record("part"))
    tree = json.loads(url.read_text())
    del tree["code"]
    url.write_text(json.dumps(tree))
    new = Ledger(old.root, code="new")
    assert new.look("part").code == ""
    assert list(new.finished()) == ["part"]


@pytest.fixture
def many(monkeypatch) -> Iterator[tuple[FakeGCS, Ledger]]:
    """A bucket, and in it the ledger of twelve shards; four are many."""
    monkeypatch.setattr(ledger_module, "_MANY", 4)
    monkeypatch.setattr(ledger_module, "_TOGETHER", 5)
    with FakeGCS() as server:
        ledger = Ledger("gs://bucket/store/x", code="now")
        for number in range(12):
            ledger.add(f"part/{number}", f"{ledger.root}/attempts/000001-a/{number}", {"n": number})
        yield server, ledger


def read_alone(server: FakeGCS, ledger: Ledger) -> tuple[dict[str, Record], int]:
    """All records of the ledger, and how many of them were read one by one."""
    before = len(server.log)
    found = ledger.records(ledger.shard_names(), copy=True)
    asked = [unquote(path) for method, path, *_ in server.log[before:] if method == "GET"]
    return found, sum(path.endswith(".json") for path in asked)


def test_records_that_an_attempt_read_one_by_one_the_next_one_reads_together(many):
    """In any number of attempts, each record is read alone once."""
    server, ledger = many
    found, alone = read_alone(server, ledger)
    assert alone == len(found) == 12
    again, alone = read_alone(server, ledger)
    assert (again, alone) == (found, 0)
    for number in (12, 13):
        ledger.add(f"part/{number}", f"{ledger.root}/attempts/000002-b/{number}", {"n": number})
    assert read_alone(server, ledger)[1] == 2
    assert ledger.count()[0] == 14


def test_what_happened_to_a_record_since_it_was_copied_is_seen(many):
    """Claimed, replaced by other code, dropped, dropped and written again: never the copy."""
    server, ledger = many
    read_alone(server, ledger)
    ledger.claim("part/1", "000002-b")
    other = Ledger(ledger.root, code="other")
    other.add("part/2", f"{ledger.root}/attempts/000002-b/2", {"n": 2})
    for name in ("part/3", "part/4"):
        ledger.drop(name, "000002-b")
    ledger.add("part/4", f"{ledger.root}/attempts/000002-b/4", {"n": 4})
    names = [f"part/{number}" for number in range(12)]
    there = {name: found for name in sorted(names) if (found := ledger.look(name)) is not None}
    assert ledger.records(names) == there
    assert [there[f"part/{n}"].owner[:6] for n in (0, 1, 2, 4)] == ["000001", *["000002"] * 3]
    assert "part/3" not in there
    assert read_alone(server, ledger) == (there, 3)


@pytest.mark.parametrize(
    "data", [b"", b"[", b"[[1, 2, 3]]", b"{}", b'[["part/0", [3, 4.0], "{}"]]']
)
def test_a_damaged_copy_costs_requests_and_nothing_else(many, data):
    """The records are what counts."""
    server, ledger = many
    found, _ = read_alone(server, ledger)
    for name in ledger.names():
        if name.endswith("-.records"):
            storage.write_atomic(storage.join(ledger.directory, name), data)
    assert read_alone(server, ledger) == (found, 12)
