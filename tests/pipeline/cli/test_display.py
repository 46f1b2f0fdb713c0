"""The live view: plain lines where there is no terminal, a table that is redrawn where there is."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from pipeline import events
from pipeline.cli.display import LiveDisplay, PlainDisplay
from pipeline.execute.run_record import RunRecord
from tests.pipeline.cli.terminal import Screen, Terminal

# An experiment whose steps end in every way there is, on the real command line.
DRIVER = """
import sys, time
from pipeline import events
from pipeline.cli.display import choose
from pipeline.execute.event_log import EventLog

labels = sys.argv[2:] or [f"step {i:03d}" for i in range(200)]
log = EventLog(sys.argv[1], "run", [])
show = choose(log.record)
log.listen(show)
graph = [{"label": label, "key": str(i)} for i, label in enumerate(labels)]
log.emit(events.RunStarted(graph=graph))
for i, label in enumerate(labels):
    of = dict(step=label, key=str(i))
    log.emit(events.Started(**of))
    log.emit(events.Progress(1, 4, "shards", **of))
    time.sleep(0.3 if i == 0 else 0.002)
    ends = events.Finished(1.5, **of), *(
        kind(f"cause {i}", **of) for kind in (events.Failed, events.Stopped, events.Skipped)
    )
    log.emit(ends[i % 4 if len(labels) < 9 else i == 100])
show.close()
print("the end")
"""


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def _of(step="fit", time=0.0):
    return {"step": step, "key": f"key of {step}", "time": time}


def _progress(done, total, time, note=""):
    return events.Progress(done, total, "shards", note, **_of(time=time))


@pytest.fixture
def plain():
    out, clock = io.StringIO(), Clock()
    return PlainDisplay(out, clock), lambda: out.getvalue().splitlines(), clock


def _live(labels, width=100, height=30, **settings):
    """A live display on a recorded terminal, and its picture as text."""
    clock = Clock()

    def console():
        options = {"color_system": "truecolor", "width": width, "height": height, **settings}
        return Console(file=io.StringIO(), force_terminal=True, **options)

    record = RunRecord("run")
    record.apply(events.RunStarted(graph=[{"label": x, "key": f"key of {x}"} for x in labels]))
    table = LiveDisplay(record, console(), clock)

    def display(event):
        record.apply(event)
        table(event)

    def picture(*, styled=False):
        once = console()
        once.print(table.draw())
        text = once.file.getvalue()
        return text if styled else re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)

    display.clock, display.picture, display.close = clock, picture, table.close
    return display


@pytest.fixture
def live():
    made = []

    def make(*arguments, **settings):
        made.append(_live(*arguments, **settings))
        return made[-1]

    yield make
    for display in made:
        display.close()


CHANGES = [
    (events.Hit(12.34, **_of()), "up to date (took 12.3 s when it was built)"),
    (events.Waiting("process 7 on h", **_of()), "waiting for process 7 on h"),
    (events.Started(**_of()), "running"),
    (events.Finished(2.5, **_of()), "done in 2.5 s"),
    (events.Finished(2.5, "reused", **_of()), "done by another run"),
    (events.Retried("its worker died", 1, **_of()), "retrying (1 tries used): its worker"),
    (events.WaitingForResources("waiting for v6e-16", 720, **_of()), "v6e-16, 12 min"),
    (events.PhaseBegan("compiling", **_of()), "compiling"),
    (events.Retrying("gs://b/x", "503", 3, 40, **_of()), "x, 503, attempt 3"),
    (events.Failed("no such file", **_of()), "FAILED: no such file"),
    (events.Skipped("tokens failed", **_of()), "skipped: tokens failed"),
    (events.Stopped("3 shards are not finished", **_of()), "stopped: 3 shards are not finished"),
    (events.Warned("odd", **_of()), "warning: odd"),
    (
        events.ShardRetried("part/003", "its worker stopped responding", 2, **_of()),
        "shard part/003 is retried (2 tries used): its worker stopped responding",
    ),
]


@pytest.mark.parametrize(("event", "expected"), CHANGES, ids=lambda v: str(v)[:24])
def test_every_change_is_one_plain_line_and_is_in_the_table(event, expected, plain, live):
    """Each kind of event that changes something says so in both."""
    display, lines, _ = plain
    display(event)
    (line,) = lines()
    assert line.startswith("fit ")
    assert expected in line
    table = live(["fit"])
    table(event)
    assert expected in table.picture()


def test_what_changes_nothing_is_no_line(plain):
    """Queued steps, finished shards and events of the run itself."""
    display, lines, _ = plain
    for event in (
        events.Queued(**_of()),
        events.ShardFinished("a", 1, **_of()),
        events.RunStarted(),
    ):
        display(event)
    assert not lines()


def test_a_line_has_no_control_codes_whatever_a_cause_brings(plain, live):
    """A newline, a carriage return and an escape sequence of somebody's error message."""
    event = events.Failed("one\ntwo\r\x1b[31mthree\x07", **_of())
    display, lines, _ = plain
    display(event)
    assert len(lines()) == 1
    assert all(c.isprintable() for c in lines()[0])
    table = live(["fit"])
    table(event)
    assert "one two" in table.picture()
    assert "\x07" not in table.picture()


