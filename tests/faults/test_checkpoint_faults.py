"""The checkpoints' fault suites see a writer and a reader that break their word."""

from __future__ import annotations

import contextlib
import random

import pytest

from pipeline.errors import StorageError
from tests.faults import checkpoint_damage, checkpoint_full, checkpoint_mismatch
from tests.faults.registry import Violation
from training.checkpoint import chunks, tree_names
from training.checkpoint import files as checkpoint_files


def test_a_reader_that_checks_nothing_is_caught(tmp_path, monkeypatch):
    """Chunks whose checksum is always the same do not pass fault 17."""
    monkeypatch.setattr(chunks, "checksum", lambda data: 0)
    with pytest.raises(Violation, match="wrong value was used"):
        checkpoint_damage.on_a_disk(0, 15, tmp_path)


@pytest.mark.slow
def test_a_reader_that_trusts_inline_checksums_is_caught(tmp_path, monkeypatch):
    """A chunk in another's place is sound in itself: without the index fault 17 is not passed."""
    real = chunks._fill

    def inline_only(files, name, entry, index, boxes):
        class Any(int):
            __eq__ = lambda self, other: True  # noqa: E731
            __ne__ = lambda self, other: False  # noqa: E731
            __hash__ = int.__hash__

        return real(
            files, name, {**entry, "crc32c": [Any(c) for c in entry["crc32c"]]}, index, boxes
        )

    monkeypatch.setattr(chunks, "_fill", inline_only)
    with pytest.raises(Violation, match="wrong value was used"):
        checkpoint_damage.on_a_disk(0, 80, tmp_path)


@pytest.mark.parametrize("kind", checkpoint_damage.KINDS)
def test_damage_is_done(kind):
    """Every kind changes something."""
    files = {f"{c}/{n}": random.Random(c + str(n)).randbytes(9000) for c in "ab" for n in range(5)}
    done = checkpoint_damage.damage(kind, files, "a/", "b/", random.Random(1))
    assert any(files.get(name) != content for name, content in done.items())


def test_a_writer_that_writes_nothing_and_says_nothing_is_caught(tmp_path, monkeypatch):
    """A checkpoint without its bytes does not count, and does not pass fault 20."""
    monkeypatch.setattr(checkpoint_files, "_write_local", lambda *_: None)
    with pytest.raises((Violation, StorageError)):
        checkpoint_full.disk_full(0, 20, tmp_path)


def test_a_full_disk_where_none_can_be_mounted(tmp_path, monkeypatch):
    """Then files that may not grow stand in for it."""

    @contextlib.contextmanager
    def no_disk(at):
        yield False

    monkeypatch.setattr(checkpoint_full, "small_disk", no_disk)
    figures = checkpoint_full.disk_full(0, 8, tmp_path)
    assert figures["by the size of a file, for no file system could be mounted"] == 8


@pytest.mark.slow
def test_a_restore_that_compares_nothing_is_caught(tmp_path, monkeypatch):
    """Without the comparison of descriptions fault 33 is not passed."""
    monkeypatch.setattr(tree_names, "mismatch", lambda *_: None)
    with pytest.raises(Violation):
        checkpoint_mismatch.mismatch(0, 20, tmp_path)
