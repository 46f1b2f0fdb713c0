"""What the benchmark of the token cache measures is what it says."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.tokenizer.text_tokenizer import TextTokenizer
from tests.bench import token_cache, token_cache_ours
from tests.data.tokenizer.split_tokenizers import documents, tokenizer_json


@pytest.fixture
def corpus(tmp_path):
    """60 documents in two files."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes(tokenizer_json("gpt2"))
    texts = documents(60)
    for number, part in enumerate((texts[:30], texts[30:])):
        table = pa.table({"id": part, "text": part, "token_count": [1] * len(part), "more": part})
        pq.write_table(table, directory / f"{number}.parquet")
    return directory


def test_every_document_is_written_once(corpus, tmp_path):
    """Row groups together hold the corpus, and the rate counts its tokens."""
    prepared = tmp_path / "prepared"
    token_cache_ours.prepare(corpus, prepared, 2, 25, 1 << 14)
    items = token_cache_ours.items(prepared, "tokenizers")
    texts = [*documents(60)[:25], *documents(60)[30:55]]
    assert [t for item in items for t in token_cache_ours._texts(item)] == texts
    written = [token_cache_ours.write(str(tmp_path / f"{n}"), i) for n, i in enumerate(items)]
    oracle = TextTokenizer(tokenizer_json("gpt2"))
    tokens = len(oracle.encode_batch(texts)[0])
    assert sum(count for count, _ in written) == tokens + len(texts)
    bare = token_cache_ours._bare("tokenizers", prepared / "tokenizer.json")
    assert bare(texts) == tokens


def test_a_failing_measurement_has_a_line(capsys):
    """Nothing is left out in silence."""
    token_cache._run([sys.executable, "-c", "raise OSError('full')"], "broken")
    line = json.loads(capsys.readouterr().out)
    assert (line["measure"], line["failed"]) == ("broken", "OSError: full")
