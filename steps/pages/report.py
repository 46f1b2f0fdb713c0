"""The HTML report of a run: curves, wall time, samples, graph and configuration."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pipeline import InputError, Result, StepContext, step
from pipeline.execute.run_record import RunRecord as Run
from pipeline.identity.fingerprint import plain
from pipeline.pages import readable
from pipeline.pages.graph import Box, draw
from pipeline.pages.record import runs
from pipeline.plan.lineage import Ancestor, lineage
from pipeline.store import storage
from pipeline.store.manifest import KEEP
from pipeline.store.shards import ATTEMPTS
from steps.artifacts import Checkpoint, Completions, Report, Scores
from steps.pages.charts import time_charts, training_charts
from steps.pages.predicted import memory_table, predicted_table
from steps.pages.run_record import TrainingRun, meant, of_checkpoint, split_counts
from steps.training.plan.experience import STEP

if TYPE_CHECKING:
    from training.metrics.goodput import Account


@step(output=Report, version=2, reads_lineage=True)
def report(
    run: StepContext,
    checkpoint: Checkpoint,
    scores: Scores | None = None,
    text: Completions | None = None,
) -> Result:
    """The HTML report of a training run, with scores and generated text if given."""
    model = checkpoint
    if model.imported:
        raise InputError(f"report: {model.path} was imported and has no record of its training")
    given = [each for each in (model, scores, text) if each is not None]
    with run.shard("page") as directory:
        rendered = render(model, scores, text, lineage([each.path for each in given]), directory)
        storage.write_atomic(storage.join(directory, "index.html"), rendered.encode())
    lines = [line for each in given for line in each.result.get("headline", ())]
    return {"headline": lines}


def render(
    model: Checkpoint,
    scores: Scores | None,
    text: Completions | None,
    ancestors: list[Ancestor],
    directory: str,
) -> str:
    """The page as HTML, with links relative to `directory`, where the caller writes it."""
    from steps.pages import page

    record = of_checkpoint(model, model.manifest.label, ancestors)
    account = record.account()
    made = made_in(model)
    label, trained = model.manifest.label, meant(model.path, model.manifest)[1].label
    label += f" ({trained})" if trained != label else ""  # of a selection
    name = f"{made.name}: {label}" if made else label
    return page.render(
        "report",
        title=f"{name} · {model.manifest.key[:8]}",
        heading=name,
        head=head(model, made, directory),
        figures=cards(model, scores, record, account),
        splits=splits_table(scores) if scores else [],
        tasks=tasks_table(scores) if scores else [],
        curves=training_charts(record, account, _rewind(model, directory)),
        times=time_charts(account),
        attempts=attempts_table(account),
        startups=startup_table(account),
        completions=text.result["completions"] if text else [],
        samples=record.samples_by_prompt(),
        drawing=draw([_box(ancestor) for ancestor in ancestors]),
        predicted=predicted_table(model.result["measured"].get(STEP, {})),
        memory=memory_table(model.result["measured"].get("memory", {})),
        data=_data_table(split_counts(model.sequences)),
        configurations=_configurations(ancestors),
    )


def made_in(model: Checkpoint) -> Run | None:
    """The newest run whose graph has `model`, among the last five runs of the model's store."""
    found = runs(model.path.rpartition("/")[0], newest=5)
    return next((run for run in found if model.manifest.key in run.steps), None)


def head(model: Checkpoint, made: Run | None, directory: str) -> list[tuple[str, str]]:
    """(fact, relative link or "") about the model, the time and the hardware of its training."""
    from models.shape.config import TransformerConfig

    config = TransformerConfig.from_plain(model.result["model"])
    train, manifest = model.result["train"], model.manifest
    commit = (manifest.provenance.get("git") or {}).get("commit")
    facts = [
        (readable.moment(manifest.started), ""),
        (f"{config.parameter_count:,} parameters", ""),
        (f"{config.layers} layers of {config.embed}, MLP {config.mlp}", ""),
        (f"{config.heads} heads ({config.kv_heads} for keys) of {config.head_size}", ""),
        (f"vocabulary {config.vocab_size:,}", ""),
        (f"batch {train['batch_size']} x {train['sequence_length']:,} tokens", ""),
        (model.trained_on, ""),
        *([(f"commit {commit[:12]}", "")] if commit else []),
        (f"key {manifest.key[:20]}", ""),
    ]
    store = directory.rpartition("/attempts/")[0].rpartition("/")[0]
    home = model.home
    if store and home.startswith(f"{store}/"):
        up = "../" * directory.removeprefix(f"{store}/").count("/") + "../"
        kept = f"{home.removeprefix(store + '/')}/{ATTEMPTS}/{manifest.attempt}/{KEEP}"
        facts.append(("metrics.jsonl", quote(f"{up}{kept}/metrics.jsonl")))
        page = f"{made.run}.html" if made else "index.html"
        facts.append(("page of the run", quote(f"{up}reports/{page}")))
    return facts


