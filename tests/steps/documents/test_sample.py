"""The sample step: what it writes is what its report says, and a law of the hash alone."""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.read.parquet_table import read_table
from data.select import duplicates, write_sample
from data.select.document_hash import document_hash
from pipeline.errors import StepFailed
from pipeline.graph.step import as_node
from pipeline.store import storage
from steps.artifacts import Documents
from steps.documents import sample_shards
from steps.documents.sample import sample
from steps.tokens.tokenizer import train_tokenizer
from tests.pipeline.helpers import bring_up, check_invariants
from tests.steps.built import built

WORDS = [f"word{i}" for i in range(200)]
HELD_OUT = (("validation", 3_000), ("test", 1_000))


def documents(count=2_000, seed=0):
    """Documents with some texts in common; every fiftieth is of white space alone."""
    numbers = np.random.default_rng(seed)
    lengths = numbers.lognormal(3, 0.8, count).astype(int) + 1
    texts = [" ".join(numbers.choice(WORDS, length)) for length in lengths]
    for index in range(0, count, 9):
        texts[index] = texts[int(numbers.integers(count))]
    for index in range(0, count, 50):
        texts[index] = "\n "
    return pa.table(
        {
            "id": [f"<urn:{i}>" for i in range(count)],
            "text": texts,
            "token_count": [len(text.split()) for text in texts],
            "score": numbers.integers(0, 5, count).astype(float),
        }
    )


def write(directory, table, files=3, group=100, names="{}.parquet"):
    """The table in some files; the source that names them."""
    directory.mkdir(parents=True, exist_ok=True)
    edges = [table.num_rows * i // files for i in range(files + 1)]
    for index in range(files):
        part = table.slice(edges[index], edges[index + 1] - edges[index])
        pq.write_table(part, directory / names.format(index), row_group_size=group)
    return f"{directory}/*.parquet"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source") / "s", documents())


published = partial(built, kind=Documents)


def rows(sampled, split="train"):
    """The rows of a split, in order."""
    return [
        row
        for _, file in sampled.files(split)
        for batch in read_table(file)
        for row in batch.to_pylist()
    ]


def ids(sampled, split):
    return {row["id"] for row in rows(sampled, split)}


def check_report(sampled, seen=None):
    """Every number of the report, counted again from the files."""
    result = sampled.result
    kept = 0
    for split in sampled.splits:
        found, said = rows(sampled, split), result["splits"][split]
        counts = [row["token_count"] for row in found]
        kept += len(found)
        assert said["documents"] == len(found)
        assert said["tokens_counted"] == sum(counts)
        assert said["bytes"] == sum(len(row["text"].encode()) for row in found)
        total = 0
        for row in found:
            content = hashlib.blake2b(row["text"].encode(), digest_size=16).digest()
            name = hashlib.blake2b(content + row["id"].encode(), digest_size=16).digest()
            total += int.from_bytes(name, "little")
        assert said["digest"] == f"{total % (1 << 128):032x}"
    assert result["documents_kept"] == kept
    assert result["documents_seen"] == kept + sum(result["dropped"].values())
    assert seen is None or result["documents_seen"] == seen


def by_hand(table, asked, held_out, min_score=None, seed=0):
    """Ids of every split by one walk over all documents in order of hash."""
    rows = [r for r in table.to_pylist() if min_score is None or r["score"] >= min_score]
    places = document_hash([row["id"] for row in rows], seed)
    ordered = [rows[i] for i in np.argsort(places)]
    chosen, reverse = {}, True
    for name, budget in (*held_out, ("train", asked)):
        held, found = 0, []
        reverse = name != "train"
        while held < budget:
            row = ordered.pop(-1 if reverse else 0)
            held += row["token_count"]
            found.append(row)
        chosen[name] = {row["id"] for row in found if row["text"].strip()}
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("min_score", [None, 2.0])
def test_splits_are_those_of_a_walk_by_hand_and_the_report_adds_up(source, tmp_path, min_score):
    """Exactly the documents up to each budget; the held-out splits from the other end."""
    node = sample(source, tokens=20_000, splits=HELD_OUT, min_score=min_score)
    sampled = published(tmp_path, node)
    expected = by_hand(documents(), 20_000, HELD_OUT, min_score)
    assert sampled.splits == ("train", "validation", "test")
    assert {split: ids(sampled, split) for split in sampled.splits} == expected
    check_report(sampled, seen=2_000)
    if min_score is not None:
        scores = documents()["score"].to_numpy()
        assert sampled.result["dropped"]["score below 2"] == (scores < 2).sum()
    for split, asked in (("train", 20_000), *HELD_OUT):
        said = sampled.result["splits"][split]
        assert said["tokens_asked"] == asked
        assert said["tokens_predicted"] == said["tokens_counted"]
        longest = max(row["token_count"] for row in rows(sampled, split))
        assert asked - 5 * 1 <= said["tokens_counted"] < asked + longest


@pytest.mark.slow
def test_a_sample_is_the_same_from_other_files_in_another_order(source, tmp_path):
    """Shuffled rows, other files, other row groups: the same documents, told by their digest."""
    table = documents()
    shuffled = table.take(np.random.default_rng(3).permutation(table.num_rows))
    other = write(tmp_path / "other", shuffled, files=7, group=33, names="z{}.parquet")
    first, second = (
        published(tmp_path / "store", sample(s, tokens=9_000, splits=HELD_OUT, seed=4))
        for s in (source, other)
    )
    assert first.result["content_digest"] == second.result["content_digest"]
    assert ids(first, "train") == ids(second, "train")
    third = published(tmp_path / "store", sample(source, tokens=9_000, splits=HELD_OUT, seed=5))
    assert third.result["content_digest"] != first.result["content_digest"]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["document", "row_group"])
