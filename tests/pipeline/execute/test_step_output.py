"""What a step prints and logs reaches its log and the user's terminal, wherever it runs."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.display import PlainDisplay
from pipeline.events import PhaseBegan
from pipeline.execute.logs import LINES, Screen, capture

PONENTE = Path(sys.executable).parent / "ponente"
EXPERIMENT = """
import ctypes, logging, os, subprocess, sys
from pipeline import Artifact, Experiment, Result, StepContext, step

log = logging.getLogger(__name__)

def write(directory, item):
    print("printed in writer →")
    print("complained in writer", file=sys.stderr)
    log.info("told in writer")
    os.write(1, b"raw in writer\\n")
    if item < 0:
        raise ValueError("a bad item")
    return {}

@step(output=Artifact, version=1)
def talk(run: StepContext, *, items: int) -> Result:
    print("printed in body →")
    print("complained in body", file=sys.stderr)
    log.info("told in body")
    log.warning("warned in body")
    os.write(2, b"raw in body\\n")
    subprocess.run(["sh", "-c", "echo child in body; printf unfinished >&2"])
    ctypes.CDLL(None).printf(b"C in body\\n")
    run.map(write, {"one": items})
    return {}

def talking() -> tuple[Artifact, Artifact]:
    return talk(items=1), talk(items=-1)

experiment = Experiment(talking)
"""
SAID = [
    f"{how} in {where}" for how in ("printed", "complained", "told") for where in ("body", "writer")
]
RAW = ["raw in body", "child in body", "C in body", "raw in writer"]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inline", "ray"])
def test_what_a_step_says_is_in_its_log_and_on_the_terminal(tmp_path, executor):
    """Of its body and of the writers of its shards: stdout, stderr, and INFO of its modules.

    And of what its child processes and C libraries write, in this process also on the terminal.
    Also where the locale has ASCII alone, and when a writer fails, as that of the second step.
    """
    (tmp_path / "talking.py").write_text(EXPERIMENT)
    ascii_alone = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    command = [str(PONENTE), "run", "talking.py", "--executor", executor]
    done = subprocess.run(
        [*command, "--keep-going", "--jobs", "1"],
        cwd=tmp_path,
        env={**os.environ, **ascii_alone},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    terminal = done.stdout.decode(errors="replace")
    assert done.returncode == 1, terminal
    logs = list(tmp_path.glob("runs/talk-*/attempts/*/log.txt"))
    assert len(logs) == 2
    for kept in (log.read_text("utf-8") for log in logs):
        assert "printed in body →" in kept
        for line in (*SAID, *RAW, "warned in body"):
            assert line in kept, kept
    for line in (*SAID, "warned in body"):
        assert line in terminal, terminal
    if executor == "inline":
        assert [terminal.count(line) for line in RAW] == [2] * len(RAW), terminal
    (events,) = tmp_path.glob("runs/events/*.jsonl")
    assert "in writer →" not in events.read_text()


class Shown(list):
    """The lines that a screen showed."""

    def __call__(self, event):
        self.extend(event.text.splitlines())


def test_a_line_that_is_written_over_is_shown_once():
    """As bars of progress do; blank lines are not shown."""
    shown = Shown()
    with Screen(shown) as screen:
        for percent in range(101):
            screen.write(f"\r{percent} %")
        screen.write("\n\n  \nthe ")
        screen.write("end")
    assert shown == ["100 %", "the end"]


def test_a_flood_is_cut_and_a_display_that_fails_fails_nothing():
    """All of it is in the log, which the last line says."""
    shown = Shown()
    with Screen(shown) as screen:
        screen.write("line\n" * 1000)
    assert len(shown) <= LINES + 1
    assert shown[-1].endswith("more lines are in the log")

    def fail(event):
        raise OSError("no terminal")

    with Screen(fail) as screen:
        screen.write("text")


def test_stdout_is_as_before_afterwards_and_for_whoever_kept_it(tmp_path, capsys):
    """A handler made in a step writes to the terminal once the step has ended."""
    before = sys.stdout
    with capture(str(tmp_path / "log.txt"), redirect=False):
        sys.stdout.write("during\n")
        kept = logging.StreamHandler(sys.stdout)
    assert sys.stdout is before
    kept.emit(logging.makeLogRecord({"msg": "after"}))
    assert (tmp_path / "log.txt").read_text() == "during\n"
    assert capsys.readouterr().out == "during\nafter\n"


def test_descriptors_are_captured_and_as_before_afterwards(tmp_path, capfd):
    """Of overlapping attempts, by the first; a fork's text is shown once."""
    shown, path = Shown(), tmp_path / "log.txt"
    with capture(str(path), redirect=False, show=shown):
        with capture(str(tmp_path / "other.txt"), redirect=False, show=shown):
            subprocess.run(["sh", "-c", "echo out; echo err >&2; printf '\\303'; printf '\\251'"])
        sys.stdout.write("printed\n")
        if not (child := os.fork()):
            sys.stdout.write("forked\n")
            os._exit(0)
        os.waitpid(child, 0)
    os.write(1, b"after\n")
    assert shown == ["out", "err", "éforked"]
    assert path.read_text() == "out\nerr\néprinted\nforked\n"
    assert capfd.readouterr() == ("printed\nafter\n", "")


def test_more_than_a_pipe_holds_is_no_deadlock(tmp_path, capfd):
    """Of a library that holds the interpreter's lock meanwhile; all of it is in the log."""
    text, path = b"x" * 999 + b"\n", tmp_path / "log.txt"
    write = ctypes.PyDLL(None).write  # keeps the lock
    with capture(str(path), redirect=False, show=Shown()):
        for _ in range(1000):
            write(1, text, len(text))
    assert path.read_bytes() == text * 1000
    assert capfd.readouterr() == ("", "")


def test_a_line_without_end_is_ended_for_the_display(tmp_path, capsys):
    with capture(str(tmp_path / "log.txt"), redirect=False):
        display = PlainDisplay(sys.stdout._stream)
        for _ in range(2):
            sys.stdout.write("begun")
            for text in ("one", "two"):
                display(PhaseBegan(text, step="train"))
        sys.stdout.write("begun")
    assert capsys.readouterr().out.splitlines() == [
        *("begun", f"{'train':<16} one", f"{'train':<16} two") * 2,
        "begun",
    ]
