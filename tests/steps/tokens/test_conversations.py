"""Conversations as a token cache: the rows that are written, and sources that are refused."""

from __future__ import annotations

import gzip
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import steps
from data.cache.token_array import TokenArray
from data.chat.encoder import ChatEncoder
from data.chat.messages import Message
from data.chat.named_templates import named_template
from data.chat.rows import shortened
from data.read import records
from data.tokenizer.byte_vocabulary import byte_tokenizer_json
from data.tokenizer.text_tokenizer import TextTokenizer
from models.shape.presets import bytes_tiny
from pipeline.errors import InputError, StepFailed
from steps.tokens.chat_templates import chat_of
from steps.tokens.conversations import _tasks
from tests.data.chat.chats import conversations, plain
from tests.steps.built import built
from training.config import OptimizerConfig, TrainConfig

LENGTH, VOCAB = 96, 257
CHATS = conversations(60, seed=5)


def lines(chats, **more) -> str:
    return "".join(json.dumps({"messages": plain(m), **more}) + "\n" for m in chats)


def cache_of(store, source, **settings):
    """The cache of a source's conversations in bytes, by the template "alpaca"."""
    settings = {"template": "alpaca", "sequence_length": LENGTH, **settings}
    node = steps.conversations(str(source), steps.byte_tokenizer(), **settings)
    return built(store, node, steps.TokenCache)


def rows_of(cache, split="train") -> np.ndarray:
    """The stored ids of a split, [row, length]."""
    with TokenArray(cache.split(split), 3 * VOCAB) as array:
        found = array.read(np.array([0]), cache.tokens(split))
    return found.reshape(-1, LENGTH)


def chats_in(cache, split="train") -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Ids and masks of the conversations in a split's rows, sorted; padding is left out."""
    found = []
    for row in rows_of(cache, split):
        for part in np.split(row, np.flatnonzero(row >= 2 * VOCAB))[1:]:
            if (part < VOCAB).any():
                found.append((tuple((part % VOCAB).tolist()), tuple((part < VOCAB).tolist())))
    return sorted(found)


def expected(chats):
    """What `chats_in` finds of these, from the encoder alone."""
    encoder = ChatEncoder(TextTokenizer(byte_tokenizer_json()), named_template("alpaca"))
    short = [shortened(each, LENGTH)[0] for each in encoder.encode(chats)]
    return sorted((tuple(ids.tolist()), tuple(mask.tolist())) for ids, mask in short if mask.any())


def test_every_conversation_is_in_one_split(tmp_path):
    """Once, with the encoder's ids and mask; each file format gives the same rows."""
    (tmp_path / "a.jsonl").write_text(lines(CHATS, id=3))
    pq.write_table(
        pa.table({"messages": [plain(m) for m in CHATS]}), tmp_path / "a.parquet", row_group_size=7
    )
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(CHATS).encode()))
    splits = (("validation", 0.2), ("test", 0.1))
    caches = [
        cache_of(tmp_path / "store", tmp_path / name, splits=splits)
        for name in ("a.jsonl", "a.parquet", "a.jsonl.gz")
    ]
    parts = [chats_in(caches[0], split) for split in ("train", "validation", "test")]
    assert all(len(part) > 2 for part in parts)
    assert sorted(itertools.chain(*parts)) == expected(CHATS)
    for other in caches[1:]:
        assert other.result["splits"] == caches[0].result["splits"]
        for split in ("train", "validation", "test"):
            np.testing.assert_array_equal(rows_of(other, split), rows_of(caches[0], split))
    about = caches[0].result["splits"]
    assert sum(s["conversations"] + s["unpredicted"] for s in about.values()) == len(CHATS)
    assert about["train"]["predicted"] == sum(sum(mask) for _, mask in parts[0])
    assert caches[0].held_out_splits == ("validation", "test")
    assert chat_of(caches[0]) == (named_template("alpaca"), VOCAB - 1)
    assert caches[0].has_text


def test_spans_change_no_conversation(tmp_path, monkeypatch):
    """Files divided into many tasks have the same conversations in the same splits."""
    (tmp_path / "a.jsonl").write_text(lines(CHATS))
    splits = (("validation", 0.2),)
    whole = cache_of(tmp_path / "one", tmp_path / "a.jsonl", splits=splits)
    monkeypatch.setattr(records, "TARGET_BYTES", 2000)
    many = cache_of(tmp_path / "many", tmp_path / "a.jsonl", splits=splits)
    assert len(many.split("train")) > 5 * len(whole.split("train"))
    for split in ("train", "validation"):
        assert chats_in(many, split) == chats_in(whole, split)


def test_tasks_read_each_span_once_for_every_split():
    """Held-out splits read many spans in a task, for ranges of hashes that end where train's do."""
    tasks = list(_tasks(range(130), (("validation", 0.01), ("test", 0.25))))
    ranges = {name.partition("/")[0]: hashes for name, _, hashes in tasks}
    assert ranges["train"] == (0, ranges["test"][0])
    assert ranges["test"][1] == ranges["validation"][0]
    assert ranges["validation"][1] == 1 << 64
    for split, count in (("train", 130), ("validation", 3), ("test", 33)):
        mine = [spans for name, spans, _ in tasks if name.startswith(f"{split}/")]
        assert len(mine) == count
        assert tuple(itertools.chain(*mine)) == tuple(range(130))


