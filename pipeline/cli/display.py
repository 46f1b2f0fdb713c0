"""The display of a run: a live table on a terminal, plain lines elsewhere.

It reads events alone. A line is plain text without control codes, and progress is printed at most
every few seconds, so that a log file stays readable. The table never has more rows than the
terminal: failed and running steps come first.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from pipeline.execute.screen import Copies
from pipeline.graph.step import Node

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LINE_SECONDS = 5.0
_MOST_WARNINGS = 5
# Smallest widths in columns for a progress bar, and for the full text of a step's progress.
_BAR_WIDTH, _WIDE = 60, 80
# State -> (mark, color, text in counts). The first states are shown when not all rows fit.
_STATES = {
    "failed": ("!", "red", "failed"),
    "started": (">", "cyan", "running"),
    "retried": (">", "yellow", "to be retried"),
    "waiting": (">", "yellow", "waiting for another run"),
    "waiting_for_resources": (">", "yellow", "waiting for hardware"),
    "submitted": (">", "cyan", "starting"),
    "stopped": ("!", "yellow", "stopped"),
    "finished": ("+", "green", "done"),
    "skipped": ("-", "yellow", "skipped"),
    "queued": (".", "dim", "waiting"),
    "hit": ("=", "dim", "up to date"),
}
_ORDER = {state: number for number, state in enumerate(_STATES)}


class Display(Protocol):
    """A listener of events that can be closed."""

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Rate:
    """Turns progress events of one step into text with a rate and the time left.

    The rate counts from the first event, so it excludes the compilation before that event and the
    work of earlier attempts.
    """

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def describe(self, event: dict[str, Any], *, brief: bool = False) -> str:
        """`done/total unit  rate  time left  note`; brief: `percent  time left`."""
        done, total, unit = event["done"], event["total"], event["unit"]
        if self._first is None or done < self._first[0]:
            self._first = (done, event["time"])
        more, seconds = done - self._first[0], event["time"] - self._first[1]
        rate = more / seconds if more and seconds > 0.5 else 0.0
        left = f"  {_duration((total - done) / rate)} left" if rate and done < total else ""
        if brief:
            return (f"{done / total:.0%}" if total else f"{done:,.0f} {unit}") + left
        text = f"{done:,.0f}/{total:,.0f} {unit}"
        text += f"  {rate:,.2f} {unit}/s" if rate else ""
        return text + left + (f"  {event['note']}" if event.get("note") else "")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _state_text(event: dict[str, Any]) -> str | None:
    """The step's state after an event, as text; None if the event does not change the state."""
    reused = event.get("status") == "reused"
    how = "by another run" if reused else f"in {event.get('seconds', 0):.1f} s"
    return {
        "hit": f"up to date (took {event.get('seconds', 0):.1f} s when it was built)",
        "queued": "waiting",
        "waiting": f"waiting for {event.get('holder')}, which already runs it",
        "waiting_for_resources": f"{event.get('cause')}, {_duration(event.get('seconds', 0))}",
        "submitted": "starting a worker",
        "started": "running",
        "finished": f"done {how}",
        "retried": f"retrying ({event.get('tries')} tries used): {event.get('cause')}",
        "failed": f"FAILED: {event.get('cause')}",
        "skipped": f"skipped: {event.get('cause')}",
        "stopped": f"stopped: {event.get('cause')}",
    }.get(event["event"])


def _warning_text(event: dict[str, Any]) -> str | None:
    """The text of a warning or retry, which leaves the step's state as it is; else None."""
    return {
        "warning": f"warning: {event.get('message')}",
        "retrying": (
            f"retrying: {event.get('what')}, {event.get('cause')}, attempt {event.get('attempt')}, "
            f"{_duration(event.get('seconds', 0))}"
        ),
        "shard_retried": (
            f"shard {event.get('shard')} is retried ({event.get('tries')} tries used): "
            f"{event.get('cause')}"
        ),
    }.get(event["event"])


def _plain(text: str) -> str:
    """The text on one line, with control codes replaced by spaces."""
    return "".join(c if c.isprintable() else " " for c in text)


