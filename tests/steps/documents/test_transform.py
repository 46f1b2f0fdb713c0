"""`map_documents` and `filter_documents`, through the engine."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest

from data.prepare.filters import Length
from data.read.unit import Fields
from pipeline import InputError, step
from pipeline.errors import StepFailed
from pipeline.graph.declaration import load_experiment
from pipeline.graph.order import topological
from steps import sample, tokenize
from steps.artifacts import Documents, TokenCache
from steps.documents.items import document_items, forget
from steps.documents.result import documents_result
from steps.documents.transform import filter_documents, map_documents
from steps.tokens.tokenizer import byte_tokenizer, train_tokenizer
from tests.steps.documents.conftest import TEXTS, URLS
from tests.steps.documents.test_sample import published, rows


def long_enough(document, least=3):
    return len(document["text"].split()) >= least or "too short"


def no_spam(document):
    return "spam" not in document["url"]


@dataclass(frozen=True)
class Prefix:
    """Puts a text in front."""

    text: str

    def __call__(self, document):
        return self.text + document["text"]


@dataclass(frozen=True)
class LongPrefix(Prefix):
    """What calls it is inherited."""


def test_a_filter_keeps_what_its_functions_keep_and_counts_the_others(tmp_path, source):
    """Against a loop over the rows; the other columns travel along."""
    keep = (no_spam, functools.partial(long_enough, least=4))
    made = published(
        tmp_path / "store", filter_documents(source, keep=keep, fields=Fields(columns=("url", "n")))
    )
    found, reasons = [], Counter()
    for n, (text, url) in enumerate(zip(TEXTS, URLS, strict=True)):
        if "spam" in url:
            reasons["no_spam"] += 1
        elif len(text.split()) < 4:
            reasons["too short"] += 1
        else:
            tokens = -(-len(text.encode()) // 4)
            row = {"id": f"d{n}", "text": text, "token_count": tokens, "url": url, "n": str(n)}
            found.append(row)
    assert rows(made) == found
    assert made.result["dropped"] == dict(reasons)
    assert made.result["documents_seen"] == 300 == len(found) + reasons.total()
    kept = sum(row["token_count"] for row in found)
    assert made.result["tokens_kept"] == kept == made.result["splits"]["train"]["tokens_counted"]
    assert made.result["tokens_seen"] == sum(-(-len(t.encode()) // 4) for t in TEXTS)
    assert made.result["examples"]["too short"][0] == {"id": "d1", "text": TEXTS[1]}


def halves(document):
    middle = len(document["text"]) // 2
    yield {"text": document["text"][:middle]}
    yield {"text": document["text"][middle:], "half": 1}


def test_a_map_changes_documents_and_may_make_several_or_none(tmp_path, source):
    prefixed = published(tmp_path / "one", map_documents(source, by=Prefix("see: ")))
    assert [row["text"] for row in rows(prefixed)] == ["see: " + text for text in TEXTS]
    split = published(
        tmp_path / "two", map_documents(source, by=halves, columns=(("half", "int64"),))
    )
    found = rows(split)
    assert [row["id"] for row in found[:3]] == ["d0/0", "d0/1", "d1/0"]
    assert "".join(row["text"] for row in found) == "".join(TEXTS)
    assert [row["half"] for row in found[:2]] == [None, 1]
    total = sum(row["token_count"] for row in found)
    assert total == pytest.approx(sum(len(text.encode()) for text in TEXTS) / 4, rel=0.15)


def upper(batch):
    texts = pa.array([text.upper() for text in batch.column("text").to_pylist()])
    return batch.set_column(batch.schema.get_field_index("text"), "text", texts)


def first_half(batch):
    """Also in another order, and without some."""
    made = batch.take(list(range(batch.num_rows - 1, 1, -1)))
    halves = pa.array([halve({"text": text}) for text in made.column("text").to_pylist()])
    return made.set_column(made.schema.get_field_index("text"), "text", halves)


def even(batch):
    return [None if n % 2 == 0 else "odd" for n in range(batch.num_rows)]


def test_batched_functions_give_what_the_same_one_by_one_does(tmp_path, source):
    big = published(tmp_path / "map", map_documents(source, by=upper, batched=True))
    assert [row["text"] for row in rows(big)] == [text.upper() for text in TEXTS]
    cut, again = (
        published(tmp_path / "cut", map_documents(source, by=by, batched=by is first_half))
        for by in (first_half, halve)
    )
    counts = {row["id"]: row["token_count"] for row in rows(again)}
    assert all(row["token_count"] == counts[row["id"]] for row in rows(cut))
    half = published(tmp_path / "filter", filter_documents(source, keep=even, batched=True))
    assert len(rows(half)) == 150
    assert half.result["dropped"] == {"odd": 150}


def test_splits_and_columns_travel_through_a_chain_to_the_tokens(tmp_path, source):
    """Filter, sample, map and tokenize: each takes what the one before it made."""
    clean = filter_documents(source, keep=no_spam, fields=Fields(columns=("url",)))
    chosen = sample(clean, tokens=-1, splits=(("validation", 300),))
    longer = map_documents(chosen, by=Prefix("see: "))
    made = published(tmp_path / "store", longer)
    assert made.splits == ("train", "validation")
    train, held_out = rows(made), rows(made, "validation")
    assert len(train) + len(held_out) == sum("spam" not in url for url in URLS)
    assert all(row["url"] == URLS[int(row["id"][1:])] for row in train + held_out)
    tokens = published(tmp_path / "store", tokenize(longer, byte_tokenizer()))
    cache = TokenCache(tokens.path, tokens.manifest)
    texts = sum(len(row["text"].encode()) for row in train)
    assert cache.tokens("train") == texts + len(train)


def has_two_tags(document):
    return len(document["tags"] or ()) == 2 or "other tags"


def test_nested_columns_and_nulls_in_others_are_read_and_kept(tmp_path):
    tags = [["a", "b"], None, ["c"], ["d", "e"]]
    texts = [f"text {n}" for n in range(4)]
    pq.write_table(pa.table({"text": texts, "tags": tags}), tmp_path / "x.parquet")
    source, fields = str(tmp_path / "x.parquet"), Fields(columns=("tags",))
    made = published(tmp_path / "s", filter_documents(source, keep=has_two_tags, fields=fields))
    assert [(row["text"], row["tags"]) for row in rows(made)] == [
        ("text 0", ["a", "b"]),
        ("text 3", ["d", "e"]),
    ]


def test_tokenize_and_train_tokenizer_take_a_source(source):
    """It stands for a sample of all of it."""
    everything, alphabet = sample(source, tokens=-1), byte_tokenizer()
    assert tokenize(source, alphabet).key == tokenize(everything, alphabet).key
    trained = [train_tokenizer(of, vocab_size=300).key for of in (source, everything)]
    assert trained[0] == trained[1]


def test_sampling_documents_is_sampling_the_same_rows(tmp_path, source):
    """The same documents are chosen, whether from files or from a step's output."""
    everything = filter_documents(source, keep=functools.partial(long_enough, least=0))
    budget = {"tokens": 1000, "splits": (("validation", 200),)}
    whole, again = (
        published(tmp_path / "store", sample(of, **budget)) for of in (source, everything)
    )
    for split in whole.splits:
        assert {r["id"]: r["text"] for r in rows(whole, split)} == {
            r["id"]: r["text"] for r in rows(again, split)
        }
    with pytest.raises(InputError, match="without held-out splits, found validation"):
        sample(filter_documents(sample(source, **budget), keep=Length()), tokens=-1)


