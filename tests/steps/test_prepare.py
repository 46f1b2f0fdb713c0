"""`experiments/prepare.py` in miniature: every stage, its counts, and its page."""

from __future__ import annotations

import itertools

import pytest

from experiments.prepare import experiment
from pipeline.plan.lineage import lineage
from pipeline.store import storage
from steps.artifacts import Report, TokenCache
from steps.pages.preparation import stages_of


@pytest.mark.slow
def test_raw_documents_become_tokens_through_every_stage(tmp_path):
    """What one stage passes on, the next one receives; a question of the file is found."""
    page, tokens = experiment.run("smoke", prefix=tmp_path, executor="inline")
    ancestors = lineage([tokens.path])
    stages = stages_of(ancestors)
    assert [stage.name for stage in stages] == [
        *("filter_documents", "deduplicate", "decontaminate", "score_documents", "sample"),
    ]
    for before, after in itertools.pairwise(stages):
        assert after.result["documents_seen"] == before.result["documents_kept"]
        dropped = sum(after.result["dropped"].values())
        assert dropped == after.result["documents_seen"] - after.result["documents_kept"]
    clean = stages[2].result
    assert [example["id"] for shown in clean["examples"].values() for example in shown] == [
        "topics/pass"
    ]
    cache = TokenCache(tokens.path, tokens.manifest)
    splits = stages[-1].result["splits"]
    for split, part in splits.items():
        assert cache.result["splits"][split]["documents"] == part["documents"]
        assert cache.tokens(split) > 0
    html = storage.read_bytes(Report(page.path, page.manifest).page).decode()
    assert "under 200 characters" in html
    assert "topics/pass" in html
