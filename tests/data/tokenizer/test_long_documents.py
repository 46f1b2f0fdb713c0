"""Documents of any length have the ids of encoding them whole."""

import functools
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import long_documents
from data.tokenizer.backends import OracleEncoder
from data.tokenizer.long_documents import cut_points, encode_documents
from data.tokenizer.special_tokens import EOS
from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline.errors import InputError
from tests.data.tokenizer.split_tokenizers import NAMES, documents, tokenizer_json

CUTTING = [
    n for n in NAMES if n not in ("never splits", "splits by counting", "strips", "prepends")
]


@functools.cache
def tokenizer(name):
    return TextTokenizer(tokenizer_json(name))


def points(name, text, piece):
    return cut_points(memoryview(text.encode()), tokenizer(name)._tokenizer, piece)


def in_pieces(name, text, piece):
    """(ids of the pieces, number of pieces)."""
    data = text.encode()
    edges = [0, *points(name, text, piece), len(data)]
    parts = [data[a:b].decode() for a, b in itertools.pairwise(edges)]
    return tokenizer(name).encode_batch(parts)[0], len(parts)


FRAGMENTS = st.one_of(
    st.deferred(lambda: st.sampled_from(documents(60)).map(lambda text: text[:400])),
    st.sampled_from(
        [
            "word " * 40,
            "1234567890" * 20,
            " " * 200,
            "\n" * 90,
            "\u4e2d\u6587\uff0c\u6ca1\u6709\u3002" * 12,
            "aB" * 150,
            EOS,
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(text=st.lists(FRAGMENTS, min_size=4, max_size=25).map("".join))
def test_pieces_have_the_ids_of_the_whole(name, text):
    """Whatever the tokenizer does, and however small the pieces."""
    ids, _ = in_pieces(name, text, 256)
    assert np.array_equal(ids, tokenizer(name).encode_batch([text])[0])


def test_no_cut_borders_on_white_space_alone():
    """A tokenizer that strips a text's ends would drop a long run of spaces at a cut only."""
    text = "aB" * 150 + " " * 400 + "word " * 80
    ids, _ = in_pieces("strips", text, 256)
    assert np.array_equal(ids, tokenizer("strips").encode_batch([text])[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTTING)
def test_prose_is_cut_about_where_wanted(name):
    """No piece is much longer than asked for."""
    text = "\n".join(documents(60))[:200_000]
    cuts = points(name, text, 4096)
    sizes = np.diff([0, *cuts, len(text.encode())])
    assert len(sizes) > 40
    assert sizes.max() < 4096 + 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", ["never splits", "splits by counting", "strips", "prepends"])
def test_what_cannot_be_cut_is_left_whole(name):
    """No split, a split that counts from the beginning, or something done at both ends."""
    text = "some words to look at " * 2000
    assert points(name, text, 1024) == []


@pytest.mark.parametrize("wide", [False, True])
def test_a_mebibyte_among_short_documents(monkeypatch, wide):
    """Order, lengths and ids are those of encoding each whole; batches are bounded."""
    monkeypatch.setattr(long_documents, "BATCH_BYTES", 40_000)
    monkeypatch.setattr(long_documents, "PIECE_BYTES", 10_000)
    prose = "\n".join(documents(60))
    texts = ["", "short", prose[:90_000], EOS, prose[500:41_000], "é" * 30_000, "", "end"]
    given_sizes = []

    class Watching(OracleEncoder):
        def encode(self, texts):
            given_sizes.append(sum(len(t.encode()) for t in texts.to_pylist()))
            return super().encode(texts)

    trained = tokenizer("gpt2")
    array = pa.array(["before", *texts], pa.large_string() if wide else pa.string())[1:]
    encoder = Watching(trained._tokenizer)
    found = list(encode_documents([array[:3], array[3:]], encoder, trained._tokenizer))
    ids, lengths = trained.encode_batch(texts)
    assert np.array_equal(np.concatenate([part for part, _ in found]), ids)
    assert np.array_equal(np.concatenate([part for _, part in found]), lengths)
    # Only the document that is one word of 60,000 bytes is more than a batch.
    assert sorted(given_sizes)[-2] <= 40_000


def test_a_word_that_takes_gigabytes_is_refused(monkeypatch):
    """By how the document begins; one with places to cut is not, however long."""
    monkeypatch.setattr(long_documents, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(long_documents, "PIECE_BYTES", 5_000)
    monkeypatch.setattr(long_documents, "MOST_BYTES", 40_000)
    trained = tokenizer("gpt2")
    prose = "\n".join(documents(60))[:100_000]
    encoder = trained.checked("tokenizers")
    assert len(list(trained.encode_documents([pa.array([prose])], encoder))) == 1
    with pytest.raises(InputError, match=r"begins with 'one ACAC.* has 4\d,\d{3} bytes in which"):
        list(trained.encode_documents([pa.array(["short", "one " + "AC" * 22_000])], encoder))
