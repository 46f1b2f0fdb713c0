"""What people see while a run goes on: a live table on a terminal, plain lines elsewhere.

Drawn from events alone. A line is plain text without control codes, and progress is repeated at
most every few seconds, so that a log file stays readable.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from pipeline.step import Node

_LINE_SECONDS = 5.0


class Display(Protocol):
    """A listener of events with a beginning and an end."""

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Rate:
    """Turns progress events of one step into text with a rate and the time left.

    The rate counts from the first event seen, so neither the compilation before it nor what an
    earlier attempt did is in it.
    """

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def describe(self, event: dict[str, Any]) -> str:
        """`done/total unit  rate  time left  note`."""
        done, total, unit = event["done"], event["total"], event["unit"]
        text = f"{done:,.0f}/{total:,.0f} {unit}"
        if self._first is None or done < self._first[0]:
            self._first = (done, event["time"])
        more, seconds = done - self._first[0], event["time"] - self._first[1]
        if more and seconds > 0.5:
            rate = more / seconds
            text += f"  {rate:,.2f} {unit}/s"
            text += f"  {_duration((total - done) / rate)} left" if done < total else ""
        return text + (f"  {event['note']}" if event.get("note") else "")


@dataclass
class _Row:
    label: str
    state: str = "waiting"
    detail: str = ""
    done: float = 0.0
    total: float = 0.0
    rate: Rate = field(default_factory=Rate)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _sentence(event: dict[str, Any]) -> str | None:
    """The state an event puts its step in, as text; None for events that change nothing."""
    kind = event["event"]
    return {
        "hit": f"up to date (took {event.get('seconds', 0):.1f} s when it was built)",
        "queued": "waiting",
        "waiting": f"waiting for {event.get('holder')}, which runs it already",
        "started": "running",
        "finished": f"done in {event.get('seconds', 0):.1f} s",
        "retried": f"trying again ({event.get('tries')} so far): {event.get('cause')}",
        "failed": f"FAILED: {event.get('cause')}",
        "warning": f"warning: {event.get('message')}",
    }.get(kind)


class PlainDisplay:
    """One line per change, progress at most every five seconds."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._rates: dict[str, Rate] = {}
        self._last: dict[str, float] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        """Print the event if it says something new."""
        label, now = event.get("step"), time.monotonic()
        if label is None:
            return
        key = event["key"]
        if event["event"] == "started":
            self._rates[key], self._last[key] = Rate(), now
        if event["event"] == "progress":
            text = self._rates.setdefault(key, Rate()).describe(event)
            if now - self._last.get(key, now) >= _LINE_SECONDS:
                self._last[key] = now
                self._print(label, text)
        elif event["event"] != "queued" and (text := _sentence(event)) is not None:
            self._print(label, text)

    def _print(self, label: str, text: str) -> None:
        self._out.write(f"{label:<16} {text}\n")
        self._out.flush()

    def close(self) -> None:
        """Nothing to undo."""


class LiveDisplay:
    """A table that is redrawn in place: a row per step, with a bar for the ones that run."""

    def __init__(self, nodes: list[Node]) -> None:
        from rich.live import Live

        self._rows = {node.key: _Row(node.label) for node in nodes}
        self._warnings: list[str] = []
        self._live = Live(self._draw(), refresh_per_second=4, transient=False)
        self._live.start()

    def __call__(self, event: dict[str, Any]) -> None:
        """Change the step's row."""
        row = self._rows.get(event.get("key", ""))
        if row is None:
            return
        kind = event["event"]
        if kind == "warning":
            self._warnings.append(f"{row.label}: {event['message']}")
        elif kind == "progress":
            row.done, row.total = event["done"], event["total"]
            row.detail = row.rate.describe(event)
        elif (text := _sentence(event)) is not None:
            row.state, row.detail = kind, text
        self._live.update(self._draw())

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        styles = {"hit": "dim", "finished": "green", "failed": "red", "started": "cyan"}
        marks = {"hit": "=", "finished": "+", "failed": "!", "started": ">"}
        for row in self._rows.values():
            running = row.state == "started" and row.total > 0
            bar = ProgressBar(total=row.total, completed=row.done, width=24) if running else ""
            mark = Text(marks.get(row.state, "."), style=styles.get(row.state, "dim"))
            table.add_row(mark, row.label, bar, Text(row.detail, style=styles.get(row.state, "")))
        return Group(table, *[Text(line, style="yellow") for line in self._warnings[-5:]])

    def close(self) -> None:
        """Stop redrawing; the last table stays on the screen."""
        self._live.update(self._draw())
        self._live.stop()


def choose(nodes: list[Node]) -> Display:
    """A live table when stdout is a terminal, plain lines otherwise."""
    return LiveDisplay(nodes) if sys.stdout.isatty() else PlainDisplay()