@pytest.mark.parametrize("drop_duplicates", [False, True])
def test_splits_are_disjoint_and_samples_nested(source, tmp_path, unit, drop_duplicates):
    """A larger train split contains the smaller; the held-out splits stay where they are."""
    sizes = [3_000, 11_000, -1]
    found = [
        published(
            tmp_path,
            sample(source, tokens=n, splits=HELD_OUT, unit=unit, drop_duplicates=drop_duplicates),
        )
        for n in sizes
    ]
    for sampled in found:
        check_report(sampled)
        parts = [ids(sampled, split) for split in sampled.splits]
        assert len(set.union(*parts)) == sum(map(len, parts))
    trains = [ids(sampled, "train") for sampled in found]
    assert trains[0] < trains[1] < trains[2]
    for split in ("validation", "test"):
        assert ids(found[0], split) == ids(found[1], split) == ids(found[2], split)


def test_no_text_is_twice_in_a_sample_without_duplicates(source, whole, tmp_path):
    """One copy of every text: held out when a held-out split has it, else the smallest hash."""
    kept = published(tmp_path, sample(source, tokens=-1, splits=HELD_OUT))
    unique = whole
    best = {}
    for rank, split in enumerate(("validation", "test", "train")):
        for row in rows(kept, split):
            key = (rank, int(document_hash([row["id"]], 0)[0]), split, row["id"])
            best[row["text"]] = min(best.get(row["text"], key), key)
    for split in unique.splits:
        expected = {name for _, _, where, name in best.values() if where == split}
        assert ids(unique, split) == expected
    check_report(unique, seen=2_000)
    assert unique.result["dropped"]["duplicate text"] > 50
    assert unique.result["repeated_ids"] == 0
    assert kept.result["repeated_ids"] is None
    for split in unique.splits:
        gone = unique.result["splits"][split]["duplicates_dropped"]
        before = kept.result["splits"][split]
        after = unique.result["splits"][split]
        assert before["documents"] - after["documents"] == gone["documents"]
        assert before["tokens_counted"] - after["tokens_counted"] == gone["tokens"]


UNIQUE = {"tokens": -1, "splits": HELD_OUT, "drop_duplicates": True}


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    return published(tmp_path_factory.mktemp("whole"), sample(source, **UNIQUE))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "function"),
    [
        (sample_shards, "survey"),
        (sample_shards, "documents_in"),
        (sample_shards, "sample_units"),
        (write_sample, "drop_rows"),
    ],
)
def test_a_sample_that_was_interrupted_is_resumed(
    source, whole, tmp_path, monkeypatch, module, function
):
    """Shards that were finished are not written again, and the documents are the same."""
    node = sample(source, **UNIQUE)
    real = getattr(module, function)
    monkeypatch.setattr("data.read.unit.TOGETHER", 1)
    calls, fails_at = [], [2]

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) in fails_at:
            raise RuntimeError("the machine is gone")
        return real(*arguments, **options)

    monkeypatch.setattr(module, function, interrupted)
    with pytest.raises(StepFailed):
        bring_up(str(tmp_path / "cut"), node)
    assert len(calls) == 2
    fails_at.clear()
    again = published(tmp_path / "cut", node)
    assert len(calls) == 2 + (3 - 1)  # of three files one was finished
    assert again.result == whole.result
    for split in whole.splits:
        assert rows(again, split) == rows(whole, split)
    check_invariants(str(tmp_path / "cut"), finished=True)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["document", "row_group"])
