"""`logs --follow` and the times that flags take."""

from __future__ import annotations

import argparse

import pytest

from pipeline.cli import watch
from pipeline.cli.verbs import seconds


def test_following_shows_what_every_process_of_every_attempt_appends(tmp_path, capsys):
    """Lines are prefixed by the process when there are several, and none is shown twice."""
    attempts = tmp_path / "step" / "attempts"

    def write(name, text):
        path = attempts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(text)

    def changes():
        write("000001-a/log.txt", "placed\n")
        yield True
        write("000001-a/logs/process-000.txt", "step 1\n")
        yield True
        write("000001-a/logs/process-000.txt", "step 2\n")
        yield True
        write("000002-b/log.txt", "again\n")
        yield False

    moments = changes()
    watch.follow(str(tmp_path / "step"), lambda: next(moments), 0)
    assert capsys.readouterr().out.splitlines() == [
        f"==> {attempts}/000001-a",
        "placed",
        "process-000 | step 1",
        "process-000 | step 2",
        f"==> {attempts}/000002-b",
        "again",
    ]


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("30m", 1800), ("1.5h", 5400)])
def test_a_time_has_a_unit(text, expected):
    """And what has none is refused with examples."""
    assert seconds(text) == expected
    with pytest.raises(argparse.ArgumentTypeError, match="such as 90s, 30m or 6h"):
        seconds(text[:-1])
