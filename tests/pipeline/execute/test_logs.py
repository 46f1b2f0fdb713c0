"""What an attempt's log holds."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid

import pytest

from pipeline import step
from pipeline.errors import Preempted
from pipeline.events import RunStarted
from pipeline.execute.event_log import EventLog
from pipeline.execute.logs import capture
from pipeline.store import append, storage
from tests.pipeline.helpers import bring_up
from tests.pipeline.toy import Numbers, numbers


def test_information_of_the_steps_packages_and_warnings_of_all_are_kept(tmp_path):
    ours = ("ponente", "training.trainer.trainer", "data.tokenizer.backends")
    before = [logging.getLogger(name).getEffectiveLevel() for name in ours]
    packages = ("data", "training")
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
        events.emit(RunStarted())
        events.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_a_log_on_an_object_store_is_appended_in_parts_while_it_grows(monkeypatch):
    """What was written is there before the block ends, and no part holds what another one does."""
    monkeypatch.setattr(append, "PART_SECONDS", 0.0)
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
    lines = [part.decode().strip().rpartition(": ")[2] for part in parts]
    assert lines == ["line 0", "line 1", "line 2"]
    tail = append.Tail(url)
    assert (tail.more(), tail.more()) == (b"".join(parts), b"")


_left = []


@step(output=Numbers, version=1)
def leaves_once(run, numbers: Numbers):
    if not _left:
        _left.append(run.attempt)
        raise Preempted("preempted after step 3; the next attempt goes on from there")
    return {"count": 0}


def test_leaving_when_told_to_is_no_error(tmp_path):
    _left.clear()
    bring_up(str(tmp_path), leaves_once(numbers(count=3)))
    (log,) = tmp_path.glob(f"leaves_once-*/attempts/{_left[0]}/log.txt")
    text = log.read_text()
    assert "INFO ponente: preempted after step 3" in text
    assert "ERROR" not in text
    assert "Traceback" not in text
