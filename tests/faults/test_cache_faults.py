"""The cache's fault suites see a reader and a writer that break their word."""

from __future__ import annotations

import contextlib
import random
import shutil

import numpy as np
import pytest

from data.cache import chunks, token_shard
from pipeline.errors import StorageError
from tests.faults import cache_damage, cache_full
from tests.faults.registry import Violation, pick


def test_a_reader_that_checks_nothing_is_caught(tmp_path, monkeypatch):
    """Chunks taken as they come do not pass fault 17, through either transport."""
    monkeypatch.setattr(chunks.ChunkChecker, "agree", lambda *_: True)
    for fault in cache_damage.FAULTS[17][:2]:
        shutil.rmtree(tmp_path / "w", ignore_errors=True)
        (tmp_path / "w").mkdir()
        with pytest.raises(Violation, match="is wrong"):
            fault.run(0, 40, tmp_path / "w")


def test_a_reader_that_trusts_inline_checksums_is_caught(tmp_path, monkeypatch):
    """Swapped chunks are sound in themselves: without `checksums` fault 17 is not passed."""
    real = chunks.ChunkChecker.agree

    def inline_only(self, records, checksums):
        del checksums
        own = np.ascontiguousarray(records[:, -4:]).view("<u4")[:, 0]
        return real(self, records, own)

    monkeypatch.setattr(chunks.ChunkChecker, "agree", inline_only)
    with pytest.raises(Violation, match="is wrong"):
        cache_damage.FAULTS[17][0].run(0, 40, tmp_path)


@pytest.mark.parametrize("kind", cache_damage.KINDS)
def test_damage_is_done(tmp_path, kind):
    """Every kind changes the files of the shard."""
    for name, seed in (("a", 0), ("b", 1)):
        cache_damage.write(tmp_path / name, seed)
    before = cache_full.contents(tmp_path / "a")
    only = "" if kind == "extra" else "tokens/c/0"
    cache_damage.damage(kind, tmp_path / "a", tmp_path / "b", random.Random(1), only=only)
    assert cache_full.contents(tmp_path / "a") != before


def test_a_writer_that_calls_a_full_disk_a_success_is_caught(tmp_path, monkeypatch):
    """A shard that counts without its bytes does not pass fault 20."""
    real = token_shard._write

    def careless(*shard):
        try:
            return real(*shard)
        except StorageError:
            return "0" * 64, 0

    with cache_full.small_disk(tmp_path / "probe") as mounted:
        if not mounted:
            pytest.skip("this process may mount no file system")
    monkeypatch.setattr(token_shard, "_write", careless)
    # Space for the small files and the ledger's record, and not for the tokens.
    seed = next(number for number in range(20) if pick(number, 20) == 15)
    with pytest.raises(Violation, match="written to a full disk"):
        cache_full.disk_full(seed, 1, tmp_path)


def test_a_full_disk_where_none_can_be_mounted(tmp_path, monkeypatch):
    """Then files that may not grow stand in for it, and a careless writer is caught too."""

    @contextlib.contextmanager
    def no_disk(at):
        yield False

    monkeypatch.setattr(cache_full, "small_disk", no_disk)
    figures = cache_full.disk_full(0, 20, tmp_path)
    assert figures["by the size of a file, for no file system could be mounted"] == 20
    monkeypatch.setattr(cache_full, "_no_file_beyond", lambda _: contextlib.nullcontext())
    with pytest.raises(Violation, match="written to a full disk"):
        cache_full.disk_full(0, 1, tmp_path / "again")
