"""The display of a run: a live table on a terminal, plain lines without control codes elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from pipeline import events
from pipeline.events import Event
from pipeline.execute.logs import Copies
from pipeline.execute.run_record import DONE, RunRecord, StepRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_LINE_SECONDS = 5.0
_MOST_WARNINGS = 5
# Smallest widths in columns for a progress bar, and for the full text of a step's progress.
_BAR_WIDTH, _WIDE = 60, 80
# State of a step -> (mark, color, text in counts); the first are shown when not all rows fit.
_STATES = {
    "failed": ("!", "red", "failed"),
    "running": (">", "cyan", "running"),
    "pending": (">", "yellow", "waiting to start"),
    "stopped": ("!", "yellow", "stopped"),
    "executed": ("+", "green", "done"),
    "unreached": ("-", "yellow", "skipped"),
    "waiting": (".", "dim", "waiting"),
    "unneeded": (".", "dim", "waiting"),
    "elsewhere": ("=", "dim", "up to date"),
    "reused": ("=", "dim", "up to date"),
}
_ORDER = {state: number for number, state in enumerate(_STATES)}


class Rate:
    """Progress as text, with a rate since an attempt's first event, after what it compiled."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def describe(self, event: events.Progress, *, brief: bool = False) -> str:
        """`done/total unit  rate  time left  note`; brief: `percent  time left`."""
        done, total, unit = event.done, event.total, event.unit
        if self._first is None or done < self._first[0]:
            self._first = (done, event.time)
        more, seconds = done - self._first[0], event.time - self._first[1]
        rate = more / seconds if more and seconds > 0.5 else 0.0
        left = f"  {_duration((total - done) / rate)} left" if rate and done < total else ""
        if brief:
            return (f"{done / total:.0%}" if total else f"{done:,.0f} {unit}") + left
        text = f"{done:,.0f}/{total:,.0f} {unit}"
        text += f"  {rate:,.2f} {unit}/s" if rate else ""
        return text + left + (f"  {event.note}" if event.note else "")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _state_text(event: Event) -> str:
    """The step's state after an event, as text; empty if the event does not change the state."""
    match event:
        case events.Hit(seconds=seconds):
            return f"up to date (took {seconds:.1f} s when it was built)"
        case events.Queued():
            return "waiting"
        case events.Waiting(holder=holder):
            return f"waiting for {holder}, which already runs it"
        case events.WaitingForResources(cause=cause, seconds=seconds):
            return f"{cause}, {_duration(seconds)}"
        case events.Submitted():
            return "starting a worker"
        case events.Started():
            return "running"
        case events.Finished(seconds=seconds, status=status):
            return "done by another run" if status == "reused" else f"done in {seconds:.1f} s"
        case events.Retried(tries=tries, cause=cause):
            return f"retrying ({tries} tries used): {cause}"
        case events.Failed(cause=cause):
            return f"FAILED: {cause}"
        case events.Skipped(cause=cause):
            return f"skipped: {cause}"
        case events.Stopped(cause=cause):
            return f"stopped: {cause}"
    return ""


def _warning_text(event: Event) -> str:
    """The text of a warning or retry, which leaves the step's state as it is; else empty."""
    match event:
        case events.Warned(message=message):
            return f"warning: {message}"
        case events.Retrying(what=what, cause=cause, attempt=attempt, seconds=seconds):
            return f"retrying: {what}, {cause}, attempt {attempt}, {_duration(seconds)}"
        case events.ShardRetried(shard=shard, tries=tries, cause=cause):
            return f"shard {shard} is retried ({tries} tries used): {cause}"
    return ""


def _plain(text: str) -> str:
    """The text on one line, with control codes replaced by spaces."""
    return "".join(c if c.isprintable() else " " for c in text)


