"""A page about a run: curves, where the time went, samples, the graph, the configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline import Result, StepContext, step
from pipeline.identity.fingerprint import plain
from pipeline.plan.lineage import lineage
from pipeline.store import storage
from steps.artifacts import Checkpoint, Completions, Report, Scores

if TYPE_CHECKING:
    from steps.reporting.run_record import RunRecord
    from training.goodput import Account


@step(output=Report, version=1, reads_lineage=True)
def report(run: StepContext, model: Checkpoint, scores: Scores, text: Completions) -> Result:
    """The HTML report of a training run."""
    from steps.reporting import page
    from steps.reporting.run_record import of_checkpoint

    ancestors = lineage([model.path, scores.path, text.path])
    record = of_checkpoint(model, model.manifest.label, ancestors)
    account = record.account()
    written = [(c["prompt"], c["completion"]) for c in text.result["completions"]]
    rendered = page.render(
        "ponente run",
        f"trained on {model.result['measured']['hardware']}, key {model.manifest.key[:20]}",
        [
            ("", page.cards(cards(model, scores, record, account))),
            ("Scores", page.table(sets_table(scores)) + page.table(tasks_table(scores))),
            ("Training", page.charts(training_charts(record, account))),
            ("Where the time went", page.charts(time_charts(account))),
            ("", page.table(attempts_table(account))),
            ("What the model writes", page.samples(written)),
            ("What it wrote on the way", page.samples_over_time(record.samples)),
            ("Steps", page.graph(ancestors)),
            ("Data", page.table(_data_table(model.sequences.cache.result["splits"]))),
            ("Configuration", page.configuration(ancestors)),
        ],
    )
    with run.shard("page") as directory:
        storage.write_atomic(storage.join(directory, "index.html"), rendered.encode())
    url = storage.join(directory, "index.html")
    return {
        "headline": [
            *model.result["headline"],
            *text.result["headline"],
            *headlines(url),
        ]
    }


def headlines(url: str) -> list[str]:
    """Where a page is and how to look at it."""
    look = f"look at it with: python -m webbrowser -t file://{url}"
    return [f"report: {url}", look if storage.is_local(url) else "download it to look at it"]


def training_charts(record: RunRecord, account: Account | None) -> list[tuple[str, str]]:
    """(caption, SVG) of everything that has a value a step."""
    from steps.reporting import charts

    began = [span.attempt.first_step for span in account.spans[1:]] if account else []
    restarts = [step for step in began if step is not None]
    return [
        ("Loss", charts.loss_chart(record, restarts)),
        ("Learning rate", charts.rate_chart(record)),
        *charts.norm_charts(record),
        ("Throughput", charts.throughput_chart(record)),
        ("Utilisation", charts.utilisation_chart(record)),
        ("Waiting for data", charts.wait_chart(record)),
        ("Peak memory", charts.memory_chart(record)),
    ]


def time_charts(account: Account | None) -> list[tuple[str, str]]:
    """(caption, SVG) of the run's wall time; none without a journal."""
    from steps.reporting.time_charts import timeline_chart, waterfall_chart

    if account is None or not account.total:
        return []
    caption = f"Goodput {account.goodput:.1%}: the share of the wall time that went to steps"
    return [(caption, waterfall_chart(account)), ("Attempts", timeline_chart(account))]


def attempts_table(account: Account | None) -> list[list[str]]:
    """A row an attempt."""
    from steps.reporting.time_charts import duration, steps_of

    head = [
        "attempt",
        "devices",
        "processes",
        "steps",
        "took",
        "lost to a restart",
        "checkpoints",
        "ended",
    ]
    rows = []
    for span in account.spans if account else ():
        attempt = span.attempt
        lost = span.ended - span.useful + span.dead
        rows.append(
            [
                attempt.attempt,
                f"{attempt.devices} x {attempt.device}",
                f"{attempt.processes}",
                steps_of(attempt),
                duration(attempt.seconds),
                duration(lost) if lost >= 0.05 else "nothing",
                f"{len(attempt.marks):,}",
                "without a word" if attempt.outcome == "running" else attempt.outcome,
            ]
        )
    return [head, *rows]


def cards(
    model: Checkpoint, scores: Scores, record: RunRecord, account: Account | None
) -> list[tuple[str, str]]:
    """(figure, what it is) of how the run ended; what was not asked has none."""
    from steps.reporting.time_charts import duration

    first, last = model.result["first"], model.result["last"]
    rates = sorted(row["tokens_per_second"] for row in record.history)
    total = account.total if account else model.result["measured"]["seconds"]["total"]
    figures = [
        (f"{first['loss']:.2f} → {last['loss']:.2f}", "validation loss, nats per token"),
        (f"{model.result['unigram_entropy']:.2f}", "unigram entropy of the corpus, nats"),
        *_scores_card(scores),
        (f"{rates[len(rates) // 2]:,.0f}", "tokens per second, median step"),
        (f"{last['step']:,}", "steps"),
        (duration(total), "wall time, all attempts" if account else "training, last attempt"),
    ]
    if account is not None:
        figures.append((f"{account.goodput:.1%}", "goodput: time in steps that count"))
    return figures


def _scores_card(scores: Scores) -> list[tuple[str, str]]:
    """Of the last checkpoint on the first set; none where only questions were asked."""
    if "bits_per_byte" not in scores.result:
        return []
    part = plain(scores.manifest.config).get("sequences") is not None
    read = f"{scores.result['tokens']:,} tokens of {scores.rows[0]['set']}"
    what = read if part else "whole held-out split"
    return [(f"{scores.result['bits_per_byte']:.3f}", f"bits per byte, {what}")]


def sets_table(scores: Scores) -> list[list[str]]:
    """A row a held-out set, of the last checkpoint that was scored."""
    rows = [["set", "step", "loss", "bits per byte", "tokens", "bytes"]]
    for row in scores.rows:
        if row["step"] == scores.rows[-1]["step"]:
            sizes = (f"{row[name]:,}" for name in ("tokens", "bytes"))
            losses = (f"{row[name]:.4f}" for name in ("loss", "bits_per_byte"))
            rows.append([row["set"], f"{row['step']:,}", *losses, *sizes])
    return rows


def tasks_table(scores: Scores) -> list[list[str]]:
    """A row a task, of the last checkpoint; metrics with their standard errors."""
    if not scores.tasks:
        return [[]]
    last = scores.tasks[-1].get("step")
    tasks = [row for row in scores.tasks if row.get("step") == last]
    names = {name for row in tasks for name in row if "_stderr" not in name}
    first = ("task", "set", "step")
    shown = [name for name in first if name in names] + sorted(names.difference(first))
    cells = ([_metric(row, name) for name in shown] for row in tasks)
    return [[name.replace("_", " ") for name in shown], *cells]


def _metric(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value or "")
    # lm_eval puts the name of a filter behind either's.
    metric, comma, rest = name.partition(",")
    error = row.get(f"{metric}_stderr{comma}{rest}", math.nan)
    return f"{value:.3f} ± {error:.3f}" if math.isfinite(error) else f"{value:.3f}"


def _data_table(splits: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = [["split", "documents", "tokens asked", "tokens got", "bytes per token"]]
    for name, split in splits.items():
        asked = split["tokens_asked"]
        rows.append(
            [
                name,
                f"{split['documents']:,}",
                "all that is left" if asked < 0 else f"{asked:,}",
                f"{split['tokens']:,}",
                f"{split['bytes'] / max(1, split['tokens'] - split['documents']):.2f}",
            ]
        )
    return rows
