"""What an attempt's log holds."""

from __future__ import annotations

import contextlib
import logging

from pipeline import step
from pipeline.errors import Preempted
from pipeline.execute.logs import capture
from tests.pipeline.helpers import bring_up
from tests.pipeline.toy import Numbers, numbers


def test_information_of_this_project_and_warnings_of_all_are_kept(tmp_path):
    """And afterwards loggers are as they were."""
    ours = ("ponente", "training.loop", "data.encoders", "steps.train", "models.generate")
    before = [logging.getLogger(name).getEffectiveLevel() for name in ours]
    with capture(str(tmp_path / "log.txt"), redirect=False):
        for name in (*ours, "somebody.else"):
            logging.getLogger(name).warning("trouble")
            logging.getLogger(name).info("news")
    logging.getLogger("training.loop").warning("too late")
    lines = [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    want = [(f"WARNING {name}: trouble", f"INFO {name}: news") for name in ours]
    assert lines == [*sum(want, ()), "WARNING somebody.else: trouble"]
    assert [logging.getLogger(name).getEffectiveLevel() for name in ours] == before


def test_attempts_that_overlap_keep_their_information(tmp_path):
    """Whichever ends first; after the last one loggers are as they were."""
    logger = logging.getLogger("training.loop")
    before = logger.getEffectiveLevel()
    first = capture(str(tmp_path / "first.txt"), redirect=False)
    with contextlib.ExitStack() as stack:
        first.__enter__()
        stack.enter_context(capture(str(tmp_path / "second.txt"), redirect=False))
        first.__exit__(None, None, None)
        logger.info("news")
    assert "news" in (tmp_path / "second.txt").read_text()
    assert "news" not in (tmp_path / "first.txt").read_text()
    assert logger.getEffectiveLevel() == before


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
