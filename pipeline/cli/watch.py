"""`status --watch` and `stop`: follow or stop a run from any machine, through its store."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from pipeline.cli.context import Context, say
from pipeline.errors import InputError
from pipeline.execute.stop_request import LOOK_SECONDS, request_stop
from pipeline.pages.record import STATES, RunRecord, StepRecord, read, runs

_POLL_SECONDS = 5.0


def watch(context: Context, seconds: float = _POLL_SECONDS) -> int:
    """Show the experiment's newest run until it has ended; status 0 if its outcome is "ok", else 1.

    A terminal shows one screen that is redrawn; other outputs get a line for every change.
    """
    run = _runs_of(context)[0].run
    with _screen() as show:
        while True:
            record = read(context.store.prefix, run)
            show(_lines(record))
            if record.ending != "running":
                return 0 if record.outcome == "ok" else 1
            time.sleep(seconds)


def stop(context: Context) -> int:
    """Request that a running run of the experiment saves and ends.

    Raises:
        InputError: when none runs, or several do and none is named.
    """
    found = [record.run for record in _runs_of(context) if record.ending == "running"]
    wanted = [run for run in found if run in context.words] if context.words else found
    running = f"running are {', '.join(found)}" if found else "none is running"
    if not wanted:
        name = " ".join(context.words) or f"a run in {context.store.prefix}"
        raise InputError(f"stop: cannot stop {name}: {running}")
    if len(wanted) > 1:
        raise InputError(f"stop: expected the name of one run; {running}")
    request_stop(context.store.prefix, wanted[0])
    say(
        f"run {wanted[0]} will stop: its driver checks every {LOOK_SECONDS:.0f} s, finishes work "
        "in flight and saves a checkpoint; `status --watch` shows it"
    )
    return 0


def _runs_of(context: Context) -> list[RunRecord]:
    """The experiment's runs in the store, newest first. Raises `InputError` when there is none."""
    assert context.experiment is not None
    name = context.experiment.name
    found = [record for record in runs(context.store.prefix) if record.name == name]
    if not found:
        raise InputError(f"found no run of {name} in {context.store.prefix}; check --prefix")
    return found


def _lines(record: RunRecord) -> list[str]:
    known = [step for step in record.steps.values() if step.state != "unneeded"]
    width = max((len(step.label) for step in known), default=0)
    head = f"run {record.run}: {record.ending}{f', {record.cause}' if record.cause else ''}"
    return [head, *(f"{step.label:<{width}}  {_state(step)}" for step in known)]


def _state(step: StepRecord) -> str:
    detail = step.progress if step.state == "running" else step.cause
    waits = step.reason if step.state == "waiting" and not detail else ""
    return ", ".join(filter(None, (STATES[step.state], detail, waits)))


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[Sequence[str]], None]]:
    """A function that shows lines and replaces those it showed before."""
    if not sys.stdout.isatty():
        shown: set[str] = set()

        def show(lines: Sequence[str]) -> None:
            for line in lines:
                if line not in shown:
                    say(f"{time.strftime('%H:%M:%S')}  {line}")
            shown.clear()
            shown.update(lines)

        yield show
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda lines: live.update(Text("\n".join(lines)), refresh=True)
