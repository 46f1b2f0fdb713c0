"""The rate of a tokenizer, and whether its standard error is what it says."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from data.read.work_units import list_units
from data.select.token_ratio import DOCUMENTS, Cluster, TokenRatio, estimate, probe
from data.tokenizer.backends import CheckedEncoder
from data.tokenizer.text_tokenizer import TextTokenizer, train

TEXTS = [f"the {word} of {n} stones and the sea " * 3 for n in range(60) for word in ("sum", "end")]


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(train([TEXTS], 300))


def cluster_of(rows):
    """A cluster of (count, tokens) documents."""
    x, y = np.array(rows, np.int64).T
    return Cluster(
        documents=len(rows),
        counted=int(x.sum()),
        tokens=int(y.sum()),
        squares=(int(x @ x), int(x @ y), int(y @ y)),
    )


def test_a_probe_counts_the_documents_with_the_smallest_hashes(tmp_path, tokenizer):
    """A shuffled file has the same probe; a document that scores too low is not in it."""
    count = 400
    table = pa.table(
        {
            "id": [f"d{i}" for i in range(count)],
            "text": [TEXTS[i % len(TEXTS)] * (1 + i % 3) for i in range(count)],
            "token_count": [10 + i % 7 for i in range(count)],
            "score": [float(i % 2) for i in range(count)],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.take(np.random.default_rng(0).permutation(count)), tmp_path / "b.parquet")
    first, second = (list_units(f"{tmp_path}/{name}.parquet") for name in "ab")
    found = probe(first, tokenizer, 5)
    assert found == probe(second, tokenizer, 5)
    assert found.documents == DOCUMENTS
    assert found != probe(first, tokenizer, 6)
    few = probe(first, tokenizer, 5, 1.0)
    texts = [text for i, text in enumerate(table["text"].to_pylist()) if i % 2]
    assert few.documents == 200
    assert few.tokens == sum(len(tokenizer.encode_batch([text])[0]) for text in texts)
    assert probe(first, tokenizer, 5, 2.0).documents == 0


@pytest.fixture
def encoded(monkeypatch):
    """Bytes of text of each call of the encoder."""
    sizes, encode = [], CheckedEncoder.encode

    def counted(self, texts):
        sizes.append(pc.call_function("sum", [pc.call_function("binary_length", [texts])]).as_py())
        return encode(self, texts)

    monkeypatch.setattr(CheckedEncoder, "encode", counted)
    return sizes


def units_of(path, texts):
    """Work units of one file with these documents."""
    ids, counts = [f"d{i}" for i in range(len(texts))], [len(text) // 4 for text in texts]
    pq.write_table(pa.table({"id": ids, "text": texts, "token_count": counts}), path)
    return list_units(str(path))


@pytest.mark.parametrize("most", [1, 40_000, 200_000])
def test_a_probe_encodes_the_bytes_it_may_and_a_document_at_the_least(
    tmp_path, tokenizer, encoded, most
):
    """Of documents of 5 to 15 kB: as many as fit, and no more than one beyond."""
    texts = [TEXTS[i % len(TEXTS)] * (50 + i % 101) for i in range(300)]
    found = probe(units_of(tmp_path / "a.parquet", texts), tokenizer, 5, most_bytes=most)
    longest = max(len(text.encode()) for text in texts)
    assert most - longest < sum(encoded) <= most + longest
    assert (found.documents == 1) == (most == 1)


def test_the_rate_is_a_ratio_of_sums_and_eos_is_counted_once_a_document():
    """2 tokens a count and one EOS each."""
    rate = estimate([cluster_of([(10, 20), (5, 10)]), cluster_of([(1, 2)])])
    assert (rate.per_count, rate.per_document, rate.standard_error) == (2.0, 1, 0.0)
    assert (rate.documents, rate.clusters) == (3, 2)
    assert float(rate.predict(100, 7)) == 207
    assert float(TokenRatio().predict(100, 7)) == 100


def test_the_standard_error_of_two_clusters_by_hand():
    """Residuals of -2 and 2 about a ratio of 2.2: sqrt(8 * 2 / 1) / 20."""
    rate = estimate([cluster_of([(10, 20)]), cluster_of([(10, 24)])])
    assert rate.standard_error == pytest.approx(0.2)
    assert rate.residual == pytest.approx(2.0)
    assert rate.error(30, 25) == pytest.approx(math.hypot(0.2 * 30, 2 * 5))


def test_nothing_to_count_is_no_division_by_zero():
    """Clusters without documents are left out; counts of zero predict EOS alone."""
    empty = Cluster(documents=0, counted=0, tokens=0, squares=(0, 0, 0))
    assert float(estimate([empty, cluster_of([(0, 3)])]).predict(0, 5)) == 5
    assert estimate([empty, cluster_of([(10, 20)])]).per_count == 2.0
    assert estimate([empty]).documents == 0
