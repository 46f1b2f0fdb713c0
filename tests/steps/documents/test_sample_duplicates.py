"""Duplicates of a sample that is too large for one comparison."""

from __future__ import annotations

import pytest

from data.select import duplicates, write_sample
from steps.documents.sample import sample
from tests.pipeline.helpers import check_invariants
from tests.steps.documents.test_sample import HELD_OUT, documents, published, write


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["document", "row_group"])
def test_a_large_sample_is_compared_in_shares_with_the_same_result(tmp_path, monkeypatch, unit):
    """File by file; each document's hashes are read once, and nothing of it stays."""
    source = write(tmp_path / "s", documents())
    node = sample(source, tokens=-1, splits=HELD_OUT, unit=unit, drop_duplicates=True)
    monkeypatch.setattr("data.read.unit.TOGETHER", 1)
    whole = published(tmp_path / "whole", node)
    assert len(whole.shards("sample/")) > 2
    monkeypatch.setattr(duplicates, "AT_ONCE", 300)
    read, real = [], write_sample.read_hashes

    def counted(directory, split):
        read.append((directory, split))
        return real(directory, split)

    monkeypatch.setattr(write_sample, "read_hashes", counted)
    shared = published(tmp_path / "shared", node)
    parts = [split for s in whole.shards("sample/") for split in s.result["splits"]]
    assert len(read) == len(set(read)) == len(parts)
    assert shared.manifest.content == whole.manifest.content
    written = [[(s.name, s.files, s.result) for s in made.shards()] for made in (whole, shared)]
    assert written[0] == written[1]
    assert shared.result == whole.result
    check_invariants(str(tmp_path / "shared"), finished=True)
