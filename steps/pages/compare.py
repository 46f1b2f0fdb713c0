"""Several runs on one page: figures, differences of configuration, and overlaid curves.

    ponente compare RUN RUN ... --output compare.html

A run is the directory of a `train` step, finished or not, or a directory with a `metrics.jsonl`,
which may still be growing; `name=directory` names it. A graph makes the same page with the step
`compare`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline import InputError, Result, StepContext, step
from pipeline.cli.context import say
from pipeline.pages.readable import duration, flat
from pipeline.plan.lineage import lineage
from pipeline.store import storage
from pipeline.store.manifest import load
from steps.artifacts import Checkpoint, Report
from steps.pages.charts import bars_chart, overlaid, training_charts
from steps.pages.run_record import TrainingRun, of_checkpoint, of_directory, split_of
from steps.scaling_law.forecast import scored as scored_forecasts

if TYPE_CHECKING:
    from training.metrics.differences import Difference

ABSENT = "-"


def _check(arguments: Mapping[str, Any]) -> None:
    runs, names = arguments["runs"], arguments["names"]
    if names and len(names) != len(runs):
        raise InputError(f"compare: {len(runs)} runs and {len(names)} names; give each run one")
    _check_names(names or range(len(runs)))


def _check_names(names: Sequence[Any]) -> None:
    if not names or len(set(names)) < len(names):
        raise InputError(f"compare: expected runs of different names, got {names}")


@step(output=Report, version=1, reads_lineage=True, check=_check)
def compare(
    run: StepContext, runs: tuple[Checkpoint, ...], *, names: tuple[str, ...] = ()
) -> Result:
    """The HTML page of several training runs side by side.

    Args:
        runs: finished runs.
        names: one for each run; by default the labels of the steps, numbered if they repeat.
    """
    called = names or _numbered([each.manifest.label for each in runs])
    records = [
        of_checkpoint(checkpoint, name, lineage([checkpoint.path]))
        for checkpoint, name in zip(runs, called, strict=True)
    ]
    with run.shard("page") as directory:
        text = render(records)
        storage.write_atomic(storage.join(directory, "index.html"), text.encode())
    found = [{"split": split, **one.to_json()} for split, one in noise(records)]
    return {
        "headline": [f"compared {', '.join(record.name for record in records)}", *within(records)],
        "differences": found,
    }


def render(
    records: Sequence[TrainingRun],
    links: Sequence[tuple[str, str]] = (),
    beside: Sequence[tuple[str, str]] = (),
) -> str:
    """The page; with `links` to other pages, and to comparisons with the runs `beside` these."""
    from steps.pages import page

    names = [record.name for record in records]
    _check_names(names)
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        for prompt, rows in record.samples_by_prompt().items():
            samples.setdefault(prompt, {})[record.name] = rows
    accounts = [(record.name, record.account()) for record in records]
    known = [(name, account) for name, account in accounts if account is not None]
    return page.render(
        "compare",
        names=names,
        figures=figures(records),
        differences=differences(records),
        scored=scored(records),
        noise=noise_table(records),
        samples=samples,
        curves=training_charts(records[0], accounts[0][1])
        if len(records) == 1
        else overlaid(records),
        links=links,
        beside=beside,
        times=[("Wall time by activity", bars_chart(known))] if known else [],
    )


def figures(records: Sequence[TrainingRun]) -> list[list[str]]:
    """Figures of the finished runs: a row per figure that at least one run has, a column per run.

    The best value of a row is marked where `_BETTER` defines whether more or less is better.
    """
    from steps.pages.page import Best

    found = [_figures(record) for record in records]
    rows = [["figure", *(record.name for record in records)]]
    for name in dict.fromkeys(name for each in found for name in each):
        cells = [each.get(name, (math.nan, ABSENT)) for each in found]
        values = {value for value, _ in cells if math.isfinite(value)}
        better = _BETTER.get(name.partition(",")[0]) if len(values) > 1 else None
        best = better(values) if better else None
        rows.append([name, *(Best(text) if value == best else text for value, text in cells)])
    return rows


_BETTER: dict[str, Callable[[set[float]], float]] = {
    **dict.fromkeys(("training loss", "loss", "bits per byte"), min),
    **dict.fromkeys(("tokens per second", "MFU", "HFU", "goodput"), max),
}


def _figures(record: TrainingRun) -> dict[str, tuple[float, str]]:
    """Name -> (value, text)."""
    found: dict[str, tuple[float, str]] = {}

    def add(name: str, value: float, form: str) -> None:
        found[name] = (value, form.format(value))

    if record.history:
        add("steps", int(record.history[-1]["step"]), "{:,}")
        add("tokens in the loss", sum(r.get("tokens", 0) for r in record.history), "{:,.0f}")
        add("training loss", _late(record.history, "loss"), "{:.4f}")
    for name in record.splits:
        row = record.scores(name)[-1]
        add(f"loss, {name}", row["loss"], "{:.4f}")
        if math.isfinite(row.get("bits_per_byte", math.nan)):
            add(f"bits per byte, {name}", row["bits_per_byte"], "{:.4f}")
    for name, column, form in (
        ("tokens per second", "tokens_per_second", "{:,.0f}"),
        ("MFU, causal", "mfu", "{:.1%}"),
        ("HFU", "hfu", "{:.1%}"),
    ):
        values = sorted(row[column] for row in record.history if column in row)
        if values:
            add(f"{name}, median", values[len(values) // 2], form)
    skipped = record.history[-1].get("skipped", 0) if record.history else 0
    if skipped:
        add("skipped steps", skipped, "{:,.0f}")
    account = record.account()
    if account is not None:
        found["wall time, pauses included"] = (account.total, duration(account.total))
        add("goodput, pauses included", account.goodput, "{:.1%}")
    return found


def noise(records: Sequence[TrainingRun]) -> list[tuple[str, Difference]]:
    """By split, the differences of the last losses, see `training.metrics.differences`."""
    from training.metrics.differences import differences

    splits = dict.fromkeys(name for record in records for name in record.splits)
    return [
        (split, one)
        for split in splits
        for one in differences([r.measured(split) for r in records if split in r.splits])
    ]


def noise_table(records: Sequence[TrainingRun]) -> list[list[str]]:
    """A row per difference of losses, from the runs with the lowest."""
    rows = [["split", "loss of", "above", "difference", "standard error", "how", ""]]
    for split, one in noise(records):
        names, error = (", ".join(each) for each in (one.runs, one.than)), f"{one.error:.4f}"
        figures = [f"{one.value:+.4f}", error if math.isfinite(one.error) else ABSENT, one.how]
        rows.append([split, *names, *figures, "within noise" if one.within_noise else ""])
    return rows


def within(records: Sequence[TrainingRun]) -> list[str]:
    """A line per difference that is within noise."""
    found = [(split, one) for split, one in noise(records) if one.within_noise]
    return [f"{split}: within noise of {', '.join(one.than)}: {one}" for split, one in found]


def scored(records: Sequence[TrainingRun]) -> str:
    """How much of each split the last evaluations read, as text."""
    last = (record.scores(name)[-1] for record in records for name in record.splits)
    read = {(split_of(row), row["tokens"]): None for row in last if "tokens" in row}
    return ", ".join(f"{tokens:,} tokens of {split}" for split, tokens in read)


def _late(rows: Sequence[dict[str, Any]], column: str) -> float:
    """Mean over the last 2 % of the rows with a finite value; the loss of one step is noisy."""
    found = [v for row in rows if (v := row.get(column)) is not None and math.isfinite(v)]
    last = found[-max(1, len(found) // 50) :]
    return math.fsum(last) / len(last) if last else math.nan


def differences(records: Sequence[TrainingRun]) -> list[list[str]]:
    """A row per setting whose value is not the same in all runs.

    A partial record that lacks a setting is not compared: the run may still have its value.
    """
    trees = [flat(record.config) for record in records]
    rows = [["setting", *(record.name for record in records)]]
    for name in dict.fromkeys(name for tree in trees for name in tree):
        values = [tree.get(name, ABSENT) for tree in trees]
        compared = [
            value
            for record, tree, value in zip(records, trees, values, strict=True)
            if name in tree or not record.partial
        ]
        if any(value != compared[0] for value in compared):
            rows.append([name, *(str(value) for value in values)])
    return rows


def _numbered(names: Sequence[str]) -> list[str]:
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} {number}" for number, name in enumerate(names, 1)]


def record_named(argument: str) -> TrainingRun:
    """The run that an argument `directory` or `name=directory` names."""
    name, named, url = argument.partition("=")
    if not named or "/" in name:  # the "=" belongs to a path
        name, url = "", argument
    url = storage.normalise(url)
    return record_of(url, name or url.rpartition("/")[2])


def record_of(
    url: str, name: str, entries: Callable[[str], Iterable[dict[str, Any]]] | None = None
) -> TrainingRun:
    """The run in the directory `url`; `entries` as for `of_directory`."""
    try:
        manifest = load(url)
    except NotADirectoryError as error:
        raise InputError(f"{url}: expected a directory, found a file") from error
    if manifest is None:
        return of_directory(url, name, entries)
    if "record" not in [shard.name for shard in manifest.shards]:
        raise InputError(f"{url}: expected a run of training, found an output of {manifest.label}")
    return of_checkpoint(Checkpoint(url, manifest), name, lineage([url]))


def main(arguments: Sequence[str]) -> int:
    """`ponente compare`: write the page of the runs on the command line; returns the status."""
    flags = argparse.ArgumentParser(
        prog="ponente compare", description="Several training runs on one page."
    )
    flags.add_argument("runs", nargs="*", help="directory, or name=directory")
    flags.add_argument("--output", default="compare.html")
    flags.add_argument("--forecasts", metavar="STORE", help="only list a store's forecasts, scored")
    options = flags.parse_args(arguments)
    if options.forecasts:
        for line in scored_forecasts(storage.normalise(options.forecasts)):
            say(line)
        return 0
    if not options.runs:
        flags.error("the following arguments are required: runs")
    output = storage.normalise(options.output)
    records = [record_named(each) for each in options.runs]
    storage.write_atomic(output, render(records).encode())
    for line in within(records):
        say(line)
    say(f"page: {output}")
    return 0
