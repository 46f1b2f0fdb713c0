"""The step that tokenises: pieces of work, what is counted, and that the back end changes no id."""

from __future__ import annotations

import os
import sys
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from data.cache.token_array import TokenArray
from data.cache.token_shard import read_offsets
from data.read import parquet_table
from data.read.parquet_table import TableWriter, count_row_groups, read_table
from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline import step
from pipeline.errors import InputError, StepFailed
from pipeline.store import storage
from pipeline.store.manifest import load
from steps.artifacts import Documents, TokenCache, Tokenizer
from steps.tokens import token_cache as tokenize_documents
from steps.tokens.token_cache import DocumentGroup, tokenize, tokenize_shard
from tests.data.token_shards import content_digest
from tests.data.tokenizer.split_tokenizers import documents as prose
from tests.data.tokenizer.split_tokenizers import tokenizer_json
from tests.pipeline.helpers import bring_up

SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])
SPLITS = {"train": (0, 70), "validation": (70, 90)}


def write_documents(url, texts):
    """A file of ours with a row group for about every 10 documents."""
    with (
        mock.patch.object(parquet_table, "_ROW_GROUP_BYTES", 1),
        TableWriter(url, SCHEMA) as writer,
    ):
        for begin in range(0, len(texts), 10):
            part = texts[begin : begin + 10]
            ids = [f"{begin + i}" for i in range(len(part))]
            writer.write(pa.RecordBatch.from_pydict({"id": ids, "text": part}, schema=SCHEMA))


@step(output=Documents, version=1)
def some_documents(run):
    """Two files with a train split, the second with a validation split as well."""
    with run.shard("sample/00000", {"splits": ["train"]}) as directory:
        write_documents(storage.join(directory, "train.parquet"), prose()[:35])
    with run.shard("sample/00001", {"splits": ["train", "validation"]}) as directory:
        write_documents(storage.join(directory, "train.parquet"), prose()[35:70])
        write_documents(storage.join(directory, "validation.parquet"), prose()[70:90])
    asked = {"train": (1000, 70), "validation": (-1, 20), "test": (0, 0)}
    splits = {n: {"tokens_asked": tokens, "documents": d} for n, (tokens, d) in asked.items()}
    return {"splits": splits, "order": list(splits)}


@step(output=Tokenizer, version=1)
def some_tokenizer(run, name: str):
    """One of the small tokenizers."""
    with run.shard("tokenizer") as directory:
        url = storage.join(directory, "tokenizer.json")
        storage.write_atomic(url, tokenizer_json(name))
    return {}


def graph(**choice):
    return tokenize(some_documents(), some_tokenizer("llama3"), **choice)


def published(prefix, node):
    path = storage.join(prefix, node.directory)
    manifest = load(path)
    return TokenCache(path, manifest), manifest


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The same graph with each back end."""
    found = {}
    for backend in ("tokenizers", "auto"):
        prefix = str(tmp_path_factory.mktemp(backend))
        bring_up(prefix, graph(backend=backend))
        found[backend] = published(prefix, graph())
    return found


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("backend", ["tokenizers", "auto"])
def test_tokens_are_the_oracles_with_eos_after_each_document(stores, backend, split):
    """And what the result says of them is so."""
    cache, manifest = stores[backend]
    oracle = TextTokenizer(tokenizer_json("llama3"))
    texts = prose()[slice(*SPLITS[split])]
    expected = [id for text in texts for id in (*oracle.encode_batch([text])[0], oracle.eos_id)]
    with TokenArray(cache.split(split), oracle.vocab_size) as tokens:
        assert tokens.read(np.array([0]), len(tokens))[0].tolist() == expected
    found = manifest.result["splits"][split]
    size = sum(len(text.encode()) for text in texts)
    _, counts = np.unique(expected, return_counts=True)
    share = counts / len(expected)
    assert found == {
        "tokens": len(expected),
        "documents": len(texts),
        "bytes": size,
        "tokens_asked": {"train": 1000, "validation": -1}[split],
        "error": len(expected) / 1000 - 1 if split == "train" else None,
        "tokens_per_byte": len(expected) / size,
        "unigram_entropy": pytest.approx(-(share * np.log(share)).sum()),
    }
    assert set(manifest.result["splits"]) == {"train", "validation"}


def test_back_ends_differ_in_nothing_but_what_is_measured(stores):
    """Same key, same bytes, same result; who encoded is on record."""
    pytest.importorskip("fastokens")
    (one, slow), (two, fast) = stores["tokenizers"], stores["auto"]
    assert slow.key == fast.key
    for a, b in zip(one.split("train"), two.split("train"), strict=True):
        assert a.check == b.check
        assert content_digest(a.directory) == content_digest(b.directory)
    assert {**slow.result, "measured": 0} == {**fast.result, "measured": 0}
    for manifest, name, checked in ((slow, "tokenizers", False), (fast, "fastokens", True)):
        measured = manifest.result["measured"]
        [(backend, shards)] = measured["shards_by_backend"].items()
        assert backend.startswith(f"{name} ")
        assert shards == 10
        assert (measured["documents_checked"] >= 40) == checked
        assert measured["shards_fell_back"] == 0


@pytest.mark.slow
def test_a_wrong_back_end_is_found_out_and_the_user_told(tmp_path, stores):
    """Every id is the oracle's, and a warning has the text of a document."""
    pytest.importorskip("fastokens")
    from data.tokenizer.backends import FastEncoder

    right = FastEncoder.encode

    def wrong(self, texts):
        ids, lengths = right(self, texts)
        return np.where(ids == ids.max(), ids - 1, ids), lengths

    events = []
    with mock.patch.object(FastEncoder, "encode", wrong):
        bring_up(str(tmp_path), graph(), events=events)
    cache, manifest = published(str(tmp_path), graph())
    checks = [shard.check for shard in cache.split("train")]
    assert checks == [shard.check for shard in stores["tokenizers"][0].split("train")]
    assert all(
        name.startswith("tokenizers ") for name in manifest.result["measured"]["shards_by_backend"]
    )
    (warning,) = [event["message"] for event in events if event["event"] == "warning"]
    assert "are not the oracle's: tokenizers encodes all documents" in warning


