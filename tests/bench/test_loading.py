"""The loading bench runs, on a set made in seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.tokenizer.text_tokenizer import TextTokenizer, train
from tests.bench import loading_tokens

TEXTS = [f"document {n} says {n * n} and {n + 1}, again and again" for n in range(400)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A Parquet file of four row groups and a tokenizer."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "tokenizer.json").write_bytes(train([TEXTS], 300))
    pq.write_table(pa.table({"text": TEXTS}), root / "a.parquet", row_group_size=100)
    return root


def test_the_prepared_cache_holds_the_corpus(tmp_path, corpus):
    """Every document's ids with EOS after each; a second call changes nothing."""
    tokenizer = TextTokenizer((corpus / "tokenizer.json").read_bytes())
    expected = len(tokenizer.encode_batch(TEXTS)[0]) + len(TEXTS)
    assert loading_tokens.prepare(tmp_path, corpus, 0) == expected
    (source,) = loading_tokens.spec(tmp_path, 16, 4, 2).sources
    assert len(source.shards) == 4
    written = (tmp_path / "cache.json").stat().st_mtime_ns
    assert loading_tokens.prepare(tmp_path, corpus, 0) == expected
    assert (tmp_path / "cache.json").stat().st_mtime_ns == written
    with pytest.raises(SystemExit, match="other tokens"):
        loading_tokens.prepare(tmp_path, corpus, 5000)


@pytest.mark.slow
def test_the_bench_prints_its_lines(corpus):
    """Every part."""
    command = [sys.executable, "-m", "tests.bench.loading", "--corpus", str(corpus)]
    sizes = {"synthetic": 2_200_000, "lengths": 1024, "batch": 4, "seconds": 0.05, "repeat": 1}
    command += [f"--{name}={value}" for name, value in sizes.items()]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    windows = [
        line["read_over_used"]
        for line in lines
        if line["name"] == "ponente window" and line["sequence_length"] == 1024
    ]
    assert len(windows) == 7
    assert all(1 <= ratio < 1.1 for ratio in windows)
    rates = [line for line in lines if "tokens_per_second" in line]
    assert len(rates) == 7
    assert all(line["tokens_per_cpu_second"]["best"] > 0 for line in rates)