def _box(ancestor: Ancestor) -> Box:
    manifest = ancestor.manifest
    size = f" · {readable.size(manifest.size)}" if manifest.size else ""
    text = f"{readable.duration(manifest.seconds)}{size}"
    return Box(ancestor.path, manifest.label, text, parents=ancestor.parents)


def _configurations(ancestors: list[Ancestor]) -> list[tuple[str, Any]]:
    """(label, settings) of every step, and the environment of the last one."""
    found: list[tuple[str, Any]] = []
    for ancestor in ancestors:
        manifest = ancestor.manifest
        about = {"version": manifest.version, "key": manifest.key}
        found.append((manifest.label, {**plain(manifest.config), **about}))
    environment = dict(ancestors[-1].manifest.provenance) if ancestors else {}
    for code in ("sources", "defined", "typed"):  # of the step's code: digests, for no reader
        environment.pop(code, None)
    return [*found, ("environment of the last step", environment)]


def _rewind(model: Checkpoint, directory: str) -> tuple[str, str]:
    """What shows the documents behind a step, see `steps.pages.curves.chart`."""
    path = meant(model.path, model.manifest)[0]  # `rewind` names its page after the chosen run
    (store, _, name), own = path.rpartition("/"), directory.rpartition("/attempts/")[0]
    run, above = name, "../" * (directory.removeprefix(own).count("/") + 1)
    if store != own.rpartition("/")[0]:  # the name alone would be looked for in this store
        run, above = path, f"{store}/"
    page = quote(f"{above}reports/rewind-{name}-STEP.html", safe="/:")
    return f"ponente rewind {shlex.quote(run)} STEP --page", page


def attempts_table(account: Account | None) -> list[list[str]]:
    """A row per attempt."""
    names = "attempt devices processes steps took lost checkpoints ended"
    rows: list[list[str]] = [[*names.split()]]
    for span in account.spans if account else ():
        attempt = span.attempt
        lost = span.ended - span.useful + span.dead
        reached = f"{attempt.first_step or 0:,} to {attempt.last_step or 0:,}"
        running = attempt.outcome == "running"
        rows.append(
            [
                attempt.attempt,
                f"{attempt.devices} x {attempt.device}",
                f"{attempt.processes}",
                "none" if attempt.first_step is None else reached,
                readable.duration(attempt.seconds),
                readable.duration(lost) if lost >= 0.05 else "nothing",
                f"{len(attempt.marks):,}",
                "killed (no exit record)" if running else attempt.outcome,
            ]
        )
    return rows


def startup_table(account: Account | None) -> list[list[str]]:
    """A row per attempt that restored or initialized its state: seconds to first step, by part."""
    from training.metrics.stopwatch import STARTUP

    rows: list[list[str]] = [["attempt", "step's program", *STARTUP, "start to first step"]]
    for span in account.spans if account else ():
        attempt = span.attempt
        if not attempt.startup or attempt.first_step is None:
            continue
        parts = [attempt.startup.get(part) for part in STARTUP]
        rows.append(
            [
                attempt.attempt,
                "kept" if attempt.loaded else "compiled",
                *("" if seconds is None else f"{seconds:.1f} s" for seconds in parts),
                f"{sum(attempt.startup.values()):.1f} s" if parts[-1] is not None else "",
            ]
        )
    return rows


