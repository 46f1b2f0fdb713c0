"""The step that takes a tokenizer that exists: what it accepts, and that every step takes it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Library

from data.cache.token_array import TokenArray
from pipeline.errors import StepFailed
from steps.artifacts import TokenCache, Tokenizer
from steps.documents.sample import sample
from steps.tokens.token_cache import tokenize
from steps.tokens.tokenizer import _place, tokenizer
from tests.data.tokenizer.published_shapes import shape
from tests.data.tokenizer.split_tokenizers import documents
from tests.pipeline.helpers import bring_up
from tests.steps.built import built


@pytest.fixture
def file(tmp_path):
    """Llama 2's shape, in a folder as the hub has it."""
    path = tmp_path / "model" / "tokenizer.json"
    path.parent.mkdir()
    path.write_bytes(shape("llama2"))
    return path


@pytest.mark.slow
def test_sampling_and_tokenising_take_it(file, tmp_path):
    """The ids are the library's, EOS after each document; the sample counts in its tokens."""
    texts = documents(30)
    pq.write_table(
        pa.table({"id": [f"{i}" for i in range(30)], "text": texts}), tmp_path / "x.parquet"
    )
    made = tokenizer(str(file.parent))
    sampled = sample(str(tmp_path / "x.parquet"), made, tokens=-1)
    node = tokenize(sampled, made, backend="tokenizers")
    bring_up(str(tmp_path / "store"), node)
    cache = built(tmp_path / "store", node, TokenCache)
    library = Library.from_str(shape("llama2").decode())
    eos = library.token_to_id("</s>")
    expected = [
        index
        for text in texts
        for index in (*library.encode(text, add_special_tokens=False).ids, eos)
    ]
    with TokenArray(cache.split("train"), library.get_vocab_size()) as tokens:
        assert tokens.read(np.array([0]), len(tokens))[0].tolist() == expected
    result = built(tmp_path / "store", made, Tokenizer).result
    assert (result["vocab_size"], result["eos_id"]) == (library.get_vocab_size(), eos)


def test_the_key_names_the_place_and_the_recipe_the_file(file, tmp_path):
    """A folder or its file; a hub id where there is no such file."""
    assert _place(str(file.parent)) == _place(str(file)) == str(file)
    assert _place("owner/name") == "hf://owner/name/tokenizer.json"
    assert _place("owner/name@v1") == "hf://owner/name@v1/tokenizer.json"
    assert _place("hf://owner/name@" + "a" * 40) == f"hf://owner/name@{'a' * 40}/tokenizer.json"
    assert _place("gs://bucket/t.json") == "gs://bucket/t.json"
    assert _place("missing/tokenizer.json").startswith("/")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "changes text; take a tokenizer that keeps text, or accept .* lossy=True"),
        ({"lossy": True}, r"found \[UNK\], \[CLS\], \[SEP\]; pass eos="),
        ({"lossy": True, "eos": "<none>"}, "eos='<none>' is not in the vocabulary"),
        ({"lossy": True, "eos": "[SEP]", "vocab_size": 5}, "vocab_size=5: expected at least"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, settings, words):
    """With the file, what is wrong, and the argument that mends it."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(shape("wordpiece"))
    with pytest.raises(StepFailed, match=words):
        bring_up(str(tmp_path / "store"), tokenizer(str(path), **settings))


def test_a_bos_that_the_file_would_not_put_first_is_refused(tmp_path):
    """Its post-processor inserts another one; that one may be named."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(shape("llama3"))
    with pytest.raises(StepFailed, match=r"bos='<\|eot_id\|>': .* puts '<\|begin_of_text\|>' \("):
        bring_up(str(tmp_path / "a"), tokenizer(str(path), bos="<|eot_id|>"))
    named, own = (tokenizer(str(path), **more) for more in ({"bos": "<|begin_of_text|>"}, {}))
    ids = [built(tmp_path / "b", node, Tokenizer).result["bos_id"] for node in (named, own)]
    assert ids[0] == ids[1]
