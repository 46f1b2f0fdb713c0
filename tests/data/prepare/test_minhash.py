"""MinHash signatures against sets of shingles compared one by one, and against the theory."""

from __future__ import annotations

import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.prepare import minhash
from data.prepare.minhash import band_hashes, signatures

BANDS, ROWS = 14, 8
PIECES = st.sampled_from(
    ["A", "b", "é", "e\u0301", "ß", "7", " ", "\n", "-", "“", "日", "ม", "़", "ﬁ"]
)
TEXTS = st.lists(st.lists(PIECES, max_size=40).map("".join), max_size=6)


def words_by_hand(text):
    """Runs of letters, marks and digits, cut to 64 bytes; Han and Thai one by one."""
    words, run = [], b""
    for character in unicodedata.normalize("NFKC", text).lower() + " ":
        alone = character in "日ม"
        part = unicodedata.category(character)[0] in "LMN"
        if not part or alone:
            words += [run[i : i + 64] for i in range(0, len(run), 64)]
            run = b""
        if alone:
            words.append(character.encode())
        elif part:
            run += character.encode()
    return words


def shingles_by_hand(text, ngram):
    words = words_by_hand(text)
    if not words:
        return [("whole", text)]
    return [tuple(words[i : i + ngram]) for i in range(max(1, len(words) - ngram + 1))]


def jaccard(one, other, ngram=5):
    first, second = (set(shingles_by_hand(text, ngram)) for text in (one, other))
    return len(first & second) / len(first | second)


@given(texts=TEXTS, ngram=st.integers(1, 6))
def test_shingles_are_those_of_a_loop(texts, ngram):
    """Equal hashes for equal shingles, other hashes for others, one for each place."""
    by_hash, by_shingle = {}, {}
    found, first = minhash._shingles(pa.array(texts, pa.string()), ngram)
    assert len(first) == len(texts) + 1
    for text, begin, end in zip(texts, first[:-1], first[1:], strict=True):
        shingles, hashes = shingles_by_hand(text, ngram), found[begin:end]
        assert len(shingles) == len(hashes), text
        for shingle, value in zip(shingles, hashes.tolist(), strict=True):
            assert by_hash.setdefault(value, shingle) == shingle
            assert by_shingle.setdefault(shingle, value) == value


@pytest.mark.parametrize(("text_bytes", "shingles"), [(64, 1), (200, 7), (1 << 17, 1 << 14)])
def test_a_signature_does_not_depend_on_other_texts_and_blocks(monkeypatch, text_bytes, shingles):
    numbers = np.random.default_rng(0)
    texts = [" ".join(map(str, numbers.integers(0, 99, n))) for n in numbers.integers(0, 60, 30)]
    texts += ["x" * 1000, "a b\u00a0c Ünï " * 30, "", "?!"]
    expected = [signatures(pa.array([text]), 3, 16)[0] for text in texts]
    monkeypatch.setattr(minhash, "_BLOCK_BYTES", text_bytes)
    monkeypatch.setattr(minhash, "_BLOCK_SHINGLES", shingles)
    found = signatures(pa.array(["before", *texts, "after"]).slice(1, len(texts)), 3, 16)
    assert np.array_equal(found, expected)


def near_duplicates(pairs, words, seed=0):
    """Texts, and copies of them in which some words are others."""
    numbers = np.random.default_rng(seed)
    firsts = numbers.integers(0, 5_000, (pairs, words))
    seconds = firsts.copy()
    for row in seconds:
        changed = numbers.integers(0, words, numbers.integers(0, max(2, words // 11)))
        row[changed] = numbers.integers(5_000, 9_999, len(changed))
    return [[" ".join(f"w{n}" for n in row) for row in some.tolist()] for some in (firsts, seconds)]


def test_near_duplicates_are_found_as_often_as_the_theory_says():
    """By similarity from 0.5 to 1: a share 1 - (1 - s^r)^b of the pairs, within sampling error."""
    firsts, seconds = near_duplicates(2_500, 40)
    similarity = np.array([jaccard(*pair) for pair in zip(firsts, seconds, strict=True)])
    one, other = (signatures(pa.array(some), 5, BANDS * ROWS) for some in (firsts, seconds))
    agreement = (one == other).mean(axis=1)
    assert abs((agreement - similarity).mean()) < 0.004
    deviation = np.sqrt((similarity * (1 - similarity)).mean() / (BANDS * ROWS))
    assert (agreement - similarity).std() == pytest.approx(deviation, rel=0.1)
    found = (band_hashes(one, BANDS) == band_hashes(other, BANDS)).any(axis=1)
    theory = 1 - (1 - similarity**ROWS) ** BANDS
    for low in np.arange(0.5, 1.0, 0.1):
        inside = (similarity >= low) & (similarity < low + 0.1)
        error = np.sqrt((theory * (1 - theory))[inside].sum())
        assert inside.sum() > 40
        assert abs((found.astype(float) - theory)[inside].sum()) < 4 * error + 1
    assert found[similarity == 1].all()


def test_unlike_texts_are_not_found():
    firsts, _ = near_duplicates(3_000, 40)
    bands = band_hashes(signatures(pa.array(firsts), 5, BANDS * ROWS), BANDS)
    assert len(np.unique(bands)) == bands.size


def test_signatures_are_the_same_in_every_release():
    """Fixed numbers, as outputs of other machines and earlier releases are compared with."""
    texts = pa.array(["To be, or not to be: that is the question", "Ünïcode 日本"])
    found = signatures(texts, 5, 8)
    assert found[:, :2].tolist() == [[171417203, 111068947], [2891393358, 3981213094]]
    assert band_hashes(found, 2).tolist() == [
        [10006404898941294721, 6604511059957594335],
        [3392325942875312689, 11083116391316738713],
    ]
