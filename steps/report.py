"""A page about a run: curves, samples, the graph with its timings, the configuration."""

from __future__ import annotations

from typing import Any

from pipeline import Result, StepRun, step, storage
from pipeline.lineage import lineage
from steps.artifacts import Checkpoint, Completions, Report, Scores


@step(output=Report, version=1, reads_lineage=True)
def report(run: StepRun, model: Checkpoint, scores: Scores, text: Completions) -> Result:
    """The HTML report of a training run."""
    from steps.charts import gradient_chart, loss_chart, rate_chart, throughput_chart
    from steps.page import render

    measured = model.result["measured"]
    history, evaluations = model.rows("history"), model.rows("evaluations")
    cache = model.sequences.cache
    entropy = model.result["unigram_entropy"]
    ancestors = lineage([model.path, scores.path, text.path])
    page = render(
        title="ponente run",
        subtitle=f"trained on {measured['hardware']}, key {model.manifest.key[:20]}",
        cards=_cards(model, scores, history),
        charts=[
            ("Loss", loss_chart(history, evaluations, entropy)),
            ("Throughput", throughput_chart(history)),
            ("Gradient norm", gradient_chart(history)),
            ("Learning rate", rate_chart(history)),
        ],
        samples=[(c["prompt"], c["completion"]) for c in text.result["completions"]],
        data_table=_data_table(cache.result["splits"]),
        ancestors=ancestors,
    )
    with run.shard("page") as directory:
        storage.write_atomic(storage.join(directory, "index.html"), page.encode())
    url = storage.join(directory, "index.html")
    return {
        "headline": [
            *model.result["headline"],
            *text.result["headline"],
            f"report: {url}",
            f"look at it with: python -m webbrowser -t file://{url}"
            if storage.is_local(url)
            else "download it to look at it",
        ]
    }


def _cards(
    model: Checkpoint, scores: Scores, history: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    first, last = model.result["first"], model.result["last"]
    rates = sorted(row["tokens_per_second"] for row in history)
    return [
        (f"{first['loss']:.2f} → {last['loss']:.2f}", "validation loss, nats per token"),
        (f"{model.result['unigram_entropy']:.2f}", "unigram entropy of the corpus, nats"),
        (f"{scores.result['bits_per_byte']:.3f}", "bits per byte, whole held-out split"),
        (f"{rates[len(rates) // 2]:,.0f}", "tokens per second, median step"),
        (f"{last['step']:,}", "steps"),
        (f"{model.result['measured']['seconds']['total']:,.0f} s", "training, last attempt"),
    ]


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
