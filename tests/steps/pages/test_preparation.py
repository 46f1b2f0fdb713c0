"""The page of a preparation: its figures are those of the steps, and add up."""

from __future__ import annotations

import json
import re

from pipeline.store import storage
from steps import filter_documents, preparation_report, sample
from steps.artifacts import Report
from steps.pages.preparation import Stage, render
from tests.steps.documents.test_sample import published


def long_enough(document):
    return len(document["text"].split()) > 3 or "too short <3 words>"


def test_the_page_has_every_step_its_reasons_and_examples(tmp_path):
    texts = ["one", "two & two", *(f"a longer text {n}" for n in range(8))]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "crawl.jsonl").write_text(lines)
    kept = filter_documents(str(tmp_path / "crawl.jsonl"), keep=long_enough)
    made = published(tmp_path / "store", preparation_report(sample(kept, tokens=-1)))
    page = storage.read_bytes(Report(made.path, made.manifest).page).decode()
    assert "<td>10</td><td>8</td><td>80.0%</td>" in page
    assert "two &amp; two" in page
    assert "too short &lt;3 words&gt;: 2" in page
    assert made.result["headline"][0].startswith("8 of 10 documents")


def test_bars_of_the_funnel_add_up_to_what_was_received():
    """Widths are shares of what the first step received."""
    result = {
        "documents_seen": 200,
        "documents_kept": 120,
        "dropped": {f"reason {n}": 8 for n in range(10)},
        "splits": {"train": {"tokens_counted": 3}},
    }
    second = {**result, "documents_seen": 120, "documents_kept": 120, "dropped": {}}
    page = render([Stage("first", result), Stage("second", second)])
    widths = [float(width) for width in re.findall(r"left:[\d.]+%;width:([\d.]+)%", page)]
    assert sum(widths[:11]) == 100
    assert widths[11:] == [60]


def test_scores_are_drawn_as_a_histogram():
    result = {
        "documents_seen": 3,
        "documents_kept": 3,
        "dropped": {},
        "splits": {"train": {"tokens_counted": 3}},
        "scores": {"bins": [0.0, 0.5, 1.0], "counts": [1, 2]},
    }
    assert "Scores of scored" in render([Stage("scored", result)])
