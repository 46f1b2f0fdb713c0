"""`run`: execute every step that is not up to date."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import itertools
import shlex
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pipeline import events
from pipeline.cli.context import Context, say
from pipeline.cli.display import choose
from pipeline.cli.inspection import entries, recorded, say_facts
from pipeline.cli.stopping import INTERRUPTED, Interrupts, Stopper
from pipeline.cli.streams import survive_closed_streams
from pipeline.errors import Cancelled, InputError, PonenteError
from pipeline.execute.backend import Backend, InlineBackend, refuse_several_hosts, why_small
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.execute.run_record import BUDGET_STOP, KILLED, TERMINATED
from pipeline.execute.spending import Spending
from pipeline.graph.declaration import FULL
from pipeline.graph.facts import Published
from pipeline.graph.order import topological, unique_labels
from pipeline.graph.step import Node
from pipeline.pages.readable import command_line
from pipeline.pages.record import every, runs
from pipeline.plan import facts as step_facts
from pipeline.plan.plan import code_warnings
from pipeline.plan.state import Selection, pick, resolve
from pipeline.store import lease, storage
from pipeline.store.manifest import readable
from pipeline.store.write_check import check_writable


def run(context: Context) -> int:
    """Execute the steps that are not up to date, print the outcome, return the exit status."""
    with survive_closed_streams(), Interrupts() as interrupts:
        try:
            _run(context, interrupts)
        except Cancelled as stopped:
            say(f"{stopped}; run it again to resume", error=True)
        except KeyboardInterrupt:
            say(INTERRUPTED, error=True)
            interrupts.leave()
        else:
            return 0
    ended = context.options.final and interrupts.status == 130
    return 0 if ended else interrupts.status


def bring_up(context: Context) -> Execution:
    """Execute the graph and return the finished execution, for callers in Python."""
    with survive_closed_streams(), Interrupts(alone=False) as interrupts:
        return _run(context, interrupts)


def _run(context: Context, interrupts: Interrupts) -> Execution:
    assert context.experiment is not None
    prefix = context.store.prefix
    say(f"{context.experiment.name}  preset {context.preset}  store {prefix}")
    for line in _changed(context.experiment.presets[context.preset], context.settings):
        say(f"  {line}")
    if storage.is_local(prefix):
        check_writable(prefix)  # always, as it says why nothing can be written
    choice = _left_to_force(context)
    # In UTC and marked so: ids without the letters are of runs before, in their machine's time.
    run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    log = EventLog(prefix, run_id, [])
    retry, options = command_line(context.command), context.options
    execution = Execution(
        context.targets,
        context.store,
        log,
        retry,
        choice,
        options.wait,
        refuse=lambda node: spending.refusal(node) if spending else "",
        unforced=command_line(context.unforced),
    )

    spending = _spending(context, log, execution)
    display = choose(log.record)
    log.listen(display)
    log.emit(
        events.RunStarted(
            run=run_id,
            experiment=context.experiment.name,
            file=context.experiment.file,
            command=context.command,
            store=prefix,
            settings=dataclasses.asdict(context.settings),
            spot=context.capacity.spot,
            graph=[recorded(node) for node in execution.order],
        )
    )
    outcome, needed, page, cause, pages = "failed", [], "", "", []
    try:
        # The summary says what the run may read; what was chosen for deletion before is gone now.
        log.protect()
        lease.wait_for_collector(prefix)
        needed = execution.look()
        looked = time.perf_counter() - context.clock
        for note in execution.notes:
            say(f"warning: {note}")
        _check_code(context, execution)
        if needed:
            if not storage.is_local(prefix) and (weak := check_writable(prefix)):
                say(f"warning: {prefix}: {weak}")
            if spending:
                spending.check(needed, execution.order)
            _check_facts(context, execution, needed)
            _execute(context, log, execution, needed, interrupts, spending)
        outcome, pages = "ok", point_to_pages(context, execution)
    except (KeyboardInterrupt, Cancelled):
        outcome = "interrupted"
        if spending and spending.reached():
            cause = BUDGET_STOP
        elif interrupts.status != 130:
            cause = TERMINATED
        raise
    except PonenteError as error:
        cause = str(error)
        raise
    finally:
        with interrupts.held():
            display.close()
            labels = [node.label for node in execution.executed]
            log.emit(events.RunFinished(outcome, labels, dict(pages), cause))
            log.close()
            page = _write_page(context, run_id) if needed else ""
    if needed:
        say(f"page of this run: {page}")
    _say_outcome(execution, looked if not needed else None)
    for label, url in pages:
        say(f"{label}: {url}")
    return execution


def _left_to_force(context: Context) -> Selection:
    """The choice, without steps to --force that runs of this command built and did not outlive.

    Launched hosts start a command again after a failure or a lost machine, as users do, which must
    not build the step again each time. A run that ended well ends that series. A step is built
    again when its code has changed since, or when a failure named its output.
    """
    choice, prefix = context.choice, context.store.prefix
    if not choice.force:
        return choice
    order = topological(resolve(context.targets, choice))
    forced = {node.key: node for name in choice.force for node in pick(order, name)}
    done: dict[str, str] = {}
    causes = ""
    same = (record for record in runs(prefix) if record.command == context.command)
    for record in itertools.takewhile(lambda record: record.outcome != "ok", same):
        causes += " ".join([record.cause, *(step.cause for step in record.steps.values())])
        for key, node in forced.items():
            step = record.steps.get(key)
            if step is not None and step.state == "executed" and node.directory not in causes:
                done.setdefault(key, record.run)
    labels = unique_labels(order)
    for key, run_id in list(done.items()):
        published = readable(context.store.path(forced[key]))
        if published is None or code_warnings(forced[key], published):
            del done[key]
            continue
        name = shlex.quote(labels[key])
        say(
            f"  --force {name}: run {run_id} of this command, which did not end well, built it; "
            f"--only {name} --force {name} builds it once more"
        )
    left = tuple(node.directory for key, node in forced.items() if key not in done)
    return dataclasses.replace(choice, force=left) if done else choice


def _spending(context: Context, log: EventLog, execution: Execution) -> Spending | None:
    """The account of a run with a budget, which it shares with itself before it was cut off.

    By a kill, by the end of its machine (a run of another host may still seem to run), by SIGTERM,
    or by the budget itself: launched hosts start a command again. A run that was refused before
    any step began spent nothing, and says nothing of those before it.
    """
    prefix = context.store.prefix
    if context.options.budget is None:
        return None

    def predict(node: Node) -> float | None:
        outputs = Published(execution.published, prefix, context.capacity)
        found = step_facts.state([node], outputs).get(node.key)
        with contextlib.suppress(PonenteError, OSError):  # of the store, by what is known later
            return found.seconds() if found is not None else None
        return None

    same = (
        record
        for record in every(prefix)
        if record.command == context.command
        and not (record.outcome == "failed" and not any(s.attempts for s in record.steps.values()))
    )
    cut = itertools.takewhile(
        lambda record: (
            record.ending in (KILLED, "running")
            or (record.outcome == "interrupted" and record.cause in (BUDGET_STOP, TERMINATED))
        ),
        same,
    )
    spot = context.capacity.spot
    return Spending(context.options.budget, log.record, predict, earlier=cut, spot=spot)


def _execute(
    context: Context,
    log: EventLog,
    execution: Execution,
    needed: list[Node],
    interrupts: Interrupts,
    spending: Spending | None,
) -> None:
    executor, cluster = context.options.executor, context.options.cluster
    if cluster is None:
        refuse_several_hosts(needed)
    backend: Backend
    stops = [execution.stop]
    # A small graph runs in this process, in less time than Ray needs to start.
    auto = executor == "auto" and cluster is None
    small = auto and why_small(execution.order, needed, execution.listings)
    if small:
        _phase(log, f"running in this process, without Ray: {small} (--executor ray for Ray)")
    if small or executor == "inline":
        backend = InlineBackend(log, interrupts.preempted)
        stops.append(backend.stop)
    else:
        from pipeline.execute.ray.backend import RayBackend

        _phase(log, "starting Ray" if cluster is None else f"joining Ray at {cluster}")
        try:
            backend = RayBackend(cluster, context.options.wait)
        except SystemExit:
            # While Ray starts, its own handler of SIGTERM is installed and raises this.
            raise interrupts.terminated() from None
    reached = spending.reached if spending else str
    stop = Stopper(context.store.prefix, log, *stops, reached=reached)
    try:
        with stop.reported(), interrupts.stopping(stop):
            execution.run(backend, needed)
    finally:
        backend.close()


def _phase(log: EventLog, phase: str) -> None:
    say(phase)
    log.emit(events.PhaseBegan(phase))


def _write_page(context: Context, run_id: str) -> str:
    from pipeline.pages.page import write

    try:
        return write(context.store.prefix, run_id)
    except (PonenteError, OSError) as error:
        return f"not written ({error})"


def _check_code(context: Context, execution: Execution) -> None:
    if context.options.strict:  # then what an unfinished build would keep counts too
        warnings = [warning for entry in entries(context) for warning in entry.warnings]
    else:
        warnings = [
            warning
            for node in execution.order
            if node.key in execution.published
            for warning in code_warnings(node, execution.published[node.key].manifest)
        ]
    if context.options.strict and warnings:
        raise InputError(
            f"--strict: {'; '.join(warnings)}; raise the step's version, or build it again "
            "with --force"
        )
    for warning in warnings:
        say(f"warning: {warning}")


def _check_facts(context: Context, execution: Execution, needed: list[Node]) -> None:
    """Print the facts of the steps to execute; refuse bad steps before hardware is reserved.

    The facts that are available at once come before those that need the compiler.
    """
    labels = unique_labels(execution.order)
    outputs = Published(execution.published, context.store.prefix, context.capacity)
    stated = found = step_facts.state(needed, outputs)
    for compiles in (False, True):
        if compiles:
            found = step_facts.examine(stated, labels, say)
        # The refusals are in the error, which lists them all.
        say_facts({k: dataclasses.replace(f, refusal="") for k, f in found.items()}, labels)
        step_facts.refuse(found, labels)
        if context.options.no_compile:
            break


def _changed(preset: Any, settings: Any, before: str = "") -> Iterator[str]:
    for field in dataclasses.fields(settings):
        old, new = getattr(preset, field.name), getattr(settings, field.name)
        if old == new and repr(old) == repr(new):  # True equals 1, and is another setting
            continue
        if dataclasses.is_dataclass(new) and type(new) is type(old):
            yield from _changed(old, new, f"{before}{field.name}.")
        else:
            yield f"{before}{field.name} = {new!r} (preset: {old!r})"


def _say_outcome(execution: Execution, looked: float | None) -> None:
    total = len(execution.published)
    if looked is None:
        executed = len(execution.executed)
        steps = "step" if executed == 1 else "steps"
        say(f"{executed} {steps} executed, {total - executed} reused")
    else:
        say(f"all {total} steps up to date; checked in {looked:.2f} s")
    labels = {node.key: node.label for node in execution.order}
    for node in execution.targets:
        for line in execution.published[node.key].headline(labels):
            say(line)


_COPIED_BYTES = 8 << 20  # largest page of which the short path is a copy


def point_to_pages(context: Context, execution: Execution) -> list[tuple[str, str]]:
    """(label, URL) of every target that has a page: `reports/EXPERIMENT[-PRESET]/LABEL.html`.

    Such a file is the same for all runs: a copy of the page whose links still lead into the store,
    or leads there itself; a second target with the same label gets LABEL-2. One that cannot be
    written does not fail the run: the URL is the page's own.
    """
    assert context.experiment is not None
    folder = context.experiment.name + (f"-{context.preset}" if context.preset != FULL else "")
    prefix, pages = context.store.prefix, []
    labels: Counter[str] = Counter()
    for node in execution.targets:
        found = execution.published[node.key]
        page = node.output(found.path, found.manifest).page
        if page:
            labels[node.label] += 1
            suffix = f"-{labels[node.label]}" if labels[node.label] > 1 else ""
            url = storage.join(prefix, "reports", folder, f"{node.label}{suffix}.html")
            inside = page.startswith(f"{prefix}/")
            target = html.escape(f"../../{page.removeprefix(f'{prefix}/')}" if inside else page)
            refresh = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">'
            try:
                whole = storage.read_bytes(page)
                before, head, after = whole.partition(b"<head>")
                # A page of a user's may be large, or have links into itself, which a base breaks.
                if head and len(whole) < _COPIED_BYTES and b'href="#' not in after:
                    copy = before + head + f'<base href="{target}">'.encode() + after
                else:
                    copy = f'{refresh}<a href="{target}">{html.escape(node.label)}</a>\n'.encode()
                storage.write_atomic(url, copy)
            except (PonenteError, OSError):
                url = page
            pages.append((node.label, url))
    return pages