class PlainDisplay:
    """One line per change, progress at most every five seconds.

    Args:
        out: where lines go.
        clock: the current time in seconds, which limits how often progress is printed.
    """

    def __init__(
        self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out or sys.stdout
        self._clock = clock
        self._rates: dict[str, Rate] = {}
        self._last: dict[str, float] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        """Print a line for the event unless it comes too soon or needs none."""
        kind, now = event["event"], self._clock()
        # A retry of the driver's own request to the store belongs to no step.
        label = event.get("step") or ("store" if kind == "retrying" else None)
        if label is None:
            return
        key = event.get("key", "")
        if kind == "started":
            self._rates[key], self._last[key] = Rate(), now
        if kind == "progress":
            text = self._rates.setdefault(key, Rate()).describe(event)
            if now - self._last.setdefault(key, now) >= _LINE_SECONDS:
                self._last[key] = now
                self._print(label, text)
        elif kind == "phase":
            self._print(label, event["phase"])
        elif kind == "output":
            for line in event["text"].splitlines():
                self._print(label, line)
        elif (
            kind not in ("queued", "submitted")
            and (text := _state_text(event) or _warning_text(event)) is not None
        ):
            self._print(label, text)

    def _print(self, label: str, text: str) -> None:
        if isinstance(sys.stdout, Copies):  # of a step that prints in this process
            sys.stdout.break_line()
        self._out.write(f"{label:<16} {_plain(text)}\n")
        self._out.flush()

    def close(self) -> None:
        """Nothing to undo."""


@dataclass
class _Row:
    label: str
    state: str = "queued"
    detail: str = ""
    brief: str = ""
    done: float = 0.0
    total: float = 0.0
    changed: int = 0
    began: float = 0.0
    rate: Rate = field(default_factory=Rate)


class LiveDisplay:
    """A table that is redrawn in place: a row per step, with a bar for running steps.

    A separate thread redraws it four times a second from the rows that events update.

    Args:
        nodes: the steps of the run.
        console: the terminal to draw on.
        clock: the current time in seconds, for how long steps have been running.
    """

    def __init__(
        self,
        nodes: list[Node],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._clock = clock
        self._began = clock()
        self._rows = {node.key: _Row(node.label) for node in nodes}
        self._warnings: list[str] = []
        self._changes = 0
        self._phase = ""  # the run's phase before its first step
        self._console = console or Console()
        self._live = Live(
            console=self._console, get_renderable=self.draw, refresh_per_second=4, transient=False
        )
        self._live.start()

    def __call__(self, event: dict[str, Any]) -> None:
        """Change the step's row."""
        row, kind = self._rows.get(event.get("key", "")), event["event"]
        if row is None:
            if kind == "phase":
                self._phase = event["phase"]
            elif kind == "retrying" and (text := _warning_text(event)) is not None:
                self._warnings = [*self._warnings, _plain(text)][-_MOST_WARNINGS:]
            return
        self._phase = "" if kind == "started" else self._phase
        if kind == "progress":
            row.done, row.total = event["done"], event["total"]
            row.detail = _plain(row.rate.describe(event))
            row.brief = _plain(row.rate.describe(event, brief=True))
        elif kind == "output":
            for line in event["text"].splitlines():
                self._console.print(
                    f"{row.label:<16} {_plain(line)}", markup=False, highlight=False
                )
        elif kind == "phase":
            row.detail = row.brief = _plain(event["phase"])
        elif (text := _state_text(event)) is not None:
            if kind == "started":
                row.began, row.rate, row.total = self._clock(), Rate(), 0.0
            self._changes += 1
            row.detail = row.brief = _plain(text)
            row.state, row.changed = kind, self._changes
        elif (text := _warning_text(event)) is not None:
            self._warnings = [*self._warnings, _plain(f"{row.label}: {text}")][-_MOST_WARNINGS:]

    def draw(self) -> Any:
        """The table as it is now, not higher than the terminal."""
        from rich.console import Group
        from rich.text import Text

        width, warnings = self._console.width, self._warnings
        shown, rest = self._choose(self._console.height - len(warnings) - 3)
        lines = [Text(line, style="yellow") for line in warnings]
        if rest:
            counts = Counter(row.state for row in rest)
            kinds = ", ".join(f"{counts[s]} {_STATES[s][2]}" for s in _STATES if counts[s])
            lines.append(Text(f"{len(rest)} more: {kinds}", style="dim"))
        lines.append(Text(self._summary()))
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Group(self._table(shown, width), *lines)

    def _choose(self, most: int) -> tuple[list[_Row], list[_Row]]:
        """At most `most` rows to show, and the rows to count, both in the graph's order."""
        rows = list(self._rows.values())
        first = sorted(rows, key=lambda row: (_ORDER[row.state], -row.changed))
        shown = {id(row) for row in first[: max(most, 1)]}
        return [r for r in rows if id(r) in shown], [r for r in rows if id(r) not in shown]

    def _table(self, rows: list[_Row], width: int) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0))
        bars = width >= _BAR_WIDTH and any(row.state == "started" and row.total for row in rows)
        for row in rows:
            mark, style, _ = _STATES[row.state]
            running = row.state == "started"
            label, text = Text(row.label), row.detail if width >= _WIDE else row.brief
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
        counts = Counter(row.state for row in self._rows.values())
        text = f"{counts['hit'] + counts['finished']}/{len(self._rows)} steps"
        for state in ("started", "failed", "skipped", "stopped"):
            text += f"  {counts[state]} {_STATES[state][2]}" if counts[state] else ""
        text += f"  {self._phase}" if self._phase else ""
        return f"{text}  {_duration(self._clock() - self._began)}"

    def close(self) -> None:
        """Stop redrawing; the last table stays on the screen."""
        self._live.stop()


def choose(nodes: list[Node]) -> Display:
    """A live table when stdout is a terminal that can redraw, plain lines otherwise."""
    able = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return LiveDisplay(nodes) if able else PlainDisplay()
