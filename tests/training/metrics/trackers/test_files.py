"""Files of trackers: uploaded whole, made up for when a store failed, and read again."""

import errno
import shutil
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError, StoreUnavailable
from pipeline.store import storage
from training.metrics.trackers import files
from training.metrics.trackers.files import NAME, JsonLines, Spool, join_attempts, read_lines


class Ticks:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self):
        return self.now


def test_on_an_object_store_the_file_is_uploaded_whole_now_and_then():
    """Nothing before its time, all of it at its time and at the end; the local copy goes."""
    clock = Ticks()
    spool = Spool("memory://spool/run", clock)
    path = spool.path / "metrics.jsonl"
    path.write_text("1\n")
    spool.sync()
    url = "memory://spool/run/metrics.jsonl"
    assert storage.size(url) is None
    clock.now += 31
    spool.sync()
    assert storage.read_bytes(url) == b"1\n"
    path.write_text("1\n2\n")
    spool.sync()
    assert storage.read_bytes(url) == b"1\n"
    spool.close()
    assert storage.read_bytes(url) == b"1\n2\n"
    assert not spool.path.exists()


class Store:
    """`memory://`, which fails as often as it is told to."""

    def __init__(self, monkeypatch, error=None):
        self.write, self.error, self.failures = storage.write_atomic, error, 0
        monkeypatch.setattr(storage, "write_atomic", self)

    def __call__(self, url, data):
        if self.failures:
            self.failures -= 1
            raise self.error or StoreUnavailable(f"{url}: 503")
        self.write(url, data)


def test_a_store_that_fails_for_a_while_gets_everything_when_it_is_back(monkeypatch, caplog):
    """A refused upload is made up for by the next one, and does not end the tracker."""
    store, clock = Store(monkeypatch), Ticks()
    lines = JsonLines("memory://fails/run")
    lines._spool._clock, lines._spool._next = clock, 30.0
    url = "memory://fails/run/metrics.jsonl"
    for step in range(6):
        store.failures = 1 if step in (1, 2) else 0
        clock.now += 31
        lines.write([{"step": step}])
        there = [each["step"] for each in read_lines(url)]
        assert there == ([0] if step in (1, 2) else list(range(step + 1)))
    store.failures = 2
    lines._spool._pause = lambda seconds: None
    lines.write([{"step": 6}])
    lines.close()
    assert [each["step"] for each in read_lines(url)] == list(range(7))
    assert caplog.text.count("tried again later: memory://fails/run/metrics.jsonl: 503") == 2


class Full:
    """A file on a disk with room for so many bytes more."""

    name = "metrics.jsonl"

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self.file.write(data[: self.room])
        self.room -= done
        return done

    def close(self):
        self.file.close()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(rooms):
    """Whole lines in order, however the room comes and goes."""
    with tempfile.TemporaryDirectory() as directory:
        lines = JsonLines(directory)
        lines._file = disk = Full(lines._file, 0)
        for step, room in enumerate(rooms):
            disk.room = room
            lines.write([{"step": step}])
        disk.room = 10**6
        lines.close()
        found = read_lines(f"{directory}/{NAME}")
    assert [each["step"] for each in found] == list(range(len(rooms)))


def test_what_a_full_disk_took_is_uploaded_at_the_end():
    """Though the last line is not among it, which is an error."""
    lines = JsonLines("memory://full/run")
    lines.write([{"step": 1}])
    lines._file = Full(lines._file, 0)
    lines.write([{"step": 2}])
    with pytest.raises(OSError, match="No space left"):
        lines.close()
    assert [each["step"] for each in read_lines(f"memory://full/run/{NAME}")] == [1]


def test_a_disk_that_stays_full_is_given_up(tmp_path, monkeypatch, caplog):
    """It is said once, and memory does not grow without end."""
    monkeypatch.setattr(files, "MOST_BACKLOG_BYTES", 100)
    lines = JsonLines(str(tmp_path))
    lines._file = Full(lines._file, 0)
    for step in range(5):
        lines.write([{"step": step}])
    with pytest.raises(OSError, match="No space left"):
        lines.write([{"step": step} for step in range(5, 10)])
    assert caplog.text.count("not written, tried again later") == 1


@pytest.mark.parametrize("error", [StoreUnavailable("503"), InputError("not permitted")])
def test_a_store_that_fails_for_good_is_given_up_at_the_end(monkeypatch, error):
    """The copy on this machine is left, with everything; what is not permitted ends it at once."""
    store, clock = Store(monkeypatch, error), Ticks()
    spool = Spool("memory://gone/run", clock, pause=lambda seconds: None)
    (spool.path / NAME).write_text("1\n")
    store.failures = 10**6
    clock.now += 31
    if isinstance(error, InputError):
        with pytest.raises(InputError):
            spool.sync()
    else:
        spool.sync()
    with pytest.raises(type(error)):
        spool.close()
    assert (spool.path / NAME).read_text() == "1\n"
    shutil.rmtree(spool.path)


def test_a_torn_last_line_is_passed_over(tmp_path):
    """A kill in the middle of a line loses that line; damage elsewhere is an error."""
    text = b'{"step": 1}\n{"step": 2}\n'
    file = tmp_path / "lines"
    for end in range(len(text)):
        file.write_bytes(text[:end])
        found = [each["step"] for each in read_lines(str(file))]
        assert found == [1, 2][: text[:end].count(b"\n")]
    file.write_bytes(b'{"st\n' + text)
    with pytest.raises(ValueError, match=r"line 1"):
        read_lines(str(file))
    assert read_lines(str(tmp_path / "absent")) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_steps_done_again_count_once(attempts):
    """Joined rows are those that the steps' last doers wrote, as a dictionary would keep them."""
    parts, last, want = [], 0, {}
    for index, (back, ahead) in enumerate(attempts):
        begins = max(0, last - back)
        last = begins + ahead
        rows = [{"step": step, "by": index} for step in range(begins + 1, last + 1)]
        parts.append((begins, rows))
        want = {step: row for step, row in want.items() if step <= begins}
        want |= {row["step"]: row for row in rows}
    assert join_attempts(parts) == [want[step] for step in sorted(want)]


def test_the_evaluation_before_the_first_step_is_not_there_twice():
    """An attempt that begins anew scores step 0 again; one that goes on does not."""
    zero, later = {"step": 0, "loss": 5.0}, {"step": 4, "loss": 4.0}
    assert join_attempts([(0, [zero]), (0, [zero, later])]) == [zero, later]
    assert join_attempts([(0, [zero, later]), (4, [])]) == [zero, later]