def score_of_most(document):
    return {"quality": None if document["id"] in ("d3", "d200") else 1.0}


def test_documents_of_a_step_without_a_score_are_skipped_if_asked(tmp_path, source):
    """As rows of a source are; what a step wrote may have nulls in its own columns."""
    scored = map_documents(source, by=score_of_most, columns=(("quality", "float64"),))
    some = {"tokens": -1, "score": "quality", "min_score": 0.5}
    with pytest.raises(StepFailed, match=r"found null; .* skip_nulls=True"):
        published(tmp_path / "store", sample(scored, **some))
    made = published(tmp_path / "store", sample(scored, **some, skip_nulls=True))
    assert len(rows(made)) == 298
    assert made.result["dropped"]["null"] == 2


@step(output=Documents, version=1)
def without_some(run, documents: Documents):
    return documents_result(run, run.map(nulls_shard, document_items(documents)), documents)


def nulls_shard(directory, item):
    from data.prepare.items import DocumentWriter, read_documents

    with DocumentWriter(directory) as out:
        for split, batch in read_documents(item):
            ids = [None if id == "d3" else id for id in batch.column("id").to_pylist()]
            out.write(split, batch.set_column(0, "id", pa.array(ids, pa.string())))
    return out.result


def test_every_step_skips_rows_of_a_step_if_asked(tmp_path, source):
    """A step of one's own may write a null; the message says what to do."""
    holed = without_some(sample(source, tokens=-1))
    with pytest.raises(StepFailed, match=r"found null; .* skip_nulls=True"):
        published(tmp_path / "store", map_documents(holed, by=Prefix("see: ")))
    node = map_documents(holed, by=Prefix("see: "), fields=Fields(skip_nulls=True))
    made = published(tmp_path / "store", node)
    assert len(rows(made)) == 299
    assert made.result["dropped"] == {"null": 1}


def test_arguments_and_version_are_in_the_key_and_a_lambda_has_none(source):
    def key(**more):
        return filter_documents(source, **{"keep": no_spam, **more}).key

    keys = [
        key(),
        key(version=2),
        key(keep=long_enough),
        key(keep=functools.partial(long_enough, least=3)),
        key(keep=functools.partial(long_enough, least=4)),
        map_documents(source, by=Prefix("a")).key,
        map_documents(source, by=Prefix("b")).key,
    ]
    assert len(set(keys)) == len(keys)
    assert key(keep=functools.partial(long_enough, least=4)) == keys[4]
    with pytest.raises(InputError, match="<lambda> has no name"):
        filter_documents(source, keep=lambda document: True)
    with pytest.raises(InputError, match="skip_failed=True does not go with batched=True"):
        filter_documents(source, keep=even, batched=True, skip_failed=True)
    with pytest.raises(InputError, match=r"map_documents\(by=...\): expected a function, found \("):
        map_documents(source, by=(even, even))
    with pytest.raises(InputError, match="expected a function, found 'no_spam'"):
        filter_documents(source, keep="no_spam")


