"""`ponente rewind`: the documents behind a step of a training, and the loss of each row.

    ponente rewind runs/train-0123456789 1200
    ponente rewind runs/train-0123456789 1200..1203 --no-loss --json
    ponente rewind runs/train-0123456789 --spikes 3 --page

RUN is the directory of a step that trains, finished or not, or its name in the store. The batch is
read again in the order that training reads it. The losses are those of the last kept checkpoint
before the step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline import InputError
from pipeline.cli import options as engine
from pipeline.cli.context import say
from pipeline.store import storage
from steps.rewind.run import open_run

if TYPE_CHECKING:
    from steps.rewind.batch import Batch
    from steps.rewind.run import Run
    from steps.rewind.source import Origin
    from steps.rewind.spikes import Spike

COLUMNS, _SPIKES = 100, 5
RUN = "directory of a step that trains: a path, gs://, or a name in PONENTE_PREFIX, else ./runs"


def run(arguments: list[str]) -> int:
    """Print the batches; returns the exit status 0."""
    options = _parser().parse_args(arguments)
    if (options.steps is None) == (options.spikes is None):
        raise InputError("rewind: expected a step, as 1200 or 1200..1203, or --spikes; give one")
    opened = open_run(directory_of(options.run))
    rows = {row["step"]: row for row in history(opened.path)}
    found = [] if options.spikes is None else _spikes(list(rows.values()), options)
    wanted = [each.step for each in found] if options.steps is None else _range(options.steps)
    for step in (wanted[0], wanted[-1]) if wanted else ():
        opened.that_did(step)
    if options.without is not None:
        return _without(opened, wanted, options)
    batches = list(_rewound(opened, wanted, rows, {each.step: each for each in found}, options))
    if options.page is not None:
        url = write_page(opened, batches, rows, found, options.page)
        say(f"page: {url}", error=options.json)
    return 0


def directory_of(run: str) -> str:
    """The directory that RUN names: a path or URL, or a name in PONENTE_PREFIX, else ./runs.

    A report shows the name alone, as it cannot know where its reader's store is.
    """
    if not run or "/" in run or os.path.exists(run):
        return run
    return storage.join(os.environ.get("PONENTE_PREFIX", "./runs"), run)


def history(path: str) -> list[dict[str, Any]]:
    """The metrics rows of a run's steps so far; none before its first log."""
    from steps.pages.compare import record_of

    try:
        return record_of(path, path).history
    except InputError:
        return []


def _rewound(
    opened: Run,
    wanted: Sequence[int],
    rows: dict[int, Any],
    found: dict[int, Spike],
    options: argparse.Namespace,
) -> Iterator[Batch]:
    """Each batch, after it was printed."""
    from steps.rewind.batch import Rewinder

    with Rewinder(opened) as rewinder:
        for step in wanted:
            batch = rewinder.batch(step, losses=not options.no_loss)
            row = rows.get(step, {})
            if options.json:
                trained = {name: _json(row.get(name)) for name in ("loss", "grad_norm")}
                spike = _json(dataclasses.asdict(found[step])) if step in found else None
                known = {"format": 1, "trained": trained, "spike": spike}
                say(json.dumps({**known, **dataclasses.asdict(batch)}))
            else:
                for line in lines(batch, row.get("loss")):
                    say(line)
            yield batch


def _without(opened: Run, wanted: Sequence[int], options: argparse.Namespace) -> int:
    """Print the declaration of the run without documents, from the last checkpoint before."""
    from training.config.batch_schedule import rows_read

    text = storage.read_bytes(storage.normalise(options.without)).decode()
    documents = tuple(filter(None, map(str.strip, text.splitlines())))
    if not documents or not wanted:
        raise InputError(f"{options.without}: expected an id a line, and a step; found none")
    found = opened.checkpoint_before(wanted[0])
    if found is None or not found[0]:
        raise InputError(
            f"{opened.path}: no checkpoint before step {wanted[0]:,} is kept to continue from; "
            "choose a later step, or keep more with TrainConfig.keep_every"
        )
    at = found[0]
    above = opened.that_did(at)
    start, end = (rows_read(opened.train, step) for step in (at, opened.train.steps))
    known = {"at": at, "start": start, "end": end, "documents": documents, "from": above.path}
    name = "trained" if above is opened else "before"
    listed = "".join(f"        {each!r},\n" for each in documents)
    declaration = (
        f"without = steps.without(\n    sequences,\n    documents=(\n{listed}    ),\n"
        f"    start={start},\n    end={end},\n)\n"
        f"again = steps.extend(\n    {name}, without, at={at}, optimizer=optimizer, train=train\n"
        ")\n"
        'page = steps.compare((trained, again), names=("with", "without"))'
    )
    if options.json:
        say(json.dumps({"format": 1, **known, "declaration": declaration}))
    else:
        say(f"# for the graph of {opened.path}: put its own names in their places")
        if above is not opened:
            say(f"# `before` is {above.path}, which has this checkpoint")
        say(declaration)
    return 0


