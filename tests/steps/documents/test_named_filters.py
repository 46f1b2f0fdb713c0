"""A step with the field's filters: what it keeps, drops and changes is what datatrove decides."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

pytest.importorskip("datatrove")

from data.prepare.filters import C4Quality, FineWebQuality, GopherQuality, GopherRepetition
from data.read.unit import Fields
from pipeline.graph.step import as_node
from steps.documents.transform import filter_documents
from tests.data.prepare.filter_documents import BLOCKED, TEXTS, URLS, theirs
from tests.steps.documents.test_sample import published

pytestmark = pytest.mark.slow  # spaCy takes seconds to import

KEEP = (BLOCKED, GopherRepetition(), GopherQuality(min_doc_words=20), C4Quality(), FineWebQuality())

PROSE = """The harbour lay quiet on the morning that the first ferry of spring was due.
Two men from the village had swept snow off its wooden pier before sunrise.
A teacher, who was to travel with nine pupils, counted their bags again and again.
Nobody could say when the ice had left, but gulls were back on every post.
At noon a whistle sounded behind the cape, and those who waited began to wave.
Because fog hid her bow, only smoke showed where she would come to rest.
The captain greeted all of them by name; he had been born in that street.
Letters, flour and a crate of oranges went ashore while the children climbed aboard."""


@pytest.fixture
def source(tmp_path):
    """Documents of every kind, each at two URLs; white space alone is no document."""
    urls = [*[url for url, answer in URLS.items() if answer is True][:1], "http://bad.com/x"]
    texts = [PROSE, f"Menu\n{PROSE}\nSubscribe now", *filter(str.strip, TEXTS.values())]
    rows = [
        {"id": f"{i}-{j}", "text": text, "url": url}
        for i, text in enumerate(texts)
        for j, url in enumerate(urls)
    ]
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path), rows


def expected_of(rows):
    """What a pipeline of datatrove's own blocks keeps, and the number of documents by reason."""
    from datatrove.data import Document

    documents = [Document(text=r["text"], id=r["id"], metadata={"url": r["url"]}) for r in rows]
    blocks = [theirs(made) for made in KEEP]
    stream = iter(documents)
    for block in blocks:
        stream = block.run(stream)
    kept = {document.id: document.text for document in stream}
    reasons = Counter()
    for block in blocks:
        for name, count in block.stats.stats.items():
            if name.startswith("dropped_"):
                reasons[name.removeprefix("dropped_")] += count.total
    return kept, dict(reasons)


def test_a_step_decides_as_a_pipeline_of_datatrove(tmp_path, source):
    path, rows = source
    fields = Fields(columns=("url",))
    made = published(tmp_path / "store", filter_documents(path, keep=KEEP, fields=fields))
    (file,) = [file for _, file in made.files("train")]
    found = {row["id"]: row["text"] for row in pq.read_table(file).to_pylist()}
    kept, reasons = expected_of(rows)
    assert found == kept
    assert list(found.values()).count(PROSE) == 2  # once without lines that C4 removes
    assert made.result["dropped"] == reasons
    assert sum(reasons.values()) + len(kept) == len(rows)
    assert len(reasons) > 8


def test_the_filters_file_is_code_of_the_step(source):
    node = as_node(filter_documents(source[0], keep=GopherQuality()))
    assert any(f.__module__ == "data.prepare.filters" for f in node.functions)
