"""Functions of a filter or a map that fail, or return what they may not."""

from __future__ import annotations

import functools

import pyarrow as pa
import pyarrow.compute
import pytest

from data.read.unit import Fields
from pipeline.errors import StepFailed
from steps.documents.transform import filter_documents, map_documents
from tests.steps.documents.test_sample import published, rows
from tests.steps.documents.test_transform import long_enough, no_spam


def nothing(document):
    """A function that forgets to return."""


def a_number(document):
    return 3


def breaks(document):
    if document["id"] == "d7":
        raise ValueError("seven")
    return True


def other_column(document):
    return {"half": 1}


def no_count(document):
    return {"token_count": -5}


def no_counts(batch):
    counts = pa.array([9999 if n == 3 else 1 for n in range(batch.num_rows)])
    return batch.set_column(batch.schema.get_field_index("token_count"), "token_count", counts)


def null_of_some(batch):
    return pa.compute.if_else(pa.compute.equal(batch.column("id"), "d7"), None, True)


def null_of_all(batch):
    return pa.nulls(batch.num_rows, pa.bool_())


def missing_file(document):
    raise FileNotFoundError("model.bin")


def raises(batch):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("declare", "found"),
    [
        (lambda s: map_documents(s, by=nothing), "returned nothing; expected a text"),
        (lambda s: filter_documents(s, keep=nothing), "returned nothing; expected True"),
        (lambda s: map_documents(s, by=a_number), "returned 3; expected a text"),
        (lambda s: map_documents(s, by=other_column), r"columns=\(\('half', 'string'\),\)"),
        (
            lambda s: filter_documents(s, keep=breaks),
            r"0.jsonl: document 7 \(.*, id 'd7': breaks failed with ValueError: seven",
        ),
        (
            lambda s: filter_documents(s, keep=functools.partial(long_enough, least=99)),
            r"found none: dropped 300 \(too short\)",
        ),
        (lambda s: filter_documents(s, keep=missing_file, skip_failed=True), r"model\.bin"),
        (lambda s: map_documents(s, by=no_count), "returned a token_count of -5"),
        (
            lambda s: map_documents(s, by=no_counts, batched=True),
            r"no_counts returned id 'd3': expected a 'token_count' of 0 to \d+, found 9,999",
        ),
        (
            lambda s: filter_documents(s, keep=null_of_some, batched=True),
            "document 7 .*, id 'd7': null_of_some returned a null among booleans",
        ),
        (lambda s: filter_documents(s, keep=null_of_all, batched=True), "a null among booleans"),
        (lambda s: map_documents(s, by=raises, batched=True), "raises failed with ZeroDivision"),
        (lambda s: filter_documents(s, keep=raises, batched=True), "raises failed with ZeroDiv"),
        (
            lambda s: filter_documents(s, keep=no_spam),
            r"documents have the columns id, text, token_count; keep",
        ),
        (
            lambda s: filter_documents(s, keep=no_spam, fields=Fields(columns=("langauge",))),
            "expected the key 'langauge' in the first line, found id",
        ),
    ],
)
def test_what_a_function_does_wrong_is_said_in_a_line(tmp_path, source, declare, found):
    with pytest.raises(StepFailed, match=found):
        published(tmp_path / "store", declare(source))


def test_documents_with_which_a_function_fails_are_counted_if_asked(tmp_path, source):
    made = published(tmp_path / "s", filter_documents(source, keep=breaks, skip_failed=True))
    assert made.result["dropped"] == {"failed with ValueError": 1}
    assert len(rows(made)) == 299