def test_progress_is_said_at_most_every_five_seconds(plain):
    """A thousand events in sixteen seconds make three lines, at 5, 10 and 15 seconds or more."""
    display, lines, clock = plain
    display(events.Started(**_of()))
    said = []
    for i in range(1000):
        clock.now = 1000.0 + i * 0.016
        before = len(lines())
        display(_progress(i, 1000, i * 0.016))
        if len(lines()) > before:
            said.append(clock.now - 1000)
    assert len(said) == 3
    assert all(at >= 5 * (n + 1) for n, at in enumerate(said))
    assert all(at < 5 * (n + 1) + 0.1 for n, at in enumerate(said))


@pytest.mark.parametrize("again", [False, True], ids=["first try", "another try"])
def test_rate_and_time_left_are_those_of_the_events(plain, live, again):
    """From the first progress of this try on: neither its start nor what was there before."""
    display, lines, clock = plain
    table = live(["fit"])

    def both(event):
        display(event)
        table(event)

    both(events.Started(**_of()))
    if again:
        # An earlier try, ten times as fast.
        both(_progress(0, 400, 100.0))
        both(_progress(90, 400, 103.0))
        both(events.Retried("gone", 1, **_of()))
        both(events.Started(**_of()))
    first, first_time, done, at = 100, 200.0, 190, 230.0
    both(_progress(first, 400, first_time))
    clock.now += 30
    both(_progress(done, 400, at, note="loss 3.2"))
    rate = (done - first) / (at - first_time)
    left = (400 - done) / rate
    expected = f"190/400 shards  {rate:.2f} shards/s  {left:.0f} s left  loss 3.2"
    assert (rate, left) == (3.0, 70.0)
    assert lines()[-1].endswith(expected)
    assert expected in table.picture()


@pytest.mark.parametrize(("seconds", "expected"), [(99, "99 s"), (600, "10 min"), (7200, "2.0 h")])
def test_time_left_in_words(plain, seconds, expected):
    """Seconds, minutes, hours."""
    display, lines, clock = plain
    display(events.Started(**_of()))
    display(_progress(0, seconds + 10, 0))
    clock.now += 10
    display(_progress(10, seconds + 10, 10))
    assert f"  {expected} left" in lines()[-1]