def test_a_function_is_part_of_the_steps_code(source):
    """A change of its file is seen, as one of the step's own file is."""
    node = filter_documents(source, keep=functools.partial(long_enough, least=3))
    assert long_enough in node.functions
    assert Prefix in map_documents(source, by=Prefix("a")).functions
    assert Prefix in map_documents(source, by=LongPrefix("a")).functions


@step(output=Documents, version=1)
def shout(run, documents: Documents):
    return documents_result(run, run.map(shout_shard, document_items(documents)), documents)


def shout_shard(directory, item):
    from data.prepare.items import DocumentWriter, read_documents

    with DocumentWriter(directory) as out:
        for split, batch in read_documents(item):
            out.write(split, upper(batch))
    return out.result


def test_a_step_of_ones_own_is_fifteen_lines(tmp_path, source):
    made = published(tmp_path / "store", shout(sample(source, tokens=-1)))
    assert sorted(row["text"] for row in rows(made)) == sorted(t.upper() for t in TEXTS)


def test_tokens_that_a_map_removes_are_counted_as_seen(tmp_path, source):
    made = published(tmp_path / "s", map_documents(source, by=halve))
    assert made.result["tokens_seen"] == sum(-(-len(text.encode()) // 4) for text in TEXTS)
    assert made.result["tokens_kept"] < made.result["tokens_seen"] * 0.6


def halve(document):
    return document["text"][: len(document["text"]) // 2]


def cut_in_place(document):
    document["text"] = document["text"][:4]
    document.setdefault("more", []).append(1)
    del document["more"]
    return document


def fewer(batch):
    return batch.slice(0, batch.num_rows - 1)


def test_a_text_that_is_cut_has_the_tokens_of_what_is_left(tmp_path, source):
    """Also where the function returns the document that it was given."""
    made = published(tmp_path / "s", map_documents(source, by=cut_in_place))
    assert {row["token_count"] for row in rows(made)} == {1}


def test_documents_that_a_batched_map_leaves_out_are_counted(tmp_path, source):
    made = published(tmp_path / "s", map_documents(source, by=fewer, batched=True))
    assert made.result["dropped"]["fewer"] == 300 - len(rows(made)) > 0


def test_a_column_may_be_a_field_too(tmp_path, source):
    """The id and the score are read once, whatever else they are asked for as."""
    fields = Fields(id="url", score="n", columns=("url", "n"))
    made = published(
        tmp_path / "s",
        filter_documents(source, keep=functools.partial(long_enough, least=0), fields=fields),
    )
    assert all(row["id"] == row["url"] for row in rows(made))
    scored = published(tmp_path / "s", sample(source, tokens=-1, score="n", min_score=290))
    assert sorted(row["id"] for row in rows(scored)) == [f"d{n}" for n in range(290, 300)]


def test_two_functions_of_one_name_are_refused_in_one_graph(source):
    namespace = {}
    exec("def no_spam(document):\n    return False", namespace)
    other = namespace["no_spam"]
    other.__module__ = no_spam.__module__
    mine, theirs = (filter_documents(source, keep=f) for f in (no_spam, other))
    assert mine.key == theirs.key
    with pytest.raises(InputError, match="two different ones are named 'no_spam'"):
        topological([mine, theirs])


def test_a_function_of_another_file_is_not_taken_for_it(tmp_path, source):
    """Two experiments in one store have a function of one name each."""
    for name, rest in (("first", "len(document) > 99"), ("second", "document['id'] < 'd2'")):
        folder = tmp_path / name
        folder.mkdir()
        more = "\n".join(f"{name}_{n} = {n}" for n in range(9))
        (folder / f"{name}_mine.py").write_text(
            f"from pipeline import Experiment\nimport steps\n{more}\n\ndef keep(document):\n"
            f"    return {rest} or document['id'] != '{name}'\n\n"
            f"def mine() -> steps.Documents:\n"
            f"    return steps.filter_documents({source!r}, keep=keep)\n\n"
            "experiment = Experiment(mine)\n"
        )
    first, second = (
        load_experiment(str(tmp_path / n / f"{n}_mine.py")) for n in ("first", "second")
    )
    first.run(prefix=tmp_path / "store", executor="inline")
    with pytest.raises(InputError, match=r"that of another step named 'filter_documents'"):
        second.run(prefix=tmp_path / "store", executor="inline")


def test_names_are_forgotten_whole_and_folders_with_all_below():
    """A split may have a name that begins like a shard of the step's own work."""
    declared = ["comparison", "comparison/000000", "comparison-x/000000", "sign/0", "train/000000"]
    dropped = []
    run = SimpleNamespace(declared=declared, drop=dropped.append, root="/store")
    forget(run, "comparison", "sign/")
    assert dropped == ["comparison", "sign/0"]
