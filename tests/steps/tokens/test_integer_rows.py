"""Rows of integers that cannot become sequences are refused by name."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import StepFailed
from steps.tokens.integer_rows import integer_rows
from tests.pipeline.helpers import bring_up


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "expected rows, found Parquet files without any"),
        ([[1], [2, 3], [4, 5]], "no id of the 1 rows of split 'validation' is predicted"),
    ],
)
def test_rows_without_predictions_are_refused(tmp_path, rows, words):
    """No row at all, and held-out rows of one id each, which nothing precedes."""
    ids = pa.array(rows, pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": ids}), tmp_path / "rows.parquet")
    node = integer_rows(
        str(tmp_path / "*.parquet"),
        vocab_size=8,
        sequence_length=4,
        splits=(("validation", 1),),
    )
    with pytest.raises(StepFailed, match=words):
        bring_up(str(tmp_path / "store"), node)
