"""Sources that are damaged, sparse or empty: counted by reason, or refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pipeline.errors import StepFailed
from pipeline.graph.step import as_node
from steps.documents.sample import sample
from tests.pipeline.helpers import bring_up
from tests.steps.documents.test_sample import check_report, documents, published, write


@pytest.mark.slow
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
    with pytest.raises(StepFailed, match="found none in any row that was not skipped"):
        bring_up(str(tmp_path / "store"), node)


@pytest.mark.parametrize("unit", ["document", "row_group"])
def test_a_split_without_documents_is_refused(tmp_path, unit):
    """Documents of white space alone count as tokens, but are none."""
    source = write(tmp_path / "source", pa.table({"text": [" \n"] * 300}))
    node = sample(source, tokens=-1, unit=unit)
    with pytest.raises(StepFailed, match=r"train: expected documents, .* 300 \(empty text\)"):
        bring_up(str(tmp_path / "store"), node)


def test_a_split_whose_texts_are_all_in_others_is_refused(tmp_path):
    """What duplicates leave is counted, not what was there before."""
    texts = [f"text number {i % 150} of these" for i in range(600)]
    source = write(
        tmp_path / "source", pa.table({"id": [str(i) for i in range(600)], "text": texts})
    )
    splits = (("validation", 2_000), ("test", 1_500))
    node = sample(source, tokens=50, splits=splits, drop_duplicates=True)
    with pytest.raises(StepFailed, match=r"train: expected documents, .* \(duplicate text\)"):
        bring_up(str(tmp_path / "store"), node)


@pytest.mark.parametrize("ids", [1, 3])
def test_ids_that_repeat_are_named_as_the_cause(tmp_path, ids):
    """All documents of one id have one place, so a split takes all of them or none."""
    texts = [f"document number {i} says something" for i in range(300)]
    table = pa.table({"id": [str(i % ids) for i in range(300)], "text": texts})
    node = sample(write(tmp_path / "source", table), tokens=-1, splits=(("validation", 200),))
    said, cause = [], f"{300 // ids} documents have its last id"
    if ids == 1:
        with pytest.raises(StepFailed, match=rf"train: 1 tokens asked, .*validation: {cause}"):
            bring_up(str(tmp_path / "store"), node)
    else:
        bring_up(str(tmp_path / "store"), node, events=said)
        warnings = [event["message"] for event in said if event["event"] == "warning"]
        assert any(cause in line and "its last document" not in line for line in warnings)


@pytest.mark.parametrize("unit", ["document", "row_group"])
def test_skipped_rows_are_in_the_result_and_its_headline(tmp_path, unit):
    """A setting of its own, which is in the key; the counts add up."""
    table = documents(300)
    texts = [text.encode() for text in table["text"].to_pylist()]
    texts[7], texts[9], texts[123], texts[200] = None, b"caf\xe9", b"\xff", None
    strings = pa.array(texts, pa.binary()).view(pa.string())
    source = write(tmp_path / "source", table.set_column(1, "text", strings), files=2)
    some = {"tokens": -1, "unit": unit, "skip_nulls": True}
    node = sample(source, **some, skip_invalid=True)
    assert as_node(node).key != as_node(sample(source, **some)).key
    with pytest.raises(StepFailed, match=r"'text' is not UTF-8 .*skip_invalid=True"):
        bring_up(str(tmp_path / "a"), sample(source, **some))
    sampled = published(tmp_path / "b", node)
    check_report(sampled, seen=300)
    assert sampled.result["dropped"]["invalid"] == sampled.result["dropped"]["null"] == 2
    assert sampled.result["headline"][1:] == ["skipped 2 null rows", "skipped 2 invalid rows"]


def test_kept_columns_of_other_types_are_refused(tmp_path, monkeypatch):
    """Also in files that different tasks read, which the next step would refuse."""
    monkeypatch.setattr("data.read.unit.SMALL_BYTES", 0)
    table = documents(40)
    source = tmp_path / "source"
    for name, kind in (("a", pa.int64()), ("b", pa.string())):
        write(
            source,
            table.append_column("year", pa.nulls(40, kind)),
            files=1,
            names=name + "{}.parquet",
        )
    with pytest.raises(StepFailed, match=r"expected the columns .*'year': 'int64'.* 'string'"):
        bring_up(str(tmp_path / "a"), sample(str(source), tokens=-1, columns=("year",)))
    assert published(tmp_path / "b", sample(str(source), tokens=-1)).result["documents_seen"] == 80