def cards(
    model: Checkpoint, scores: Scores | None, record: TrainingRun, account: Account | None
) -> list[tuple[str, str]]:
    """(figure, meaning) of the finished run, for the figures that were measured."""
    first, last = model.result["first"], model.result["last"]
    skipped, epochs = (model.result.get(name, 0) for name in ("skipped", "epochs"))
    # Entropy and validation loss of a mixture are of its first source.
    corpus = "first source" if len(epochs or ()) > 1 else "corpus"
    rates = sorted(row["tokens_per_second"] for row in record.history)
    total = account.total if account else model.result["measured"]["seconds"]["total"]
    figures = [
        (f"{first['loss']:.2f} → {last['loss']:.2f}", "validation loss, nats per token"),
        (f"{model.result['unigram_entropy']:.2f}", f"unigram entropy of the {corpus}, nats"),
        *(_scores_card(scores) if scores else []),
        (f"{rates[len(rates) // 2]:,.0f}", "tokens per second, median step"),
        (f"{last['step']:,}", "steps"),
        *([(f"{max(epochs):,.2f}", "epochs, of the source read most often")] if epochs else []),
        *([(f"{skipped:,}", "updates not applied (skipped)")] if skipped else []),
        (readable.duration(total), "wall time, all attempts" if account else "last attempt"),
    ]
    if account is not None:
        figures.append((f"{account.goodput:.1%}", "goodput: time in steps that count"))
    return figures


def _scores_card(scores: Scores) -> list[tuple[str, str]]:
    """The last checkpoint's score on the first split; empty if only tasks were run."""
    if "tokens" not in scores.result:
        return []
    part = plain(scores.manifest.config).get("sequences") is not None
    read = f"{scores.result['tokens']:,} tokens of {scores.rows[0]['split']}"
    what = read if part else "whole held-out split"
    for name, unit in (("bits_per_byte", "bits per byte"), ("loss", "nats per token")):
        if name in scores.result:
            return [(f"{scores.result[name]:.3f}", f"{unit}, {what}")]
    return []


def splits_table(scores: Scores) -> list[list[str]]:
    """A row per held-out split, for the last checkpoint that was scored."""
    rows = [["split", "step", "loss", "bits per byte", "tokens", "bytes"]]
    for row in scores.rows:
        if row["step"] == scores.rows[-1]["step"]:
            sizes = (f"{row[name]:,}" for name in ("tokens", "bytes"))
            found = (row.get(name) for name in ("loss", "bits_per_byte"))
            losses = ("-" if value is None else f"{value:.4f}" for value in found)
            rows.append([row["split"], f"{row['step']:,}", *losses, *sizes])
    return rows


def tasks_table(scores: Scores) -> list[list[str]]:
    """A row per task, for the last checkpoint; metrics with their standard errors."""
    if not scores.tasks:
        return [[]]
    last = scores.tasks[-1].get("step")
    tasks = [row for row in scores.tasks if row.get("step") == last]
    names = {name for row in tasks for name in row if "_stderr" not in name}
    first = ("task", "split", "step")
    shown = [name for name in first if name in names] + sorted(names.difference(first))
    cells = ([_metric(row, name) for name in shown] for row in tasks)
    return [[name.replace("_", " ") for name in shown], *cells]


def _metric(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value or "")
    # lm_eval appends the name of a filter to both: "acc,none" and "acc_stderr,none".
    metric, comma, rest = name.partition(",")
    error = row.get(f"{metric}_stderr{comma}{rest}", math.nan)
    return f"{value:.3f} ± {error:.3f}" if math.isfinite(error) else f"{value:.3f}"


def _data_table(splits: dict[str, dict[str, Any]]) -> list[list[str]]:
    if any("rows" in split for split in splits.values()):  # of `integer_rows`, without documents
        names = ("rows", "tokens", "predicted")
        return [
            ["split", *names],
            *([name, *(f"{split[n]:,}" for n in names)] for name, split in splits.items()),
        ]
    rows = [["split", "documents", "tokens requested", "tokens", "bytes per token"]]
    for name, split in splits.items():
        asked = split["tokens_asked"]
        rows.append(
            [
                name,
                f"{split['documents']:,}",
                "all remaining" if asked < 0 else f"{asked:,}",
                f"{split['tokens']:,}",
                f"{split['bytes'] / max(1, split['tokens'] - split['documents']):.2f}",
            ]
        )
    return rows