def test_a_running_step_has_a_bar_and_its_time_so_far(live):
    """The bar is as long as what is done; the clock goes on without events."""
    table = live(["fit", "other"])
    table(events.Started(**_of()))
    table(_progress(0, 4, 0.0))
    assert "━" not in table.picture(styled=True).split("\x1b[38;5;237m")[0]
    table(_progress(3, 4, 30.0))
    table.clock.now += 42
    line = next(x for x in table.picture().splitlines() if "fit" in x)
    assert line.startswith("> fit")
    assert line.count("━") + line.count("╸") + line.count("╺") == 100 // 6
    assert "3/4 shards  0.10 shards/s  10 s left  42 s so far" in line
    assert "42 s" in table.picture().splitlines()[-1]
    table(events.Finished(42.0, **_of()))
    line = next(x for x in table.picture().splitlines() if "fit" in x)
    assert line.rstrip() == "+ fit    done in 42.0 s"


def test_the_last_line_counts(live):
    """Done of all, and what did not go well; time since the beginning."""
    labels = [f"s{i}" for i in range(8)]
    table = live(labels)
    ends = (events.Hit, events.Finished, events.Failed, events.Skipped, events.Stopped)
    for i, kind in enumerate((*ends, events.Started)):
        table(kind(**_of(f"s{i}")))
    table.clock.now += 75
    last = table.picture().splitlines()[-1].split("  ")
    words = ["2/8 steps", "1 running", "1 failed", "1 skipped", "1 stopped", "75 s"]
    assert [w.strip() for w in last if w.strip()] == words


def test_more_steps_than_rows(live):
    """Running and failed ones and the last that finished are shown; the others are counted."""
    labels = [f"step {i:03d}" for i in range(200)]
    table = live(labels, height=12)
    for i in range(100):
        table(events.Finished(1, **_of(labels[i])))
    table(events.Failed("broken", **_of(labels[3])))
    table(events.Started(**_of(labels[150])))
    table(events.Warned("odd", **_of(labels[5])))
    lines = table.picture().splitlines()
    assert len(lines) <= 11
    shown = [line.split()[2] for line in lines if re.match(r"[!>+.=-] step", line)]
    assert shown == ["003", *[f"{i:03d}" for i in range(94, 100)], "150"]
    assert "192 more: 93 done, 99 waiting" in "\n".join(lines)
    assert "99/200 steps  1 running  1 failed" in lines[-1]


@pytest.mark.parametrize("width", [40, 79, 80])
def test_a_table_fits_its_width(live, width):
    """Long labels and causes are cut, never wrapped; what matters of progress is there."""
    labels = ["fit", "a very long label " * 5, "failing"]
    table = live(labels, width=width)
    table(events.Started(**_of()))
    table(_progress(100, 400, 0.0))
    table(_progress(200, 400, 50.0, note="n" * 300))
    table(events.Failed("long " * 60, **_of("failing")))
    lines = [line.rstrip() for line in table.picture().splitlines()]
    assert len(lines) == 4
    assert all(len(line) <= width for line in lines)
    fit = next(line for line in lines if line.startswith("> fit"))
    assert ("200/400" if width >= 80 else "50%  ") in fit
    assert width > 79 or "100 s left" in fit or "2 min left" in fit


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(30, 100), (10, 40)])
def test_on_a_real_terminal(rows, columns, tmp_path):
    """Every step with its end, no broken table; the cursor and the modes are as they were."""
    labels = ["download", "tokens", "fit", "evaluate", "x" * 60]
    command = [sys.executable, "-c", DRIVER, str(tmp_path), *labels]
    with Terminal(command, rows=rows, columns=columns) as terminal:
        assert terminal.wait(30) == 0, terminal.text
        screen = Screen(rows, columns)
        lines = screen.feed(terminal.text)
        assert terminal.modes_now() == terminal.modes
    assert terminal.text.count("\x1b[?25l") == 1
    assert screen.cursor
    assert lines.count("the end") == 1
    table = lines[: lines.index("the end")]
    ends = ["+ download", "! tokens", "! fit", "- evaluate", "+ xxxxx"]
    assert [line[: len(end)] for line, end in zip(table, ends, strict=False)] == ends
    assert "done in 1.5 s" in table[0]
    assert "FAILED: cause 1" in table[1]
    assert table[5].startswith("2/5 steps  1 failed")
