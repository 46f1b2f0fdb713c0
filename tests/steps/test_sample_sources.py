"""Sources that are damaged, sparse or empty: verified, counted by reason, or refused."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pytest

from pipeline.errors import StepFailed
from pipeline.graph.node import as_node
from steps.sample import sample
from tests.pipeline.helpers import bring_up
from tests.steps.test_sample import check_report, documents, published, write


@pytest.mark.parametrize("unit", ["document", "row_group"])
def test_files_are_verified_before_they_are_read(tmp_path, unit):
    """Against SHA256SUMS beside them: none, the right ones, and one that is wrong."""
    source = write(tmp_path / "source", documents())
    arguments = {"tokens": 2_000, "unit": unit}
    node = sample(source, **arguments, verify_files=True)
    assert as_node(node).key == as_node(sample(source, **arguments)).key
    with pytest.raises(StepFailed, match="verify_files"):
        bring_up(str(tmp_path / "a"), node)
    files = sorted((tmp_path / "source").glob("*.parquet"))
    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
    sums = tmp_path / "source" / "SHA256SUMS"
    sums.write_text("".join(lines))
    checked = published(tmp_path / "b", node)
    unchecked = published(tmp_path / "c", sample(source, **arguments))
    assert checked.manifest.content == unchecked.manifest.content
    sums.write_text("".join("0" * 64 + line[64:] for line in lines))
    with pytest.raises(StepFailed, match="SHA-256"):
        bring_up(str(tmp_path / "d"), node)


@pytest.mark.parametrize("unit", ["document", "row_group"])
def test_files_are_verified_though_an_attempt_before_read_them(tmp_path, monkeypatch, unit):
    """The first attempt, without verification, counted the source and was then lost."""
    source = write(tmp_path / "source", documents())
    lost = "data.select.write_sample.sample_units"
    with monkeypatch.context() as patch:
        patch.setattr(lost, lambda *_, **__: 1 / 0)
        with pytest.raises(StepFailed):
            bring_up(str(tmp_path / "store"), sample(source, tokens=2_000, unit=unit))
    (tmp_path / "source" / "SHA256SUMS").write_text(
        "".join(f"{'0' * 64}  {index}.parquet\n" for index in range(3))
    )
    node = sample(source, tokens=2_000, unit=unit, verify_files=True)
    with pytest.raises(StepFailed, match="SHA-256"):
        bring_up(str(tmp_path / "store"), node)


def test_row_groups_of_nulls_are_not_counted_as_low_scores(tmp_path):
    """By the reasons that a sample of documents gives."""
    table = documents(1_000)
    counts = [None if i < 100 else c for i, c in enumerate(table["token_count"].to_pylist())]
    table = table.set_column(2, "token_count", pa.array(counts, pa.int64()))
    source = write(tmp_path / "source", table, files=1)
    found = {}
    for unit in ("document", "row_group"):
        node = sample(source, tokens=-1, unit=unit, skip_nulls=True)
        sampled = published(tmp_path / unit, node)
        check_report(sampled, seen=1_000)
        found[unit] = {k: v for k, v in sampled.result["dropped"].items() if v}
    assert found["document"] == found["row_group"]
    assert found["document"]["null"] == 100


def test_a_split_that_drops_make_short_names_them(tmp_path):
    """Half the documents are of white space: the budget counted them."""
    texts = [" " * 40 if i % 2 else f"text number {i}" for i in range(400)]
    ids, counts = [str(i) for i in range(400)], [5] * 400
    source = write(tmp_path / "source", pa.table({"id": ids, "text": texts, "token_count": counts}))
    seen = []
    bring_up(str(tmp_path / "store"), sample(source, tokens=1_000), events=seen)
    text = next(event["message"] for event in seen if event["event"] == "warning")
    assert "empty texts, nulls and duplicates were counted before they were dropped" in text


@pytest.mark.parametrize("nulls", [False, True])
def test_a_source_without_documents_is_refused(tmp_path, nulls):
    """No row, or a null in every row: no score is to blame."""
    table = documents(50)
    none = table.set_column(2, "token_count", pa.nulls(50, pa.int64())) if nulls else table[:0]
    (tmp_path / "source").mkdir()
    path = str(tmp_path / "source" / "a.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, none.schema) as out:
        out.write(none)
    node = sample(str(tmp_path / "source"), tokens=10, skip_nulls=True)
    with pytest.raises(StepFailed, match="found no row, or a null in every row"):
        bring_up(str(tmp_path / "store"), node)
