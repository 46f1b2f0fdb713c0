"""The faulty disk does what it says, and the suites see an engine that breaks its word."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import pytest

from pipeline.errors import CorruptOutput
from pipeline.execute import backend
from pipeline.graph.step_context import ShardTask, StepContext
from pipeline.store import lease, storage
from tests.faults import crash
from tests.faults.disk import Killed, Life, Trouble
from tests.faults.registry import Violation
from tests.pipeline.helpers import bring_up, check_invariants


def _write(root, text=b"0123456789"):
    os.makedirs(f"{root}/a", exist_ok=True)
    with open(f"{root}/a/new", "wb") as file:
        file.write(text)
        os.fsync(file.fileno())
    os.replace(f"{root}/a/new", f"{root}/a/file")


@pytest.mark.parametrize(
    ("at", "mode", "left"),
    [
        (2, "before", {}),
        (2, "after", {"new": b""}),
        (3, "before", {"new": b""}),
        (3, "torn", {"new": b"01234"}),
        (3, "after", {"new": b"0123456789"}),
        (5, "before", {"new": b"0123456789"}),
        (5, "after", {"file": b"0123456789"}),
    ],
)
def test_a_killed_life_leaves_what_it_had_done(tmp_path, at, mode, left):
    """Before, half of, or after the operation, and not a byte more."""
    life = Life(str(tmp_path), Trouble(at, mode))

    def lives():
        try:
            _write(tmp_path)
        finally:
            _write(tmp_path, b"from the grave")

    with life, pytest.raises(Killed):
        lives()
    assert life.dead
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == left


def test_an_error_once_and_for_good(tmp_path):
    """Once: the second try succeeds. Sticky: it does not, but for what is spared."""

    (tmp_path / "once").mkdir()
    (tmp_path / "sticky").mkdir()

    def error(path):
        return OSError(errno.ENOSPC, "No space left", path)

    with Life(str(tmp_path / "once"), Trouble(3, error=error)):
        with pytest.raises(OSError, match="No space left"):
            _write(tmp_path / "once")
        _write(tmp_path / "once")
    trouble = Trouble(3, "torn", error, sticky=True, spared=("unlink",))
    with Life(str(tmp_path / "sticky"), trouble):
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                _write(tmp_path / "sticky")
        os.unlink(tmp_path / "sticky/a/new")
    assert os.listdir(tmp_path / "sticky/a") == []


def test_threads_of_a_dead_life_do_nothing(tmp_path):
    """A thread that works on ends at its next operation, before the life is over."""
    begun = threading.Event()

    def work():
        begun.wait()
        while True:
            _write(tmp_path, b"thread")

    with Life(str(tmp_path), Trouble(2)):
        thread = threading.Thread(target=work)
        thread.start()
        with pytest.raises(Killed):
            _write(tmp_path)
        begun.set()
    assert not thread.is_alive()
    assert os.listdir(tmp_path / "a") == []


def _create_in_place(url, data, **_):
    _, path = storage.filesystem(url)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


@pytest.mark.slow
def test_records_written_in_place_are_caught(tmp_path, monkeypatch):
    """An engine whose records can be torn does not pass fault 2."""
    monkeypatch.setattr(storage, "create", _create_in_place)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.1)
    with pytest.raises(Violation, match="violated"):
        crash.crash_everywhere(0, 20, tmp_path)


def _write_all(self, writer, items):
    tasks = [ShardTask(self.ledger, self.attempt, name, writer, i) for name, i in items.items()]
    return {shard.name: shard for shard in self._workers.map(tasks, self._emit)}


def _write_anew(task):
    directory = storage.join(task.ledger.root, "attempts", task.attempt, "shards", task.name)
    return task.ledger.add(task.name, directory, task.writer(directory, task.item))


def test_shards_written_twice_are_caught(tmp_path, monkeypatch):
    """An engine that forgets its finished shards does not pass fault 2."""
    monkeypatch.setattr(StepContext, "map", _write_all)
    monkeypatch.setattr(backend, "write_shard", _write_anew)
    with pytest.raises(AssertionError, match=r"written again|recorded and missing"):
        crash.crash_everywhere(0, 60, tmp_path)


def _list_what_can_be_listed(url):
    fs, path = storage.filesystem(url)
    for name, info in sorted(fs.find(path, detail=True).items()):
        yield name.removeprefix(path + "/"), info["size"]


def test_a_swallowed_error_is_caught(tmp_path, monkeypatch):
    """An engine to which an unreadable directory is an empty one does not pass fault 3."""
    monkeypatch.setattr(storage, "list_files", _list_what_can_be_listed)
    reference = crash.undisturbed(tmp_path, count_reads=True)
    listings = [
        at
        for at, operation in enumerate(reference.operations, 1)
        if operation.kind == "scandir" and operation.path.endswith("/shards/part/001")
    ]
    assert listings
    trouble = Trouble(listings[0], error=lambda path: OSError(errno.EIO, "I/O error", path))
    with pytest.raises(AssertionError, match="outputs differ"):
        crash._with_error(str(tmp_path / "store"), trouble, reference)


@pytest.mark.parametrize("damage", ["byte", "missing", "stray", "key"])
def test_the_invariants_can_fail(tmp_path, damage):
    """A changed byte, a missing file, a file nobody refers to, one key twice."""
    store = str(tmp_path)
    bring_up(store, crash.graph())
    assert check_invariants(store, finished=True) == crash.STEPS
    file = next(tmp_path.glob("numbers-*/attempts/*/shards/**/n.txt"))
    if damage == "byte":
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    elif damage == "missing":
        file.unlink()
    elif damage == "stray":
        (file.parents[2] / "litter").write_bytes(b"x")
    else:
        step = file.relative_to(tmp_path).parts[0]
        shutil.copytree(tmp_path / step, tmp_path / f"copy-{step.rpartition('-')[2]}")
    expected = {"byte": "other content", "stray": "litter", "key": "twice"}
    with pytest.raises((AssertionError, CorruptOutput), match=expected.get(damage, "missing")):
        check_invariants(store, finished=True)