@pytest.mark.slow
def test_a_kill_loses_no_finished_row_group(tmp_path):
    """The second run writes the shards that the first did not."""
    real, written = tokenize_documents.tokenize_shard, []

    def dying(directory, item):
        if len(written) == 4:
            raise RuntimeError("died")
        written.append((item.file, item.row_group))
        return real(directory, item)

    with (
        mock.patch.object(tokenize_documents, "tokenize_shard", dying),
        pytest.raises(StepFailed),
    ):
        bring_up(str(tmp_path), graph())
    assert len(written) == 4

    def watching(directory, item):
        written.append((item.file, item.row_group))
        return real(directory, item)

    with mock.patch.object(tokenize_documents, "tokenize_shard", watching):
        bring_up(str(tmp_path), graph())
    assert len(written) == len(set(written)) == 10


def row_group(tmp_path, texts, **changes):
    write_documents(str(tmp_path / "train.parquet"), texts)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json("gpt2"))
    fields = {
        "file": str(tmp_path / "train.parquet"),
        "row_group": 0,
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "digest": TextTokenizer(tokenizer_json("gpt2")).digest,
        "backend": "auto",
    }
    return DocumentGroup(**{**fields, **changes})


def test_texts_that_are_not_utf8_are_refused(tmp_path):
    """Parquet readers let them pass; the message names file and row group."""
    item = row_group(tmp_path, ["ab" * 50] * 3)
    content = (tmp_path / "train.parquet").read_bytes()
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], "i4")), pa.py_buffer(b"\xff\xfe")]
    )
    with TableWriter(item.file, pa.schema([("text", pa.string())])) as writer:
        writer.write(pa.RecordBatch.from_arrays([broken], ["text"]))
    assert (tmp_path / "train.parquet").read_bytes() != content
    with pytest.raises(InputError, match=r"train\.parquet, row group 0: expected texts in UTF-8"):
        tokenize_shard(str(tmp_path / "out"), item)


def test_one_row_group_and_empty_documents(tmp_path):
    """Only that row group's documents; an empty one is one EOS."""
    texts = [f"text {n}" for n in range(10)] + ["", "x", ""]
    item = row_group(tmp_path, texts, row_group=1)
    assert count_row_groups(item.file) == 2
    result = tokenize_shard(str(tmp_path / "out"), item)
    assert (result["documents"], result["bytes"]) == (3, 1)
    assert read_offsets(str(tmp_path / "out/cache")).tolist() == [0, 1, 3, 4]
    found = [b.column("text").to_pylist() for b in read_table(item.file, ("text",), (1, 0))]
    assert found == [texts[10:], texts[:10]]


@pytest.mark.parametrize(("threads", "parallel"), [("1", False), ("2", True), (None, True)])
def test_one_core_of_a_cluster_is_one_thread(tmp_path, monkeypatch, threads, parallel):
    """As OMP_NUM_THREADS says, which a cluster's worker is given."""
    if threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "as before")
    asked = []
    real = TextTokenizer.checked

    def checked(self, *arguments, **choice):
        asked.append(choice["parallel"])
        return real(self, *arguments, **choice)

    with mock.patch.object(TextTokenizer, "checked", checked):
        tokenize_shard(str(tmp_path / "out"), row_group(tmp_path, ["one", "two"]))
    assert asked == [parallel]
    expected = "as before" if parallel else "false"
    assert os.environ["TOKENIZERS_PARALLELISM"] == expected


def test_a_back_end_that_is_not_there_is_refused_before_any_work(tmp_path, monkeypatch):
    """No shard is written."""
    monkeypatch.setitem(sys.modules, "fastokens", None)
    with pytest.raises(StepFailed, match="not installed"):
        bring_up(str(tmp_path), graph(backend="fastokens"))
    assert load(storage.join(str(tmp_path), graph().directory)) is None
