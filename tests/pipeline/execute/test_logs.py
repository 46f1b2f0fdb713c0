"""What an attempt's log holds."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid

from pipeline import step
from pipeline.errors import Preempted
from pipeline.execute import logs
from pipeline.execute.events import EventLog
from pipeline.execute.logs import capture
from pipeline.store import storage
from tests.pipeline.helpers import bring_up
from tests.pipeline.toy import Numbers, numbers


def test_information_of_the_steps_packages_and_warnings_of_all_are_kept(tmp_path):
    """And afterwards loggers are as they were."""
    ours = (
        "ponente",
        "training.trainer.trainer",
        "data.tokenizer.backends",
        "steps.train",
        "models.generate.generate",
    )
    before = [logging.getLogger(name).getEffectiveLevel() for name in ours]
    packages = ("data", "models", "steps", "training")
    with capture(str(tmp_path / "log.txt"), redirect=False, packages=packages):
        for name in (*ours, "somebody.else"):
            logging.getLogger(name).warning("trouble")
            logging.getLogger(name).info("news")
    logging.getLogger("training.trainer.trainer").warning("too late")
    lines = [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    want = [(f"WARNING {name}: trouble", f"INFO {name}: news") for name in ours]
    assert lines == [*sum(want, ()), "WARNING somebody.else: trouble"]
    assert [logging.getLogger(name).getEffectiveLevel() for name in ours] == before


def test_attempts_that_overlap_keep_their_information(tmp_path):
    """Whichever ends first; after the last one loggers are as they were."""
    logger = logging.getLogger("training.trainer.trainer")
    before = logger.getEffectiveLevel()
    first = capture(str(tmp_path / "first.txt"), redirect=False, packages=["training"])
    with contextlib.ExitStack() as stack:
        first.__enter__()
        second = str(tmp_path / "second.txt")
        stack.enter_context(capture(second, redirect=False, packages=["training"]))
        first.__exit__(None, None, None)
        logger.info("news")
    assert "news" in (tmp_path / "second.txt").read_text()
    assert "news" not in (tmp_path / "first.txt").read_text()
    assert logger.getEffectiveLevel() == before


def test_a_log_leaves_no_file_open_behind():
    """Where it is uploaded: a graph of thousands of steps runs in one process."""
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        with capture(f"memory://logs/{uuid.uuid4().hex}/{number}", redirect=False):
            pass
        events = EventLog(f"memory://logs/{uuid.uuid4().hex}", "run", [])
        events.emit({"event": "run_started"})
        events.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_log_on_an_object_store_is_appended_in_parts_while_it_grows(monkeypatch):
    """What was written is there before the block ends, and no part holds what another one does."""
    monkeypatch.setattr(logs, "PART_SECONDS", 0.0)
    url = f"memory://logs/{uuid.uuid4().hex}/log.txt"
    with capture(url, redirect=False):
        for number in range(2):
            logging.getLogger("ponente").info("line %d", number)
            deadline = time.monotonic() + 30
            while len(storage.list_names(url)) <= number and time.monotonic() < deadline:
                time.sleep(0.05)
        assert storage.list_names(url) == ["000001.txt", "000002.txt"]
        logging.getLogger("ponente").info("line 2")
    parts = [storage.read_bytes(storage.join(url, name)) for name in storage.list_names(url)]
    assert [part.decode().strip().rpartition(": ")[2] for part in parts] == [
        "line 0",
        "line 1",
        "line 2",
    ]
    tail = logs.Tail(url)
    assert (tail.more(), tail.more()) == (b"".join(parts), b"")


_left = []


@step(output=Numbers, version=1)
def leaves_once(run, numbers: Numbers):
    """Told to leave the first time."""
    if not _left:
        _left.append(run.attempt)
        raise Preempted("preempted after step 3; the next attempt goes on from there")
    return {"count": 0}


def test_leaving_when_told_to_is_no_error(tmp_path):
    """One line of information, without a traceback."""
    _left.clear()
    bring_up(str(tmp_path), leaves_once(numbers(count=3)))
    (log,) = tmp_path.glob(f"leaves_once-*/attempts/{_left[0]}/log.txt")
    text = log.read_text()
    assert "INFO ponente: preempted after step 3" in text
    assert "ERROR" not in text
    assert "Traceback" not in text


def _grow(parts, text):
    """Append to the file of a log on an object store, and upload it."""
    with open(parts.path, "a") as file:
        file.write(text)
    parts._upload()
    return text.encode()


def test_a_long_log_is_few_objects_and_reads_the_same(monkeypatch):
    """To who reads it all at its end, and to who follows it from any look to the next."""
    monkeypatch.setattr(logs, "MERGED", 4)
    url = f"memory://logs/{uuid.uuid4().hex}/log.txt"
    parts, tails, written = logs.Parts(url), [logs.Tail(url), logs.Tail(url)], b""
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
    assert logs.Tail(url, 650).more() == written[650:]


def test_a_writer_killed_before_the_merged_parts_are_deleted_doubles_no_line(monkeypatch):
    """Nor loses one."""
    monkeypatch.setattr(logs, "MERGED", 4)
    url = f"memory://logs/{uuid.uuid4().hex}/log.txt"
    parts, tail = logs.Parts(url), logs.Tail(url)
    fs, _ = storage.filesystem(url)
    written = b"".join(_grow(parts, f"line {number}\n") for number in range(2))
    read = tail.more()
    with monkeypatch.context() as killed:
        killed.setattr(type(fs), "rm", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        written += b"".join(_grow(parts, f"line {number}\n") for number in range(2, 4))
    assert len(storage.list_names(url)) == 5
    assert read + tail.more() == written == logs.Tail(url).more()


def test_parts_merged_while_they_are_read_are_read_once(monkeypatch):
    """What was listed is gone; the reader looks again."""
    monkeypatch.setattr(logs, "MERGED", 4)
    url = f"memory://logs/{uuid.uuid4().hex}/log.txt"
    parts, part = logs.Parts(url), logs._part
    written = [_grow(parts, f"line {number}\n") for number in range(3)]

    def merged_first(url):
        if len(written) < 4 and url.endswith("2.txt"):
            written.append(_grow(parts, "line 3\n"))
        return part(url)

    monkeypatch.setattr(logs, "_part", merged_first)
    assert logs.Tail(url).more() == b"".join(written)
    assert len(written) == 4