def test_tokens_are_predicted_within_their_error(source, tmp_path, unit):
    """Tokenising the sample gives what was predicted, to four standard errors and two per cent."""
    some = sample(source, tokens=20_000, seed=9)
    tokenizer = train_tokenizer(some, vocab_size=400)
    node = sample(source, tokenizer, tokens=60_000, splits=(("validation", 9_000),), unit=unit)
    sampled = published(tmp_path, node)
    path = storage.join(str(tmp_path), as_node(tokenizer).directory, "attempts")
    file = next(p for p, _ in storage.list_files(path) if p.endswith("tokenizer.json"))
    from data.tokenizer.text_tokenizer import TextTokenizer

    ours = TextTokenizer.load(storage.join(path, file))
    for split in sampled.splits:
        said = sampled.result["splits"][split]
        texts = [row["text"] for row in rows(sampled, split)]
        got = len(ours.encode_batch(texts)[0]) + len(texts)
        error = 4 * said["predicted_standard_error"] + 0.02 * got
        assert abs(said["tokens_predicted"] - got) <= error
        assert said["predicted_standard_error"] > 0
        assert said["tokens_predicted"] >= 0.98 * said["tokens_asked"]
    probe = sampled.result["probe"]
    assert probe["documents"] >= 200
    assert probe["tokens_per_count"] > 1


@pytest.mark.slow
def test_whole_row_groups_are_sampled_and_no_other_file_is_opened(tmp_path):
    """Files that the walk does not reach may hold anything; the budget ends within a row group."""
    table = documents(4_000)
    source = write(tmp_path / "source", table, files=20, group=50)
    asked = 2_500
    node = sample(source, tokens=asked, splits=(("validation", 10),), unit="row_group")
    events = []
    sampled = published(tmp_path / "store", node, events=events)
    check_report(sampled)
    said = sampled.result["splits"]["train"]
    largest = max(sum(table["token_count"].slice(i, 50).to_pylist()) for i in range(0, 4_000, 50))
    assert asked <= said["tokens_counted"] < asked + largest
    assert sampled.result["splits"]["validation"]["documents"] <= 50
    _, warning = [event["message"] for event in events if event["event"] == "warning"]
    assert warning.startswith("validation: asked 10 tokens, holds ")
    places = {name: i for i, name in enumerate(table["id"].to_pylist())}
    used = {places[name] // 200 for split in sampled.splits for name in ids(sampled, split)}
    assert len(used) < 6
    for index in set(range(20)) - used:
        (tmp_path / "source" / f"{index}.parquet").write_bytes(b"<html>not read</html>")
    again = published(tmp_path / "again", node)
    assert again.result == sampled.result
    whole = sum(file.stat().st_size for file in (tmp_path / "source").glob("*"))
    assert 0 < sampled.result["read"]["compressed_bytes"] < whole


def test_row_groups_without_a_document_that_scores_enough_are_counted_and_not_read(tmp_path):
    """Scores that are high in one row group only; all others are seen and dropped."""
    table = documents(1_000)
    scores = np.zeros(1_000)
    scores[300:350] = 4
    table = table.set_column(3, "score", pa.array(scores))
    source = write(tmp_path / "source", table, files=2, group=50)
    sampled = published(
        tmp_path / "store", sample(source, tokens=-1, min_score=3.0, unit="row_group")
    )
    check_report(sampled, seen=1_000)
    assert sampled.result["dropped"]["score below 3"] == 950
    assert sampled.result["read"]["row_groups"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["document", "row_group"])
def test_more_than_there_is_is_refused(source, tmp_path, unit):
    """Asked and available, for train and for a held-out split."""
    for options in ({"tokens": 10**9}, {"tokens": 5, "splits": (("extra", 10**9),)}):
        with pytest.raises(StepFailed, match=r"1,000,000,000 tokens asked, about .* available"):
            bring_up(str(tmp_path), sample(source, unit=unit, **options))


def test_a_score_that_no_document_has_is_refused(source, tmp_path):
    """With the number of documents looked at."""
    with pytest.raises(StepFailed, match="none of 2,000 documents"):
        bring_up(str(tmp_path), sample(source, tokens=5, min_score=99.0))


def test_a_source_that_counts_no_tokens_is_sampled_by_its_bytes(tmp_path):
    """Without `token_count` a token is four bytes."""
    table = documents().select(["id", "text"])
    source = write(tmp_path / "source", table)
    sampled = published(tmp_path / "store", sample(source, tokens=9_000, splits=HELD_OUT))
    check_report(sampled, seen=2_000)
    for split, asked in (("train", 9_000), *HELD_OUT):
        said = sampled.result["splits"][split]
        found = rows(sampled, split)
        assert said["tokens_counted"] == sum(-(-len(r["text"].encode()) // 4) for r in found)
        assert said["tokens_counted"] >= 0.99 * asked
        line = next(x for x in sampled.result["headline"] if x.startswith(f"{split}: "))
        assert "tokens estimated from bytes; " in line