def test_columns_of_an_exchange_and_rows_left_out(tmp_path):
    """Rows that are no conversation are counted once, whatever the splits."""
    rows = [{"q": f"What is {n}?", "a": f"It is {n}."} for n in range(40)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"q": "?", "a": ""}, {"q": "only"}])
    (tmp_path / "a.jsonl").write_text(text + "not JSON\n")
    columns = steps.Exchange("q", "a")
    settings = {"columns": columns, "splits": (("validation", 0.3),)}
    cache = cache_of(tmp_path, tmp_path / "a.jsonl", skip_invalid=True, **settings)
    chats = [[Message("user", row["q"]), Message("assistant", row["a"])] for row in rows]
    assert sorted(chats_in(cache) + chats_in(cache, "validation")) == expected(chats)
    assert [s["invalid"] for s in cache.result["splits"].values()] == [3, 0]


ONE = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        ('{"text": "a"}\n', {}, "a.jsonl: expected a column 'messages' for conversations, found"),
        (ONE, {"columns": steps.Messages("chat")}, "expected a column 'chat' for conversations"),
        ("", {}, "1 files match, with 0 rows in all"),
        (ONE + '{"messages": 3}\n', {}, ": the line at byte 88: expected a list of messages"),
        (ONE + "{}}\n", {}, ": the line at byte 88: expected a JSON object, found b'{}}"),
        (ONE.replace("user", "robot"), {}, "message 0: expected one of the roles"),
        (ONE.replace("user", "assistant"), {}, "expected messages of user and assistant, found no"),
        (ONE.replace('"b"', '""'), {}, "message 1 (assistant): expected a text, found ''"),
        (ONE.replace('"a"', '"\\ufdd0"'), {}, "a message has the noncharacter U+FDD0; repair the"),
        (ONE, {"template": "chatml"}, "names <|im_end|>, <|im_start|>, which the tokenizer"),
        (ONE, {"template": "t.jinja"}, "expected one of alpaca, chatml, llama3, zephyr, or a file"),
        (ONE, {"sequence_length": 8}, "nothing of the training split is predicted: 0 rows are no"),
    ],
)
def test_sources_that_are_refused(tmp_path, content, settings, words):
    """In a line that says where, and what to do."""
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises((StepFailed, InputError)) as caught:
        cache_of(tmp_path / "store", tmp_path / "a.jsonl", splits=(), **settings)
    assert words in str(caught.value)


def test_a_folder_with_a_template(tmp_path):
    """Of a model: chat_template.jinja, or what tokenizer_config.json has; a change is seen."""
    (tmp_path / "a.jsonl").write_text(lines(CHATS))
    model = tmp_path / "model"
    model.mkdir()
    text = named_template("alpaca")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": text}))
    first = cache_of(tmp_path / "store", tmp_path / "a.jsonl", template=str(model))
    named = cache_of(tmp_path / "store", tmp_path / "a.jsonl")
    assert chats_in(first) == chats_in(named)
    (model / "chat_template.jinja").write_text(text.replace("### Response", "### Reply"))
    assert chats_in(cache_of(tmp_path / "store", tmp_path / "a.jsonl", template=str(model))) != (
        chats_in(named)
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sequence_length": 1}, "sequence_length"),
        ({"splits": (("train", 0.1),)}, "splits of different names other than 'train'"),
        ({"splits": (("a", 0.5), ("b", 0.5))}, "together below 1"),
        ({"splits": (("a", 100),)}, "shares of the conversations above 0"),
    ],
)
def test_settings_that_are_refused(tmp_path, settings, words):
    """While the graph is declared."""
    (tmp_path / "a.jsonl").write_text(ONE)
    with pytest.raises(InputError, match=words):
        cache_of(tmp_path, tmp_path / "a.jsonl", **settings)


def test_training_must_keep_conversations_apart(tmp_path):
    """They share rows; the declaration of a training says so. Mixing with documents is refused."""
    (tmp_path / "a.jsonl").write_text(lines(CHATS))
    tokenizer = steps.byte_tokenizer()
    chats = steps.block_shuffle(
        steps.conversations(
            str(tmp_path / "a.jsonl"), tokenizer, template="alpaca", sequence_length=LENGTH
        ),
        LENGTH,
    )
    with pytest.raises(InputError, match=r"separate_documents is False.* set it to True"):
        steps.train(chats, bytes_tiny, OptimizerConfig(), TrainConfig(steps=1, batch_size=1))
    documents = steps.sample("python-docs://3.11.7", tokens=20_000)
    plain_rows = steps.block_shuffle(steps.tokenize(documents, tokenizer), LENGTH)
    with pytest.raises(InputError, match="mix: found sequences of conversations and of documents"):
        steps.mix((chats, plain_rows), weights=(0.5, 0.5))
