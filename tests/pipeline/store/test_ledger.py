"""The ledger of a build: which shards count as finished for which code of their step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import WorkerLost
from pipeline.store.ledger import Ledger, Record
from pipeline.store.manifest import Shard


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