class PlainDisplay:
    """One line per change, progress at most every five seconds of `clock`."""

    def __init__(
        self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out or sys.stdout
        self._clock = clock
        self._rates: dict[str, Rate] = {}
        self._last: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        key, now = event.key, self._clock()
        # A retry of the driver's own request to the store belongs to no step.
        label = event.step or ("store" if isinstance(event, events.Retrying) else "")
        match event:
            case _ if not label:
                return
            case events.Queued() | events.Submitted():
                return
            case events.Progress():
                text = self._rates.setdefault(key, Rate()).describe(event)
                if now - self._last.setdefault(key, now) >= _LINE_SECONDS:
                    self._last[key] = now
                    self._print(label, text)
            case events.PhaseBegan(phase=phase):
                self._print(label, phase)
            case events.Output(text=text):
                for line in text.splitlines():
                    self._print(label, line)
            case _ if text := _state_text(event) or _warning_text(event):
                if isinstance(event, events.Started):
                    self._rates[key], self._last[key] = Rate(), now
                self._print(label, text)

    def _print(self, label: str, text: str) -> None:
        if isinstance(sys.stdout, Copies):  # of a step that prints in this process
            sys.stdout.break_line()
        self._out.write(f"{label:<16} {_plain(text)}\n")
        self._out.flush()

    def close(self) -> None: ...


@dataclass
class _Row:
    """What a step's row shows, in addition to the step's record."""

    step: StepRecord
    detail: str = ""
    brief: str = ""
    done: float = 0.0
    total: float = 0.0
    changed: int = 0
    pending: bool = False  # its inputs are there, and it waits for something else
    began: float = 0.0
    rate: Rate = field(default_factory=Rate)

    @property
    def state(self) -> str:
        state = self.step.state
        return "pending" if self.pending and state in ("waiting", "unneeded") else state


class LiveDisplay:
    """A table of a run's steps that a thread redraws in place, four times a second.

    It is drawn from the first event of a step that has to run on, with a bar for running steps.
    """

    def __init__(
        self,
        record: RunRecord,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record, self._clock, self._began = record, clock, clock()
        self._rows: dict[str, _Row] = {}
        self._warnings: list[str] = []
        self._changes = 0
        self._phase = ""  # the run's phase before its first step
        self._closed = False
        self._console = console
        self._live: Live | None = None

    def _start(self) -> Console:
        from rich.console import Console
        from rich.live import Live

        self._console = self._console or Console()
        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self.draw, refresh_per_second=4)
            self._live.start()
        return self._console

    def __call__(self, event: Event) -> None:
        if self._closed:
            return
        if not isinstance(event, events.Hit | events.RunStarted | events.RunFinished):
            self._start()
        text = _warning_text(event)
        if event.key:
            self._change(self._row(event.key), event)
            text = f"{event.step}: {text}" if text else ""
        elif isinstance(event, events.PhaseBegan):
            self._phase = event.phase
        if text:
            self._warnings = [*self._warnings, _plain(text)][-_MOST_WARNINGS:]

    def _row(self, key: str) -> _Row:
        if key not in self._rows:
            self._rows[key] = _Row(self._record.steps[key])
        return self._rows[key]

    def _change(self, row: _Row, event: Event) -> None:
        match event:
            case events.Progress():
                row.done, row.total = event.done, event.total
                row.detail = _plain(row.rate.describe(event))
                row.brief = _plain(row.rate.describe(event, brief=True))
            case events.Output(text=text):
                for line in text.splitlines():
                    line = f"{row.step.label:<16} {_plain(line)}"
                    self._start().print(line, markup=False, highlight=False)
            case events.PhaseBegan(phase=phase):
                row.detail = row.brief = _plain(phase)
            case _ if text := _state_text(event):
                if isinstance(event, events.Started):
                    row.began, row.rate, row.total = self._clock(), Rate(), 0.0
                    self._phase = ""
                row.pending = not isinstance(event, events.Queued)
                self._changes += 1
                row.detail = row.brief = _plain(text)
                row.changed = self._changes

    def draw(self) -> Any:
        """The table as it is now, not higher than the terminal."""
        from rich.console import Group
        from rich.text import Text

        console = self._console
        assert console is not None
        width, warnings = console.width, self._warnings
        shown, rest = self._choose(console.height - len(warnings) - 3)
        lines = [Text(line, style="yellow") for line in warnings]
        if rest:
            counts = Counter(_STATES[row.state][2] for row in rest)
            kinds = dict.fromkeys(kind for _, _, kind in _STATES.values())
            texts = ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind])
            lines.append(Text(f"{len(rest)} more: {texts}", style="dim"))
        lines.append(Text(self._summary()))
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Group(self._table(shown, width), *lines)

    def _choose(self, most: int) -> tuple[list[_Row], list[_Row]]:
        """At most `most` rows to show, and the rows to count, both in the graph's order."""
        rows = [self._row(key) for key in list(self._record.steps)]
        first = sorted(rows, key=lambda row: (_ORDER[row.state], -row.changed))
        shown = {id(row) for row in first[: max(most, 1)]}
        return [r for r in rows if id(r) in shown], [r for r in rows if id(r) not in shown]

    def _table(self, rows: list[_Row], width: int) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0))
        bars = width >= _BAR_WIDTH and any(r.state == "running" and r.total for r in rows)
        for row in rows:
            mark, style, _ = _STATES[row.state]
            running = row.state == "running"
            label, text = Text(row.step.label), row.detail if width >= _WIDE else row.brief
            label.truncate(width // 3, overflow="ellipsis")
            if running:
                text += f"  {_duration(self._clock() - row.began)}"
                text += " so far" if width >= _WIDE else ""
            cells: list[Any] = [Text.assemble((mark, style), " ", label)]
            if bars:
                bar = ProgressBar(total=row.total, completed=row.done, width=width // 6)
                cells.append(bar if running and row.total else "")
            table.add_row(*cells, Text(text, style=style, no_wrap=True, overflow="ellipsis"))
        return table

    def _summary(self) -> str:
        record = self._record
        text = f"{len(record.among(*DONE))}/{len(record.steps)} steps"
        for state in ("running", "failed", "unreached", "stopped"):
            count = len(record.among(state))
            text += f"  {count} {_STATES[state][2]}" if count else ""
        text += f"  {self._phase}" if self._phase else ""
        return f"{text}  {_duration(self._clock() - self._began)}"

    def close(self) -> None:
        self._closed = True
        if self._live is not None:
            self._live.stop()


def choose(record: RunRecord) -> PlainDisplay | LiveDisplay:
    """A live table when stdout is a terminal that can redraw, plain lines otherwise."""
    able = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return LiveDisplay(record) if able else PlainDisplay()
