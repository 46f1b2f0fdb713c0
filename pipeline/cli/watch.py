"""`status --watch`, `stop`, `logs`: follow or stop a run from any machine, through its store."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from pipeline.cli.context import Context, say
from pipeline.cli.stopping import LOOK_SECONDS, request_stop
from pipeline.errors import InputError
from pipeline.execute.logs import processes
from pipeline.execute.run_record import KILLED, STATES, RunRecord, StepRecord
from pipeline.graph.declaration import Declaration
from pipeline.pages.readable import moment
from pipeline.pages.record import Follower, batches, read
from pipeline.store import lease, storage
from pipeline.store.append import Tail
from pipeline.store.process import host_name, this_host
from pipeline.store.run_summary import run_ids
from pipeline.store.shards import ATTEMPTS

_POLL_SECONDS = 5.0
_LOG_SECONDS = 2.0


def watch(context: Context, seconds: float = _POLL_SECONDS) -> int:
    """Show the experiment's newest run until it has ended; status 0 if its outcome is "ok", else 1.

    A terminal shows one screen that is redrawn; other outputs get a line for every change.
    """
    newest = _own_runs(context, lambda record: True)[0]
    follower = Follower(context.store.prefix, newest.run)
    with _screen() as show:
        while True:
            record = follower.look()
            show(_lines(record))
            if record.ending != "running":
                return 0 if record.outcome == "ok" else 1
            time.sleep(seconds)


def stop(context: Context) -> int:
    """Request that a running run of the experiment saves and ends."""
    found = _named_runs(context)
    if not any(record.alive for record in found):
        found += _own_runs(context, lambda record: record.alive)
    found = list({record.run: record for record in found}.values())
    alive = [record.run for record in found if record.alive]
    running = f"running are {', '.join(alive)}" if alive else "none is running"
    named = [record for record in found if record.run in context.words or not context.words]
    wanted = [record.run for record in named if record.alive]
    if not named:
        raise InputError(f"stop: cannot stop {' '.join(context.words)}: {running}")
    if not wanted:
        raise InputError(f"stop: {_end(named[0])}; nothing to stop, {running}")
    if len(wanted) > 1:
        raise InputError(f"stop: expected the name of one run; {running}")
    request_stop(context.store.prefix, wanted[0])
    say(
        f"run {wanted[0]} will stop: its driver checks every {LOOK_SECONDS:.0f} s, finishes work "
        "in flight and saves a checkpoint; `status --watch` shows it"
    )
    return 0


def _end(record: RunRecord) -> str:
    if record.outcome:
        return f"run {record.run} ended at {moment(record.ended or record.last)}: {record.ending}"
    return f"run {record.run}: its process ended without an exit record at {moment(record.last)}"


def _named_runs(context: Context) -> list[RunRecord]:
    """The runs named after the verb that are of the experiment, however old they are."""
    assert context.experiment is not None
    prefix = context.store.prefix
    there = run_ids(prefix) if context.words else {}
    found = [read(prefix, word) for word in context.words if word in there]
    return [record for record in found if is_run_of(record, context.experiment)]


def _own_runs(context: Context, wanted: Callable[[RunRecord], bool]) -> list[RunRecord]:
    """The experiment's runs in the store, newest first, at least up to one that is `wanted`.

    All of them when none is. Raises `InputError` when there is none.
    """
    assert context.experiment is not None
    experiment, prefix = context.experiment, context.store.prefix
    found: list[RunRecord] = []
    others: set[str] = set()
    for batch in batches(prefix):
        found += [record for record in batch if is_run_of(record, experiment)]
        others |= {record.file for record in batch if record.name == experiment.name}
        if any(map(wanted, found)):
            break
    if not found:
        other = f" (but of {', '.join(sorted(others))})" if others else ""
        raise InputError(f"found no run of {experiment.name} in {prefix}{other}; check --prefix")
    return found


def is_run_of(record: RunRecord, experiment: Declaration[Any]) -> bool:
    """Whether a run is of the experiment: of its name, and its file.

    On one host files differ by their paths, elsewhere by their names.
    """
    mine, other = PurePath(experiment.file), PurePath(record.file)
    if host_name(record.driver) != host_name({"host": this_host()}):
        mine, other = PurePath(mine.name), PurePath(other.name)
    return record.name == experiment.name and (not record.file or mine == other)


def _lines(record: RunRecord) -> list[str]:
    known = [step for step in record.steps.values() if step.state != "unneeded"]
    width = max((len(step.label) for step in known), default=0)
    head = f"run {record.run}: {record.ending}{f', {record.cause}' if record.cause else ''}"
    lines = [head]
    for step in known:
        detail = step.progress if step.state == "running" else step.cause
        waits = step.reason if step.state == "waiting" and not detail else ""
        text = ", ".join(filter(None, (state_of(step, record), detail, waits)))
        lines.append(f"{step.label:<{width}}  {text}")
    return lines


def state_of(step: StepRecord, record: RunRecord) -> str:
    """A step's state in a run, in words: nothing runs in a run that was killed."""
    cut = record.ending == KILLED and step.state in ("running", "waiting")
    return STATES["stopped" if cut else step.state]


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


def logs(context: Context) -> int:
    """Print the logs of a step's last attempt; with --follow until no attempt runs."""
    node = context.step()
    path = context.store.path(node)

    def running() -> bool:
        holder = lease.holder(path)
        return holder is not None and holder.responsive

    while not (found := _newest(path)[1]) and context.options.follow and running():
        time.sleep(_LOG_SECONDS)
    if not found:
        raise InputError(f"{node.label}: found no log of an attempt under {path}")
    if context.options.follow:
        follow(path, running)
        return 0
    for url in found:
        say(f"==> {url}")
        say(Tail(url).more().decode(errors="replace"))
    return 0


def follow(path: str, running: Callable[[], bool], seconds: float = _LOG_SECONDS) -> None:
    """Print the logs of the step in `path` as they grow, those of later attempts included."""
    tails: dict[str, Tail] = {}
    shown = ""
    while True:
        more = running()
        attempt, found = _newest(path)
        if attempt != shown:
            say(f"==> {attempt}")
            shown, tails = attempt, {}
        for url in found:
            text = tails.setdefault(url, Tail(url)).more().decode(errors="replace")
            name = url.rpartition("/")[2].removesuffix(".txt")
            prefix = f"{name} | " if len(found) > 1 else ""
            for line in text.splitlines():
                say(f"{prefix}{line}")
        if not more:
            return
        time.sleep(seconds)


def _newest(path: str) -> tuple[str, list[str]]:
    attempts = storage.join(path, ATTEMPTS)
    for name in reversed(storage.list_names(attempts)):
        if found := processes(storage.join(attempts, name)):
            return storage.join(attempts, name), found
    return "", []
