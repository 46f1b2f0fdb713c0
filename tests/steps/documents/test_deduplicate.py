"""Deduplication keeps the documents that a loop keeps, in any order and division."""

from __future__ import annotations

import pickle
from functools import partial
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.comparison import NearDuplicates
from data.read.parquet_table import read_table
from data.read.unit import Fields
from data.select.document_hash import document_hash
from pipeline.errors import InputError, StepFailed
from pipeline.execute.backend import InlineWorkers
from pipeline.store import storage
from steps.artifacts import Documents
from steps.documents import deduplicate as module
from steps.documents.deduplicate import deduplicate
from steps.documents.sample import sample
from tests.pipeline.helpers import bring_up, check_invariants
from tests.steps.built import built
from tests.steps.documents.test_sample import rows, write

HELD_OUT = (("validation", 2_000), ("test", 1_000))
published = partial(built, kind=Documents)


def documents(count=400, seed=0):
    """Documents of which every third is one before it with other capitals and punctuation, so of
    the same words, and every seventh an exact copy of one; every url occurs about three times."""
    numbers = np.random.default_rng(seed)
    texts = []
    for index in range(count):
        if index % 7 == 6:
            texts.append(texts[int(numbers.integers(index))])
        elif index % 3 == 2:
            words = texts[int(numbers.integers(index))].split()
            texts.append(", ".join(word.title() for word in words) + ".")
        else:
            texts.append(" ".join(f"w{n}" for n in numbers.integers(0, 999, 30)))
    urls = [f"u{n}" if n else None for n in numbers.integers(0, count // 3, count)]
    return pa.table(
        {
            "id": [f"<urn:{i}>" for i in range(count)],
            "text": texts,
            "token_count": pa.array([len(text.split()) for text in texts], pa.int64()),
            "url": urls,
        }
    )


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A store and a step with documents in three splits."""
    folder = tmp_path_factory.mktemp("sampled")
    source = write(folder / "s", documents(), names="{}.parquet")
    return folder / "store", sample(source, tokens=-1, splits=HELD_OUT)


def by_words(row):
    return " ".join(row["text"].replace(",", "").replace(".", "").lower().split())


def kept_by_hand(found, splits, same, across=True):
    """(ids that stay by split, keeper by id that goes) of rows that are equal by `same`."""
    best = {}
    train, *others = splits
    for rank, split in enumerate([*others, train]):
        for row in found[split]:
            place = int(document_hash([row["id"]], 0)[0])
            value = same(row) if across else (split, same(row))
            preference = (rank, place, row["id"], split)
            best[value] = min(best.get(value, preference), preference)
    stay, gone = {split: set() for split in splits}, {}
    for split in splits:
        for row in found[split]:
            keeper = best[same(row) if across else (split, same(row))]
            if keeper[2] == row["id"]:
                stay[split].add(row["id"])
            else:
                gone[row["id"]] = (keeper[2], split)
    return stay, gone


def dropped_files(made):
    found = {}
    for shard in made.shards("documents/"):
        for batch in read_table(storage.join(made.home, shard.root, "dropped.parquet")):
            found |= {row["id"]: (row["keeper"], row["split"]) for row in batch.to_pylist()}
    return found


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("near", [True, False])
def test_documents_are_kept_as_a_loop_says(sampled, near, across):
    """In every split, with the keeper of each document that goes; the counts add up."""
    store, source = sampled
    made = published(store, deduplicate(source, near=near, across_splits=across))
    before = published(store, source)
    found = {split: rows(before, split) for split in before.splits}
    same = by_words if near else (lambda row: row["text"])
    stay, gone = kept_by_hand(found, before.splits, same, across)
    assert made.splits == before.splits
    for split in made.splits:
        assert [row["id"] for row in rows(made, split)] == [
            row["id"] for row in found[split] if row["id"] in stay[split]
        ]
    assert dropped_files(made) == gone
    assert made.result["documents_seen"] == made.result["documents_kept"] + len(gone)
    assert sum(made.result["dropped"].values()) == len(gone)
    assert made.result["clusters"] == len({keeper for keeper, _ in gone.values()})
    what = "near-duplicate text" if near else "duplicate text"
    leaks = {f"{what} in {name}" for name in ("validation", "test")}
    assert made.result["dropped"].keys() == ({what, *leaks} if across else {what})
    assert all(shard.name.startswith("documents/") for shard in made.shards())
    check_invariants(str(store), finished=True)


def test_a_column_is_compared_and_documents_without_a_value_stay(tmp_path):
    table = documents()
    made = published(
        tmp_path / "store", deduplicate(write(tmp_path / "s", table), near=False, by="url")
    )
    some = {"train": [row for row in table.to_pylist() if row["url"] is not None]}
    stay, gone = kept_by_hand(some, ["train"], lambda row: row["url"])
    nulls = {row["id"] for row in table.to_pylist() if row["url"] is None}
    assert nulls
    assert {row["id"] for row in rows(made, "train")} == stay["train"] | nulls
    assert dropped_files(made) == gone
    assert made.result["dropped"] == {"duplicate url": len(gone)}
    assert "url" in rows(made, "train")[0]


class Shuffled(InlineWorkers):
    """Writes shards in another order, from tasks that were sent to another process."""

    names: ClassVar[list[str]] = []

    def map(self, tasks, emit):
        self.names.extend(task.name for task in tasks)
        order = np.random.default_rng(len(tasks)).permutation(len(tasks))
        sent = pickle.dumps([tasks[i] for i in order])
        yield from super().map(pickle.loads(sent), emit)  # noqa: S301


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "tasks", "rounds"), [(40, 48, 5), (500, 3, 1), (900, 2, 0)])
def test_the_same_bytes_from_any_tasks(sampled, tmp_path, monkeypatch, at_once, tasks, rounds):
    """Of all bands together, or of many shares of each with several rounds of merging."""
    store, source = sampled
    near = NearDuplicates(bands=3)
    expected = published(store, deduplicate(source, near=near))
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    monkeypatch.setattr("pipeline.execute.backend.InlineWorkers", Shuffled)
    monkeypatch.setattr(Shuffled, "names", [])
    made = published(tmp_path / "other", deduplicate(source, near=near))
    parts = [name.split("/") for name in Shuffled.names]
    assert sum(kind == "compare" for kind, _ in parts) == tasks
    assert len({name.split("-")[0] for kind, name in parts if kind == "merge"}) == rounds
    assert made.manifest.content == expected.manifest.content
    written = [[(s.name, s.files, s.result) for s in each.shards()] for each in (made, expected)]
    assert written[0] == written[1]
    assert made.result == expected.result


def test_the_order_of_a_source_does_not_matter(tmp_path):
    """Other files with the same documents in another order: the same documents stay."""
    table = documents()
    order = np.random.default_rng(1).permutation(table.num_rows)
    sources = [write(tmp_path / "1", table), write(tmp_path / "2", table.take(order), files=5)]
    made = [published(tmp_path / "store", deduplicate(source)) for source in sources]
    assert made[0].result["splits"] == made[1].result["splits"]  # with a digest of the documents
    assert dropped_files(made[0]) == dropped_files(made[1])


def test_documents_without_duplicates_all_stay(tmp_path):
    source = write(tmp_path / "s", documents().slice(0, 2), files=1)
    made = published(tmp_path / "store", deduplicate(source))
    assert [row["id"] for row in rows(made, "train")] == ["<urn:0>", "<urn:1>"]
    assert made.result["dropped"] == dropped_files(made) == {}
    assert made.result["clusters"] == made.result["largest_cluster"] == 0


def test_fewer_bands_find_less(tmp_path):
    """Options reach the signatures: near-duplicates of one word in thirty that are other."""
    table = documents(60)
    texts = [text.replace(text.split()[15], "other", 1) for text in table["text"].to_pylist()]
    changed = table.set_column(1, "text", pa.array(texts))
    changed = changed.set_column(0, "id", pa.array([f"c{i}" for i in range(60)]))
    source = write(tmp_path / "s", pa.concat_tables([table, changed]))
    kept = [
        published(tmp_path / "store", deduplicate(source, near=near)).result["documents_kept"]
        for near in (NearDuplicates(bands=1, rows=30), True, NearDuplicates(bands=60, rows=2))
    ]
    assert kept[0] > kept[1] >= kept[2]


def test_bad_settings_are_refused(tmp_path):
    source = write(tmp_path / "s", documents(20))
    with pytest.raises(InputError, match="expected near=False with it"):
        deduplicate(source, by="url")
    with pytest.raises(InputError, match=r"NearDuplicates\(rows=0\): expected 1 or more"):
        NearDuplicates(rows=0)
    with pytest.raises(InputError, match="expected 4,096 at most"):
        NearDuplicates(bands=1000)
    store = str(tmp_path / "store")
    with pytest.raises(StepFailed, match="expected one column 'link'"):
        bring_up(store, deduplicate(source, near=False, by="link"))
    sampled = sample(source, tokens=-1)
    with pytest.raises(StepFailed, match="by='url': expected one of the columns id, text"):
        bring_up(store, deduplicate(sampled, near=False, by="url"))


def test_skipped_rows_are_skipped_wherever_they_are_read(tmp_path):
    """A null in a column that is not compared shifts no row."""
    table = pa.table(
        {
            "id": ["x", "a", "b", "c"],
            "text": [None, "one", "two", "three"],
            "url": ["q", "u", "u", "v"],
        }
    )
    pq.write_table(table, tmp_path / "s.parquet")
    node = deduplicate(
        str(tmp_path / "s.parquet"), near=False, by="url", fields=Fields(skip_nulls=True)
    )
    made = published(tmp_path / "store", node)
    ids = [row["id"] for _, f in made.files("train") for row in pq.read_table(f).to_pylist()]
    assert sorted(ids) in (["a", "c"], ["b", "c"])
    assert made.result["dropped"]["null"] == 1
    assert made.result["documents_seen"] == 4


def test_a_row_without_its_other_columns_is_skipped_wherever_it_is_read(tmp_path):
    """A kept column that is not UTF-8 shifts no row, though it is not compared."""
    urls = pa.array([b"\xff", b"u", b"v", b"w", b"x"], pa.binary()).view(pa.string())
    texts = ["one", "same", "same", "other", "last"]
    table = pa.table({"id": list("abcde"), "text": texts, "url": urls})
    pq.write_table(table, tmp_path / "s.parquet")
    fields = Fields(columns=("url",), skip_invalid=True)
    node = deduplicate(str(tmp_path / "s.parquet"), near=False, fields=fields)
    made = published(tmp_path / "store", node)
    assert [row["text"] for row in rows(made)] == ["same", "other", "last"]
    assert made.result["dropped"] == {"duplicate text": 1, "invalid": 1}