def _json(value: Any) -> Any:
    """A value, or each of a dict's, with None for a number that is not finite."""
    if isinstance(value, dict):
        return {name: _json(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _spikes(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[Spike]:
    from steps.rewind.spikes import RULE, spikes

    found = spikes(rows, options.spikes)
    rule = f"{len(found)} of {len(rows):,} steps stood out: {RULE}"
    say("\n".join(textwrap.wrap(rule, COLUMNS)), error=options.json)
    for each in found:
        say(shown(each), error=options.json)
    return found


def shown(spike: Spike) -> str:
    """A spike as a line."""
    name = {"loss": "loss", "grad_norm": "gradient norm"}[spike.column]
    until = f" to {spike.last:,}" if spike.last > spike.step else ""
    return (
        f"step {spike.step:,}{until}: {name} {spike.value:.4g}, before {spike.median:.4g}: "
        f"{spike.deviations:.1f} deviations"
    )


def _range(text: str) -> list[int]:
    first, dots, last = text.replace(",", "").partition("..")
    if not first.isdigit() or not (last.isdigit() if dots else True):
        raise InputError(f"rewind: expected a step as 1200, or steps as 1200..1203, found {text!r}")
    found = list(range(int(first), int(last or first) + 1))
    if not found:
        raise InputError(f"rewind: expected steps in rising order, found {text!r}")
    return found


def heading(batch: Batch, trained: float | None = None) -> str:
    """The step, its size, and its losses."""
    size = f"step {batch.step:,}: {len(batch.rows):,} rows of {batch.length:,} tokens"
    loss = f", loss {trained:.4f} in training" if trained is not None else ""
    if batch.checkpoint is None:
        return f"{size}{loss}"
    again = "no counted token" if batch.loss is None else f"{batch.loss:.4f}"
    return f"{size}{loss}, {again} under the checkpoint of step {batch.checkpoint:,}"


def lines(batch: Batch, trained: float | None) -> Iterator[str]:
    """A batch as text: a line for each row, and two for each document in it."""
    yield heading(batch, trained)
    for row in batch.rows:
        highest = " (highest)" if row.row == batch.worst else ""
        loss = "" if row.loss is None else f"  loss {row.loss:.4f} of {row.counted:,} tokens"
        yield f"row {row.row:,}{loss}{highest}  {row.part}, epoch {row.epoch:,}"[:COLUMNS]
        for each in row.documents:
            yield f"  {where(each.origin, COLUMNS - 2)}"
            yield f"    {each.first}-{each.first + each.tokens - 1}: {each.text}"[:COLUMNS]
            if each.origin.why:
                yield f"    {each.origin.why}"[:COLUMNS]


def where(origin: Origin, most: int = COLUMNS) -> str:
    """A document's id and place, of which the end is shown where it is long."""
    at = "" if origin.row is None else f":{origin.row}"
    text = f"{'' if origin.id is None else f'{origin.id}  '}{origin.file}{at}"
    return text if len(text) <= most else f"…{text[1 - most :]}"


def write_page(
    opened: Run, batches: Sequence[Batch], rows: dict[int, Any], found: Sequence[Spike], file: str
) -> str:
    """Write the page to a file, "" for the reports of the run's store; returns its URL."""
    from steps.pages import page
    from steps.rewind.spikes import RULE

    store, _, name = opened.path.rpartition("/")
    steps = "-".join(dict.fromkeys(f"{batch.step}" for batch in ((*batches[:1], *batches[-1:]))))
    reports = storage.join(store, "reports", f"rewind-{name}-{steps}.html")
    url = storage.normalise(file) if file else reports
    text = page.render(
        "rewind",
        run=name,
        rule=RULE if found else "",
        spikes=[shown(each) for each in found],
        batches=[
            (heading(batch, rows.get(batch.step, {}).get("loss")), batch) for batch in batches
        ],
    )
    storage.write_atomic(url, text.encode())
    return url


def _parser() -> argparse.ArgumentParser:
    parser = engine.verb_parser("rewind", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN)
    add("steps", metavar="STEP", nargs="?", help="a step, counted from 1, or STEP..STEP")
    add(
        "--spikes",
        type=int,
        nargs="?",
        const=_SPIKES,
        metavar="N",
        help=f"the N steps ({_SPIKES}) whose loss or gradient norm stood out most",
    )
    add("--no-loss", action="store_true", help="do not compute losses; needs no checkpoint")
    add(
        "--page",
        nargs="?",
        const="",
        metavar="FILE",
        help="write a page too: to FILE, or to the reports of the store",
    )
    add("--without", metavar="FILE", help="print the same run without the documents in FILE (ids)")
    add("--json", action="store_true", help="print one JSON object for each step")
    return parser
