"""Files that grow at a URL, on object stores in parts."""

from __future__ import annotations

import os
import uuid

import pytest

from pipeline.store import append, storage
from pipeline.store.append import Appender, Tail


def _grow(parts, text):
    """Append, and upload it."""
    parts.write(text.encode())
    parts.flush()
    return text.encode()


def test_a_long_log_is_few_objects_and_reads_the_same(monkeypatch):
    """To who reads it all at its end, and to who follows it from any look to the next."""
    monkeypatch.setattr(append, "MERGED", 4)
    url = f"memory://logs/{uuid.uuid4().hex}/log.txt"
    parts, tails, written = Appender(url), [Tail(url), Tail(url)], b""
    read = [b"", b""]
    for number in range(100):
        written += _grow(parts, f"line {number}\n")
        read[0] += tails[0].more()
        if number % 7 == 0:
            read[1] += tails[1].more()
    assert read[0] == written
    assert read[1] + tails[1].more() == written
    assert storage.list_names(url) == [
        *("000001-000064.txt", "000065-000080.txt", "000081-000096.txt", "000097-000100.txt")
    ]
    assert Tail(url, 650).more() == written[650:]


def test_a_writer_killed_before_the_merged_parts_are_deleted_doubles_no_line(monkeypatch):
    """Nor loses one."""
    monkeypatch.setattr(append, "MERGED", 4)
    url = f"memory://logs/{uuid.uuid4().hex}/log.txt"
    parts, tail = Appender(url), Tail(url)
    fs, _ = storage.filesystem(url)
    written = b"".join(_grow(parts, f"line {number}\n") for number in range(2))
    read = tail.more()
    with monkeypatch.context() as killed:
        killed.setattr(type(fs), "rm", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        written += b"".join(_grow(parts, f"line {number}\n") for number in range(2, 4))
    assert len(storage.list_names(url)) == 5
    assert read + tail.more() == written == Tail(url).more()


def test_parts_merged_while_they_are_read_are_read_once(monkeypatch):
    """What was listed is gone; the reader looks again."""
    monkeypatch.setattr(append, "MERGED", 4)
    url = f"memory://logs/{uuid.uuid4().hex}/log.txt"
    parts, part = Appender(url), append._part
    written = [_grow(parts, f"line {number}\n") for number in range(3)]

    def merged_first(url):
        if len(written) < 4 and url.endswith("2.txt"):
            written.append(_grow(parts, "line 3\n"))
        return part(url)

    monkeypatch.setattr(append, "_part", merged_first)
    assert Tail(url).more() == b"".join(written)
    assert len(written) == 4


def test_what_a_failed_write_left_is_written_by_the_next(tmp_path):
    """Once and in order, to a file that was opened again."""
    with Appender(f"{tmp_path}/log.txt") as file:
        file.write(b"one\n")
        os.close(file._file.fileno())
        with pytest.raises(OSError, match="Bad file descriptor"):
            file.write(b"two\n")
        file.write(b"three\n")
        assert Tail(f"{tmp_path}/log.txt", 2).more() == b"e\ntwo\nthree\n"
